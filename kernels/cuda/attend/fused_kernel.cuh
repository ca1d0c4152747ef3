#pragma once

#include "kernels/cuda/attend/fused_attention.h"
#include "kernels/cuda/attend/fused_join.cuh"
#include "kernels/cuda/attend/fused_keys.cuh"
#include "kernels/cuda/attend/fused_stage.cuh"
#include "kernels/cuda/attend/fused_state.cuh"
#include "kernels/cuda/attend/fused_table.h"
#include "kernels/cuda/attend/fused_values.cuh"

// The fused decode attention: a block takes some splits of a lane, and each of its warps parts of
// them, item by item. While a warp scores an item, weighs it and adds its values, the codes of the
// next one are on their way to shared memory. The softmax is online: what was added shrinks when a
// much greater score comes. Then the parts of a split are merged (fused_state.cuh). A block that
// has all splits of its lane joins them.
namespace kvlm::cuda::packed {

constexpr float kWeightUp = 1 << 8;  // with scales below 32, products are halves
constexpr float kWeightUpLarge = 0.125f;
constexpr float kLargeScale = 32;

/// What undoes a raise of weights, which is one of the two: chosen, which is shorter than a
/// division.
__device__ inline float undone(float up) {
  return up == kWeightUp ? 1 / kWeightUp : 1 / kWeightUpLarge;
}

template <class K, int kGroups>
constexpr int kSourceBytes = static_cast<int>((sizeof(QuerySource<K, kGroups>) + 15) / 16 * 16);

template <class K, Scaled kKeys, class V, Scaled kValues, int kGroups, bool kLosesRows>
__global__ void __launch_bounds__(kThreads, least_blocks(K::kDim, kGroups))
    attend_split(AttendArgs args, FusedArgs fused) {
  constexpr int kDim = K::kDim;
  static_assert(V::kDim == kDim);
  using Source = QuerySource<K, kGroups>;
  extern __shared__ uint4 dynamic[];
  __shared__ alignas(LaneRun) std::byte run_memory[kMostFusedRuns * sizeof(LaneRun)];
  auto* runs = reinterpret_cast<LaneRun*>(run_memory);
  const int first_query = static_cast<int>(blockIdx.z) * kGroups * kGroupQueries;
  if constexpr (requires { K::prepare(); }) K::prepare();
  if constexpr (requires { V::prepare(); }) V::prepare();
  // Lanes and runs have been counted before this kernel could start (count_step()), and packed
  // codes are there. The step's rows, and queries in another basis, may be on their way.
  const DeviceLane lane = lane_of(args, lane_at(args, static_cast<int>(blockIdx.x)));
  if (lane.fused != fused.pair) return wait_for_earlier();
  const int splits = fused_splits_of(lane.slots);
  const auto block = static_cast<int>(blockIdx.y);
  const int first_split = block * splits / fused.blocks;
  const int end_split = (block + 1) * splits / fused.blocks;
  if (first_split == end_split) return wait_for_earlier();
  const int key_runs = lane.last_keys - lane.first_keys + 1;
  const int run_count = lane.last_values - lane.first_keys + 1;
  const OperandThread my;

  if (static_cast<int>(threadIdx.x) < run_count) {
    const auto run = static_cast<int>(threadIdx.x);
    runs[run].take(args, lane.first_keys + run, run);
  }
  __syncthreads();
  auto* bytes = reinterpret_cast<std::byte*>(dynamic);
  const auto source_at = [&](int i) -> Source& {
    return *reinterpret_cast<Source*>(bytes + i * kSourceBytes<K, kGroups>);
  };
  const auto make_sources = [&] {
    wait_for_earlier();
    let_next_start();
    for (int i = 0; i < fused.sources; ++i) {
      int met = -1;  // a run of keys that meets these queries, a packed one if there is one
      for (int run = 0; run < key_runs; ++run) {
        if (runs[run].run.source != i) continue;
        if (met < 0 || runs[met].run.rows != nullptr) met = run;
      }
      if (met < 0) continue;
      const float* q = runs[met].run.q != nullptr ? runs[met].run.q : lane.q;
      source_at(i).fill(q, kKeys == Scaled::kToken32, args.q_per_kv, first_query, args.scale);
    }
    __syncthreads();
  };
  std::byte* stages_at = bytes + fused.sources * kSourceBytes<K, kGroups>;
  using Stages = WarpStages<K, kKeys, V, kValues>;
  using OneStage = typename Stages::OneStage;
  using Space = SplitSpace<Stages, V, kGroups>;
  const Space space{stages_at};
  Stages& warp = space.stages(my.warp);
  OneStage(&stages)[2] = warp.stage;
  constexpr int kKeyZerosAt = StageOf<K, kKeys, true>::kZerosAt;
  constexpr int kValueZerosAt = StageOf<V, kValues, false>::kZerosAt;
  const PartOf part(my.lower);

  Items items(args, runs, key_runs, warp.places);
  uint32_t next_key_meta = 0;
  uint32_t next_value_meta = 0;
  const auto begin = [&](OneStage& stage) {
    const Item& item = items.item();
    // All that is read of shared memory first: it must not wait for copies.
    const Place places[kSides] = {items.place(kKeySide), items.place(kValueSide)};
    const auto side = [&](auto scaled, Side side, auto& to, uint32_t& row_affine) {
      constexpr Scaled kScaled = decltype(scaled)::value;
      const Place& place = places[side];
      const int rows =
          item.facts[side].coded() ? item.rows : 0;  // f16 rows are read where they lie
      const int block = item.block[side];
      const int row = item.row[side];
      to.copy_codes(place.codes + int64_t{block} * place.code_stride, row, rows);
      const int64_t at = int64_t{block} * place.scale_stride;
      if constexpr (kScaled == Scaled::kToken) {
        row_affine = row_meta(place.meta != 0, place.scales + at, place.zeros + at, row, rows);
      } else {
        to.copy_meta(place.scales + at, place.zeros + at, row, rows, place.meta);
      }
    };
    side(std::integral_constant<Scaled, kKeys>{}, kKeySide, stage.keys, next_key_meta);
    side(std::integral_constant<Scaled, kValues>{}, kValueSide, stage.values, next_value_meta);
  };
  /// Row `slot` of a run of f16 rows.
  const auto full_row = [&](const LaneRun& run, int slot) {
    return run.run.rows + static_cast<int64_t>(slot - run.run.first_slot) * (kDim * 2);
  };
  // Where states lie in stages, no warp can keep one while copies come.
  const bool may_be_alone = !Space::kInStages && fused_parts_are_long(lane.slots);
  const WarpParts parts(first_split, end_split, my.warp, may_be_alone);
  int at = 0;  // the stage of the item at hand
  const auto enter = [&](SlotRange slots) {
    at = 0;
    if (items.start(slots.first, slots.end)) begin(stages[0]);
    end_copies();
    return slots.end;
  };

  int part_end = enter(parts.slots(0, lane.slots));
  // Codes of one section take fewer registers if queries are made ready inside the loop.
  constexpr bool kSourcesInLoop = K::kSections.size() == 1;
  if constexpr (!kSourcesInLoop) make_sources();
#pragma unroll 1
  for (int turn = 0; turn < parts.turns(); ++turn) {
    if (kSourcesInLoop && turn == 0) make_sources();
    Values<V, kValues, kGroups> values;
    OnlineSoftmax<kGroups> softmax;
    enum { kFresh, kRows, kCodes } added = kFresh;  // what is not brought down in `values`
    float up = kWeightUp;                           // and the raise of its weights
    for (; items.item().slot < part_end; at ^= 1) {
      const Item item = items.item();
      const RunFacts keys_of = item.facts[kKeySide];
      const RunFacts values_of = item.facts[kValueSide];
      const int rows = item.rows;
      const int value_row = item.row[kValueSide];
      const uint32_t key_meta = next_key_meta;
      const uint32_t value_meta = next_value_meta;
      OneStage& stage = stages[at];
      uint32_t there = 0;  // which of the item's slots have rows
      if constexpr (kLosesRows) {
        there = ~0u >> (kItemSlots - rows);
        if (lane.live != nullptr && keys_of.coded()) {
          there &= PackedRowBits::from(lane.live, item.slot);
        }
      }
      int end = part_end;
      if (item.slot + rows == part_end && parts.goes_on(turn)) {
        end = parts.slots(turn + 1, lane.slots).end;
      }
      if (items.next(end)) begin(stages[at ^ 1]);
      end_copies();
      await_copies<1>();
      __syncwarp();
      if (kLosesRows && there == 0) continue;

      Keys<K, kGroups> keys;
      Scores<kGroups> scores;
      const Source& source = source_at(keys_of.source());
      const std::byte* key_codes = stage.keys.rows(item.row[kKeySide]);
      if (!keys_of.coded()) {
        keys.take_natural(source, my);
        keys.score_rows(full_row(runs[keys_of.run()], item.slot), rows, my, scores);
      } else if constexpr (kKeys == Scaled::kChannel) {
        keys.fold(source, runs, keys_of, stage.keys.meta, stage.keys.meta + kKeyZerosAt, my);
        keys.template score_codes<false>(key_codes, source, 0, my, scores);
      } else {
        keys.take_coded(source, my);
        if constexpr (kKeys == Scaled::kToken) {
          keys.template score_codes<true>(key_codes, source, key_meta, my, scores);
        } else {
          const std::byte* scales = stage.keys.group_scales(item.row[kKeySide]);
          keys.score_grouped(key_codes, scales, scales + kKeyZerosAt, source, my, scores);
        }
      }
      const auto forget = [&](auto is_gone) {
#pragma unroll
        for (int i = 0; i < 2 * kItemTiles; ++i) {
#pragma unroll
          for (int group = 0; group < kGroups; ++group) {
            if (is_gone(my.row + 8 * i)) scores.of[i / 2][group][i % 2] = -INFINITY;
          }
        }
      };
      if constexpr (kLosesRows) {
        if (there != ~0u) forget([&](int row) { return (there >> row & 1) == 0; });
      } else if (rows < kItemSlots) {
        forget([&](int row) { return row >= rows; });
      }
      float factor[kGroups];
      if (softmax.weigh(scores, factor)) values.shrink(factor);

      const bool coded = values_of.coded();
      const std::byte* value_scales = stage.values.group_scales(value_row);
      bool large = false;
      if constexpr (kValues == Scaled::kToken) {
        large = coded && fabsf(two_floats(value_meta).x) >= kLargeScale;
      } else if constexpr (kValues == Scaled::kToken32) {
        const GroupHalves<channel_groups(kDim)> s(value_scales, static_cast<int>(threadIdx.x % 32));
        __half2 most = __habs2(*reinterpret_cast<const __half2*>(&s.pairs[0]));
#pragma unroll
        for (size_t i = 1; i < sizeof s / 4; ++i) {
          most = __hmax2(most, __habs2(*reinterpret_cast<const __half2*>(&s.pairs[i])));
        }
        large = coded && any_at_least(most, kLargeScale);
      }
      const float raise = __any_sync(kAll, large) ? kWeightUpLarge : kWeightUp;
      if (added != kFresh && ((added == kCodes) != coded || raise != up)) {
        values.bring_down(added == kCodes, undone(up), my);
        values.bring_up(coded, raise);
      }
      added = coded ? kCodes : kRows;
      up = raise;
      const typename Values<V, kValues, kGroups>::Weights weights(scores, up, part, my);
      if (coded) {
        values.add_codes(warp.wide_values(stage, value_row), value_scales,
                         value_scales + kValueZerosAt, value_meta, weights, my);
        if constexpr (kValues == Scaled::kChannel) {  // the next item may have other scales
          values.finish_channels(undone(up), runs[values_of.run()].format, stage.values.meta,
                                 stage.values.meta + kValueZerosAt, my);
          added = kFresh;
        }
      } else {
        values.add_rows(full_row(runs[values_of.run()], item.slot), rows, weights, my);
      }
      __syncwarp();  // the stage has been read
    }
    if (added != kFresh) values.bring_down(added == kCodes, undone(up), my);

    if (turn + 1 < parts.turns()) {
      const SlotRange next = parts.slots(turn + 1, lane.slots);
      // While warps join what they have.
      part_end = parts.goes_on(turn) ? next.end : enter(next);
    }
    const SplitAt to(args, fused, static_cast<int>(blockIdx.x), parts.split(turn), first_query,
                     kDim);
    if (parts.alone(turn)) {
      add_part<kLosesRows>(to, parts.part(turn), space, softmax, values, my);
    } else {
      write_split<kLosesRows>(to, lane, splits == 1, first_query, space, softmax, values, my);
    }
  }
  if (splits == 1 || !has_all_splits(fused, splits)) return;
  __syncthreads();
  join_queries<8>(args, fused, lane, kDim, static_cast<int>(blockIdx.x), first_query,
                  min(first_query + kGroups * kGroupQueries, args.q_per_kv));
}

/// Shared memory of a block, beside what every block has.
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
    const dim3 grid(static_cast<unsigned>(fused.lanes), static_cast<unsigned>(fused.blocks),
                    static_cast<unsigned>(fused_query_blocks(kDim, args.q_per_kv)));
    const int bytes = shared_bytes_of<K, kKeys, V, kValues, kGroups>(fused.sources);
    auto kernel = attend_split<K, kKeys, V, kValues, kGroups, false>;
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
  constexpr int kRuns = kMostFusedRuns * static_cast<int>(sizeof(LaneRun));
  constexpr int kTables = 1024;  // of codecs
  const int bytes = groups == 1
                        ? shared_bytes_of<K, kKeys, V, kValues, 1>(sources)
                        : shared_bytes_of<K, kKeys, V, kValues, most_groups(K::kDim)>(sources);
  return bytes + kRuns + kTables;
}

}  // namespace kvlm::cuda::packed
