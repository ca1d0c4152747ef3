#include "kernels/cuda/device/cublaslt.h"

#include <fmt/format.h>

#include "kernels/cuda/device/toolkit_library.h"

namespace kvlm::cuda {

namespace {

/// Of the major version that we were compiled for; its functions keep their types.
CublasLt load() {
  const ToolkitLibrary library(fmt::format("libcublasLt.so.{}", CUBLAS_VER_MAJOR),
                               fmt::format("cuBLAS {}.{}", CUBLAS_VER_MAJOR, CUBLAS_VER_MINOR),
                               "a GPU", "--device cpu");
  CublasLt blas{};
  library.find(blas.create, "cublasLtCreate");
  library.find(blas.status_string, "cublasLtGetStatusString");
  library.find(blas.matmul, "cublasLtMatmul");
  library.find(blas.heuristic, "cublasLtMatmulAlgoGetHeuristic");
  library.find(blas.desc_create, "cublasLtMatmulDescCreate");
  library.find(blas.desc_destroy, "cublasLtMatmulDescDestroy");
  library.find(blas.desc_set, "cublasLtMatmulDescSetAttribute");
  library.find(blas.preference_create, "cublasLtMatmulPreferenceCreate");
  library.find(blas.preference_destroy, "cublasLtMatmulPreferenceDestroy");
  library.find(blas.preference_set, "cublasLtMatmulPreferenceSetAttribute");
  library.find(blas.layout_create, "cublasLtMatrixLayoutCreate");
  library.find(blas.layout_destroy, "cublasLtMatrixLayoutDestroy");
  library.find(blas.layout_set, "cublasLtMatrixLayoutSetAttribute");
  return blas;
}

}  // namespace

const CublasLt& cublaslt() {
  static const CublasLt blas = load();  // tried again if it throws
  return blas;
}

}  // namespace kvlm::cuda
