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

// Two passes as in two_pass.cuh, for the segments that none of its kernels reads: any format and
// alignment, blocks with evicted tokens, unpacked tokens of any type. In f32, without tensor cores:
// for scores a thread has one token of a block, for values one channel. And unpack_blocks().
namespace kvlm::cuda {

using namespace packed;

namespace {

constexpr int kQueries = 4;  // for each time that codes are read

__device__ bool is_live(const DeviceBlock& block, int row) {
  return block.live == nullptr || (block.live[row / 64] >> (row % 64) & 1) != 0;
}

/// Live tokens before `row`.
__device__ int live_before(const DeviceBlock& block, int row) {
  if (block.live == nullptr) return row;
  int count = 0;
  for (int word = 0; word < row / 64; ++word) count += __popcll(block.live[word]);
  const uint64_t rest = block.live[row / 64] & ((uint64_t{1} << (row % 64)) - 1);
  return count + (row % 64 == 0 ? 0 : __popcll(rest));
}

/// Position of a channel in a packed token.
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

/// Scale and zero point of a channel of a token: x = scale * c + zero.
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

/// Calls body(channel, code) for every channel of a token, in order.
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

/// The split of a thread block, of keys or of values, and the segments that kAnyKernel reads.
struct AnySplit {
  int first_segment;
  int last_segment;
  int pass = 0;
  SlotRange slots{};  // of the split

  /// False if the block has no work.
  __device__ bool take(const AttendArgs& args, const DeviceHead& head, bool keys) {
    first_segment = keys ? head.first_keys : head.last_keys + 1;
    last_segment = keys ? head.last_keys : head.last_values;
    bool serves = false;
    int all = 0;
    for (int i = first_segment; i <= last_segment; ++i) {
      const DeviceSegment& segment = args.segments[i];
      all = max(all, segment.first_slot + segment.slots);
      if (segment.kernel != kAnyKernel) continue;
      serves = true;
      pass = segment.pass;
    }
    const auto split = static_cast<int>(blockIdx.y);
    if (head.fused != 0 || !serves || split >= fused_splits_of(all)) return false;
    slots = {fused_part(all, split, 0).first, fused_part(all, split, kSplitParts - 1).end};
    return true;
  }
  /// Calls rows(segment, first, end) for unpacked tokens [first, end) of a segment in the split,
  /// and block(segment, block) for blocks that begin in the split.
  template <class Rows, class Block>
  __device__ void each(const AttendArgs& args, const Rows& rows, const Block& block) const {
    for (int i = first_segment; i <= last_segment; ++i) {
      const DeviceSegment& segment = args.segments[i];
      if (segment.kernel != kAnyKernel || segment.slots == 0) continue;
      const int first = max(0, slots.first - segment.first_slot);
      const int end = min(segment.slots, slots.end - segment.first_slot);
      if (segment.rows != nullptr) {
        if (first < end) rows(segment, first, end);
      } else if (segment.block_rows != 0) {
        const int begin = (first + segment.block_rows - 1) / segment.block_rows;
        for (int b = begin; b * segment.block_rows < end; ++b)
          block(segment, block_of(args.blocks, segment, b));
      } else {
        for (int b = 0; b < segment.units; ++b) {
          const int slot = args.blocks[segment.listed + b].first_slot;
          if (slot >= slots.first && slot < slots.end)
            block(segment, block_of(args.blocks, segment, b));
        }
      }
    }
  }
};

/// Stores the score of a key for `query`, and extends the range of its remap to it.
///   place  of the value; -1: evicted
__device__ void store_score(const AttendArgs& args, const DeviceHead& head, int number, int slot,
                            int place, int query, float score) {
  if (place < 0) return;
  head.weights[query * args.score_stride + place] = score;
  const int remap = RemapSlots(args, head, slot).remap;
  if (remap < 0) return;
  ScoreRange& range = ranges_of(args, number, remap)[query];
  atomicMin(&range.least, ScoreRange::ordered(score));
  atomicMax(&range.greatest, ScoreRange::ordered(score));
}

/// Scores of a token for kQueries queries: the sum of scale q c + zero q over its channels.
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

/// Scores of the keys of a split. A warp takes 32 tokens, one per thread. If these share their
/// scales, the warp first folds the scales into the queries.
__global__ void __launch_bounds__(kThreads) score_any(AttendArgs args) {
  extern __shared__ float shared[];
  const auto number = static_cast<int>(blockIdx.x);
  const int at = head_at(args, number);
  const DeviceHead head = head_of(args, at);
  wait_for_earlier();
  let_next_start();
  AnySplit split;
  if (!split.take(args, head, true)) return;
  const int warp = static_cast<int>(threadIdx.x / 32);
  const int thread = static_cast<int>(threadIdx.x % 32);
  const float scale = args.scale * kLog2e;
  const auto place_of = [&](const DeviceSegment& segment, int slot) {
    return score_place(args, head, at, segment.first_place + slot - segment.first_slot);
  };
  const auto score_rows = [&](const DeviceSegment& segment, int first, int end) {  // a warp each
    const int64_t row_bytes =
        static_cast<int64_t>(args.head_dim) * (segment.dtype == DType::kF32 ? 4 : 2);
    for (int i = first + warp; i < end; i += kWarps) {
      const std::byte* row = segment.rows + i * row_bytes;
      const int place = __shfl_sync(0xffffffffu, place_of(segment, segment.first_slot + i), 0);
      for (int query = 0; query < args.q_per_kv; ++query) {
        float dot = 0;
        for (int c = thread; c < args.head_dim; c += 32) {
          dot += head.q[query * args.head_dim + c] * element(row, segment.dtype, c);
        }
        dot = warp_sum(dot);
        if (thread != 0) continue;
        store_score(args, head, number, segment.first_slot + i, place, query, scale * dot);
      }
    }
  };
  int chunk = 0;
  const auto score_block = [&](const DeviceSegment& segment, const DeviceBlock& block) {
    const PackedFormat& format = args.formats[segment.format];
    const int channels = format.channels();
    const float* queries = segment.q != nullptr ? segment.q : head.q;
    float* folded = shared + warp * channels * kQueries;  // (channels, kQueries) of this warp
    const bool by_token = format.axis == ScaleAxis::kToken;
    for (int first = 0; first < block.rows; first += 32, ++chunk) {
      if (chunk % kWarps != warp) continue;
      const int row = first + thread;
      const bool there = row < block.rows && is_live(block, row);
      const int before = live_before(block, first);
      const int slot = block.first_slot + (there ? live_before(block, row) : before);
      const int places = place_of(segment, block.first_slot + before);
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
          store_score(args, head, number, slot, place, base + j, sums[j] + bias[j]);
        }
      }
    }
  };
  split.each(args, score_rows, score_block);
}

constexpr int kAnyRows = 256;  // of a chunk of values

/// Online softmax of a thread block over chunks of tokens, for kQueries queries at a time.
struct AnySoftmax {
  float top[kQueries] = {-INFINITY, -INFINITY, -INFINITY, -INFINITY};
  float mass[kQueries] = {};
  float sums[kQueries] = {};  // of this thread's channel

  /// Replaces the `rows` scores in `weights` by weights. By all threads.
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

/// Adds the values of a chunk of a packed block, by weight, for the thread's channel.
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

/// Softmax state of the values of a split, one channel per thread.
__global__ void add_any(AttendArgs args, FusedArgs fused) {
  __shared__ float weights[kAnyRows][kQueries];
  const auto number = static_cast<int>(blockIdx.x);
  const int at = head_at(args, number);
  const DeviceHead head = head_of(args, at);
  wait_for_earlier();
  let_next_start();
  AnySplit split;
  if (!split.take(args, head, false)) return;
  const auto thread = static_cast<int>(threadIdx.x);
  const bool there = thread < args.head_dim;
  for (int base = 0; base < args.q_per_kv; base += kQueries) {
    const int count = min(kQueries, args.q_per_kv - base);
    AnySoftmax state;
    /// Weights of `rows` tokens in slots slot_of(row), -1 if evicted.
    const auto weigh = [&](const DeviceSegment& segment, int rows, const auto& slot_of) {
      __syncthreads();
      for (int i = thread; i < rows * kQueries; i += static_cast<int>(blockDim.x)) {
        const int j = i % kQueries;
        const int slot = slot_of(i / kQueries);
        const int place = segment.first_place + slot - segment.first_slot;
        const bool live =
            slot >= 0 && j < count &&
            (!head.placed || args.key_at[static_cast<int64_t>(at) * args.places + place] >= 0);
        float& weight = weights[i / kQueries][j];
        weight = -INFINITY;
        if (!live) continue;
        const RemappedScores remapped(args, head, number, RemapSlots(args, head, slot).remap,
                                      base + j, false);
        weight = remapped(head.weights[(base + j) * args.score_stride + place]);
      }
      state.weigh(weights, rows);
    };
    const auto add_rows = [&](const DeviceSegment& segment, int first, int end) {
      const int64_t row_bytes =
          static_cast<int64_t>(args.head_dim) * (segment.dtype == DType::kF32 ? 4 : 2);
      for (; first < end; first += kAnyRows) {
        const int rows = min(kAnyRows, end - first);
        weigh(segment, rows, [&](int row) { return segment.first_slot + first + row; });
        for (int row = 0; there && row < rows; ++row) {
          const float x = element(segment.rows + (first + row) * row_bytes, segment.dtype, thread);
          for (int j = 0; j < kQueries; ++j) state.sums[j] += weights[row][j] * x;
        }
      }
    };
    const auto add_block = [&](const DeviceSegment& segment, const DeviceBlock& block) {
      for (int first = 0; first < block.rows; first += kAnyRows) {
        const int rows = min(kAnyRows, block.rows - first);
        weigh(segment, rows, [&](int row) {
          if (!is_live(block, first + row)) return -1;
          return block.first_slot + live_before(block, first + row);
        });
        if (!there) continue;
        add_chunk(args.formats[segment.format], block, first, rows, weights, thread, state.sums);
      }
    };
    split.each(args, add_rows, add_block);
    const int64_t to = (static_cast<int64_t>(number) * fused.splits +
                        split.pass * fused.head_splits + static_cast<int>(blockIdx.y)) *
                           args.q_per_kv +
                       base;
    for (int j = 0; j < count; ++j) {
      if (there) fused.outs[(to + j) * args.head_dim + thread] = state.sums[j];
      // Without tokens: finite, since a merge of -inf bases would give NaN.
      if (thread == 0) fused.ends[to + j] = {fmaxf(state.top[j], -FLT_MAX), state.mass[j]};
    }
  }
}

constexpr int kUnpackThreads = 128;
constexpr int kUnpackRows = 32;

/// A thread block unpacks kUnpackRows tokens of packed block blockIdx.x, with neighbouring channels
/// in neighbouring threads.
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

/// Uploads blocks and their bitmaps.
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
  const dim3 grid(static_cast<unsigned>(fused.heads), static_cast<unsigned>(fused.head_splits));
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
