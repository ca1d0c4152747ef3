#pragma once

#include <span>

#include "kernels/cuda/pack/kept_bytes.cuh"
#include "kernels/key_basis.h"

// Jobs of change_basis() on the GPU, for key_basis.cu and fourier_basis.cu.
namespace kvlm::cuda {

/// BasisJob.
struct BasisRows {
  const float* from;
  float* to;
  int rows;
  int channels;  // index of its order of channels
  int before;    // rows of earlier jobs
};

struct BasisLaunch {
  const BasisRows* jobs = nullptr;
  const uint16_t* lists = nullptr;  // (orders, dim) channels
  const float* matrix = nullptr;    // null: only reorder channels
  unsigned count = 0;
  int most = 0;  // rows of a job
  int rows = 0;  // of all
  int dim = 0;
  int first = 0;
  bool back = false;
};

/// Uploads jobs, their orders of channels and the matrix, to `kept` if given.
BasisLaunch describe_jobs(const KeyBasis& basis, BasisChange change, std::span<const BasisJob> jobs,
                          KeptBytes* kept, Stream& stream);

}  // namespace kvlm::cuda
