#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "kernels/base/thread_pool.h"
#include "kernels/base/watch.h"
#include "runtime/clip_file.h"
#include "runtime/prompt.h"
#include "runtime/request.h"
#include "tools/run/record_source.h"

namespace kvlm {

/// A record of which the headers of its images and videos were read.
struct OpenRecord {
  PromptOutline outline;
  std::vector<OpenClip> clips;
  int64_t pixels = 0;  ///< that its images and frames decode to
};

/// A record of a batch with its images and videos read, decoded and cut.
struct PreparedRecord {
  PreparedRequest request;
  std::vector<Clip> clips;
};

/// Who prepares, and how much of it is in memory at a time.
struct PrepareLimits {
  /// That prepare while the caller works; 0: none, front() spreads the work over a pool.
  int threads = 0;
  size_t records = 1;  ///< opened, prepared or being so, and not popped; at least 1
  int64_t pixels = 0;  ///< theirs in all, as decoded; one record by itself may have more
};

/// The records of a batch, opened and prepared shortly before their turn and given in order. With
/// threads of their own they are prepared while the caller does something else, which is for a
/// caller that waits for a GPU. Without, front() prepares as many as the pool has threads when the
/// next one is not there, and nothing runs while the caller works. Which thread prepares a record
/// changes nothing of it.
class PreparedRecords {
 public:
  /// Both are called by any thread. `watch` cancels when the batch is interrupted, or the record is
  /// not wanted any more.
  using Open = std::function<OpenRecord(const Record& record)>;
  using Prepare = std::function<PreparedRecord(const Record& record, const OpenRecord& open,
                                               const Watch& watch)>;

  /// `watch` may be null; it, `source` and `pool` outlive this. Throws Error{kUnsupported} if the
  /// threads cannot be started.
  PreparedRecords(RecordSource& source, Open open, Prepare prepare, const PrepareLimits& limits,
                  ThreadPool& pool, const Watch* watch);
  /// Waits for what is being prepared, which is asked to give up.
  ~PreparedRecords();
  PreparedRecords(const PreparedRecords&) = delete;
  PreparedRecords& operator=(const PreparedRecords&) = delete;

  /// The record whose turn it is, prepared or not; null if there is none yet or any more. `wait`:
  /// null only after the last one, or if `watch` cancels.
  std::shared_ptr<const Record> next(bool wait);
  /// Whether front() returns at once or has to do the work itself.
  bool ready();
  /// What that record, which next() gave, became; waits for it. Throws what opening or preparing it
  /// threw; asked again, it is prepared again. One that finds no memory is tried alone first, with
  /// nothing else prepared.
  PreparedRecord& front();
  /// The record after the one that front() gave, if it is prepared already; else null. It stays
  /// where it is until it was front() and popped, unless front() has to prepare it anew.
  PreparedRecord* after_front();
  /// It is done with: the next one's turn.
  void pop();
  /// Whether memory was short once; since then one record is prepared at a time.
  bool one_at_a_time() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace kvlm
