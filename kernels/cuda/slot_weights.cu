#include <algorithm>

#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/slot_weights.h"

namespace kvlm::cuda {

namespace {

constexpr int kThreads = 256;

__global__ void add_weights(const SlotWeights* lanes, int q_per_kv) {
  const SlotWeights lane = lanes[blockIdx.x];
  const int j = static_cast<int>(blockIdx.y) * kThreads + static_cast<int>(threadIdx.x);
  if (j >= lane.slots) return;
  float sum = 0;
  for (int head = 0; head < q_per_kv; ++head) {
    sum += lane.weights[static_cast<int64_t>(head) * lane.slots + j];
  }
  const float before = j < lane.known ? lane.sums[j] : 0.0f;
  lane.sums[j] = before + sum / static_cast<float>(q_per_kv);
}

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

void add_slot_weights(std::span<const SlotWeights> lanes, int q_per_kv, Stream& stream) {
  int most = 0;
  for (const SlotWeights& lane : lanes) most = std::max(most, lane.slots);
  const auto* on_device =
      reinterpret_cast<const SlotWeights*>(stream.queue().upload(lanes.data(), lanes.size_bytes()));
  add_weights<<<grid(lanes.size(), most), kThreads, 0, native(stream)>>>(on_device, q_per_kv);
  check_launch("add_slot_weights");
}

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
