#include "kernels/cpu/slot_weights.h"

#include "kernels/cpu/blocks.h"

namespace kvlm::cpu {

void add_slot_weights(std::span<const SlotWeights> heads, int q_per_kv, Stream& stream) {
  const auto queries = static_cast<size_t>(q_per_kv);
  size_t most = 0;
  for (const SlotWeights& head : heads) most = std::max(most, static_cast<size_t>(head.slots));
  for_blocks(stream, heads.size(), most * queries, [&](size_t begin, size_t end) {
    for (size_t i = begin; i < end; ++i) {
      const SlotWeights& head = heads[i];
      const auto n = static_cast<size_t>(head.slots);
      for (size_t j = 0; j < n; ++j) {
        float sum = 0;
        for (size_t query = 0; query < queries; ++query) sum += head.weights[query * n + j];
        const float before = j < static_cast<size_t>(head.known) ? head.sums[j] : 0.0f;
        head.sums[j] = before + sum / static_cast<float>(q_per_kv);
      }
    }
  });
}

void mean_arrays(std::span<const float* const> arrays, std::span<const MeanJob> jobs,
                 Stream& stream) {
  size_t most = 0;
  for (const MeanJob& job : jobs) {
    most = std::max(most, static_cast<size_t>(job.size) * static_cast<size_t>(job.arrays));
  }
  for_blocks(stream, jobs.size(), most, [&](size_t begin, size_t end) {
    for (size_t i = begin; i < end; ++i) {
      const MeanJob& job = jobs[i];
      for (int j = 0; j < job.size; ++j) {
        float sum = 0;
        for (int a = 0; a < job.arrays; ++a) sum += arrays[static_cast<size_t>(job.first + a)][j];
        job.out[j] = sum / static_cast<float>(job.arrays);
      }
    }
  });
}

}  // namespace kvlm::cpu
