#include "kvcache/buffer/layout.h"

namespace kvlm {

namespace {

// Scales per token need no blocks: this many tokens share a bitmap and are freed together.
constexpr int kTokenBlockRows = 32;
constexpr size_t kAlignment = 16;

constexpr size_t aligned(size_t bytes) noexcept {
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

size_t codes_bytes(const BufferLayout& layout, int rows) noexcept {
  return layout.shared ? 0 : static_cast<size_t>(rows) * layout.packing->format.row_bytes();
}

}  // namespace

int BufferLayout::block_rows() const noexcept {
  if (packing == nullptr) return 0;
  return by_token() ? kTokenBlockRows : packing->format.block_rows;
}

size_t BufferLayout::block_bytes(int rows) const noexcept {
  return aligned(scales_offset(rows) + packing->format.meta_bytes(rows));
}

size_t BufferLayout::packed_bytes(int rows) const noexcept {
  return codes_bytes(*this, rows) + packing->format.meta_bytes(rows);
}

size_t BufferLayout::scales_offset(int rows) const noexcept {
  return aligned(codes_bytes(*this, rows));
}

std::byte* BufferLayout::zeros_behind(std::byte* scales, int rows) const noexcept {
  const PackedFormat& format = packing->format;
  if (format.zeros(rows) == 0) return nullptr;
  return scales + format.scales(rows) * dtype_bytes(format.meta);
}

BufferCapacity BufferLayout::capacity(int64_t buffers, int64_t packed_rows, int64_t spans,
                                      int64_t full_rows) const noexcept {
  BufferCapacity capacity;
  capacity.ring_rows = full_rows;
  capacity.ring_bytes = static_cast<size_t>(full_rows) * row_bytes();
  if (packing == nullptr || packed_rows == 0) return capacity;
  capacity.packed_rows = packed_rows;
  if (once) {
    // Blocks of any size: codes and metadata, and per block up to two alignment gaps.
    capacity.blocks = buffers * spans;
    const auto rows = static_cast<size_t>(packed_rows);
    const size_t meta_of_row = by_token() ? packing->format.meta_bytes(1) : 0;
    const size_t meta_of_block = packing->format.meta_bytes(by_token() ? 0 : 1);
    capacity.packed_bytes = rows * (codes_bytes(*this, 1) + meta_of_row) +
                            static_cast<size_t>(capacity.blocks) * (meta_of_block + 2 * kAlignment);
    return capacity;
  }
  // Every buffer may have a short first block, from a ragged prompt, and a last one.
  capacity.blocks = packed_rows / block_rows() + 2 * buffers;
  capacity.packed_bytes = static_cast<size_t>(capacity.blocks) * block_bytes(block_rows());
  return capacity;
}

}  // namespace kvlm
