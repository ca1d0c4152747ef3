#include "kernels/cuda/dense/attention.h"
#include "kernels/cuda/dense/segment_attention.h"
#include "kernels/cuda/dense/warp_attention.cuh"
#include "kernels/cuda/dense/warpgroup_attention.h"

// Attention inside segments on the tensor cores, all segments in one launch; where a GPU multiplies
// by warpgroups, warpgroup_attention.cu takes the heads that it has a kernel for.
namespace kvlm::cuda {

namespace {

/// Queues the copy of 16 bytes to shared memory, or of zeros unless they are `there`.
__device__ inline void copy_or_clear(uint32_t to, const void* from, bool there) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
               "r"(there ? 16 : 0));
}

/// Queues rows [first, first + kCount) of a head, zeros beyond `rows` and beyond `length`: part
/// `part` of kCount * kChunks / kThreads.
template <class Tiles, class T>
__device__ void copy_rows(uint32_t to, const T* from, int64_t stride, int first, int rows,
                          int length, int part) {
  const int chunk = part * Tiles::kThreads + static_cast<int>(threadIdx.x);
  const int row = chunk / Tiles::kChunks;
  const int channel = chunk % Tiles::kChunks * 8;
  const bool there = first + row < rows && channel < length;
  copy_or_clear(to + static_cast<uint32_t>(2 * (row * Tiles::kStride + channel)),
                there ? from + (first + row) * stride + channel : from, there);
}

/// The queries of one tile and head against all keys of their segment, a block.
template <class Tiles, class T, class Out>
__global__ void __launch_bounds__(Tiles::kThreads, Tiles::kBlocks)
    attend_segments(SegmentLaunch<T, Out> l) {
  constexpr int kWarpRows = Tiles::kRowTiles * 16;
  constexpr int kQueryCopies = Tiles::kQueries * Tiles::kChunks / Tiles::kThreads;
  constexpr int kCopies = Tiles::kKeys * Tiles::kChunks / Tiles::kThreads;
  static_assert(Tiles::kQueries * Tiles::kChunks % Tiles::kThreads == 0);
  static_assert(Tiles::kKeys * Tiles::kChunks % Tiles::kThreads == 0);
  constexpr uint32_t kTileBytes = 2 * Tiles::kTileElements;
  extern __shared__ uint4 shared[];
  const auto queries = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  const uint32_t stages = queries + 2 * Tiles::kQueries * Tiles::kStride;

  let_next_start();
  const Segments::Tile tile = l.tiles[blockIdx.y];
  wait_for_earlier();
  const int head = static_cast<int>(blockIdx.x);
  const int kv_head = head / l.q_per_kv;
  const T* q = l.q.data + tile.first * l.q.stride + head * l.length;
  const T* k = l.k.data + tile.first * l.k.stride + kv_head * l.length;
  const T* v = l.v.data + tile.first * l.v.stride + kv_head * l.length;
  const auto copy_part = [&](int part, int first, uint32_t stage) {
    copy_rows<Tiles>(stage, k, l.k.stride, first, tile.rows, l.length, part);
    copy_rows<Tiles>(stage + kTileBytes, v, l.v.stride, first, tile.rows, l.length, part);
  };
#pragma unroll
  for (int part = 0; part < kQueryCopies; ++part) {
    copy_rows<Tiles>(queries, q, l.q.stride, tile.queries, tile.rows, l.length, part);
  }
#pragma unroll
  for (int part = 0; part < kCopies; ++part) copy_part(part, 0, stages);

  const int warp_lane = static_cast<int>(threadIdx.x % 32);
  const int warp_row = static_cast<int>(threadIdx.x / 32) * kWarpRows;
  // Rows of ldmatrix: operand a and transposed values by 16 rows, keys by 8 rows and 16 channels.
  const int by_row = warp_lane % 16 * Tiles::kStride + warp_lane / 16 * 8;
  const int by_key = (warp_lane % 8 + warp_lane / 16 * 8) * Tiles::kStride + warp_lane / 8 % 2 * 8;
  const uint32_t query_rows =
      queries + static_cast<uint32_t>(2 * (warp_row * Tiles::kStride + by_row));
  const bool working = tile.queries + warp_row < tile.rows;

  WarpState<Tiles, T> state(l.scale);
  for (int first = 0; first < tile.rows; first += Tiles::kKeys) {
    asm volatile("cp.async.wait_all;" ::: "memory");
    __syncthreads();
    const int parity = first / Tiles::kKeys % 2;
    const uint32_t stage = stages + static_cast<uint32_t>(parity) * 2 * kTileBytes;
    const uint32_t next_stage = stages + static_cast<uint32_t>(1 - parity) * 2 * kTileBytes;
    const int next = first + Tiles::kKeys;
    const int there = min(tile.rows - first, Tiles::kKeys);
    // Queued all at once, the copies would hold up the loads of operands behind them.
    const auto copy_next = [&](int product) {
      constexpr int kEvery = state.kProducts / kCopies;
      static_assert(state.kProducts % kCopies == 0);
      if (next < tile.rows && product % kEvery == 0) {
        copy_part(product / kEvery, next, next_stage);
      }
    };
    if (working) {
      state.score(query_rows, stage + static_cast<uint32_t>(2 * by_key), there);
      if (there < Tiles::kKeys) state.mask(first, 0, tile.rows, /*causal=*/false);
      state.raise_maxima();
      state.add_values(stage + kTileBytes + static_cast<uint32_t>(2 * by_row), copy_next, there);
    } else {
#pragma unroll
      for (int product = 0; product < state.kProducts; ++product) copy_next(product);
    }
  }
  if (!working) return;
  const int64_t row_stride = static_cast<int64_t>(l.q_heads) * l.head_dim;
  const int first_row = tile.queries + warp_row;
  state.finish(
      l.out + (tile.first + first_row) * row_stride + static_cast<int64_t>(head) * l.head_dim,
      row_stride, tile.rows - first_row, l.head_dim, l.pairs);
}

template <class Tiles, class T, class Out>
void launch_tiles(SegmentLaunch<T, Out> l, const Segments& segments, Stream& stream) {
  const auto kernel = attend_segments<Tiles, T, Out>;
  l.tiles = segments.tiles(Tiles::kQueries);
  const dim3 grid(static_cast<unsigned>(l.q_heads),
                  static_cast<unsigned>(segments.tile_count(Tiles::kQueries)));
  launch_early("segment_attention", kernel, grid, Tiles::kThreads, Tiles::kSharedBytes, stream, l);
}

template <int kDim, class T, class Out>
void launch_dim(const SegmentLaunch<T, Out>& l, const Segments& segments, Stream& stream) {
  if constexpr (kDim <= 128) {  // else two row tiles do not fit the registers
    using Large = WarpTiling<kDim, 2>;
    // Twice the rows a warp halve what is read of shared memory, where there are as many.
    const int64_t blocks = segments.tile_count(Large::kQueries) * l.q_heads;
    const bool enough = blocks >= int64_t{Large::kBlocks} * stream.queue().multiprocessors();
    const bool filled = 3 * segments.tile_count(Large::kQueries) <= 2 * segments.tile_count(64);
    if (enough && filled && fits_shared("segment_attention", Large::kSharedBytes)) {
      return launch_tiles<Large>(l, segments, stream);
    }
  }
  launch_tiles<WarpTiling<kDim, 1>>(l, segments, stream);
}

template <class T, class Out>
void launch(const SegmentLaunch<T, Out>& l, const Segments& segments, Stream& stream) {
  if constexpr (KVLM_WARPGROUPS != 0) {
    if (attend_by_warpgroups(l, segments, stream)) return;
  }
  if (l.length <= 32) return launch_dim<32>(l, segments, stream);
  if (l.length <= 64) return launch_dim<64>(l, segments, stream);
  if (l.length <= 80) return launch_dim<80>(l, segments, stream);
  if (l.length <= 128) return launch_dim<128>(l, segments, stream);
  launch_dim<256>(l, segments, stream);
}

/// Rows (n * heads, head_dim) as (n * heads, length), times `scale`; padding is zero.
template <class T>
__global__ void round_heads(T* to, const float* from, int64_t heads, int head_dim, int length,
                            float scale) {
  let_next_start();
  wait_for_earlier();
  const int64_t chunk = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const int64_t head = chunk / (length / 8);
  const int channel = static_cast<int>(chunk % (length / 8)) * 8;
  if (head >= heads) return;
  float x[8];
  load_eight({reinterpret_cast<const std::byte*>(from + head * head_dim), DType::kF32}, channel,
             head_dim, x);
#pragma unroll
  for (float& value : x) value *= scale;
  *reinterpret_cast<uint4*>(to + head * length + channel) = round_eight<T>(x);
}

template <class T>
void attend_rounded_as(TensorView out, ConstTensorView q, ConstTensorView k, ConstTensorView v,
                       const Segments& segments, float scale, Stream& stream) {
  const int64_t n = q.shape()[0];
  const auto q_heads = static_cast<int>(q.shape()[1]);
  const auto kv_heads = static_cast<int>(k.shape()[1]);
  const auto head_dim = static_cast<int>(q.shape()[2]);
  const int length = (head_dim + 7) / 8 * 8;
  const int64_t elements = n * (q_heads + 2 * kv_heads) * length;
  auto* rounded = reinterpret_cast<T*>(
      stream.queue().scratch(kPromptRows, static_cast<size_t>(elements) * sizeof(T)));
  T* to = rounded;
  const auto round = [&](ConstTensorView from, float factor) {
    const int64_t heads = n * from.shape()[1];
    constexpr int kThreads = 256;
    launch_early("segment_attention", round_heads<T>,
                 static_cast<unsigned>(ceil_div(heads * (length / 8), kThreads)), kThreads, stream,
                 to, from.as<float>(), heads, head_dim, length, factor);
    const HeadRows<T> rows{to, from.shape()[1] * length};
    to += heads * length;
    return rows;
  };
  SegmentLaunch<T, float> l{};
  l.out = out.as<float>();
  l.q = round(q, scale * kLog2E);
  l.k = round(k, 1);
  l.v = round(v, 1);
  l.q_heads = q_heads;
  l.q_per_kv = q_heads / kv_heads;
  l.length = length;
  l.head_dim = head_dim;
  l.pairs = head_dim % 2 == 0 && is_aligned(l.out, 8);
  l.scale = 1;
  launch(l, segments, stream);
}

template <class T>
void attend_product(TensorView out, ConstTensorView qkv, const Segments& segments, float scale,
                    Stream& stream) {
  const auto heads = static_cast<int>(qkv.shape()[2]);
  const auto head_dim = static_cast<int>(qkv.shape()[3]);
  const auto* q = reinterpret_cast<const T*>(qkv.data());
  const int64_t width = int64_t{heads} * head_dim;
  SegmentLaunch<T, T> l{};
  l.out = reinterpret_cast<T*>(out.data());
  l.q = {q, 3 * width};
  l.k = {q + width, 3 * width};
  l.v = {q + 2 * width, 3 * width};
  l.q_heads = heads;
  l.q_per_kv = 1;
  l.length = l.head_dim = head_dim;
  l.pairs = true;
  l.scale = scale * kLog2E;
  launch(l, segments, stream);
}

}  // namespace

void attend_rounded(TensorView out, ConstTensorView q, ConstTensorView k, ConstTensorView v,
                    const Segments& segments, float scale, DType multiply, Stream& stream) {
  if (multiply == DType::kF16) {
    return attend_rounded_as<__half>(out, q, k, v, segments, scale, stream);
  }
  attend_rounded_as<__nv_bfloat16>(out, q, k, v, segments, scale, stream);
}

void segment_attention(TensorView out, ConstTensorView qkv, const Segments& segments, float scale,
                       Stream& stream) {
  if (qkv.dtype() == DType::kF16) {
    return attend_product<__half>(out, qkv, segments, scale, stream);
  }
  attend_product<__nv_bfloat16>(out, qkv, segments, scale, stream);
}

}  // namespace kvlm::cuda
