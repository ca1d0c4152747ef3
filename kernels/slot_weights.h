#pragma once

#include <span>

#include "kernels/base/device.h"

namespace kvlm {

/// Attention weights of a KV head that are summed over decode steps (H2O), or of one step (TOVA).
struct SlotWeights {
  const float* weights = nullptr;  ///< (q_per_kv, slots) of this step
  float* sums = nullptr;           ///< (slots,)
  int slots = 0;
  int known = 0;  ///< the first `known` slots have a sum; the others begin at 0, all for one step
};

/// sums[j] += mean over the q_per_kv query heads of weights[., j].
/// Throws Error{kInvalidArgument} without memory or queries, and Error{kUnsupported} on a GPU,
/// where a DecodeTable adds them.
void add_slot_weights(std::span<const SlotWeights> heads, int q_per_kv, Stream& stream);

/// The mean of arrays of one length.
struct MeanJob {
  int first = 0;  ///< the first of its arrays in the list
  int arrays = 0;
  int size = 0;          ///< of each array
  float* out = nullptr;  ///< (size,)
};

/// out[i] = mean of the job's arrays at i, summed in their order. Asynchronous on CUDA.
/// Throws Error{kInvalidArgument} for arrays that are not in the list.
void mean_arrays(std::span<const float* const> arrays, std::span<const MeanJob> jobs,
                 Stream& stream);

}  // namespace kvlm
