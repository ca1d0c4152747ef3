#pragma once

#include <cooperative_groups.h>

#include "kernels/cuda/attend/fused_choice.h"
#include "kernels/cuda/attend/image_products.cuh"
#include "kernels/cuda/attend/picture_choice.h"
#include "kernels/cuda/attend/score_places.cuh"

// Decode attention of one KV head over an image packed as one block, by one thread block, or by a
// cluster of them where there are few KV heads: all scores first, which stay in shared memory, then
// their least and greatest, then V. Every packed byte is read once for each four queries.
//
// The tensor cores multiply bytes: codes are taken as stored (a mask selects one of every byte,
// times a power of two), queries and weights are 32-bit integers of four digits. The four digits of
// four queries are the 16 rows of an operand. Integer sums are exact, so that a result does not
// depend on how many warps or blocks share a KV head. A weight is a fixed-point number of at most
// 1, which needs the greatest score first; so the remap of CalibQuant, which needs the least and
// the greatest, costs nothing more. A warp takes chunks of 64 slots (image_products.cuh).
namespace kvlm::cuda::packed {

/// The blocks that share a lane.
struct PictureCluster {
  int blocks;
  int rank;

  __device__ void sync() const {
    if (blocks == 1) return __syncthreads();
    arrive();
    wait();
  }
  /// What this block has written to shared memory is there for those that have waited.
  __device__ void arrive() const {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
  }
  __device__ void wait() const {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
  }
  /// Waits until all have read what others have; nothing is written any more.
  __device__ void await_readers() const {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    if (blocks == 1) return;
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
    wait();
#endif
  }
  /// What block `of` has where this one has `*mine`.
  template <class T>
  __device__ const T* in(int of, const T* mine) const {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    if (blocks > 1) {
      return cooperative_groups::this_cluster().map_shared_rank(mine, static_cast<unsigned>(of));
    }
#endif
    return mine;
  }
};

/// Least and greatest score of a thread's query in its block, and says them to the cluster.
template <int kWarps>
__device__ float2 ends_of_block(float low, float high, const PictureThread& my,
                                const PictureCluster& cluster, PictureShared<kWarps>& shared) {
#pragma unroll
  for (int i = 0; i < 3; ++i) {  // threads of one query
    const int apart = i < 2 ? 1 + i : 16;
    low = fminf(low, __shfl_xor_sync(kAll, low, apart));
    high = fmaxf(high, __shfl_xor_sync(kAll, high, apart));
  }
  if (my.quarter == 0 && !my.lower) shared.ends[my.warp][my.query] = {low, high};
  __syncthreads();
  float2 ends = shared.ends[0][my.query];
#pragma unroll
  for (int warp = 1; warp < kWarps; ++warp) {
    const float2 theirs = shared.ends[warp][my.query];
    ends = {fminf(ends.x, theirs.x), fmaxf(ends.y, theirs.y)};
  }
  if (cluster.blocks == 1) return ends;
  if (threadIdx.x < 16 && my.quarter == 0) shared.of_block[my.query] = ends;
  cluster.arrive();
  return ends;
}

/// The same in all blocks of a cluster, which have said theirs.
template <int kWarps>
__device__ float2 ends_of_lane(float2 ends, const PictureThread& my, const PictureCluster& cluster,
                               const PictureShared<kWarps>& shared) {
  if (cluster.blocks == 1) return ends;
  cluster.wait();
#pragma unroll 1
  for (int block = 0; block < cluster.blocks; ++block) {
    const float2 theirs = *cluster.in(block, &shared.of_block[my.query]);
    ends = {fminf(ends.x, theirs.x), fmaxf(ends.y, theirs.y)};
  }
  return ends;
}

/// Four sums of digits as one number.
__device__ inline double sum_of_digits(const uint32_t (&sums)[4]) {
  return static_cast<double>((static_cast<uint64_t>(sums[0]) << 24) +
                             (static_cast<uint64_t>(sums[2]) << 16) +
                             (static_cast<uint64_t>(sums[1]) << 8) + sums[3]);
}

/// The softmax states of a lane that others have left, or that is left for others.
struct LaneStates {
  float2* ends;
  float* outs;
  int count;
  int q_per_kv;

  ///   first  its first state, of all of the lane
  __device__ LaneStates(const AttendArgs& args, const FusedArgs& fused, int index, int first,
                        int count)
      : count(count), q_per_kv(args.q_per_kv) {
    const int64_t at = (static_cast<int64_t>(index) * fused.splits + first) * q_per_kv;
    ends = fused.ends + at;
    outs = fused.outs + at * kDim;
  }
  /// Merged with the state of packed rows, for a channel: the output.
  __device__ float merge(float top, float mass, float out, int query, int channel) const {
    float most = top;
    for (int i = 0; i < count; ++i) most = fmaxf(most, ends[i * q_per_kv + query].x);
    const float weight = exp2f(top - most);
    mass *= weight;
    out *= weight;
    for (int i = 0; i < count; ++i) {
      const int at = i * q_per_kv + query;
      const float part = exp2f(ends[at].x - most);
      mass += part * ends[at].y;
      out += part * outs[at * kDim + channel];
    }
    return out / mass;
  }
};

/// Calls write(query, channel, top, weights, out) with the softmax state of the packed rows, by the
/// threads of a cluster, whose blocks have some of the channels each.
template <int kBits, int kWarps, class Write>
__device__ void write_state(const PictureShared<kWarps>& shared, const PictureCluster& cluster,
                            int first_query, int queries, const Write& write) {
  const int channels = kDim / cluster.blocks;
  for (int i = static_cast<int>(threadIdx.x); i < queries * channels; i += 32 * kWarps) {
    const int query = i / channels;
    const int channel = cluster.rank * channels + i % channels;
    uint32_t sums[4] = {};
    uint32_t weights[4] = {};
#pragma unroll 1
    for (int block = 0; block < cluster.blocks; ++block) {
      const DigitSums* of = cluster.in(block, &shared.sums);
#pragma unroll
      for (int row = 0; row < 4; ++row) {
        const int at = 4 * row + query;
        sums[row] +=
            static_cast<uint32_t>(of->of_codes[DigitSums::row(at) + DigitSums::column(channel)]);
        weights[row] += static_cast<uint32_t>(of->of_weights[at]);
      }
    }
    constexpr double kUnit = 1.0 / (uint64_t{1} << kWeightBits);
    const float2 of_channel = shared.of_values[channel];
    const double mass = sum_of_digits(weights) * kUnit;
    const double sum = of_channel.x * sum_of_digits(sums) *
                           (kUnit * power_of_two(-CodeBytes<kBits>::shift(channel))) +
                       of_channel.y * mass;
    write(first_query + query, channel, shared.top[query], static_cast<float>(mass),
          static_cast<float>(sum));
  }
}

/// The chunks of a block.
struct BlockChunks {
  int slots;  // of the lane
  int first;
  int end;
};

/// Begins the block's sums, and says what codes of values mean.
template <int kWarps>
__device__ __forceinline__ void begin_sums(const AttendArgs& args, const PictureRun& values,
                                           const PictureThread& my, PictureShared<kWarps>& shared) {
  if (kWarps == kGroupQueries || my.warp >= kGroupQueries) {
    const BlockMeaning meaning(args, values);
    for (int i = static_cast<int>(threadIdx.x) % kFoldThreads; i < kDim; i += kFoldThreads) {
      shared.of_values[i] = meaning.at(i);
    }
  }
  constexpr int kSums = sizeof(DigitSums) / sizeof(int);
  for (int i = static_cast<int>(threadIdx.x); i < kSums; i += 32 * kWarps) {
    reinterpret_cast<int*>(&shared.sums)[i] = 0;
  }
}

/// Scores of a warp's chunks; returns the least and the greatest. `row_bits` are the lane's
/// PackedRowBits; null: all rows are there.
template <int kBits, int kWarps>
__device__ __forceinline__ float2 score_chunks(ChunkCopies<kBits, kWarps>& copies,
                                               const BlockChunks& chunks, const uint32_t* row_bits,
                                               const PictureThread& my,
                                               const PictureShared<kWarps>& shared,
                                               float4* scores) {
  const auto* live_words = reinterpret_cast<const uint2*>(row_bits + PackedRowBits::kBits);
  float low = INFINITY;
  float high = -INFINITY;
  uint32_t a[4][4];
  query_operands<kBits, kWarps>(shared, my, a);
  const float unit = shared.unit[my.query];
  const float of_mine = my.lower ? unit : unit * 65536;
  const float of_other = my.lower ? unit * 65536 : unit;
  const float bias = shared.bias[my.query];
  for (int chunk = chunks.first + my.warp; chunk < chunks.end; chunk += kWarps) {
    uint2 live{};
    if (row_bits != nullptr) live = live_words[chunk];
    const std::byte* codes = copies.take();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float4 made = score_half<kBits>(codes + half * kHalfSlots * CodeBytes<kBits>::kRowBytes, a,
                                      my, of_mine, of_other, bias);
      if (row_bits != nullptr) forget_empty(made, half == 0 ? live.x : live.y, my);
      scores[((chunk - chunks.first) * 2 + half) * 32] = made;
      low = fminf(low, fminf(fminf(made.x, made.y), fminf(made.z, made.w)));
      high = fmaxf(high, fmaxf(fmaxf(made.x, made.y), fmaxf(made.z, made.w)));
    }
  }
  return {low, high};
}

/// Adds the values of a warp's chunks.
template <int kBits, int kWarps>
__device__ __forceinline__ void add_chunks(ChunkCopies<kBits, kWarps>& copies,
                                           const BlockChunks& chunks, const float4* scores,
                                           const ScoreWeighting& weighting, const PictureThread& my,
                                           int (&sums)[16][4], int (&mass)[4]) {
  for (int chunk = chunks.first + my.warp; chunk < chunks.end; chunk += kWarps) {
    const int left = chunks.slots - chunk * kChunkSlots;
    uint32_t a[2][4];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      weight_operands(scores[((chunk - chunks.first) * 2 + half) * 32], weighting, my,
                      left - half * kHalfSlots, a[half]);
    }
    const std::byte* codes = copies.take();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      add_half<kBits>(codes + half * kHalfSlots * CodeBytes<kBits>::kRowBytes, a[half], my, sums,
                      mass);
    }
  }
}

/// Adds what a warp has to the sums of its block.
__device__ __forceinline__ void add_to_block(const int (&sums)[16][4], const int (&mass)[4],
                                             const PictureThread& my, DigitSums& of_block) {
#pragma unroll
  for (int side = 0; side < 2; ++side) {
    int* row = of_block.of_codes + DigitSums::row(my.row + 8 * side) + 2 * my.quarter;
#pragma unroll
    for (int tile = 0; tile < 16; ++tile) {
      atomicAdd(row + 8 * tile, sums[tile][2 * side]);
      atomicAdd(row + 8 * tile + 1, sums[tile][2 * side + 1]);
    }
    if (my.quarter == 0) atomicAdd(&of_block.of_weights[my.row + 8 * side], mass[2 * side]);
  }
}

/// Packed rows of lane blockIdx.x / blocks of a launch, of queries from 4 blockIdx.y on: the output
/// of a lane that no other kernel serves, else a softmax state.
template <int kKeyBits, int kValueBits, int kWarps>
__global__ void __launch_bounds__(32 * kWarps, 16 / kWarps)
    attend_picture(AttendArgs args, FusedArgs fused, int served, int blocks) {
  constexpr int kWarpStages =
      std::max(CodeBytes<kKeyBits>::kStageBytes, CodeBytes<kValueBits>::kStageBytes);
  extern __shared__ float4 memory[];
  __shared__ PictureShared<kWarps> shared;
  // The kernel that stores new rows has waited for all before it (store_new_rows()); what has
  // started since writes nothing that is read here, but states: queries that change their basis are
  // not these (is_one_block).
  let_next_start();
  const int index = static_cast<int>(blockIdx.x) / blocks;
  const int at = lane_at(args, index);
  PictureRun keys;
  PictureRun values;
  // Where runs lie follows from the lane's number: no load waits.
  const DeviceRun* runs = args.runs + static_cast<int64_t>(at) * args.lane_runs;
  keys.load(runs[0]);
  values.load(runs[args.lane_runs / 2]);
  const DeviceLane lane = lane_of(args, at);
  if (keys.kernel != picture_run(served)) return wait_for_earlier();
  const PictureCluster cluster{blocks, static_cast<int>(blockIdx.x) % blocks};
  const int slots = keys.slots;
  const int of_lane = (slots + kChunkSlots - 1) / kChunkSlots;
  const int of_block = (of_lane + blocks - 1) / blocks;
  const int first = cluster.rank * of_block;
  const BlockChunks chunks{slots, first, min(first + of_block, of_lane)};
  const int first_query = static_cast<int>(blockIdx.y) * kGroupQueries;
  const int row_parts = lane.splits[0].end;
  ScoreRemap remap{};
  if (lane.remaps > 0) remap = args.remaps[lane.first_remap];
  const PictureThread my;
  auto* stages = reinterpret_cast<std::byte*>(memory) + my.warp * kWarpStages;
  float4* scores = memory + kWarps * kWarpStages / 16 + my.warp_lane;  // of chunk `first`

  ChunkCopies<kKeyBits, kWarps> key_chunks(keys.block.codes, slots, first, chunks.end, stages, my);
  if (my.warp < kGroupQueries) {
    fold_queries<kKeyBits, kWarps>(args, lane, keys, first_query, my, shared);
  }
  begin_sums(args, values, my, shared);
  __syncthreads();
  float2 ends = score_chunks(key_chunks, chunks, lane.live, my, shared, scores);
  ends = ends_of_block(ends.x, ends.y, my, cluster, shared);
  ChunkCopies<kValueBits, kWarps> value_chunks(values.block.codes, slots, first, chunks.end, stages,
                                               my);
  ends = ends_of_lane(ends, my, cluster, shared);
  const float low = ends.x;
  const float high = ends.y;
  ScoreWeighting weighting{kLog2e, high, kWeightBits};
  const bool one_of_query = threadIdx.x < 16 && my.quarter == 0;
  float top = high;
  if (lane.remaps > 0 && high >= low) {
    const bool counts = one_of_query && cluster.rank == 0 && first_query + my.query < args.q_per_kv;
    const float slope = remap_slope(args, remap, low, high, counts);
    weighting = {slope * kLog2e, slope >= 0 ? high : low, kWeightBits};
    top = slope * (weighting.top - low) + low - remap.tau_low;
  }
  // Where no score is a number the output is none either, but if all rows have gone.
  const bool gone = lane.live != nullptr && lane.live[0] == 0;
  if (one_of_query) shared.top[my.query] = high >= low ? top * kLog2e : gone ? -INFINITY : INFINITY;

  int sums[16][4] = {};
  int mass[4] = {};
  add_chunks(value_chunks, chunks, scores, weighting, my, sums, mass);
  if (first + my.warp < chunks.end) add_to_block(sums, mass, my, shared.sums);
  cluster.sync();
  wait_for_earlier();  // for the states of full rows
  const bool alone = lane.fused == served;
  const LaneStates states(args, fused, index, alone ? 0 : (lane.passes - 1) * fused.lane_splits,
                          row_parts);
  write_state<kValueBits, kWarps>(
      shared, cluster, first_query, min(kGroupQueries, args.q_per_kv - first_query),
      [&](int query, int channel, float top, float mass, float out) {
        if (alone) {
          lane.out[query * kDim + channel] = states.merge(top, mass, out, query, channel);
          return;
        }
        if (channel == 0) states.ends[query] = {top, mass};
        states.outs[query * kDim + channel] = out;
      });
  cluster.await_readers();
}

}  // namespace kvlm::cuda::packed
