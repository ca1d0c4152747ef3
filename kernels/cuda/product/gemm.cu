#include <algorithm>
#include <chrono>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <tuple>

#include "kernels/base/error.h"
#include "kernels/cuda/device/cublaslt.h"
#include "kernels/cuda/device/launch.cuh"
#include "kernels/cuda/model/activation.cuh"
#include "kernels/cuda/model/activation.h"
#include "kernels/cuda/model/elementwise.h"
#include "kernels/cuda/product/gemm.h"
#include "kernels/cuda/product/warpgroup_product.h"
#include "kernels/elementwise.h"

// Matrix products y = x W^T. Four kernels share them by shape:
//
// - up to 4 rows of x with regular weights: few_rows, where the warps of a block read 16 bytes of
//   weights a thread, each byte once for all rows, and may serve several products of the same x (q,
//   k and v; gate and up);
// - more rows, all in one half format, stored at once or after an exact GELU, and 32 rows or more
//   behind a gate, of weights long enough: warpgroup_product.cu on GPUs of compute capability 9.0;
// - other products of more rows: cuBLASLt on the tensor cores, whose choice for a shape is made
//   once and kept, with x rounded to the weights' type; small products of one shape in one call;
// - any other alignment or width: one warp an output (multiply_odd).
//
// The gate of an MLP is applied by few_rows and warpgroup_product.cu themselves. Every other tail
// (activation, scale, sum) is done by cuBLASLt where it can, else by a pass behind the product.
namespace kvlm::cuda {

namespace {

void check_blas(cublasStatus_t status, std::string_view what) {
  if (status == CUBLAS_STATUS_SUCCESS) return;
  throw Error(status == CUBLAS_STATUS_ALLOC_FAILED ? ErrorCode::kOutOfMemory : ErrorCode::kDevice,
              std::string(what) + ": cuBLASLt reports \"" + cublaslt().status_string(status) +
                  "\"; start again, with a smaller batch if the GPU's memory is full");
}

constexpr size_t kWorkspaceBytes = size_t{32} << 20;

// ------------------------------------------------------------------------------- matrix products

cudaDataType_t blas_type(DType dtype) {
  if (dtype == DType::kF16) return CUDA_R_16F;
  return dtype == DType::kBF16 ? CUDA_R_16BF : CUDA_R_32F;
}

/// What a product is made of, and into.
struct ProductKind {
  DType dtype;  // of x and w
  DType made;   // of y, and of the bias
  int64_t rows, in, out;
  bool bias, add;
  bool gelu = false;  // kGeluTanh of it
  int count = 1;      // products of the same x

  auto key() const { return std::tie(dtype, made, rows, in, out, bias, add, gelu, count); }
  bool operator<(const ProductKind& other) const { return key() < other.key(); }
};

/// How far each of several products lies behind the one before, in elements.
struct ProductStrides {
  int64_t w, y, bias;

  bool operator==(const ProductStrides&) const = default;
};

/// The memory of a call.
struct ProductOperands {
  void* y;
  const void* x;
  const void* w;
  const void* bias;          // or null
  ProductStrides strides{};  // of several products
};

/// A product of one shape, planned once: y (rows, out) = x (rows, in) w^T (out, in) + bias, which
/// column-major BLAS sees as y^T = w x^T.
class Product {
 public:
  Product(cublasLtHandle_t handle, const ProductKind& kind)
      : handle_(handle), beta_(kind.add ? 1.0f : 0.0f), count_(kind.count) {
    const cudaDataType_t type = blas_type(kind.dtype);
    const cudaDataType_t made = blas_type(kind.made);
    check_blas(blas_.desc_create(&operation_, CUBLAS_COMPUTE_32F, CUDA_R_32F), "linear");
    set(CUBLASLT_MATMUL_DESC_TRANSA, CUBLAS_OP_T);
    set(CUBLASLT_MATMUL_DESC_TRANSB, CUBLAS_OP_N);
    if (kind.bias) {
      set(CUBLASLT_MATMUL_DESC_EPILOGUE,
          kind.gelu ? CUBLASLT_EPILOGUE_GELU_BIAS : CUBLASLT_EPILOGUE_BIAS);
      set(CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, made);
    } else if (kind.gelu) {
      set(CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_EPILOGUE_GELU);
    }
    const auto m = static_cast<uint64_t>(kind.out);
    const auto n = static_cast<uint64_t>(kind.rows);
    const auto k = static_cast<uint64_t>(kind.in);
    check_blas(blas_.layout_create(&w_, type, k, m, kind.in), "linear");
    check_blas(blas_.layout_create(&x_, type, k, n, kind.in), "linear");
    check_blas(blas_.layout_create(&y_, made, m, n, kind.out), "linear");
    if (kind.count > 1) {
      for (cublasLtMatrixLayout_t layout : {w_, x_, y_}) {
        set(layout, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, int32_t{kind.count});
      }
      place({kind.in * kind.out, kind.rows * kind.out, kind.out}, kind.bias);
    }
    cublasLtMatmulPreference_t preference = nullptr;
    check_blas(blas_.preference_create(&preference), "linear");
    const size_t workspace = kWorkspaceBytes;
    blas_.preference_set(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace,
                         sizeof workspace);
    int found = 0;
    const cublasStatus_t status =
        blas_.heuristic(handle, operation_, w_, x_, y_, y_, preference, 1, &algorithm_, &found);
    blas_.preference_destroy(preference);
    found_ = status == CUBLAS_STATUS_SUCCESS && found > 0;
    if (found_ || count_ > 1) return;
    check_blas(status, "linear");
    check_blas(CUBLAS_STATUS_NOT_SUPPORTED, "linear");
  }
  ~Product() {
    blas_.layout_destroy(y_);
    blas_.layout_destroy(x_);
    blas_.layout_destroy(w_);
    blas_.desc_destroy(operation_);
  }
  Product(const Product&) = delete;
  Product& operator=(const Product&) = delete;

  /// Returns false, having done nothing, if the library does not multiply so many products at once.
  bool run(const ProductOperands& of, std::byte* workspace, cudaStream_t stream) {
    if (!found_) return false;
    if (count_ > 1) place(of.strides, of.bias != nullptr);
    if (of.bias != nullptr) set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, of.bias);
    constexpr float kAlpha = 1;
    check_blas(blas_.matmul(handle_, operation_, &kAlpha, of.w, w_, of.x, x_, &beta_, of.y, y_,
                            of.y, y_, &algorithm_.algo, workspace, kWorkspaceBytes, stream),
               "linear");
    return true;
  }

 private:
  template <class T>
  void set(cublasLtMatmulDescAttributes_t attribute, T value) {
    check_blas(blas_.desc_set(operation_, attribute, &value, sizeof value), "linear");
  }
  void place(const ProductStrides& strides, bool biased) {
    set(w_, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, strides.w);
    set(x_, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, int64_t{0});
    set(y_, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, strides.y);
    if (biased) set(CUBLASLT_MATMUL_DESC_BIAS_BATCH_STRIDE, strides.bias);
  }
  template <class T>
  void set(cublasLtMatrixLayout_t layout, cublasLtMatrixLayoutAttribute_t attribute, T value) {
    check_blas(blas_.layout_set(layout, attribute, &value, sizeof value), "linear");
  }

  const CublasLt& blas_ = cublaslt();
  cublasLtHandle_t handle_;
  float beta_;
  int count_;
  bool found_ = false;
  cublasLtMatmulDesc_t operation_ = nullptr;
  cublasLtMatrixLayout_t w_ = nullptr;
  cublasLtMatrixLayout_t x_ = nullptr;
  cublasLtMatrixLayout_t y_ = nullptr;
  cublasLtMatmulHeuristicResult_t algorithm_{};
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

  /// Multiplies by the plan of `kind`. Returns false, having done nothing, where the library has
  /// none for several products. Any thread may call it.
  bool run(const ProductKind& kind, const ProductOperands& operands, Stream& stream) {
    std::byte* workspace = stream.queue().scratch(kGemmWorkspace, kWorkspaceBytes);
    const std::scoped_lock lock(mutex_);
    return get(kind).run(operands, workspace, native(stream));
  }

 private:
  Product& get(const ProductKind& kind) {
    if (handle_ == nullptr) check_blas(cublaslt().create(&handle_), "cublasLtCreate");
    // Prompts come in every length: old plans go before there are too many.
    if (plans_.size() > 4096) plans_.clear();
    return plans_.try_emplace(kind, handle_, kind).first->second;
  }

  std::mutex mutex_;
  cublasLtHandle_t handle_ = nullptr;
  std::map<ProductKind, Product> plans_;
};

// ------------------------------------------------------------------------------------ a few rows

constexpr int kMostProjections = 3;

/// How few_rows divides its work.
struct FewTiling {
  int columns;  // rows of weights that a warp reads side by side
  int ahead;    // steps by which it reads ahead
  int warps;    // of a block
  int split;    // warps that share their rows of weights
};

/// As measured on an H100. `split` orders the sums: rows have the same bits whatever else is in the
/// batch.
constexpr FewTiling few_tiling(bool gated) {
  return gated ? FewTiling{4, 4, 4, 4} : FewTiling{4, 2, 8, 2};
}

template <class T>
constexpr int kChunk = 16 / sizeof(T);  // weights that are loaded at once

/// 16 bytes of weights, which nobody needs again soon.
template <class T>
__device__ uint4 load_chunk(const T* from) {
  uint4 chunk;
  asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(chunk.x), "=r"(chunk.y), "=r"(chunk.z), "=r"(chunk.w)
               : "l"(from));
  return chunk;
}

/// Products of the same x, their outputs side by side.
template <class T>
struct FewProjections {
  const T* w[kMostProjections];
  float* y[kMostProjections];
  const float* bias[kMostProjections];
  int64_t out[kMostProjections];
};

/// The other arguments of few_rows.
struct FewRows {
  const float* x;  // (kRows, in)
  int in;
  bool add;
  Activation activation;
};

/// Outputs of warps that share their rows of weights.
constexpr int few_outputs(bool gated) { return few_tiling(gated).columns / (gated ? 2 : 1); }

/// y = x w^T, or with `add` y += x w^T; kGated: y of the first projection becomes activation(first)
/// * second.
///
/// Warps read some rows of weights once for all kRows rows of x. The order of a sum does not depend
/// on kRows. The weights are there from the start, so reading them begins before earlier kernels
/// have ended.
template <class T, int kRows, bool kGated>
__global__ void __launch_bounds__(32 * few_tiling(kGated).warps)
    few_rows(FewProjections<T> projections, FewRows args) {
  constexpr int kColumns = few_tiling(kGated).columns;
  constexpr int kAhead = few_tiling(kGated).ahead;
  constexpr int kWarps = few_tiling(kGated).warps;
  constexpr int kSplit = few_tiling(kGated).split;
  constexpr int kOuts = few_outputs(kGated);
  constexpr int kSize = kChunk<T>;
  __shared__ float shared[kWarps][kColumns][kRows];  // the warps' sums
  let_next_start();
  const int warp_lane = static_cast<int>(threadIdx.x % 32);
  const int warp = static_cast<int>(threadIdx.x / 32);
  int64_t unit = static_cast<int64_t>(blockIdx.x) * (kWarps / kSplit) + warp / kSplit;
  const T* w = projections.w[0];
  float* y = projections.y[0];
  const float* bias = projections.bias[0];
  int64_t out = projections.out[0];
  if constexpr (!kGated) {
#pragma unroll
    for (int i = 1; i < kMostProjections; ++i) {
      const int64_t units = (out + kOuts - 1) / kOuts;
      if (unit < units) continue;
      unit -= units;
      w = projections.w[i], y = projections.y[i], bias = projections.bias[i],
      out = projections.out[i];
    }
  }
  const int64_t column = unit * kOuts;
  const int chunks = column < out ? args.in / kSize : 0;
  const T* weights[kColumns];
#pragma unroll
  for (int c = 0; c < kColumns; ++c) {
    const T* of = kGated ? projections.w[c % 2] : w;
    const int64_t wanted = column + (kGated ? c / 2 : c);
    weights[c] = of + min(wanted, out - 1) * args.in;
  }
  // Steps that every lane takes part in; what is left is less than one.
  constexpr int kStep = 32 * kSplit;
  const int steps = chunks / kStep;
  const int first = warp % kSplit * 32 + warp_lane;
  uint4 coming[kAhead][kColumns];
#pragma unroll
  for (int u = 0; u < kAhead; ++u) {
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      if (u < steps) coming[u][c] = load_chunk(weights[c] + (first + u * kStep) * kSize);
    }
  }
  wait_for_earlier();

  float sums[kColumns][kRows] = {};
  const auto add_chunk = [&](const uint4(&loaded)[kColumns], int element) {
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      float values[kSize];
#pragma unroll
      for (int j = 0; j < kSize; j += 4) {
        *reinterpret_cast<float4*>(values + j) =
            *reinterpret_cast<const float4*>(args.x + row * args.in + element + j);
      }
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        const T* factors = reinterpret_cast<const T*>(&loaded[c]);
#pragma unroll
        for (int j = 0; j < kSize; ++j) sums[c][row] += load_float(factors[j]) * values[j];
      }
    }
  };
  for (int k = 0; k < steps; k += kAhead) {
#pragma unroll
    for (int u = 0; u < kAhead; ++u) {
      if (k + u >= steps) break;
      uint4 loaded[kColumns];
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        loaded[c] = coming[u][c];
        if (k + u + kAhead < steps) {
          coming[u][c] = load_chunk(weights[c] + (first + (k + u + kAhead) * kStep) * kSize);
        }
      }
      add_chunk(loaded, (first + (k + u) * kStep) * kSize);
    }
  }
  const int last = first + steps * kStep;
  if (last < chunks) {
    uint4 loaded[kColumns];
#pragma unroll
    for (int c = 0; c < kColumns; ++c) loaded[c] = load_chunk(weights[c] + last * kSize);
    add_chunk(loaded, last * kSize);
  }

#pragma unroll
  for (int row = 0; row < kRows; ++row) {
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const float sum = warp_sum(sums[c][row]);
      if (warp_lane == 0) shared[warp][c][row] = sum;
    }
  }
  __syncthreads();
  // Each thread of the warp finishes one output of one row.
  const int output = warp_lane / kRows;
  const int row = warp_lane % kRows;
  if (warp % kSplit != 0 || output >= kOuts || column + output >= out) return;
  const auto result = [&](int c, const float* biases) {
    float sum = 0;
    for (int i = 0; i < kSplit; ++i) sum += shared[warp + i][c][row];
    return biases == nullptr ? sum : sum + biases[column + output];
  };
  float* to = y + row * out + column + output;
  if constexpr (kGated) {
    *to = activated(args.activation, result(2 * output, bias)) *
          result(2 * output + 1, projections.bias[1]);
  } else {
    const float sum = result(output, bias);
    *to = args.add ? *to + sum : sum;
  }
}

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

/// Above this many rows of half-precision weights the tensor cores are faster.
constexpr int64_t kFewRows = 4;

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
    return is_regular(projection, x) && projection.w.dtype() == projections[0].w.dtype() &&
           !projection.y.empty();
  });
}

/// What multiply_few makes of its sums.
struct FewWork {
  bool add = false;
  float* gated = nullptr;  // (rows, out): activation(first projection) * second projection
  Activation activation = Activation::kSilu;
};

/// What the kernels are told of projections.
template <class T>
FewProjections<T> few_projections(std::span<const Projection> projections, float* gated) {
  FewProjections<T> made{};
  for (size_t i = 0; i < projections.size(); ++i) {
    made.w[i] = reinterpret_cast<const T*>(projections[i].w.data());
    made.y[i] = gated != nullptr ? gated : projections[i].y.as<float>();
    made.bias[i] = projections[i].bias.empty() ? nullptr : projections[i].bias.as<float>();
    made.out[i] = projections[i].w.shape()[0];
  }
  return made;
}

/// The kernel of 1 to kFewRows rows.
template <class T, bool kGated>
auto few_kernel(int64_t rows) {
  switch (rows) {
    case 1:
      return few_rows<T, 1, kGated>;
    case 2:
      return few_rows<T, 2, kGated>;
    case 3:
      return few_rows<T, 3, kGated>;
    default:
      return few_rows<T, 4, kGated>;
  }
}

/// 1 to kFewRows regular rows of f32.
void multiply_few(std::span<const Projection> projections, ConstTensorView x, const FewWork& work,
                  Stream& stream) {
  const bool gated = work.gated != nullptr;
  const FewTiling tiling = few_tiling(gated);
  const FewRows args{x.as<float>(), static_cast<int>(x.shape()[1]), work.add, work.activation};
  int64_t groups = 0;  // of warps that share their rows of weights
  for (const Projection& one : gated ? projections.first(1) : projections) {
    groups += ceil_div(one.w.shape()[0], few_outputs(gated));
  }
  const auto blocks = static_cast<unsigned>(ceil_div(groups * tiling.split, tiling.warps));
  with_type(projections[0].w.dtype(), [&]<class T>(T*) {
    const int64_t rows = x.shape()[0];
    const auto kernel = gated ? few_kernel<T, true>(rows) : few_kernel<T, false>(rows);
    launch_early("linear", kernel, blocks, 32 * tiling.warps, stream,
                 few_projections<T>(projections, work.gated), args);
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
  const ConstTensorView w = projection.w;
  const int64_t rows = x.shape()[0];
  const int64_t in = x.shape()[1];
  const int64_t out = w.shape()[0];
  const float* bias = projection.bias.empty() ? nullptr : projection.bias.as<float>();
  const int64_t even = add ? out : out / kEvenColumns * kEvenColumns;
  auto* result = projection.y.as<float>();
  Products& products = Products::of(stream.device().index);
  if (even == 0 || even == out) {
    products.run({w.dtype(), DType::kF32, rows, in, out, bias != nullptr, add},
                 {result, operand, w.data(), bias}, stream);
    return;
  }
  const auto row_bytes = static_cast<size_t>(even) * sizeof(float);
  std::byte* even_part = stream.queue().scratch(kGemmResult, static_cast<size_t>(rows) * row_bytes);
  products.run({w.dtype(), DType::kF32, rows, in, even, bias != nullptr, add},
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
  const std::ptrdiff_t w = apart(first.w, second.w);
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
  return Products::of(stream.device().index)
      .run({first.w.dtype(), DType::kF32, x.shape()[0], x.shape()[1], first.w.shape()[0],
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
void multiply_apart(TensorView y, ConstTensorView x, ConstTensorView w, const LinearTail& tail,
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
  return {y, nullptr, gate.w, floats(gate.bias), HalfTail::kGated, up.w, floats(up.bias)};
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
    Products::of(device.index)
        .run({dtype, DType::kF32, size, size, size, false, false},
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

void linear(TensorView y, ConstTensorView x, ConstTensorView w, ConstTensorView bias, bool add,
            Stream& stream) {
  const Projection projection{y, w, bias};
  if (!is_regular(projection, x)) {
    multiply_odd(projection, x, 0, add, stream);
  } else if (x.shape()[0] > kFewRows) {
    multiply_many(projection, x, operand_of(x, w.dtype(), stream), add, stream);
  } else {
    multiply_few({&projection, 1}, widened(x, stream), {.add = add}, stream);
  }
}

void linear(TensorView y, ConstTensorView x, ConstTensorView w, const LinearTail& tail,
            Stream& stream) {
  const int64_t rows = x.shape()[0];
  const int64_t out = w.shape()[0];
  if (!is_even(y, x, w, tail)) return multiply_apart(y, x, w, tail, stream);
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
  Products::of(stream.device().index)
      .run({w.dtype(), made, rows, w.shape()[1], out, bias != nullptr, finished && tail.add,
            finished && gelu},
           {product, operand, w.data(), bias}, stream);
  if (!finished) finish(y, product, made, tail, stream);
}

void linears(std::span<const Projection> projections, ConstTensorView x, Stream& stream) {
  const bool few = x.shape()[0] <= kFewRows;
  if (projections.empty() || !are_alike(projections, x) ||
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

DType operand_dtype(ConstTensorView w, int64_t rows) {
  // Columns beyond a multiple of kEvenColumns are made of x as it comes.
  const bool even = w.shape()[0] % kEvenColumns == 0 && w.shape()[1] % 8 == 0;
  return rows > kFewRows && even && is_aligned(w.data(), 16) ? w.dtype() : DType::kF32;
}

bool gates_alone(const Projection& gate, const Projection& up, Activation activation, DType dtype,
                 int64_t rows) {
  if (activation != Activation::kSilu || rows < kManyGatedRows || dtype != gate.w.dtype() ||
      dtype != up.w.dtype()) {
    return false;
  }
  return KVLM_WARPGROUPS != 0 && fits_warpgroups(gated_product({}, gate, up));
}

void gated_linears(TensorView y, const Projection& gate, const Projection& up,
                   Activation activation, ConstTensorView x, Stream& stream) {
  const Projection both[] = {gate, up};
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
