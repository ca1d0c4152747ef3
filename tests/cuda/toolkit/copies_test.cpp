// Copies that no queue makes. Needs the CUDA toolkit, and a GPU.
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <vector>

#include "tests/cuda/fixture.h"

namespace kvlm {
namespace {

using testing::kGpu;
using testing::values_of;

class Copies : public testing::Cuda {};

/// What is copied outside of a queue is there when the queue's next kernel reads it, also where the
/// default stream has much to do before it and the memory is not pinned: a copy of so few bytes
/// would return as soon as they are staged.
TEST_F(Copies, AreThereWhenTheyReturn) {
  constexpr int64_t kCount = 12'000;
  Tensor placed(DType::kF32, {kCount}, kGpu);
  Tensor read(DType::kF32, {kCount}, kGpu);
  Buffer long_work(kGpu, size_t{4} << 30);
  const std::vector<float> values(kCount, 3);
  cuda::clear_now(placed.view().data(), kCount * sizeof(float));
  for (int i = 0; i < 4; ++i) {
    ASSERT_EQ(cudaMemsetAsync(long_work.data(), i, long_work.bytes(), nullptr), cudaSuccess);
  }
  cuda::copy_now(placed.view().data(), values.data(), values.size() * sizeof(float));
  copy(read, placed, *gpu_);
  EXPECT_EQ(values_of(on_host(read)),
            values_of(ConstTensorView(values.data(), DType::kF32, {kCount})));
}

}  // namespace
}  // namespace kvlm
