#include "kernels/slot_weights.h"

#include "kernels/check.h"
#include "kernels/cpu/slot_weights.h"
#include "kernels/cuda/attend/slot_weights.h"

namespace kvlm {

void add_slot_weights(std::span<const SlotWeights> heads, int q_per_kv, Stream& stream) {
  if (heads.empty()) return;
  for (const SlotWeights& head : heads) {
    if (q_per_kv < 1 || head.weights == nullptr || head.sums == nullptr || head.known < 0 ||
        head.known > head.slots) {
      check::refuse(
          "add_slot_weights: {} of {} slots of {} queries have a sum; expected queries, memory for "
          "weights and sums, and no more sums than slots",
          head.known, head.slots, q_per_kv);
    }
  }
  check::attends_on_cpu("add_slot_weights", stream);
  cpu::add_slot_weights(heads, q_per_kv, stream);
}

void mean_arrays(std::span<const float* const> arrays, std::span<const MeanJob> jobs,
                 Stream& stream) {
  if (jobs.empty()) return;
  for (const MeanJob& job : jobs) {
    const bool there =
        job.first >= 0 && job.arrays > 0 &&
        static_cast<size_t>(job.first) + static_cast<size_t>(job.arrays) <= arrays.size();
    if (!there || job.out == nullptr) {
      check::refuse(
          "mean_arrays: arrays {} to {} of {}, expected some of the list and "
          "memory for the mean",
          job.first, int64_t{job.first} + job.arrays, arrays.size());
    }
  }
  if (check::on_gpu(stream)) return cuda::mean_arrays(arrays, jobs, stream);
  cpu::mean_arrays(arrays, jobs, stream);
}

}  // namespace kvlm
