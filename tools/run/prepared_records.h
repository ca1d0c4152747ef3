#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "kernels/base/thread_pool.h"
#include "kernels/base/watch.h"
#include "runtime/request.h"

namespace kvlm {

/// A record of a batch with its pictures and videos read, decoded and cut.
struct PreparedRecord {
  PreparedRequest request;
  std::vector<Clip> clips;
  std::vector<std::string> warnings;
};

/// Who prepares, and how much of it is in memory at a time.
struct PrepareLimits {
  /// That prepare beside the caller; 0: none, front() spreads the work over a pool.
  int threads = 0;
  size_t records = 1;  ///< prepared or being so, and not popped; at least 1
  int64_t pixels = 0;  ///< theirs in all, as decoded; one record by itself may have more
};

/// The records of a batch, prepared before their turn and given in order. With threads of their own
/// they are prepared while the caller does something else, which is for a caller that waits for a
/// GPU. Without, front() prepares as many as the pool has threads when the next one is not there,
/// and nothing runs beside the caller's own loops. Which thread prepares a record changes nothing
/// of it.
class PreparedRecords {
 public:
  /// Prepares one record, given by its place; called by any thread. `watch` cancels when the batch
  /// is interrupted, or the record is not wanted any more.
  using Prepare = std::function<PreparedRecord(size_t record, const Watch& watch)>;

  /// `pixels[i]`: what record i decodes to. `watch` may be null; it and `pool` outlive this. Throws
  /// Error{kUnsupported} if the threads cannot be started.
  PreparedRecords(std::vector<int64_t> pixels, Prepare prepare, const PrepareLimits& limits,
                  ThreadPool& pool, const Watch* watch);
  /// Waits for what is being prepared, which is told to give up.
  ~PreparedRecords();
  PreparedRecords(const PreparedRecords&) = delete;
  PreparedRecords& operator=(const PreparedRecords&) = delete;

  /// The record whose turn it is; waits for it. Throws what preparing it threw; asked again, it is
  /// prepared again. One that finds no memory is tried alone first, with nothing else prepared.
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
