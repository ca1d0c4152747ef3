// The library that products need is opened by name. Needs the CUDA toolkit, but no GPU.
#include "kernels/cuda/device/cublaslt.h"

#include <gmock/gmock.h>

namespace kvlm::cuda {
namespace {

TEST(CublasLt, IsOpenedOnceAndItsFunctionsAnswer) {
  const CublasLt& blas = cublaslt();
  EXPECT_EQ(&blas, &cublaslt());
  EXPECT_STRNE(blas.status_string(CUBLAS_STATUS_SUCCESS), "");  // its words differ by release
  cublasLtMatmulDesc_t operation = nullptr;
  ASSERT_EQ(blas.desc_create(&operation, CUBLAS_COMPUTE_32F, CUDA_R_32F), CUBLAS_STATUS_SUCCESS);
  const cublasOperation_t transpose = CUBLAS_OP_T;
  EXPECT_EQ(blas.desc_set(operation, CUBLASLT_MATMUL_DESC_TRANSA, &transpose, sizeof transpose),
            CUBLAS_STATUS_SUCCESS);
  EXPECT_EQ(blas.desc_destroy(operation), CUBLAS_STATUS_SUCCESS);
}

}  // namespace
}  // namespace kvlm::cuda
