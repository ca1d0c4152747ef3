#include "tools/run/batch.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <exception>
#include <new>
#include <optional>

#include "kernels/base/error.h"
#include "kernels/base/human_bytes.h"
#include "kernels/base/printable.h"
#include "runtime/failure_kind.h"
#include "runtime/prompt.h"
#include "tools/common/messages.h"
#include "tools/common/program.h"
#include "tools/common/progress.h"
#include "tools/common/visual_options.h"
#include "tools/run/context.h"
#include "tools/run/output.h"
#include "tools/run/picture_hint.h"
#include "tools/run/pictures.h"
#include "tools/run/prepared_records.h"
#include "tools/run/records.h"
#include "tools/run/report.h"
#include "tools/run/settings.h"
#include "tools/run/shard.h"
#include "tools/run/videos.h"
#include "vision/image.h"

// `vlm-run --batch`: keeps one generator busy with up to batch_size records at a time. Records are
// prepared ahead (prepared_records.h), admitted when the cache has room, and written when they are
// finished. A record that fails becomes a result with an error; the run goes on.
namespace kvlm {

namespace {

using Json = nlohmann::ordered_json;

/// Threads that prepare records beside a GPU, at most; fewer where --threads says so.
constexpr int kMostPreparing = 16;
/// Records, and pixels of their pictures and frames as decoded, that are prepared ahead at most. A
/// pixel takes three bytes until its picture is cut, and then three floats if none was resized.
constexpr size_t kMostAhead = 64;
constexpr int64_t kMostPixelsAhead = int64_t{1} << 27;

constexpr const char* kNoMemory = "out of memory; scale its images down or use a smaller batch";

/// The exception being handled, as the error of one record. Passes on what ends the run: a device
/// that is lost is lost for the records that follow, too.
std::string error_of_record() {
  try {
    throw;
  } catch (const Error& error) {
    if (error.code() == ErrorCode::kDevice || error.code() == ErrorCode::kCancelled) throw;
    return error.what();
  } catch (const std::bad_alloc&) {
    return kNoMemory;
  } catch (const std::exception& error) {
    return fmt::format("unexpected failure: {}; please report it", error.what());
  }
}

/// All records through one generator, up to batch_size of them at a time.
class Batch {
 public:
  Batch(const RunOptions& options, const BatchSettings& settings, Session& session,
        std::vector<Record> records, Output& output)
      : options_(options),
        settings_(settings),
        session_(session),
        records_(std::move(records)),
        output_(output),
        cache_(session.make_cache(static_cast<int>(std::clamp<size_t>(
                                      records_.size(), 1, static_cast<size_t>(options.batch_size))),
                                  rows_of_longest(), options.kv_memory)),
        generator_(session.model(), *cache_, session.stream()),
        progress_("batch", records_.size(), options.quiet),
        prepared_(
            std::move(pixels_),
            [this](size_t place, const Watch& watch) { return prepare(place, watch); },
            prepare_limits(), session.stream().pool(), session.stream().watch()) {}

  int run() {
    show_progress();
    while (!interrupted()) {
      while (!interrupted() && next_ < records_.size() && running_.size() < limit_) start_next();
      if (running_.empty()) break;
      generator_.step();
      note_memory();
      generator_.deliver();
      for (Running& entry : running_) ++entry.tokens;
      collect();
      show_progress();
    }
    progress_.finish();
    if (!options_.quiet) say_totals();
    if (interrupted()) return kExitInterrupted;
    return failed_ > 0 ? kExitFailed : 0;
  }

 private:
  using Clock = std::chrono::steady_clock;

  struct Running {
    int key;
    const Record* record;
    std::vector<Clip> clips;
    std::vector<std::string> warnings;
    size_t tokens = 1;  // made, the prefill's included
  };

  /// The rows of the record that needs most, of those that can be served; the others get their
  /// error. Of pictures and videos only headers are read. Notes what each record decodes to, and
  /// opens its videos.
  int rows_of_longest() {
    int longest = 1;
    pixels_.assign(records_.size(), 0);
    clips_.resize(records_.size());
    for (size_t i = 0; i < records_.size(); ++i) {
      Record& record = records_[i];
      if (!record.error.empty()) continue;
      try {
        longest = std::max(longest, rows_of(record, i));
      } catch (const std::exception&) {
        record.error = error_of_record();
      }
    }
    return longest;
  }

  int rows_of(const Record& record, size_t place) {
    Model& model = session_.model();
    std::vector<PictureShape> shapes;
    for (const std::string& image : record.images) {
      const ImageInfo info = probe_image(image);
      shapes.push_back({info.height, info.width, image_name(image)});
      pixels_[place] += int64_t{info.height} * info.width;
    }
    clips_[place] = choose_clips(record);
    const std::vector<Clip> clips = clips_of(clips_[place]);
    for (OpenClip& clip : clips_[place]) {
      const VideoInfo& info = clip.clip.info;
      pixels_[place] += int64_t{info.height} * info.width * std::ssize(clip.clip.frames);
      clip.rest();
    }
    return request_rows(
        model, conversation(record), visual_texts(model, shapes, clips),
        options_.max_tokens.value_or(model.defaults().max_tokens), name_of(record),
        cure_of_long_prompt(clips, "give the record fewer images or a shorter prompt"));
  }

  std::vector<OpenClip> choose_clips(const Record& record) {
    VideoFiles videos;
    for (const std::string& video : record.videos) videos.push_back(open_video(video));
    return choose_frames(session_.model(), std::move(videos), options_.sampling);
  }

  /// What a record asks: its own prompt, else -p, else for a caption.
  std::string question(const Record& record) {
    if (!record.prompt.empty()) return record.prompt;
    if (!options_.prompt.empty()) return options_.prompt;
    return default_question(session_.model(), record.images.size(), record.videos.size());
  }

  std::vector<ChatMessage> conversation(const Record& record) {
    const Model& model = session_.model();
    std::vector<ChatMessage> messages = opening(options_);
    messages.push_back(user_message(question(record), record.images.size(), model.image_token(),
                                    record.videos.size(), model.video_token()));
    return messages;
  }

  /// On a GPU threads of their own prepare while it works; on the CPU a batch's own loops have all
  /// of --threads, so records are prepared between them.
  PrepareLimits prepare_limits() const {
    const bool gpu = session_.device().kind != DeviceKind::kCpu;
    const int threads = std::min(session_.threads(), kMostPreparing);
    const size_t ahead = static_cast<size_t>(std::max(options_.batch_size, threads));
    // One more than that: the record whose turn it is.
    return {gpu ? threads : 0, std::min(ahead, kMostAhead) + 1, kMostPixelsAhead};
  }

  /// By any thread.
  PreparedRecord prepare(size_t place, const Watch& watch) {
    const Record& record = records_[place];
    if (!record.error.empty()) throw Error(ErrorCode::kInvalidArgument, record.error);
    Model& model = session_.model();
    GenerationRequest request = base_request(options_, model);
    request.id = name_of(record);
    request.messages = conversation(record);
    for (const std::string& image : record.images) {
      give_up_if_cancelled(&watch);
      request.images.push_back(load_image(image));
    }
    for (const OpenClip& clip : clips_[place]) {
      give_up_if_cancelled(&watch);
      request.videos.push_back(clip.decode());
    }
    std::vector<std::string> warnings = warnings_of(request.images, request.videos);
    return {prepare_request(model, std::move(request), model.decoder().max_positions(), &watch),
            clips_of(clips_[place]), std::move(warnings)};
  }

  void start_next() {
    const Record& record = records_[next_];
    PreparedRecord* next_record = nullptr;
    try {
      hint_about(record);
      PreparedRecord& prepared = prepared_.front();
      note_short_memory();
      if (ahead_) next_record = prepared_.after_front();
      const int key = generator_.admit(std::move(prepared.request), {},
                                       next_record != nullptr ? &next_record->request : nullptr);
      note_memory();
      for (const std::string& warning : prepared.warnings) {
        progress_.clear();
        print_message("vlm-run: warning: {}\n", warning);
      }
      running_.push_back(
          {key, &record, std::move(prepared.clips), std::move(prepared.warnings)});
    } catch (const std::exception&) {
      if (interrupted() && is_cancellation(std::current_exception())) return;  // the next start's
      const bool no_memory = is_out_of_memory(std::current_exception());
      if (no_memory && next_record != nullptr && next_record->request.encoded) {
        ahead_ = false;  // its pictures may have what was missing: try again without
        next_record->request.encoded.reset();
        return;
      }
      if (no_memory && !running_.empty()) {
        limit_ = running_.size();  // there is room for no more at a time; wait for one to leave
        return;
      }
      const std::string error = error_of_record();
      next();
      write_error(record, error);
      return;
    }
    next();
    generator_.deliver();
    collect();
  }

  void next() {
    prepared_.pop();
    clips_[next_++].clear();
  }

  void note_short_memory() {
    if (said_short_ || options_.quiet || !prepared_.one_at_a_time()) return;
    said_short_ = true;
    progress_.clear();
    print_message(
        "batch: out of memory to prepare several records at once; preparing one at a time from "
        "here on\n");
  }

  void hint_about(const Record& record) {
    if (!record.error.empty()) return;
    for (const std::string& image : record.images) hint_about(image);
    for (const std::string& video : record.videos) hint_about(video);
  }

  void hint_about(const std::string& image) {
    if (!hint_.wants(image)) return;
    progress_.clear();
    hint_.say();
  }

  void collect() {
    for (auto entry = running_.begin(); entry != running_.end();) {
      if (!generator_.finished(entry->key)) {
        ++entry;
        continue;
      }
      const GenerationResult result = generator_.take(entry->key);
      if (result.finish_reason == "cancelled") {  // the next start does it
        entry = running_.erase(entry);
        continue;
      }
      Json json{{"id", entry->record->id}};
      json.update(result_json(result, session_, session_.model(), cache_->spec(), entry->clips,
                              entry->warnings));
      // Steps are shared, so that the rate of one record would be no rate of anything.
      if (options_.batch_size > 1) json["timings"].erase("decode_tps");
      json.update(asked_of(*entry->record));
      json["settings"] = settings_.flags;
      output_.append(json);
      entry = running_.erase(entry);
      served_tokens_ += result.tokens.size();
      ++done_;
      show_progress();
      limit_ = static_cast<size_t>(options_.batch_size);  // its memory is free: try again
    }
  }

  void say_totals() const {
    const double seconds = std::chrono::duration<double>(Clock::now() - started_).count();
    const auto tokens = static_cast<double>(served_tokens_);
    print_message(
        "batch: {} of {} records done, {} failed; {} tokens in {:.1f} s ({:.1f} tokens/s), cache "
        "at most {}\n",
        done_, records_.size(), failed_, served_tokens_, seconds,
        seconds > 0 ? tokens / seconds : 0, human_bytes(peak_bytes_));
  }

  void note_memory() { peak_bytes_ = std::max(peak_bytes_, cache_->bytes()); }

  static std::string name_of(const Record& record) {
    if (!record.id.is_null()) return fmt::format("record {}", printable(record.id.dump()));
    return fmt::format("{} {}", record.listed ? "image" : "line", record.line);
  }

  void write_error(const Record& record, const std::string& message) {
    Json json{{"id", record.id}};
    if (record.id.is_null()) json[record.listed ? "picture" : "line"] = record.line;
    json["error"] = message;
    output_.append(json);
    if (!options_.quiet) {
      progress_.clear();
      const std::string who = name_of(record);  // which some messages start with already
      print_message("vlm-run: {}{}\n", message.starts_with(who) ? "" : who + ": ", message);
    }
    ++failed_;
    ++done_;
    show_progress();
  }

  void show_progress() {
    size_t tokens = 0;
    double under_way = 0;  // of records as long as those that were served
    const size_t served = done_ - failed_;
    for (const Running& entry : running_) {
      tokens += entry.tokens;
      if (served == 0 || served_tokens_ == 0) continue;
      const double mean = static_cast<double>(served_tokens_) / static_cast<double>(served);
      under_way += std::min(1.0, static_cast<double>(entry.tokens) / mean);
    }
    progress_.update({done_, failed_, under_way},
                     running_.empty()
                         ? std::string()
                         : fmt::format("{} running, {} tokens", running_.size(), tokens));
  }

  const RunOptions& options_;
  const BatchSettings& settings_;
  Session& session_;
  std::vector<Record> records_;
  std::vector<int64_t> pixels_;               // of each, until prepared_ has them
  std::vector<std::vector<OpenClip>> clips_;  // of each; opened once, at rest until decoded
  Output& output_;
  std::unique_ptr<KvCache> cache_;
  Generator generator_;
  Progress progress_;
  std::vector<Running> running_;
  bool ahead_ = true;  // the next record's pictures are encoded behind a prompt
  size_t limit_ = static_cast<size_t>(options_.batch_size);
  size_t next_ = 0;
  size_t done_ = 0;
  size_t failed_ = 0;
  size_t served_tokens_ = 0;
  size_t peak_bytes_ = 0;
  bool said_short_ = false;
  PictureHint hint_{options_};
  Clock::time_point started_ = Clock::now();
  PreparedRecords prepared_;  // the last: its threads use the others
};

/// Leaves the records of options.shard, and says so.
void take_part(std::vector<Record>& records, const RunOptions& options) {
  const Shard& shard = options.shard;
  if (shard.count == 1) return;
  const size_t all = records.size();
  std::vector<Record> part;
  for (size_t place = 0; place < all; ++place) {
    if (shard.has(place)) part.push_back(std::move(records[place]));
  }
  records = std::move(part);
  if (options.quiet) return;
  print_message("batch: shard {}/{}{}: {} of {} records, into {}\n", shard.index, shard.count,
                options.shard_told
                    ? " (set by the launcher of this process; --shard 1/1 turns sharding off)"
                    : "",
                records.size(), all, printable(shard_path(options.batch_out, shard)));
}

}  // namespace

std::function<int(Session&)> prepare_batch(const RunOptions& options) {
  const BatchSettings settings = batch_settings(options);
  std::vector<Record> records = read_records(options.batch_in, options.batch_out);
  if ((options.sampling.fps || options.sampling.frames) &&
      std::ranges::all_of(records, &std::vector<std::string>::empty, &Record::videos)) {
    throw Error(
        ErrorCode::kInvalidArgument,
        fmt::format("{} applies to videos, and no record of {} has one; drop it",
                    options.sampling.fps ? "--fps" : "--frames", printable(options.batch_in)));
  }
  if (records.empty() && !options.quiet) {
    print_message("batch: no record in {}\n", printable(options.batch_in));
  }
  const std::string path = shard_path(options.batch_out, options.shard);
  require_same_count(options.batch_out, options.shard);
  take_part(records, options);
  const auto output = std::make_shared<Output>(path, settings);
  const size_t all = records.size();
  std::erase_if(records, [&](const Record& record) { return output->has(record); });
  if (!options.quiet) {
    const std::string name = printable(path);
    if (output->repaired()) print_message("batch: removed an incomplete last line of {}\n", name);
    if (records.size() < all) {
      print_message("batch: {} of {} records are in {} already{}\n", all - records.size(), all,
                    name, records.empty() ? "; nothing is left to do" : "");
    }
    if (output->unsettled() > 0) {
      print_message(
          "batch: {} answer{} in {} do not record their flags; assumed to be the current ones\n",
          output->unsettled(), output->unsettled() == 1 ? "" : "s", name);
    }
  }
  if (records.empty()) {
    output->retry({});
    return {};
  }
  return [&options, path, output, settings, records = std::move(records)](Session& session) {
    const size_t again = output->retry(records);
    if (again > 0 && !options.quiet) {
      print_message("batch: {} record{} of {} failed before and {} tried again\n", again,
                    again == 1 ? "" : "s", printable(path), again == 1 ? "is" : "are");
    }
    return Batch(options, settings, session, records, *output).run();
  };
}

}  // namespace kvlm
