#pragma once

#include <memory>
#include <span>

#include "kernels/row_batch.h"

// The CUDA implementation of kernels/row_batch.h, which has checked the arguments; a build without
// CUDA links no_cuda/row_batch.cpp instead, which throws Error{kUnsupported}.
namespace kvlm::cuda {

class RowTable {
 public:
  explicit RowTable(Device device);
  ~RowTable();

  void describe(std::span<const RowLane> lanes, std::span<const KeyValueRows> runs, int q_per_kv,
                int head_dim, const float* q, const float* out, bool keep, bool grows,
                Stream& stream);
  int room() const noexcept;
  void append(const float* k, const float* v, Stream& stream);
  void appended() noexcept;
  void attend(const float* q, float* out, float scale, Stream& stream);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace kvlm::cuda
