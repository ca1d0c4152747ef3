#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/attend_packed.h"
#include "kernels/cpu/packed_slots.h"
#include "kernels/cpu/vnni/layout.h"
#include "kernels/cpu/vnni/target.h"

KVLM_BEFORE_VNNI()
namespace kvlm::cpu::vnni {

/// The softmax weights of a tile's rows, split into bytes; with scales per token, times these. Zero
/// points only need the sum of weights per query, which is kept here over all rows with common
/// factors.
class SplitWeights {
 public:
  ///   memory  must outlive this
  SplitWeights(const PackedFormat& format, const SlotWeights& weights, BumpAllocator& memory);

  /// Clears the totals.
  void clear();
  /// Reads the weights of the next `count` rows; padded to a multiple of 16 with 0.
  void gather(SlotWalk& walk, size_t count);
  /// Splits the gathered weights of up to kMostQueries queries from `first` on, and adds them to
  /// the totals.
  ///   scales, zeros  (groups, kValueRows); read only if per token
  void split(size_t first, const float* scales, const float* zeros);

  /// (kMostQueries, kValueRows) of the queries split last: per four rows a dword of low bytes, of
  /// middle bytes, of high bytes, and an unused one.
  const int32_t* bytes(size_t group) const { return bytes_ + group * kMostQueries * kValueRows; }
  /// (kMostQueries,): value of one level.
  const float* step(size_t group) const { return step_ + group * kMostQueries; }
  /// (16,): sums to the query's weights times zero points, or to its weights if not per token.
  const float* total(size_t query, size_t group) const {
    return totals_ + (query * groups_ + group) * 16;
  }

 private:
  template <size_t kQueries, bool kToken>
  void split(size_t first, size_t group, const float* scales, const float* zeros);
  template <size_t kQueries, bool kToken>
  void measure(size_t first, size_t group, const float* scales, const float* zeros, float* factor);
  template <bool kToken>
  void split(size_t first, size_t group, const float* scales, const float* zeros);

  const SlotWeights& weights_;
  bool per_token_;
  size_t groups_;     // 1 unless per token
  size_t count_ = 0;  // gathered rows, rounded up to a multiple of 16
  float* totals_;     // (queries, groups, 16)
  float* gathered_;   // (queries, kValueRows)
  int32_t* bytes_;    // (groups, kMostQueries, kValueRows / 4, 4)
  float* step_;       // (groups, kMostQueries)
};

}  // namespace kvlm::cpu::vnni
KVLM_AFTER_VNNI()
