#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/attend_packed.h"
#include "kernels/cpu/packed_slots.h"
#include "kernels/cpu/vnni/layout.h"
#include "kernels/cpu/vnni/target.h"

KVLM_BEFORE_VNNI()
namespace kvlm::cpu::vnni {

/// The softmax weights of a tile's rows as bytes, times the rows' scales where these are per token.
/// Zero points meet no codes: what they come to is a sum of weights per query, kept here as long as
/// rows share their factors.
class SplitWeights {
 public:
  ///   memory  must outlive this
  SplitWeights(const PackedFormat& format, const SlotWeights& weights, BumpAllocator& memory);

  /// Forgets the totals.
  void clear();
  /// Takes the weights of the next `count` rows; those up to a multiple of 16 are 0.
  void gather(SlotWalk& walk, size_t count);
  /// Makes bytes of the gathered weights of up to kMostQueries queries from `first` on, and adds
  /// them to the totals.
  ///   scales, zeros  (groups, kValueRows); read only if per token
  void split(size_t first, const float* scales, const float* zeros);

  /// (kMostQueries, kValueRows): a dword per row, four rows' low bytes, middle bytes, high bytes
  /// and nothing. Of the queries split last.
  const int32_t* bytes(size_t group) const { return bytes_ + group * kMostQueries * kValueRows; }
  /// (kMostQueries,): what a level is worth.
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
  size_t count_ = 0;  // of rows gathered, up to a multiple of 16
  float* totals_;     // (queries, groups, 16)
  float* gathered_;   // (queries, kValueRows)
  int32_t* bytes_;    // (groups, kMostQueries, kValueRows / 4, 4)
  float* step_;       // (groups, kMostQueries)
};

}  // namespace kvlm::cpu::vnni
KVLM_AFTER_VNNI()
