#pragma once

#include "kernels/cuda/attend/fused_attention.h"
#include "kernels/cuda/attend/fused_choice.h"
#include "kernels/cuda/attend/image_choice.h"
#include "kernels/cuda/attend/image_products.cuh"
#include "kernels/cuda/attend/score_places.cuh"
#include "kernels/cuda/device/cluster.cuh"

// Decode attention of one KV head over an image packed as one block, by one thread block, or by a
// cluster of them if KV heads are few: all scores first, which stay in shared memory, then their
// least and greatest, then V. Every packed byte is read once for each four queries. A warp takes
// chunks of 64 slots (image_products.cuh).
//
// The tensor cores multiply bytes. Codes are used as stored: a mask selects one of every byte,
// times a power of two. Queries and weights are 32-bit integers of four digits; the four digits of
// four queries are the 16 rows of an operand. Integer sums are exact, so a result does not depend
// on how many warps or blocks share a KV head. A weight is a fixed-point number of at most 1, which
// needs the greatest score first. So CalibQuant's remap, which needs least and greatest, is free.
namespace kvlm::cuda::packed {

/// Least and greatest score of a thread's query in its block, which it publishes to the cluster.
template <int kWarps>
__device__ float2 ends_of_block(float low, float high, const ImageThread& my,
                                const Cluster& cluster, ImageShared<kWarps>& shared) {
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

/// The same over all blocks of the cluster.
template <int kWarps>
__device__ float2 ends_of_head(float2 ends, const ImageThread& my, const Cluster& cluster,
                               const ImageShared<kWarps>& shared) {
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

/// Softmax states of a KV head in FusedArgs, to merge with or to write.
struct HeadStates {
  float2* ends;
  float* outs;
  int count;
  int q_per_kv;

  ///   first  index of the first among the KV head's
  __device__ HeadStates(const AttendArgs& args, const FusedArgs& fused, int index, int first,
                        int count)
      : count(count), q_per_kv(args.q_per_kv) {
    const int64_t at = (static_cast<int64_t>(index) * fused.splits + first) * q_per_kv;
    ends = fused.ends + at;
    outs = fused.outs + at * kDim;
  }
  /// Output of a channel: these states merged with that of the packed tokens.
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

/// Calls write(query, channel, top, weights, out) with the softmax state of the packed tokens. Each
/// block of a cluster does so for some of the channels.
template <int kBits, int kWarps, class Write>
__device__ void write_state(const ImageShared<kWarps>& shared, const Cluster& cluster,
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

/// The chunks of a thread block.
struct BlockChunks {
  int slots;  // of the KV head
  int first;
  int end;
};

/// Clears the block's sums, and finds scale and zero point of each channel of V.
template <int kWarps>
__device__ __forceinline__ void begin_sums(const AttendArgs& args, const ImageSegment& values,
                                           const ImageThread& my, ImageShared<kWarps>& shared) {
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

/// Scores of a warp's chunks; returns the least and the greatest. `row_bits` are the KV head's
/// PackedRowBits; null: no token is evicted.
template <int kBits, int kWarps>
__device__ __forceinline__ float2 score_chunks(ChunkCopies<kBits, kWarps>& copies,
                                               const BlockChunks& chunks, const uint32_t* row_bits,
                                               const ImageThread& my,
                                               const ImageShared<kWarps>& shared, float4* scores) {
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
                                           const ScoreWeighting& weighting, const ImageThread& my,
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

/// Adds a warp's sums to those of its block.
__device__ __forceinline__ void add_to_block(const int (&sums)[16][4], const int (&mass)[4],
                                             const ImageThread& my, DigitSums& of_block) {
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

/// Packed tokens of KV head blockIdx.x / blocks of a launch, for queries from 4 blockIdx.y on. If
/// the other tokens are unpacked, merges their states and writes the output; else writes a state.
template <int kKeyBits, int kValueBits, int kWarps>
__global__ void __launch_bounds__(32 * kWarps, 16 / kWarps)
    attend_image(AttendArgs args, FusedArgs fused, int served, int blocks) {
  constexpr int kWarpStages =
      std::max(CodeBytes<kKeyBits>::kStageBytes, CodeBytes<kValueBits>::kStageBytes);
  extern __shared__ float4 memory[];
  __shared__ ImageShared<kWarps> shared;
  // The kernel that stores new tokens has waited for all before it (store_new_rows()). Of later
  // kernels, only states are read here: is_one_block() refuses queries of another basis.
  let_next_start();
  const int index = static_cast<int>(blockIdx.x) / blocks;
  const int at = head_at(args, index);
  ImageSegment keys;
  ImageSegment values;
  // Segments are found from the KV head's index: their loads wait for no other.
  const DeviceSegment* segments = args.segments + static_cast<int64_t>(at) * args.head_segments;
  keys.load(segments[0]);
  values.load(segments[args.head_segments / 2]);
  const DeviceHead head = head_of(args, at);
  if (keys.kernel != image_segment(served)) return wait_for_earlier();
  const Cluster cluster{blocks, static_cast<int>(blockIdx.x) % blocks};
  const int slots = keys.slots;
  const int of_head = (slots + kChunkSlots - 1) / kChunkSlots;
  const int of_block = (of_head + blocks - 1) / blocks;
  const int first = cluster.rank * of_block;
  const BlockChunks chunks{slots, first, min(first + of_block, of_head)};
  const int first_query = static_cast<int>(blockIdx.y) * kGroupQueries;
  const int row_parts = head.splits[0].end;
  ScoreRemap remap{};
  if (head.remaps > 0) remap = args.remaps[head.first_remap];
  const ImageThread my;
  auto* stages = reinterpret_cast<std::byte*>(memory) + my.warp * kWarpStages;
  float4* scores = memory + kWarps * kWarpStages / 16 + my.warp_lane;  // of chunk `first`

  ChunkCopies<kKeyBits, kWarps> key_chunks(keys.block.codes, slots, first, chunks.end, stages, my);
  if (my.warp < kGroupQueries) {
    fold_queries<kKeyBits, kWarps>(args, head, keys, first_query, my, shared);
  }
  begin_sums(args, values, my, shared);
  __syncthreads();
  float2 ends = score_chunks(key_chunks, chunks, head.live, my, shared, scores);
  ends = ends_of_block(ends.x, ends.y, my, cluster, shared);
  ChunkCopies<kValueBits, kWarps> value_chunks(values.block.codes, slots, first, chunks.end, stages,
                                               my);
  ends = ends_of_head(ends, my, cluster, shared);
  const float low = ends.x;
  const float high = ends.y;
  ScoreWeighting weighting{kLog2e, high, kWeightBits};
  const bool one_of_query = threadIdx.x < 16 && my.quarter == 0;
  float top = high;
  if (head.remaps > 0 && high >= low) {
    const bool counts = one_of_query && cluster.rank == 0 && first_query + my.query < args.q_per_kv;
    const float slope = remap_slope(args, remap, low, high, counts);
    weighting = {slope * kLog2e, slope >= 0 ? high : low, kWeightBits};
    top = slope * (weighting.top - low) + low - remap.tau_low;
  }
  // If no score is a number, the output is NaN, unless all tokens are evicted.
  const bool gone = head.live != nullptr && head.live[0] == 0;
  if (one_of_query) shared.top[my.query] = high >= low ? top * kLog2e : gone ? -INFINITY : INFINITY;

  int sums[16][4] = {};
  int mass[4] = {};
  add_chunks(value_chunks, chunks, scores, weighting, my, sums, mass);
  if (first + my.warp < chunks.end) add_to_block(sums, mass, my, shared.sums);
  cluster.sync();
  wait_for_earlier();  // for the states of unpacked tokens
  const bool alone = head.fused == served;
  const HeadStates states(args, fused, index, alone ? 0 : (head.passes - 1) * fused.head_splits,
                          row_parts);
  write_state<kValueBits, kWarps>(
      shared, cluster, first_query, min(kGroupQueries, args.q_per_kv - first_query),
      [&](int query, int channel, float top, float mass, float out) {
        if (alone) {
          head.out[query * kDim + channel] = states.merge(top, mass, out, query, channel);
          return;
        }
        if (channel == 0) states.ends[query] = {top, mass};
        states.outs[query * kDim + channel] = out;
      });
  cluster.await_readers();
}

}  // namespace kvlm::cuda::packed
