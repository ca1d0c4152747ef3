#pragma once

#include "kernels/cuda/attend/fused_attention.h"
#include "kernels/cuda/attend/fused_item.cuh"
#include "kernels/cuda/attend/fused_join.cuh"
#include "kernels/cuda/attend/fused_state.cuh"
#include "kernels/cuda/attend/fused_table.h"

// Decode attention in one pass, for KV heads whose keys and values are in the same slots and, if
// tokens are weighed or evicted in place, scaled by token. Others take two passes (two_pass.cuh). A
// block takes consecutive splits of a KV head, each of its four warps parts of them, in items of up
// to 32 slots. While a warp scores an item and adds its values under an online softmax, cp.async
// copies the codes of the next item to shared memory. Then the parts of each split are merged
// (fused_state.cuh). If the block has all splits of its KV head, it merges their states too
// (fused_join.cuh).
namespace kvlm::cuda::packed {

/// Copies the descriptions of a KV head's segments to shared memory.
__device__ inline void take_segments(const AttendArgs& args, const DeviceHead& head, int count,
                                     HeadSegment* segments) {
  const auto segment = static_cast<int>(threadIdx.x);
  if (segment < count) segments[segment].take(args, head.first_keys + segment, segment);
  __syncthreads();
}

/// Which slots of an item hold tokens: bit i for slot i.
template <bool kLosesRows>
__device__ uint32_t slots_there(const DeviceHead& head, const Item& item) {
  const uint32_t rows = ~0u >> (kItemSlots - item.rows);
  if (!kLosesRows || head.live == nullptr || !item.facts[kKeySide].coded()) return rows;
  return rows & PackedRowBits::from(head.live, item.slot);
}

/// Merges the splits of a KV head, all of which this block has processed.
template <int kGroups, int kDim>
__device__ void join_own_splits(const AttendArgs& args, const FusedArgs& fused, int first_query) {
  __syncthreads();
  const auto index = static_cast<int>(blockIdx.x);
  const DeviceHead head = head_of(args, head_at(args, index));  // read again to save registers
  const int end = min(first_query + kGroups * kGroupQueries, args.q_per_kv);
  join_queries<8>(args, fused, SplitPlaces(args, fused, index), head.out, kDim, index, first_query,
                  end);
}

template <class K, Scaled kKeys, class V, Scaled kValues, int kGroups, bool kLosesRows>
__global__ void __launch_bounds__(kThreads, least_blocks(K::kDim, kGroups))
    attend_split(AttendArgs args, FusedArgs fused) {
  constexpr int kDim = K::kDim;
  static_assert(V::kDim == kDim);
  extern __shared__ uint4 dynamic[];
  __shared__ alignas(HeadSegment) std::byte memory[kMostFusedSegments * sizeof(HeadSegment)];
  auto* segments = reinterpret_cast<HeadSegment*>(memory);
  const int first_query = static_cast<int>(blockIdx.z) * kGroups * kGroupQueries;
  if constexpr (requires { K::prepare(); }) K::prepare();
  if constexpr (requires { V::prepare(); }) V::prepare();
  // Before this kernel could start, count_step() has counted KV heads and segments, and codes are
  // packed. Only the step's new tokens and queries in another basis may be unwritten.
  const DeviceHead head = head_of(args, head_at(args, static_cast<int>(blockIdx.x)));
  if (head.fused != fused.pair) return wait_for_earlier();
  const bool is_weighed = kLosesRows && args.weighs;
  const int splits = fused_splits_of(head.slots);
  const auto block = static_cast<int>(blockIdx.y);
  const int first_split = block * splits / fused.blocks;
  const int end_split = (block + 1) * splits / fused.blocks;
  if (first_split == end_split) return wait_for_earlier();
  const int key_segments = head.last_keys - head.first_keys + 1;
  const int segment_count = head.last_values - head.first_keys + 1;
  const OperandThread my;

  take_segments(args, head, segment_count, segments);
  auto* bytes = reinterpret_cast<std::byte*>(dynamic);
  const QuerySources<K, kKeys, kGroups> sources{bytes};
  const auto make_sources = [&] {
    wait_for_earlier();
    let_next_start();
    sources.fill(fused.sources, segments, key_segments, head.q, args, first_query);
  };
  std::byte* stages_at = bytes + fused.sources * kSourceBytes<K, kGroups>;
  using Stages = WarpStages<K, kKeys, V, kValues>;
  using OneStage = typename Stages::OneStage;
  using Space = SplitSpace<Stages, V, kGroups>;
  const Space space{stages_at};
  Stages& warp = space.stages(my.warp);
  OneStage(&stages)[2] = warp.stage;
  const PartOf part(my.lower);

  ItemWalk<kKeySide, kSides> items(args, segments, key_segments, warp.places);
  uint32_t next_key_meta = 0;
  uint32_t next_value_meta = 0;
  const auto begin = [&](OneStage& stage) {
    const Item& item = items.item();
    // Read shared memory before copies are issued: the reads must not wait for them.
    const Place places[kSides] = {items.place(kKeySide), items.place(kValueSide)};
    fetch<K, kKeys, true>(places[kKeySide], item, kKeySide, stage.keys, next_key_meta);
    fetch<V, kValues, false>(places[kValueSide], item, kValueSide, stage.values, next_value_meta);
  };
  // If states share memory with the stages, no warp can keep one during copies.
  const bool may_be_alone = !Space::kInStages && fused_parts_are_long(head.slots);
  const WarpParts parts(first_split, end_split, my.warp, may_be_alone);
  int at = 0;  // stage of the current item
  const auto enter = [&](SlotRange slots) {
    at = 0;
    if (items.start(slots.first, slots.end)) begin(stages[0]);
    end_copies();
    return slots.end;
  };

  int part_end = enter(parts.slots(0, head.slots));
  // Codes of one section take fewer registers if the loop prepares the queries.
  constexpr bool kSourcesInLoop = K::kSections.size() == 1;
  if constexpr (!kSourcesInLoop) make_sources();
#pragma unroll 1
  for (int turn = 0; turn < parts.turns(); ++turn) {
    if (kSourcesInLoop && turn == 0) make_sources();
    ItemSums<V, kValues, kGroups> sums;
    OnlineSoftmax<kGroups> softmax;
    for (; items.item().slot < part_end; at ^= 1) {
      const Item item = items.item();
      const uint32_t key_meta = next_key_meta;
      const uint32_t value_meta = next_value_meta;
      OneStage& stage = stages[at];
      const uint32_t there = slots_there<kLosesRows>(head, item);
      const bool is_last = item.slot + item.rows == part_end && parts.goes_on(turn);
      const int end = is_last ? parts.slots(turn + 1, head.slots).end : part_end;
      if (items.next(end)) begin(stages[at ^ 1]);
      end_copies();
      await_copies<1>();
      __syncwarp();
      if (kLosesRows && there == 0) continue;

      Scores<kGroups> scores;
      const auto& source = sources.at(item.facts[kKeySide].source());
      Keys<K, kGroups> keys;
      score_item(source, segments, item, stage.keys, key_meta, my, keys, /*anew=*/true, scores);
      if (is_weighed) {
        const int place = segments[item.facts[kKeySide].segment()].place_of(item.slot);
        store_scores(args, head, first_query, there, place, my, scores);
      }
      if (there != ~0u) leave_out(there, my, scores);
      float factor[kGroups];
      if (softmax.weigh(scores, factor)) sums.shrink(factor);
      const std::byte* codes = warp.wide_values(stage, item);
      sums.add(segments, item, stage.values, codes, value_meta, scores, part, my);
      __syncwarp();  // the stage has been read
    }
    const auto& values = sums.finish(my);

    if (turn + 1 < parts.turns()) {
      const SlotRange next = parts.slots(turn + 1, head.slots);
      part_end = parts.goes_on(turn) ? next.end : enter(next);  // copies start before the merge
    }
    const SplitAt to(args, fused, static_cast<int>(blockIdx.x), parts.split(turn), first_query,
                     kDim);
    if (parts.alone(turn)) {
      add_part<kLosesRows>(to, parts.part(turn), space, softmax, values, my);
    } else {
      write_split<kLosesRows>(args, to, splits == 1 && !is_weighed, first_query, space, softmax,
                              values, my);
    }
  }
  if (splits > 1 && !is_weighed && has_all_splits(fused, splits)) {
    join_own_splits<kGroups, kDim>(args, fused, first_query);
  }
}

/// Dynamic shared memory of a block, in bytes.
template <class K, Scaled kKeys, class V, Scaled kValues, int kGroups>
int shared_bytes_of(int sources) {
  using Space = SplitSpace<WarpStages<K, kKeys, V, kValues>, V, kGroups>;
  return sources * kSourceBytes<K, kGroups> + Space::kBytes;
}

template <class K, Scaled kKeys, class V, Scaled kValues>
void FusedKernel<K, kKeys, V, kValues>::launch(const AttendArgs& args, const FusedArgs& fused,
                                               Stream& stream) {
  const auto with = [&](auto constant) {
    constexpr int kGroups = decltype(constant)::value;
    const dim3 grid(static_cast<unsigned>(fused.heads), static_cast<unsigned>(fused.blocks),
                    static_cast<unsigned>(fused_query_blocks(kDim, args.q_per_kv)));
    const int bytes = shared_bytes_of<K, kKeys, V, kValues, kGroups>(fused.sources);
    constexpr bool kAlways = kMayLoseRows && kDim != 64 && kDim != 128;  // compiles in less time
    auto kernel = attend_split<K, kKeys, V, kValues, kGroups, kAlways>;
    if constexpr (kMayLoseRows) {
      if (fused.lose_rows) kernel = attend_split<K, kKeys, V, kValues, kGroups, true>;
    }
    launch_early("DecodeTable::attend", kernel, grid, kThreads, static_cast<size_t>(bytes), stream,
                 args, fused);
  };
  if (fused_groups(kDim, args.q_per_kv) == 1) {
    with(std::integral_constant<int, 1>{});
  } else {
    with(std::integral_constant<int, most_groups(kDim)>{});
  }
}

template <class K, Scaled kKeys, class V, Scaled kValues>
int FusedKernel<K, kKeys, V, kValues>::shared_bytes(int sources, int groups) {
  constexpr int kSegments = kMostFusedSegments * static_cast<int>(sizeof(HeadSegment));
  constexpr int kTables = 1024;  // of codecs
  const int bytes = groups == 1
                        ? shared_bytes_of<K, kKeys, V, kValues, 1>(sources)
                        : shared_bytes_of<K, kKeys, V, kValues, most_groups(K::kDim)>(sources);
  return bytes + kSegments + kTables;
}

}  // namespace kvlm::cuda::packed
