#include "kernels/base/device.h"

#include <fmt/format.h>

#include <vector>

#include "kernels/base/buffer.h"

namespace kvlm {

std::string device_name(Device device) {
  return device.kind == DeviceKind::kCpu ? "cpu" : fmt::format("cuda:{}", device.index);
}

struct Stream::Scratch {
  std::vector<Buffer> of_worker;
};

Stream::Stream(ThreadPool& pool) : pool_(&pool), scratch_(std::make_unique<Scratch>()) {
  scratch_->of_worker.resize(static_cast<size_t>(pool.threads()));
}

Stream::~Stream() = default;

std::byte* Stream::scratch(int worker, size_t bytes) {
  Buffer& buffer = scratch_->of_worker[static_cast<size_t>(worker)];
  if (buffer.bytes() < bytes) buffer = Buffer({}, bytes);
  return buffer.data();
}

void Stream::synchronize() {}

}  // namespace kvlm
