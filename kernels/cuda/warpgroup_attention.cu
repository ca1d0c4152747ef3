#include <type_traits>

#include "kernels/cuda/prompt_tiles.cuh"
#include "kernels/cuda/warp_attention.cuh"
#include "kernels/cuda/warpgroup.cuh"
#include "kernels/cuda/warpgroup_attention.h"

// Attention inside segments as warpgroups multiply: 64 queries of a head each, in registers,
// against keys and values that the warpgroups of a block share. While one of them turns scores into
// weights, the others multiply.
namespace kvlm::cuda {

namespace {

template <int kDim_, int kKeys_, int kWarpgroups_>
struct Tiling {
  static constexpr int kDim = kDim_;
  static constexpr int kKeys = kKeys_;
  static constexpr int kWarpgroups = kWarpgroups_;
  static constexpr int kThreads = 128 * kWarpgroups;
  static constexpr int kQueries = 64 * kWarpgroups;
  static constexpr int kBlocks = kWarpgroups == 1 ? 3 : 2;  // of a multiprocessor
  using Rows = WarpgroupTile<kKeys, kDim>;
  static constexpr int kStages = 3;  // one is multiplied, two are on their way
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
    const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
    for (int step = 0; step < Tiles::kDim / 16; ++step) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = lane / 4 + i % 2 * 8;
        const int channel = step * 16 + i / 2 * 8 + lane % 4 * 2;
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
#pragma unroll
    for (int step = 0; step < Tiles::kDim / 16; ++step) {
      WarpgroupProduct<T, Tiles::kKeys, false>::add(scores_, queries_[step],
                                                    Rows::by_rows(keys, step * 16), step == 0);
    }
    warpgroup_commit();
  }

  /// Hides columns from `there` on.
  __device__ void mask(int there) {
    const int seen = there - static_cast<int>(threadIdx.x) % 4 * 2;
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
#pragma unroll
    for (int step = 0; step < Tiles::kKeys / 16; ++step) {
      WarpgroupProduct<T, Tiles::kDim, true>::add(out_, weights_[step],
                                                  Rows::by_channels(values, step * 16), false);
    }
    warpgroup_commit();
  }

  /// Divides by the sums and writes rows [0, rows) of the warp; `out` is channel 0 of the first.
  template <class Out>
  __device__ void finish(Out* out, int64_t row_stride, int rows, int head_dim, bool pairs) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float inverse = 1 / quad_sum(sums_[half][0] + sums_[half][1]);
      const int row = half * 8 + lane / 4;
      if (row >= rows) continue;
#pragma unroll
      for (int j = 0; j < Tiles::kDim / 8; ++j) {
        const int channel = j * 8 + lane % 4 * 2;
        const float x = out_[j * 4 + half * 2] * inverse;
        const float y = out_[j * 4 + half * 2 + 1] * inverse;
        Out* to = out + row * row_stride + channel;
        if (pairs && channel < head_dim) {
          store_pair(to, x, y);
        } else {
          if (channel < head_dim) to[0] = store_float<Out>(x);
          if (channel + 1 < head_dim) to[1] = store_float<Out>(y);
        }
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

/// Brings the keys and values of a head to shared memory, a tile after another.
template <class Tiles, class T>
class TileCopier {
 public:
  using Rows = typename Tiles::Rows;

  __device__ TileCopier(const T* keys, const T* values, int64_t stride, int rows, int length)
      : keys_(keys + thread_row() * stride + thread_channel()),
        values_(values + thread_row() * stride + thread_channel()),
        step_(kStep * stride),
        rows_left_(rows - thread_row()),
        rest_(Tiles::kKeys * stride),
        there_(thread_channel() < length) {}

  /// Queues the next tile, zeros beyond the rows of the segment and beyond `length` channels; after
  /// the last one nothing, which is a group of copies too.
  __device__ void next(uint32_t to) {
    if (rows_left_ > -thread_row()) {
#pragma unroll
      for (int row = 0; row < Tiles::kKeys; row += kStep) {
        const bool mine = thread_row() < min(kStep, Tiles::kKeys - row);
        if (kStep * kChunks < Tiles::kThreads || row + kStep > Tiles::kKeys) {
          if (!mine) break;
        }
        const bool there = there_ && row < rows_left_;
        const int64_t from = there ? row / kStep * step_ : 0;
        const uint32_t at = to + Rows::chunk(thread_row() + row, thread_channel());
        copy_or_clear(at, keys_ + from, there);
        copy_or_clear(at + Rows::kBytes, values_ + from, there);
      }
      keys_ += rest_;
      values_ += rest_;
      rows_left_ -= Tiles::kKeys;
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
  }

 private:
  static constexpr int kChunks = Tiles::kDim / 8;          // of a row
  static constexpr int kStep = Tiles::kThreads / kChunks;  // rows that the block copies at once

  static __device__ int thread_row() { return static_cast<int>(threadIdx.x) / kChunks; }
  static __device__ int thread_channel() { return static_cast<int>(threadIdx.x) % kChunks * 8; }

  const T* keys_;
  const T* values_;
  int64_t step_;
  int rows_left_;  // from this thread's first row on
  int64_t rest_;
  bool there_;
};

/// The queries of one tile and head against all keys of their segment, a block.
template <class Tiles, class T, class Out>
__global__ void __launch_bounds__(Tiles::kThreads, Tiles::kBlocks)
    attend_segments(SegmentLaunch<T, Out> l) {
  using Rows = typename Tiles::Rows;
  extern __shared__ uint4 shared[];
  const uint32_t stages =
      (static_cast<uint32_t>(__cvta_generic_to_shared(shared)) + Rows::kAlignment - 1) /
      Rows::kAlignment * Rows::kAlignment;

  let_next_start();
  const Segments::Tile tile = l.tiles[blockIdx.y];
  wait_for_earlier();
  const int head = static_cast<int>(blockIdx.x);
  const int kv_head = head / l.q_per_kv;
  const T* k = l.k.data + tile.first * l.k.stride + kv_head * l.length;
  const T* v = l.v.data + tile.first * l.v.stride + kv_head * l.length;
  const auto stage_of = [&](int i) {
    return stages + static_cast<uint32_t>(i % Tiles::kStages) * Tiles::kStageBytes;
  };
  TileCopier<Tiles, T> copier(k, v, l.k.stride, tile.rows, l.length);
  copier.next(stage_of(0));
  copier.next(stage_of(1));

  // Tile i is there; the stage of i + 2 is that of i - 1, which every warpgroup is done with.
  const auto next_tile = [&](int i) {
    asm volatile("cp.async.wait_group 1;" ::: "memory");
    show_to_products();
    __syncthreads();
    copier.next(stage_of(i + 2));
  };
  const int full = tile.rows / Tiles::kKeys;
  const int rest = tile.rows % Tiles::kKeys;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  if (tile.queries + warp / 4 * 64 >= tile.rows) {  // nothing for this warpgroup
    for (int i = 0; i < full + (rest != 0); ++i) next_tile(i);
    return;
  }
  const int first_row = tile.queries + warp * 16;
  const T* q = l.q.data + tile.first * l.q.stride + head * l.length;
  WarpgroupState<Tiles, T> state(q + first_row * l.q.stride, l.q.stride, tile.rows - first_row,
                                 l.length, l.scale);
  const auto attend = [&](int i, auto masked) {
    next_tile(i);
    state.score(stage_of(i));
    warpgroup_wait();
    if constexpr (masked()) state.mask(rest);
    state.weigh();
    state.add_values(stage_of(i) + Rows::kBytes);
    warpgroup_wait();
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
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             static_cast<int>(Tiles::kSharedBytes)),
        "segment_attention");
  l.tiles = segments.tiles(Tiles::kQueries);
  const dim3 grid(static_cast<unsigned>(l.q_heads),
                  static_cast<unsigned>(segments.tile_count(Tiles::kQueries)));
  launch_early("segment_attention", kernel, grid, Tiles::kThreads, Tiles::kSharedBytes, stream, l);
}

/// The number of warpgroups changes no result, that of keys does: it depends on the head alone.
template <int kDim, int kKeys, class T, class Out>
void launch_dim(const SegmentLaunch<T, Out>& l, const Segments& segments, Stream& stream) {
  // Two share what is read of keys and values, where most tiles have queries for both.
  const bool filled = 3 * segments.tile_count(128) <= 2 * segments.tile_count(64);
  const bool enough =
      segments.tile_count(128) * l.q_heads >= int64_t{2} * stream.queue().multiprocessors();
  if (filled && enough) return launch_tiles<Tiling<kDim, kKeys, 2>>(l, segments, stream);
  launch_tiles<Tiling<kDim, kKeys, 1>>(l, segments, stream);
}

bool has_warpgroups() {
  int device = 0;
  int major = 0;
  check(cudaGetDevice(&device), "segment_attention");
  check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device),
        "segment_attention");
  return major == 9;
}

}  // namespace

template <class T, class Out>
bool attend_by_warpgroups(const SegmentLaunch<T, Out>& l, const Segments& segments,
                          Stream& stream) {
  if (l.length <= 32 || l.length > 80 || !has_warpgroups()) return false;
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
