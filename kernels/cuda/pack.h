#pragma once

#include <memory>

#include "kernels/pack.h"

// The CUDA implementation of kernels/pack.h, which has checked the arguments; a build without CUDA
// links no_cuda/pack.cpp instead, which throws Error{kUnsupported}.
namespace kvlm::cuda {

void pack(const PackedFormat& format, const std::array<PackRule, 2>& rules,
          std::span<const PackJob> jobs, Stream& stream);

/// RingPacker on a GPU.
class RingTable {
 public:
  explicit RingTable(Device device);
  ~RingTable();
  void describe(const PackedFormat& format, const std::array<PackRule, 2>& rules, DType dtype,
                std::span<const PackedRing> rings, Stream& stream);
  void run(Stream& stream);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace kvlm::cuda
