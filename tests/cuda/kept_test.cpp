// What is described once for many steps, on a GPU, against the CPU.
#include <gtest/gtest.h>

#include <array>
#include <numeric>
#include <optional>
#include <utility>
#include <vector>

#include "kernels/fill.h"
#include "kernels/key_basis.h"
#include "tests/cuda/fixture.h"

namespace kvlm {
namespace {

using testing::kGpu;
using testing::normal_tensor;

class KeptCuda : public testing::Cuda {};

/// A BasisBatch; on the CPU what it stands for.
class Batch {
 public:
  Batch(const KeyBasis& basis, std::vector<BasisJob> jobs, const float* from, Stream& stream)
      : basis_(&basis), jobs_(std::move(jobs)), from_(from) {
    if (stream.device().kind != DeviceKind::kCuda) return;
    batch_.emplace(stream.device());
    batch_->describe(basis, BasisChange::kQuery, jobs_, from, stream);
  }

  void run(const float* from, Stream& stream) {
    if (batch_) return batch_->run(from, stream);
    for (BasisJob& job : jobs_) job.from += from - from_;
    from_ = from;
    change_basis(*basis_, BasisChange::kQuery, jobs_, stream);
  }

 private:
  const KeyBasis* basis_;
  std::vector<BasisJob> jobs_;
  const float* from_;
  std::optional<BasisBatch> batch_;
};

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
    Batch batch(basis, jobs, from, stream);
    batch.run(from, stream);
    Tensor both(DType::kF32, {2, kJobs * 2 * kDim}, device);
    const Shape half{1, kJobs * 2 * kDim};
    copy(both.view().slice(0, 1), out.view().slice(0, 1).reshape(half), stream);
    batch.run(from + kJobs * 2 * kDim, stream);
    copy(both.view().slice(1, 1), out.view().slice(0, 1).reshape(half), stream);
    stream.synchronize();
    return both;
  };
  const Tensor gpu_q = on_gpu(q);
  const Tensor expected = run(q, {}, cpu_);
  EXPECT_EQ(error(run(gpu_q, kGpu, *gpu_), expected), 0);
}

/// Up to four rows of few jobs have a kernel of their own, which takes 128 channels at a time.
TEST_F(KeptCuda, RowsAreTurnedWhetherFewOrMany) {
  struct Size {
    int dim;
    int first;
  };
  for (const Size size :
       {Size{128, 0}, Size{128, 128}, Size{300, 7}, Size{260, 4}, Size{136, 7}, Size{33, 32}}) {
    const auto [dim, first] = size;
    const auto n = static_cast<size_t>(dim - first);
    KeyBasis basis;
    basis.dim = dim;
    basis.first = first;
    if (n > 0) {
      const Tensor matrix = normal_tensor(DType::kF32, {static_cast<int64_t>(n * n)}, 7);
      for (std::vector<float>& of : basis.matrix) {
        of.assign(matrix.as<float>(), matrix.as<float>() + n * n);
      }
    }
    std::vector<uint16_t> channels(static_cast<size_t>(dim));
    std::iota(channels.rbegin(), channels.rend(), uint16_t{0});
    for (const int rows : {1, 3, 4, 5, 70}) {
      for (const BasisChange change : {BasisChange::kQuery, BasisChange::kBack}) {
        const int count = rows == 4 ? 300 : 2;  // more than there are multiprocessors
        const Tensor x = normal_tensor(DType::kF32, {count, rows, dim}, 8);
        const auto run = [&](const Tensor& from, Device device, Stream& stream) {
          Tensor to(DType::kF32, from.shape(), device);
          fill_random(to, 1, 0, stream);
          const int64_t next = int64_t{rows} * dim;
          std::vector<BasisJob> jobs;
          for (int job = 0; job < count; ++job) {  // the last one has a row less
            jobs.push_back({from.as<float>() + job * next, to.as<float>() + job * next,
                            job + 1 < count ? rows : rows - 1, channels.data()});
          }
          change_basis(basis, change, jobs, stream);
          stream.synchronize();
          return to;
        };
        EXPECT_EQ(error(run(on_gpu(x), kGpu, *gpu_), run(x, {}, cpu_)), 0)
            << dim << " channels from " << first << " on, " << rows << " rows";
      }
    }
  }
}

/// Changes that start while the one in front of them runs have the same results.
TEST_F(KeptCuda, QueriesAreTurnedOneBehindTheOther) {
  constexpr int kDim = 1024;  // whose blocks take their time
  constexpr int kBasis = 512;
  constexpr int kJobs = 8;  // of the kernel in front
  constexpr int kRows = 1000;
  constexpr int kFew = 33;  // of a job behind it; another one has a block of rows less
  KeyBasis basis;
  basis.dim = kDim;
  basis.first = kBasis;
  const Tensor matrix = normal_tensor(DType::kF32, {kBasis * kBasis}, 7);
  basis.matrix[static_cast<size_t>(BasisChange::kQuery)] = {
      matrix.as<float>(), matrix.as<float>() + matrix.shape().elements()};
  std::vector<uint16_t> channels(kDim);
  std::iota(channels.rbegin(), channels.rend(), uint16_t{0});
  const Tensor front = normal_tensor(DType::kF32, {kJobs, kRows, kDim}, 8);
  const Tensor behind_it = normal_tensor(DType::kF32, {2, kFew, kDim}, 9);

  const auto run = [&](const Tensor& x, const Tensor& y, Device device, Stream& stream) {
    Tensor of_x(DType::kF32, x.shape(), device);
    Tensor of_y(DType::kF32, y.shape(), device);
    Tensor last(DType::kF32, {2, kFew, kDim}, device);
    std::vector<BasisJob> jobs;
    for (int64_t i = 0; i < kJobs; ++i) {
      const int64_t at = i * int64_t{kRows} * kDim;
      jobs.push_back({x.as<float>() + at, of_x.as<float>() + at, kRows, channels.data()});
    }
    const float* end = of_x.as<float>() + of_x.shape().elements() - kFew * kDim;
    const std::vector<BasisJob> few{
        {y.as<float>(), of_y.as<float>(), kFew, channels.data()},
        {y.as<float>() + kFew * kDim, of_y.as<float>() + kFew * kDim, 2, channels.data()}};
    const std::vector<BasisJob> behind{
        {end, last.as<float>(), kFew, channels.data()},
        {of_y.as<float>(), last.as<float>() + kFew * kDim, kFew, channels.data()}};
    std::array<Batch, 3> batches{Batch(basis, jobs, x.as<float>(), stream),
                                 Batch(basis, few, y.as<float>(), stream),
                                 Batch(basis, behind, end, stream)};
    std::vector<Tensor> found;
    for (int time = 0; time < 3; ++time) {  // the first one as just described
      for (Tensor* tensor : {&of_x, &of_y, &last}) fill_random(*tensor, 1, 0, stream);
      batches[0].run(x.as<float>(), stream);
      batches[1].run(y.as<float>(), stream);
      batches[2].run(end, stream);
      found.emplace_back(DType::kF32, last.shape(), device);
      copy(found.back(), last, stream);
    }
    stream.synchronize();
    return found;
  };
  const std::vector<Tensor> expected = run(front, behind_it, {}, cpu_);
  const std::vector<Tensor> found = run(on_gpu(front), on_gpu(behind_it), kGpu, *gpu_);
  for (size_t i = 0; i < found.size(); ++i) EXPECT_EQ(error(found[i], expected[i]), 0) << i;
}

}  // namespace
}  // namespace kvlm
