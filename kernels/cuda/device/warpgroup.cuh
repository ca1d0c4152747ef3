#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

// The tensor cores of compute capability 9.0 as a warpgroup (four warps) uses them: products of a
// matrix in registers and one in shared memory that run beside what the warps do next. Code for
// sm_90a alone.
//
// Source: PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions".
namespace kvlm::cuda {

/// Shared-memory tiles of `kRows_` rows of kChannels halves that these products take as right-hand
/// operands: panels of 64 channels, or of 16 where 64 does not divide their number; inside a panel
/// the 16-byte chunks of a row are exchanged, so that eight rows meet no bank twice. Tiles begin at
/// multiples of kAlignment bytes.
template <int kRows_, int kChannels_>
struct WarpgroupTile {
  static constexpr int kRows = kRows_;
  static constexpr int kChannels = kChannels_;
  static constexpr int kPanel = kChannels % 64 == 0 ? 64 : 16;
  static constexpr uint32_t kRowBytes = 2 * kPanel;
  static constexpr uint32_t kPanelBytes = kRows * kRowBytes;
  static constexpr uint32_t kBytes = kChannels / kPanel * kPanelBytes;
  static constexpr uint32_t kAlignment = 8 * kRowBytes;
  static_assert(kChannels % 16 == 0 && kPanelBytes % kAlignment == 0);

  /// Offset in bytes of channels [channel, channel + 8) of a row; channel is a multiple of 8.
  static __device__ uint32_t chunk(int row, int channel) {
    const int in_panel = channel % kPanel / 8;
    const int exchanged = kPanel == 64 ? in_panel ^ (row % 8) : in_panel ^ (row / 4 % 2);
    return static_cast<uint32_t>(channel / kPanel) * kPanelBytes +
           static_cast<uint32_t>(row) * kRowBytes + static_cast<uint32_t>(exchanged) * 16;
  }

  /// How much further `channel`, a multiple of 16, is described than channel 0.
  static constexpr __device__ uint32_t channel_bytes(int channel) {
    return static_cast<uint32_t>(channel / kPanel) * kPanelBytes +
           static_cast<uint32_t>(channel % kPanel) * 2;
  }
  /// Describes channels [channel, channel + 16) of all rows: a factor whose columns are rows.
  static __device__ uint64_t by_rows(uint32_t tile, int channel) {
    return described(tile + channel_bytes(channel));
  }
  /// Describes rows [row, row + 16) of all channels: a factor whose columns are channels.
  static __device__ uint64_t by_channels(uint32_t tile, int row) {
    return described(tile + static_cast<uint32_t>(row) * kRowBytes);
  }

 private:
  static __device__ uint64_t described(uint32_t address) {
    constexpr uint64_t kExchange = kPanel == 64 ? 1 : 3;  // 128 bytes, 32 bytes
    return (address & 0x3ffff) >> 4 | static_cast<uint64_t>(kPanelBytes >> 4) << 16 |
           static_cast<uint64_t>(kAlignment >> 4) << 32 | kExchange << 62;
  }
};

/// What describes the same rows and channels of a tile `bytes` bytes further.
__device__ inline uint64_t described_further(uint64_t described, uint32_t bytes) {
  return (described & ~uint64_t{0xffffffff}) | (static_cast<uint32_t>(described) + bytes / 16);
}

/// Before the first product, and whenever registers that a product takes were written.
__device__ inline void warpgroup_arrive() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
/// Closes the products since the last one into a group.
__device__ inline void warpgroup_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
/// Waits until no more than kGroups groups, the latest, are under way.
template <int kGroups = 0>
__device__ inline void warpgroup_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kGroups) : "memory");
}
/// What this thread wrote to shared memory becomes visible to products.
__device__ inline void show_to_products() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

/// d (64 x kColumns) = a (64 x 16) b (16 x kColumns), plus d unless `fresh`. Warp w of the
/// warpgroup has rows [16 w, 16 w + 16); of these a thread holds a and d as mma() in
/// matrix_units.cuh, d's groups of 8 columns one after another. kByChannels: b is described
/// by_channels().
template <class T, int kColumns, bool kByChannels>
struct WarpgroupProduct;

#define KVLM_WARPGROUP_PRODUCT_64(type)                                                            \
  asm volatile(                                                                                    \
      "{\n.reg .pred add;\nsetp.eq.b32 add, %37, 0;\n"                                             \
      "wgmma.mma_async.sync.aligned.m64n64k16.f32." type "." type                                  \
      " {"                                                                                         \
      "%0, %1, %2, %3, %4, %5, %6, %7, "                                                           \
      "%8, %9, %10, %11, %12, %13, %14, %15, "                                                     \
      "%16, %17, %18, %19, %20, %21, %22, %23, "                                                   \
      "%24, %25, %26, %27, %28, %29, %30, %31}, "                                                  \
      "{%32, %33, %34, %35}, %36, add, 1, 1, %38;\n}\n"                                            \
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),        \
        "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]),    \
        "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), \
        "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), \
        "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])                                         \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(fresh)),          \
        "n"(kByChannels ? 1 : 0))

#define KVLM_WARPGROUP_PRODUCT_80(type)                                                            \
  asm volatile(                                                                                    \
      "{\n.reg .pred add;\nsetp.eq.b32 add, %45, 0;\n"                                             \
      "wgmma.mma_async.sync.aligned.m64n80k16.f32." type "." type                                  \
      " {"                                                                                         \
      "%0, %1, %2, %3, %4, %5, %6, %7, "                                                           \
      "%8, %9, %10, %11, %12, %13, %14, %15, "                                                     \
      "%16, %17, %18, %19, %20, %21, %22, %23, "                                                   \
      "%24, %25, %26, %27, %28, %29, %30, %31, "                                                   \
      "%32, %33, %34, %35, %36, %37, %38, %39}, "                                                  \
      "{%40, %41, %42, %43}, %44, add, 1, 1, %46;\n}\n"                                            \
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),        \
        "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]),    \
        "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), \
        "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), \
        "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), \
        "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39])                            \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(fresh)),          \
        "n"(kByChannels ? 1 : 0))

#define KVLM_WARPGROUP_PRODUCT(T, type, columns)                                            \
  template <bool kByChannels>                                                               \
  struct WarpgroupProduct<T, columns, kByChannels> {                                        \
    static __device__ void add(float (&d)[columns / 2], const uint32_t (&a)[4], uint64_t b, \
                               bool fresh) {                                                \
      KVLM_WARPGROUP_PRODUCT_##columns(type);                                               \
    }                                                                                       \
  };
KVLM_WARPGROUP_PRODUCT(__half, "f16", 64)
KVLM_WARPGROUP_PRODUCT(__half, "f16", 80)
KVLM_WARPGROUP_PRODUCT(__nv_bfloat16, "bf16", 64)
KVLM_WARPGROUP_PRODUCT(__nv_bfloat16, "bf16", 80)
#undef KVLM_WARPGROUP_PRODUCT
#undef KVLM_WARPGROUP_PRODUCT_64
#undef KVLM_WARPGROUP_PRODUCT_80

}  // namespace kvlm::cuda
