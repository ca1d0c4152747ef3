// Copies to the host that are waited for later, and what a GPU is given meanwhile.
#include "kernels/base/readback.h"

#include <gtest/gtest.h>

#include <numeric>
#include <span>
#include <utility>
#include <vector>

#include "tests/cuda/fixture.h"

namespace kvlm::testing {
namespace {

/// (count,) first, first + 1, ...
Tensor counted(int64_t count, float first) {
  Tensor x(DType::kF32, {count});
  std::iota(x.view().as<float>(), x.view().as<float>() + count, first);
  return x;
}

class Readbacks : public Cuda {
 protected:
  static std::vector<float> floats(const Readback& from, size_t count) {
    const auto* first = reinterpret_cast<const float*>(from.wait());
    return {first, first + count};
  }
};

/// What is queued behind a copy does not change it, and memory grows from one to the next.
TEST_F(Readbacks, HoldWhatThereWas) {
  Tensor x = on_gpu(counted(1000, 5));
  Readback first;
  Readback second;
  first.start(x.view().data(), 1000 * sizeof(float), *gpu_);
  copy(x, counted(1000, -7), *gpu_);
  second.start(x.view().data(), 10 * sizeof(float), *gpu_);
  Readback moved = std::move(first);
  EXPECT_EQ(first.bytes(), 0u);  // NOLINT(bugprone-use-after-move)
  EXPECT_EQ(floats(moved, 1000).front(), 5);
  EXPECT_EQ(floats(moved, 1000).back(), 1004);
  EXPECT_EQ(floats(second, 10).back(), 2);
  second.start(x.view().data(), 1000 * sizeof(float), *gpu_);
  EXPECT_GE(second.bytes(), 1000 * sizeof(float));
  EXPECT_EQ(floats(second, 1000).back(), 992);
}

/// Work that is to be queued meanwhile is not done by a Readback, and once by who asks for it.
TEST_F(Readbacks, LeaveWorkToWhoAsks) {
  const Tensor x = on_gpu(counted(10, 1));
  int done = 0;
  const Meanwhile meanwhile(*gpu_, [&] { ++done; });
  Readback read;
  read.start(x.view().data(), 10 * sizeof(float), *gpu_);
  EXPECT_EQ(floats(read, 10).back(), 10);
  EXPECT_EQ(done, 0);
  gpu_->queue().do_meanwhile();
  gpu_->queue().do_meanwhile();
  EXPECT_EQ(done, 1);
  EXPECT_EQ(values_of(on_host(x)).back(), 10);
  EXPECT_EQ(done, 1);
}

}  // namespace
}  // namespace kvlm::testing
