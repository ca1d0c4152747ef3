#include "kernels/cuda/pack/pack_rows.cuh"
#include "kernels/cuda/table/pack_windows.h"

// Packs full windows of a DecodeTable from their rings into packed blocks: with scales per token a
// warp per token, with scales per channel a thread block per packed block. pack.cu packs all else.
// Compiled without fused multiply-adds, as pack.cu is.
namespace kvlm::cuda::packed {

namespace {

using namespace packing;

/// The window of KV head blockIdx.x in layer blockIdx.y; null if not full or packed by the host.
__device__ DeviceTail* full_window(const TableArgs& table, const WindowClass& windows, int side) {
  const int head = table.head_at(windows.layers[blockIdx.y], static_cast<int>(blockIdx.x));
  DeviceTail* tail = table.tails + head * 2 + side;
  return tail->full >= windows.trigger && tail->scales != nullptr ? tail : nullptr;
}

/// Destination of token `number` of a window.
struct PackedPlace {
  int block;
  int row;
};
__device__ PackedPlace packed_place(const DeviceTail& tail, int number) {
  if (!tail.placed) {
    const int at = tail.packed + number;
    return {at / tail.block_rows, at % tail.block_rows};
  }
  const int at = tail.filled + number;
  return {tail.targets[at / tail.block_rows], at % tail.block_rows};
}

/// Scales per token: token blockIdx.z of a window, by a warp.
__global__ void pack_token_rows(TableArgs table, const __grid_constant__ WindowClass windows,
                                int side) {
  extern __shared__ float room[];
  DeviceTail* of = full_window(table, windows, side);
  if (of == nullptr) return;
  const DeviceTail tail = *of;
  const auto number = static_cast<int>(blockIdx.z);
  const int channels = windows.format.channels();
  const std::byte* row = tail.ring + static_cast<int64_t>(tail.place(number)) * channels *
                                         (table.dtype == DType::kF32 ? 4 : 2);
  const PackedPlace to = packed_place(tail, number);
  std::byte* codes =
      tail.shares_codes ? nullptr : tail.codes + static_cast<int64_t>(to.block) * tail.code_stride;
  const int64_t scales = static_cast<int64_t>(to.block) * tail.scale_stride;
  std::byte* zeros = tail.zeros == nullptr ? nullptr : tail.zeros + scales;
  const auto in_block = static_cast<size_t>(to.row);
  if (is_short_row(windows.format, windows.rules[0])) {
    float x[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = element(row, table.dtype, 4 * warp_lane_id() + i);
    pack_short_row(x, windows.format, windows.rules[0], tail.scales + scales, zeros, in_block,
                   reinterpret_cast<uint8_t*>(codes));
  } else {
    for (int i = warp_lane_id(); i < channels; i += 32) room[i] = element(row, table.dtype, i);
    __syncwarp();
    pack_token(room, windows.format, windows.rules[0], tail.scales + scales, zeros, in_block,
               reinterpret_cast<uint8_t*>(codes));
  }
  if (number == 0 && threadIdx.x == 0) of->flushed = 1;
}

constexpr int kChannelThreads = 128;

/// Scales per channel: packed block blockIdx.z of a window. A thread codes channels, then packs
/// units.
__global__ void __launch_bounds__(kChannelThreads)
    pack_channel_blocks(TableArgs table, const __grid_constant__ WindowClass windows, int side) {
  extern __shared__ uint8_t codes_of[];  // (block rows, channels)
  DeviceTail* of = full_window(table, windows, side);
  if (of == nullptr) return;
  const DeviceTail tail = *of;
  const PackedFormat& format = windows.format;
  const PackRule& rule = windows.rules[0];
  const PackedSection& section = format.section[0];
  const auto number = static_cast<int>(blockIdx.z);
  const int channels = format.channels();
  const int rows = tail.block_rows;
  const int64_t row_bytes = static_cast<int64_t>(channels) * (table.dtype == DType::kF32 ? 4 : 2);
  const int64_t block = packed_place(tail, number * rows).block;
  const auto row_of = [&](int row) {
    return tail.ring + tail.place(number * rows + row) * row_bytes;
  };
  for (int c = static_cast<int>(threadIdx.x); c < channels; c += kChannelThreads) {
    float low = INFINITY;
    float high = -INFINITY;
    for (int row = 0; row < rows; ++row) {
      const float x = element(row_of(row), table.dtype, c);
      low = x < low ? x : low;
      high = x > high ? x : high;
    }
    const AffineRange range = quantize::affine_range(low, high, max_code(section.code), rule.kappa);
    store_range(range, rule, format.meta, tail.scales + block * tail.scale_stride,
                static_cast<size_t>(c), tail.zeros + block * tail.scale_stride,
                static_cast<size_t>(c));
    if (tail.shares_codes) continue;
    for (int row = 0; row < rows; ++row) {
      const float x = element(row_of(row), table.dtype, c);
      codes_of[row * channels + c] = static_cast<uint8_t>(range.code(x, rule.rounding));
    }
  }
  if (number == 0 && threadIdx.x == 0) of->flushed = 1;
  if (tail.shares_codes) return;
  __syncthreads();
  auto* to = reinterpret_cast<uint8_t*>(tail.codes + block * tail.code_stride);
  const int units = static_cast<int>(ceil_div(channels, unit_codes(section.code)));
  for (int i = static_cast<int>(threadIdx.x); i < rows * units; i += kChannelThreads) {
    const int row = i / units;
    pack_unit(rule, to + static_cast<size_t>(row) * format.row_bytes(), section.code,
              codes_of + row * channels, channels, i % units);
  }
}

}  // namespace

void pack_windows(const TableArgs& table, const WindowClass& windows, int side, Stream& stream) {
  const auto heads = static_cast<unsigned>(table.rows * table.kv_heads);
  const auto channels = static_cast<size_t>(windows.format.channels());
  if (windows.format.axis == ScaleAxis::kToken) {
    const dim3 grid(heads, windows.count, static_cast<unsigned>(windows.rows));
    pack_token_rows<<<grid, 32, row_room(static_cast<int>(channels)), native(stream)>>>(
        table, windows, side);
  } else {
    const int rows = windows.format.block_rows;
    const dim3 grid(heads, windows.count, static_cast<unsigned>(windows.rows / rows));
    pack_channel_blocks<<<grid, kChannelThreads, static_cast<size_t>(rows) * channels,
                          native(stream)>>>(table, windows, side);
  }
  check_launch("DecodeTable::pack");
}

}  // namespace kvlm::cuda::packed
