#pragma once

#include "kernels/cuda/pack/basis_jobs.cuh"

namespace kvlm::cuda {

/// change_basis() of keys, into a KeyBasis.cufft and back, by cuFFT: the same numbers as by its
/// matrix but for rounding, 2e-6 times the largest (Cufft.EqualsTheTable).
void change_by_cufft(const BasisLaunch& jobs, Stream& stream);

/// Loads cuFFT and makes what the calling thread transforms rows of n channels with on GPU `index`,
/// which takes a tenth of a second. Throws Error{kUnsupported} where there is no cuFFT, and what
/// check_fft() throws.
void prepare_cufft(int n, int index);

}  // namespace kvlm::cuda
