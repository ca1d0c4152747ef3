#pragma once

#include "kernels/cuda/device/async_copies.cuh"
#include "kernels/cuda/device/launch.cuh"
#include "kernels/cuda/device/matrix_units.cuh"
#include "kernels/quantized/layout.h"

// Tiles of a quantized matrix W (quantized/layout.h) as operands of the tensor cores: 32 outputs
// and 32 inputs, of which lane 4 n + c of a warp has inputs 8 c to 8 c + 7 of outputs n, 8 + n,
// 16 + n and 24 + n. W's outputs are the rows of a product, and rows of x its columns.
namespace kvlm::cuda {

constexpr int kTile = static_cast<int>(kTileOutputs);  // outputs, and inputs
constexpr int kEights = kTile / 8;                     // outputs of a lane
constexpr int kTileRows = 8;                           // rows of x of one product
static_assert(kInputBlock == kTile);

/// What kernels need of a format.
struct CodeArgs {
  int in;           // of x
  int tiles;        // along the inputs
  int group_shift;  // tiles that share a scale
  int groups;
  int zero;  // of groups without zero points
  DType scale;

  explicit CodeArgs(const QuantizedFormat& format)
      : in(static_cast<int>(format.in)),
        tiles(static_cast<int>(layout_of(format, DeviceKind::kCuda).in / kTile)),
        // 32, 64 or 128 inputs, or all of them.
        group_shift(format.groups() == 1 ? 30 : format.group / kTile / 2),
        groups(static_cast<int>(format.groups())),
        zero(format.zero()),
        scale(format.scale) {}
};

/// Where the parts of a matrix lie.
struct CodeMatrix {
  const std::byte* codes;
  const std::byte* scales;
  const std::byte* zeros;  // null where groups have none

  CodeMatrix() = default;
  explicit CodeMatrix(const QuantizedMatrix& matrix) : codes(matrix.data) {
    const QuantizedLayout layout = layout_of(matrix.format, DeviceKind::kCuda);
    scales = matrix.data + layout.scales;
    zeros = matrix.format.has_zeros ? matrix.data + layout.zeros : nullptr;
  }
  /// Index of the first scale, and zero point, of a tile: those of 32 outputs lie together.
  __device__ size_t entry(const CodeArgs& args, int unit, int tile) const {
    return (static_cast<size_t>(unit) * args.groups + (tile >> args.group_shift)) * kTile;
  }
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

/// (bits & 0x000f000f) | set in one instruction; of constants the compiler makes two.
__device__ inline uint32_t low_nibbles_or(uint32_t bits, uint32_t set) {
  uint32_t made;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(made) : "r"(bits), "n"(0x000f000fu), "r"(set));
  return made;
}

/// The codes of one lane in a tile: 8 inputs of each of 4 outputs.
template <WeightCode kCode>
struct LaneCodes {
  static constexpr int kLoads = kCode == WeightCode::kU4 ? 1 : 2;
  static constexpr int kTileBytes = 512 * kLoads;
  uint32_t words[4 * kLoads];

  /// From a tile in global or shared memory.
  __device__ void load(const std::byte* tile, int lane) {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      *reinterpret_cast<uint4*>(words + 4 * i) =
          *reinterpret_cast<const uint4*>(tile + 512 * i + 16 * lane);
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
        const uint32_t codes = low_nibbles_or(words[eight] >> (4 * j), kMagic);
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

/// Scales of a tile in shared memory, and its zero points behind the largest scales.
constexpr int kZerosAt = 4 * kTile;
constexpr int kMetaBytes = kZerosAt + kTile;

/// What a lane copies of the tiles of 32 outputs: its own codes, and some bytes of the scales and
/// zero points.
template <WeightCode kCode>
class TileCopies {
 public:
  __device__ TileCopies(const CodeMatrix& w, const CodeArgs& args, int unit, int lane)
      : codes_(w.codes + static_cast<int64_t>(unit) * args.tiles * LaneCodes<kCode>::kTileBytes +
               16 * lane),
        group_shift_(args.group_shift),
        lane_(lane) {
    const int scale_bytes = args.scale == DType::kF32 ? 4 : 2;
    const int64_t entry = static_cast<int64_t>(unit) * args.groups * kTile;
    if (16 * lane < kTile * scale_bytes) {
      meta_ = w.scales + entry * scale_bytes + 16 * lane;
      group_bytes_ = static_cast<uint32_t>(kTile * scale_bytes);
    } else if (w.zeros != nullptr && lane >= kZerosAt / 16 && lane < kMetaBytes / 16) {
      meta_ = w.zeros + entry + (16 * lane - kZerosAt);
      group_bytes_ = kTile;
    }
  }
  /// A tile's codes, and its scales and zero points, if it is wanted.
  __device__ void copy(uint32_t codes, uint32_t meta, int tile, bool wanted) const {
    constexpr int kBytes = LaneCodes<kCode>::kTileBytes;
    const std::byte* from = codes_ + static_cast<int64_t>(tile) * kBytes;
#pragma unroll
    for (int i = 0; i < kBytes; i += 512) copy_async(codes + i + 16 * lane_, from + i, wanted);
    const std::byte* of_group =
        meta_ + static_cast<uint64_t>(static_cast<uint32_t>(tile >> group_shift_)) * group_bytes_;
    copy_async(meta + 16 * lane_, of_group, wanted && group_bytes_ != 0);
  }

 private:
  const std::byte* codes_;
  const std::byte* meta_ = nullptr;
  uint32_t group_bytes_ = 0;
  int group_shift_;
  int lane_;
};

/// What widened codes are smaller by than their values.
template <class T, WeightCode kCode>
__device__ constexpr float scale_of_codes() {
  if (kCode != WeightCode::kE4M3) return 1;
  return std::is_same_v<T, __half> ? 0x1p8f : 0x1p120f;
}

/// What a kernel knows of a format's scales and zero points when it is compiled.
enum class Groups : uint8_t {
  kF16,   ///< scales of f16, no zero points
  kBF16,  ///< the same of bf16
  kAny,   ///< nothing
};

/// The scales of a lane's outputs, and what is subtracted from their codes.
template <class T, WeightCode kCode, Groups kGroups>
struct LaneGroup {
  float scales[kEights];
  uint32_t offsets[kEights];

  /// Of a tile's scales and zero points as TileCopies brought them.
  __device__ LaneGroup(const std::byte* meta, DType dtype, bool has_zeros, int lane) {
    const int at = lane / 4 * kEights;
    if (kGroups == Groups::kAny && dtype == DType::kF32) {
      set_scales(*reinterpret_cast<const float4*>(meta + 4 * at));
    } else {
      const uint2 halves = *reinterpret_cast<const uint2*>(meta + 2 * at);
      float2 low, high;
      if (kGroups == Groups::kF16 || (kGroups == Groups::kAny && dtype == DType::kF16)) {
        low = __half22float2(pair_of<__half>(halves.x));
        high = __half22float2(pair_of<__half>(halves.y));
      } else {
        low = __bfloat1622float2(pair_of<__nv_bfloat16>(halves.x));
        high = __bfloat1622float2(pair_of<__nv_bfloat16>(halves.y));
      }
      set_scales(make_float4(low.x, low.y, high.x, high.y));
    }
    const bool reads_zeros = kGroups == Groups::kAny && has_zeros;
    const uint32_t points =
        reads_zeros ? *reinterpret_cast<const uint32_t*>(meta + kZerosAt + at) : 0;
#pragma unroll
    for (int eight = 0; eight < kEights; ++eight) {
      const auto zero = reads_zeros ? static_cast<float>(points >> (8 * eight) & 255u)
                                    : static_cast<float>(zero_of(kCode));
      offsets[eight] = LaneCodes<kCode>::template offset_of<T>(zero);
    }
  }

 private:
  __device__ void set_scales(float4 wide) {
    constexpr float kOfCodes = scale_of_codes<T, kCode>();
    scales[0] = wide.x * kOfCodes;
    scales[1] = wide.y * kOfCodes;
    scales[2] = wide.z * kOfCodes;
    scales[3] = wide.w * kOfCodes;
  }
};

/// The sums of a warp. Of kRowTiles * 8 rows and 32 outputs a lane has rows 2 c and 2 c + 1 of each
/// eight, of outputs 16 half + n, the first two sums, and 16 half + 8 + n.
template <int kRowTiles>
using TileSums = float[kRowTiles][2][4];

/// Adds the products of one tile; `inputs`, (row tile) -> uint4, are inputs 8 c to 8 c + 7 of row n
/// of those eight. The products of 32 inputs are added up in f32, and then times the scale, so that
/// no weight is rounded and no row depends on another.
template <class T, WeightCode kCode, Groups kGroups, int kRowTiles, class Inputs>
__device__ void add_tile(TileSums<kRowTiles>& sums, const LaneCodes<kCode>& codes,
                         const LaneGroup<T, kCode, kGroups>& group, const Inputs& inputs) {
  constexpr int kTogether = kRowTiles < 2 ? 1 : 2;  // so that one waits while the other is made
  uint32_t pairs[kEights][4];
#pragma unroll
  for (int eight = 0; eight < kEights; ++eight) {
    codes.template widen<T>(eight, group.offsets[eight], pairs[eight]);
  }
#pragma unroll
  for (int tile = 0; tile < kRowTiles; tile += kTogether) {
    uint4 x[kTogether];
#pragma unroll
    for (int i = 0; i < kTogether; ++i) x[i] = inputs(tile + i);
    float of_tile[kTogether][2][4];
#pragma unroll
    for (int i = 0; i < 2 * kTogether; ++i) {
      const uint32_t(&low)[4] = pairs[i % 2 * 2];
      const uint32_t(&high)[4] = pairs[i % 2 * 2 + 1];
      multiply_first<T>(of_tile[i / 2][i % 2], {low[0], high[0], low[1], high[1]}, x[i / 2].x,
                        x[i / 2].y);
    }
#pragma unroll
    for (int i = 0; i < 2 * kTogether; ++i) {
      const uint32_t(&low)[4] = pairs[i % 2 * 2];
      const uint32_t(&high)[4] = pairs[i % 2 * 2 + 1];
      multiply<T>(of_tile[i / 2][i % 2], {low[2], high[2], low[3], high[3]}, x[i / 2].z,
                  x[i / 2].w);
    }
#pragma unroll
    for (int i = 0; i < 8 * kTogether; ++i) {
      float& to = sums[tile + i / 8][i / 4 % 2][i % 4];
      to = fmaf(of_tile[i / 8][i / 4 % 2][i % 4], group.scales[i / 2 % 4], to);
    }
  }
}

/// Calls `body`, []<Groups kGroups>(), for scales and zero points.
template <class Body>
__device__ void with_groups(DType scale, bool has_zeros, const Body& body) {
  if (!has_zeros && scale == DType::kF16) {
    body.template operator()<Groups::kF16>();
  } else if (!has_zeros && scale == DType::kBF16) {
    body.template operator()<Groups::kBF16>();
  } else {
    body.template operator()<Groups::kAny>();
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

}  // namespace kvlm::cuda
