#pragma once

#include <memory>
#include <span>

#include "kernels/attend_packed.h"

// The CUDA implementation of kernels/attend_packed.h, which has checked the arguments; a build
// without CUDA links no_cuda/attend_packed.cpp instead, which throws Error{kUnsupported}.
namespace kvlm::cuda {

void attend_packed(std::span<PackedLane> lanes, int q_per_kv, int head_dim, float scale,
                   Stream& stream);

/// PackedBatch on a GPU, where the lanes' description stays.
class LaneTable {
 public:
  explicit LaneTable(Device device);
  ~LaneTable();

  void describe(std::span<PackedLane> lanes, int q_per_kv, int head_dim, const float* q,
                const float* out, bool keep, Stream& stream);
  void attend(const float* q, float* out, float scale, Stream& stream);
  int64_t guarded_remaps() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

void unpack_blocks(const PackedFormat& format, std::span<const PackedBlock> blocks, float* out,
                   Stream& stream);

}  // namespace kvlm::cuda
