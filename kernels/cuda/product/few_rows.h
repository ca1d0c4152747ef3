#pragma once

#include <cstdint>
#include <span>

#include "kernels/base/tensor.h"
#include "kernels/gemm.h"

// Products of up to four rows of x: memory-bound, each weight is read once for all rows.
namespace kvlm::cuda {

/// Above this many rows of half-precision weights the tensor cores are faster.
constexpr int64_t kFewRows = 4;

/// Projections of one launch, at most.
constexpr int kMostProjections = 3;

/// What multiply_few makes of its sums.
struct FewWork {
  bool add = false;
  float* gated = nullptr;  // (rows, out): activation(first projection) * second projection
  Activation activation = Activation::kSilu;
};

/// Multiplies 1 to kFewRows rows of x (rows, in), f32, with up to kMostProjections weights of one
/// type, whose rows are whole 16 bytes, all aligned to 16 bytes. Asynchronous.
void multiply_few(std::span<const Projection> projections, ConstTensorView x, const FewWork& work,
                  Stream& stream);

}  // namespace kvlm::cuda
