#include <algorithm>

#include "kernels/cuda/device/cluster.cuh"
#include "kernels/cuda/model/activation.cuh"
#include "kernels/cuda/product/code_tiles.cuh"
#include "kernels/cuda/product/few_rows.h"
#include "kernels/cuda/product/quantized.h"

// y = x W^T with the codes of a quantized W (code_tiles.cuh), for up to 64 rows of x a launch.
//
// The tiles along the inputs are dealt out to 8 splits: tile t belongs to split t % 8, whose sums a
// warp adds up in order. Splits are added in pairs, and the pairs in order, so that a row of y has
// the same bits whichever kernel makes it, and whatever rows it comes with. Codes and inputs are
// copied to shared memory some steps ahead.
//
// - few_rows: up to 8 rows. A block makes 32 outputs, of a gate and its matrix those of both; each
//   of its 8 warps has a split, and copies for itself.
// - many_rows: a block makes 128 outputs, a warp 32 of them from one of two splits, with inputs
//   that the block shares. A cluster of four blocks has all splits; on GPUs without clusters one
//   block has them in turn.
namespace kvlm::cuda {

namespace {

constexpr int kSplits = 8;
constexpr int kWarps = 8;
constexpr int kThreads = 32 * kWarps;

/// Matrices of one launch, their outputs one after the other; or a gate and the matrix beside it.
struct CodeProjections {
  CodeMatrix w[kMostProjections];
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

/// Outputs that a warp or a block makes.
struct Place {
  int matrix;
  int index;  // in units of `outputs`
};
/// Which matrix the block of this number has, of blocks of `outputs`.
__device__ Place place_of(const CodeProjections& projections, int block, int outputs) {
  int matrix = 0;
  for (; matrix + 1 < kMostProjections; ++matrix) {
    const int blocks = (projections.out[matrix] + outputs - 1) / outputs;
    if (block < blocks) break;
    block -= blocks;
  }
  return {matrix, block};
}

/// Stores a sum of x and output `column` of a matrix.
__device__ void store_sum(const CodeProjections& projections, const CodeResult& result, int matrix,
                          int row, int column, float sum) {
  if (row >= result.rows || column >= projections.out[matrix]) return;
  const float* bias = projections.bias[matrix];
  float* y = projections.y[matrix] + static_cast<int64_t>(row) * projections.out[matrix] + column;
  const float value = bias != nullptr ? sum + bias[column] : sum;
  *y = result.add ? *y + value : value;
}

/// Stores activation(gate) * up.
template <class T>
__device__ void store_gated(const CodeProjections& projections, const CodeResult& result, int row,
                            int column, float gate, float up) {
  if (row >= result.rows || column >= projections.out[0]) return;
  if (projections.bias[0] != nullptr) gate += projections.bias[0][column];
  if (projections.bias[1] != nullptr) up += projections.bias[1][column];
  const float value = activated(result.activation, gate) * up;
  const int64_t at = static_cast<int64_t>(row) * projections.out[0] + column;
  if (result.gated_dtype == DType::kF32) {
    reinterpret_cast<float*>(result.gated)[at] = value;
  } else {
    reinterpret_cast<T*>(result.gated)[at] = store_float<T>(value);
  }
}

/// A lane's sums of 8 rows and 16 outputs, as the tensor cores leave them (TileSums).
struct FourSums {
  int row;     // rows `row` and `row` + 1
  int output;  // outputs `output` and `output` + 8

  __device__ FourSums(int row_tile, int half, int lane)
      : row(row_tile * kTileRows + lane % 4 * 2), output(half * 16 + lane / 4) {}
  /// Calls store(row, output, i) for each.
  template <class Store>
  __device__ void store(const Store& store) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) store(row + i % 2, output + i / 2 * 8, i);
  }
};

__device__ void add(float4& to, const float4& x) {
  to.x += x.x;
  to.y += x.y;
  to.z += x.z;
  to.w += x.w;
}
__device__ float nth(const float4& of, int i) { return (&of.x)[i]; }

// ------------------------------------------------------------------------------------- few rows

/// What a warp has in shared memory: stages, each with two tiles of its split, whose instructions
/// fill each other's waits.
template <WeightCode kCode, bool kGated>
struct FewRows {
  static constexpr int kMatrices = kGated ? 2 : 1;
  static constexpr int kTileBytes = LaneCodes<kCode>::kTileBytes;
  static constexpr int kInputs = kTileRows * kTile * 2;
  static constexpr int kOne = kInputs + kMatrices * (kTileBytes + kMetaBytes);
  static constexpr int kStage = 2 * kOne;
  static constexpr int kStages = kCode == WeightCode::kU4 && !kGated ? 4 : 3;
  static constexpr int kBytes = kWarps * kStages * kStage;
};

template <class T, WeightCode kCode, bool kGated>
__global__ void __launch_bounds__(kThreads, 2)
    few_rows(CodeProjections projections, CodeArgs args, const T* x, CodeResult result) {
  using Few = FewRows<kCode, kGated>;
  constexpr int kMatrices = Few::kMatrices;
  constexpr int kStages = Few::kStages;
  extern __shared__ __align__(128) std::byte shared[];
  let_next_start();
  const auto lane = static_cast<int>(threadIdx.x % 32);
  const auto split = static_cast<int>(threadIdx.x / 32);
  const auto block = static_cast<int>(blockIdx.x);
  const Place place = kGated ? Place{0, block} : place_of(projections, block, kTile);
  const std::byte* stages = shared + split * kStages * Few::kStage;
  const uint32_t stages_at = shared_address(stages);
  const auto codes_of = [](int m) { return Few::kInputs + m * (Few::kTileBytes + kMetaBytes); };
  const auto matrix_of = [&](int m) { return kGated ? m : place.matrix; };
  const TileCopies<kCode> first(projections.w[matrix_of(0)], args, place.index, lane);
  const TileCopies<kCode> second(projections.w[matrix_of(kMatrices - 1)], args, place.index, lane);
  const bool has_row = lane / 4 < result.rows;
  const T* inputs = x + static_cast<int64_t>(lane / 4) * args.in + lane % 4 * 8;
  const auto tile_of = [&](int step, int i) { return split + (2 * step + i) * kSplits; };
  const auto copy_codes = [&](int at, int step) {
#pragma unroll
    for (int i = 0; i < 2 * kMatrices; ++i) {
      const uint32_t to = stages_at + at + i / kMatrices * Few::kOne + codes_of(i % kMatrices);
      const int tile = tile_of(step, i / kMatrices);
      const TileCopies<kCode>& copies = i % kMatrices == 0 ? first : second;
      copies.copy(to, to + Few::kTileBytes, tile, tile < args.tiles);
    }
  };
  const auto copy_inputs = [&](int at, int step) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int tile = tile_of(step, i);
      copy_async(stages_at + at + i * Few::kOne + 16 * lane, inputs + tile * kTile,
                 has_row && tile < args.tiles);
    }
    end_copies();
  };
#pragma unroll
  for (int s = 0; s + 1 < kStages; ++s) copy_codes(s * Few::kStage, s);
  wait_for_earlier();
#pragma unroll
  for (int s = 0; s + 1 < kStages; ++s) copy_inputs(s * Few::kStage, s);

  TileSums<1> sums[kMatrices] = {};
  const bool has_zeros = projections.w[matrix_of(0)].zeros != nullptr;
  with_groups(args.scale, has_zeros, [&]<Groups kGroups>() {
    const auto add = [&](int at) {
      const uint4 now = *reinterpret_cast<const uint4*>(stages + at + 16 * lane);
#pragma unroll
      for (int m = 0; m < kMatrices; ++m) {
        const std::byte* tile = stages + at + codes_of(m);
        LaneCodes<kCode> codes;
        codes.load(tile, lane);
        const LaneGroup<T, kCode, kGroups> group(tile + Few::kTileBytes, args.scale, has_zeros,
                                                 lane);
        add_tile<T, kCode, kGroups, 1>(sums[m], codes, group, [&](int) { return now; });
      }
    };
    int at = 0;
    for (int step = 0; tile_of(step, 0) < args.tiles; ++step) {
      await_copies<kStages - 2>();
      __syncwarp();
      const int before = at == 0 ? (kStages - 1) * Few::kStage : at - Few::kStage;
      copy_codes(before, step + kStages - 1);
      copy_inputs(before, step + kStages - 1);
      if (tile_of(step, 1) < args.tiles) {
        add(at);
        add(at + Few::kOne);
      } else {
        add(at);
      }
      at = at == (kStages - 1) * Few::kStage ? 0 : at + Few::kStage;
    }
  });

  await_copies<0>();
  __syncthreads();
  auto* of_splits = reinterpret_cast<float4*>(shared);  // (matrix, split, half, lane)
#pragma unroll
  for (int i = 0; i < 2 * kMatrices; ++i) {
    of_splits[((i / 2 * kSplits + split) * 2 + i % 2) * 32 + lane] =
        *reinterpret_cast<const float4*>(sums[i / 2][0][i % 2]);
  }
  __syncthreads();
  const int half = split;
  if (half >= 2) return;
  float4 totals[kMatrices] = {};
#pragma unroll
  for (int m = 0; m < kMatrices; ++m) {
#pragma unroll
    for (int s = 0; s < kSplits; s += 2) {
      float4 pair = of_splits[((m * kSplits + s) * 2 + half) * 32 + lane];
      add(pair, of_splits[((m * kSplits + s + 1) * 2 + half) * 32 + lane]);
      add(totals[m], pair);
    }
  }
  FourSums(0, half, lane).store([&](int row, int output, int i) {
    const int column = place.index * kTile + output;
    if constexpr (kGated) {
      store_gated<T>(projections, result, row, column, nth(totals[0], i), nth(totals[1], i));
    } else {
      store_sum(projections, result, place.matrix, row, column, nth(totals[0], i));
    }
  });
}

// ------------------------------------------------------------------------------------ many rows

constexpr int kBlockSplits = 2;
constexpr int kUnits = kWarps / kBlockSplits;  // of 32 outputs, of a block
constexpr int kBlockOutputs = kUnits * kTile;
constexpr int kClusterBlocks = kSplits / kBlockSplits;

/// What a block has in shared memory: stages, each with 2 tiles of the inputs, or after them sums
/// of the second split; and the block's sums.
template <WeightCode kCode, int kRowTiles>
struct ManyRows {
  static constexpr int kRows = kRowTiles * kTileRows;
  static constexpr int kInputs = kBlockSplits * kRows * kTile * 2;  // bytes: (tile, row, 32)
  static constexpr int kTileBytes = LaneCodes<kCode>::kTileBytes;
  static constexpr int kStage = kInputs + kWarps * (kTileBytes + kMetaBytes);
  static constexpr int kStages = kCode == WeightCode::kU4 && kRowTiles < 8 ? 6 : 4;
  static constexpr int kFours =
      kUnits * kRowTiles * 2 * 32;  // float4: (unit, row tile, half, lane)
  static constexpr int kSums = 16 * kFours;
  static constexpr int kBlockSums = std::max(kStages * kStage, kSums);
  static constexpr int kBytes = kBlockSums + kSums;
  static constexpr int kBlocks = kRowTiles <= 2 ? 3 : 2;  // of a multiprocessor
};

/// The inputs that a thread copies of a step's tiles: 16 bytes of some rows.
template <class T, int kRows>
class InputCopies {
 public:
  __device__ InputCopies(const T* x, int in, int rows) : in_(in) {
    const auto thread = static_cast<int>(threadIdx.x);
    row_ = thread / kRowPieces;
    tile_ = thread % kRowPieces / 4;
    from_ = x + static_cast<int64_t>(row_) * in + tile_ * kTile + thread % 4 * 8;
    to_ = ((tile_ * kRows + row_) * 4 + thread % 4) * 16;
    rows_ = min(rows, kRows);
  }
  /// Those of tiles `first` and `first` + 1, which may be beyond the last.
  __device__ void copy(uint32_t to, int first, int tiles) const {
    const T* from = from_ + first * kTile;
#pragma unroll
    for (int row = 0; row < kRows; row += kThreads / kRowPieces) {
      copy_async(to + to_ + row * 64, from + static_cast<int64_t>(row) * in_,
                 first + tile_ < tiles && row_ + row < rows_);
    }
  }

 private:
  static constexpr int kRowPieces = kBlockSplits * 4;
  const T* from_;
  int in_, rows_, row_, tile_, to_;
};

/// Adds up a warp's split `split` of 32 outputs, if they exist.
template <class T, WeightCode kCode, int kRowTiles>
__device__ void add_split(TileSums<kRowTiles>& sums, std::byte* shared,
                          const TileCopies<kCode>& copies, bool exists, bool has_zeros,
                          const InputCopies<T, kRowTiles * kTileRows>& inputs, const CodeArgs& args,
                          int pair, bool& waited) {
  using Many = ManyRows<kCode, kRowTiles>;
  constexpr int kStages = Many::kStages;
  const auto lane = static_cast<int>(threadIdx.x % 32);
  const auto warp = static_cast<int>(threadIdx.x / 32);
  const int within = warp / kUnits;
  const int codes_at = Many::kInputs + warp * (Many::kTileBytes + kMetaBytes);
  const int inputs_at = within * Many::kRows * 64 + 16 * lane;
  const uint32_t shared_at = shared_address(shared);
  const auto first_of = [&](int step) { return step * kSplits + pair * kBlockSplits; };
  const auto copy_codes = [&](int at, int step) {
    const int tile = first_of(step) + within;
    const uint32_t to = shared_at + at + codes_at;
    copies.copy(to, to + Many::kTileBytes, tile, exists && tile < args.tiles);
  };
#pragma unroll
  for (int s = 0; s + 1 < kStages; ++s) copy_codes(s * Many::kStage, s);
  if (!waited) wait_for_earlier();
  waited = true;
#pragma unroll
  for (int s = 0; s + 1 < kStages; ++s) {
    inputs.copy(shared_at + s * Many::kStage, first_of(s), args.tiles);
    end_copies();
  }

  const int steps = (args.tiles + kSplits - 1) / kSplits;
  with_groups(args.scale, has_zeros, [&]<Groups kGroups>() {
    int at = 0;
    for (int step = 0; step < steps; ++step) {
      await_copies<kStages - 2>();
      __syncthreads();
      const int before = at == 0 ? (kStages - 1) * Many::kStage : at - Many::kStage;
      copy_codes(before, step + kStages - 1);
      inputs.copy(shared_at + before, first_of(step + kStages - 1), args.tiles);
      end_copies();
      if (exists && first_of(step) + within < args.tiles) {
        const std::byte* tile = shared + at + codes_at;
        LaneCodes<kCode> codes;
        codes.load(tile, lane);
        const LaneGroup<T, kCode, kGroups> group(tile + Many::kTileBytes, args.scale, has_zeros,
                                                 lane);
        const std::byte* rows = shared + at + inputs_at;
        add_tile<T, kCode, kGroups, kRowTiles>(sums, codes, group, [&](int row_tile) {
          return *reinterpret_cast<const uint4*>(rows + row_tile * kTileRows * 64);
        });
      }
      at = at == (kStages - 1) * Many::kStage ? 0 : at + Many::kStage;
    }
  });
  await_copies<0>();
  __syncthreads();
}

/// Adds the sums of a block's two splits, and those to `block_sums`, or makes it that.
template <int kRowTiles>
__device__ void add_pair(float4* block_sums, float4* of_second, const TileSums<kRowTiles>& sums,
                         bool first) {
  const auto lane = static_cast<int>(threadIdx.x % 32);
  const auto warp = static_cast<int>(threadIdx.x / 32);
  const auto at = [&](int i) { return (warp % kUnits * kRowTiles * 2 + i) * 32 + lane; };
  const auto four = [&](int i) { return *reinterpret_cast<const float4*>(sums[i / 2][i % 2]); };
  if (warp >= kUnits) {
#pragma unroll
    for (int i = 0; i < 2 * kRowTiles; ++i) of_second[at(i)] = four(i);
  }
  __syncthreads();
  if (warp < kUnits) {
#pragma unroll
    for (int i = 0; i < 2 * kRowTiles; ++i) {
      float4 pair = four(i);
      add(pair, of_second[at(i)]);
      if (!first) {
        float4 before = block_sums[at(i)];
        add(before, pair);
        pair = before;
      }
      block_sums[at(i)] = pair;
    }
  }
  __syncthreads();
}

template <class T, WeightCode kCode, int kRowTiles, bool kGated>
__global__ void __launch_bounds__(kThreads, ManyRows<kCode, kRowTiles>::kBlocks)
    many_rows(CodeProjections projections, CodeArgs args, const T* x, CodeResult result,
              int cluster_blocks) {
  using Many = ManyRows<kCode, kRowTiles>;
  constexpr int kMatrixUnits = kGated ? kUnits / 2 : kUnits;
  extern __shared__ __align__(128) std::byte shared[];
  auto* block_sums = reinterpret_cast<float4*>(shared + Many::kBlockSums);
  let_next_start();
  const Cluster cluster{cluster_blocks, static_cast<int>(blockIdx.x) % cluster_blocks};
  const int block = static_cast<int>(blockIdx.x) / cluster_blocks;
  const auto lane = static_cast<int>(threadIdx.x % 32);
  const auto warp_unit = static_cast<int>(threadIdx.x / 32 % kUnits);
  const Place place = kGated ? Place{0, block} : place_of(projections, block, kMatrixUnits * kTile);
  const int matrix = kGated ? warp_unit / kMatrixUnits : place.matrix;
  const int unit = place.index * kMatrixUnits + warp_unit % kMatrixUnits;
  const CodeMatrix& w = projections.w[matrix];
  const TileCopies<kCode> copies(w, args, unit, lane);
  const InputCopies<T, Many::kRows> inputs(x, args.in, result.rows);
  const bool exists = unit * kTile < projections.out[matrix];
  bool waited = false;
#pragma unroll 1
  for (int pair = cluster.rank; pair < kClusterBlocks; pair += cluster.blocks) {
    TileSums<kRowTiles> sums = {};
    add_split<T, kCode, kRowTiles>(sums, shared, copies, exists, w.zeros != nullptr, inputs, args,
                                   pair, waited);
    add_pair<kRowTiles>(block_sums, reinterpret_cast<float4*>(shared), sums, pair < cluster.blocks);
  }
  cluster.sync();
  constexpr int kFours = Many::kFours / kUnits * kMatrixUnits;  // of one matrix
  for (int at = cluster.rank * kThreads + static_cast<int>(threadIdx.x); at < kFours;
       at += cluster.blocks * kThreads) {
    const int four = at / 32 % (2 * kRowTiles);
    float4 totals[kGated ? 2 : 1] = {};
#pragma unroll
    for (int b = 0; b < kClusterBlocks; ++b) {
      if (b >= cluster.blocks) break;
      const float4* sums = cluster.in(b, block_sums) + at;
#pragma unroll
      for (int m = 0; m < (kGated ? 2 : 1); ++m) add(totals[m], sums[m * kFours]);
    }
    const int first = (place.index * kMatrixUnits + at / (64 * kRowTiles)) * kTile;
    FourSums(four / 2, four % 2, lane).store([&](int row, int output, int i) {
      if constexpr (kGated) {
        store_gated<T>(projections, result, row, first + output, nth(totals[0], i),
                       nth(totals[1], i));
      } else {
        store_sum(projections, result, place.matrix, row, first + output, nth(totals[0], i));
      }
    });
  }
  cluster.await_readers();
}

// ------------------------------------------------------------------------------------------ host

/// Rows of x that are padded to whole tiles, if they are not.
template <class T>
const T* padded(const T* x, CodeArgs& args, int rows, Stream& stream) {
  if (args.in % kTile == 0) return x;
  const auto row_bytes = static_cast<size_t>(args.tiles) * kTile * sizeof(T);
  const auto in_bytes = static_cast<size_t>(args.in) * sizeof(T);
  std::byte* to = stream.queue().scratch(kPaddedInputs, row_bytes * static_cast<size_t>(rows));
  check(cudaMemsetAsync(to, 0, row_bytes * static_cast<size_t>(rows), native(stream)), "linear");
  check(cudaMemcpy2DAsync(to, row_bytes, x, in_bytes, in_bytes, static_cast<size_t>(rows),
                          cudaMemcpyDeviceToDevice, native(stream)),
        "linear");
  args.in = args.tiles * kTile;
  return reinterpret_cast<const T*>(to);
}

/// Blocks of `outputs` outputs of one matrix each.
int blocks_of(std::span<const Projection> projections, int outputs) {
  int64_t blocks = 0;
  for (const Projection& one : projections) blocks += ceil_div(one.w.shape()[0], outputs);
  return static_cast<int>(blocks);
}

template <class T, WeightCode kCode, int kRowTiles, bool kGated>
void launch_many(const CodeProjections& all, std::span<const Projection> projections,
                 const CodeArgs& args, const T* x, const CodeResult& result, Stream& stream) {
  constexpr int kOutputs = kGated ? kBlockOutputs / 2 : kBlockOutputs;
  constexpr auto kBytes = static_cast<size_t>(ManyRows<kCode, kRowTiles>::kBytes);
  const auto kernel = many_rows<T, kCode, kRowTiles, kGated>;
  allow_shared("linear", kernel, kBytes);
  const bool clusters = stream.queue().overlaps_kernels();
  const int size = clusters ? kClusterBlocks : 1;
  const auto blocks = static_cast<unsigned>(blocks_of(projections, kOutputs) * size);
  auto attributes = early_clusters(static_cast<unsigned>(size));
  const cudaLaunchConfig_t config{dim3(blocks),   kThreads,          kBytes,
                                  native(stream), attributes.data(), clusters ? 2u : 0u};
  check(cudaLaunchKernelEx(&config, kernel, all, args, x, result, size), "linear");
}

/// Products of rows that one launch can take; returns how many it took.
template <class T, WeightCode kCode, bool kGated>
int multiply_some(const CodeProjections& all, std::span<const Projection> projections,
                  const CodeArgs& args, const T* x, CodeResult result, Stream& stream) {
  const auto many = [&]<int kRowTiles>() {
    result.rows = std::min(result.rows, kRowTiles * kTileRows);
    launch_many<T, kCode, kRowTiles, kGated>(all, projections, args, x, result, stream);
  };
  if (result.rows <= kTileRows) {
    launch_early("linear", few_rows<T, kCode, kGated>,
                 dim3(static_cast<unsigned>(blocks_of(projections, kTile))), kThreads,
                 static_cast<size_t>(FewRows<kCode, kGated>::kBytes), stream, all, args, x, result);
  } else if (result.rows <= 16) {
    many.template operator()<2>();
  } else if (result.rows <= 32) {
    many.template operator()<4>();
  } else {
    many.template operator()<8>();
  }
  return result.rows;
}

CodeProjections projections_of(std::span<const Projection> projections) {
  CodeProjections all{};
  for (size_t i = 0; i < projections.size(); ++i) {
    const Projection& one = projections[i];
    all.w[i] = CodeMatrix(one.w.quantized());
    all.bias[i] = one.bias.empty() ? nullptr : one.bias.as<float>();
    all.y[i] = one.y.empty() ? nullptr : one.y.as<float>();
    all.out[i] = static_cast<int>(one.w.shape()[0]);
  }
  return all;
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
  with_codes(format, [&]<class T, WeightCode kCode>() {
    CodeArgs args(format);
    const auto rows = static_cast<int>(shape[0]);
    const T* inputs = padded(static_cast<const T*>(x), args, rows, stream);
    for (int row = 0; row < rows;) {
      const CodeResult result{rows - row, add, nullptr, DType::kF32, {}};
      const int made = multiply_some<T, kCode, false>(
          all, projections, args, inputs + int64_t{row} * args.in, result, stream);
      for (size_t i = 0; i < projections.size(); ++i) all.y[i] += int64_t{made} * all.out[i];
      row += made;
    }
  });
}

void multiply_gate(TensorView y, const Projection& gate, const Projection& up,
                   Activation activation, const void* x, int64_t row_count, Stream& stream) {
  const QuantizedFormat& format = gate.w.quantized().format;
  const Projection both[] = {gate, up};
  const CodeProjections all = projections_of(both);
  std::byte* to = y.data();
  with_codes(format, [&]<class T, WeightCode kCode>() {
    CodeArgs args(format);
    const auto rows = static_cast<int>(row_count);
    const T* inputs = padded(static_cast<const T*>(x), args, rows, stream);
    for (int row = 0; row < rows;) {
      const CodeResult result{rows - row, false, to, y.dtype(), activation};
      const int made = multiply_some<T, kCode, true>(
          all, {both, 1}, args, inputs + int64_t{row} * args.in, result, stream);
      to += static_cast<size_t>(made * format.out) * dtype_bytes(y.dtype());
      row += made;
    }
  });
}

}  // namespace kvlm::cuda
