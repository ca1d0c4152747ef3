#pragma once

#include "kernels/cuda/attend/fused_item.cuh"
#include "kernels/cuda/attend/fused_state.cuh"
#include "kernels/cuda/attend/score_places.cuh"
#include "kernels/cuda/attend/two_pass.h"

// The attention of fused_kernel.cuh in two passes, for lanes whose keys and values do not lie in
// the same slots, or whose scores are remapped before they become weights. A kernel for each codec
// of keys stores the scores of the runs that it reads; then a kernel for each codec of values
// weighs and adds those that it reads, and has a softmax state for each split. join_splits() merges
// the states of all of them.
namespace kvlm::cuda::packed {

/// The side that a pass leaves out.
template <int kDim_>
struct NoCodec {
  static constexpr int kDim = kDim_;
  static constexpr int kStride = 0;
};
template <int kDim, Scaled kScaled, bool kQuartersApart>
struct StageOf<NoCodec<kDim>, kScaled, kQuartersApart> {};

/// The runs of one side of a lane in shared memory, of which a block serves some.
struct SideRuns {
  LaneRun* runs;
  int count;
  int slots;      // of the side
  SlotRange own;  // from the first slot of those that the block serves to the last
  int pass;       // their DeviceRun::pass

  /// By all threads of a block. False if none of them are this kernel's.
  __device__ bool take(const AttendArgs& args, int first, int last, int kernel) {
    __shared__ alignas(LaneRun) std::byte memory[kMostSideRuns * sizeof(LaneRun)];
    runs = reinterpret_cast<LaneRun*>(memory);
    count = last - first + 1;
    const auto thread = static_cast<int>(threadIdx.x);
    bool serves = false;
    if (thread < count) {
      runs[thread].take(args, first + thread, thread);
      const DeviceRun& run = runs[thread].run;
      serves = run.kernel == kernel && run.slots > 0;
      if (run.kernel != kernel) runs[thread].facts.pass_by();
    }
    if (__syncthreads_or(static_cast<int>(serves)) == 0) return false;
    slots = 0;
    own = {INT_MAX, 0};
    for (int i = 0; i < count; ++i) {
      const DeviceRun& run = runs[i].run;
      slots = max(slots, run.first_slot + run.slots);
      if (run.kernel != kernel || run.slots == 0) continue;
      pass = run.pass;
      own = {min(own.first, run.first_slot), max(own.end, run.first_slot + run.slots)};
    }
    return true;
  }
  /// Where the first row of an item lies.
  __device__ int place(const Item& item, Side side) const {
    return runs[item.facts[side].run()].place_of(item.slot);
  }
};

/// The splits that a block takes of those in which a kernel has slots.
struct BlockSplits {
  int first;
  int end;

  __device__ BlockSplits(const SideRuns& side, int blocks) {
    const int split = fused_split_slots(side.slots);
    const int from = side.own.first / split;
    const int splits = (side.own.end + split - 1) / split - from;
    first = from + static_cast<int>(blockIdx.y) * splits / blocks;
    end = from + (static_cast<int>(blockIdx.y) + 1) * splits / blocks;
  }
};

/// One pass of a warp over the items of its parts of a block's splits, whose codes are fetched an
/// item ahead.
template <Side kSide, class Stages, class Fetch>
class PassWalk {
 public:
  __device__ PassWalk(const AttendArgs& args, const DeviceLane& lane, const SideRuns& side,
                      const WarpParts& parts, Stages& stages, const Fetch& fetch)
      : args_(args),
        lane_(lane),
        side_(side),
        parts_(parts),
        stages_(stages),
        fetch_(fetch),
        items_(args, side.runs, 0, stages.places) {}

  /// Begins a part of a turn.
  __device__ void enter(int turn) {
    SlotRange slots = parts_.slots(turn, side_.slots);
    end_ = min(slots.end, side_.own.end);
    slots.first = min(max(slots.first, side_.own.first), end_);
    at_ = 0;
    remapped_ = RemapSlots(args_, lane_, slots.first);
    if (items_.start(slots.first, min(end_, remapped_.end))) fetch();
    end_copies();
  }
  /// Whether the part has an item more.
  __device__ bool more() const { return items_.item().slot < end_; }
  /// Calls take(item, stage, row_affine, remap) with the item at hand, and goes to the next.
  template <class Take>
  __device__ void next(const Take& take) {
    const Item item = items_.item();
    const uint32_t row_affine = row_affine_;
    const int remap = remapped_.remap;
    auto& stage = stages_.stage[at_];
    at_ ^= 1;
    const int slot = item.slot + item.rows;
    if (slot >= remapped_.end) remapped_ = RemapSlots(args_, lane_, slot);
    if (items_.next(min(end_, remapped_.end))) fetch();
    end_copies();
    await_copies<1>();
    __syncwarp();
    if (!item.facts[kSide].passed_by()) take(item, stage, row_affine, remap);
    __syncwarp();  // the stage has been read
  }

 private:
  __device__ void fetch() {
    const Place place = items_.place(kSide);  // before copies, for which it must not wait
    fetch_(place, items_.item(), stages_.stage[at_], row_affine_);
  }

  const AttendArgs& args_;
  const DeviceLane& lane_;
  const SideRuns& side_;
  const WarpParts& parts_;
  Stages& stages_;
  const Fetch& fetch_;
  ItemWalk<kSide, kSide + 1> items_;
  RemapSlots remapped_;
  uint32_t row_affine_ = 0;
  int end_ = 0;
  int at_ = 0;  // the stage of the item at hand
};

/// The least and greatest score of a warp's slots of one remap.
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
  /// Makes the ranges of a remap reach them, and forgets them.
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

/// Stores the scores of the keys of a lane that one kernel reads.
template <class K, Scaled kKeys, int kGroups>
__global__ void __launch_bounds__(kThreads, least_blocks(K::kDim, kGroups))
    score_splits(AttendArgs args, PassArgs pass) {
  using Stages = WarpStages<K, kKeys, NoCodec<K::kDim>, Scaled::kToken>;
  extern __shared__ uint4 dynamic[];
  const auto number = static_cast<int>(blockIdx.x);
  const int first_query = static_cast<int>(blockIdx.z) * kGroups * kGroupQueries;
  if constexpr (requires { K::prepare(); }) K::prepare();
  const int at = lane_at(args, number);
  const DeviceLane lane = lane_of(args, at);
  SideRuns side;
  if (lane.fused != 0 || !side.take(args, lane.first_keys, lane.last_keys, pass.kernel)) {
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
  PassWalk<kKeySide, Stages, decltype(fetch_keys)> walk(args, lane, side, parts, stages[my.warp],
                                                        fetch_keys);
  walk.enter(0);
  wait_for_earlier();
  let_next_start();
  sources.fill(pass.sources, side.runs, side.count, lane.q, args, first_query);
  Keys<K, kGroups> keys;
  ScoreEnds<kGroups> ends;
  int of_remap = -1;  // whose slots `ends` are of
  for (int turn = 0;;) {
    while (walk.more()) {
      walk.next([&](const Item& item, const auto& stage, uint32_t row_affine, int remap) {
        if (remap != of_remap) {
          if (of_remap >= 0) ends.put(args, ranges_of(args, number, of_remap), first_query, my);
          of_remap = remap;
        }
        Scores<kGroups> scores;
        const auto& source = sources.at(item.facts[kKeySide].source());
        score_item(source, side.runs, item, stage.keys, row_affine, my, keys, item.begins[kKeySide],
                   scores);
        int place = score_place(args, lane, at, side.place(item, kKeySide));
        if (static_cast<int>(threadIdx.x % 32) >= item.rows) place = -1;
#pragma unroll
        for (int i = 0; i < 2 * kItemTiles; ++i) {
          const int to = __shfl_sync(kAll, place, my.row + 8 * i);
          if (to < 0) continue;
#pragma unroll
          for (int group = 0; group < kGroups; ++group) {
            const float score = scores.of[i / 2][group][i % 2];
            const int query = first_query + group * kGroupQueries + my.quarter;
            if (query < args.q_per_kv) lane.weights[query * args.score_stride + to] = score;
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

/// The weights of an item before softmax: its scores, remapped, as `scores` of the first pass.
template <int kGroups>
class StoredScores {
 public:
  __device__ StoredScores(const AttendArgs& args, const DeviceLane& lane, int number, int at,
                          int first_query, const OperandThread& my)
      : args_(args), lane_(lane), number_(number), at_(at), first_query_(first_query), my_(my) {}

  /// Of the item whose first row lies at `place`. False if no row of it is there: they are 0.
  __device__ bool take(const Item& item, int place, int remap, Scores<kGroups>& scores) {
    if (remap != remap_) follow(remap);
    uint32_t there = ~0u >> (kItemSlots - item.rows);
    if (lane_.placed) there &= live(place, item.rows);
#pragma unroll
    for (int i = 0; i < 2 * kItemTiles; ++i) {
      const int row = my_.row + 8 * i;
      const bool is_there = (there >> row & 1) != 0;
#pragma unroll
      for (int group = 0; group < kGroups; ++group) {
        const float* from = lane_.weights + query(group) * args_.score_stride + place;
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
      remapped_[group] = RemappedScores(args_, lane_, number_, remap, query(group), false);
    }
  }
  /// Which rows from `place` on are there.
  __device__ uint32_t live(int place, int rows) const {
    const auto row = static_cast<int>(threadIdx.x % 32);
    const int64_t of_lane = static_cast<int64_t>(at_) * args_.places;
    return __ballot_sync(kAll, row < rows && args_.key_at[of_lane + place + row] >= 0);
  }

  const AttendArgs& args_;
  const DeviceLane& lane_;
  int number_;
  int at_;
  int first_query_;
  const OperandThread& my_;
  int remap_ = -1;
  RemappedScores remapped_[kGroups];
};

/// Weighs and adds the values of a lane that one kernel reads.
template <class V, Scaled kValues, int kGroups>
__global__ void __launch_bounds__(kThreads, least_blocks(V::kDim, kGroups))
    add_splits(AttendArgs args, FusedArgs fused, PassArgs pass) {
  using Stages = WarpStages<NoCodec<V::kDim>, Scaled::kToken, V, kValues>;
  using Space = SplitSpace<Stages, V, kGroups>;
  extern __shared__ uint4 dynamic[];
  const auto number = static_cast<int>(blockIdx.x);
  const int first_query = static_cast<int>(blockIdx.z) * kGroups * kGroupQueries;
  if constexpr (requires { V::prepare(); }) V::prepare();
  const int at = lane_at(args, number);
  const DeviceLane lane = lane_of(args, at);
  SideRuns side;
  if (lane.fused != 0 || !side.take(args, lane.last_keys + 1, lane.last_values, pass.kernel)) {
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
  PassWalk<kValueSide, Stages, decltype(fetch_values)> walk(args, lane, side, parts, warp,
                                                            fetch_values);
  walk.enter(0);
  wait_for_earlier();
  let_next_start();
  const PartOf part(my.lower);
  StoredScores<kGroups> stored(args, lane, number, at, first_query, my);
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
        sums.add(side.runs, item, stage.values, codes, row_affine, scores, part, my,
                 item.ends[kValueSide]);
      });
    }
    const auto& values = sums.finish(my);
    if (turn + 1 < parts.turns()) walk.enter(turn + 1);  // while warps join what they have
    const int split = side.pass * fused.lane_splits + parts.split(turn);
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
