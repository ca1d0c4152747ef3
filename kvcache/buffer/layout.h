#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/base/dtype.h"
#include "kvcache/quantizer.h"

namespace kvlm {

/// Capacity that a buffer needs. For a fork, `blocks` and `packed_rows` include shared blocks,
/// which take no bytes.
struct BufferCapacity {
  int64_t blocks = 0;       ///< packed blocks of block_rows tokens
  int64_t packed_rows = 0;  ///< tokens ever packed
  size_t packed_bytes = 0;  ///< of all blocks
  int64_t ring_rows = 0;    ///< unpacked tokens
  size_t ring_bytes = 0;    ///< of the ring
  size_t bytes() const noexcept { return packed_bytes + ring_bytes; }
};

/// How a buffer stores its tokens; the same for all KV heads of a layer and side.
struct BufferLayout {
  const Packing* packing = nullptr;  ///< null: never packed
  int head_dim = 0;
  DType dtype = DType::kF16;  ///< of unpacked tokens
  /// Packed once, at the end of a prompt, in blocks of any size; never grows after that. Also set
  /// for a side that such a quantizer leaves unpacked.
  bool once = false;
  bool shared = false;  ///< codes are in another buffer; only scales are stored
  bool writes = true;   ///< this buffer makes the codes
  bool evicts = true;   ///< the rule evicts in decode

  /// Tokens of a full block; not meaningful if packed `once`.
  int block_rows() const noexcept;
  bool by_token() const noexcept { return packing->format.axis == ScaleAxis::kToken; }
  size_t row_bytes() const noexcept { return static_cast<size_t>(head_dim) * dtype_bytes(dtype); }
  /// Bytes reserved for a block of `rows` tokens.
  size_t block_bytes(int rows) const noexcept;
  /// Bytes in use by `rows` packed tokens of one block.
  size_t packed_bytes(int rows) const noexcept;
  /// Offset of the scales in a block.
  size_t scales_offset(int rows) const noexcept;
  /// The zero points of a block, which follow its scales; null if the format stores none.
  std::byte* zeros_behind(std::byte* scales, int rows) const noexcept;

  /// Capacity for `buffers` buffers, which together pack `packed_rows` tokens (if once: in `spans`
  /// blocks each) and hold `full_rows` unpacked ones.
  BufferCapacity capacity(int64_t buffers, int64_t packed_rows, int64_t spans,
                          int64_t full_rows) const noexcept;
};

}  // namespace kvlm
