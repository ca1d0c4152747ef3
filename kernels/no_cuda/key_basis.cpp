#include "kernels/cuda/key_basis.h"

#include "kernels/no_cuda/refuse.h"

namespace kvlm::cuda {

void change_basis(const KeyBasis&, BasisChange, std::span<const BasisJob>, Stream&) {
  refuse("change_basis");
}

void prepare_basis(const KeyBasis&, int) { refuse("prepare_basis"); }

struct BasisTable::State {};
BasisTable::BasisTable(Device) { refuse("BasisBatch"); }
BasisTable::~BasisTable() = default;
void BasisTable::describe(const KeyBasis&, BasisChange, std::span<const BasisJob>, const float*,
                          Stream&) {
  refuse("BasisBatch");
}
void BasisTable::run(const float*, BasisStart, Stream&) { refuse("BasisBatch"); }

void channel_ends(std::span<const float* const>, int, int, std::span<float>, std::span<float>,
                  Stream&) {
  refuse("channel_ends");
}

}  // namespace kvlm::cuda
