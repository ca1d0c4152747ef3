#include "kernels/base/readback.h"

#include <algorithm>
#include <cassert>
#include <utility>

#include "kernels/base/queue.h"
#include "kernels/cuda/device/pinned.h"
#include "kernels/cuda/device/status.h"

namespace kvlm {

struct Readback::State {
  cuda::PinnedMemory memory;
};

Readback::Readback() = default;
Readback::~Readback() = default;
Readback::Readback(Readback&& other) noexcept
    : state_(std::move(other.state_)), bytes_(std::exchange(other.bytes_, 0)) {}
Readback& Readback::operator=(Readback&& other) noexcept {
  state_ = std::move(other.state_);
  bytes_ = std::exchange(other.bytes_, 0);
  return *this;
}

void Readback::start(const void* from, size_t bytes, Stream& stream) {
  assert(!stream.queue().is_recording());
  if (state_ == nullptr) state_ = std::make_unique<State>();
  state_->memory.wait();
  if (bytes > bytes_) {
    const size_t room = std::max(bytes, bytes_ + bytes_ / 2);  // a GPU waits for such memory
    bytes_ = 0;
    state_->memory.reserve(room);
    bytes_ = room;
  }
  cuda::check(cudaMemcpyAsync(state_->memory.data(), from, bytes, cudaMemcpyDeviceToHost,
                              static_cast<cudaStream_t>(stream.queue().native())),
              "a copy to the host");
  state_->memory.lend(stream);
}

const std::byte* Readback::wait() const {
  assert(state_ != nullptr);
  state_->memory.wait();
  return state_->memory.data();
}

}  // namespace kvlm
