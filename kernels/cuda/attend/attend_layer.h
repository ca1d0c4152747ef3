#pragma once

#include <array>
#include <cstdint>
#include <span>

#include "kernels/cuda/attend/fused_attention.h"
#include "kernels/cuda/attend/packed_codes.h"
#include "kernels/cuda/attend/picture_lanes.h"

// Decode attention of one layer over packed and full rows, in launches whose sizes the host knows.
namespace kvlm::cuda::packed {

struct TableArgs;

/// The runs that one kernel serves: those at some positions of a DecodeTable's lanes.
struct ServedRuns {
  uint64_t positions = 0;  ///< 4 bits each
  int position_count = 1;
  Splits splits;
};

/// Of each kernel, last of the one that serves every format.
using ServedByKernel = std::array<ServedRuns, kCodeKernels + 1>;

/// Which kernels serve the lanes of a layer.
struct LaneKinds {
  bool deferred = false;          ///< the softmax of some is
  bool plain = false;             ///< some have weights that are made by themselves
  bool placed = false;            ///< those of some are made by weigh_places()
  bool ordered = false;           ///< of some, weights lie in the order of the runs of values
  bool unfused = false;           ///< some are of these kinds
  uint32_t fused = 0;             ///< the kernels that serve the others, in one pass, as bits
  std::array<int, 32> sources{};  ///< by such a kernel, FusedArgs::sources
  bool lose_rows = false;         ///< FusedArgs::lose_rows
  int picture_slots = 0;          ///< packed rows that picture_lanes.cu reads of a lane, at most

  bool operator==(const LaneKinds&) const = default;
};

/// What a layer's launches come to, at most.
struct LayerLaunch {
  ServedByKernel keys, values;
  LaneKinds kinds;
  unsigned lanes = 0;
  unsigned deferred = 0;  ///< of them, whose softmax is deferred
  PictureLanes pictures;  ///< what those of picture_lanes.cu read
  int most_slots = 0;     ///< of a lane
  int key_parts = 0;      ///< splits of keys, of all lanes
  int value_parts = 0;
  int weightings = 0;  ///< of all lanes' ranges
  const TableArgs* table = nullptr;
  int channels = 0;  ///< of a packed row
};

/// Attends; `args` lacks the workspace, and which runs a launch serves.
void launch_layer(const LayerLaunch& layer, AttendArgs args, Stream& stream);

/// Slots of a split of values in a lane of `slots`; of values in two codes kOrderedSplitSlots. It
/// depends on nothing else, so that a lane's sums do not depend on the rest of the batch.
constexpr int kShortLane = 1024;
constexpr int kLongLane = 8192;
constexpr int kMostValueSlots = 1024;
VLM_HD constexpr int split_slots(int slots) {
  return slots < kShortLane ? 256 : slots < kLongLane ? 512 : kMostValueSlots;
}
/// Slots of a split of keys, whose scores do not depend on it, at most.
constexpr int kMostKeySlots = 2048;
/// Slots of a lane whose weights are put in the order of its runs, at most: what normalise() holds.
constexpr int kMostOrdered = 1 << 14;
/// Slots of a split of such a run: the fewer of two codes would keep few blocks of threads busy.
constexpr int kOrderedSplitSlots = 256;
/// Blocks of fused lanes are cut by nothing: more rows than a block has.
constexpr int kFusedBlockRows = 1 << 16;
/// Slots of a split of the kernel that serves every format, at most.
constexpr int kAnySplitSlots = 256;

}  // namespace kvlm::cuda::packed
