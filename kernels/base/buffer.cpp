#include "kernels/base/buffer.h"

#include <fmt/format.h>
#include <sys/mman.h>

#include <cstdlib>
#include <utility>

#include "kernels/base/error.h"
#include "kernels/base/queue.h"

namespace kvlm {

namespace {

constexpr size_t kAlignment = 64;
// What decode reads, weights and cache, it reads once a step: with pages of 4 KiB the walk of the
// page tables costs a third of the bandwidth.
constexpr size_t kHugePage = size_t{2} << 20;

}  // namespace

Buffer::Buffer(Device device, size_t bytes) : device_(device), bytes_(bytes) {
  if (device.kind == DeviceKind::kCuda) {
    data_ = cuda::allocate(device.index, bytes);
    return;
  }
  if (bytes == 0) return;
  const size_t alignment = bytes >= 2 * kHugePage ? kHugePage : kAlignment;
  const size_t rounded = (bytes + alignment - 1) / alignment * alignment;
  if (rounded >= bytes) data_ = static_cast<std::byte*>(std::aligned_alloc(alignment, rounded));
  if (data_ == nullptr) {
    throw Error(
        ErrorCode::kOutOfMemory,
        fmt::format("cannot reserve {} bytes of memory on {}; use a smaller model, batch or "
                    "cache",
                    bytes, device_name(device)));
  }
  if (alignment == kHugePage) madvise(data_, rounded, MADV_HUGEPAGE);  // a wish: it may be refused
}

Buffer::~Buffer() { free(); }

void Buffer::free() noexcept {
  if (device_.kind == DeviceKind::kCuda) {
    cuda::release(device_.index, data_);
  } else {
    std::free(data_);
  }
  data_ = nullptr;
}

Buffer::Buffer(Buffer&& other) noexcept
    : device_(other.device_),
      data_(std::exchange(other.data_, nullptr)),
      bytes_(std::exchange(other.bytes_, 0)) {}

Buffer& Buffer::operator=(Buffer&& other) noexcept {
  if (this != &other) {
    free();
    device_ = other.device_;
    data_ = std::exchange(other.data_, nullptr);
    bytes_ = std::exchange(other.bytes_, 0);
  }
  return *this;
}

}  // namespace kvlm
