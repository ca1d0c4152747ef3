#pragma once

#include "kernels/cuda/pack/basis_jobs.cuh"

namespace kvlm::cuda {

/// change_basis() of keys by cuFFT, for KeyBasis.cufft. Equal to the product with its matrix except
/// for rounding, 2e-6 times the largest (Cufft.EqualsTheTable).
void change_by_cufft(const BasisLaunch& jobs, Stream& stream);

/// Loads cuFFT and makes the calling thread's plans for n channels on GPU `index`, which takes a
/// tenth of a second. Throws Error{kUnsupported} without cuFFT, and what check_fft() throws.
void prepare_cufft(int n, int index);

}  // namespace kvlm::cuda
