#include <map>
#include <mutex>
#include <string>

#include "kernels/base/error.h"
#include "kernels/cuda/device/cublaslt.h"
#include "kernels/cuda/device/launch.cuh"
#include "kernels/cuda/product/library_product.h"

// A product of one shape is planned once: cuBLASLt's descriptors, and the algorithm that it finds
// best. Each GPU keeps its plans for as long as the program runs.
namespace kvlm::cuda {

namespace {

void check_blas(cublasStatus_t status, std::string_view what) {
  if (status == CUBLAS_STATUS_SUCCESS) return;
  throw Error(status == CUBLAS_STATUS_ALLOC_FAILED ? ErrorCode::kOutOfMemory : ErrorCode::kDevice,
              std::string(what) + ": cuBLASLt reports \"" + cublaslt().status_string(status) +
                  "\"; start again, with a smaller batch if the GPU's memory is full");
}

constexpr size_t kWorkspaceBytes = size_t{32} << 20;

cudaDataType_t blas_type(DType dtype) {
  if (dtype == DType::kF16) return CUDA_R_16F;
  return dtype == DType::kBF16 ? CUDA_R_16BF : CUDA_R_32F;
}

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

}  // namespace

bool multiply_by_library(const ProductKind& kind, const ProductOperands& operands, Stream& stream) {
  return Products::of(stream.device().index).run(kind, operands, stream);
}

}  // namespace kvlm::cuda
