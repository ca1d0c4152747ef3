#pragma once

#include "kernels/cuda/dense/prompt_tiles.cuh"

// The softmax of attention on the tensor cores, from tile to tile of keys and values.
namespace kvlm::cuda {

/// The largest maximum that may be missed before sums are rescaled, in powers of two: a weight is
/// then at most 2^8, far from the largest half, and after the first tiles rescaling is rare.
constexpr float kSlack = 8.0f;

/// How a block divides its work: kWarps warps of kRowTiles * 16 queries each, against kKeys keys at
/// a time. Rows of shared memory are 16 bytes longer than kDim, so that eight of them start in
/// different banks.
template <int kDim_, int kRowTiles_>
struct WarpTiling {
  static constexpr int kDim = kDim_;
  static constexpr int kRowTiles = kRowTiles_;
  static constexpr int kWarps = 4;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kQueries = kWarps * kRowTiles * 16;
  static constexpr int kKeys = columns_at_a_time(kDim);
  static constexpr int kStride = kDim + 8;
  static constexpr int kChunks = kDim / 8;  // of a row
  static constexpr int kTileElements = kKeys * kStride;
  /// Queries, then two stages of keys and values.
  static constexpr size_t kSharedBytes =
      2 * (static_cast<size_t>(kQueries) * kStride + 4 * static_cast<size_t>(kTileElements));
  /// Blocks that a multiprocessor shall hold.
  static constexpr int kBlocks = kDim * kRowTiles <= 64 ? 3 : 2;
};

/// Whether a block may have so many bytes of shared memory on the current GPU.
inline bool fits_shared(std::string_view op, size_t bytes) {
  const int most = device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, op);
  return bytes <= static_cast<size_t>(most);
}

__device__ inline void store_pair(float* to, float x, float y) {
  *reinterpret_cast<float2*>(to) = {x, y};
}
template <class T>
__device__ void store_pair(T* to, float x, float y) {
  *reinterpret_cast<uint32_t*>(to) = Multiplier<T>::pair(x, y);
}

/// Writes two channels of a row of head_dim, from `channel` on; with `pairs` at a time.
template <class Out>
__device__ void store_channels(Out* row, int channel, int head_dim, bool pairs, float x, float y) {
  if (pairs && channel < head_dim) {
    store_pair(row + channel, x, y);
  } else {
    if (channel < head_dim) row[channel] = store_float<Out>(x);
    if (channel + 1 < head_dim) row[channel + 1] = store_float<Out>(y);
  }
}

/// What a warp keeps of its queries from tile to tile. Of the 16 rows of row tile r, lane l holds
/// rows l / 4 (half 0) and l / 4 + 8 (half 1), and of 8 columns or channels 2 * (l % 4) and the
/// next.
template <class Tiles, class T>
class WarpState {
 public:
  static constexpr int kRowTiles = Tiles::kRowTiles;
  static constexpr int kScoreTiles = Tiles::kKeys / 8;
  static constexpr int kOutTiles = Tiles::kDim / 8;
  static constexpr int kProducts = Tiles::kKeys / 16 * (Tiles::kDim / 16);

  /// Scores are multiplied with `scale`, in powers of two, on their way to weights.
  explicit __device__ WarpState(float scale) : scale_(scale), slack_(kSlack / scale) {
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        maxima_[r][half] = -INFINITY;
        sums_[r][half] = 0;
      }
#pragma unroll
      for (int j = 0; j < kOutTiles; ++j) {
#pragma unroll
        for (float& x : out_[r][j]) x = 0;
      }
    }
  }

  /// scores_ = queries . keys; addresses are this lane's rows of ldmatrix. Of the keys, those from
  /// `there` on, rounded up to 16, are left at zero.
  __device__ void score(uint32_t queries, uint32_t keys, int there = Tiles::kKeys) {
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) {
#pragma unroll
      for (int j = 0; j < kScoreTiles; ++j) {
#pragma unroll
        for (float& x : scores_[r][j]) x = 0;
      }
    }
#pragma unroll
    for (int channel = 0; channel < Tiles::kDim; channel += 16) {
      uint32_t a[kRowTiles][4];
#pragma unroll
      for (int r = 0; r < kRowTiles; ++r) {
        load_matrices(a[r], queries + 2 * (r * 16 * Tiles::kStride + channel));
      }
#pragma unroll
      for (int j = 0; j < kScoreTiles; j += 2) {
        if (j * 8 >= there) continue;
        uint32_t b[4];
        load_matrices(b, keys + 2 * (j * 8 * Tiles::kStride + channel));
#pragma unroll
        for (int r = 0; r < kRowTiles; ++r) {
          Multiplier<T>::mma(scores_[r][j], a[r], b[0], b[1]);
          Multiplier<T>::mma(scores_[r][j + 1], a[r], b[2], b[3]);
        }
      }
    }
  }

  /// Hides what lies beyond column `last`, plus 1 for every further query if `causal`. `first` is
  /// the tile's first column and `last` is the last one that row 0 of the warp sees.
  __device__ void mask(int first, int last, int columns, bool causal) {
    const int warp_lane = static_cast<int>(threadIdx.x % 32);
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = r * 16 + half * 8 + warp_lane / 4;
        const int seen =
            min(columns, causal ? last + row + 1 : columns) - first - warp_lane % 4 * 2;
#pragma unroll
        for (int j = 0; j < kScoreTiles; ++j) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            if (j * 8 + i >= seen) scores_[r][j][half * 2 + i] = -INFINITY;
          }
        }
      }
    }
  }

  /// Raises the maxima of rows that exceed theirs by more than kSlack, and rescales those rows.
  /// What a row does depends on its own scores only.
  __device__ void raise_maxima() {
    float found[kRowTiles][2];
    bool exceeds = false;
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float largest = fmaxf(scores_[r][0][half * 2], scores_[r][0][half * 2 + 1]);
#pragma unroll
        for (int j = 1; j < kScoreTiles; ++j) {
          largest = fmaxf(largest, fmaxf(scores_[r][j][half * 2], scores_[r][j][half * 2 + 1]));
        }
        found[r][half] = largest;
        exceeds = exceeds || largest > maxima_[r][half] + slack_;
      }
    }
    if (!__any_sync(0xffffffffu, exceeds)) return;
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float largest = quad_max(found[r][half]);
        if (largest > maxima_[r][half] + slack_) {
          const float shrink = exp2_of((maxima_[r][half] - largest) * scale_);
          maxima_[r][half] = largest;
          sums_[r][half] *= shrink;
#pragma unroll
          for (int j = 0; j < kOutTiles; ++j) {
            out_[r][j][half * 2] *= shrink;
            out_[r][j][half * 2 + 1] *= shrink;
          }
        }
      }
    }
  }

  /// out_ += exp2(scores_ - maxima_) . values, 16 keys at a time: the weights of the next 16 are
  /// computed between the products with these. Calls between(i) after the i-th of kProducts groups
  /// of products. Keys from `there` on, rounded up to 16, are left out.
  template <class Between>
  __device__ void add_values(uint32_t values, const Between& between, int there = Tiles::kKeys) {
    constexpr int kSteps = Tiles::kKeys / 16;
    constexpr int kPairs = kOutTiles / 2;
    static_assert(kSteps * kPairs == kProducts);
#pragma unroll
    for (int part = 0; part < kPairs; ++part) weigh(0, part, kPairs);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      if (step * 16 >= there) continue;
      uint32_t a[kRowTiles][4];
#pragma unroll
      for (int r = 0; r < kRowTiles; ++r) {
        const auto& left = scores_[r][2 * step];
        const auto& right = scores_[r][2 * step + 1];
        a[r][0] = Multiplier<T>::pair(left[0], left[1]);
        a[r][1] = Multiplier<T>::pair(left[2], left[3]);
        a[r][2] = Multiplier<T>::pair(right[0], right[1]);
        a[r][3] = Multiplier<T>::pair(right[2], right[3]);
      }
#pragma unroll
      for (int j = 0; j < kPairs; ++j) {
        uint32_t b[4];
        load_columns(b, values + 2 * (step * 16 * Tiles::kStride + j * 16));
#pragma unroll
        for (int r = 0; r < kRowTiles; ++r) {
          Multiplier<T>::mma(out_[r][2 * j], a[r], b[0], b[1]);
          Multiplier<T>::mma(out_[r][2 * j + 1], a[r], b[2], b[3]);
        }
        if (step + 1 < kSteps) weigh(step + 1, j, kPairs);
        between(step * kPairs + j);
      }
    }
  }

  /// Writes the maximum and 1 / sum of rows [0, rows) of the warp; `to` is that of the first.
  __device__ void write_softmax(float2* to, int rows) const {
    const int warp_lane = static_cast<int>(threadIdx.x % 32);
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float inverse = 1 / quad_sum(sums_[r][half]);
        const int row = r * 16 + half * 8 + warp_lane / 4;
        if (warp_lane % 4 == 0 && row < rows) to[row] = {maxima_[r][half], inverse};
      }
    }
  }

  /// Divides by the sums and writes rows [0, rows) of the warp; `out` is channel 0 of the first.
  /// With `pairs` two channels are written at a time.
  template <class Out>
  __device__ void finish(Out* out, int64_t row_stride, int rows, int head_dim, bool pairs) {
    const int warp_lane = static_cast<int>(threadIdx.x % 32);
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float inverse = 1 / quad_sum(sums_[r][half]);
        const int row = r * 16 + half * 8 + warp_lane / 4;
        if (row >= rows) continue;
#pragma unroll
        for (int j = 0; j < kOutTiles; ++j) {
          store_channels(out + row * row_stride, j * 8 + warp_lane % 4 * 2, head_dim, pairs,
                         out_[r][j][half * 2] * inverse, out_[r][j][half * 2 + 1] * inverse);
        }
      }
    }
  }

 private:
  /// Turns part `part` of `parts` of the scores of 16 keys into weights and adds them to the sums.
  __device__ void weigh(int step, int part, int parts) {
    constexpr int kScores = kRowTiles * 8;  // of a lane
#pragma unroll
    for (int i = 0; i < kScores; ++i) {
      if (i * parts / kScores != part) continue;
      const int r = i / 8;
      const int half = i / 2 % 2;
      float& score = scores_[r][2 * step + i / 4 % 2][i % 4];
      score = exp2_of(fmaf(score, scale_, -maxima_[r][half] * scale_));
      sums_[r][half] += score;
    }
  }

  float scale_;
  float slack_;  // kSlack of scores
  float maxima_[kRowTiles][2];
  float sums_[kRowTiles][2];  // of this lane's columns
  float out_[kRowTiles][kOutTiles][4];
  float scores_[kRowTiles][kScoreTiles][4];
};

}  // namespace kvlm::cuda
