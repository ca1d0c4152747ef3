#include "kernels/cpu/gemm.h"

#include <algorithm>
#include <optional>
#include <span>

#include "kernels/cpu/amx/product.h"
#include "kernels/cpu/matmul.h"
#include "kernels/gemm.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/gemm.cpp"
#include "hwy/foreach_target.h"
// After foreach_target.h:
#include "hwy/highway.h"
#include "kernels/cpu/widen-inl.h"

#ifndef KVLM_KERNELS_CPU_GEMM_CPP_ONCE_
#define KVLM_KERNELS_CPU_GEMM_CPP_ONCE_
namespace kvlm::cpu {

/// The arguments of linear() as the kernels want them.
struct LinearArgs {
  float* y;            // (rows, out)
  const float* x;      // (rows, in)
  const std::byte* w;  // (out, in) of `dtype`
  const float* bias;   // (out,) or null
  DType dtype;
  bool add;
  size_t rows, in, out;
};

/// Weight rows that are worked on together, a multiple of every number of rows read side by side.
constexpr size_t kStrip = 12;

}  // namespace kvlm::cpu
#endif

HWY_BEFORE_NAMESPACE();
namespace kvlm::cpu::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

#if HWY_TARGET == HWY_AVX2 || HWY_TARGET == HWY_SSE4 || HWY_TARGET == HWY_SSSE3
constexpr size_t kSums = 12;  // of 16 registers
#else
constexpr size_t kSums = 24;  // of 32 registers
#endif

/// Rows of x that one pass over a strip of weight rows serves.
constexpr size_t kMaxX = 8;

/// Weight rows read side by side for kX rows of x. Each x loaded serves all of them, but more than
/// 6 streams are no gain; all of them divide kStrip.
template <size_t kX>
constexpr size_t kWeightRows = kX <= 2           ? 4
                               : kX * 6 <= kSums ? 6
                               : kX * 4 <= kSums ? 4
                               : kX * 3 <= kSums ? 3
                               : kX * 2 <= kSums ? 2
                                                 : 1;

template <size_t kX, size_t kW>
using Sums = hn::Vec<hn::ScalableTag<float>>[kW][kX];

/// Adds the products of `count` last channels, less than a vector, of rows `in` apart, padded with
/// zeros: reading on could leave the mapping.
template <size_t kX, size_t kW, class T>
HWY_INLINE void add_last(const T* w, const float* x, size_t in, size_t count, Sums<kX, kW>& sums) {
  const hn::ScalableTag<float> d;
  T w_last[kW][hn::MaxLanes(d)] = {};
  float x_last[kX][hn::MaxLanes(d)] = {};
  for (size_t k = 0; k < count; ++k) {
    for (size_t j = 0; j < kW; ++j) w_last[j][k] = w[j * in + k];
    for (size_t r = 0; r < kX; ++r) x_last[r][k] = x[r * in + k];
  }
  for (size_t j = 0; j < kW; ++j) {
    const auto wide = load_wide(d, w_last[j]);
    for (size_t r = 0; r < kX; ++r) {
      sums[j][r] = hn::MulAdd(wide, hn::LoadU(d, x_last[r]), sums[j][r]);
    }
  }
}

/// Adds the lanes of sums, and the bias, to y or writes them there.
template <size_t kX, size_t kW>
HWY_INLINE void store_sums(const LinearArgs& args, size_t row, size_t o, const Sums<kX, kW>& sums) {
  const hn::ScalableTag<float> d;
  for (size_t r = 0; r < kX; ++r) {
    float* y = args.y + (row + r) * args.out + o;
    for (size_t j = 0; j < kW; ++j) {
      float sum = hn::GetLane(hn::SumOfLanes(d, sums[j][r]));
      if (args.bias != nullptr) sum += args.bias[o + j];
      y[j] = args.add ? y[j] + sum : sum;
    }
  }
}

/// y[r, o] for kX rows r and kW weight rows o. Every sum runs over one vector of partial sums in
/// the order of the channels, so its bits do not depend on kX or kW: a row of x gives the same
/// result alone and in company.
///
/// Reading kW rows side by side is no pattern that a processor prefetches well, so each step asks
/// for as many bytes as it uses, in sequence, `ahead` bytes further on, into the second-level
/// cache: asking for the first level stalls, as it has too few places for lines under way.
template <size_t kX, size_t kW, class T>
HWY_INLINE void dot_block(const LinearArgs& args, size_t row, size_t o, size_t ahead) {
  const hn::ScalableTag<float> d;
  using V = hn::Vec<decltype(d)>;
  const size_t lanes = hn::Lanes(d);
  const size_t in = args.in;
  const T* HWY_RESTRICT w = reinterpret_cast<const T*>(args.w) + o * in;
  const float* HWY_RESTRICT x = args.x + row * in;

  Sums<kX, kW> sums;
  for (size_t j = 0; j < kW; ++j) {
    for (size_t r = 0; r < kX; ++r) sums[j][r] = hn::Zero(d);
  }
  const auto step = [&](size_t i) HWY_ATTR {
    V wide[kW];
    for (size_t j = 0; j < kW; ++j) wide[j] = load_wide(d, w + j * in + i);
    for (size_t r = 0; r < kX; ++r) {
      const V channels = hn::LoadU(d, x + r * in + i);
      for (size_t j = 0; j < kW; ++j) sums[j][r] = hn::MulAdd(wide[j], channels, sums[j][r]);
    }
  };
  constexpr size_t kLine = 64;
  constexpr size_t kLineChannels = kLine / sizeof(T);
  const auto* next = reinterpret_cast<const std::byte*>(w) + ahead;
  size_t i = 0;
  for (; i + kLineChannels <= in; i += kLineChannels) {
    for (size_t j = 0; j < kW; ++j, next += kLine) __builtin_prefetch(next, 0, 2);
    for (size_t part = 0; part < kLineChannels; part += lanes) step(i + part);
  }
  for (; i + lanes <= in; i += lanes) step(i);
  if (i < in) add_last<kX, kW>(w + i, x + i, in, in - i, sums);
  store_sums<kX, kW>(args, row, o, sums);
}

/// Outputs [begin, end) of kX rows; reads weights ahead up to output `last`.
template <size_t kX, class T>
HWY_NOINLINE void dot_rows(const LinearArgs& args, size_t row, size_t begin, size_t end,
                           size_t last) {
  constexpr size_t kW = kWeightRows<kX>;
  size_t o = begin;
  for (; o + kW <= end; o += kW) {
    const size_t ahead = o + 2 * kW <= last ? kW * args.in * sizeof(T) : 0;
    dot_block<kX, kW, T>(args, row, o, ahead);
  }
  for (; o < end; ++o) dot_block<kX, 1, T>(args, row, o, 0);
}

/// dot_rows() of `rows` rows, at most kX.
template <size_t kX, class T>
HWY_INLINE void dot_some_rows(const LinearArgs& args, size_t rows, size_t row, size_t begin,
                              size_t end, size_t last) {
  if constexpr (kX > 1) {
    if (rows < kX) return dot_some_rows<kX - 1, T>(args, rows, row, begin, end, last);
  }
  dot_rows<kX, T>(args, row, begin, end, last);
}

template <class T>
HWY_INLINE void dot_strip(const LinearArgs& args, size_t begin, size_t end, size_t last) {
  const size_t passes = (args.rows + kMaxX - 1) / kMaxX;
  for (size_t pass = 0; pass < passes; ++pass) {
    const size_t row = args.rows * pass / passes;
    const size_t rows = args.rows * (pass + 1) / passes - row;
    dot_some_rows<kMaxX, T>(args, rows, row, begin, end, last);
  }
}

template <class T>
HWY_INLINE void dot_outputs(const LinearArgs& args, size_t begin, size_t end) {
  if (args.rows <= kMaxX) return dot_strip<T>(args, begin, end, end);
  // A strip stays in the second-level cache for the passes over the rows of x.
  for (size_t o = begin; o < end; o += kStrip) {
    dot_strip<T>(args, o, HWY_MIN(o + kStrip, end), end);
  }
}

/// Outputs [begin, end) of every row.
void stream_outputs(const LinearArgs& args, size_t begin, size_t end) {
  switch (args.dtype) {
    case DType::kF16:
      return dot_outputs<f16>(args, begin, end);
    case DType::kBF16:
      return dot_outputs<bf16>(args, begin, end);
    default:
      return dot_outputs<float>(args, begin, end);
  }
}

}  // namespace kvlm::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kvlm::cpu {

HWY_EXPORT(stream_outputs);

namespace {

size_t divide_up(size_t a, size_t b) { return (a + b - 1) / b; }

/// Few rows: bound by reading the weights, once.
void stream_weights(const LinearArgs& args, Stream& stream) {
  // A task starts without its first weights read ahead, so it should be long; but there should be
  // enough of them for many threads, and no thread should wait long for the last one.
  constexpr size_t kMinTaskBytes = size_t{64} << 10;
  constexpr size_t kMaxTaskBytes = size_t{512} << 10;
  constexpr size_t kWantedTasks = 32;
  const size_t row_bytes = std::max<size_t>(1, args.in * dtype_bytes(args.dtype));
  const size_t task_bytes =
      std::clamp(args.out * row_bytes / kWantedTasks, kMinTaskBytes, kMaxTaskBytes);
  const size_t outputs = std::max<size_t>(1, task_bytes / row_bytes / kStrip) * kStrip;
  stream.pool().parallel_for(divide_up(args.out, outputs), [&](size_t task, int) {
    HWY_DYNAMIC_DISPATCH(stream_outputs)
    (args, task * outputs, std::min(args.out, (task + 1) * outputs));
  });
}

constexpr size_t kTileOut = 256;

/// Rows and columns of y.
struct Tile {
  size_t row, rows;
  size_t out, outs;
};

/// Adds the bias to a tile, or makes it the bias.
void begin_with_bias(const LinearArgs& args, const Tile& tile) {
  for (size_t r = tile.row; r < tile.row + tile.rows; ++r) {
    float* to = args.y + r * args.out;
    for (size_t o = tile.out; o < tile.out + tile.outs; ++o) {
      to[o] = (args.add ? to[o] : 0.0f) + args.bias[o];
    }
  }
}

void multiply_tile(const LinearArgs& args, const Tile& tile) {
  if (args.bias != nullptr) begin_with_bias(args, tile);
  const std::byte* w = args.w + tile.out * args.in * dtype_bytes(args.dtype);
  multiply({args.y + tile.row * args.out + tile.out, args.out},
           {args.x + tile.row * args.in, args.in}, {w, args.dtype, args.in}, tile.rows, tile.outs,
           args.in, args.add || args.bias != nullptr);
}

/// Many rows: bound by arithmetic, on tiles of y.
void multiply_tiles(const LinearArgs& args, Stream& stream) {
  constexpr size_t kMinTileRows = 192;
  constexpr size_t kWantedTiles = 64;
  const size_t tiles_out = divide_up(args.out, kTileOut);
  // Tiles span all rows, unless that leaves too few of them for many threads. Sizes alone decide.
  const size_t tiles_rows =
      std::min(divide_up(kWantedTiles, tiles_out), std::max<size_t>(1, args.rows / kMinTileRows));
  stream.pool().parallel_for(tiles_out * tiles_rows, [&](size_t task, int) {
    Tile tile;
    tile.out = task / tiles_rows * kTileOut;
    tile.outs = std::min(kTileOut, args.out - tile.out);
    tile.row = args.rows * (task % tiles_rows) / tiles_rows;
    tile.rows = args.rows * (task % tiles_rows + 1) / tiles_rows - tile.row;
    multiply_tile(args, tile);
  });
}

LinearArgs args_of(const Projection& projection, ConstTensorView x, bool add) {
  const ConstTensorView w = projection.w.plain();
  const ConstTensorView bias = projection.bias;
  TensorView y = projection.y;
  return {y.as<float>(),
          x.as<float>(),
          w.data(),
          bias.empty() ? nullptr : bias.as<float>(),
          w.dtype(),
          add,
          static_cast<size_t>(x.shape()[0]),
          static_cast<size_t>(x.shape()[1]),
          static_cast<size_t>(w.shape()[0])};
}

/// Products of the same many rows, which AMX multiplies with half-precision weights.
void multiply_packed(std::span<const Projection> projections, ConstTensorView x, bool add,
                     Stream& stream) {
  constexpr size_t kMaxPackedRows = 1024;  // limits their memory
  const auto rows = static_cast<size_t>(x.shape()[0]);
  const auto in = static_cast<size_t>(x.shape()[1]);
  const size_t groups = divide_up(rows, kMaxPackedRows);
  const amx::Split split = stream.rounds_rows() ? amx::Split::kRounded : amx::Split::kExact;
  for (size_t group = 0; group < groups; ++group) {
    const size_t row = rows * group / groups;
    const size_t count = rows * (group + 1) / groups - row;
    const float* from = x.as<float>() + row * in;
    const auto packed = amx::pack_rows(from, count, in, split, stream);
    for (const Projection& projection : projections) {
      if (projection.y.empty()) continue;
      LinearArgs args = args_of(projection, x, add);
      args.rows = count;
      args.x = from;
      args.y += row * args.out;
      if (packed && args.dtype != DType::kF32) {
        amx::multiply({args.y, args.w, args.bias, args.dtype, add, args.out}, *packed, stream);
      } else {
        multiply_tiles(args, stream);
      }
    }
  }
}

}  // namespace

void linears(std::span<const Projection> projections, ConstTensorView x, bool add, Stream& stream) {
  const bool few = x.shape()[0] <= kMaxDecodeRows || x.shape()[1] == 0;
  const bool halves = std::ranges::any_of(
      projections, [](const Projection& p) { return p.w.dtype() != DType::kF32; });
  if (!few && halves && amx::available()) return multiply_packed(projections, x, add, stream);
  for (const Projection& projection : projections) {
    if (projection.y.empty()) continue;
    const LinearArgs args = args_of(projection, x, add);
    if (few) {
      stream_weights(args, stream);
    } else {
      multiply_tiles(args, stream);
    }
  }
}

}  // namespace kvlm::cpu
#endif  // HWY_ONCE
