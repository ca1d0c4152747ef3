#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "kvcache/engine/decode_attention.h"
#include "kvcache/engine/sequence.h"
#include "kvcache/engine/store.h"
#include "kvcache/engine/traits.h"

namespace kvlm {

/// Steady steps: decode steps of the same sequences in which every KV head gains a row and nothing
/// else happens, but that on a GPU each row may pack another one. They take up the descriptions of
/// the step before them, and planes count their rows later (catch_up), so that the host has next
/// to nothing to do.
class SteadySteps {
 public:
  SteadySteps(const CacheTraits& traits, SequenceStore& store, DecodeAttention& attention);

  void reserve(const Workload& load) { batch_.reserve(load.sequences); }
  /// Begins a step, and says whether it is steady.
  bool begin(std::span<const StepRows> step);
  /// This step is steady.
  bool steady() const noexcept { return steady_; }
  /// Ends a steady step.
  void end_steady(std::span<const StepRows> step) noexcept;
  /// Ends any other: the next one may be steady.
  void end(std::span<const StepRows> step);
  /// No step follows the last one: workspaces have moved, or a step has failed.
  void forget() noexcept { batch_.clear(); }
  /// No step with this sequence does.
  void forget(SequenceId sequence) noexcept;

  /// KvCache::repetition() of the step that has begun.
  Repetition repetition(std::span<const StepRows> step) const noexcept;
  /// Makes planes count the rows that they hold.
  void catch_up(Sequence& sequence) const noexcept;
  /// Counts the row that a steady step has stored and attended to, in a copy of a KV head.
  void count_newest(HeadState& head) const;

 private:
  bool continues(std::span<const StepRows> step) const noexcept;
  bool can_persist(std::span<const StepRows> step);
  void count_rows(HeadState& head, int layer, int rows) const;
  bool packs_next(const Plane& plane, Part part, int layer) const noexcept;
  size_t bytes_of_row(const Sequence& sequence) const noexcept;
  int steady_rows(const Sequence& sequence) const noexcept;
  int steady_rows_of(const HeadState& head, int layer) const noexcept;
  int rows_until_eviction(const Sequence& sequence, int most) const noexcept;

  const CacheTraits& traits_;
  SequenceStore& store_;
  DecodeAttention& attention_;
  std::vector<SequenceId> batch_;  // whose KV heads are described; empty: nobody's are
  uint64_t number_ = 0;            // of these descriptions
  bool steady_ = false;
};

}  // namespace kvlm
