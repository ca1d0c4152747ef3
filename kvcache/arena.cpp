#include "kvcache/arena.h"

#include <fmt/format.h>

#include <cassert>
#include <utility>

#include "kernels/base/error.h"
#include "kernels/base/human_bytes.h"

namespace kvlm {

ArenaExtent& ArenaExtent::operator=(ArenaExtent&& other) noexcept {
  if (this != &other) {
    release();
    arena_ = std::exchange(other.arena_, nullptr);
    used_by_owner_ = other.used_by_owner_;
    offset_ = other.offset_;
    reserved_ = std::exchange(other.reserved_, 0);
    used_ = std::exchange(other.used_, 0);
  }
  return *this;
}

std::byte* ArenaExtent::data() const noexcept {
  return arena_ == nullptr ? nullptr : arena_->buffer_.data() + offset_;
}

void ArenaExtent::set_used(size_t bytes) noexcept {
  assert(bytes <= reserved_);
  for (size_t* sum : {&arena_->used_, used_by_owner_}) {
    if (sum != nullptr) *sum += bytes - used_;
  }
  used_ = bytes;
}

void ArenaExtent::shrink(size_t bytes) noexcept {
  const size_t kept = Arena::rounded(bytes);
  assert(used_ <= kept && kept <= reserved_);
  ArenaExtent rest;
  rest.arena_ = arena_;
  rest.offset_ = offset_ + kept;
  rest.reserved_ = reserved_ - kept;
  reserved_ = kept;
}

void ArenaExtent::release() noexcept {
  if (arena_ == nullptr) return;
  set_used(0);
  Arena& arena = *std::exchange(arena_, nullptr);
  arena.reserved_ -= reserved_;
  size_t bytes = std::exchange(reserved_, 0);
  if (bytes == 0) return;
  const auto next = arena.free_.lower_bound(offset_);
  if (next != arena.free_.end() && offset_ + bytes == next->first) {
    bytes += next->second;
    auto node = arena.free_.extract(next);
    node.key() = offset_;
    node.mapped() = bytes;
    arena.free_.insert(std::move(node));
  } else {
    arena.free_.emplace(offset_, bytes);
  }
  const auto self = arena.free_.find(offset_);
  if (self != arena.free_.begin()) {
    const auto previous = std::prev(self);
    if (previous->first + previous->second == offset_) {
      previous->second += self->second;
      arena.free_.erase(self);
    }
  }
}

Arena::Arena(Device device, size_t bytes) : buffer_(device, rounded(bytes), MemoryUse::kCache) {
  if (buffer_.bytes() > 0) free_.emplace(0, buffer_.bytes());
}

ArenaExtent Arena::reserve(size_t bytes, const std::string& who, size_t* used_by_owner) {
  const size_t wanted = rounded(bytes);
  ArenaExtent extent;
  extent.arena_ = this;
  extent.used_by_owner_ = used_by_owner;
  extent.reserved_ = wanted;
  if (wanted == 0) return extent;
  for (auto range = free_.begin(); range != free_.end(); ++range) {
    if (range->second < wanted) continue;
    extent.offset_ = range->first;
    const size_t left = range->second - wanted;
    auto node = free_.extract(range);
    if (left > 0) {
      node.key() = extent.offset_ + wanted;
      node.mapped() = left;
      free_.insert(std::move(node));
    }
    reserved_ += wanted;
    return extent;
  }
  extent.arena_ = nullptr;
  extent.reserved_ = 0;
  throw Error(
      ErrorCode::kOutOfMemory,
      fmt::format("{} needs {} of cache, but {} of {} are reserved and no contiguous free range is "
                  "large enough; use a smaller batch, fewer tokens or more cache memory",
                  who, human_bytes(wanted), human_bytes(reserved_), human_bytes(capacity())));
}

bool Arena::fits(size_t bytes, size_t count) const noexcept {
  const size_t wanted = rounded(bytes);
  if (wanted == 0) return true;
  size_t places = 0;
  for (const auto& [offset, length] : free_) places += length / wanted;
  return places >= count;
}

}  // namespace kvlm
