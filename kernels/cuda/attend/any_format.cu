#include <algorithm>
#include <vector>

#include "kernels/cuda/attend/any_format.h"
#include "kernels/cuda/attend/attend_layer.h"
#include "kernels/cuda/attend/attend_packed.h"
#include "kernels/cuda/device/launch.cuh"
#include "kernels/quantize.h"

// The kernels that read any format, block by block, with dead rows or without: scores, a warp
// taking 32 rows of a block at a time, sums of values, a thread a channel, and rows as floats.
namespace kvlm::cuda {

using namespace packed;

namespace {

constexpr int kWarps = 4;
constexpr int kThreads = 32 * kWarps;
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
    const int bits = code_bits(section.code);
    if (bits != 0 && 8 % bits == 0) {
      const int per_byte = 8 / bits;
      const int mask = (1 << bits) - 1;
      for (int i = 0; i < n; i += per_byte) {
        int word = row[i / per_byte];
        for (int j = 0; j < per_byte && i + j < n; ++j, word >>= bits) {
          body(channel + i + j, word & mask);
        }
      }
    } else {
      for (int i = 0; i < n; ++i) body(channel + i, code_at(row, section.code, i));
    }
    channel += n;
    row += section.row_bytes();
  }
}

/// Scores of the keys of a split. A warp takes 32 rows and each of its threads multiplies one of
/// them; where these rows share their scales, the warp folds the scales into the queries first.
__global__ void __launch_bounds__(kThreads) score_splits(AttendArgs args) {
  extern __shared__ float shared[];
  Split split;
  if (!find_split(args, split)) return;
  const DeviceLane lane = lane_of(args, split.lane);
  const DeviceRun run = args.runs[split.run];
  const int warp = static_cast<int>(threadIdx.x / 32);
  const int thread = static_cast<int>(threadIdx.x % 32);

  if (run.rows != nullptr) {  // full rows: a warp a row
    const int64_t row_bytes =
        static_cast<int64_t>(args.head_dim) * (run.dtype == DType::kF32 ? 4 : 2);
    for (int i = warp; i < split.count; i += kWarps) {
      const std::byte* row = run.rows + (split.first + i) * row_bytes;
      for (int query = 0; query < args.q_per_kv; ++query) {
        float dot = 0;
        for (int c = thread; c < args.head_dim; c += 32) {
          dot += lane.q[query * args.head_dim + c] * element(row, run.dtype, c);
        }
        dot = warp_sum(dot);
        if (thread == 0) {
          lane.weights[static_cast<int64_t>(query) * lane.slots + run.first_slot + split.first +
                       i] = args.scale * dot;
        }
      }
    }
    return;
  }

  const PackedFormat& format = args.formats[run.format];
  const int channels = format.channels();
  const float* queries = run.q != nullptr ? run.q : lane.q;
  float* folded = shared + warp * channels * kQueries;  // (channels, kQueries) of this warp
  const bool by_token = format.axis == ScaleAxis::kToken;
  int chunk = 0;
  for (int b = 0; b < split.count; ++b) {
    const DeviceBlock block = block_of(args.blocks, run, split.first + b);
    for (int first = 0; first < block.rows; first += 32, ++chunk) {
      if (chunk % kWarps != warp) continue;
      const int row = first + thread;
      const bool there = row < block.rows && is_live(block, row);
      const int slot = there ? block.first_slot + live_before(block, row) : 0;
      const auto* codes = reinterpret_cast<const uint8_t*>(block.codes) +
                          static_cast<size_t>(row) * format.row_bytes();
      for (int base = 0; base < args.q_per_kv; base += kQueries) {
        const int count = min(kQueries, args.q_per_kv - base);
        float bias[kQueries] = {};
        __syncwarp();
        for (int c = thread; c < channels; c += 32) {
          const ScaleZero meta = by_token ? ScaleZero{1, 0} : scale_zero(format, block, 0, c);
          for (int j = 0; j < kQueries; ++j) {
            const float q = j < count ? queries[(base + j) * channels + c] * args.scale : 0.0f;
            folded[c * kQueries + j] = q * meta.scale;
            bias[j] += q * meta.zero;
          }
        }
        for (int j = 0; j < kQueries; ++j) bias[j] = warp_sum(bias[j]);
        __syncwarp();
        if (!there) continue;
        float sums[kQueries] = {};
        if (by_token) {
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
            const float4 q = *reinterpret_cast<const float4*>(folded + c * kQueries);
            const auto x = static_cast<float>(code);
            products[0] += q.x * x, products[1] += q.y * x;
            products[2] += q.z * x, products[3] += q.w * x;
            plain[0] += q.x, plain[1] += q.y, plain[2] += q.z, plain[3] += q.w;
          });
          finish();
        } else {
          for_codes(format, codes, [&](int c, int code) {
            const float4 q = *reinterpret_cast<const float4*>(folded + c * kQueries);
            const auto x = static_cast<float>(code);
            sums[0] += q.x * x, sums[1] += q.y * x, sums[2] += q.z * x, sums[3] += q.w * x;
          });
        }
        for (int j = 0; j < count; ++j) {
          lane.weights[static_cast<int64_t>(base + j) * lane.slots + slot] = sums[j] + bias[j];
        }
      }
    }
  }
}

/// The lane's slot of a run's slot `i`: itself, or the place of the i-th chosen bit.
__device__ int selected_slot(const DeviceRun& run, int i) {
  if (run.selection == nullptr) return run.first_slot + i;
  for (int word = 0; word * 64 < run.selected_of; ++word) {
    uint64_t bits = run.selected_bit ? run.selection[word] : ~run.selection[word];
    const int here = min(64, run.selected_of - word * 64);
    if (here < 64) bits &= (uint64_t{1} << here) - 1;
    const int count = __popcll(bits);
    if (i >= count) {
      i -= count;
      continue;
    }
    for (; i > 0; --i) bits &= bits - 1;
    return run.first_slot + word * 64 + __ffsll(static_cast<long long>(bits)) - 1;
  }
  return run.first_slot;
}

/// Weighted sums of the values of a split; a thread has one channel.
__global__ void add_values(AttendArgs args) {
  __shared__ float weights[kAnySplitSlots][kQueries];
  Split split;
  if (!find_split(args, split)) return;
  const DeviceLane lane = lane_of(args, split.lane);
  const DeviceRun run = args.runs[split.run];
  const auto channel = static_cast<int>(threadIdx.x);
  const bool there = channel < args.head_dim;
  float* part =
      args.parts + static_cast<int64_t>(split.part) * args.q_per_kv * args.head_dim + channel;

  for (int base = 0; base < args.q_per_kv; base += kQueries) {
    const int count = min(kQueries, args.q_per_kv - base);
    const auto load_weights = [&](int rows, const auto& slot_of) {
      __syncthreads();
      for (int i = channel; i < rows * kQueries; i += static_cast<int>(blockDim.x)) {
        const int row = i / kQueries;
        const int j = i % kQueries;
        const int slot = slot_of(row);
        weights[row][j] = j < count && slot >= 0
                              ? lane.weights[static_cast<int64_t>(base + j) * lane.slots + slot]
                              : 0.0f;
      }
      __syncthreads();
    };
    float sums[kQueries] = {};
    if (run.rows != nullptr) {
      load_weights(split.count, [&](int row) {
        return lane.in_run_order ? run.first_slot + split.first + row
                                 : selected_slot(run, split.first + row);
      });
      const int64_t row_bytes =
          static_cast<int64_t>(args.head_dim) * (run.dtype == DType::kF32 ? 4 : 2);
      for (int row = 0; there && row < split.count; ++row) {
        const float x = element(run.rows + (split.first + row) * row_bytes, run.dtype, channel);
        for (int j = 0; j < kQueries; ++j) sums[j] += weights[row][j] * x;
      }
    } else {
      const PackedFormat& format = args.formats[run.format];
      const Channel place = there ? channel_of(format, channel) : Channel{};
      const PackedSection& section = format.section[place.section];
      const size_t offset = place.section == 0 ? 0 : format.section[0].row_bytes();
      const size_t row_bytes = format.row_bytes();
      const int bits = code_bits(section.code);
      const bool simple = bits != 0 && 8 % bits == 0;
      const size_t byte = offset + static_cast<size_t>(simple ? place.index * bits / 8 : 0);
      const int shift = simple ? place.index * bits % 8 : 0;
      const int mask = (1 << bits) - 1;
      for (int b = 0; b < split.count; ++b) {
        const DeviceBlock block = block_of(args.blocks, run, split.first + b);
        load_weights(block.rows, [&](int row) {
          if (!is_live(block, row)) return -1;
          const int slot = block.first_slot + live_before(block, row);
          return run.selection == nullptr || lane.in_run_order
                     ? slot
                     : selected_slot(run, slot - run.first_slot);
        });
        if (!there) continue;
        const auto* codes = reinterpret_cast<const uint8_t*>(block.codes);
        const auto code_of = [&](int row) {
          const uint8_t* at = codes + static_cast<size_t>(row) * row_bytes;
          if (simple) return static_cast<float>(at[byte] >> shift & mask);
          return static_cast<float>(code_at(at + offset, section.code, place.index));
        };
        if (format.axis == ScaleAxis::kToken) {
          for (int row = 0; row < block.rows; ++row) {
            const ScaleZero meta = scale_zero(format, block, row, channel);
            const float x = meta.scale * code_of(row) + meta.zero;
            for (int j = 0; j < kQueries; ++j) sums[j] += weights[row][j] * x;
          }
        } else {
          float products[kQueries] = {};
          float plain[kQueries] = {};
          for (int row = 0; row < block.rows; ++row) {
            const float code = code_of(row);
            for (int j = 0; j < kQueries; ++j) {
              products[j] += weights[row][j] * code;
              plain[j] += weights[row][j];
            }
          }
          const ScaleZero meta = scale_zero(format, block, 0, channel);
          for (int j = 0; j < kQueries; ++j) {
            sums[j] += meta.scale * products[j] + meta.zero * plain[j];
          }
        }
      }
    }
    for (int j = 0; there && j < count; ++j) part[(base + j) * args.head_dim] = sums[j];
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
    const CodeFormat code = format.section[place.section].code;
    const auto* codes = reinterpret_cast<const uint8_t*>(block.codes) +
                        (place.section == 0 ? 0 : format.section[0].row_bytes());
    ScaleZero meta{};
    if (!by_row) meta = scale_zero(format, block, 0, c);
    int64_t to = first_live;
#pragma unroll 4
    for (int row = first; row < end; ++row) {
      if (!is_live(block, row)) continue;
      if (by_row) meta = scale_zero(format, block, row, c);
      out[to++ * channels + c] =
          meta.scale * static_cast<float>(code_at(codes + row * row_bytes, code, place.index)) +
          meta.zero;
    }
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

void score_any(const AttendArgs& args, const Splits& splits, int channels, Stream& stream) {
  const size_t shared = sizeof(float) * kWarps * kQueries * static_cast<size_t>(channels);
  score_splits<<<dim3(splits.runs, splits.most), kThreads, shared, native(stream)>>>(args);
}

void add_any(const AttendArgs& args, const Splits& splits, Stream& stream) {
  const auto threads = static_cast<unsigned>(ceil_div(args.head_dim, 32) * 32);
  add_values<<<dim3(splits.runs, splits.most), threads, 0, native(stream)>>>(args);
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
