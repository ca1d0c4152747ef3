// What is described once for many steps, on a GPU, against the CPU.
#include <gtest/gtest.h>

#include <numeric>
#include <vector>

#include "kernels/key_basis.h"
#include "tests/cuda/fixture.h"

namespace kvlm {
namespace {

using testing::kGpu;
using testing::normal_tensor;

class KeptCuda : public testing::Cuda {};

TEST_F(KeptCuda, QueriesAreTurnedWhereverTheyAre) {
  constexpr int kDim = 20;
  constexpr int kFirst = 7;
  constexpr int kJobs = 3;
  KeyBasis basis;
  basis.dim = kDim;
  basis.first = kFirst;
  const Tensor matrix = normal_tensor(DType::kF32, {(kDim - kFirst) * (kDim - kFirst)}, 7);
  basis.matrix[static_cast<size_t>(BasisChange::kQuery)] = {
      matrix.as<float>(), matrix.as<float>() + matrix.shape().elements()};
  std::vector<std::vector<uint16_t>> channels(kJobs, std::vector<uint16_t>(kDim));
  for (size_t i = 0; i < kJobs; ++i) {
    std::iota(channels[i].begin(), channels[i].end(), uint16_t{0});
    std::rotate(channels[i].begin(), channels[i].begin() + static_cast<std::ptrdiff_t>(i),
                channels[i].end());
  }
  // Two places of queries, one behind the other.
  const Tensor q = normal_tensor(DType::kF32, {2, kJobs, 2, kDim}, 8);
  const auto run = [&](ConstTensorView queries, Device device, Stream& stream) {
    Tensor out(DType::kF32, {2, kJobs, 2, kDim}, device);
    std::vector<BasisJob> jobs;
    const float* from = queries.as<float>();
    for (int i = 0; i < kJobs; ++i) {
      jobs.push_back({from + i * 2 * kDim, out.as<float>() + i * 2 * kDim, 2,
                      channels[static_cast<size_t>(i)].data()});
    }
    BasisBatch batch(device);
    batch.describe(basis, BasisChange::kQuery, jobs, from, stream);
    batch.run(from, BasisStart::kBehindLast, stream);
    Tensor both(DType::kF32, {2, kJobs * 2 * kDim}, device);
    const Shape half{1, kJobs * 2 * kDim};
    copy(both.view().slice(0, 1), out.view().slice(0, 1).reshape(half), stream);
    batch.run(from + kJobs * 2 * kDim, BasisStart::kBehindLast, stream);
    copy(both.view().slice(1, 1), out.view().slice(0, 1).reshape(half), stream);
    stream.synchronize();
    return both;
  };
  const Tensor gpu_q = on_gpu(q);
  const Tensor expected = run(q, {}, cpu_);
  EXPECT_EQ(error(run(gpu_q, kGpu, *gpu_), expected), 0);
}

}  // namespace
}  // namespace kvlm
