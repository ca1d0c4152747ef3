#include "kernels/base/recording.h"

#include <utility>

#include "kernels/base/error.h"
#include "kernels/cuda/device/status.h"

namespace kvlm {

struct Recording::State {
  cudaGraphExec_t graph = nullptr;
  const cuda::Queue* queue = nullptr;
  uint64_t memory_version = 0;
  bool there = false;

  ~State() {
    if (graph != nullptr) static_cast<void>(cudaGraphExecDestroy(graph));
    static_cast<void>(cudaGetLastError());
  }
  /// False if there is no memory for it. The last recording is not brought up to date instead:
  /// that is refused where kernels start early.
  bool take(cudaGraph_t made) {
    if (graph != nullptr) static_cast<void>(cudaGraphExecDestroy(std::exchange(graph, nullptr)));
    const cudaError_t status = cudaGraphInstantiate(&graph, made, 0);
    if (status == cudaErrorMemoryAllocation) {
      static_cast<void>(cudaGetLastError());
      graph = nullptr;
      return false;
    }
    cuda::check(status, "recording");
    return true;
  }
};

Recording::Recording() : state_(std::make_unique<State>()) {}
Recording::~Recording() = default;

bool Recording::make(Stream& stream, const std::function<void()>& body) {
  if (stream.device().kind != DeviceKind::kCuda) {
    throw Error(ErrorCode::kUnsupported, "only work on a GPU can be recorded");
  }
  clear();
  cuda::Queue& queue = stream.queue();
  queue.start_recording();
  try {
    body();
  } catch (...) {
    static_cast<void>(queue.end_recording(false));
    throw;
  }
  auto* made = static_cast<cudaGraph_t>(queue.end_recording(true));
  try {
    state_->there = state_->take(made);
  } catch (...) {
    static_cast<void>(cudaGraphDestroy(made));
    throw;
  }
  static_cast<void>(cudaGraphDestroy(made));
  state_->queue = &queue;
  state_->memory_version = queue.memory_version();
  return state_->there;
}

bool Recording::fits(Stream& stream) const noexcept {
  return state_->there && stream.device().kind == DeviceKind::kCuda &&
         state_->queue == &stream.queue() &&
         state_->memory_version == stream.queue().memory_version();
}

void Recording::run(Stream& stream) {
  cuda::check(cudaGraphLaunch(state_->graph, cuda::native(stream)), "a recorded pass");
}

void Recording::clear() noexcept { state_->there = false; }

}  // namespace kvlm
