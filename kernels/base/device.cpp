#include "kernels/base/device.h"

#include <fmt/format.h>

#include <utility>
#include <vector>

#include "kernels/base/buffer.h"
#include "kernels/base/queue.h"

namespace kvlm {

std::string device_name(Device device) {
  return device.kind == DeviceKind::kCpu ? "cpu" : fmt::format("cuda:{}", device.index);
}

struct Stream::Scratch {
  std::vector<Buffer> of_worker;
  Buffer shared;
};

namespace {

std::byte* grown(Buffer& buffer, size_t bytes) {
  if (buffer.bytes() < bytes) buffer = Buffer({}, bytes);
  return buffer.data();
}

}  // namespace

Stream::Stream(ThreadPool& pool) : Stream(pool, Device{}) {}

Stream::Stream(ThreadPool& pool, Device device)
    : device_(device), pool_(&pool), scratch_(std::make_unique<Scratch>()) {
  scratch_->of_worker.resize(static_cast<size_t>(pool.threads()));
  if (device.kind == DeviceKind::kCuda) queue_ = std::make_unique<cuda::Queue>(device.index);
}

Stream::~Stream() = default;

std::byte* Stream::scratch(int worker, size_t bytes) {
  return grown(scratch_->of_worker[static_cast<size_t>(worker)], bytes);
}

std::byte* Stream::shared_scratch(size_t bytes) { return grown(scratch_->shared, bytes); }

void* Stream::native() const noexcept { return queue_ ? queue_->native() : nullptr; }

void Stream::enter_thread() const {
  if (queue_) queue_->enter_thread();
}

void Stream::synchronize() {
  if (queue_) queue_->synchronize();
}

Meanwhile::Meanwhile(Stream& stream, std::function<void()> work)
    : stream_(stream), work_(std::move(work)) {
  if (stream_.device().kind == DeviceKind::kCuda) stream_.queue().set_meanwhile(&work_);
}

Meanwhile::~Meanwhile() {
  if (stream_.device().kind == DeviceKind::kCuda) stream_.queue().set_meanwhile(nullptr);
}

}  // namespace kvlm
