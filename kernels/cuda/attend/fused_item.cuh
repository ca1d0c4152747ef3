#pragma once

#include "kernels/cuda/attend/fused_keys.cuh"
#include "kernels/cuda/attend/fused_stage.cuh"
#include "kernels/cuda/attend/fused_values.cuh"

// One item in a warp, for fused_kernel.cuh and two_pass.cuh: fetch() copies its codes to shared
// memory, score_item() scores its keys (fused_keys.cuh), ItemSums adds its values
// (fused_values.cuh).
namespace kvlm::cuda::packed {

constexpr float kWeightUp = 1 << 8;       // weight scale: products with scales below 32 are halves
constexpr float kWeightUpLarge = 0.125f;  // weight scale for larger scales
constexpr float kLargeScale = 32;

/// Inverse of the weight scale (kWeightUp or kWeightUpLarge), without a division.
__device__ inline float undone(float up) {
  return up == kWeightUp ? 1 / kWeightUp : 1 / kWeightUpLarge;
}

template <class K, int kGroups>
constexpr int kSourceBytes = static_cast<int>((sizeof(QuerySource<K, kGroups>) + 15) / 16 * 16);

/// Queries of a thread block in shared memory: one basis for each DeviceSegment::source.
template <class K, Scaled kKeys, int kGroups>
struct QuerySources {
  using Source = QuerySource<K, kGroups>;
  std::byte* from;

  __device__ Source& at(int i) const {
    return *reinterpret_cast<Source*>(from + i * kSourceBytes<K, kGroups>);
  }
  /// Prepares those of the first `sources` bases that the `key_segments` segments of keys use. By
  /// all threads.
  __device__ void fill(int sources, const HeadSegment* segments, int key_segments,
                       const float* head_q, const AttendArgs& args, int first_query) const {
    for (int i = 0; i < sources; ++i) {
      int met = -1;  // a segment of keys in this basis, packed if possible
      for (int segment = 0; segment < key_segments; ++segment) {
        if (segments[segment].segment.source != i || segments[segment].facts.passed_by()) continue;
        if (met < 0 || segments[met].segment.rows != nullptr) met = segment;
      }
      if (met < 0) continue;
      const float* q = segments[met].segment.q != nullptr ? segments[met].segment.q : head_q;
      at(i).fill(q, scaled_group(kKeys) != 0, args.q_per_kv, first_query, args.scale);
    }
    __syncthreads();
  }
};

/// Begins to copy the keys or values of an item to shared memory: codes, scales and zero points.
/// F16 tokens are not copied. Scales by token go to registers: `row_affine` is this thread's token.
///   channels  whether to copy scales by channel, which the items of a block share
template <class C, Scaled kScaled, bool kApart>
__device__ __forceinline__ void fetch(const Place& place, const Item& item, Side side,
                                      StageOf<C, kScaled, kApart>& to, uint32_t& row_affine,
                                      bool channels = true) {
  const int rows = item.facts[side].coded() ? item.rows : 0;
  const int block = item.block[side];
  const int row = item.row[side];
  to.copy_codes(place.codes + int64_t{block} * place.code_stride, row, rows);
  const int64_t at = int64_t{block} * place.scale_stride;
  if constexpr (kScaled == Scaled::kToken) {
    constexpr bool kZeros = codecs::CodeOf<C>::kZeroStored;
    row_affine = row_meta(place.meta != 0, place.scales + at,
                          (kZeros ? place.zeros : place.scales) + at, row, rows);
    if constexpr (!kZeros) row_affine ^= 0x80000000u;  // minus the scale
  } else if (scaled_group(kScaled) != 0 || channels) {
    to.copy_meta(place.scales + at, place.zeros + at, row, rows, place.meta);
  }
}

/// F16 token `slot` of a segment.
template <int kDim>
__device__ const std::byte* full_row(const HeadSegment& segment, int slot) {
  return segment.segment.rows +
         static_cast<int64_t>(slot - segment.segment.first_slot) * (kDim * 2);
}

/// Scores of an item whose keys are in `stage`, or f16.
///   keys   the queries as the previous item left them
///   anew   this item begins another block, so the queries are prepared again
template <class K, Scaled kKeys, int kGroups>
__device__ __forceinline__ void score_item(const QuerySource<K, kGroups>& source,
                                           const HeadSegment* segments, const Item& item,
                                           const StageOf<K, kKeys, true>& stage,
                                           uint32_t row_affine, const OperandThread& my,
                                           Keys<K, kGroups>& keys, bool anew,
                                           Scores<kGroups>& scores) {
  constexpr int kZerosAt = StageOf<K, kKeys, true>::kZerosAt;
  const SegmentFacts of = item.facts[kKeySide];
  const std::byte* codes = stage.rows(item.row[kKeySide]);
  if (!of.coded()) {
    if (anew) keys.take_natural(source, my);
    keys.score_rows(full_row<K::kDim>(segments[of.segment()], item.slot), item.rows, my, scores);
  } else if constexpr (kKeys == Scaled::kChannel) {
    if (anew) keys.fold(source, segments, of, stage.meta, stage.meta + kZerosAt, my);
    keys.template score_codes<false>(codes, source, 0, my, scores);
  } else {
    if (anew) keys.take_coded(source, my);
    if constexpr (kKeys == Scaled::kToken) {
      keys.template score_codes<true>(codes, source, row_affine, my, scores);
    } else {
      const std::byte* scales = stage.group_scales(item.row[kKeySide]);
      keys.template score_grouped<scale_groups(kKeys, K::kDim)>(codes, scales, scales + kZerosAt,
                                                                source, my, scores);
    }
  }
}

/// Stores the scores of an item for each slot whose bit in `there` is 1.
///   place  of the item's first slot, for key and value
template <int kGroups>
__device__ __forceinline__ void store_scores(const AttendArgs& args, const DeviceHead& head,
                                             int first_query, uint32_t there, int place,
                                             const OperandThread& my,
                                             const Scores<kGroups>& scores) {
#pragma unroll
  for (int i = 0; i < 2 * kItemTiles; ++i) {
    const int row = my.row + 8 * i;
    if ((there >> row & 1) == 0) continue;
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      const int query = first_query + group * kGroupQueries + my.quarter;
      if (query >= args.q_per_kv) continue;
      head.weights[query * args.score_stride + place + row] = scores.of[i / 2][group][i % 2];
    }
  }
}

/// Masks the slots of an item whose bit in `there` is 0.
template <int kGroups>
__device__ __forceinline__ void leave_out(uint32_t there, const OperandThread& my,
                                          Scores<kGroups>& scores) {
#pragma unroll
  for (int i = 0; i < 2 * kItemTiles; ++i) {
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      if ((there >> (my.row + 8 * i) & 1) == 0) scores.of[i / 2][group][i % 2] = -INFINITY;
    }
  }
}

/// Weighted sums of the values of a warp's items.
template <class V, Scaled kValues, int kGroups>
class ItemSums {
 public:
  using Sums = Values<V, kValues, kGroups>;
  using Stage = StageOf<V, kValues, false>;

  /// Multiplies the sums by `factor`.
  __device__ void shrink(const float (&factor)[kGroups]) { values_.shrink(factor); }

  /// Adds an item whose values are in `stage`, or f16.
  ///   codes  from wide_values()
  ///   ends   the next item may have other scales by channel
  __device__ __forceinline__ void add(const HeadSegment* segments, const Item& item,
                                      const Stage& stage, const std::byte* codes,
                                      uint32_t row_affine, const Scores<kGroups>& weights,
                                      const PartOf& part, const OperandThread& my,
                                      bool ends = true) {
    const SegmentFacts of = item.facts[kValueSide];
    const bool coded = of.coded();
    const std::byte* scales = stage.group_scales(item.row[kValueSide]);
    const bool large = coded && has_large_scale(scales, row_affine);
    raise(coded, __any_sync(kAll, large) ? kWeightUpLarge : kWeightUp, my);
    const typename Sums::Weights raised(weights, up_, part, my);
    if (!coded) {
      return values_.add_rows(full_row<V::kDim>(segments[of.segment()], item.slot), item.rows,
                              raised, my);
    }
    values_.add_codes(codes, scales, scales + Stage::kZerosAt, row_affine, raised, my);
    if constexpr (kValues == Scaled::kChannel) {
      if (!ends) return;
      values_.finish_channels(undone(up_), segments[of.segment()].format, stage.meta,
                              stage.meta + Stage::kZerosAt, my);
      added_ = kFresh;
    }
  }

  /// The sums of all items.
  __device__ const Sums& finish(const OperandThread& my) {
    if (added_ != kFresh) values_.bring_down(added_ == kCodes, undone(up_), my);
    return values_;
  }

 private:
  static __device__ bool has_large_scale(const std::byte* scales, uint32_t row_affine) {
    if constexpr (kValues == Scaled::kToken) {
      return fabsf(two_floats(row_affine).x) >= kLargeScale;
    } else if constexpr (scaled_group(kValues) != 0) {
      const GroupHalves<scale_groups(kValues, V::kDim)> s(scales,
                                                          static_cast<int>(threadIdx.x % 32));
      __half2 most = __habs2(*reinterpret_cast<const __half2*>(&s.pairs[0]));
#pragma unroll
      for (size_t i = 1; i < sizeof s / 4; ++i) {
        most = __hmax2(most, __habs2(*reinterpret_cast<const __half2*>(&s.pairs[i])));
      }
      return any_at_least(most, kLargeScale);
    } else {
      return false;
    }
  }

  /// Converts the sums to the units of the next item: codes or f16 tokens, and its weight scale.
  __device__ void raise(bool coded, float up, const OperandThread& my) {
    if (added_ != kFresh && ((added_ == kCodes) != coded || up != up_)) {
      values_.bring_down(added_ == kCodes, undone(up_), my);
      values_.bring_up(coded, up);
    }
    added_ = coded ? kCodes : kRows;
    up_ = up;
  }

  Sums values_;
  enum { kFresh, kRows, kCodes } added_ = kFresh;  // units of `values_`
  float up_ = kWeightUp;                           // and their weight scale
};

}  // namespace kvlm::cuda::packed
