#include "kernels/cuda/pack.h"

#include "kernels/no_cuda/refuse.h"

namespace kvlm::cuda {

void pack(const PackedFormat&, const std::array<PackRule, 2>&, std::span<const PackJob>, Stream&) {
  refuse("pack");
}

struct RingTable::State {};
RingTable::RingTable(Device) { refuse("RingPacker"); }
RingTable::~RingTable() = default;
void RingTable::describe(const PackedFormat&, const std::array<PackRule, 2>&, DType,
                         std::span<const PackedRing>, Stream&) {
  refuse("RingPacker");
}
void RingTable::run(Stream&) { refuse("RingPacker"); }

}  // namespace kvlm::cuda
