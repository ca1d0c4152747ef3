#pragma once

#include "kernels/cuda/attend/fused_item.cuh"
#include "kernels/cuda/attend/fused_state.cuh"
#include "kernels/cuda/attend/score_places.cuh"
#include "kernels/cuda/attend/two_pass.h"

// Decode attention in two passes, for KV heads that no kernel of fused_kernel.cuh reads: keys and
// values in different slots, remapped scores, another pair of codecs, or keys scaled by channel
// whose tokens are weighed or evicted in place. A kernel for each codec of keys stores the scores
// of its segments. Then a kernel for each codec of values weighs
// and adds its segments, and writes a softmax state for each split. fused_join.cuh merges them.
namespace kvlm::cuda::packed {

/// Codec of the side that a pass does not read.
template <int kDim_>
struct NoCodec {
  static constexpr int kDim = kDim_;
  static constexpr int kStride = 0;
};
template <int kDim, Scaled kScaled, bool kQuartersApart>
struct StageOf<NoCodec<kDim>, kScaled, kQuartersApart> {};

/// The segments of keys, or of values, of a KV head in shared memory. A kernel reads some of them.
struct SideSegments {
  HeadSegment* segments;
  int count;
  int slots;      // of all
  SlotRange own;  // from the first to the last slot that this kernel reads
  int pass;       // DeviceSegment::pass of those

  /// By all threads of a block. False if the kernel reads none of them.
  __device__ bool take(const AttendArgs& args, int first, int last, int kernel) {
    __shared__ alignas(HeadSegment) std::byte memory[kMostSideSegments * sizeof(HeadSegment)];
    segments = reinterpret_cast<HeadSegment*>(memory);
    count = last - first + 1;
    const auto thread = static_cast<int>(threadIdx.x);
    bool serves = false;
    if (thread < count) {
      segments[thread].take(args, first + thread, thread);
      const DeviceSegment& segment = segments[thread].segment;
      serves = segment.kernel == kernel && segment.slots > 0;
      if (segment.kernel != kernel) segments[thread].facts.pass_by();
    }
    if (__syncthreads_or(static_cast<int>(serves)) == 0) return false;
    slots = 0;
    own = {INT_MAX, 0};
    for (int i = 0; i < count; ++i) {
      const DeviceSegment& segment = segments[i].segment;
      slots = max(slots, segment.first_slot + segment.slots);
      if (segment.kernel != kernel || segment.slots == 0) continue;
      pass = segment.pass;
      own = {min(own.first, segment.first_slot), max(own.end, segment.first_slot + segment.slots)};
    }
    return true;
  }
  /// Place of an item's first slot.
  __device__ int place(const Item& item, Side side) const {
    return segments[item.facts[side].segment()].place_of(item.slot);
  }
};

/// The splits of a block, among those in which the kernel has slots.
struct BlockSplits {
  int first;
  int end;

  __device__ BlockSplits(const SideSegments& side, int blocks) {
    const int split = fused_split_slots(side.slots);
    const int from = side.own.first / split;
    const int splits = (side.own.end + split - 1) / split - from;
    first = from + static_cast<int>(blockIdx.y) * splits / blocks;
    end = from + (static_cast<int>(blockIdx.y) + 1) * splits / blocks;
  }
};

/// Walk of a warp over the items of its parts of a block's splits. Codes are copied an item ahead.
template <Side kSide, class Stages, class Fetch>
class PassWalk {
 public:
  __device__ PassWalk(const AttendArgs& args, const DeviceHead& head, const SideSegments& side,
                      const WarpParts& parts, Stages& stages, const Fetch& fetch)
      : args_(args),
        head_(head),
        side_(side),
        parts_(parts),
        stages_(stages),
        fetch_(fetch),
        items_(args, side.segments, 0, stages.places) {}

  /// Begins the part of turn `turn`.
  __device__ void enter(int turn) {
    SlotRange slots = parts_.slots(turn, side_.slots);
    end_ = min(slots.end, side_.own.end);
    slots.first = min(max(slots.first, side_.own.first), end_);
    at_ = 0;
    remapped_ = RemapSlots(args_, head_, slots.first);
    if (items_.start(slots.first, min(end_, remapped_.end))) fetch();
    end_copies();
  }
  /// Whether the part has another item.
  __device__ bool more() const { return items_.item().slot < end_; }
  /// Calls take(item, stage, row_affine, remap) with the current item, and moves to the next.
  template <class Take>
  __device__ void next(const Take& take) {
    const Item item = items_.item();
    const uint32_t row_affine = row_affine_;
    const int remap = remapped_.remap;
    auto& stage = stages_.stage[at_];
    at_ ^= 1;
    const int slot = item.slot + item.rows;
    if (slot >= remapped_.end) remapped_ = RemapSlots(args_, head_, slot);
    if (items_.next(min(end_, remapped_.end))) fetch();
    end_copies();
    await_copies<1>();
    __syncwarp();
    if (!item.facts[kSide].passed_by()) take(item, stage, row_affine, remap);
    __syncwarp();  // the stage has been read
  }

 private:
  __device__ void fetch() {
    const Place place = items_.place(kSide);  // read before copies: must not wait for them
    fetch_(place, items_.item(), stages_.stage[at_], row_affine_);
  }

  const AttendArgs& args_;
  const DeviceHead& head_;
  const SideSegments& side_;
  const WarpParts& parts_;
  Stages& stages_;
  const Fetch& fetch_;
  ItemWalk<kSide, kSide + 1> items_;
  RemapSlots remapped_;
  uint32_t row_affine_ = 0;
  int end_ = 0;
  int at_ = 0;  // stage of the current item
};

/// Least and greatest score of a warp's slots in one remap.
template <int kGroups>
struct ScoreEnds {
  float least[kGroups];
  float greatest[kGroups];

  __device__ ScoreEnds() { clear(); }
  __device__ void clear() {
#pragma unroll
    for (int group = 0; group < kGroups; ++group)
      least[group] = INFINITY, greatest[group] = -INFINITY;
  }
  __device__ void take(int group, float score) {
    least[group] = fminf(least[group], score);
    greatest[group] = fmaxf(greatest[group], score);
  }
  /// Extends the ranges of a remap to them, and clears them.
  __device__ void put(const AttendArgs& args, ScoreRange* ranges, int first_query,
                      const OperandThread& my) {
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      float low = least[group];
      float high = greatest[group];
#pragma unroll
      for (int offset = 4; offset < 32; offset *= 2) {  // threads of one quarter
        low = fminf(low, __shfl_xor_sync(kAll, low, offset));
        high = fmaxf(high, __shfl_xor_sync(kAll, high, offset));
      }
      const int query = first_query + group * kGroupQueries + my.quarter;
      if (my.row != 0 || query >= args.q_per_kv || low > high) continue;
      atomicMin(&ranges[query].least, ScoreRange::ordered(low));
      atomicMax(&ranges[query].greatest, ScoreRange::ordered(high));
    }
    clear();
  }
};

/// Stores the scores of the keys of a KV head that one kernel reads.
template <class K, Scaled kKeys, int kGroups>
__global__ void __launch_bounds__(kThreads, least_blocks(K::kDim, kGroups))
    score_splits(AttendArgs args, PassArgs pass) {
  using Stages = WarpStages<K, kKeys, NoCodec<K::kDim>, Scaled::kToken>;
  extern __shared__ uint4 dynamic[];
  const auto number = static_cast<int>(blockIdx.x);
  const int first_query = static_cast<int>(blockIdx.z) * kGroups * kGroupQueries;
  if constexpr (requires { K::prepare(); }) K::prepare();
  const int at = head_at(args, number);
  const DeviceHead head = head_of(args, at);
  SideSegments side;
  if (head.fused != 0 || !side.take(args, head.first_keys, head.last_keys, pass.kernel)) {
    return wait_for_earlier();
  }
  const BlockSplits splits(side, pass.blocks);
  if (splits.first == splits.end) return wait_for_earlier();
  const OperandThread my;
  auto* bytes = reinterpret_cast<std::byte*>(dynamic);
  const QuerySources<K, kKeys, kGroups> sources{bytes};
  auto* stages = reinterpret_cast<Stages*>(bytes + pass.sources * kSourceBytes<K, kGroups>);
  const auto fetch_keys = [](const Place& place, const Item& item, auto& stage, uint32_t& affine) {
    fetch<K, kKeys, true>(place, item, kKeySide, stage.keys, affine, item.begins[kKeySide]);
  };
  const WarpParts parts(splits.first, splits.end, my.warp, /*may_be_alone=*/true);
  PassWalk<kKeySide, Stages, decltype(fetch_keys)> walk(args, head, side, parts, stages[my.warp],
                                                        fetch_keys);
  walk.enter(0);
  wait_for_earlier();
  let_next_start();
  sources.fill(pass.sources, side.segments, side.count, head.q, args, first_query);
  Keys<K, kGroups> keys;
  ScoreEnds<kGroups> ends;
  int of_remap = -1;  // remap of `ends`
  for (int turn = 0;;) {
    while (walk.more()) {
      walk.next([&](const Item& item, const auto& stage, uint32_t row_affine, int remap) {
        if (remap != of_remap) {
          if (of_remap >= 0) ends.put(args, ranges_of(args, number, of_remap), first_query, my);
          of_remap = remap;
        }
        Scores<kGroups> scores;
        const auto& source = sources.at(item.facts[kKeySide].source());
        score_item(source, side.segments, item, stage.keys, row_affine, my, keys,
                   item.begins[kKeySide], scores);
        int place = score_place(args, head, at, side.place(item, kKeySide));
        if (static_cast<int>(threadIdx.x % 32) >= item.rows) place = -1;
#pragma unroll
        for (int i = 0; i < 2 * kItemTiles; ++i) {
          const int to = __shfl_sync(kAll, place, my.row + 8 * i);
          if (to < 0) continue;
#pragma unroll
          for (int group = 0; group < kGroups; ++group) {
            const float score = scores.of[i / 2][group][i % 2];
            const int query = first_query + group * kGroupQueries + my.quarter;
            if (query < args.q_per_kv) head.weights[query * args.score_stride + to] = score;
            if (remap >= 0) ends.take(group, score);
          }
        }
      });
    }
    if (++turn == parts.turns()) break;
    walk.enter(turn);
  }
  if (of_remap >= 0) ends.put(args, ranges_of(args, number, of_remap), first_query, my);
}

/// Scores of an item as the first pass has stored them, remapped.
template <int kGroups>
class StoredScores {
 public:
  __device__ StoredScores(const AttendArgs& args, const DeviceHead& head, int number, int at,
                          int first_query, const OperandThread& my)
      : args_(args), head_(head), number_(number), at_(at), first_query_(first_query), my_(my) {}

  /// Of the item whose first slot has `place`. False if the item holds no token: `scores` are then
  /// weights of 0, and the softmax must not be updated.
  __device__ bool take(const Item& item, int place, int remap, Scores<kGroups>& scores) {
    if (remap != remap_) follow(remap);
    uint32_t there = ~0u >> (kItemSlots - item.rows);
    if (head_.placed) there &= live(place, item.rows);
#pragma unroll
    for (int i = 0; i < 2 * kItemTiles; ++i) {
      const int row = my_.row + 8 * i;
      const bool is_there = (there >> row & 1) != 0;
#pragma unroll
      for (int group = 0; group < kGroups; ++group) {
        const float* from = head_.weights + query(group) * args_.score_stride + place;
        const float nothing = there == 0 ? 0 : -INFINITY;
        scores.of[i / 2][group][i % 2] = is_there ? remapped_[group](from[row]) : nothing;
      }
    }
    return there != 0;
  }

 private:
  __device__ int query(int group) const {
    return min(first_query_ + group * kGroupQueries + my_.quarter, args_.q_per_kv - 1);
  }
  __device__ void follow(int remap) {
    remap_ = remap;
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      remapped_[group] = RemappedScores(args_, head_, number_, remap, query(group), false);
    }
  }
  /// Which slots from `place` on hold a token.
  __device__ uint32_t live(int place, int rows) const {
    const auto row = static_cast<int>(threadIdx.x % 32);
    const int64_t of_head = static_cast<int64_t>(at_) * args_.places;
    return __ballot_sync(kAll, row < rows && args_.key_at[of_head + place + row] >= 0);
  }

  const AttendArgs& args_;
  const DeviceHead& head_;
  int number_;
  int at_;
  int first_query_;
  const OperandThread& my_;
  int remap_ = -1;
  RemappedScores remapped_[kGroups];
};

/// Softmax states of the values of a KV head that one kernel reads.
template <class V, Scaled kValues, int kGroups>
__global__ void __launch_bounds__(kThreads, least_blocks(V::kDim, kGroups))
    add_splits(AttendArgs args, FusedArgs fused, PassArgs pass) {
  using Stages = WarpStages<NoCodec<V::kDim>, Scaled::kToken, V, kValues>;
  using Space = SplitSpace<Stages, V, kGroups>;
  extern __shared__ uint4 dynamic[];
  const auto number = static_cast<int>(blockIdx.x);
  const int first_query = static_cast<int>(blockIdx.z) * kGroups * kGroupQueries;
  if constexpr (requires { V::prepare(); }) V::prepare();
  const int at = head_at(args, number);
  const DeviceHead head = head_of(args, at);
  SideSegments side;
  if (head.fused != 0 || !side.take(args, head.last_keys + 1, head.last_values, pass.kernel)) {
    return wait_for_earlier();
  }
  const BlockSplits splits(side, pass.blocks);
  if (splits.first == splits.end) return wait_for_earlier();
  const OperandThread my;
  const Space space{reinterpret_cast<std::byte*>(dynamic)};
  Stages& warp = space.stages(my.warp);
  const auto fetch_values = [](const Place& place, const Item& item, auto& stage,
                               uint32_t& affine) {
    fetch<V, kValues, false>(place, item, kValueSide, stage.values, affine, item.ends[kValueSide]);
  };
  const bool may_be_alone = !Space::kInStages && fused_parts_are_long(side.slots);
  const WarpParts parts(splits.first, splits.end, my.warp, may_be_alone);
  PassWalk<kValueSide, Stages, decltype(fetch_values)> walk(args, head, side, parts, warp,
                                                            fetch_values);
  walk.enter(0);
  wait_for_earlier();
  let_next_start();
  const PartOf part(my.lower);
  StoredScores<kGroups> stored(args, head, number, at, first_query, my);
  for (int turn = 0; turn < parts.turns(); ++turn) {
    ItemSums<V, kValues, kGroups> sums;
    OnlineSoftmax<kGroups> softmax;
    while (walk.more()) {
      walk.next([&](const Item& item, auto& stage, uint32_t row_affine, int remap) {
        Scores<kGroups> scores;
        float factor[kGroups];
        const bool some = stored.take(item, side.place(item, kValueSide), remap, scores);
        if (some && softmax.weigh(scores, factor)) sums.shrink(factor);
        const std::byte* codes = warp.wide_values(stage, item);
        sums.add(side.segments, item, stage.values, codes, row_affine, scores, part, my,
                 item.ends[kValueSide]);
      });
    }
    const auto& values = sums.finish(my);
    if (turn + 1 < parts.turns()) walk.enter(turn + 1);  // copies overlap the merge
    const int split = side.pass * fused.head_splits + parts.split(turn);
    const SplitAt to(args, fused, number, split, first_query, V::kDim);
    if (parts.alone(turn)) {
      add_part<true>(to, parts.part(turn), space, softmax, values, my);
    } else {
      write_split<true>(args, to, false, first_query, space, softmax, values, my);
    }
  }
}

template <class K, Scaled kKeys>
int KeyKernel<K, kKeys>::shared_bytes(int sources, int groups) {
  const auto of = [&](auto constant) {
    constexpr int kGroups = decltype(constant)::value;
    using Stages = WarpStages<K, kKeys, NoCodec<K::kDim>, Scaled::kToken>;
    return sources * kSourceBytes<K, kGroups> + kWarps * static_cast<int>(sizeof(Stages));
  };
  return with_groups_of<K::kDim>(groups, of);
}

template <class K, Scaled kKeys>
void KeyKernel<K, kKeys>::launch(const AttendArgs& args, const FusedArgs&, const PassArgs& pass,
                                 dim3 grid, int groups, Stream& stream) {
  const auto bytes = static_cast<size_t>(shared_bytes(pass.sources, groups));
  with_groups_of<K::kDim>(groups, [&](auto constant) {
    launch_early("DecodeTable::attend", score_splits<K, kKeys, decltype(constant)::value>, grid,
                 kThreads, bytes, stream, args, pass);
    return 0;
  });
}

template <class V, Scaled kValues>
int ValueKernel<V, kValues>::shared_bytes(int, int groups) {
  return with_groups_of<V::kDim>(groups, [&](auto constant) {
    using Stages = WarpStages<NoCodec<V::kDim>, Scaled::kToken, V, kValues>;
    return SplitSpace<Stages, V, decltype(constant)::value>::kBytes;
  });
}

template <class V, Scaled kValues>
void ValueKernel<V, kValues>::launch(const AttendArgs& args, const FusedArgs& fused,
                                     const PassArgs& pass, dim3 grid, int groups, Stream& stream) {
  const auto bytes = static_cast<size_t>(shared_bytes(0, groups));
  with_groups_of<V::kDim>(groups, [&](auto constant) {
    launch_early("DecodeTable::attend", add_splits<V, kValues, decltype(constant)::value>, grid,
                 kThreads, bytes, stream, args, fused, pass);
    return 0;
  });
}

}  // namespace kvlm::cuda::packed
