#include "tools/run/batch.h"

#include <fmt/format.h>

#include <algorithm>
#include <exception>
#include <new>
#include <optional>

#include "kernels/base/error.h"
#include "runtime/failure_kind.h"
#include "tools/common/program.h"
#include "tools/run/batch_log.h"
#include "tools/run/batch_room.h"
#include "tools/run/picture_hint.h"
#include "tools/run/prepared_records.h"
#include "tools/run/report.h"
#include "tools/run/requests.h"

// `vlm-run --batch`: keeps one generator busy with as many records at a time as memory
// (batch_room.h) or --batch-size allows. Records are prepared ahead (prepared_records.h), admitted
// when the cache has room, and written when they are finished. A record that fails becomes a result
// with an error; the run goes on.
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

/// All records through one generator, up to a number of them at a time.
class Batch {
 public:
  Batch(const RunOptions& options, BatchJob& job, Session& session)
      : options_(options),
        session_(session),
        requests_(options, session.model()),
        room_(session, options, job.total),
        log_(options, job.settings, *job.output, job.total),
        prepared_(
            *job.source, [this](const Record& record) { return requests_.open(record); },
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
    return log_.finish(peak_bytes_, interrupted());
  }

 private:
  struct Running {
    int key;
    std::shared_ptr<const Record> record;
    std::vector<Clip> clips;
    int max_tokens;
    std::vector<std::string> warnings;
    size_t tokens = 1;  // made, the prefill's included
  };

  Generator& generator() noexcept { return room_.generator(); }

  /// Starts records while there is room. Until the first answer is there, decode takes its steps
  /// between prompts, so that it is not late.
  void admit() {
    while (!interrupted() && running_.size() < room_.limit()) {
      const bool idle = running_.empty();
      if (idle ? !prepared_.next(/*wait=*/true) : !prepared_.ready()) return;
      if (!idle && log_.answered() == 0 && steps_ < kStepsBetweenPrompts) return;
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
      std::vector<std::string> warnings = prepared.request.warnings;
      const int key = generator().admit(std::move(prepared.request), {},
                                        next_record != nullptr ? &next_record->request : nullptr);
      note_memory();
      for (const std::string& warning : warnings) log_.warn(*record, warning);
      running_.push_back({key, record, std::move(prepared.clips), max_tokens, std::move(warnings)});
    } catch (const std::exception&) {
      if (interrupted() && is_cancellation(std::current_exception()))
        return false;  // the next run's
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
      if (no_memory && room_.shrink(prompt_tokens, max_tokens))
        return true;  // a smaller cache leaves more for the rest
      const ErrorCode code = code_of_record();
      const std::string message = error_of_record();
      prepared_.pop();
      log_.add_error(*record, code, message);
      show_progress();
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
    log_.say("batch: " + room_.describe(prompt_tokens, max_tokens));
  }

  /// Says once that fewer run together than were asked for.
  void note_few() {
    if (said_few_ || options_.quiet || !options_.batch_size) return;
    said_few_ = true;
    log_.say(fmt::format(
        "batch: memory holds {} sequences of these records at once, not {}; running as many as fit "
        "(give {} for more)",
        running_.size(), *options_.batch_size,
        options_.kv_memory ? "a larger --kv-memory" : "a --kv of fewer bits"));
  }

  void note_short_memory() {
    if (said_short_ || options_.quiet || !prepared_.one_at_a_time()) return;
    said_short_ = true;
    log_.say(
        "batch: out of memory to prepare several records at once; preparing one at a time from "
        "here on");
  }

  void hint_about(const Record& record) {
    if (!record.error.empty()) return;
    for (const std::string& image : record.images) hint_about(image);
    for (const std::string& video : record.videos) hint_about(video);
  }

  void hint_about(const std::string& image) {
    if (!hint_.wants(image)) return;
    log_.clear();
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
      for (std::string& warning :
           full_context_warning(result, session_.model(), entry->max_tokens)) {
        log_.warn(*entry->record, warning);
        entry->warnings.push_back(std::move(warning));
      }
      Json json = result_json(result, session_, session_.model(), room_.spec(), entry->clips,
                              entry->warnings);
      // Steps are shared, so that the rate of one record would be no rate of anything.
      if (room_.most() > 1) json["timings"].erase("decode_tps");
      log_.add_answer(*entry->record, std::move(json));
      entry = running_.erase(entry);
      show_progress();
      room_.one_left();
    }
  }

  void note_memory() { peak_bytes_ = std::max(peak_bytes_, room_.used_bytes()); }

  void show_progress() {
    size_t tokens = 0;
    double part = 0;  // of records as long as those that were answered
    const double mean = log_.mean_tokens();
    for (const Running& entry : running_) {
      tokens += entry.tokens;
      if (mean > 0) part += std::min(1.0, static_cast<double>(entry.tokens) / mean);
    }
    log_.show_progress(running_.size(), tokens, part);
  }

  const RunOptions& options_;
  Session& session_;
  Requests requests_;
  BatchRoom room_;
  BatchLog log_;
  std::vector<Running> running_;
  bool ahead_ = true;  // the next record's images are encoded during a prompt
  size_t peak_bytes_ = 0;
  bool said_short_ = false;
  bool said_few_ = false;
  bool said_size_ = false;
  PictureHint hint_{options_};
  int steps_ = 0;             // since the latest prompt
  PreparedRecords prepared_;  // the last: its threads use the others
};

}  // namespace

int run_batch(const RunOptions& options, BatchJob& job, Session& session) {
  job.begin(options);
  return Batch(options, job, session).run();
}

}  // namespace kvlm
