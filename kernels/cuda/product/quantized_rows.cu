#include "kernels/cuda/product/code_tiles.cuh"
#include "kernels/cuda/product/quantized.h"

// Weights of a quantized matrix as floats.
namespace kvlm::cuda {

namespace {

constexpr int kThreads = 256;

/// Of an output of a tile, 8 inputs from a multiple of 8 on, as exact multiples of a scale.
template <class T, WeightCode kCode>
struct EightWeights {
  uint32_t pairs[4];
  float scale;

  __device__ EightWeights(const CodeMatrix& matrix, const CodeArgs& args, int unit, int tile,
                          int output, int first) {
    const int lane = output % 8 * 4 + first / 8;
    const int eight = output / 8;
    LaneCodes<kCode> codes;
    codes.load(matrix.codes +
                   (static_cast<int64_t>(unit) * args.tiles + tile) * LaneCodes<kCode>::kTileBytes,
               lane);
    const size_t at = matrix.entry(args, unit, tile) + output % 8 * kEights + eight;
    const size_t scale_bytes = args.scale == DType::kF32 ? 4 : 2;
    scale = element(matrix.scales + at * scale_bytes, args.scale, 0) * scale_of_codes<T, kCode>();
    const float zero = matrix.zeros == nullptr ? static_cast<float>(args.zero)
                                               : static_cast<float>(matrix.zeros[at]);
    codes.template widen<T>(eight, LaneCodes<kCode>::template offset_of<T>(zero), pairs);
  }
  __device__ float operator[](int i) const {
    return load_float(reinterpret_cast<const T*>(pairs)[i]) * scale;
  }
};

/// Eight inputs a thread: w, rounded to T, (out, in).
template <class T, WeightCode kCode>
__global__ void __launch_bounds__(kThreads)
    widen_codes(T* to, CodeMatrix matrix, CodeArgs args, int out) {
  let_next_start();
  wait_for_earlier();
  // Neighbours have neighbouring lanes of a tile.
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t index = thread / (kTile * 4);
  const auto unit = static_cast<int>(index / args.tiles);
  const auto tile = static_cast<int>(index % args.tiles);
  const auto output = static_cast<int>(thread / 4 % kTile);
  const auto first = static_cast<int>(thread % 4 * 8);
  const int64_t o = static_cast<int64_t>(unit) * kTile + output;
  const int i = tile * kTile + first;
  if (o >= out || i >= args.in) return;
  const EightWeights<T, kCode> weights(matrix, args, unit, tile, output, first);
  alignas(16) T values[8];
#pragma unroll
  for (int j = 0; j < 8; ++j) values[j] = store_float<T>(weights[j]);
  T* row = to + o * args.in + i;
  if (args.in % 8 == 0) {
    *reinterpret_cast<uint4*>(row) = *reinterpret_cast<const uint4*>(values);
    return;
  }
  for (int j = 0; j < 8 && i + j < args.in; ++j) row[j] = values[j];
}

/// A block a row: eight inputs a thread.
template <class T, WeightCode kCode>
__global__ void __launch_bounds__(kThreads)
    gather_codes(float* y, CodeMatrix table, CodeArgs args, const int32_t* ids) {
  let_next_start();
  wait_for_earlier();
  const int id = ids[blockIdx.x];
  float* to = y + static_cast<int64_t>(blockIdx.x) * args.in;
  for (int i = static_cast<int>(threadIdx.x) * 8; i < args.in; i += kThreads * 8) {
    const EightWeights<T, kCode> weights(table, args, id / kTile, i / kTile, id % kTile, i % kTile);
    for (int j = 0; j < 8 && i + j < args.in; ++j) to[i + j] = weights[j];
  }
}

}  // namespace

void widen_weights(TensorView to, const QuantizedMatrix& matrix, Stream& stream) {
  const QuantizedFormat& format = matrix.format;
  const CodeArgs args(format);
  const int64_t threads = ceil_div(format.out, kTile) * args.tiles * kTile * 4;
  with_codes(format, [&]<class T, WeightCode kCode>() {
    launch_early("linear", widen_codes<T, kCode>,
                 dim3(static_cast<unsigned>(ceil_div(threads, kThreads))), kThreads, 0, stream,
                 reinterpret_cast<T*>(to.data()), CodeMatrix(matrix), args,
                 static_cast<int>(format.out));
  });
}

void gather_rows(TensorView y, const QuantizedMatrix& table, std::span<const int32_t> ids,
                 Stream& stream) {
  const auto* device_ids =
      reinterpret_cast<const int32_t*>(stream.queue().upload(ids.data(), ids.size_bytes()));
  with_codes(table.format, [&]<class T, WeightCode kCode>() {
    launch_early("gather_rows", gather_codes<T, kCode>, dim3(static_cast<unsigned>(ids.size())),
                 kThreads, 0, stream, y.as<float>(), CodeMatrix(table), CodeArgs(table.format),
                 device_ids);
  });
}

}  // namespace kvlm::cuda
