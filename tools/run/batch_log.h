#pragma once

#include <chrono>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>

#include "kernels/base/error.h"
#include "tools/common/progress.h"
#include "tools/run/options.h"
#include "tools/run/output.h"
#include "tools/run/records.h"

namespace kvlm {

/// How many records failed, by kind.
class Failures {
 public:
  void add(ErrorCode code) { ++kinds_[code]; }
  size_t count() const noexcept;
  /// "3 failed (2 unreadable or damaged, 1 not supported)"
  std::string text() const;

 private:
  std::map<ErrorCode, size_t> kinds_;
};

/// Of an answer that has an error: what its "kind" says.
ErrorCode failure_of(const nlohmann::ordered_json& answer);

/// What a batch says: answers and errors into --out, the first errors, progress and totals on
/// stderr.
class BatchLog {
 public:
  /// `total`: records in all, if that is known.
  BatchLog(const RunOptions& options, const BatchSettings& settings, Output& output,
           std::optional<size_t> total);

  /// Writes an answer: what `result` says, and what the record asked.
  void add_answer(const Record& record, nlohmann::ordered_json result);
  void add_error(const Record& record, ErrorCode code, const std::string& message);
  /// Prints a warning about a record, unless there were many; -q too, because its answer may be of
  /// something else than was meant.
  void warn(const Record& record, const std::string& warning);
  /// `running`: records under way; `tokens`: made for them so far; `part`: how much of their work
  /// is done, in records.
  void show_progress(size_t running, size_t tokens, double part);
  /// A line on stderr, unless -q.
  void say(const std::string& line);
  /// Takes the progress off the terminal, for a message.
  void clear() noexcept { progress_.clear(); }
  /// The totals. Returns the exit status.
  int finish(size_t peak_bytes, bool interrupted);

  size_t answered() const noexcept { return done_ - failures_.count(); }
  /// Of the answers so far, the mean; 0 without one.
  double mean_tokens() const noexcept;

 private:
  using Clock = std::chrono::steady_clock;

  const RunOptions& options_;
  const BatchSettings& settings_;
  Output& output_;
  std::optional<size_t> total_;
  Progress progress_;
  Failures failures_;
  size_t warnings_ = 0;
  size_t done_ = 0;
  size_t tokens_ = 0;
  Clock::time_point started_ = Clock::now();
};

}  // namespace kvlm
