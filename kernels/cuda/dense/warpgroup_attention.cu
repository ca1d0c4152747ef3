#include <type_traits>

#include "kernels/cuda/dense/prompt_tiles.cuh"
#include "kernels/cuda/dense/warp_attention.cuh"
#include "kernels/cuda/dense/warpgroup_attention.h"
#include "kernels/cuda/device/box_copies.cuh"
#include "kernels/cuda/device/has_warpgroups.h"
#include "kernels/cuda/device/tensor_map.h"
#include "kernels/cuda/device/warpgroup.cuh"

// Attention inside segments as warpgroups multiply: 64 queries of a head each, in registers,
// against keys and values that the warpgroups of a block share. While one of them turns scores into
// weights, the others multiply: they wait for no other than tiles that are not there yet.
namespace kvlm::cuda {

namespace {

template <int kDim_, int kKeys_, int kWarpgroups_>
struct Tiling {
  static constexpr int kDim = kDim_;
  static constexpr int kKeys = kKeys_;
  static constexpr int kWarpgroups = kWarpgroups_;
  static constexpr int kThreads = 128 * kWarpgroups;
  static constexpr int kQueries = 64 * kWarpgroups;
  using Rows = WarpgroupTile<kKeys, kDim>;
  // One warpgroup a block evens out better between blocks than within them, where registers allow.
  static constexpr bool kFour = kWarpgroups == 1 && kDim <= 64;
  static constexpr int kBlocks = kFour ? 4 : kWarpgroups == 1 ? 3 : 2;  // of a multiprocessor
  static constexpr int kStages = kFour ? 2 : 3;  // one is multiplied, the others are on their way
  static constexpr uint32_t kStageBytes = 2 * Rows::kBytes;  // keys, then values
  static constexpr size_t kSharedBytes = kStages * kStageBytes + Rows::kAlignment;
};

/// What a warpgroup keeps of its 64 queries from tile to tile; of the 16 of a warp, a lane has the
/// rows lane / 4 (half 0) and lane / 4 + 8 (half 1).
template <class Tiles, class T>
class WarpgroupState {
 public:
  static constexpr int kScores = Tiles::kKeys / 2;
  static constexpr int kOuts = Tiles::kDim / 2;
  using Rows = typename Tiles::Rows;

  /// Takes rows [0, rows) of the warp's 16 queries, zeros beyond them and beyond `length` channels.
  __device__ WarpgroupState(const T* queries, int64_t stride, int rows, int length, float scale)
      : scale_(scale), slack_(kSlack / scale) {
    const int warp_lane = static_cast<int>(threadIdx.x % 32);
#pragma unroll
    for (int step = 0; step < Tiles::kDim / 16; ++step) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = warp_lane / 4 + i % 2 * 8;
        const int channel = step * 16 + i / 2 * 8 + warp_lane % 4 * 2;
        queries_[step][i] =
            row < rows && channel < length
                ? *reinterpret_cast<const uint32_t*>(queries + row * stride + channel)
                : 0;
      }
    }
#pragma unroll
    for (float& x : out_) x = 0;
  }

  /// Queues scores_ = queries . keys.
  __device__ void score(uint32_t keys) {
    warpgroup_arrive();
    const uint64_t all = Rows::by_rows(keys, 0);
#pragma unroll
    for (int step = 0; step < Tiles::kDim / 16; ++step) {
      WarpgroupProduct<T, Tiles::kKeys, false>::add(
          scores_, queries_[step], described_further(all, Rows::channel_bytes(step * 16)),
          step == 0);
    }
    warpgroup_commit();
  }

  /// Hides columns from `there` on.
  __device__ void mask(int there) {
    const int seen = there - static_cast<int>(threadIdx.x % 4) * 2;
#pragma unroll
    for (int i = 0; i < kScores; ++i) {
      if (i / 4 * 8 + i % 2 >= seen) scores_[i] = -INFINITY;
    }
  }

  /// Turns scores into weights, relative to maxima that are raised where they are exceeded by more
  /// than kSlack. What a row does depends on its own scores only.
  __device__ void weigh() {
    float found[2][2];  // two of a half, so that neither waits for the other
#pragma unroll
    for (int i = 0; i < kScores; ++i) {
      float& largest = found[i / 2 % 2][i % 2];
      largest = i < 4 ? scores_[i] : fmaxf(largest, scores_[i]);
    }
    const float largest[2] = {fmaxf(found[0][0], found[0][1]), fmaxf(found[1][0], found[1][1])};
    const bool exceeds = largest[0] > maxima_[0] + slack_ || largest[1] > maxima_[1] + slack_;
    if (__any_sync(0xffffffffu, exceeds)) raise(largest);
    const float base[2] = {-maxima_[0] * scale_, -maxima_[1] * scale_};
#pragma unroll
    for (int i = 0; i < kScores; i += 2) {
      float weights[2];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        weights[j] = exp2_of(fmaf(scores_[i + j], scale_, base[i / 2 % 2]));
        sums_[i / 2 % 2][j] += weights[j];
      }
      weights_[i / 8][i / 2 % 4] = Multiplier<T>::pair(weights[0], weights[1]);
    }
  }

  /// Queues out_ += weights . values.
  __device__ void add_values(uint32_t values) {
    warpgroup_arrive();
    const uint64_t all = Rows::by_channels(values, 0);
#pragma unroll
    for (int step = 0; step < Tiles::kKeys / 16; ++step) {
      WarpgroupProduct<T, Tiles::kDim, true>::add(
          out_, weights_[step], described_further(all, step * 16 * Rows::kRowBytes), false);
    }
    warpgroup_commit();
  }

  /// Divides by the sums and writes rows [0, rows) of the warp; `out` is channel 0 of the first.
  template <class Out>
  __device__ void finish(Out* out, int64_t row_stride, int rows, int head_dim, bool pairs) {
    const int warp_lane = static_cast<int>(threadIdx.x % 32);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float inverse = 1 / quad_sum(sums_[half][0] + sums_[half][1]);
      const int row = half * 8 + warp_lane / 4;
      if (row >= rows) continue;
#pragma unroll
      for (int j = 0; j < Tiles::kDim / 8; ++j) {
        store_channels(out + row * row_stride, j * 8 + warp_lane % 4 * 2, head_dim, pairs,
                       out_[j * 4 + half * 2] * inverse, out_[j * 4 + half * 2 + 1] * inverse);
      }
    }
  }

 private:
  __device__ void raise(const float (&found)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float largest = quad_max(found[half]);
      if (largest <= maxima_[half] + slack_) continue;
      const float shrink = exp2_of((maxima_[half] - largest) * scale_);
      maxima_[half] = largest;
      sums_[half][0] *= shrink;
      sums_[half][1] *= shrink;
#pragma unroll
      for (int j = 0; j < kOuts / 4; ++j) {
        out_[j * 4 + half * 2] *= shrink;
        out_[j * 4 + half * 2 + 1] *= shrink;
      }
    }
  }

  float scale_;
  float slack_;  // kSlack of scores
  float maxima_[2] = {-INFINITY, -INFINITY};
  float sums_[2][2] = {};  // of this lane's even and odd columns
  uint32_t queries_[Tiles::kDim / 16][4];
  uint32_t weights_[Tiles::kKeys / 16][4];
  float scores_[kScores];
  float out_[kOuts];
};

struct KeyAndValueMaps {
  CUtensorMap keys, values;
};

/// Keys and values of a head, a tile after another, in stages of shared memory that are filled anew
/// when every warpgroup is done with them.
template <class Tiles>
class TileRing {
 public:
  using Rows = typename Tiles::Rows;
  static constexpr int kBarriers = 2 * Tiles::kStages;

  /// Rows from `first_row` on in `tiles` tiles, for `users` warpgroups. Every thread calls it.
  __device__ TileRing(uint32_t stages, uint64_t* barriers, const KeyAndValueMaps& maps,
                      int first_row, int head, int tiles, int users)
      : stages_(stages),
        barriers_(static_cast<uint32_t>(__cvta_generic_to_shared(barriers))),
        maps_(maps),
        first_row_(first_row),
        head_(head),
        tiles_(tiles) {
    if (threadIdx.x == 0) {
      for (int i = 0; i < Tiles::kStages; ++i) {
        filled(i).make(1);
        left(i).make(users);
      }
      show_barriers();
    }
    __syncthreads();
  }

  /// Queues the tiles that there is room for; once wait_for_earlier() has returned.
  __device__ void start() const {
    for (int i = 0; i < Tiles::kStages - 1; ++i) fill(i);
  }
  /// Waits for tile i, all before it being left by this warpgroup. Its address.
  __device__ uint32_t take(int i) const {
    filled(i).wait(i / Tiles::kStages);
    fill(i + Tiles::kStages - 1);
    return stage(i);
  }
  /// This warpgroup is done with tile i.
  __device__ void leave(int i) const {
    if (threadIdx.x % 128 == 0) left(i).arrive();
  }

 private:
  __device__ PhaseBarrier filled(int i) const {
    return PhaseBarrier(barriers_ + 8 * static_cast<uint32_t>(i % Tiles::kStages));
  }
  __device__ PhaseBarrier left(int i) const {
    return PhaseBarrier(barriers_ + 8 * static_cast<uint32_t>(Tiles::kStages + i % Tiles::kStages));
  }
  __device__ uint32_t stage(int i) const {
    return stages_ + static_cast<uint32_t>(i % Tiles::kStages) * Tiles::kStageBytes;
  }
  /// By the first thread: queues tile i, if there is one.
  __device__ void fill(int i) const {
    if (threadIdx.x != 0 || i >= tiles_) return;
    if (i >= Tiles::kStages) left(i).wait(i / Tiles::kStages - 1);
    filled(i).arrive_and_expect(Tiles::kStageBytes);
    const int row = first_row_ + i * Tiles::kKeys;
#pragma unroll
    for (int channel = 0; channel < Tiles::kDim; channel += Rows::kPanel) {
      const uint32_t to = stage(i) + channel / Rows::kPanel * Rows::kPanelBytes;
      filled(i).copy_box(to, maps_.keys, channel, row, head_);
      filled(i).copy_box(to + Rows::kBytes, maps_.values, channel, row, head_);
    }
  }

  uint32_t stages_;
  uint32_t barriers_;
  const KeyAndValueMaps& maps_;
  int first_row_;
  int head_;
  int tiles_;
};

/// Waits for the first `groups` warpgroups of the block.
__device__ inline void meet(int groups) {
  asm volatile("bar.sync 1, %0;" ::"r"(128 * groups) : "memory");
}

/// Zeros rows from `first` on of a tile of values, by `groups` warpgroups: their weights are 0, but
/// what they hold is of the next segment, and may be infinite.
template <class Rows>
__device__ void clear_rows(uint32_t tile, int first, int groups) {
  constexpr int kChunks = Rows::kChannels / 8;
  const int chunks = (Rows::kRows - first) * kChunks;
  for (int i = static_cast<int>(threadIdx.x); i < chunks; i += 128 * groups) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(
                     tile + Rows::chunk(first + i / kChunks, i % kChunks * 8)),
                 "r"(0)
                 : "memory");
  }
  show_to_products();
  meet(groups);
}

/// The queries of one tile and head against all keys of their segment, a block.
template <class Tiles, class T, class Out>
__global__ void __launch_bounds__(Tiles::kThreads, Tiles::kBlocks)
    attend_segments(SegmentLaunch<T, Out> l, const __grid_constant__ KeyAndValueMaps maps) {
  using Rows = typename Tiles::Rows;
  extern __shared__ uint4 shared[];
  __shared__ uint64_t barriers[TileRing<Tiles>::kBarriers];
  const uint32_t stages =
      (static_cast<uint32_t>(__cvta_generic_to_shared(shared)) + Rows::kAlignment - 1) /
      Rows::kAlignment * Rows::kAlignment;

  let_next_start();
  const Segments::Tile tile = l.tiles[blockIdx.y];
  const int head = static_cast<int>(blockIdx.x);
  const int full = tile.rows / Tiles::kKeys;
  const int rest = tile.rows % Tiles::kKeys;
  const int groups = min(Tiles::kWarpgroups, (tile.rows - tile.queries + 63) / 64);
  const TileRing<Tiles> ring(stages, barriers, maps, tile.first, head / l.q_per_kv,
                             full + (rest != 0), groups);
  wait_for_earlier();
  const int warp = static_cast<int>(threadIdx.x / 32);
  if (warp / 4 >= groups) return;  // nothing for this warpgroup
  ring.start();
  const int first_row = tile.queries + warp * 16;
  const T* q = l.q.data + tile.first * l.q.stride + head * l.length;
  WarpgroupState<Tiles, T> state(q + first_row * l.q.stride, l.q.stride, tile.rows - first_row,
                                 l.length, l.scale);
  const auto attend = [&](int i, auto masked) {
    const uint32_t keys = ring.take(i);
    if constexpr (masked()) clear_rows<Rows>(keys + Rows::kBytes, rest, groups);
    state.score(keys);
    warpgroup_wait();
    if constexpr (masked()) state.mask(rest);
    state.weigh();
    state.add_values(keys + Rows::kBytes);
    warpgroup_wait();
    ring.leave(i);
  };
  for (int i = 0; i < full; ++i) attend(i, std::false_type());
  if (rest != 0) attend(full, std::true_type());
  const int64_t row_stride = static_cast<int64_t>(l.q_heads) * l.head_dim;
  state.finish(
      l.out + (tile.first + first_row) * row_stride + static_cast<int64_t>(head) * l.head_dim,
      row_stride, tile.rows - first_row, l.head_dim, l.pairs);
}

template <class Tiles, class T, class Out>
void launch_tiles(SegmentLaunch<T, Out> l, const Segments& segments, Stream& stream) {
  const auto kernel = attend_segments<Tiles, T, Out>;
  l.tiles = segments.tiles(Tiles::kQueries);
  const auto map = [&](const HeadRows<T>& rows) {
    constexpr auto kType = std::is_same_v<T, __half> ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                                     : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
    return map_heads(
        {rows.data, kType, l.length, segments.rows(), l.q_heads / l.q_per_kv, rows.stride},
        Tiles::Rows::kPanel, Tiles::kKeys);
  };
  const dim3 grid(static_cast<unsigned>(l.q_heads),
                  static_cast<unsigned>(segments.tile_count(Tiles::kQueries)));
  launch_early("segment_attention", kernel, grid, Tiles::kThreads, Tiles::kSharedBytes, stream, l,
               KeyAndValueMaps{map(l.k), map(l.v)});
}

/// The number of warpgroups changes no result, that of keys does: it depends on the head alone.
template <int kDim, int kKeys, class T, class Out>
void launch_dim(const SegmentLaunch<T, Out>& l, const Segments& segments, Stream& stream) {
  if constexpr (!Tiling<kDim, kKeys, 1>::kFour) {
    // Two share what is read of keys and values, where most tiles have queries for both.
    const bool filled = 3 * segments.tile_count(128) <= 2 * segments.tile_count(64);
    const bool enough =
        segments.tile_count(128) * l.q_heads >= int64_t{2} * stream.queue().multiprocessors();
    if (filled && enough) return launch_tiles<Tiling<kDim, kKeys, 2>>(l, segments, stream);
  }
  launch_tiles<Tiling<kDim, kKeys, 1>>(l, segments, stream);
}

}  // namespace

template <class T, class Out>
bool attend_by_warpgroups(const SegmentLaunch<T, Out>& l, const Segments& segments,
                          Stream& stream) {
  if (l.length <= 32 || l.length > 80 || !has_warpgroups("segment_attention")) return false;
  if (l.length <= 64) {
    launch_dim<64, 80>(l, segments, stream);
  } else {
    launch_dim<80, 64>(l, segments, stream);
  }
  return true;
}

template bool attend_by_warpgroups(const SegmentLaunch<__half, __half>&, const Segments&, Stream&);
template bool attend_by_warpgroups(const SegmentLaunch<__half, float>&, const Segments&, Stream&);
template bool attend_by_warpgroups(const SegmentLaunch<__nv_bfloat16, __nv_bfloat16>&,
                                   const Segments&, Stream&);
template bool attend_by_warpgroups(const SegmentLaunch<__nv_bfloat16, float>&, const Segments&,
                                   Stream&);

}  // namespace kvlm::cuda
