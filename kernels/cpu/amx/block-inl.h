// Products of a block of up to 32 x 32 outputs, whose sums stay in tiles.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "kernels/cpu/amx/pack-inl.h"
#include "kernels/cpu/amx/target.h"

KVLM_BEFORE_AMX()
namespace kvlm::cpu::amx {

inline constexpr size_t kBlock = 2 * kTileRows;  // rows and outputs of a block

/// Lines to prefetch into the L2 cache, `count` of them a step.
struct Ahead {
  const std::byte* next;
  size_t count, stride, step;

  /// Must be inlined: GCC drops calls of a function that only prefetches.
  HWY_INLINE void fetch() {
    for (size_t i = 0; i < count; ++i) __builtin_prefetch(next + i * stride, 0, 2);
    next += step;
  }
};

/// One block: tiles 0 to 3 are its sums, 4 and 5 its rows, 6 and 7 its outputs.
struct Block {
  float* y;
  size_t row_bytes;   // of y
  const uint16_t* x;  // [steps][kX][2][kTile]
  const uint16_t* w;  // [steps][kW][2][kTile]
  size_t steps;
  bool add;
  Ahead next_x, next_w;
};

struct alignas(64) TileConfig {
  uint8_t palette = 1;
  uint8_t unused[15] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

/// Shapes the tiles for a block. GCC's intrinsics do not say that they read memory, so what was
/// written before is made visible here.
inline void configure(size_t rows, size_t outs) {
  TileConfig config;
  const auto shape = [&config](int tile, size_t tile_rows, size_t row_bytes) {
    config.rows[tile] = static_cast<uint8_t>(std::clamp<size_t>(tile_rows, 1, kTileRows));
    config.row_bytes[tile] = static_cast<uint16_t>(std::clamp<size_t>(row_bytes, 4, 64));
  };
  for (int half = 0; half < 2; ++half) {
    const size_t from = half == 0 ? 0 : kTileRows;
    const size_t tile_rows = rows > from ? rows - from : 0;
    const size_t row_bytes = outs > from ? 4 * (outs - from) : 0;
    shape(2 * half, tile_rows, 4 * outs);
    shape(2 * half + 1, tile_rows, outs > kTileRows ? 4 * (outs - kTileRows) : 0);
    shape(4 + half, tile_rows, 64);
    shape(6 + half, kTileRows, row_bytes);
  }
  asm volatile("" : : "r"(&config) : "memory");
  _tile_loadconfig(&config);
}

/// Adds the products of 32 channels, smaller parts last.
template <size_t kX, size_t kW, bool kTall, bool kWide>
HWY_INLINE void multiply_step(const uint16_t* x, const uint16_t* w) {
  for (size_t q = 0; q < kW; ++q, w += 2 * kTile) {
    _tile_loadd(6, w, 64);
    if constexpr (kWide) _tile_loadd(7, w + kTile, 64);
    for (size_t p = 0; p + q < kX; ++p) {
      const uint16_t* rows = x + p * 2 * kTile;
      _tile_loadd(4, rows, 64);
      _tile_dpbf16ps(0, 4, 6);
      if constexpr (kWide) _tile_dpbf16ps(1, 4, 7);
      if constexpr (kTall) {
        _tile_loadd(5, rows + kTile, 64);
        _tile_dpbf16ps(2, 5, 6);
        if constexpr (kWide) _tile_dpbf16ps(3, 5, 7);
      }
    }
  }
}

/// A block of more than 16 rows if kTall, and more than 16 outputs if kWide.
template <size_t kX, size_t kW, bool kTall, bool kWide>
HWY_NOINLINE void multiply_block(Block block) {
  float* y = block.y;
  const size_t stride = block.row_bytes;
  float* bottom = y + kTileRows * stride / sizeof(float);
  if (block.add) {
    _tile_loadd(0, y, stride);
    if constexpr (kWide) _tile_loadd(1, y + kTileRows, stride);
    if constexpr (kTall) _tile_loadd(2, bottom, stride);
    if constexpr (kTall && kWide) _tile_loadd(3, bottom + kTileRows, stride);
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  const uint16_t* x = block.x;
  const uint16_t* w = block.w;
  for (size_t s = 0; s < block.steps; ++s, x += kX * 2 * kTile, w += kW * 2 * kTile) {
    block.next_x.fetch();
    block.next_w.fetch();
    multiply_step<kX, kW, kTall, kWide>(x, w);
  }
  _tile_stored(0, y, stride);
  if constexpr (kWide) _tile_stored(1, y + kTileRows, stride);
  if constexpr (kTall) _tile_stored(2, bottom, stride);
  if constexpr (kTall && kWide) _tile_stored(3, bottom + kTileRows, stride);
}

template <size_t kX, size_t kW>
void multiply_block(const Block& block, size_t rows, size_t outs) {
  const bool wide = outs > kTileRows;
  if (rows > kTileRows) {
    return wide ? multiply_block<kX, kW, true, true>(block)
                : multiply_block<kX, kW, true, false>(block);
  }
  return wide ? multiply_block<kX, kW, false, true>(block)
              : multiply_block<kX, kW, false, false>(block);
}

}  // namespace kvlm::cpu::amx
KVLM_AFTER_AMX()
