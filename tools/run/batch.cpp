#include "tools/run/batch.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <chrono>
#include <exception>
#include <map>
#include <new>
#include <optional>

#include "kernels/base/error.h"
#include "kernels/base/human_bytes.h"
#include "kernels/base/printable.h"
#include "runtime/failure_kind.h"
#include "tools/common/input_text.h"
#include "tools/common/messages.h"
#include "tools/common/program.h"
#include "tools/common/progress.h"
#include "tools/run/batch_room.h"
#include "tools/run/output.h"
#include "tools/run/picture_hint.h"
#include "tools/run/prepared_records.h"
#include "tools/run/record_source.h"
#include "tools/run/records.h"
#include "tools/run/report.h"
#include "tools/run/requests.h"
#include "tools/run/settings.h"
#include "tools/run/shard.h"

// `vlm-run --batch`: keeps one generator busy with as many records at a time as memory (batch_room.h)
// or --batch-size allows. Records are prepared ahead (prepared_records.h), admitted when the cache has
// room, and written when they are finished. A record that fails becomes a result with an error; the
// run goes on.
namespace kvlm {

namespace {

using Json = nlohmann::ordered_json;

/// Threads that prepare records beside a GPU, at most; fewer where --threads says so.
constexpr int kMostPreparing = 16;
/// Records, and pixels of their pictures and frames as decoded, that are prepared ahead at most. A
/// pixel takes three bytes until its picture is cut, and then three floats if none was resized.
constexpr size_t kMostAhead = 64;
constexpr int64_t kMostPixelsAhead = int64_t{1} << 27;

/// Steps of decode between two prompts as long as no record is answered.
constexpr int kStepsBetweenPrompts = 8;

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

ErrorCode code_of_record() {
  try {
    throw;
  } catch (const Error& error) {
    return error.code();
  } catch (const std::bad_alloc&) {
    return ErrorCode::kOutOfMemory;
  } catch (const std::exception&) {
    return ErrorCode::kDevice;
  }
}

/// How many records failed, by kind.
class Failures {
 public:
  /// Whether to print this one: all lines would bury everything else.
  bool add(ErrorCode code) {
    ++kinds_[code];
    return ++count_ <= kPrinted;
  }
  size_t count() const noexcept { return count_; }
  bool is_first_unprinted() const noexcept { return count_ == kPrinted + 1; }
  /// "3 failed (2 unreadable or damaged, 1 not supported)"
  std::string text() const {
    std::vector<std::string> kinds;
    for (const auto& [code, count] : kinds_) kinds.push_back(fmt::format("{} {}", count, noun(code)));
    return fmt::format("{} failed{}", count_,
                       count_ == 0 ? "" : fmt::format(" ({})", fmt::join(kinds, ", ")));
  }

 private:
  static constexpr size_t kPrinted = 20;

  static const char* noun(ErrorCode code) {
    switch (code) {
      case ErrorCode::kCorruptFile:
        return "unreadable or damaged";
      case ErrorCode::kUnsupported:
        return "not supported";
      case ErrorCode::kInvalidArgument:
        return "not answerable as asked";
      case ErrorCode::kOutOfMemory:
        return "without memory";
      default:
        return "unexpected";
    }
  }

  std::map<ErrorCode, size_t> kinds_;
  size_t count_ = 0;
};

/// All records through one generator, up to a number of them at a time.
class Batch {
 public:
  /// `total`: records in all, if that is known.
  Batch(const RunOptions& options, const BatchSettings& settings, Session& session,
        RecordSource& source, std::optional<size_t> total, Output& output)
      : options_(options),
        settings_(settings),
        session_(session),
        total_(total),
        output_(output),
        requests_(options, session.model()),
        room_(session, options, total),
        progress_("batch", total.value_or(0), options.quiet || !total),
        prepared_(
            source, [this](const Record& record) { return requests_.open(record); },
            [this](const Record& record, const OpenRecord& open, const Watch& watch) {
              return requests_.prepare(record, open, watch);
            },
            prepare_limits(), session.stream().pool(), session.stream().watch()) {}

  int run() {
    show_progress();
    while (!interrupted()) {
      admit();
      if (running_.empty()) {
        if (!prepared_.next(/*wait=*/true)) break;
        continue;
      }
      generator().step();
      ++steps_;
      note_memory();
      generator().deliver();
      for (Running& entry : running_) ++entry.tokens;
      collect();
      show_progress();
    }
    progress_.finish();
    if (!options_.quiet) say_totals();
    if (interrupted()) return kExitInterrupted;
    return failures_.count() > 0 ? kExitFailed : 0;
  }

 private:
  using Clock = std::chrono::steady_clock;

  struct Running {
    int key;
    std::shared_ptr<const Record> record;
    std::vector<Clip> clips;
    size_t tokens = 1;  // made, the prefill's included
  };

  Generator& generator() noexcept { return room_.generator(); }

  /// Starts records while there is room. Until the first answer is there, decode takes its steps
  /// between prompts, so that it is not late.
  void admit() {
    while (!interrupted() && running_.size() < room_.limit()) {
      const bool idle = running_.empty();
      if (idle ? !prepared_.next(/*wait=*/true) : !prepared_.ready()) return;
      const bool answered = done_ > failures_.count();
      if (!idle && !answered && steps_ < kStepsBetweenPrompts) return;
      steps_ = 0;
      if (!start_next()) return;
    }
  }

  /// On a GPU threads of their own prepare while it works; on the CPU a batch's own loops have all
  /// of --threads, so records are prepared between them.
  PrepareLimits prepare_limits() const {
    const bool gpu = session_.device().kind != DeviceKind::kCpu;
    const int threads = std::min(session_.threads(), kMostPreparing);
    const size_t ahead = std::max(room_.limit(), static_cast<size_t>(threads));
    // One more than that: the record whose turn it is.
    return {gpu ? threads : 0, std::min(ahead, kMostAhead) + 1, kMostPixelsAhead};
  }

  /// Starts the next record, or writes why it cannot be. False if it has to wait.
  bool start_next() {
    const std::shared_ptr<const Record> record = prepared_.next(/*wait=*/false);
    PreparedRecord* next_record = nullptr;
    int prompt_tokens = 0;
    int max_tokens = 0;
    try {
      hint_about(*record);
      PreparedRecord& prepared = prepared_.front();
      note_short_memory();
      prompt_tokens = static_cast<int>(prepared.request.prompt.ids.size());
      max_tokens = prepared.request.request.max_tokens;
      room_.begin(prompt_tokens);
      say_size(prompt_tokens, max_tokens);
      if (ahead_) next_record = prepared_.after_front();
      const int key = generator().admit(std::move(prepared.request), {},
                                        next_record != nullptr ? &next_record->request : nullptr);
      note_memory();
      running_.push_back({key, record, std::move(prepared.clips)});
    } catch (const std::exception&) {
      if (interrupted() && is_cancellation(std::current_exception())) return false;  // the next run's
      const bool no_memory = is_out_of_memory(std::current_exception());
      if (no_memory && next_record != nullptr && next_record->request.encoded) {
        ahead_ = false;  // its images may have what was missing: try again without
        next_record->request.encoded.reset();
        return true;
      }
      if (no_memory && !running_.empty()) {
        note_few();
        room_.wait_for_one_of(running_.size());
        return false;
      }
      if (no_memory && room_.shrink(prompt_tokens, max_tokens)) return true;  // a smaller cache leaves more for the rest
      const ErrorCode code = code_of_record();
      const std::string message = error_of_record();
      prepared_.pop();
      write_error(*record, code, message);
      return true;
    }
    prepared_.pop();
    generator().deliver();
    collect();
    return true;
  }

  /// Says once what --batch-size auto comes to.
  void say_size(int prompt_tokens, int max_tokens) {
    if (said_size_ || options_.quiet || options_.batch_size) return;
    said_size_ = true;
    progress_.clear();
    print_message("batch: {}\n", room_.describe(prompt_tokens, max_tokens));
  }

  /// Says once that fewer run together than were asked for.
  void note_few() {
    if (said_few_ || options_.quiet || !options_.batch_size) return;
    said_few_ = true;
    progress_.clear();
    print_message(
        "batch: memory holds {} sequences of these records at once, not {}; running as many as fit "
        "(give {} for more)\n",
        running_.size(), *options_.batch_size,
        options_.kv_memory ? "a larger --kv-memory" : "a --kv of fewer bits");
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
      if (!generator().finished(entry->key)) {
        ++entry;
        continue;
      }
      const GenerationResult result = generator().take(entry->key);
      if (result.finish_reason == "cancelled") {  // the next run does it
        entry = running_.erase(entry);
        continue;
      }
      output_.append(answer(*entry, result));
      entry = running_.erase(entry);
      served_tokens_ += result.tokens.size();
      ++done_;
      show_progress();
      room_.one_left();
    }
  }

  Json answer(const Running& entry, const GenerationResult& result) {
    Json json{{"id", entry.record->id}};
    if (options_.lean) {
      json.update({{"text", result.text}, {"finish_reason", result.finish_reason}});
      return json;
    }
    json.update(result_json(result, session_, session_.model(), room_.spec(), entry.clips));
    // Steps are shared, so that the rate of one record would be no rate of anything.
    if (room_.most() > 1) json["timings"].erase("decode_tps");
    json.update(asked_of(*entry.record));
    json["settings"] = settings_.flags;
    return json;
  }

  void say_totals() const {
    const double seconds = std::chrono::duration<double>(Clock::now() - started_).count();
    const auto rate = [seconds](size_t count) {
      return seconds > 0 ? static_cast<double>(count) / seconds : 0;
    };
    print_message(
        "batch: {}{} records done, {}; {} tokens in {:.1f} s ({:.1f} records/s, {:.1f} tokens/s), "
        "cache at most {}\n",
        done_, total_ ? fmt::format(" of {}", *total_) : "", failures_.text(), served_tokens_,
        seconds, rate(done_ - failures_.count()), rate(served_tokens_), human_bytes(peak_bytes_));
  }

  void note_memory() { peak_bytes_ = std::max(peak_bytes_, room_.used_bytes()); }

  void write_error(const Record& record, ErrorCode code, const std::string& message) {
    Json json{{"id", record.id}};
    if (record.id.is_null()) json[record.listed ? "picture" : "line"] = record.line;
    json["error"] = message;
    output_.append(json);
    const bool print = failures_.add(code);
    if (!options_.quiet && (print || failures_.is_first_unprinted())) {
      progress_.clear();
      const std::string who = Requests::name_of(record);  // which some messages start with already
      if (print) {
        print_message("vlm-run: {}{}\n", message.starts_with(who) ? "" : who + ": ", message);
      } else {
        print_message("batch: further errors are in {} alone\n", output_.name());
      }
    }
    ++done_;
    show_progress();
  }

  void show_progress() {
    size_t tokens = 0;
    double under_way = 0;  // of records as long as those that were served
    const size_t served = done_ - failures_.count();
    for (const Running& entry : running_) {
      tokens += entry.tokens;
      if (served == 0 || served_tokens_ == 0) continue;
      const double mean = static_cast<double>(served_tokens_) / static_cast<double>(served);
      under_way += std::min(1.0, static_cast<double>(entry.tokens) / mean);
    }
    progress_.update({done_, failures_.count(), under_way},
                     running_.empty()
                         ? std::string()
                         : fmt::format("{} running, {} tokens", running_.size(), tokens));
  }

  const RunOptions& options_;
  const BatchSettings& settings_;
  Session& session_;
  std::optional<size_t> total_;
  Output& output_;
  Requests requests_;
  BatchRoom room_;
  Progress progress_;
  std::vector<Running> running_;
  bool ahead_ = true;  // the next record's images are encoded during a prompt
  size_t done_ = 0;
  Failures failures_;
  size_t served_tokens_ = 0;
  size_t peak_bytes_ = 0;
  bool said_short_ = false;
  bool said_few_ = false;
  bool said_size_ = false;
  PictureHint hint_{options_};
  Clock::time_point started_ = Clock::now();
  int steps_ = 0;  // since the latest prompt
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

/// Standard input answered record by record as its lines come.
std::function<int(Session&)> prepare_stream(const RunOptions& options,
                                            const BatchSettings& settings,
                                            std::shared_ptr<Output> output) {
  return [&options, settings, output](Session& session) {
    size_t place = 0;
    StreamedRecords records([&](const Record& record) {
      if (!options.shard.has(place++)) return true;
      if (output->has(record)) return true;
      output->retry({record});
      return false;
    });
    return Batch(options, settings, session, records, std::nullopt, *output).run();
  };
}

}  // namespace

std::function<int(Session&)> prepare_batch(const RunOptions& options) {
  const BatchSettings settings = batch_settings(options);
  const std::string path = shard_path(options.batch_out, options.shard);
  if (options.batch_in == kStandardInput) {
    return prepare_stream(options, settings, std::make_shared<Output>(path, settings, options.lean));
  }
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
  require_same_count(options.batch_out, options.shard);
  take_part(records, options);
  const auto output = std::make_shared<Output>(path, settings, options.lean);
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
  return [&options, path, output, settings,
          records = std::move(records)](Session& session) mutable {
    const size_t again = output->retry(records);
    if (again > 0 && !options.quiet) {
      print_message("batch: {} record{} of {} failed before and {} tried again\n", again,
                    again == 1 ? "" : "s", printable(path), again == 1 ? "is" : "are");
    }
    const size_t count = records.size();
    ListedRecords source(std::move(records));
    return Batch(options, settings, session, source, count, *output).run();
  };
}

}  // namespace kvlm
