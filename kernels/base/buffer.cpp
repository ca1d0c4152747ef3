#include "kernels/base/buffer.h"

#include <fmt/format.h>

#include <cstdlib>
#include <utility>

#include "kernels/base/error.h"

namespace kvlm {

namespace {

constexpr size_t kAlignment = 64;

}  // namespace

Buffer::Buffer(Device device, size_t bytes) : device_(device), bytes_(bytes) {
  if (device.kind != DeviceKind::kCpu) {
    throw Error(ErrorCode::kUnsupported,
                fmt::format("device {} is not built in; use --device cpu", device_name(device)));
  }
  if (bytes == 0) return;
  const size_t rounded = (bytes + kAlignment - 1) / kAlignment * kAlignment;
  if (rounded >= bytes) data_ = static_cast<std::byte*>(std::aligned_alloc(kAlignment, rounded));
  if (data_ == nullptr) {
    throw Error(
        ErrorCode::kOutOfMemory,
        fmt::format("cannot reserve {} bytes of memory on {}; use a smaller model, batch or "
                    "cache",
                    bytes, device_name(device)));
  }
}

Buffer::~Buffer() { std::free(data_); }

Buffer::Buffer(Buffer&& other) noexcept
    : device_(other.device_),
      data_(std::exchange(other.data_, nullptr)),
      bytes_(std::exchange(other.bytes_, 0)) {}

Buffer& Buffer::operator=(Buffer&& other) noexcept {
  if (this != &other) {
    std::free(data_);
    device_ = other.device_;
    data_ = std::exchange(other.data_, nullptr);
    bytes_ = std::exchange(other.bytes_, 0);
  }
  return *this;
}

}  // namespace kvlm
