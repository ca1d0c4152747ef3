#include <algorithm>
#include <type_traits>

#include "kernels/cuda/dense/prompt_tiles.cuh"
#include "kernels/cuda/device/box_copies.cuh"
#include "kernels/cuda/device/has_warpgroups.h"
#include "kernels/cuda/device/launch.cuh"
#include "kernels/cuda/device/tensor_map.h"
#include "kernels/cuda/device/warpgroup.cuh"
#include "kernels/cuda/device/warpgroup_shared.cuh"
#include "kernels/cuda/model/activation.cuh"
#include "kernels/cuda/product/warpgroup_product.h"

// Products of halves as warpgroups make them, with what follows inside. As many blocks as the GPU
// has multiprocessors take tile after tile of y. One warp copies stages of x and w to shared
// memory, two warpgroups multiply 64 rows each. A tile's sums are rounded and kept in registers:
// GELU and storing happen a slice of columns at a time while the next tile's products run, so that
// the tensor cores do not wait for them. Two blocks side by side have the same columns and copy
// half of w each, for both; the last tiles' rows, if they are odd, they have for themselves, each
// other columns. Of a gated product half of a tile's columns are the gate's and half the other
// factor's, so that one thread has both of an element.
namespace kvlm::cuda {

namespace {

constexpr int kTileRows = 128;  // of a block
constexpr int kTileColumns = 256;
constexpr int kDepth = 64;  // columns of x and w in a stage
constexpr int kStages = 4;
constexpr int kThreads = 384;  // a warpgroup of which one thread copies, two that multiply
constexpr int kHalfTile = kTileColumns / 2;
constexpr int kMostSlices = kTileColumns / 16;

/// Columns of y that a tile makes, and slices of 16 of them.
constexpr int made_columns(HalfTail tail) {
  return tail == HalfTail::kGated ? kHalfTile : kTileColumns;
}
constexpr int slices_of(HalfTail tail) { return made_columns(tail) / 16; }

using Left = WarpgroupTile<kTileRows, kDepth>;
using Right = WarpgroupTile<kTileColumns, kDepth>;
using Box = WarpgroupTile<16, 64>;  // of y, on its way from a warp

// Shared memory, by offset.
constexpr uint32_t kStageBytes = Left::kBytes + Right::kBytes;
constexpr uint32_t kBoxes = kStages * kStageBytes;
constexpr uint32_t kBiases = kBoxes + 8 * Box::kBytes;  // of this tile and the next
constexpr uint32_t kBarriers = kBiases + 2 * kTileColumns * sizeof(float);
constexpr uint32_t kSharedBytes = kBarriers + 2 * kStages * 8;

struct ProductMaps {
  CUtensorMap x, w, up, y;
};

/// A block's tile of y.
struct ProductTile {
  int row, column;  // the first ones
  bool shared;      // the other block of the pair has the same columns
};

/// Which tiles of y there are. A pair of blocks takes two of them: one below the other, or of the
/// last row of tiles one beside the other.
struct ProductPlan {
  const float* bias;
  const float* up_bias;
  int rows, out;
  int steps;        // stages of a tile
  int bands;        // of two tiles' rows
  int across;       // tiles side by side
  bool single;      // a row of tiles is left
  bool by_columns;  // jobs go down the bands first: w is read once, else x is

  __device__ int shared_jobs() const { return bands * across; }
  VLM_HD int jobs() const { return bands * across + (single ? (across + 1) / 2 : 0); }
  /// What this block's pair does in round `round`; behind jobs() there is nothing. Every other
  /// round goes backwards, so that pairs share evenly what ends with few rows.
  __device__ int job(int round) const {
    const auto pairs = static_cast<int>(gridDim.x / 2);
    const auto pair = static_cast<int>(blockIdx.x / 2);
    return round * pairs + (round % 2 == 0 ? pair : pairs - 1 - pair);
  }
  __device__ bool has(int job) const { return job < jobs(); }
  template <HalfTail kTail>
  __device__ ProductTile tile(int job, int block) const {
    constexpr int kColumns = made_columns(kTail);
    const int rest = job - shared_jobs();
    if (rest >= 0) return {2 * bands * kTileRows, (2 * rest + block) * kColumns, false};
    const int band = by_columns ? job % bands : job / across;
    const int column = by_columns ? job / bands : job % across;
    return {(2 * band + block) * kTileRows, column * kColumns, true};
  }
};

/// The stages of shared memory, which the copying thread and both warpgroups go through in turn.
class Stages {
 public:
  explicit __device__ Stages(uint32_t shared) : shared_(shared) {}

  /// By one thread.
  __device__ void make_barriers() const {
    for (int i = 0; i < kStages; ++i) {
      filled(i).make(1);
      left(i).make(4);  // two warpgroups of two blocks
    }
    show_barriers();
  }
  __device__ PhaseBarrier filled() const { return filled(at_); }
  __device__ void wait_until_filled() const { filled(at_).wait(phase_); }
  __device__ void wait_until_left() const { left(at_).wait(phase_ ^ 1); }
  /// By every warpgroup when it is done with stage i: tells both blocks.
  __device__ void leave(int i) const {
    if (threadIdx.x % 128 < 2) left(i).arrive_at(threadIdx.x % 128);
  }
  __device__ void advance() {
    if (++at_ < kStages) return;
    at_ = 0;
    phase_ ^= 1;
  }
  __device__ int at() const { return at_; }
  /// Bytes from the first stage to the one at hand, and where that begins.
  __device__ uint32_t offset() const { return static_cast<uint32_t>(at_) * kStageBytes; }
  __device__ uint32_t left_factor() const { return shared_ + offset(); }
  __device__ uint32_t right_factor() const { return left_factor() + Left::kBytes; }

 private:
  __device__ PhaseBarrier filled(int i) const {
    return PhaseBarrier(shared_ + kBarriers + 8 * static_cast<uint32_t>(i));
  }
  __device__ PhaseBarrier left(int i) const { return filled(kStages + i); }

  uint32_t shared_;
  int at_ = 0;
  int phase_ = 0;
};

/// Bytes of the biases of a tile's columns, of which there are kColumns at most.
template <int kColumns>
__device__ uint32_t bias_bytes(const float* bias, const ProductPlan& plan, int column) {
  if (bias == nullptr) return 0;
  return static_cast<uint32_t>(max(0, min(kColumns, plan.out - column)) * sizeof(float));
}

/// By one thread of a block: copies all that its tiles are made of.
template <HalfTail kTail>
__device__ void copy_factors(Stages stages, uint32_t biases, const ProductPlan& plan,
                             const ProductMaps& maps, int block) {
  constexpr bool kGated = kTail == HalfTail::kGated;
  for (int round = 0; plan.has(plan.job(round)); ++round) {
    const ProductTile tile = plan.tile<kTail>(plan.job(round), block);
    for (int step = 0; step < plan.steps; ++step) {
      stages.wait_until_left();
      const PhaseBarrier filled = stages.filled();
      if (step == 0) {
        // Both warpgroups have left a stage of the tile before: they need what is replaced no more.
        const uint32_t to = biases + round % 2 * kTileColumns * sizeof(float);
        const uint32_t bytes = bias_bytes<made_columns(kTail)>(plan.bias, plan, tile.column);
        const uint32_t up_bytes =
            kGated ? bias_bytes<kHalfTile>(plan.up_bias, plan, tile.column) : 0;
        filled.arrive_and_expect(kStageBytes + bytes + up_bytes);
        if (bytes > 0) filled.copy_bytes(to, plan.bias + tile.column, bytes);
        if (up_bytes > 0) {
          filled.copy_bytes(to + kHalfTile * sizeof(float), plan.up_bias + tile.column, up_bytes);
        }
      } else {
        filled.arrive_and_expect(kStageBytes);
      }
      const int channel = step * kDepth;
      filled.copy_box(stages.left_factor(), maps.x, channel, tile.row, 0);
      for (int half = 0; half < 2; ++half) {
        if (tile.shared && half != block) continue;
        const uint32_t to =
            stages.right_factor() + static_cast<uint32_t>(half) * (Right::kBytes / 2);
        const CUtensorMap& from = kGated && half == 1 ? maps.up : maps.w;
        const int row = tile.column + (kGated ? 0 : half * kHalfTile);
        if (tile.shared) {
          filled.copy_box_to_both(to, from, channel, row, 0);
        } else {
          filled.copy_box(to, from, channel, row, 0);
        }
      }
      stages.advance();
    }
  }
}

template <class T>
__device__ float2 floats_of(uint32_t pair) {
  const T* halves = reinterpret_cast<const T*>(&pair);
  return {load_float(halves[0]), load_float(halves[1])};
}

/// Waits for the four warps of warpgroup 0 or 1 of those that multiply.
__device__ void meet_warpgroup(int warpgroup) {
  if (warpgroup == 0) {
    asm volatile("bar.sync 1, 128;" ::: "memory");
  } else {
    asm volatile("bar.sync 2, 128;" ::: "memory");
  }
}

/// What a thread of a multiplying warpgroup keeps: the sums of the tile at hand and the finished
/// tile before it, rounded. Both are laid out as WarpgroupProduct says.
template <class T, HalfTail kTail>
class TileSums {
 public:
  /// `stages` are at the first one, `box` (shared memory) is this warp's.
  __device__ TileSums(const Stages& stages, int warpgroup, uint32_t box, const CUtensorMap& y)
      : left_(Left::by_rows(
            stages.left_factor() + static_cast<uint32_t>(warpgroup) * 64 * Left::kRowBytes, 0)),
        right_(Right::by_rows(stages.right_factor(), 0)),
        box_(box),
        y_(y) {
#pragma unroll
    for (float& sum : sums_) sum = 0;
#pragma unroll
    for (uint32_t& pair : rounded_) pair = 0;
  }

  /// Queues sums_ (+)= the stage at hand, of this warpgroup's rows.
  __device__ void multiply(const Stages& stages, bool fresh) {
    warpgroup_arrive();
#pragma unroll
    for (int channel = 0; channel < kDepth; channel += 16) {
      const uint32_t further = stages.offset() + 2 * channel;
      SharedProduct<T>::add(sums_, described_further(left_, further),
                            described_further(right_, further), fresh && channel == 0);
    }
    warpgroup_commit();
  }

  /// Columns [16 i, 16 i + 16) of the finished tile: activates them and brings them to the box,
  /// which is sent when it is full.
  __device__ void finish_slice(int i) {
    uint32_t pairs[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      pairs[j] = rounded_[4 * i + j];
      if constexpr (kTail == HalfTail::kGelu) {
        const float2 x = floats_of<T>(pairs[j]);
        pairs[j] = Multiplier<T>::pair(gelu_of_halves<T>(x.x), gelu_of_halves<T>(x.y));
      }
    }
    const int lane = static_cast<int>(threadIdx.x % 32);
    if (i % 4 == 0) {
      if (lane == 0) wait_for_stored_boxes();
      __syncwarp();
    }
    store_matrices(box_ + Box::chunk(lane % 16, i % 4 * 16 + lane / 16 * 8), pairs);
    if (i % 4 != 3) return;
    show_to_products();  // and to copies
    __syncwarp();
    if (lane != 0 || !there_) return;
    store_box(y_, box_, column_ + i / 4 * 64, row_, 0);
    close_stores();
  }

  /// The tile at hand is done: rounds its sums and `bias` (shared memory), which take the place of
  /// the finished tile. Its first row of this warp is `row`, of `there` or not.
  __device__ void round(const float* bias, int row, int column, bool there) {
    bias += threadIdx.x % 4 * 2;
#pragma unroll
    for (int group = 0; group < kColumns / 8; ++group) {
      const float2 added = *reinterpret_cast<const float2*>(bias + group * 8);
      float2 of_up{};
      if constexpr (kGated) of_up = *reinterpret_cast<const float2*>(bias + kHalfTile + group * 8);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float* sums = sums_ + 4 * group + 2 * half;
        float2 x{sums[0] + added.x, sums[1] + added.y};
        if constexpr (kGated) {
          const float* up = sums + kHalfTile / 2;
          x = {silu_of_halves(x.x) * (up[0] + of_up.x), silu_of_halves(x.y) * (up[1] + of_up.y)};
        }
        rounded_[2 * group + half] = Multiplier<T>::pair(x.x, x.y);
      }
    }
    row_ = row;
    column_ = column;
    there_ = there;
  }

 private:
  /// Four matrices of 8 x 8, a row of which begins at `to` of each lane.
  __device__ void store_matrices(uint32_t to, const uint32_t (&pairs)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to),
                 "r"(pairs[0]), "r"(pairs[1]), "r"(pairs[2]), "r"(pairs[3])
                 : "memory");
  }

  static constexpr bool kGated = kTail == HalfTail::kGated;
  static constexpr int kColumns = made_columns(kTail);

  uint64_t left_, right_;  // what describes the factors in the first stage
  uint32_t box_;
  const CUtensorMap& y_;
  int row_ = 0;
  int column_ = 0;
  bool there_ = false;
  float sums_[kTileColumns / 2];
  uint32_t rounded_[kColumns / 4];
};

/// By warpgroup 0 or 1 of those that multiply.
template <class T, HalfTail kTail>
__device__ void make_tiles(Stages stages, const float* biases, uint32_t boxes,
                           const ProductPlan& plan, const ProductMaps& maps, int block,
                           int warpgroup) {
  const int warp = static_cast<int>(threadIdx.x / 32 % 4);
  constexpr int kSlices = slices_of(kTail);
  TileSums<T, kTail> sums(
      stages, warpgroup, boxes + static_cast<uint32_t>(warpgroup * 4 + warp) * Box::kBytes, maps.y);
  for (int round = 0;; ++round) {
    const int job = plan.job(round);
    const ProductTile tile = plan.tile<kTail>(job, block);
    const int row = tile.row + warpgroup * 64;
    const bool there = plan.has(job) && row < plan.rows && tile.column < plan.out;
    if (there) {
      int before = 0;  // the stage whose products may still be under way
      const auto step = [&](bool first) {
        stages.wait_until_filled();
        sums.multiply(stages, first);
        warpgroup_wait<1>();
        if (!first) stages.leave(before);
        before = stages.at();
        stages.advance();
      };
#pragma unroll
      for (int i = 0; i < kSlices; ++i) {
        step(i == 0);
        sums.finish_slice(i);
      }
      for (int i = kSlices; i < plan.steps; ++i) step(false);
      warpgroup_wait<0>();
      stages.leave(before);
    } else {
#pragma unroll
      for (int i = 0; i < kSlices; ++i) sums.finish_slice(i);
      if (!plan.has(job)) break;
      for (int i = 0; i < plan.steps; ++i) {  // the other rows of the tile are multiplied
        stages.wait_until_filled();
        meet_warpgroup(warpgroup);
        stages.leave(stages.at());
        stages.advance();
      }
    }
    sums.round(biases + round % 2 * kTileColumns, row + warp * 16, tile.column, there);
  }
  wait_for_stored_boxes();
}

template <class T, HalfTail kTail>
__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(kThreads, 1)
    half_product(ProductPlan plan, const __grid_constant__ ProductMaps maps) {
  extern __shared__ __align__(1024) std::byte memory[];
  const auto shared = static_cast<uint32_t>(__cvta_generic_to_shared(memory));
  auto* biases = reinterpret_cast<float*>(memory + kBiases);
  let_next_start();
  const Stages stages(shared);
  if (threadIdx.x == 0) stages.make_barriers();
  for (auto i = static_cast<int>(threadIdx.x); i < 2 * kTileColumns; i += kThreads) biases[i] = 0;
  show_to_products();  // and to copies
  meet_cluster();
  wait_for_earlier();
  const auto block = static_cast<int>(blockIdx.x % 2);
  // 232 registers for each of two threads of three, 40 for the others.
  const int warpgroup = static_cast<int>(threadIdx.x / 128);
  if (warpgroup == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (threadIdx.x == 0) copy_factors<kTail>(stages, shared + kBiases, plan, maps, block);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    make_tiles<T, kTail>(stages, biases, shared + kBoxes, plan, maps, block, warpgroup - 1);
  }
  __syncwarp();    // of the copying thread with the warp's others
  meet_cluster();  // the other block may still copy to this one's memory
}

template <class T, HalfTail kTail>
void launch(const HalfProduct& product, Stream& stream) {
  const auto kernel = half_product<T, kTail>;
  const int64_t rows = product.y.shape()[0];
  const auto in = static_cast<int>(product.w.shape()[1]);
  const auto out = static_cast<int>(product.w.shape()[0]);
  const auto down = static_cast<int>(ceil_div(rows, kTileRows));
  const ProductPlan plan{product.bias,
                         product.up_bias,
                         static_cast<int>(rows),
                         out,
                         static_cast<int>(ceil_div(in, kDepth)),
                         down / 2,
                         static_cast<int>(ceil_div(out, made_columns(kTail))),
                         down % 2 == 1,
                         out > rows};
  const auto map = [](const void* data, int64_t of_rows, int columns, int box_rows) {
    constexpr auto kType = std::is_same_v<T, __half> ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                                     : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
    return map_heads({data, kType, columns, of_rows, 1, columns}, kDepth, box_rows);
  };
  const CUtensorMap w = map(product.w.data(), out, in, kHalfTile);
  const ProductMaps maps{map(product.x, rows, in, kTileRows), w,
                         kTail == HalfTail::kGated ? map(product.up.data(), out, in, kHalfTile) : w,
                         map(product.y.data(), rows, out, Box::kRows)};
  const int64_t pairs = std::min<int64_t>(plan.jobs(), stream.queue().multiprocessors() / 2);
  launch_early("linear", kernel, dim3(static_cast<unsigned>(2 * pairs)), kThreads, kSharedBytes,
               stream, plan, maps);
}

}  // namespace

bool fits_warpgroups(const HalfProduct& product) {
  const int64_t out = product.w.shape()[0];
  const int64_t in = product.w.shape()[1];
  // Without a pass that it saves, cuBLASLt is faster where few tiles stand side by side: rows of
  // 13 x 1025 times 1024 x 4096 took it 140 us, and these warpgroups 170.
  if (product.tail == HalfTail::kNone && out < 2048) return false;
  const auto in_sixteens = [](const void* data) { return is_aligned(data, 16); };
  // A tile has at least as many stages as the one before it has slices to finish.
  return product.w.dtype() != DType::kF32 && in > (kMostSlices - 1) * kDepth && in % 8 == 0 &&
         out % 8 == 0 && in_sixteens(product.x) && in_sixteens(product.w.data()) &&
         in_sixteens(product.y.data()) && in_sixteens(product.bias) &&
         in_sixteens(product.up.data()) && in_sixteens(product.up_bias) && has_warpgroups("linear");
}

void multiply_by_warpgroups(const HalfProduct& product, Stream& stream) {
  if (product.y.empty()) return;
  const auto start = [&]<class T>(T*) {
    switch (product.tail) {
      case HalfTail::kNone:
        return launch<T, HalfTail::kNone>(product, stream);
      case HalfTail::kGelu:
        return launch<T, HalfTail::kGelu>(product, stream);
      case HalfTail::kGated:
        return launch<T, HalfTail::kGated>(product, stream);
    }
  };
  if (product.w.dtype() == DType::kF16) return start(static_cast<__half*>(nullptr));
  start(static_cast<__nv_bfloat16*>(nullptr));
}

}  // namespace kvlm::cuda
