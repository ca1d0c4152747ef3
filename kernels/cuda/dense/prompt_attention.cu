#include <string>

#include "kernels/cuda/dense/prompt_attention.h"
#include "kernels/cuda/dense/warp_attention.cuh"

// Attention of prompt rows on the tensor cores, in f16 or bf16 with f32 sums. Keys and values are
// first laid out as tiles. A block takes a tile of queries of one head and goes over the tiles of
// keys with an online softmax; the copy of the next tile to shared memory overlaps the products of
// this one.
namespace kvlm::cuda {

namespace {

/// What one launch reads and writes.
struct Launch {
  float* out;                 // (n, q_heads, head_dim)
  const float* q;             // the same
  const void* rows;           // what round_rows() has written
  int64_t tiles;              // of a kv_head
  int n, columns, past_rows;  // columns = past_rows + n
  int q_heads, q_per_kv, head_dim;
  bool causal;
  bool pairs;         // out may be written two floats at a time
  float query_scale;  // scale * log2(e)
  float2* softmax;    // (q_heads, softmax_rows) as PromptJob has it, or null
  int64_t softmax_rows;
};

/// Copies tiles of keys and values to a stage, kCopies parts a tile, so that the copies can be
/// queued between other work.
template <class Tiles, class T>
class TileCopier {
 public:
  static constexpr int kCopies = Tiles::kKeys * Tiles::kChunks / Tiles::kThreads;
  static_assert(Tiles::kKeys * Tiles::kChunks % Tiles::kThreads == 0);

  /// From the first of the tiles that lie at `tiles` one after the other.
  explicit __device__ TileCopier(const T* tiles) : from_(tiles + threadIdx.x * 8) {}

  /// Queues part `part` of the next tile.
  __device__ void start(int part, uint32_t stage) const {
    const uint32_t to = stage + place(part);
    const T* from = from_ + part * Tiles::kThreads * 8;
    copy_16_bytes(to, from);
    copy_16_bytes(to + 2 * Tiles::kTileElements, from + Tiles::kKeys * Tiles::kDim);
  }
  /// Closes the tile whose parts have all been queued and turns to the one after it.
  __device__ void finish() {
    asm volatile("cp.async.commit_group;");
    from_ += 2 * Tiles::kKeys * Tiles::kDim;
  }

 private:
  /// Where this thread's chunk of a part lies in a tile, in bytes.
  static __device__ uint32_t place(int part) {
    constexpr uint32_t kRowBytes = 2 * Tiles::kStride;
    if constexpr (Tiles::kThreads % Tiles::kChunks == 0) {
      constexpr uint32_t kRows = Tiles::kThreads / Tiles::kChunks;  // of a part
      return (threadIdx.x / Tiles::kChunks) * kRowBytes + threadIdx.x % Tiles::kChunks * 16 +
             static_cast<uint32_t>(part) * kRows * kRowBytes;
    } else {
      const uint32_t chunk = static_cast<uint32_t>(part) * Tiles::kThreads + threadIdx.x;
      return chunk / Tiles::kChunks * kRowBytes + chunk % Tiles::kChunks * 16;
    }
  }

  const T* from_;
};

/// The block's queries, scaled and rounded, to shared memory; zeros beyond the last.
template <class Tiles, class T>
__device__ void store_queries(const Launch& l, int first_query, int head, T* to) {
  constexpr int kChunks = Tiles::kDim / 8;
  for (int chunk = static_cast<int>(threadIdx.x); chunk < Tiles::kQueries * kChunks;
       chunk += Tiles::kThreads) {
    const int row = chunk / kChunks;
    const int channel = chunk % kChunks * 8;
    float x[8] = {};
    if (first_query + row < l.n) {
      const float* from =
          l.q + (static_cast<int64_t>(first_query + row) * l.q_heads + head) * l.head_dim;
      load_eight({reinterpret_cast<const std::byte*>(from), DType::kF32}, channel, l.head_dim, x);
    }
#pragma unroll
    for (float& value : x) value *= l.query_scale;
    *reinterpret_cast<uint4*>(to + row * Tiles::kStride + channel) = round_eight<T>(x);
  }
}

/// kQueries queries of one head against all that they see, a block.
template <class Tiles, class T>
__global__ void __launch_bounds__(Tiles::kThreads, Tiles::kBlocks) attend_tiles(Launch l) {
  constexpr int kWarpRows = Tiles::kRowTiles * 16;
  extern __shared__ uint4 shared[];
  auto* queries = reinterpret_cast<T*>(shared);
  const auto shared_queries = static_cast<uint32_t>(__cvta_generic_to_shared(queries));
  const uint32_t stages = shared_queries + 2 * Tiles::kQueries * Tiles::kStride;
  constexpr uint32_t kTileBytes = 2 * Tiles::kTileElements;

  const int head = static_cast<int>(blockIdx.x);
  // The latest queries see most, and go first.
  const int first_query = static_cast<int>(gridDim.y - 1 - blockIdx.y) * Tiles::kQueries;
  const int last_query = min(l.n, first_query + Tiles::kQueries) - 1;
  const int seen = l.causal ? l.past_rows + last_query + 1 : l.columns;
  const int tiles = (seen + Tiles::kKeys - 1) / Tiles::kKeys;

  const int64_t first_tile = head / l.q_per_kv * l.tiles;
  TileCopier<Tiles, T> copier(static_cast<const T*>(l.rows) +
                              first_tile * 2 * Tiles::kKeys * Tiles::kDim);
#pragma unroll
  for (int part = 0; part < copier.kCopies; ++part) copier.start(part, stages);
  copier.finish();
  store_queries<Tiles>(l, first_query, head, queries);

  const int warp_lane = static_cast<int>(threadIdx.x % 32);
  const int warp_row = static_cast<int>(threadIdx.x / 32) * kWarpRows;
  // Rows of ldmatrix: operand a and transposed values by 16 rows, keys by 8 rows and 16 channels.
  const int by_row = warp_lane % 16 * Tiles::kStride + warp_lane / 16 * 8;
  const int by_key = (warp_lane % 8 + warp_lane / 16 * 8) * Tiles::kStride + warp_lane / 8 % 2 * 8;
  const uint32_t query_rows =
      shared_queries + static_cast<uint32_t>(2 * (warp_row * Tiles::kStride + by_row));
  // Columns [0, all) are seen by all of the warp's rows, columns from `some` on by none.
  const int last = l.past_rows + first_query + warp_row;
  const int all = l.causal ? min(last + 1, l.columns) : l.columns;
  const int some = l.causal ? last + kWarpRows : l.columns;

  WarpState<Tiles, T> state(1.0f);  // queries are scaled already
  for (int tile = 0; tile < tiles; ++tile) {
    asm volatile("cp.async.wait_all;" ::: "memory");
    __syncthreads();
    const bool more = tile + 1 < tiles;
    const uint32_t stage = stages + static_cast<uint32_t>(tile % 2) * 2 * kTileBytes;
    const uint32_t next_stage = stages + static_cast<uint32_t>((tile + 1) % 2) * 2 * kTileBytes;
    const int first = tile * Tiles::kKeys;
    // Queued all at once, the copies would hold up the loads of operands behind them.
    const auto copy_next = [&](int product) {
      constexpr int kEvery = state.kProducts / copier.kCopies;
      static_assert(state.kProducts % copier.kCopies == 0);
      if (more && product % kEvery == 0) copier.start(product / kEvery, next_stage);
    };
    if (first < some) {
      state.score(query_rows, stage + static_cast<uint32_t>(2 * by_key));
      if (first + Tiles::kKeys > all) state.mask(first, last, l.columns, l.causal);
      state.raise_maxima();
      state.add_values(stage + kTileBytes + static_cast<uint32_t>(2 * by_row), copy_next);
    } else {
#pragma unroll
      for (int product = 0; product < state.kProducts; ++product) copy_next(product);
    }
    copier.finish();
  }

  const int64_t row_stride = static_cast<int64_t>(l.q_heads) * l.head_dim;
  const int first_row = first_query + warp_row;
  if (l.softmax != nullptr) {
    state.write_softmax(l.softmax + head * l.softmax_rows + first_row, l.n - first_row);
  }
  state.finish(l.out + first_row * row_stride + static_cast<int64_t>(head) * l.head_dim, row_stride,
               l.n - first_row, l.head_dim, l.pairs);
}

template <class Tiles, class T>
void launch_tiles(const Launch& l, Stream& stream) {
  allow_shared("attention", attend_tiles<Tiles, T>, Tiles::kSharedBytes);
  const dim3 grid(static_cast<unsigned>(l.q_heads),
                  static_cast<unsigned>(ceil_div(l.n, Tiles::kQueries)));
  attend_tiles<Tiles, T><<<grid, Tiles::kThreads, Tiles::kSharedBytes, native(stream)>>>(l);
  check_launch("attention");
}

template <int kDim, class T>
void launch_dim(const Launch& l, Stream& stream) {
  if constexpr (kDim <= 128) {  // else two row tiles do not fit the registers
    using Large = WarpTiling<kDim, 2>;
    // Twice the rows a warp halve what is read of shared memory; short prompts need the blocks.
    const int64_t blocks = ceil_div(l.n, Large::kQueries) * l.q_heads;
    const int64_t places = int64_t{Large::kBlocks} * stream.queue().multiprocessors();
    if (blocks >= places && fits_shared("attention", Large::kSharedBytes)) {
      return launch_tiles<Large, T>(l, stream);
    }
  }
  launch_tiles<WarpTiling<kDim, 1>, T>(l, stream);
}

template <class T>
const void* attend_as(const PromptJob& job, Stream& stream) {
  const PromptRows& rows = job.rows;
  const int64_t n = job.q.shape()[0];
  const int64_t columns = rows.past_rows + n;
  const int dim = padded(rows.head_dim);
  const int64_t tiles = ceil_div(columns, columns_at_a_time(dim));
  const int64_t chunks = tiles * columns_at_a_time(dim) * (dim / 8);  // of 8, keys of a kv_head
  const auto bytes = static_cast<size_t>(2 * rows.kv_heads * chunks * 8) * sizeof(T);
  auto* rounded = reinterpret_cast<T*>(stream.queue().scratch(kPromptRows, bytes));
  constexpr unsigned kThreads = 256;
  const dim3 grid(static_cast<unsigned>(ceil_div(chunks, kThreads)),
                  static_cast<unsigned>(rows.kv_heads), 2);
  round_rows<T><<<grid, kThreads, 0, native(stream)>>>(rows, columns, tiles, columns_at_a_time(dim),
                                                       dim, rounded);
  check_launch("attention");

  Launch l{};
  l.out = job.out.as<float>();
  l.q = job.q.as<float>();
  l.rows = rounded;
  l.tiles = tiles;
  l.n = static_cast<int>(n);
  l.columns = static_cast<int>(columns);
  l.past_rows = static_cast<int>(rows.past_rows);
  l.q_heads = static_cast<int>(job.q.shape()[1]);
  l.q_per_kv = l.q_heads / rows.kv_heads;
  l.head_dim = rows.head_dim;
  l.causal = job.causal;
  l.pairs = rows.head_dim % 2 == 0 && reinterpret_cast<uintptr_t>(l.out) % 8 == 0;
  l.query_scale = job.scale * kLog2E;
  l.softmax = job.softmax;
  l.softmax_rows = job.softmax_rows;
  if (dim == 32) launch_dim<32, T>(l, stream);
  if (dim == 64) launch_dim<64, T>(l, stream);
  if (dim == 96) launch_dim<96, T>(l, stream);
  if (dim == 128) launch_dim<128, T>(l, stream);
  if (dim == 256) launch_dim<256, T>(l, stream);
  return rounded;
}

}  // namespace

const void* attend_prompt(const PromptJob& job, Stream& stream) {
  if (job.multiply == DType::kF16) return attend_as<__half>(job, stream);
  return attend_as<__nv_bfloat16>(job, stream);
}

}  // namespace kvlm::cuda
