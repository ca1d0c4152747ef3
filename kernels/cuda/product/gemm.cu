#include <algorithm>
#include <chrono>
#include <optional>
#include <vector>

#include "kernels/base/error.h"
#include "kernels/cuda/device/launch.cuh"
#include "kernels/cuda/model/activation.cuh"
#include "kernels/cuda/model/activation.h"
#include "kernels/cuda/model/elementwise.h"
#include "kernels/cuda/product/few_rows.h"
#include "kernels/cuda/product/gemm.h"
#include "kernels/cuda/product/library_product.h"
#include "kernels/cuda/product/quantized.h"
#include "kernels/cuda/product/warpgroup_product.h"
#include "kernels/elementwise.h"

// Matrix products y = x W^T. Four kernels share them by shape:
//
// - up to 4 rows of x with regular weights: few_rows.cu, which may serve several products of the
//   same x (q, k and v; gate and up);
// - more rows, all in one half format, stored at once or after an exact GELU, and 32 rows or more
//   of a gated MLP with long enough weights: warpgroup_product.cu, on GPUs of compute capability
//   9.0;
// - other products of more rows: cuBLASLt (library_product.cu), with x rounded to the weights'
//   type; small products of one shape in one call;
// - any other alignment or width: one warp an output (multiply_odd).
//
// Quantized weights have a kernel of their own (quantized.cu); above kMostQuantized rows they
// become floats first.
//
// The gate of an MLP is applied by few_rows.cu and warpgroup_product.cu themselves. Every other
// tail (activation, scale, sum) is done by cuBLASLt where it can, else by a second kernel
// (finish_rows).
namespace kvlm::cuda {

namespace {

constexpr int kOddWarps = 8;

/// Any alignment and width: one warp an output. Rows of y begin `stride` floats apart.
template <class T, class X>
__global__ void __launch_bounds__(32 * kOddWarps)
    odd_rows(float* y, int64_t stride, const X* x, const T* w, const float* bias, int64_t in,
             int64_t out, bool add) {
  const int warp_lane = static_cast<int>(threadIdx.x % 32);
  const int64_t column = static_cast<int64_t>(blockIdx.y) * kOddWarps + threadIdx.x / 32;
  const int64_t row = blockIdx.x;
  if (column >= out) return;
  float sum = 0;
  for (int64_t i = warp_lane; i < in; i += 32) {
    sum += load_float(w[column * in + i]) * load_float(x[row * in + i]);
  }
  sum = warp_sum(sum);
  if (warp_lane != 0) return;
  if (bias != nullptr) sum += bias[column];
  float* to = y + row * stride + column;
  *to = add ? *to + sum : sum;
}

/// Columns [first, out) of any product.
void multiply_odd(const Projection& projection, ConstTensorView x, int64_t first, bool add,
                  Stream& stream) {
  const int64_t in = x.shape()[1];
  const int64_t out = projection.w.shape()[0];
  const dim3 grid(static_cast<unsigned>(x.shape()[0]),
                  static_cast<unsigned>(ceil_div(out - first, kOddWarps)));
  const float* bias = projection.bias.empty() ? nullptr : projection.bias.as<float>() + first;
  with_type(projection.w.dtype(), [&]<class T>(T*) {
    with_type(x.dtype(), [&]<class X>(X*) {
      odd_rows<T, X><<<grid, 32 * kOddWarps, 0, native(stream)>>>(
          projection.y.as<float>() + first, out, reinterpret_cast<const X*>(x.data()),
          reinterpret_cast<const T*>(projection.w.data()) + first * in, bias, in, out - first, add);
    });
  });
  check_launch("linear");
}

/// Offsets in a few rows of x shorter than this are ints.
constexpr int64_t kLongest = int64_t{1} << 28;

/// Whether rows can be read in chunks; any number of outputs: vocabularies are odd.
bool is_regular(const Projection& projection, ConstTensorView x) {
  const int64_t chunk = projection.w.dtype() == DType::kF32 ? 4 : 8;
  return x.shape()[1] % chunk == 0 && x.shape()[1] < kLongest &&
         is_aligned(projection.w.data(), 16) && is_aligned(x.data(), 16) &&
         is_aligned(projection.y.data(), 16) &&
         (projection.bias.empty() || is_aligned(projection.bias.data(), 16));
}

/// Whether all projections can be multiplied with x together.
bool are_alike(std::span<const Projection> projections, ConstTensorView x) {
  return std::all_of(projections.begin(), projections.end(), [&](const Projection& projection) {
    return !projection.w.is_quantized() && is_regular(projection, x) &&
           projection.w.dtype() == projections[0].w.dtype() && !projection.y.empty();
  });
}

/// A few rows of halves as floats.
ConstTensorView widened(ConstTensorView x, Stream& stream) {
  if (x.dtype() == DType::kF32) return x;
  std::byte* wide =
      stream.queue().scratch(kGemmOperand, static_cast<size_t>(x.elements()) * sizeof(float));
  const TensorView result(wide, DType::kF32, x.shape(), x.device());
  cuda::convert(result, x, stream);
  return result;
}

/// x as the tensor cores take it: both operands in the weights' format.
const void* operand_of(ConstTensorView x, DType dtype, Stream& stream) {
  if (dtype == x.dtype()) return x.data();
  std::byte* rounded =
      stream.queue().scratch(kGemmOperand, static_cast<size_t>(x.elements()) * dtype_bytes(dtype));
  cuda::convert(TensorView(rounded, dtype, x.shape(), x.device()), x, stream);
  return rounded;
}

/// Results of an odd width are made several times slower: the columns beyond a multiple of this are
/// made apart.
constexpr int64_t kEvenColumns = 16;

/// A product of many regular rows; `operand` is x in the weights' format.
void multiply_many(const Projection& projection, ConstTensorView x, const void* operand, bool add,
                   Stream& stream) {
  const ConstTensorView w = projection.w.plain();
  const int64_t rows = x.shape()[0];
  const int64_t in = x.shape()[1];
  const int64_t out = w.shape()[0];
  const float* bias = projection.bias.empty() ? nullptr : projection.bias.as<float>();
  const int64_t even = add ? out : out / kEvenColumns * kEvenColumns;
  auto* result = projection.y.as<float>();
  if (even == 0 || even == out) {
    multiply_by_library({w.dtype(), DType::kF32, rows, in, out, bias != nullptr, add},
                        {result, operand, w.data(), bias}, stream);
    return;
  }
  const auto row_bytes = static_cast<size_t>(even) * sizeof(float);
  std::byte* even_part = stream.queue().scratch(kGemmResult, static_cast<size_t>(rows) * row_bytes);
  multiply_by_library({w.dtype(), DType::kF32, rows, in, even, bias != nullptr, add},
                      {even_part, operand, w.data(), bias}, stream);
  check(cudaMemcpy2DAsync(result, static_cast<size_t>(out) * sizeof(float), even_part, row_bytes,
                          row_bytes, static_cast<size_t>(rows), cudaMemcpyDeviceToDevice,
                          native(stream)),
        "linear");
  multiply_odd(projection, x, even, false, stream);
}

/// How far `second` lies behind `first`, if the library can multiply both at once: keys and values,
/// whose products alone are too small for a large GPU.
std::optional<ProductStrides> strides_of(const Projection& first, const Projection& second) {
  constexpr std::ptrdiff_t kApart = 128;  // bytes, of which all are multiples
  if (first.w.shape() != second.w.shape() || first.bias.empty() != second.bias.empty() ||
      first.w.shape()[0] % kEvenColumns != 0) {
    return std::nullopt;
  }
  const auto apart = [](ConstTensorView a, ConstTensorView b) { return b.data() - a.data(); };
  const std::ptrdiff_t w = apart(first.w.plain(), second.w.plain());
  const std::ptrdiff_t y = apart(first.y, second.y);
  const std::ptrdiff_t bias = first.bias.empty() ? 0 : apart(first.bias, second.bias);
  // Products of one bias have no distance between theirs.
  if (w <= 0 || y <= 0 || bias < 0 || w % kApart != 0 || y % kApart != 0 || bias % kApart != 0) {
    return std::nullopt;
  }
  const auto of_floats = static_cast<std::ptrdiff_t>(sizeof(float));
  return ProductStrides{w / static_cast<std::ptrdiff_t>(dtype_bytes(first.w.dtype())),
                        y / of_floats, bias / of_floats};
}

/// Whether a product of `rows` rows has tiles of 128 x 256 for half of a GPU at most. Several of
/// them are faster in one call, larger ones are not (LLaVA-1.5-7B's of 640 rows took longer).
bool is_small(const Projection& projection, int64_t rows, Stream& stream) {
  const int64_t tiles = ceil_div(rows, 128) * ceil_div(projection.w.shape()[0], 256);
  return 2 * tiles <= stream.queue().multiprocessors();
}

/// How many of the first projections lie at equal distances.
size_t count_even(std::span<const Projection> projections) {
  const auto strides = [&](size_t i) { return strides_of(projections[i], projections[i + 1]); };
  size_t count = 1;
  while (count < projections.size() && strides(count - 1) && strides(count - 1) == strides(0)) {
    ++count;
  }
  return count;
}

/// Products of many regular rows that lie so, of which there are two or more. Returns false, having
/// done nothing, if the library does not multiply them at once.
bool multiply_even(std::span<const Projection> projections, ConstTensorView x, const void* operand,
                   Stream& stream) {
  const Projection& first = projections[0];
  const float* bias = first.bias.empty() ? nullptr : first.bias.as<float>();
  return multiply_by_library(
      {first.w.dtype(), DType::kF32, x.shape()[0], x.shape()[1], first.w.shape()[0],
       bias != nullptr, /*add=*/false, /*gelu=*/false, static_cast<int>(projections.size())},
      {first.y.as<float>(), operand, first.w.data(), bias, *strides_of(first, projections[1])},
      stream);
}

// ------------------------------------------------------------------------------------------ tails

constexpr int kTailThreads = 256;

/// What remains to be done with a product that has its bias.
struct TailWork {
  const float* scale;  // (columns,) or null
  int64_t columns;     // of y
  int64_t count;       // of y's elements
  Activation activation;
  bool activates, gated, add;
};

/// Elements of y from i on as their product leaves them: activated, or gated.
template <int kWidth, class P>
__device__ __forceinline__ void load_product(const P* p, int64_t i, const TailWork& work,
                                             float (&values)[kWidth]) {
  if (work.gated) {
    float pairs[2][kWidth];
    load_group(p + 2 * i, pairs[0]);
    load_group(p + 2 * i + kWidth, pairs[1]);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      const float gate = pairs[2 * j / kWidth][2 * j % kWidth];
      values[j] =
          activated(work.activation, gate) * pairs[(2 * j + 1) / kWidth][(2 * j + 1) % kWidth];
    }
    return;
  }
  load_group(p + i, values);
  if (!work.activates) return;
#pragma unroll
  for (float& value : values) value = activated(work.activation, value);
}

/// y = tail(p), kWidth elements of y at a time.
template <class P, class Y, int kWidth>
__global__ void __launch_bounds__(kTailThreads) finish_rows(Y* y, const P* p, TailWork work) {
  let_next_start();
  wait_for_earlier();
  const int64_t step = static_cast<int64_t>(gridDim.x) * kTailThreads * kWidth;
  for (int64_t i = (static_cast<int64_t>(blockIdx.x) * kTailThreads + threadIdx.x) * kWidth;
       i < work.count; i += step) {
    float values[kWidth];
    load_product(p, i, work, values);
    if (work.scale != nullptr) {
      float scales[kWidth];
      load_group(work.scale + i % work.columns, scales);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) values[j] *= scales[j];
    }
    if (work.add) {
      float before[kWidth];
      load_group(y + i, before);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) values[j] += before[j];
    }
    store_group(y + i, values);
  }
}

TailWork work_of(TensorView y, const LinearTail& tail) {
  TailWork work{};
  work.scale = tail.scale.empty() ? nullptr : tail.scale.as<float>();
  work.columns = y.shape()[1];
  work.count = y.elements();
  work.activation = tail.activation.value_or(Activation::kSilu);
  work.activates = tail.activation.has_value();
  work.gated = tail.gated;
  work.add = tail.add;
  return work;
}

void finish(TensorView y, const void* product, DType made, const LinearTail& tail, Stream& stream) {
  const bool activates_alone =
      tail.activation.has_value() && tail.scale.empty() && !tail.gated && !tail.add;
  if (activates_alone && made == y.dtype() && made != DType::kF32 && y.elements() % 8 == 0 &&
      is_aligned(product, 16) && is_aligned(y.data(), 16)) {
    const ConstTensorView x(product, made, y.shape(), y.device());
    return cuda::activate_halves(y, x, *tail.activation, stream);
  }
  const TailWork work = work_of(y, tail);
  const bool grouped = work.columns % 4 == 0 && is_aligned(product, 16) &&
                       is_aligned(y.data(), 16) && is_aligned(work.scale, 16);
  const int64_t blocks =
      std::min<int64_t>(ceil_div(work.count, kTailThreads * (grouped ? 4 : 1)), 8192);
  with_type(made, [&]<class P>(P*) {
    with_type(y.dtype(), [&]<class Y>(Y*) {
      launch_early("linear", grouped ? finish_rows<P, Y, 4> : finish_rows<P, Y, 1>,
                   static_cast<unsigned>(blocks), kTailThreads, stream,
                   reinterpret_cast<Y*>(y.data()), static_cast<const P*>(product), work);
    });
  });
}

/// The bias in the format of what is made.
const void* bias_of(ConstTensorView bias, DType made, Stream& stream) {
  if (bias.empty()) return nullptr;
  if (made == DType::kF32) return bias.data();
  std::byte* rounded =
      stream.queue().scratch(kGemmBias, static_cast<size_t>(bias.elements()) * dtype_bytes(made));
  cuda::convert(TensorView(rounded, made, bias.shape(), bias.device()), bias, stream);
  return rounded;
}

/// Whether the library's products of halves and finish_rows take it as it is.
bool is_even(TensorView y, ConstTensorView x, ConstTensorView w, const LinearTail& tail) {
  return w.dtype() != DType::kF32 && x.shape()[0] > kFewRows && w.shape()[1] % 8 == 0 &&
         w.shape()[0] % kEvenColumns == 0 && y.shape()[1] % 4 == 0 && is_aligned(w.data(), 16) &&
         is_aligned(x.data(), 16) && is_aligned(y.data(), 16) &&
         (tail.scale.empty() || is_aligned(tail.scale.data(), 16));
}

/// y = tail(x w^T) in two passes, of any shape.
void multiply_apart(TensorView y, ConstTensorView x, const Weight& w, const LinearTail& tail,
                    Stream& stream) {
  const Shape shape{x.shape()[0], w.shape()[0]};
  std::byte* product =
      stream.queue().scratch(kTailProduct, static_cast<size_t>(shape.elements()) * sizeof(float));
  const TensorView made(product, DType::kF32, shape, y.device());
  cuda::linear(made, x, w, tail.bias, false, stream);
  finish(y, product, DType::kF32, tail, stream);
}

/// Makes y = tail(operand w^T) if warpgroup_product.cu does such.
bool multiplied_by_warpgroups(TensorView y, const void* operand, ConstTensorView w,
                              const LinearTail& tail, Stream& stream) {
  const bool gelu = tail.activation == Activation::kGelu;
  if (y.dtype() != w.dtype() || !tail.scale.empty() || tail.gated || tail.add ||
      (tail.activation && !gelu)) {
    return false;
  }
  if constexpr (KVLM_WARPGROUPS != 0) {
    const float* bias = tail.bias.empty() ? nullptr : tail.bias.as<float>();
    const HalfProduct product{y, operand, w, bias, gelu ? HalfTail::kGelu : HalfTail::kNone};
    if (fits_warpgroups(product)) {
      multiply_by_warpgroups(product, stream);
      return true;
    }
  }
  return false;
}

/// Fewer rows of a gated product are faster in the library's kernels and a pass behind them.
constexpr int64_t kManyGatedRows = 32;

/// y = SiLU(gate) * up, as warpgroup_product.cu makes it if it fits.
HalfProduct gated_product(TensorView y, const Projection& gate, const Projection& up) {
  const auto floats = [](ConstTensorView of) { return of.empty() ? nullptr : of.as<float>(); };
  return {y,
          nullptr,
          gate.w.plain(),
          floats(gate.bias),
          HalfTail::kGated,
          up.w.plain(),
          floats(up.bias)};
}

/// Fills `y` with numbers: zeros would run faster.
void fill_with_numbers(TensorView y, Stream& stream) {
  Tensor numbers(DType::kF32, y.shape());
  uint32_t state = 1;
  for (int64_t i = 0; i < y.elements(); ++i) {
    state = state * 1664525u + 1013904223u;
    numbers.as<float>()[i] = static_cast<float>(static_cast<int32_t>(state)) * 0x1p-31f;
  }
  kvlm::copy(y, numbers, stream);
}

}  // namespace

namespace {

bool all_quantized(std::span<const Projection> projections) {
  return !projections.empty() && std::ranges::all_of(projections, [](const Projection& projection) {
    return projection.w.is_quantized();
  });
}

/// A projection with widened weights, which have no memory yet.
Projection as_plain(const Projection& quantized) {
  const Weight& w = quantized.w;
  return {quantized.y, ConstTensorView(nullptr, w.dtype(), w.shape(), w.device()), quantized.bias};
}

/// Quantized weights as floats, in scratch memory that the next call takes.
std::vector<Weight> widened_weights(std::initializer_list<Weight> quantized, Stream& stream) {
  const auto bytes_of = [](const Weight& w) {
    return static_cast<size_t>(w.shape()[0] * w.shape()[1]) * dtype_bytes(w.dtype());
  };
  constexpr size_t kAlignment = 256;
  size_t bytes = 0;
  for (const Weight& w : quantized) bytes += bytes_of(w) + kAlignment;
  std::byte* to = stream.queue().scratch(kWidenedWeights, bytes);
  std::vector<Weight> plain;
  for (const Weight& w : quantized) {
    const TensorView view(to, w.dtype(), w.shape(), w.device());
    widen_weights(view, w.quantized(), stream);
    plain.emplace_back(ConstTensorView(view));
    to += static_cast<size_t>(ceil_div(static_cast<int64_t>(bytes_of(w)), kAlignment)) * kAlignment;
  }
  return plain;
}

/// Whether gate and up can be multiplied in one launch.
bool are_of_one_format(const Projection& gate, const Projection& up) {
  return gate.w.is_quantized() && up.w.is_quantized() &&
         gate.w.quantized().format == up.w.quantized().format;
}

/// Products with quantized matrices, which become floats one after the other where x has many rows.
void multiply_quantized(std::span<const Projection> projections, ConstTensorView x, bool add,
                        Stream& stream) {
  for (std::span<const Projection> left = projections; !left.empty();) {
    const QuantizedFormat& first = left[0].w.quantized().format;
    size_t count = 1;
    while (count < std::min<size_t>(left.size(), kMostProjections) &&
           is_launched_with(first, left[count].w.quantized().format)) {
      ++count;
    }
    const void* operand = operand_of(x, first.activations, stream);
    if (x.shape()[0] <= kMostQuantized) {
      multiply_codes(left.first(count), operand, x.shape(), add, stream);
    } else {
      for (const Projection& one : left.first(count)) {
        if (one.y.empty()) continue;
        const Weight w = widened_weights({one.w}, stream)[0];
        multiply_many({one.y, w, one.bias},
                      ConstTensorView(operand, first.activations, x.shape(), x.device()), operand,
                      add, stream);
      }
    }
    left = left.subspan(count);
  }
}

}  // namespace

double measure_matrix_rate(int size, DType dtype, Stream& stream) {
  const Shape square{size, size};
  const Device device = stream.device();
  Tensor x(dtype, square, device);
  Tensor w(dtype, square, device);
  Tensor y(DType::kF32, square, device);
  fill_with_numbers(y, stream);
  cuda::convert(x, y, stream);
  cuda::convert(w, y, stream);
  const auto run = [&] {
    multiply_by_library({dtype, DType::kF32, size, size, size, false, false},
                        {y.as<float>(), x.view().data(), w.view().data(), nullptr}, stream);
  };
  run();
  stream.synchronize();
  const auto start = std::chrono::steady_clock::now();
  constexpr int kProducts = 5;
  for (int i = 0; i < kProducts; ++i) run();
  stream.synchronize();
  const double seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  const auto edge = static_cast<double>(size);
  return kProducts * 2 * edge * edge * edge / seconds;
}

void linear(TensorView y, ConstTensorView x, const Weight& w, ConstTensorView bias, bool add,
            Stream& stream) {
  const Projection projection{y, w, bias};
  if (w.is_quantized()) return multiply_quantized({&projection, 1}, x, add, stream);
  if (!is_regular(projection, x)) {
    multiply_odd(projection, x, 0, add, stream);
  } else if (x.shape()[0] > kFewRows) {
    multiply_many(projection, x, operand_of(x, w.dtype(), stream), add, stream);
  } else {
    multiply_few({&projection, 1}, widened(x, stream), {.add = add}, stream);
  }
}

void linear(TensorView y, ConstTensorView x, const Weight& weight, const LinearTail& tail,
            Stream& stream) {
  const int64_t rows = x.shape()[0];
  const int64_t out = weight.shape()[0];
  if (weight.is_quantized() || !is_even(y, x, weight.plain(), tail)) {
    return multiply_apart(y, x, weight, tail, stream);
  }
  const ConstTensorView w = weight.plain();
  const void* operand = operand_of(x, w.dtype(), stream);
  if (multiplied_by_warpgroups(y, operand, w, tail, stream)) return;
  const bool stored = tail.scale.empty() && !tail.gated;  // at once
  const bool gelu = tail.activation == Activation::kGeluTanh;
  const bool finished = stored && (!tail.activation || (gelu && !tail.add));
  const DType made = finished ? y.dtype() : w.dtype();
  const bool in_place = finished || (stored && !tail.add && made == y.dtype());
  const size_t bytes = static_cast<size_t>(rows * out) * dtype_bytes(made);
  void* product = in_place ? y.data() : stream.queue().scratch(kTailProduct, bytes);
  const void* bias = bias_of(tail.bias, made, stream);
  multiply_by_library({w.dtype(), made, rows, w.shape()[1], out, bias != nullptr,
                       finished && tail.add, finished && gelu},
                      {product, operand, w.data(), bias}, stream);
  if (!finished) finish(y, product, made, tail, stream);
}

void linears(std::span<const Projection> projections, ConstTensorView x, Stream& stream) {
  const bool few = x.shape()[0] <= kFewRows;
  if (all_quantized(projections)) {
    multiply_quantized(projections, x, false, stream);
  } else if (projections.empty() || !are_alike(projections, x) ||
             (few && projections.size() > kMostProjections)) {
    for (const Projection& one : projections) {
      if (!one.y.empty()) cuda::linear(one.y, x, one.w, one.bias, false, stream);
    }
  } else if (few) {
    multiply_few(projections, widened(x, stream), {}, stream);
  } else {
    const void* operand = operand_of(x, projections[0].w.dtype(), stream);
    for (std::span<const Projection> left = projections; !left.empty();) {
      const size_t count = is_small(left[0], x.shape()[0], stream) ? count_even(left) : 1;
      const bool together = count > 1 && multiply_even(left.first(count), x, operand, stream);
      if (!together) multiply_many(left[0], x, operand, false, stream);
      left = left.subspan(together ? count : 1);
    }
  }
}

DType operand_dtype(const Weight& w, int64_t rows) {
  if (w.is_quantized()) return w.dtype();
  // Columns beyond a multiple of kEvenColumns are made of x as it comes.
  const bool even = w.shape()[0] % kEvenColumns == 0 && w.shape()[1] % 8 == 0;
  return rows > kFewRows && even && is_aligned(w.data(), 16) ? w.dtype() : DType::kF32;
}

bool gates_alone(const Projection& gate, const Projection& up, Activation activation, DType dtype,
                 int64_t rows) {
  if (gate.w.is_quantized() && up.w.is_quantized() && rows > kMostQuantized) {
    return cuda::gates_alone(as_plain(gate), as_plain(up), activation, dtype, rows);
  }
  if (gate.w.is_quantized() || up.w.is_quantized()) return are_of_one_format(gate, up);
  if (activation != Activation::kSilu || rows < kManyGatedRows || dtype != gate.w.dtype() ||
      dtype != up.w.dtype()) {
    return false;
  }
  return KVLM_WARPGROUPS != 0 && fits_warpgroups(gated_product({}, gate, up));
}

void gated_linears(TensorView y, const Projection& gate, const Projection& up,
                   Activation activation, ConstTensorView x, Stream& stream) {
  const Projection both[] = {gate, up};
  if (all_quantized(both) && x.shape()[0] > kMostQuantized) {
    const std::vector<Weight> plain = widened_weights({gate.w, up.w}, stream);
    const Projection plain_gate{gate.y, plain[0], gate.bias};
    const Projection plain_up{up.y, plain[1], up.bias};
    return cuda::gated_linears(y, plain_gate, plain_up, activation, x, stream);
  }
  if (gate.y.empty() && gate.w.is_quantized()) {
    return multiply_gate(y, gate, up, activation, operand_of(x, gate.w.dtype(), stream),
                         x.shape()[0], stream);
  }
  if (x.shape()[0] <= kFewRows && y.dtype() == DType::kF32 && are_alike(both, x)) {
    return multiply_few(both, widened(x, stream),
                        {.gated = y.as<float>(), .activation = activation}, stream);
  }
  if constexpr (KVLM_WARPGROUPS != 0) {
    HalfProduct product = gated_product(y, gate, up);
    if (cuda::gates_alone(gate, up, activation, y.dtype(), x.shape()[0]) &&
        is_aligned(y.data(), 16) && is_aligned(x.data(), 16)) {
      product.x = operand_of(x, y.dtype(), stream);
      return multiply_by_warpgroups(product, stream);
    }
  }
  if (gate.y.empty()) {
    throw Error(ErrorCode::kInvalidArgument,
                "gated_linears: x or y is not aligned to 16 bytes, which rows without a workspace "
                "need; align it or pass a workspace for gate and up");
  }
  cuda::linears(both, x, stream);
  cuda::activate_gate(y, gate.y, up.y, activation, stream);
}

}  // namespace kvlm::cuda
