#include "kernels/cuda/device/pinned.h"

#include <fmt/format.h>

#include <utility>

#include "kernels/base/error.h"
#include "kernels/base/queue.h"
#include "kernels/cuda/device/status.h"

namespace kvlm::cuda {

PinnedMemory::~PinnedMemory() {
  if (used_ != nullptr) {
    static_cast<void>(cudaEventSynchronize(static_cast<cudaEvent_t>(used_)));
    static_cast<void>(cudaEventDestroy(static_cast<cudaEvent_t>(used_)));
  }
  static_cast<void>(cudaFreeHost(data_));
  static_cast<void>(cudaGetLastError());  // at the end of a program the driver may be gone
}

void PinnedMemory::reserve(size_t bytes) {
  if (bytes <= bytes_) return;
  wait();
  static_cast<void>(cudaFreeHost(std::exchange(data_, nullptr)));  // first: not both are held
  bytes_ = 0;
  void* data = nullptr;
  const cudaError_t status = cudaMallocHost(&data, bytes);
  if (status == cudaErrorMemoryAllocation) {
    static_cast<void>(cudaGetLastError());
    throw Error(ErrorCode::kOutOfMemory,
                fmt::format("the host cannot provide {} bytes of pinned memory, which GPU copies "
                            "need; use a smaller batch, or allow more locked memory",
                            bytes));
  }
  check(status, "pinned host memory");
  data_ = static_cast<std::byte*>(data);
  bytes_ = bytes;
}

void PinnedMemory::lend(Stream& stream) {
  if (used_ == nullptr) {
    cudaEvent_t made = nullptr;
    check(cudaEventCreateWithFlags(&made, cudaEventDisableTiming), "cudaEventCreate");
    used_ = made;
  }
  check(cudaEventRecord(static_cast<cudaEvent_t>(used_),
                        static_cast<cudaStream_t>(stream.queue().native())),
        "pinned host memory");
}

void PinnedMemory::wait() const {
  if (used_ == nullptr) return;
  check(cudaEventSynchronize(static_cast<cudaEvent_t>(used_)), "pinned host memory");
}

}  // namespace kvlm::cuda
