#pragma once

#include "kernels/key_basis.h"

// CUDA's implementation of kernels/key_basis.h, which has checked the arguments.
namespace kvlm::cuda {

void change_basis(const KeyBasis& basis, BasisChange change, std::span<const BasisJob> jobs,
                  Stream& stream);
void prepare_basis(const KeyBasis& basis, int index);

void channel_ends(std::span<const float* const> x, int rows, int dim, std::span<float> low,
                  std::span<float> high, Stream& stream);

}  // namespace kvlm::cuda
