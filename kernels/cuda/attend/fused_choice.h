#pragma once

#include <array>
#include <cstdint>

#include "kernels/attend_packed.h"

// Which kernel of the fused decode attention (fused_table.h) serves a lane.
namespace kvlm::cuda::packed {

/// The kernels of a head_dim, by the codes of keys and of values.
int fused_pairs();
constexpr int kMostFusedRuns = 14;  // of a lane, keys and values
constexpr int kMostSideRuns = 8;
/// The number of the kernel that serves a lane (1..fused_pairs(), or one of picture_choice.h), 0
/// for none.
struct FusedLane {
  int pair = 0;
  std::array<int8_t, kMostFusedRuns> source{};  // of the keys' runs: DeviceRun::source
  int sources = 0;
};
/// Chooses among kernels whose blocks take up to `most_shared` bytes of shared memory.
///   loses_rows  the lane is placed: some slots have no rows
FusedLane fused_lane(const PackedLane& lane, int head_dim, int most_shared,
                     bool loses_rows = false);
/// Which queries keys meet, in `made`; false if there are too many.
bool find_sources(std::span<const SlotRun> keys, FusedLane& made);
/// Shared memory that a block may have, of the first GPU that was asked.
int most_shared_bytes();

}  // namespace kvlm::cuda::packed
