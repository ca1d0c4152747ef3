#include "kernels/cuda/row_batch.h"

#include "kernels/no_cuda/refuse.h"

namespace kvlm::cuda {

struct RowTable::State {};

RowTable::RowTable(Device) { refuse("RowBatch"); }
RowTable::~RowTable() = default;

void RowTable::describe(std::span<const RowLane>, std::span<const KeyValueRows>, int, int,
                        const float*, const float*, bool, bool, Stream&) {
  refuse("RowBatch");
}

int RowTable::room() const noexcept { return 0; }

void RowTable::append(const float*, const float*, Stream&) { refuse("RowBatch"); }

void RowTable::appended() noexcept {}

void RowTable::attend(const float*, float*, float, Stream&) { refuse("RowBatch"); }

}  // namespace kvlm::cuda
