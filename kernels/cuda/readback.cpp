#include "kernels/base/readback.h"

#include "kernels/base/queue.h"
#include "kernels/cuda/pinned.h"
#include "kernels/cuda/status.h"

namespace kvlm {

struct Readback::State {
  cuda::PinnedMemory memory;
};

Readback::Readback() = default;
Readback::~Readback() = default;
Readback::Readback(Readback&& other) noexcept = default;
Readback& Readback::operator=(Readback&& other) noexcept = default;

void Readback::start(const void* from, size_t bytes, Stream& stream) {
  if (state_ == nullptr) state_ = std::make_unique<State>();
  state_->memory.wait();
  state_->memory.reserve(bytes);
  cuda::check(cudaMemcpyAsync(state_->memory.data(), from, bytes, cudaMemcpyDeviceToHost,
                              static_cast<cudaStream_t>(stream.queue().native())),
              "a copy to the host");
  state_->memory.lend(stream);
}

const std::byte* Readback::wait() const {
  state_->memory.wait();
  return state_->memory.data();
}

}  // namespace kvlm
