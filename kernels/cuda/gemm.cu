#include <cublasLt.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <mutex>
#include <string>
#include <tuple>

#include "kernels/base/error.h"
#include "kernels/cuda/elementwise.h"
#include "kernels/cuda/gemm.h"
#include "kernels/cuda/launch.cuh"
#include "kernels/elementwise.h"

namespace kvlm::cuda {

namespace {

void check_blas(cublasStatus_t status, std::string_view what) {
  if (status == CUBLAS_STATUS_SUCCESS) return;
  throw Error(status == CUBLAS_STATUS_ALLOC_FAILED ? ErrorCode::kOutOfMemory : ErrorCode::kDevice,
              std::string(what) + ": cuBLASLt reports \"" + cublasLtGetStatusString(status) +
                  "\"; start again, with a smaller batch if the GPU's memory is full");
}

constexpr size_t kWorkspaceBytes = size_t{32} << 20;

// ------------------------------------------------------------------------------- matrix products

cudaDataType_t blas_type(DType dtype) {
  if (dtype == DType::kF16) return CUDA_R_16F;
  return dtype == DType::kBF16 ? CUDA_R_16BF : CUDA_R_32F;
}

/// A product of one shape, planned once: y (rows, out) f32 = x (rows, in) w^T (out, in) + bias,
/// which column-major BLAS sees as y^T = w x^T.
class Product {
 public:
  Product(cublasLtHandle_t handle, DType dtype, int64_t rows, int64_t in, int64_t out, bool bias,
          bool add)
      : handle_(handle), beta_(add ? 1.0f : 0.0f) {
    const cudaDataType_t type = blas_type(dtype);
    check_blas(cublasLtMatmulDescCreate(&operation_, CUBLAS_COMPUTE_32F, CUDA_R_32F), "linear");
    set(CUBLASLT_MATMUL_DESC_TRANSA, CUBLAS_OP_T);
    set(CUBLASLT_MATMUL_DESC_TRANSB, CUBLAS_OP_N);
    if (bias) {
      set(CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_EPILOGUE_BIAS);
      set(CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, CUDA_R_32F);
    }
    const auto m = static_cast<uint64_t>(out);
    const auto n = static_cast<uint64_t>(rows);
    const auto k = static_cast<uint64_t>(in);
    check_blas(cublasLtMatrixLayoutCreate(&w_, type, k, m, in), "linear");
    check_blas(cublasLtMatrixLayoutCreate(&x_, type, k, n, in), "linear");
    check_blas(cublasLtMatrixLayoutCreate(&y_, CUDA_R_32F, m, n, out), "linear");
    cublasLtMatmulPreference_t preference = nullptr;
    check_blas(cublasLtMatmulPreferenceCreate(&preference), "linear");
    const size_t workspace = kWorkspaceBytes;
    cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                                         &workspace, sizeof workspace);
    int found = 0;
    const cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(handle, operation_, w_, x_, y_, y_,
                                                                 preference, 1, &plan_, &found);
    cublasLtMatmulPreferenceDestroy(preference);
    check_blas(status, "linear");
    if (found == 0) check_blas(CUBLAS_STATUS_NOT_SUPPORTED, "linear");
  }
  ~Product() {
    cublasLtMatrixLayoutDestroy(y_);
    cublasLtMatrixLayoutDestroy(x_);
    cublasLtMatrixLayoutDestroy(w_);
    cublasLtMatmulDescDestroy(operation_);
  }
  Product(const Product&) = delete;
  Product& operator=(const Product&) = delete;

  void run(float* y, const void* x, const void* w, const float* bias, std::byte* workspace,
           cudaStream_t stream) {
    if (bias != nullptr) set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, bias);
    constexpr float kAlpha = 1;
    check_blas(cublasLtMatmul(handle_, operation_, &kAlpha, w, w_, x, x_, &beta_, y, y_, y, y_,
                              &plan_.algo, workspace, kWorkspaceBytes, stream),
               "linear");
  }

 private:
  template <class T>
  void set(cublasLtMatmulDescAttributes_t attribute, T value) {
    check_blas(cublasLtMatmulDescSetAttribute(operation_, attribute, &value, sizeof value),
               "linear");
  }

  cublasLtHandle_t handle_;
  float beta_;
  cublasLtMatmulDesc_t operation_ = nullptr;
  cublasLtMatrixLayout_t w_ = nullptr;
  cublasLtMatrixLayout_t x_ = nullptr;
  cublasLtMatrixLayout_t y_ = nullptr;
  cublasLtMatmulHeuristicResult_t plan_{};
};

/// The plans of one GPU, for as long as the program runs.
class Products {
 public:
  static Products& of(int device) {
    static std::mutex mutex;
    static std::map<int, Products> all;
    const std::scoped_lock lock(mutex);
    return all[device];
  }

  Product& get(DType dtype, int64_t rows, int64_t in, int64_t out, bool bias, bool add) {
    if (handle_ == nullptr) check_blas(cublasLtCreate(&handle_), "cublasLtCreate");
    // Prompts come in every length: old plans go before there are too many.
    if (plans_.size() > 4096) plans_.clear();
    return plans_
        .try_emplace({dtype, rows, in, out, bias, add}, handle_, dtype, rows, in, out, bias, add)
        .first->second;
  }

 private:
  using Key = std::tuple<DType, int64_t, int64_t, int64_t, bool, bool>;
  cublasLtHandle_t handle_ = nullptr;
  std::map<Key, Product> plans_;
};

// ------------------------------------------------------------------------------------ a few rows

constexpr int kWarps = 8;

template <class T>
struct Chunk;
/// 16 bytes of weights as floats.
template <>
struct Chunk<float> {
  static constexpr int kSize = 4;
  static __device__ void load(const float* from, float (&to)[4]) {
    const float4 x = __ldcs(reinterpret_cast<const float4*>(from));
    to[0] = x.x, to[1] = x.y, to[2] = x.z, to[3] = x.w;
  }
};
template <class T>
struct HalfChunk {
  static constexpr int kSize = 8;
  static __device__ void load(const T* from, float (&to)[8]) {
    const uint4 x = __ldcs(reinterpret_cast<const uint4*>(from));
    T halves[8];
    *reinterpret_cast<uint4*>(halves) = x;
#pragma unroll
    for (int i = 0; i < 8; ++i) to[i] = load_float(halves[i]);
  }
};
template <>
struct Chunk<__half> : HalfChunk<__half> {};
template <>
struct Chunk<__nv_bfloat16> : HalfChunk<__nv_bfloat16> {};

constexpr int kMostParts = 3;

/// Products of the same x, their outputs side by side.
template <class T>
struct FewParts {
  const T* w[kMostParts];
  float* y[kMostParts];
  const float* bias[kMostParts];
  int64_t out[kMostParts];
};

/// One warp an output: it reads its row of w once for all kRows rows of x.
template <class T, int kRows>
__global__ void __launch_bounds__(32 * kWarps)
    few_rows(FewParts<T> parts, const float* x, int64_t in, bool add) {
  constexpr int kSize = Chunk<T>::kSize;
  const int lane = static_cast<int>(threadIdx.x % 32);
  int64_t column = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  int at = 0;
  while (at + 1 < kMostParts && column >= parts.out[at]) column -= parts.out[at++];
  const int64_t out = parts.out[at];
  if (column >= out) return;
  const T* weights = parts.w[at] + column * in;
  float* y = parts.y[at];
  const float* bias = parts.bias[at];
  float sums[kRows] = {};
  int64_t i = lane * kSize;
  constexpr int kUnroll = kRows <= 4 ? 4 : 2;
  for (; i + (kUnroll - 1) * 32 * kSize < in / kSize * kSize; i += kUnroll * 32 * kSize) {
    float values[kUnroll][kSize];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) Chunk<T>::load(weights + i + u * 32 * kSize, values[u]);
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
#pragma unroll
      for (int row = 0; row < kRows; ++row) {
        const float* from = x + row * in + i + u * 32 * kSize;
#pragma unroll
        for (int j = 0; j < kSize; j += 4) {
          const float4 part = *reinterpret_cast<const float4*>(from + j);
          sums[row] += values[u][j] * part.x + values[u][j + 1] * part.y +
                       values[u][j + 2] * part.z + values[u][j + 3] * part.w;
        }
      }
    }
  }
  for (; i < in; i += 32 * kSize) {
    float values[kSize];
    Chunk<T>::load(weights + i, values);
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
#pragma unroll
      for (int j = 0; j < kSize; ++j) sums[row] += values[j] * x[row * in + i + j];
    }
  }
#pragma unroll
  for (int row = 0; row < kRows; ++row) {
    float sum = warp_sum(sums[row]);
    if (lane == 0) {
      if (bias != nullptr) sum += bias[column];
      float* to = y + row * out + column;
      *to = add ? *to + sum : sum;
    }
  }
}

/// Any alignment and width: one warp an output. Rows of y begin `stride` floats apart.
template <class T>
__global__ void __launch_bounds__(32 * kWarps)
    odd_rows(float* y, int64_t stride, const float* x, const T* w, const float* bias, int64_t in,
             int64_t out, bool add) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  const int64_t column = static_cast<int64_t>(blockIdx.y) * kWarps + threadIdx.x / 32;
  const int64_t row = blockIdx.x;
  if (column >= out) return;
  float sum = 0;
  for (int64_t i = lane; i < in; i += 32) sum += load_float(w[column * in + i]) * x[row * in + i];
  sum = warp_sum(sum);
  if (lane != 0) return;
  if (bias != nullptr) sum += bias[column];
  float* to = y + row * stride + column;
  *to = add ? *to + sum : sum;
}

template <class T>
void launch_odd(float* y, int64_t stride, const float* x, const T* w, const float* bias,
                int64_t rows, int64_t in, int64_t out, bool add, Stream& stream) {
  const dim3 grid(static_cast<unsigned>(rows), static_cast<unsigned>(ceil_div(out, kWarps)));
  odd_rows<T><<<grid, 32 * kWarps, 0, native(stream)>>>(y, stride, x, w, bias, in, out, add);
}

template <class T, int kRows>
void launch_few(FewParts<T>& parts, const float* x, int64_t in, bool add, Stream& stream) {
  int64_t out = 0;
  for (const int64_t part : parts.out) out += part;
  few_rows<T, kRows>
      <<<static_cast<unsigned>(ceil_div(out, kWarps)), 32 * kWarps, 0, native(stream)>>>(parts, x,
                                                                                         in, add);
  for (int i = 0; i < kMostParts; ++i) {
    if (parts.out[i] > 0) parts.y[i] += kRows * parts.out[i];
  }
}

/// Above this many rows of half-precision weights the tensor cores are faster.
constexpr int64_t kFewRows = 4;

template <class T>
void multiply_few(FewParts<T> parts, const float* x, int64_t rows, int64_t in, bool add,
                  Stream& stream) {
  for (int64_t row = 0; row < rows;) {
    const float* from = x + row * in;
    const int64_t left = rows - row;
    if (left >= 4) {
      launch_few<T, 4>(parts, from, in, add, stream);
      row += 4;
    } else if (left >= 2) {
      launch_few<T, 2>(parts, from, in, add, stream);
      row += 2;
    } else {
      launch_few<T, 1>(parts, from, in, add, stream);
      row += 1;
    }
  }
}

bool aligned(const void* p, size_t bytes) { return reinterpret_cast<uintptr_t>(p) % bytes == 0; }

/// Whether rows can be read in chunks; any number of outputs: vocabularies are odd.
bool is_regular(const LinearPart& part, ConstTensorView x) {
  const int64_t chunk = part.w.dtype() == DType::kF32 ? 4 : 8;
  return x.shape()[1] % chunk == 0 && aligned(part.w.data(), 16) && aligned(x.data(), 16) &&
         aligned(part.y.data(), 16) && (part.bias.empty() || aligned(part.bias.data(), 16));
}

template <class T>
FewParts<T> few_parts(std::span<const LinearPart> parts) {
  FewParts<T> made{};
  for (size_t i = 0; i < parts.size(); ++i) {
    made.w[i] = reinterpret_cast<const T*>(parts[i].w.data());
    made.y[i] = parts[i].y.as<float>();
    made.bias[i] = parts[i].bias.empty() ? nullptr : parts[i].bias.as<float>();
    made.out[i] = parts[i].w.shape()[0];
  }
  return made;
}

/// x as the tensor cores take it: both operands in the weights' format.
const void* operand_of(ConstTensorView x, DType dtype, Stream& stream) {
  if (dtype == DType::kF32) return x.data();
  std::byte* rounded = stream.queue().scratch(kGemmOperand, static_cast<size_t>(x.elements()) * 2);
  cuda::convert(TensorView(rounded, dtype, x.shape(), x.device()), x, stream);
  return rounded;
}

/// A product of many regular rows.
void multiply_many(const LinearPart& part, ConstTensorView x, const void* operand, bool add,
                   Stream& stream) {
  const ConstTensorView w = part.w;
  const int64_t rows = x.shape()[0];
  const int64_t in = x.shape()[1];
  const int64_t out = w.shape()[0];
  const float* bias = part.bias.empty() ? nullptr : part.bias.as<float>();
  std::byte* workspace = stream.queue().scratch(kGemmWorkspace, kWorkspaceBytes);
  // Results of an odd width are made several times slower: the last few columns are made apart.
  constexpr int64_t kWidth = 16;
  const int64_t even = add ? out : out / kWidth * kWidth;
  auto* result = part.y.as<float>();
  if (even == 0 || even == out) {
    Products::of(stream.device().index)
        .get(w.dtype(), rows, in, out, bias != nullptr, add)
        .run(result, operand, w.data(), bias, workspace, native(stream));
    return;
  }
  const auto row_bytes = static_cast<size_t>(even) * sizeof(float);
  std::byte* even_part = stream.queue().scratch(kGemmResult, static_cast<size_t>(rows) * row_bytes);
  Products::of(stream.device().index)
      .get(w.dtype(), rows, in, even, bias != nullptr, add)
      .run(reinterpret_cast<float*>(even_part), operand, w.data(), bias, workspace, native(stream));
  check(cudaMemcpy2DAsync(result, static_cast<size_t>(out) * sizeof(float), even_part, row_bytes,
                          row_bytes, static_cast<size_t>(rows), cudaMemcpyDeviceToDevice,
                          native(stream)),
        "linear");
  with_type(w.dtype(), [&](auto* type) {
    using T = typename TypeOf<decltype(type)>::Type;
    const T* rest = reinterpret_cast<const T*>(w.data()) + even * in;
    launch_odd(result + even, out, x.as<float>(), rest, bias == nullptr ? nullptr : bias + even,
               rows, in, out - even, false, stream);
  });
}

}  // namespace

double measure_matrix_rate(int size, DType dtype, Stream& stream) {
  const Shape square{size, size};
  const Device device = stream.device();
  Tensor x(dtype, square, device);
  Tensor w(dtype, square, device);
  Tensor y(DType::kF32, square, device);
  Tensor numbers(DType::kF32, square);
  uint32_t state = 1;  // zeros would run faster than numbers do
  for (int64_t i = 0; i < numbers.shape().elements(); ++i) {
    state = state * 1664525u + 1013904223u;
    numbers.as<float>()[i] = static_cast<float>(static_cast<int32_t>(state)) * 0x1p-31f;
  }
  kvlm::copy(y, numbers, stream);
  cuda::convert(x, y, stream);
  cuda::convert(w, y, stream);
  std::byte* workspace = stream.queue().scratch(kGemmWorkspace, kWorkspaceBytes);
  Product& product = Products::of(device.index).get(dtype, size, size, size, false, false);
  const auto run = [&] {
    product.run(y.as<float>(), x.view().data(), w.view().data(), nullptr, workspace,
                native(stream));
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

void linear(TensorView y, ConstTensorView x, ConstTensorView w, ConstTensorView bias, bool add,
            Stream& stream) {
  const LinearPart part{y, w, bias};
  const int64_t rows = x.shape()[0];
  const int64_t in = x.shape()[1];
  const bool regular = is_regular(part, x);
  if (regular && rows > kFewRows) {
    multiply_many(part, x, operand_of(x, w.dtype(), stream), add, stream);
  } else {
    with_type(w.dtype(), [&](auto* type) {
      using T = typename TypeOf<decltype(type)>::Type;
      const FewParts<T> parts = few_parts<T>({&part, 1});
      if (regular) {
        multiply_few(parts, x.as<float>(), rows, in, add, stream);
      } else {
        launch_odd(parts.y[0], parts.out[0], x.as<float>(), parts.w[0], parts.bias[0], rows, in,
                   parts.out[0], add, stream);
      }
    });
  }
  check_launch("linear");
}

void linears(std::span<const LinearPart> parts, ConstTensorView x, Stream& stream) {
  const int64_t rows = x.shape()[0];
  const DType dtype = parts.empty() ? DType::kF32 : parts[0].w.dtype();
  const bool alike = std::all_of(parts.begin(), parts.end(), [&](const LinearPart& part) {
    return is_regular(part, x) && part.w.dtype() == dtype && !part.y.empty();
  });
  if (!alike || (rows <= kFewRows && parts.size() > kMostParts)) {
    for (const LinearPart& part : parts) {
      if (!part.y.empty()) cuda::linear(part.y, x, part.w, part.bias, false, stream);
    }
    return;
  }
  if (rows > kFewRows) {
    const void* operand = operand_of(x, dtype, stream);
    for (const LinearPart& part : parts) multiply_many(part, x, operand, false, stream);
  } else {
    with_type(dtype, [&](auto* type) {
      using T = typename TypeOf<decltype(type)>::Type;
      multiply_few(few_parts<T>(parts), x.as<float>(), rows, x.shape()[1], false, stream);
    });
  }
  check_launch("linears");
}

}  // namespace kvlm::cuda
