#include "tools/run/batch_log.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <string_view>
#include <vector>

#include "kernels/base/human_bytes.h"
#include "tools/common/messages.h"
#include "tools/common/program.h"
#include "tools/run/requests.h"

// What a batch says: lines of --out, the first errors and warnings, and the totals.
namespace kvlm {

namespace {

using Json = nlohmann::ordered_json;

constexpr size_t kPrinted = 20;  // errors: all of them would bury everything else

/// A kind of failure, in JSON and in the totals.
struct Kind {
  ErrorCode code;
  std::string_view key;
  std::string_view noun;
};

constexpr std::array kKinds = {
    Kind{ErrorCode::kCorruptFile, "file", "unreadable or damaged"},
    Kind{ErrorCode::kUnsupported, "unsupported", "not supported"},
    Kind{ErrorCode::kInvalidArgument, "request", "not answerable as asked"},
    Kind{ErrorCode::kOutOfMemory, "memory", "without memory"},
    Kind{ErrorCode::kDevice, "unexpected", "unexpected"}};

const Kind& kind_of(ErrorCode code) {
  const auto place = std::ranges::find(kKinds, code, &Kind::code);
  return place == kKinds.end() ? kKinds.back() : *place;
}

}  // namespace

ErrorCode failure_of(const Json& answer) {
  const auto place = std::ranges::find(kKinds, answer.value("kind", ""), &Kind::key);
  return place == kKinds.end() ? ErrorCode::kDevice : place->code;
}

size_t Failures::count() const noexcept {
  size_t count = 0;
  for (const auto& [code, of_kind] : kinds_) count += of_kind;
  return count;
}

std::string Failures::text() const {
  std::vector<std::string> kinds;
  for (const auto& [code, count] : kinds_) {
    kinds.push_back(fmt::format("{} {}", count, kind_of(code).noun));
  }
  return fmt::format("{} failed{}", count(),
                     kinds.empty() ? "" : fmt::format(" ({})", fmt::join(kinds, ", ")));
}

BatchLog::BatchLog(const RunOptions& options, const BatchSettings& settings, Output& output,
                   std::optional<size_t> total)
    : options_(options),
      settings_(settings),
      output_(output),
      total_(total),
      progress_("batch", total.value_or(0), options.quiet || !total) {}

void BatchLog::add_answer(const Record& record, Json result) {
  tokens_ += result.at("generated_tokens").get<size_t>();
  ++done_;
  Json json{{"id", record.id}};
  if (options_.lean) {
    json.update({{"text", result["text"]}, {"finish_reason", result["finish_reason"]}});
    if (result.contains("warnings")) json["warnings"] = result["warnings"];
  } else {
    json.update(result);
    json.update(asked_of(record));
    json["settings"] = settings_.flags;
  }
  if (!record.meta.is_null()) json["meta"] = record.meta;
  output_.append(json);
}

void BatchLog::add_error(const Record& record, ErrorCode code, const std::string& message) {
  Json json{{"id", record.id}};
  if (record.id.is_null()) json[record.listed ? "picture" : "line"] = record.line;
  if (!record.meta.is_null()) json["meta"] = record.meta;
  json["error"] = message;
  json["kind"] = kind_of(code).key;
  output_.append(json);
  failures_.add(code);
  ++done_;
  if (failures_.count() <= kPrinted) {
    const std::string who = Requests::name_of(record);  // which some messages start with already
    say(fmt::format("vlm-run: {}{}", message.starts_with(who) ? "" : who + ": ", message));
  } else if (failures_.count() == kPrinted + 1) {
    say(fmt::format("batch: further errors are in {} alone", output_.name()));
  }
}

void BatchLog::warn(const Record& record, const std::string& warning) {
  if (++warnings_ > kPrinted + 1) return;
  progress_.clear();
  if (warnings_ > kPrinted) {
    print_message("batch: further warnings are in {} alone\n", output_.name());
  } else {
    print_message("vlm-run: warning: {}: {}\n", Requests::name_of(record), warning);
  }
}

void BatchLog::show_progress(size_t running, size_t tokens, double part) {
  progress_.update(
      {done_, failures_.count(), part},
      running == 0 ? std::string() : fmt::format("{} running, {} tokens", running, tokens));
}

void BatchLog::say(const std::string& line) {
  if (options_.quiet) return;
  progress_.clear();
  print_message("{}\n", line);
}

double BatchLog::mean_tokens() const noexcept {
  return answered() == 0 ? 0 : static_cast<double>(tokens_) / static_cast<double>(answered());
}

int BatchLog::finish(size_t peak_bytes, bool interrupted) {
  progress_.finish();
  const double seconds = std::chrono::duration<double>(Clock::now() - started_).count();
  const auto rate = [seconds](size_t count) {
    return seconds > 0 ? static_cast<double>(count) / seconds : 0;
  };
  const std::string totals = fmt::format(
      "batch: {}{} records done, {}; {} tokens in {:.1f} s ({:.1f} records/s, {:.1f} tokens/s){}",
      done_, total_ ? fmt::format(" of {}", *total_) : "", failures_.text(), tokens_, seconds,
      rate(answered()), rate(tokens_),
      peak_bytes == 0 ? "" : ", cache at most " + human_bytes(peak_bytes));
  if (options_.quiet && failures_.count() > 0) {
    print_message("vlm-run: {}; their errors are in {}\n", failures_.text(), output_.name());
  }
  say(totals);
  if (interrupted) return kExitInterrupted;
  return failures_.count() > 0 ? kExitFailed : 0;
}

}  // namespace kvlm
