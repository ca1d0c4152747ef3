#pragma once

#include <cooperative_groups.h>
#include <cuda_runtime.h>

#include <array>

// Thread blocks that work together. Only GPUs on which Queue::overlaps_kernels() have clusters of
// more than one.
namespace kvlm::cuda {

/// The thread blocks of a cluster.
struct Cluster {
  int blocks;
  int rank;

  __device__ void sync() const {
    if (blocks == 1) return __syncthreads();
    arrive();
    wait();
  }
  /// Publishes this block's writes to shared memory to blocks that wait().
  __device__ void arrive() const {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
  }
  __device__ void wait() const {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
  }
  /// Waits until all blocks have read the others' shared memory, before this block ends.
  __device__ void await_readers() const {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    if (blocks == 1) return;
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
    wait();
#endif
  }
  /// Address in block `of` of what this block has at `mine`.
  template <class T>
  __device__ const T* in(int of, const T* mine) const {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    if (blocks > 1) {
      return cooperative_groups::this_cluster().map_shared_rank(mine, static_cast<unsigned>(of));
    }
#endif
    return mine;
  }
};

/// Attributes of launches that start while the previous one ends, in clusters of `blocks`.
inline std::array<cudaLaunchAttribute, 2> early_clusters(unsigned blocks) {
  std::array<cudaLaunchAttribute, 2> attributes{};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim = {blocks, 1, 1};
  return attributes;
}

}  // namespace kvlm::cuda
