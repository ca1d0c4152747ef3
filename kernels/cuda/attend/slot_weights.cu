#include <algorithm>

#include "kernels/cuda/attend/slot_weights.h"
#include "kernels/cuda/device/launch.cuh"

namespace kvlm::cuda {

namespace {

constexpr int kThreads = 256;

__global__ void mean(const float* const* arrays, const MeanJob* jobs) {
  const MeanJob job = jobs[blockIdx.x];
  const int j = static_cast<int>(blockIdx.y) * kThreads + static_cast<int>(threadIdx.x);
  if (j >= job.size) return;
  float sum = 0;
  for (int a = 0; a < job.arrays; ++a) sum += arrays[job.first + a][j];
  job.out[j] = sum / static_cast<float>(job.arrays);
}

dim3 grid(size_t jobs, int most) {
  return {static_cast<unsigned>(jobs),
          static_cast<unsigned>(ceil_div(std::max(most, 1), kThreads))};
}

}  // namespace

void mean_arrays(std::span<const float* const> arrays, std::span<const MeanJob> jobs,
                 Stream& stream) {
  int most = 0;
  for (const MeanJob& job : jobs) most = std::max(most, job.size);
  const auto* lists = reinterpret_cast<const float* const*>(
      stream.queue().upload(arrays.data(), arrays.size_bytes()));
  const auto* on_device =
      reinterpret_cast<const MeanJob*>(stream.queue().upload(jobs.data(), jobs.size_bytes()));
  mean<<<grid(jobs.size(), most), kThreads, 0, native(stream)>>>(lists, on_device);
  check_launch("mean_arrays");
}

}  // namespace kvlm::cuda
