#pragma once

#include "kernels/cuda/fused_attention.h"
#include "kernels/cuda/fused_join.cuh"
#include "kernels/cuda/fused_keys.cuh"
#include "kernels/cuda/fused_stage.cuh"
#include "kernels/cuda/fused_table.h"
#include "kernels/cuda/fused_values.cuh"

// The fused decode attention: a block takes a split of a lane, each of its warps a quarter of its
// slots, item by item. While a warp scores an item, weighs it and adds its values, the codes of the
// next one are on their way to shared memory. The softmax is online: what was added shrinks when a
// greater score comes. Blocks whose split lies behind their lane's slots leave nothing; one that
// has taken all splits of its lane joins them.
namespace kvlm::cuda::packed {

constexpr float kWeightUp = 1 << 10;  // with scales below 32, products are halves
constexpr float kWeightUpLarge = 0.5f;
constexpr float kLargeScale = 32;

/// Groups of queries that a block serves at most: registers hold no more of long rows.
constexpr int most_groups(int dim) { return dim > 128 ? 1 : 2; }
/// Blocks of a multiprocessor, for which registers are to suffice.
constexpr int least_blocks(int dim, int groups) { return groups == 1 && dim <= 128 ? 4 : 2; }

/// The softmax of a warp so far, for the queries `quarter` of each group.
template <int kGroups>
struct OnlineSoftmax {
  float most[kGroups];
  float sum[kGroups];  // of this thread's rows

  __device__ OnlineSoftmax() {
#pragma unroll
    for (int group = 0; group < kGroups; ++group) most[group] = -INFINITY, sum[group] = 0;
  }

  static __device__ float power(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
  }

  /// Makes weights of the scores of an item. True if what was added before is to shrink.
  __device__ bool weigh(Scores<kGroups>& scores, float (&factor)[kGroups]) {
    bool greater = false;
    float old[kGroups];
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      float high = -INFINITY;
#pragma unroll
      for (int i = 0; i < 2 * kItemTiles; ++i) high = fmaxf(high, scores.of[i / 2][group][i % 2]);
#pragma unroll
      for (int offset = 4; offset < 32; offset *= 2) {  // threads of one quarter
        high = fmaxf(high, __shfl_xor_sync(kAll, high, offset));
      }
      old[group] = most[group];
      greater = greater || high > old[group];
      most[group] = fmaxf(high, old[group]);
    }
    greater = __any_sync(kAll, greater) != 0;
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      factor[group] = 1;
      if (greater) {
        factor[group] = power(old[group] - most[group]);
        sum[group] *= factor[group];
      }
#pragma unroll
      for (int i = 0; i < 2 * kItemTiles; ++i) {
        float& x = scores.of[i / 2][group][i % 2];
        x = power(x - most[group]);
        sum[group] += x;
      }
    }
    return greater;
  }
};

/// Merges the states of a block's warps and writes that of the split.
template <class V, Scaled kScaled, int kGroups>
__device__ void write_split(const AttendArgs& args, const FusedArgs& fused, int part,
                            int first_query, float* shared, OnlineSoftmax<kGroups>& softmax,
                            const Values<V, kScaled, kGroups>& values, const OperandThread& my) {
  constexpr int kDim = V::kDim;
  constexpr int kQueries = kGroups * kGroupQueries;
  float* outs = shared;                                                       // by warp and query
  auto* ends = reinterpret_cast<float2*>(shared + kWarps * kQueries * kDim);  // the same
#pragma unroll
  for (int group = 0; group < kGroups; ++group) {
    float& sum = softmax.sum[group];
#pragma unroll
    for (int offset = 4; offset < 32; offset *= 2) sum += __shfl_xor_sync(kAll, sum, offset);
    const int at = my.warp * kQueries + group * kGroupQueries + my.quarter;
    if (my.row == 0) ends[at] = {softmax.most[group], sum};
#pragma unroll
    for (int g = 0; g < values.kChannelGroups; ++g) {
      float* to = outs + at * kDim + g * kChannelGroup;
      const auto sum = [&](int i) { return values.sum(group, 4 * g + i); };
      if (values.is_half(g)) {
        reinterpret_cast<float2*>(to)[my.row] = {sum(0), sum(1)};
      } else {
        reinterpret_cast<float4*>(to)[my.row] = {sum(0), sum(1), sum(2), sum(3)};
      }
    }
  }
  __syncthreads();
  const int queries = min(kQueries, args.q_per_kv - first_query);
  const int64_t first = static_cast<int64_t>(part) * args.q_per_kv + first_query;
  for (int i = static_cast<int>(threadIdx.x); i < queries * kDim; i += kThreads) {
    const int query = i / kDim;
    float most = -INFINITY;
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) {
      most = fmaxf(most, ends[warp * kQueries + query].x);
    }
    float out = 0;
    float sum = 0;
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) {
      const float2 end = ends[warp * kQueries + query];
      if (end.x == -INFINITY) continue;  // a warp without slots
      const float weight = OnlineSoftmax<kGroups>::power(end.x - most);
      sum += weight * end.y;
      out += weight * outs[(warp * kQueries + query) * kDim + i % kDim];
    }
    fused.outs[first * kDim + i] = out;
    if (i % kDim == 0) fused.ends[first + query] = {most, sum};
  }
}

template <class V, int kGroups>
constexpr int kSplitBytes =
    static_cast<int>(sizeof(float)) * kWarps* kGroups* kGroupQueries*(V::kDim + 2);
/// Bytes of shared memory behind the sources of queries.
template <class Stages, class V, int kGroups>
constexpr int kStagesBytes = static_cast<int>(kWarps * sizeof(Stages)) > kSplitBytes<V, kGroups>
                                 ? static_cast<int>(kWarps * sizeof(Stages))
                                 : kSplitBytes<V, kGroups>;
template <class K, int kGroups>
constexpr int kSourceBytes = static_cast<int>((sizeof(QuerySource<K, kGroups>) + 15) / 16 * 16);

template <class K, Scaled kKeys, class V, Scaled kValues, int kGroups>
__global__ void __launch_bounds__(kThreads, least_blocks(K::kDim, kGroups))
    attend_split(AttendArgs args, FusedArgs fused) {
  constexpr int kDim = K::kDim;
  static_assert(V::kDim == kDim);
  using Source = QuerySource<K, kGroups>;
  extern __shared__ uint4 dynamic[];
  __shared__ alignas(LaneRun) std::byte run_memory[kMostFusedRuns * sizeof(LaneRun)];
  auto* runs = reinterpret_cast<LaneRun*>(run_memory);
  const int first_query = static_cast<int>(blockIdx.z) * kGroups * kGroupQueries;
  prefetch_lane(args, static_cast<int>(blockIdx.x));
  if constexpr (requires { K::prepare(); }) K::prepare();
  if constexpr (requires { V::prepare(); }) V::prepare();
  wait_for_earlier();
  let_next_start();
  const DeviceLane lane = lane_of(args, lane_at(args, static_cast<int>(blockIdx.x)));
  if (lane.fused != fused.pair) return;
  const int split_slots = fused_split_slots(lane.slots);
  const int first_split = static_cast<int>(blockIdx.y) * fused.splits_of_block;
  if (first_split * split_slots >= lane.slots) return;
  const int key_runs = lane.last_keys - lane.first_keys + 1;
  const int run_count = lane.last_values - lane.first_keys + 1;
  const OperandThread my;

  if (static_cast<int>(threadIdx.x) < run_count) {
    runs[threadIdx.x].take(args, lane.first_keys + static_cast<int>(threadIdx.x));
  }
  __syncthreads();
  auto* bytes = reinterpret_cast<std::byte*>(dynamic);
  const auto source_at = [&](int i) -> Source& {
    return *reinterpret_cast<Source*>(bytes + i * kSourceBytes<K, kGroups>);
  };
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
  std::byte* stages_at = bytes + fused.sources * kSourceBytes<K, kGroups>;
  using Stages = WarpStages<K, kKeys, V, kValues>;
  using OneStage = typename Stages::OneStage;
  Stages& warp = reinterpret_cast<Stages*>(stages_at)[my.warp];
  OneStage(&stages)[2] = warp.stage;
  constexpr int kKeyZerosAt = StageOf<K, kKeys>::kZerosAt;
  constexpr int kValueZerosAt = StageOf<V, kValues>::kZerosAt;
  const PartOf part(my.lower);

  for (int split = first_split; split < first_split + fused.splits_of_block; ++split) {
    const int first = split * split_slots;
    if (first >= lane.slots) break;
    Keys<K, kGroups> keys;
    Values<V, kValues, kGroups> values;
    OnlineSoftmax<kGroups> softmax;
    const int warp_first = first + my.warp * (split_slots / kWarps);
    Items items(args, runs, key_runs, warp_first,
                min(warp_first + split_slots / kWarps, lane.slots), warp.items);
    const std::byte* folded = nullptr;              // scales that are in `keys`
    const std::byte* copied = nullptr;              // and that were copied last
    enum { kFresh, kRows, kCodes } added = kFresh;  // what is not brought down in `values`
    float up = kWeightUp;                           // and the raise of its weights
    uint32_t next_key_meta = 0;
    uint32_t next_value_meta = 0;
    const auto begin = [&](const Item& item, int rows, OneStage& stage) {
      if (const LaneRun& run = runs[item.run[kKeySide]]; run.run.rows == nullptr) {
        const Spot& spot = item.spot[kKeySide];
        stage.keys.copy_codes(spot, rows);
        if constexpr (kKeys == Scaled::kToken) {
          next_key_meta = row_meta(run.format.axis, spot, rows);
        } else if (kKeys == Scaled::kToken32 || spot.scales != copied) {
          stage.keys.copy_meta(spot, rows, run.zeros);
          copied = spot.scales;
        }
      }
      if (const LaneRun& run = runs[item.run[kValueSide]]; run.run.rows == nullptr) {
        const Spot& spot = item.spot[kValueSide];
        stage.values.copy_codes(spot, rows);
        if constexpr (kValues == Scaled::kToken) {
          next_value_meta = row_meta(run.format.axis, spot, rows);
        } else {
          stage.values.copy_meta(spot, rows, run.zeros);
        }
      }
    };

    if (items.there()) begin(warp.items[0], items.rows(), stages[0]);
    end_copies();
    for (int turn = 0; items.there(); turn ^= 1) {
      const Item& item = warp.items[turn];
      const Spot& key_spot = item.spot[kKeySide];
      const Spot& value_spot = item.spot[kValueSide];
      const int rows = items.rows();
      const uint32_t key_meta = next_key_meta;
      const uint32_t value_meta = next_value_meta;
      OneStage& stage = stages[turn];
      items.next(turn);
      if (items.there()) begin(warp.items[turn ^ 1], items.rows(), stages[turn ^ 1]);
      end_copies();
      await_copies<1>();
      __syncwarp();

      Scores<kGroups> scores;
      const LaneRun& key_run = runs[item.run[kKeySide]];
      const Source& source = source_at(key_run.run.source);
      const std::byte* key_codes = stage.keys.rows(key_spot);
      if (key_run.run.rows != nullptr) {
        keys.take_natural(source, my);
        folded = nullptr;
        keys.score_rows(key_spot.codes + static_cast<int64_t>(key_spot.row) * (kDim * 2), rows, my,
                        scores);
      } else if constexpr (kKeys == Scaled::kChannel) {
        if (key_spot.scales != folded) {
          keys.fold(source, key_run.format, stage.keys.meta, stage.keys.meta + kKeyZerosAt, my);
          folded = key_spot.scales;
        }
        keys.template score_codes<false>(key_codes, source, 0, my, scores);
      } else {
        keys.take_coded(source, my);
        if constexpr (kKeys == Scaled::kToken) {
          keys.template score_codes<true>(key_codes, source, key_meta, my, scores);
        } else {
          const std::byte* scales = stage.keys.group_scales(key_spot);
          keys.score_grouped(key_codes, scales, scales + kKeyZerosAt, source, my, scores);
        }
      }
      if (rows < kItemSlots) {
#pragma unroll
        for (int i = 0; i < 2 * kItemTiles; ++i) {
#pragma unroll
          for (int group = 0; group < kGroups; ++group) {
            if (my.row + 8 * i >= rows) scores.of[i / 2][group][i % 2] = -INFINITY;
          }
        }
      }
      float factor[kGroups];
      if (softmax.weigh(scores, factor)) values.shrink(factor);

      const LaneRun& value_run = runs[item.run[kValueSide]];
      const bool coded = value_run.run.rows == nullptr;
      const std::byte* value_scales = stage.values.group_scales(value_spot);
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
        large = coded && fmaxf(__low2float(most), __high2float(most)) >= kLargeScale;
      }
      const float raise = __any_sync(kAll, large) ? kWeightUpLarge : kWeightUp;
      if (added != kFresh && ((added == kCodes) != coded || raise != up)) {
        values.bring_down(added == kCodes, 1 / up, my);
        values.bring_up(coded, raise);
      }
      added = coded ? kCodes : kRows;
      up = raise;
      const ItemWeights<kGroups> weights(scores, up, part, my);
      if (coded) {
        values.add_codes(warp.wide_values(stage, value_spot), value_scales,
                         value_scales + kValueZerosAt, value_meta, weights, my);
        if constexpr (kValues == Scaled::kChannel) {  // the next item may have other scales
          values.finish_channels(1 / up, value_run.format, stage.values.meta,
                                 stage.values.meta + kValueZerosAt, my);
          added = kFresh;
        }
      } else {
        values.add_rows(value_spot.codes + static_cast<int64_t>(value_spot.row) * (kDim * 2), rows,
                        weights, my);
      }
      __syncwarp();  // the stage has been read
    }
    if (added != kFresh) values.bring_down(added == kCodes, 1 / up, my);

    __syncthreads();
    write_split(args, fused, static_cast<int>(blockIdx.x) * fused.splits + split, first_query,
                reinterpret_cast<float*>(stages_at), softmax, values, my);
    __syncthreads();
  }
  if (fused_splits_of(lane) > fused.splits_of_block) return;
  const int end_query = min(first_query + kGroups * kGroupQueries, args.q_per_kv);
  for (int query = first_query; query < end_query; ++query) {
    join_query<0>(args, fused, lane, kDim, static_cast<int>(blockIdx.x), query);
  }
}

template <class K, Scaled kKeys, class V, Scaled kValues>
void FusedKernel<K, kKeys, V, kValues>::launch(const AttendArgs& args, const FusedArgs& fused,
                                               Stream& stream) {
  const auto with = [&](auto constant) {
    constexpr int kGroups = decltype(constant)::value;
    const dim3 grid(static_cast<unsigned>(fused.lanes),
                    static_cast<unsigned>(ceil_div(fused.splits, fused.splits_of_block)),
                    static_cast<unsigned>(ceil_div(args.q_per_kv, kGroups * kGroupQueries)));
    const int bytes = fused.sources * kSourceBytes<K, kGroups> +
                      kStagesBytes<WarpStages<K, kKeys, V, kValues>, V, kGroups>;
    check(cudaFuncSetAttribute(attend_split<K, kKeys, V, kValues, kGroups>,
                               cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
          "attend_packed");
    launch_early("attend_packed", attend_split<K, kKeys, V, kValues, kGroups>, grid, kThreads,
                 static_cast<size_t>(bytes), stream, args, fused);
  };
  if (args.q_per_kv <= kGroupQueries || most_groups(K::kDim) == 1) {
    with(std::integral_constant<int, 1>{});
  } else {
    with(std::integral_constant<int, most_groups(K::kDim)>{});
  }
}

template <class K, Scaled kKeys, class V, Scaled kValues>
int FusedKernel<K, kKeys, V, kValues>::shared_bytes(int sources) {
  constexpr int kRuns = kMostFusedRuns * static_cast<int>(sizeof(LaneRun));
  constexpr int kTables = 1024;  // of codecs
  constexpr int kGroups = most_groups(K::kDim);
  return sources * kSourceBytes<K, kGroups> +
         kStagesBytes<WarpStages<K, kKeys, V, kValues>, V, kGroups> + kRuns + kTables;
}

}  // namespace kvlm::cuda::packed
