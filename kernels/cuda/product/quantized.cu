#include <algorithm>

#include "kernels/cuda/device/launch.cuh"
#include "kernels/cuda/device/matrix_units.cuh"
#include "kernels/cuda/model/activation.cuh"
#include "kernels/cuda/product/few_rows.h"
#include "kernels/cuda/product/quantized.h"
#include "kernels/quantized/layout.h"

// y = x W^T with the codes of a quantized W (quantized/layout.h), for up to 64 rows of x a launch.
//
// A block makes 32 outputs; its warps divide the inputs among them, tile by tile, and add their
// sums through shared memory, in the order of the warps. A lane loads the codes of its fragments
// with one or two instructions, some tiles ahead, and turns them into pairs of exact integers
// (code - zero) of x's type. The tensor cores add the products of a tile's 32 inputs in f32; these
// sums times the scale are added in f32. So no weight is rounded, and the sums of a row depend
// neither on the other rows nor on their number.
namespace kvlm::cuda {

namespace {

constexpr int kThreads = 256;
constexpr int kTile = static_cast<int>(kTileOutputs);  // outputs, and inputs
constexpr int kRowTile = 16;                           // rows of one product of the tensor cores
constexpr int kMostRowTiles = 4;
constexpr int kEights = kTile / 8;  // products of eight outputs that make up a tile
static_assert(kInputBlock == kTile);

/// What the kernels need of a format.
struct CodeArgs {
  int in;           // of x
  int tiles;        // along the inputs
  int group_shift;  // tiles that share a scale
  int groups;
  int zero;  // of groups without zero points
  DType scale;
};

/// Matrices of one launch, their outputs one after the other.
struct CodeProjections {
  const std::byte* codes[kMostProjections];
  const std::byte* scales[kMostProjections];
  const std::byte* zeros[kMostProjections];  // null where groups have none
  const float* bias[kMostProjections];
  float* y[kMostProjections];
  int out[kMostProjections];
};

/// Where results go, and how.
struct CodeResult {
  int rows;
  bool add;
  std::byte* gated;  // (rows, out) of `gated_dtype`
  DType gated_dtype;
  Activation activation;
};

template <class T>
using Pair = std::conditional_t<std::is_same_v<T, __half>, __half2, __nv_bfloat162>;

template <class T>
__device__ uint32_t pair_bits(Pair<T> pair) {
  return *reinterpret_cast<uint32_t*>(&pair);
}
template <class T>
__device__ Pair<T> pair_of(uint32_t bits) {
  return *reinterpret_cast<Pair<T>*>(&bits);
}
/// x in both halves.
template <class T>
__device__ Pair<T> twice(float x) {
  if constexpr (std::is_same_v<T, __half>) return __float2half2_rn(x);
  if constexpr (!std::is_same_v<T, __half>) return __float2bfloat162_rn(x);
}

/// mma() of matrix_units.cuh for either half format.
template <class T>
__device__ void multiply(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  if constexpr (std::is_same_v<T, __half>) {
    mma(d, a[0], a[1], a[2], a[3], b0, b1);
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
        "{%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

/// The same from sums of zero.
template <class T>
__device__ void multiply_first(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  if constexpr (std::is_same_v<T, __half>) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
        "{%8,%9}, {%10,%10,%10,%10};"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(0.0f));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
        "{%8,%9}, {%10,%10,%10,%10};"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(0.0f));
  }
}

/// 16 bytes of weights, which nothing else reads.
__device__ uint4 load_once(const void* from) {
  uint4 loaded;
  asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(loaded.x), "=r"(loaded.y), "=r"(loaded.z), "=r"(loaded.w)
               : "l"(from));
  return loaded;
}

/// The codes of one lane in a tile: 8 inputs of each of 4 outputs.
template <WeightCode kCode>
struct LaneCodes {
  static constexpr int kLoads = kCode == WeightCode::kU4 ? 1 : 2;
  static constexpr int kTileBytes = 512 * kLoads;
  uint32_t words[4 * kLoads];

  __device__ void load(const std::byte* tile, int lane) {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      *reinterpret_cast<uint4*>(words + 4 * i) = load_once(tile + 512 * i + 16 * lane);
    }
  }

  /// What widen() subtracts for a zero point, as bits.
  template <class T>
  __device__ static uint32_t offset_of(float zero) {
    constexpr bool kHalf = std::is_same_v<T, __half>;
    if constexpr (kCode == WeightCode::kU4) {
      return pair_bits<T>(twice<T>((kHalf ? 1024.0f : 128.0f) + zero));
    }
    if constexpr (kHalf) return pair_bits<T>(twice<T>(1024.0f + zero));
    return __float_as_uint(8388608.0f + zero);
  }

  /// Codes minus zero point of inputs 2 j and 2 j + 1 of output 8 eight + lane / 4, in pairs of T;
  /// of e4m3, their values divided by scale_of_codes().
  template <class T>
  __device__ void widen(int eight, uint32_t offset_bits, uint32_t (&pairs)[4]) const {
    constexpr bool kHalf = std::is_same_v<T, __half>;
    if constexpr (kCode == WeightCode::kU4) {
      // The bits of 1024 + code, or 128 + code.
      constexpr uint32_t kMagic = kHalf ? 0x64006400u : 0x43004300u;
      const Pair<T> offset = pair_of<T>(offset_bits);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const uint32_t codes = (words[eight] >> (4 * j) & 0x000f000fu) | kMagic;
        pairs[j] = pair_bits<T>(__hsub2(pair_of<T>(codes), offset));
      }
    } else if constexpr (kCode == WeightCode::kE4M3) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const uint32_t bytes =
            __byte_perm(words[2 * eight + j / 2], 0, j % 2 == 0 ? 0x1404 : 0x3424);
        const uint32_t sign = bytes & 0x80008000u;
        const uint32_t magnitude = bytes & 0x7f007f00u;
        pairs[j] = sign | magnitude >> (kHalf ? 1 : 4);
      }
    } else if constexpr (kHalf) {
      const Pair<T> offset = pair_of<T>(offset_bits);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const uint32_t codes =
            __byte_perm(words[2 * eight + j / 2], 0x64646464u, j % 2 == 0 ? 0x4140 : 0x4342);
        pairs[j] = pair_bits<T>(__hsub2(pair_of<T>(codes), offset));
      }
    } else {
      // 2^23 + code has the code in its low bits; the difference is exact, in bf16 as well.
      const float offset = __uint_as_float(offset_bits);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const uint32_t word = words[2 * eight + j / 2];
        const uint32_t low = __byte_perm(word, 0x4b000000u, j % 2 == 0 ? 0x7440 : 0x7442);
        const uint32_t high = __byte_perm(word, 0x4b000000u, j % 2 == 0 ? 0x7441 : 0x7443);
        pairs[j] = pair_bits<T>(
            __floats2bfloat162_rn(__uint_as_float(low) - offset, __uint_as_float(high) - offset));
      }
    }
  }
};

/// What widened codes are smaller by than their values.
template <class T, WeightCode kCode>
__device__ constexpr float scale_of_codes() {
  if (kCode != WeightCode::kE4M3) return 1;
  return std::is_same_v<T, __half> ? 0x1p8f : 0x1p120f;
}

/// The scales of a lane's sums, two for each eight outputs.
struct LaneScales {
  uint4 halves;

  __device__ void load(const std::byte* scales, size_t at) {
    halves = __ldg(reinterpret_cast<const uint4*>(scales + 2 * at));
  }
  __device__ float2 of(int eight, DType dtype) const {
    const uint32_t bits = (&halves.x)[eight];
    if (dtype == DType::kF16) return __half22float2(pair_of<__half>(bits));
    return __bfloat1622float2(pair_of<__nv_bfloat16>(bits));
  }
};

/// The inputs that a lane reads of a row of x: 8 of each tile. Rows beyond the last are zero, and
/// so are inputs beyond the end of a row.
template <class T>
struct LaneRow {
  const T* inputs;
  int left;  // inputs from here to the end of the row

  __device__ LaneRow() = default;
  __device__ LaneRow(const T* x, int row, int rows, int in, int lane)
      : inputs(x + static_cast<int64_t>(row) * in + lane % 4 * 8),
        left(row < rows ? in - lane % 4 * 8 : 0) {}
  __device__ uint4 load(int tile, bool aligned) const {
    const int first = tile * kTile;
    if (first >= left) return {};
    if (aligned) return *reinterpret_cast<const uint4*>(inputs + first);
    alignas(16) T some[8] = {};
    for (int i = 0; i < 8 && first + i < left; ++i) some[i] = inputs[first + i];
    return *reinterpret_cast<const uint4*>(some);
  }
};

/// The sums of a warp: 32 outputs of kRowTiles * 16 rows.
template <int kRowTiles>
using TileSums = float[kRowTiles][kEights][4];

/// Adds the products of one tile.
template <class T, WeightCode kCode, int kRowTiles>
__device__ void add_tile(TileSums<kRowTiles>& sums, const LaneCodes<kCode>& codes,
                         const float2 (&scales)[kEights], const uint32_t (&offsets)[kEights],
                         const uint4 (&inputs)[kRowTiles][2]) {
#pragma unroll
  for (int eight = 0; eight < kEights; ++eight) {
    uint32_t pairs[4];
    codes.template widen<T>(eight, offsets[eight], pairs);
#pragma unroll
    for (int tile = 0; tile < kRowTiles; ++tile) {
      const uint4& low = inputs[tile][0];
      const uint4& high = inputs[tile][1];
      float of_tile[4];
      multiply_first<T>(of_tile, {low.x, high.x, low.y, high.y}, pairs[0], pairs[1]);
      multiply<T>(of_tile, {low.z, high.z, low.w, high.w}, pairs[2], pairs[3]);
      float(&to)[4] = sums[tile][eight];
      to[0] = fmaf(of_tile[0], scales[eight].x, to[0]);
      to[1] = fmaf(of_tile[1], scales[eight].y, to[1]);
      to[2] = fmaf(of_tile[2], scales[eight].x, to[2]);
      to[3] = fmaf(of_tile[3], scales[eight].y, to[3]);
    }
  }
}

/// Scales of a lane's sums in a group, and what is subtracted from its codes where groups have zero
/// points.
template <class T, WeightCode kCode>
__device__ void load_scales(const CodeArgs& args, const std::byte* scales, const std::byte* zeros,
                            const LaneScales& early, size_t entry, int lane,
                            float2 (&of_sums)[kEights], uint32_t (&offsets)[kEights]) {
#pragma unroll
  for (int eight = 0; eight < kEights; ++eight) {
    if (args.scale == DType::kF32) {
      const auto* wide = reinterpret_cast<const float*>(scales) + entry + lane % 4 * 8;
      of_sums[eight] = __ldg(reinterpret_cast<const float2*>(wide) + eight);
    } else {
      of_sums[eight] = early.of(eight, args.scale);
    }
    of_sums[eight].x *= scale_of_codes<T, kCode>();
    of_sums[eight].y *= scale_of_codes<T, kCode>();
  }
  if (zeros == nullptr) return;
  const uint32_t points = __ldg(reinterpret_cast<const uint32_t*>(zeros + entry) + lane / 4);
#pragma unroll
  for (int eight = 0; eight < kEights; ++eight) {
    offsets[eight] =
        LaneCodes<kCode>::template offset_of<T>(static_cast<float>(points >> (8 * eight) & 255u));
  }
}

/// How code_products divides its work for so many tiles of rows.
struct CodeTiling {
  int warps;   // of a block
  int ahead;   // tiles of codes, and of scales, that a warp loads ahead
  int inputs;  // tiles of x
};
template <WeightCode kCode>
constexpr CodeTiling code_tiling(int row_tiles) {
  constexpr int kLoads = LaneCodes<kCode>::kLoads;
  if (row_tiles == 1) return {16, kLoads == 1 ? 4 : 2, 2};
  return {8, kLoads == 1 ? 4 : 2, row_tiles == 2 ? 2 : 1};
}

/// Parts that the inputs are divided into, tile by tile, whose sums are added in their order.
constexpr int kSplits = 16;

/// kGated: the first projection is the gate of the second, and half of the warps have each.
template <class T, WeightCode kCode, int kRowTiles, bool kGated>
__global__ void __launch_bounds__(32 * code_tiling<kCode>(kRowTiles).warps)
    code_products(CodeProjections projections, CodeArgs args, const T* x, CodeResult result) {
  constexpr CodeTiling kTiling = code_tiling<kCode>(kRowTiles);
  constexpr int kWarps = kTiling.warps;
  constexpr int kStep = kGated ? kSplits / 2 : kSplits;    // parts of one matrix
  constexpr int kTogether = kGated ? kWarps / 2 : kWarps;  // warps that share a matrix
  constexpr int kTiles = kTiling.ahead;
  constexpr int kInputs = kTiling.inputs;
  constexpr int kOutputs = kRowTile * kTile / (32 * kWarps);  // of a thread, in a tile of rows
  static_assert(kTiles % kInputs == 0);
  __shared__ float shared[kWarps][kRowTile][kTile + 1];
  let_next_start();
  const int lane = static_cast<int>(threadIdx.x % 32);
  const int warp = static_cast<int>(threadIdx.x / 32);
  int unit = static_cast<int>(blockIdx.x);
  int which = 0;
  if constexpr (!kGated) {
    while (which + 1 < kMostProjections && unit >= (projections.out[which] + kTile - 1) / kTile) {
      unit -= (projections.out[which] + kTile - 1) / kTile;
      ++which;
    }
  }
  const int matrix = kGated ? warp / kTogether : which;
  const std::byte* codes = projections.codes[matrix] +
                           static_cast<int64_t>(unit) * args.tiles * LaneCodes<kCode>::kTileBytes;
  const std::byte* scales = projections.scales[matrix];
  const std::byte* zeros = projections.zeros[matrix];
  const auto entry_of = [&](int tile) {
    return (static_cast<size_t>(unit) * args.groups + (tile >> args.group_shift)) * kTile;
  };
  const bool early_scales = args.scale != DType::kF32;
  const bool aligned = args.in % 8 == 0;

  LaneCodes<kCode> coming[kTiles];
  LaneScales coming_scales[kTiles];
  const auto fetch = [&](int slot, int tile) {
    if (tile >= args.tiles) return;
    coming[slot].load(codes + static_cast<int64_t>(tile) * LaneCodes<kCode>::kTileBytes, lane);
    if (early_scales) coming_scales[slot].load(scales, entry_of(tile) + lane % 4 * 8);
  };
  LaneRow<T> rows[kRowTiles][2];
#pragma unroll
  for (int half = 0; half < 2 * kRowTiles; ++half) {
    rows[half / 2][half % 2] = LaneRow<T>(x, half * 8 + lane / 4, result.rows, args.in, lane);
  }
  uint4 coming_inputs[kInputs][kRowTiles][2];
  const auto fetch_inputs = [&](int slot, int tile) {
#pragma unroll
    for (int half = 0; half < 2 * kRowTiles; ++half) {
      coming_inputs[slot][half / 2][half % 2] = rows[half / 2][half % 2].load(tile, aligned);
    }
  };
  uint32_t offsets[kEights];
#pragma unroll
  for (uint32_t& offset : offsets) {
    offset = LaneCodes<kCode>::template offset_of<T>(static_cast<float>(args.zero));
  }
  float totals[kRowTiles][kOutputs][kGated ? 2 : 1] = {};
  bool waited = false;

#pragma unroll 1
  for (int part = warp % kTogether; part < kStep; part += kTogether) {
#pragma unroll
    for (int u = 0; u < kTiles; ++u) fetch(u, part + u * kStep);
    if (!waited) wait_for_earlier();
    waited = true;
#pragma unroll
    for (int u = 0; u < kInputs; ++u) fetch_inputs(u, part + u * kStep);
    TileSums<kRowTiles> sums = {};
    for (int base = part; base < args.tiles; base += kTiles * kStep) {
#pragma unroll
      for (int u = 0; u < kTiles; ++u) {
        const int tile = base + u * kStep;
        if (tile >= args.tiles) break;
        uint4 inputs[kRowTiles][2];
#pragma unroll
        for (int half = 0; half < 2 * kRowTiles; ++half) {
          inputs[half / 2][half % 2] = coming_inputs[u % kInputs][half / 2][half % 2];
        }
        fetch_inputs(u % kInputs, tile + kInputs * kStep);
        float2 of_sums[kEights];
        load_scales<T, kCode>(args, scales, zeros, coming_scales[u], entry_of(tile), lane, of_sums,
                              offsets);
        const LaneCodes<kCode> now = coming[u];
        fetch(u, tile + kTiles * kStep);
        add_tile<T, kCode, kRowTiles>(sums, now, of_sums, offsets, inputs);
      }
    }
#pragma unroll
    for (int row_tile = 0; row_tile < kRowTiles; ++row_tile) {
      if (row_tile * kRowTile >= result.rows) break;
      __syncthreads();
#pragma unroll
      for (int i = 0; i < 4 * kEights; ++i) {
        const int row = lane / 4 + i % 4 / 2 * 8;
        shared[warp][row][i / 4 * 8 + lane % 4 * 2 + i % 2] = sums[row_tile][i / 4][i % 4];
      }
      __syncthreads();
#pragma unroll
      for (int i = 0; i < kOutputs; ++i) {
        const int at = static_cast<int>(threadIdx.x) + i * 32 * kWarps;
#pragma unroll
        for (int w = 0; w < kWarps; ++w) {
          totals[row_tile][i][kGated ? w / kTogether : 0] += shared[w][at / kTile][at % kTile];
        }
      }
    }
  }

#pragma unroll
  for (int row_tile = 0; row_tile < kRowTiles; ++row_tile) {
#pragma unroll
    for (int i = 0; i < kOutputs; ++i) {
      const int place = static_cast<int>(threadIdx.x) + i * 32 * kWarps;
      const int row = row_tile * kRowTile + place / kTile;
      const int column = unit * kTile + place % kTile;
      const int out = projections.out[kGated ? 0 : which];
      if (row >= result.rows || column >= out) continue;
      const int64_t at = static_cast<int64_t>(row) * out + column;
      const auto biased = [&](int of, float sum) {
        const float* bias = projections.bias[of];
        return bias != nullptr ? sum + bias[column] : sum;
      };
      if constexpr (kGated) {
        const float value = activated(result.activation, biased(0, totals[row_tile][i][0])) *
                            biased(1, totals[row_tile][i][1]);
        if (result.gated_dtype == DType::kF32) {
          reinterpret_cast<float*>(result.gated)[at] = value;
        } else {
          reinterpret_cast<T*>(result.gated)[at] = store_float<T>(value);
        }
      } else {
        float* y = projections.y[which] + at;
        const float value = biased(which, totals[row_tile][i][0]);
        *y = result.add ? *y + value : value;
      }
    }
  }
}

/// Calls `body`, []<class T, WeightCode kCode>(), for the format.
template <class Body>
void with_codes(const QuantizedFormat& format, const Body& body) {
  const auto with_code = [&]<class T>() {
    if (format.code == WeightCode::kU4) return body.template operator()<T, WeightCode::kU4>();
    if (format.code == WeightCode::kU8) return body.template operator()<T, WeightCode::kU8>();
    return body.template operator()<T, WeightCode::kE4M3>();
  };
  if (format.activations == DType::kF16) return with_code.template operator()<__half>();
  with_code.template operator()<__nv_bfloat16>();
}

CodeArgs args_of(const QuantizedFormat& format) {
  CodeArgs args{};
  args.in = static_cast<int>(format.in);
  args.tiles = static_cast<int>(layout_of(format, DeviceKind::kCuda).in / kTile);
  // 32, 64 or 128 inputs, or all of them.
  args.group_shift = format.groups() == 1 ? 30 : format.group / kTile / 2;
  args.groups = static_cast<int>(format.groups());
  args.zero = format.zero();
  args.scale = format.scale;
  return args;
}

CodeProjections projections_of(std::span<const Projection> projections) {
  CodeProjections all{};
  for (size_t i = 0; i < projections.size(); ++i) {
    const QuantizedMatrix& w = projections[i].w.quantized();
    const QuantizedLayout layout = layout_of(w.format, DeviceKind::kCuda);
    all.codes[i] = w.data;
    all.scales[i] = w.data + layout.scales;
    all.zeros[i] = w.format.has_zeros ? w.data + layout.zeros : nullptr;
    all.bias[i] = projections[i].bias.empty() ? nullptr : projections[i].bias.as<float>();
    all.y[i] = projections[i].y.empty() ? nullptr : projections[i].y.as<float>();
    all.out[i] = static_cast<int>(w.format.out);
  }
  return all;
}

/// Launches products of at most 64 rows of x.
template <bool kGated>
void launch(const QuantizedFormat& format, const CodeProjections& projections, int blocks,
            const void* x, const CodeResult& result, Stream& stream) {
  with_codes(format, [&]<class T, WeightCode kCode>() {
    const auto start = [&]<int kRowTiles>() {
      launch_early("linear", code_products<T, kCode, kRowTiles, kGated>,
                   dim3(static_cast<unsigned>(blocks)), 32 * code_tiling<kCode>(kRowTiles).warps, 0,
                   stream, projections, args_of(format), static_cast<const T*>(x), result);
    };
    if (result.rows <= kRowTile) return start.template operator()<1>();
    if (result.rows <= 2 * kRowTile) return start.template operator()<2>();
    start.template operator()<4>();
  });
}

constexpr int64_t kLaunchRows = kMostRowTiles * kRowTile;

// ---------------------------------------------------------------------------------- as floats

/// One warp a tile: w, rounded to T, (out, in).
template <class T, WeightCode kCode>
__global__ void __launch_bounds__(kThreads)
    widen_codes(T* to, CodeProjections projection, CodeArgs args, int64_t tiles) {
  let_next_start();
  wait_for_earlier();
  const int lane = static_cast<int>(threadIdx.x % 32);
  const int64_t index = static_cast<int64_t>(blockIdx.x) * (kThreads / 32) + threadIdx.x / 32;
  if (index >= tiles) return;
  const int64_t unit = index / args.tiles;
  const int tile = static_cast<int>(index % args.tiles);
  const size_t entry =
      (static_cast<size_t>(unit) * args.groups + (tile >> args.group_shift)) * kTile;
  LaneCodes<kCode> codes;
  codes.load(projection.codes[0] + index * LaneCodes<kCode>::kTileBytes, lane);
#pragma unroll
  for (int eight = 0; eight < kEights; ++eight) {
    const int n = lane / 4;
    const float scale = element(projection.scales[0], args.scale,
                                static_cast<int>(entry) + n / 2 * 8 + eight * 2 + n % 2) *
                        scale_of_codes<T, kCode>();
    const std::byte* zeros = projection.zeros[0];
    const float zero = zeros == nullptr ? static_cast<float>(args.zero)
                                        : static_cast<float>(zeros[entry + 4 * n + eight]);
    uint32_t pairs[4];
    codes.template widen<T>(eight, LaneCodes<kCode>::template offset_of<T>(zero), pairs);
    alignas(16) T values[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      values[j] = store_float<T>(load_float(reinterpret_cast<const T*>(pairs)[j]) * scale);
    }
    const int64_t o = unit * kTile + eight * 8 + n;
    const int i = tile * kTile + lane % 4 * 8;
    if (o >= projection.out[0] || i >= args.in) continue;
    T* row = to + o * args.in + i;
    if (args.in % 8 == 0) {
      *reinterpret_cast<uint4*>(row) = *reinterpret_cast<const uint4*>(values);
      continue;
    }
    for (int j = 0; j < 8 && i + j < args.in; ++j) row[j] = values[j];
  }
}

/// A block a row: eight inputs a thread.
template <class T, WeightCode kCode>
__global__ void __launch_bounds__(kThreads)
    gather_codes(float* y, CodeProjections table, CodeArgs args, const int32_t* ids) {
  let_next_start();
  wait_for_earlier();
  const int id = ids[blockIdx.x];
  float* to = y + static_cast<int64_t>(blockIdx.x) * args.in;
  for (int i = static_cast<int>(threadIdx.x) * 8; i < args.in; i += kThreads * 8) {
    const int64_t unit = id / kTile;
    const int n = id % 8;
    const int eight = id % kTile / 8;
    const size_t entry =
        (static_cast<size_t>(unit) * args.groups + (i / kTile >> args.group_shift)) * kTile;
    LaneCodes<kCode> codes;
    codes.load(table.codes[0] + (unit * args.tiles + i / kTile) * LaneCodes<kCode>::kTileBytes,
               n * 4 + i % kTile / 8);
    const float scale = element(table.scales[0] + (entry + n / 2 * 8 + eight * 2 + n % 2) *
                                                      (args.scale == DType::kF32 ? 4 : 2),
                                args.scale, 0) *
                        scale_of_codes<T, kCode>();
    const std::byte* zeros = table.zeros[0];
    const float zero = zeros == nullptr ? static_cast<float>(args.zero)
                                        : static_cast<float>(zeros[entry + 4 * n + eight]);
    uint32_t pairs[4];
    codes.template widen<T>(eight, LaneCodes<kCode>::template offset_of<T>(zero), pairs);
    for (int j = 0; j < 8 && i + j < args.in; ++j) {
      to[i + j] = load_float(reinterpret_cast<const T*>(pairs)[j]) * scale;
    }
  }
}

}  // namespace

bool is_launched_with(const QuantizedFormat& first, const QuantizedFormat& second) {
  QuantizedFormat same = second;
  same.out = first.out;
  return same == first;
}

void multiply_codes(std::span<const Projection> projections, const void* x, const Shape& shape,
                    bool add, Stream& stream) {
  const QuantizedFormat& format = projections[0].w.quantized().format;
  CodeProjections all = projections_of(projections);
  int blocks = 0;
  for (const Projection& projection : projections) {
    blocks += static_cast<int>(ceil_div(projection.w.shape()[0], kTile));
  }
  const auto* rows_of_x = static_cast<const std::byte*>(x);
  for (int64_t row = 0; row < shape[0]; row += kLaunchRows) {
    const int64_t count = std::min(kLaunchRows, shape[0] - row);
    const CodeResult result{static_cast<int>(count), add, nullptr, DType::kF32, {}};
    launch<false>(format, all, blocks, rows_of_x + row * shape[1] * 2, result, stream);
    for (size_t i = 0; i < projections.size(); ++i) all.y[i] += count * all.out[i];
  }
}

void multiply_gate(TensorView y, const Projection& gate, const Projection& up,
                   Activation activation, const void* x, int64_t rows, Stream& stream) {
  const QuantizedFormat& format = gate.w.quantized().format;
  const Projection both[] = {gate, up};
  const CodeProjections all = projections_of(both);
  const auto blocks = static_cast<int>(ceil_div(format.out, kTile));
  const auto* rows_of_x = static_cast<const std::byte*>(x);
  std::byte* to = y.data();
  for (int64_t row = 0; row < rows; row += kLaunchRows) {
    const int64_t count = std::min(kLaunchRows, rows - row);
    const CodeResult result{static_cast<int>(count), false, to, y.dtype(), activation};
    launch<true>(format, all, blocks, rows_of_x + row * format.in * 2, result, stream);
    to += static_cast<size_t>(count * format.out) * dtype_bytes(y.dtype());
  }
}

ConstTensorView widened_weights(const QuantizedMatrix& matrix, Stream& stream) {
  const QuantizedFormat& format = matrix.format;
  const auto bytes = static_cast<size_t>(format.out * format.in) * 2;
  std::byte* to = stream.queue().scratch(kWidenedWeights, bytes);
  Projection projection;
  projection.w = Weight(matrix);
  const CodeArgs args = args_of(format);
  const int64_t tiles = ceil_div(format.out, kTile) * args.tiles;
  with_codes(format, [&]<class T, WeightCode kCode>() {
    launch_early("linear", widen_codes<T, kCode>,
                 dim3(static_cast<unsigned>(ceil_div(tiles, kThreads / 32))), kThreads, 0, stream,
                 reinterpret_cast<T*>(to), projections_of({&projection, 1}), args, tiles);
  });
  return {to, format.activations, format.shape(), matrix.device};
}

void gather_rows(TensorView y, const QuantizedMatrix& table, std::span<const int32_t> ids,
                 Stream& stream) {
  const auto* device_ids =
      reinterpret_cast<const int32_t*>(stream.queue().upload(ids.data(), ids.size_bytes()));
  Projection projection;
  projection.w = Weight(table);
  with_codes(table.format, [&]<class T, WeightCode kCode>() {
    launch_early("gather_rows", gather_codes<T, kCode>, dim3(static_cast<unsigned>(ids.size())),
                 kThreads, 0, stream, y.as<float>(), projections_of({&projection, 1}),
                 args_of(table.format), device_ids);
  });
}

}  // namespace kvlm::cuda
