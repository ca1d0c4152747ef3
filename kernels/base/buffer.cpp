#include "kernels/base/buffer.h"

#include <fmt/format.h>
#include <sys/mman.h>

#include <cstdlib>
#include <map>
#include <mutex>
#include <utility>

#include "kernels/base/error.h"
#include "kernels/base/queue.h"

namespace kvlm {

namespace {

constexpr size_t kAlignment = 64;
// What decode reads, weights and cache, it reads once a step: with pages of 4 KiB the walk of the
// page tables costs a third of the bandwidth.
constexpr size_t kHugePage = size_t{2} << 20;
constexpr size_t kGpuPage = size_t{2} << 20;

struct Account {
  std::mutex mutex;
  std::map<std::pair<DeviceKind, int>, MemoryHeld> held;
};

Account& account() {
  static Account account;
  return account;
}

/// Adds to what is held, or takes away from it.
void count(Device device, MemoryUse use, size_t bytes, bool taken) {
  const std::lock_guard lock(account().mutex);
  MemoryHeld& held = account().held[{device.kind, device.index}];
  const auto add = [taken](size_t& sum, size_t more) { sum = taken ? sum + more : sum - more; };
  add(use == MemoryUse::kWeights ? held.weights
      : use == MemoryUse::kCache ? held.cache
                                 : held.workspace,
      bytes);
  if (device.kind == DeviceKind::kCuda && bytes >= kGpuPage) {
    add(held.rounding, (kGpuPage - bytes % kGpuPage) % kGpuPage);
  }
}

}  // namespace

MemoryHeld memory_held(Device device) {
  const std::lock_guard lock(account().mutex);
  return account().held[{device.kind, device.index}];
}

Buffer::Buffer(Device device, size_t bytes, MemoryUse use)
    : device_(device), bytes_(bytes), use_(use) {
  if (device.kind == DeviceKind::kCuda) {
    data_ = cuda::allocate(device.index, bytes);
    if (bytes > 0) count(device, use, bytes, /*taken=*/true);
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
  count(device, use, bytes, /*taken=*/true);
}

Buffer::~Buffer() { free(); }

void Buffer::free() noexcept {
  if (data_ == nullptr) return;
  count(device_, use_, bytes_, /*taken=*/false);
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
      bytes_(std::exchange(other.bytes_, 0)),
      use_(other.use_) {}

Buffer& Buffer::operator=(Buffer&& other) noexcept {
  if (this != &other) {
    free();
    device_ = other.device_;
    data_ = std::exchange(other.data_, nullptr);
    bytes_ = std::exchange(other.bytes_, 0);
    use_ = other.use_;
  }
  return *this;
}

}  // namespace kvlm
