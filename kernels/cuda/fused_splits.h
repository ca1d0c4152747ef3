#pragma once

#include <initializer_list>

#include "kernels/base/host_device.h"

// How the fused decode attention cuts a lane into splits, which it joins at last. It depends on the
// lane's own length alone, so that a lane's sums do not depend on the rest of the batch. Longer
// splits are faster where many lanes fill a GPU, but leave it idle where few do; and the tensor
// cores cut off digits of every sum, so that the error grows with the rows that a warp adds up.
namespace kvlm::cuda::packed {

/// Slots of a split of a lane of `slots`, of all but the last one.
VLM_HD constexpr int fused_split_slots(int slots) {
  return slots <= 4096 ? 256 : slots <= 16384 ? 512 : 1024;
}

/// Splits of a lane of `slots`.
VLM_HD constexpr int fused_splits_of(int slots) {
  const int split = fused_split_slots(slots);
  return (slots + split - 1) / split;
}

/// Splits of a lane of up to `slots`, at most.
constexpr int most_fused_splits(int slots) {
  int most = 1;
  for (const int limit : {slots, 4096, 16384}) {  // where splits become longer
    const int splits = fused_splits_of(slots < limit ? slots : limit);
    most = splits > most ? splits : most;
  }
  return most;
}

}  // namespace kvlm::cuda::packed
