#include <algorithm>
#include <cfloat>
#include <vector>

#include "kernels/cuda/attend/any_format.h"
#include "kernels/cuda/attend/attend_packed.h"
#include "kernels/cuda/attend/fused_splits.h"
#include "kernels/cuda/attend/score_places.cuh"
#include "kernels/cuda/attend/two_pass.h"
#include "kernels/cuda/device/launch.cuh"
#include "kernels/quantize.h"

// The kernels that read any format, block by block, with dead rows or without: the two passes of
// two_pass.cuh, scores with a warp taking 32 rows of a block at a time, values with a channel a
// thread; and rows as floats.
namespace kvlm::cuda {

using namespace packed;

namespace {

constexpr int kQueries = 4;  // of one pass over codes

__device__ bool is_live(const DeviceBlock& block, int row) {
  return block.live == nullptr || (block.live[row / 64] >> (row % 64) & 1) != 0;
}

/// Live rows before `row`.
__device__ int live_before(const DeviceBlock& block, int row) {
  if (block.live == nullptr) return row;
  int count = 0;
  for (int word = 0; word < row / 64; ++word) count += __popcll(block.live[word]);
  const uint64_t rest = block.live[row / 64] & ((uint64_t{1} << (row % 64)) - 1);
  return count + (row % 64 == 0 ? 0 : __popcll(rest));
}

/// Where a channel of a packed row lies.
struct Channel {
  int section;
  int index;  // within the section
  int zero;   // index of its stored zero point, -1 if it has none
};

__device__ Channel channel_of(const PackedFormat& format, int channel) {
  const int first = format.section[0].channels;
  if (channel < first) {
    return {0, channel, format.section[0].zero_stored ? channel : -1};
  }
  const int before = format.section[0].zero_stored ? first : 0;
  return {1, channel - first, format.section[1].zero_stored ? before + channel - first : -1};
}

/// Scale and zero point of a channel of a row, as x = scale * c + zero.
struct ScaleZero {
  float scale;
  float zero;
};

__device__ ScaleZero scale_zero(const PackedFormat& format, const DeviceBlock& block, int row,
                                int channel) {
  size_t at = 0;
  size_t zero_at = 0;
  const Channel place = channel_of(format, channel);
  const PackedSection& section = format.section[place.section];
  if (format.axis == ScaleAxis::kChannel) {
    at = static_cast<size_t>(channel);
    zero_at = static_cast<size_t>(max(place.zero, 0));
  } else if (format.axis == ScaleAxis::kToken) {
    at = zero_at = static_cast<size_t>(row) * static_cast<size_t>(format.groups()) +
                   static_cast<size_t>(channel / format.group_size);
  }
  const float scale = meta_at(block.scales, format.meta, at);
  const float zero = section.zero_stored ? meta_at(block.zeros, format.meta, zero_at)
                                         : section.offset_of(place.index) * scale;
  return {section.slope * scale, zero};
}

/// Calls body(channel, code) for every channel of a row, in order.
template <class Body>
__device__ void for_codes(const PackedFormat& format, const uint8_t* row, const Body& body) {
  int channel = 0;
  for (int s = 0; s < format.sections; ++s) {
    const PackedSection& section = format.section[s];
    const int n = section.channels;
    with_code(section.code, [&](auto code) {
      for (int i = 0; i < n; ++i) body(channel + i, code.at(row, i));
    });
    channel += n;
    row += section.row_bytes();
  }
}

/// The split of a lane that a block serves, of one side, and the runs of it that are not served on
/// the tensor cores.
struct AnySplit {
  int first_run;
  int last_run;
  int pass = 0;
  SlotRange slots{};  // of the split

  /// False if there is nothing to do.
  __device__ bool take(const AttendArgs& args, const DeviceLane& lane, bool keys) {
    first_run = keys ? lane.first_keys : lane.last_keys + 1;
    last_run = keys ? lane.last_keys : lane.last_values;
    bool serves = false;
    int all = 0;
    for (int i = first_run; i <= last_run; ++i) {
      const DeviceRun& run = args.runs[i];
      all = max(all, run.first_slot + run.slots);
      if (run.kernel != kAnyKernel) continue;
      serves = true;
      pass = run.pass;
    }
    const auto split = static_cast<int>(blockIdx.y);
    if (lane.fused != 0 || !serves || split >= fused_splits_of(all)) return false;
    slots = {fused_part(all, split, 0).first, fused_part(all, split, kSplitParts - 1).end};
    return true;
  }
  /// Calls rows(run, first, end) for rows [first, end) of full rows, and block(run, block) for
  /// blocks that begin in the split.
  template <class Rows, class Block>
  __device__ void each(const AttendArgs& args, const Rows& rows, const Block& block) const {
    for (int i = first_run; i <= last_run; ++i) {
      const DeviceRun& run = args.runs[i];
      if (run.kernel != kAnyKernel || run.slots == 0) continue;
      const int first = max(0, slots.first - run.first_slot);
      const int end = min(run.slots, slots.end - run.first_slot);
      if (run.rows != nullptr) {
        if (first < end) rows(run, first, end);
      } else if (run.block_rows != 0) {
        const int begin = (first + run.block_rows - 1) / run.block_rows;
        for (int b = begin; b * run.block_rows < end; ++b)
          block(run, block_of(args.blocks, run, b));
      } else {
        for (int b = 0; b < run.units; ++b) {
          const int slot = args.blocks[run.listed + b].first_slot;
          if (slot >= slots.first && slot < slots.end) block(run, block_of(args.blocks, run, b));
        }
      }
    }
  }
};

/// Stores the score of a row's key for `query`, and makes the range of its remap reach it.
///   place  where it goes; -1: the row has gone
__device__ void store_score(const AttendArgs& args, const DeviceLane& lane, int number, int slot,
                            int place, int query, float score) {
  if (place < 0) return;
  lane.weights[query * args.score_stride + place] = score;
  const int remap = RemapSlots(args, lane, slot).remap;
  if (remap < 0) return;
  ScoreRange& range = ranges_of(args, number, remap)[query];
  atomicMin(&range.least, ScoreRange::ordered(score));
  atomicMax(&range.greatest, ScoreRange::ordered(score));
}

/// Scores of a row: of kQueries queries, as x = sum of scale q c + zero q over its channels.
__device__ void score_row(const PackedFormat& format, const DeviceBlock& block, int row,
                          const uint8_t* codes, const float* folded, float (&sums)[kQueries]) {
  const auto q_of = [&](int channel) {
    return *reinterpret_cast<const float4*>(folded + channel * kQueries);
  };
  if (format.axis != ScaleAxis::kToken) {
    for_codes(format, codes, [&](int c, int code) {
      const float4 q = q_of(c);
      const auto x = static_cast<float>(code);
      sums[0] += q.x * x, sums[1] += q.y * x, sums[2] += q.z * x, sums[3] += q.w * x;
    });
    return;
  }
  // Group by group: scale times sum of q c, zero times sum of q.
  float products[kQueries] = {};
  float plain[kQueries] = {};
  int group = 0;
  const auto finish = [&] {
    const ScaleZero meta = scale_zero(format, block, row, group * format.group_size);
    for (int j = 0; j < kQueries; ++j) {
      sums[j] += meta.scale * products[j] + meta.zero * plain[j];
      products[j] = plain[j] = 0;
    }
  };
  for_codes(format, codes, [&](int c, int code) {
    if (c / format.group_size != group) {
      finish();
      ++group;
    }
    const float4 q = q_of(c);
    const auto x = static_cast<float>(code);
    products[0] += q.x * x, products[1] += q.y * x, products[2] += q.z * x, products[3] += q.w * x;
    plain[0] += q.x, plain[1] += q.y, plain[2] += q.z, plain[3] += q.w;
  });
  finish();
}

/// Scores of the keys of a split. A warp takes 32 rows and each of its threads multiplies one of
/// them; where these rows share their scales, the warp folds the scales into the queries first.
__global__ void __launch_bounds__(kThreads) score_any(AttendArgs args) {
  extern __shared__ float shared[];
  const auto number = static_cast<int>(blockIdx.x);
  const int at = lane_at(args, number);
  const DeviceLane lane = lane_of(args, at);
  wait_for_earlier();
  let_next_start();
  AnySplit split;
  if (!split.take(args, lane, true)) return;
  const int warp = static_cast<int>(threadIdx.x / 32);
  const int thread = static_cast<int>(threadIdx.x % 32);
  const float scale = args.scale * kLog2e;
  const auto place_of = [&](const DeviceRun& run, int slot) {
    return score_place(args, lane, at, run.first_place + slot - run.first_slot);
  };
  const auto score_rows = [&](const DeviceRun& run, int first, int end) {  // a warp a row
    const int64_t row_bytes =
        static_cast<int64_t>(args.head_dim) * (run.dtype == DType::kF32 ? 4 : 2);
    for (int i = first + warp; i < end; i += kWarps) {
      const std::byte* row = run.rows + i * row_bytes;
      const int place = __shfl_sync(0xffffffffu, place_of(run, run.first_slot + i), 0);
      for (int query = 0; query < args.q_per_kv; ++query) {
        float dot = 0;
        for (int c = thread; c < args.head_dim; c += 32) {
          dot += lane.q[query * args.head_dim + c] * element(row, run.dtype, c);
        }
        dot = warp_sum(dot);
        if (thread != 0) continue;
        store_score(args, lane, number, run.first_slot + i, place, query, scale * dot);
      }
    }
  };
  int chunk = 0;
  const auto score_block = [&](const DeviceRun& run, const DeviceBlock& block) {
    const PackedFormat& format = args.formats[run.format];
    const int channels = format.channels();
    const float* queries = run.q != nullptr ? run.q : lane.q;
    float* folded = shared + warp * channels * kQueries;  // (channels, kQueries) of this warp
    const bool by_token = format.axis == ScaleAxis::kToken;
    for (int first = 0; first < block.rows; first += 32, ++chunk) {
      if (chunk % kWarps != warp) continue;
      const int row = first + thread;
      const bool there = row < block.rows && is_live(block, row);
      const int before = live_before(block, first);
      const int slot = block.first_slot + (there ? live_before(block, row) : before);
      const int places = place_of(run, block.first_slot + before);
      const int place = __shfl_sync(0xffffffffu, places, slot - block.first_slot - before);
      const auto* codes = reinterpret_cast<const uint8_t*>(block.codes) +
                          static_cast<size_t>(row) * format.row_bytes();
      for (int base = 0; base < args.q_per_kv; base += kQueries) {
        const int count = min(kQueries, args.q_per_kv - base);
        float bias[kQueries] = {};
        __syncwarp();
        for (int c = thread; c < channels; c += 32) {
          const ScaleZero meta = by_token ? ScaleZero{1, 0} : scale_zero(format, block, 0, c);
          for (int j = 0; j < kQueries; ++j) {
            const float q = j < count ? queries[(base + j) * channels + c] * scale : 0.0f;
            folded[c * kQueries + j] = q * meta.scale;
            bias[j] += q * meta.zero;
          }
        }
        for (int j = 0; j < kQueries; ++j) bias[j] = warp_sum(bias[j]);
        __syncwarp();
        if (!there) continue;
        float sums[kQueries] = {};
        score_row(format, block, row, codes, folded, sums);
        for (int j = 0; j < count; ++j) {
          store_score(args, lane, number, slot, place, base + j, sums[j] + bias[j]);
        }
      }
    }
  };
  split.each(args, score_rows, score_block);
}

constexpr int kAnyRows = 256;  // of a chunk of values

/// The softmax of a block's threads over chunks of rows, for kQueries queries at a time.
struct AnySoftmax {
  float top[kQueries] = {-INFINITY, -INFINITY, -INFINITY, -INFINITY};
  float mass[kQueries] = {};
  float sums[kQueries] = {};  // of this thread's channel

  /// Makes weights of the `rows` scores in `weights`. By all threads.
  __device__ void weigh(float (&weights)[kAnyRows][kQueries], int rows) {
    __syncthreads();
    for (int j = 0; j < kQueries; ++j) {
      const float before = top[j];
      for (int row = 0; row < rows; ++row) top[j] = fmaxf(top[j], weights[row][j]);
      const float factor = before == top[j] ? 1 : exp2f(before - top[j]);
      mass[j] *= factor;
      sums[j] *= factor;
    }
    __syncthreads();
    for (int i = static_cast<int>(threadIdx.x); i < rows * kQueries;
         i += static_cast<int>(blockDim.x)) {
      float& weight = weights[i / kQueries][i % kQueries];
      weight = weight == -INFINITY ? 0 : exp2f(weight - top[i % kQueries]);
    }
    __syncthreads();
    for (int j = 0; j < kQueries; ++j) {
      float of_chunk = 0;
      for (int row = 0; row < rows; ++row) of_chunk += weights[row][j];
      mass[j] += of_chunk;
    }
  }
};

/// Adds the values of a chunk of a packed block, by weight: a thread has one channel.
__device__ void add_chunk(const PackedFormat& format, const DeviceBlock& block, int first, int rows,
                          const float (&weights)[kAnyRows][kQueries], int channel,
                          float (&sums)[kQueries]) {
  const Channel place = channel_of(format, channel);
  const PackedSection& section = format.section[place.section];
  const auto* codes = reinterpret_cast<const uint8_t*>(block.codes) +
                      (place.section == 0 ? 0 : format.section[0].row_bytes());
  const bool by_token = format.axis == ScaleAxis::kToken;
  ScaleZero meta{};
  if (!by_token) meta = scale_zero(format, block, 0, channel);
  const size_t row_bytes = format.row_bytes();
  with_code(section.code, [&](auto code) {
    for (int row = first; row < first + rows; ++row) {
      if (!is_live(block, row)) continue;
      if (by_token) meta = scale_zero(format, block, row, channel);
      const int c = code.at(codes + static_cast<size_t>(row) * row_bytes, place.index);
      const float x = meta.scale * static_cast<float>(c) + meta.zero;
      for (int j = 0; j < kQueries; ++j) sums[j] += weights[row - first][j] * x;
    }
  });
}

/// The softmax state of a split: a thread has one channel.
__global__ void add_any(AttendArgs args, FusedArgs fused) {
  __shared__ float weights[kAnyRows][kQueries];
  const auto number = static_cast<int>(blockIdx.x);
  const int at = lane_at(args, number);
  const DeviceLane lane = lane_of(args, at);
  wait_for_earlier();
  let_next_start();
  AnySplit split;
  if (!split.take(args, lane, false)) return;
  const auto thread = static_cast<int>(threadIdx.x);
  const bool there = thread < args.head_dim;
  for (int base = 0; base < args.q_per_kv; base += kQueries) {
    const int count = min(kQueries, args.q_per_kv - base);
    AnySoftmax state;
    /// Of `rows` rows, that in slot_of(row), -1 for none.
    const auto weigh = [&](const DeviceRun& run, int rows, const auto& slot_of) {
      __syncthreads();
      for (int i = thread; i < rows * kQueries; i += static_cast<int>(blockDim.x)) {
        const int j = i % kQueries;
        const int slot = slot_of(i / kQueries);
        const int place = run.first_place + slot - run.first_slot;
        const bool live =
            slot >= 0 && j < count &&
            (!lane.placed || args.key_at[static_cast<int64_t>(at) * args.places + place] >= 0);
        float& weight = weights[i / kQueries][j];
        weight = -INFINITY;
        if (!live) continue;
        const RemappedScores remapped(args, lane, number, RemapSlots(args, lane, slot).remap,
                                      base + j, false);
        weight = remapped(lane.weights[(base + j) * args.score_stride + place]);
      }
      state.weigh(weights, rows);
    };
    const auto add_rows = [&](const DeviceRun& run, int first, int end) {
      const int64_t row_bytes =
          static_cast<int64_t>(args.head_dim) * (run.dtype == DType::kF32 ? 4 : 2);
      for (; first < end; first += kAnyRows) {
        const int rows = min(kAnyRows, end - first);
        weigh(run, rows, [&](int row) { return run.first_slot + first + row; });
        for (int row = 0; there && row < rows; ++row) {
          const float x = element(run.rows + (first + row) * row_bytes, run.dtype, thread);
          for (int j = 0; j < kQueries; ++j) state.sums[j] += weights[row][j] * x;
        }
      }
    };
    const auto add_block = [&](const DeviceRun& run, const DeviceBlock& block) {
      for (int first = 0; first < block.rows; first += kAnyRows) {
        const int rows = min(kAnyRows, block.rows - first);
        weigh(run, rows, [&](int row) {
          if (!is_live(block, first + row)) return -1;
          return block.first_slot + live_before(block, first + row);
        });
        if (!there) continue;
        add_chunk(args.formats[run.format], block, first, rows, weights, thread, state.sums);
      }
    };
    split.each(args, add_rows, add_block);
    const int64_t to = (static_cast<int64_t>(number) * fused.splits +
                        split.pass * fused.lane_splits + static_cast<int>(blockIdx.y)) *
                           args.q_per_kv +
                       base;
    for (int j = 0; j < count; ++j) {
      if (there) fused.outs[(to + j) * args.head_dim + thread] = state.sums[j];
      // Where no slot has a row, any number, as a greater one makes it nothing.
      if (thread == 0) fused.ends[to + j] = {fmaxf(state.top[j], -FLT_MAX), state.mass[j]};
    }
  }
}

constexpr int kUnpackThreads = 128;
constexpr int kUnpackRows = 32;

/// Block (packed block, rows): kUnpackRows of its rows, a channel a thread, so that neighbouring
/// threads write side by side.
__global__ void __launch_bounds__(kUnpackThreads)
    unpack(const DeviceBlock* blocks, PackedFormat format, float* out) {
  const DeviceBlock& block = blocks[blockIdx.x];
  const int first = static_cast<int>(blockIdx.y) * kUnpackRows;
  const int end = min(block.rows, first + kUnpackRows);
  if (first >= end) return;
  const int first_live = block.first_slot + live_before(block, first);
  const int channels = format.channels();
  const auto row_bytes = static_cast<int64_t>(format.row_bytes());
  const bool by_row = format.axis == ScaleAxis::kToken;
  for (int c = static_cast<int>(threadIdx.x); c < channels; c += kUnpackThreads) {
    const Channel place = channel_of(format, c);
    const auto* codes = reinterpret_cast<const uint8_t*>(block.codes) +
                        (place.section == 0 ? 0 : format.section[0].row_bytes());
    ScaleZero meta{};
    if (!by_row) meta = scale_zero(format, block, 0, c);
    int64_t to = first_live;
    with_code(format.section[place.section].code, [&](auto code) {
#pragma unroll 4
      for (int row = first; row < end; ++row) {
        if (!is_live(block, row)) continue;
        if (by_row) meta = scale_zero(format, block, row, c);
        const int integer = code.at(codes + row * row_bytes, place.index);
        out[to++ * channels + c] = meta.scale * static_cast<float>(integer) + meta.zero;
      }
    });
  }
}

/// Blocks, (blocks,), with their bitmaps.
const DeviceBlock* upload_blocks(std::span<const PackedBlock> blocks, Stream& stream) {
  std::vector<uint64_t> bits;
  for (const PackedBlock& block : blocks) {
    if (block.live != nullptr) {
      bits.insert(bits.end(), block.live, block.live + (block.rows + 63) / 64);
    }
  }
  Queue& queue = stream.queue();
  const auto* live = reinterpret_cast<const uint64_t*>(
      bits.empty() ? nullptr : queue.upload(bits.data(), bits.size() * sizeof(uint64_t)));
  std::vector<DeviceBlock> made;
  int slot = 0;
  for (const PackedBlock& block : blocks) {
    const bool loses = block.live != nullptr;
    made.push_back(
        {block.codes, block.scales, block.zeros, loses ? live : nullptr, block.rows, slot});
    if (loses) live += (block.rows + 63) / 64;
    slot += block.live_rows;
  }
  return reinterpret_cast<const DeviceBlock*>(
      queue.upload(made.data(), made.size() * sizeof(DeviceBlock)));
}

}  // namespace

namespace packed {

void launch_any_pass(bool keys, const AttendArgs& args, const FusedArgs& fused, int channels,
                     Stream& stream) {
  const dim3 grid(static_cast<unsigned>(fused.lanes), static_cast<unsigned>(fused.lane_splits));
  if (keys) {
    const size_t shared = sizeof(float) * kWarps * kQueries * static_cast<size_t>(channels);
    launch_early("DecodeTable::attend", score_any, grid, kThreads, shared, stream, args);
  } else {
    const auto threads = static_cast<int>(ceil_div(args.head_dim, 32) * 32);
    launch_early("DecodeTable::attend", add_any, grid, threads, stream, args, fused);
  }
}

}  // namespace packed

void unpack_blocks(const PackedFormat& format, std::span<const PackedBlock> blocks, float* out,
                   Stream& stream) {
  int most = 0;
  for (const PackedBlock& block : blocks) most = std::max(most, block.rows);
  if (most == 0) return;
  const DeviceBlock* on_device = upload_blocks(blocks, stream);
  const dim3 grid(static_cast<unsigned>(blocks.size()),
                  static_cast<unsigned>(ceil_div(most, kUnpackRows)));
  unpack<<<grid, kUnpackThreads, 0, native(stream)>>>(on_device, format, out);
  check_launch("unpack_blocks");
}

}  // namespace kvlm::cuda
