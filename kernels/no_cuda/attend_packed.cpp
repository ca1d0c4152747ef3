#include "kernels/cuda/attend_packed.h"

#include "kernels/no_cuda/refuse.h"

namespace kvlm::cuda {

void attend_packed(std::span<PackedLane>, int, int, float, Stream&) { refuse("attend_packed"); }

struct LaneTable::State {};
LaneTable::LaneTable(Device) { refuse("PackedBatch"); }
LaneTable::~LaneTable() = default;
void LaneTable::describe(std::span<PackedLane>, int, int, const float*, const float*, bool,
                         Stream&) {
  refuse("PackedBatch::describe");
}
int64_t LaneTable::guarded_remaps() const { return 0; }
void LaneTable::attend(const float*, float*, float, Stream&) { refuse("PackedBatch::attend"); }

void unpack_blocks(const PackedFormat&, std::span<const PackedBlock>, float*, Stream&) {
  refuse("unpack_blocks");
}

}  // namespace kvlm::cuda
