#include "kernels/cpu/amx/product.h"

#include <hwy/base.h>

#include <algorithm>
#include <atomic>

#include "kernels/cpu/matmul.h"

#if HWY_ARCH_X86_64 && defined(__linux__)

#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "kernels/cpu/amx/block-inl.h"
#include "kernels/cpu/amx/pack-inl.h"

// A task multiplies a tile of y, `kDepth` channels at a time: it packs the tile's weights, then
// adds the products to blocks of 32 x 32 sums in registers. Of its operands, 32 outputs of weights
// stay in the L1 cache for a piece of the rows, and a piece of the rows in the L2 cache for all
// outputs.

namespace kvlm::cpu::amx {

bool available() noexcept {
  static const bool kAll = [] {
    constexpr unsigned kAmxBf16 = 1u << 22;  // of CPUID leaf 7, EDX
    constexpr unsigned kAmxTile = 1u << 24;
    constexpr long kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM
    constexpr long kTileData = 18;
    unsigned a = 0;
    unsigned b = 0;
    unsigned c = 0;
    unsigned d = 0;
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("bmi2") &&
           __get_cpuid_count(7, 0, &a, &b, &c, &d) != 0 && (d & kAmxBf16) != 0 &&
           (d & kAmxTile) != 0 && syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  }();
  return kAll;
}

}  // namespace kvlm::cpu::amx

KVLM_BEFORE_AMX()
namespace kvlm::cpu::amx {

namespace {

constexpr size_t kPanelBytes = size_t{32} << 10;
constexpr size_t kPieceBytes = size_t{512} << 10;
constexpr size_t kMaxTileOuts = 256;

constexpr size_t divide_up(size_t a, size_t b) { return (a + b - 1) / b; }

/// Rows and outputs of y.
struct Tile {
  size_t row, rows;  // `row` is a multiple of kBlock
  size_t out, outs;
};

/// A tile of y with kX parts of x and kW of the weights.
template <size_t kX, size_t kW, bool kF16>
class TileProduct {
 public:
  static constexpr size_t kDepth = kPanelBytes / (kBlock * kW * sizeof(uint16_t));
  static constexpr size_t kPanel = kBlock * kDepth * kW;
  static constexpr size_t kScratchBytes = kMaxTileOuts / kBlock * kPanel * sizeof(uint16_t);

  TileProduct(const Product& product, const PackedRows& x, const Tile& tile, std::byte* scratch)
      : product_(product), x_(x), tile_(tile), scratch_(scratch) {}

  void run() {
    if (product_.bias != nullptr) begin_with_bias();
    bool add = product_.add || product_.bias != nullptr;
    for (size_t i = 0; i < x_.in; i += kDepth, add = true) {
      const size_t depth = std::min(kDepth, x_.in - i);
      if (pack_weights(i, depth)) {
        add_products(i, depth, add);
      } else {
        multiply_as_floats(i, depth, add);
      }
    }
  }

 private:
  const uint16_t* weights(size_t out, size_t i) const {
    return reinterpret_cast<const uint16_t*>(product_.w) + (tile_.out + out) * x_.in + i;
  }
  float* y(size_t row, size_t out) const {
    return product_.y + (tile_.row + row) * product_.out + tile_.out + out;
  }
  const uint16_t* rows(size_t row, size_t i) const {
    return x_.parts + ((tile_.row + row) * divide_up(x_.in, kStep) * kStep + kBlock * i) * kX;
  }
  uint16_t* panel(size_t out) const {
    return reinterpret_cast<uint16_t*>(scratch_) + out / kBlock * kPanel;
  }

  void begin_with_bias() const {
    for (size_t r = 0; r < tile_.rows; ++r) {
      float* to = y(r, 0);
      const float* bias = product_.bias + tile_.out;
      for (size_t o = 0; o < tile_.outs; ++o) to[o] = (product_.add ? to[o] : 0.0f) + bias[o];
    }
  }

  bool pack_weights(size_t i, size_t depth) const {
    bool finite = true;
    for (size_t o = 0; o < tile_.outs; o += kTileRows) {
      uint16_t* to = panel(o) + o % kBlock / kTileRows * kTile;
      finite &= pack_outputs<kW, kF16>(weights(o, i), x_.in, tile_.outs - o, depth, to);
    }
    return finite;
  }

  /// Weights that are not finite: the zeros among the parts would make NaN of them.
  void multiply_as_floats(size_t i, size_t depth, bool add) const {
    const WeightRows w{reinterpret_cast<const std::byte*>(weights(0, i)), product_.dtype, x_.in};
    cpu::multiply({y(0, 0), product_.out}, {x_.x + tile_.row * x_.in + i, x_.in}, w, tile_.rows,
                  tile_.outs, depth, add);
  }

  void add_products(size_t i, size_t depth, bool add) const {
    constexpr size_t kRowBytes = kDepth * kX * sizeof(uint16_t);
    constexpr size_t kPieceRows = std::max(kPieceBytes / kRowBytes / kBlock, size_t{1}) * kBlock;
    size_t shape[2] = {};
    for (size_t piece = 0; piece < tile_.rows; piece += kPieceRows) {
      const size_t end = std::min(piece + kPieceRows, tile_.rows);
      for (size_t o = 0; o < tile_.outs; o += kBlock) {
        const size_t outs = std::min(kBlock, tile_.outs - o);
        for (size_t r = piece; r < end; r += kBlock) {
          const size_t count = std::min(kBlock, tile_.rows - r);
          if (count != shape[0] || outs != shape[1]) configure(count, outs);
          shape[0] = count;
          shape[1] = outs;
          multiply_block<kX, kW>(block_at(r, o, i, depth, add, kPieceRows), count, outs);
        }
      }
    }
    _tile_release();
  }

  /// A block, which prefetches its share of the next piece of x and of the next weights.
  Block block_at(size_t r, size_t o, size_t i, size_t depth, bool add, size_t piece_rows) const {
    constexpr size_t kStepBytes = kX * 2 * kTile * sizeof(uint16_t);
    const size_t panels = divide_up(tile_.outs, kBlock);
    const size_t share = divide_up(kStepBytes / 64, panels);
    const bool last = r + piece_rows >= tile_.rows;
    const uint16_t* next = last ? rows(r % piece_rows, i + kDepth) : rows(r + piece_rows, i);
    const auto* from = reinterpret_cast<const std::byte*>(next) + o / kBlock * share * 64;
    const Ahead next_x{from, share, 64, kStepBytes};

    const size_t first = kBlock * r / tile_.rows;
    const size_t end = kBlock * std::min(r + kBlock, tile_.rows) / tile_.rows;
    const bool more = i + kDepth < x_.in;
    const auto* raw = reinterpret_cast<const std::byte*>(weights(o + first, i + kDepth));
    const Ahead next_w{raw, more ? end - first : 0, x_.in * sizeof(uint16_t), 64};
    return {y(r, o),
            product_.out * sizeof(float),
            rows(r, i),
            panel(o),
            divide_up(depth, kStep),
            add,
            next_x,
            next_w};
  }

  const Product& product_;
  const PackedRows& x_;
  const Tile tile_;
  std::byte* scratch_;
};

/// Tiles of y, enough for all threads: the bits of y do not depend on them.
struct Tiling {
  size_t outs, row_tiles;

  Tiling(size_t rows, size_t out, size_t threads) {
    constexpr size_t kTasksPerThread = 3;
    constexpr size_t kMinRows = 128;
    constexpr size_t kMinOuts = 64;
    const size_t wanted = threads == 1 ? 1 : kTasksPerThread * threads;
    const size_t most = std::max<size_t>(1, rows / kMinRows);
    outs = kMaxTileOuts;
    while (outs > kMinOuts && divide_up(out, outs) * most < wanted) outs /= 2;
    row_tiles = std::min(most, divide_up(wanted, divide_up(out, outs)));
  }
};

template <size_t kX, size_t kW, bool kF16>
void multiply_tiles(const Product& product, const PackedRows& x, Stream& stream) {
  using Kernel = TileProduct<kX, kW, kF16>;
  const Tiling tiling(x.rows, product.out, static_cast<size_t>(stream.pool().threads()));
  const size_t blocks = divide_up(x.rows, kBlock);
  const size_t tiles_out = divide_up(product.out, tiling.outs);
  stream.pool().parallel_for(tiles_out * tiling.row_tiles, [&](size_t task, int worker) {
    const size_t part = task % tiling.row_tiles;
    const size_t row = blocks * part / tiling.row_tiles * kBlock;
    const size_t end = std::min(x.rows, blocks * (part + 1) / tiling.row_tiles * kBlock);
    const size_t out = task / tiling.row_tiles * tiling.outs;
    const Tile tile{row, end - row, out, std::min(tiling.outs, product.out - out)};
    Kernel(product, x, tile, stream.scratch(worker, Kernel::kScratchBytes)).run();
  });
}

}  // namespace

std::optional<PackedRows> pack_rows(const float* x, size_t rows, size_t in, Split split,
                                    Stream& stream) {
  const size_t parts = split == Split::kExact ? 3 : 1;
  const size_t row_numbers = divide_up(in, kStep) * kStep * parts;
  const size_t bytes = divide_up(rows, kBlock) * kBlock * row_numbers * sizeof(uint16_t);
  const PackedRows packed{x, rows, in, split,
                          reinterpret_cast<uint16_t*>(stream.shared_scratch(bytes))};
  std::atomic<bool> finite = true;
  stream.pool().parallel_for(divide_up(rows, kTileRows), [&](size_t tile, int) {
    const size_t first = tile * kTileRows;
    for (size_t r = first; r < std::min(first + kTileRows, rows); ++r) {
      uint16_t* to = packed.parts + r / kBlock * kBlock * row_numbers +
                     r % kBlock / kTileRows * kTile + r % kTileRows * kStep;
      const auto pack = parts == 1 ? pack_row<1> : pack_row<3>;
      if (!pack(x + r * in, in, to)) finite = false;
    }
  });
  if (!finite) return std::nullopt;
  return packed;
}

void multiply(const Product& product, const PackedRows& x, Stream& stream) {
  const bool half = product.dtype == DType::kF16;
  if (x.split == Split::kRounded) {
    return half ? multiply_tiles<1, 1, true>(product, x, stream)
                : multiply_tiles<1, 1, false>(product, x, stream);
  }
  return half ? multiply_tiles<3, 2, true>(product, x, stream)
              : multiply_tiles<3, 1, false>(product, x, stream);
}

}  // namespace kvlm::cpu::amx
KVLM_AFTER_AMX()

#else

namespace kvlm::cpu::amx {

bool available() noexcept { return false; }
std::optional<PackedRows> pack_rows(const float*, size_t, size_t, Split, Stream&) { return {}; }
void multiply(const Product&, const PackedRows&, Stream&) {}

}  // namespace kvlm::cpu::amx

#endif
