#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/base/dtype.h"
#include "kvcache/quantizer.h"

namespace kvlm {

/// Memory that a plane needs at most. A fork's blocks and packed_rows count those that it shares,
/// which take none of its bytes.
struct PlaneCapacity {
  int64_t blocks = 0;       ///< packed blocks of block_rows rows
  int64_t packed_rows = 0;  ///< rows ever packed
  size_t packed_bytes = 0;  ///< of all of them
  int64_t ring_rows = 0;    ///< full-precision rows
  size_t ring_bytes = 0;    ///< of all of them
  size_t bytes() const noexcept { return packed_bytes + ring_bytes; }
};

/// What the rows of a plane are and how they are packed; the same for all planes of a layer and
/// side.
struct PlaneLayout {
  const Packing* packing = nullptr;  ///< null: rows are never packed
  int head_dim = 0;
  DType dtype = DType::kF16;  ///< of full rows
  bool once = false;          ///< never grows: packed once, a prompt at a time, in blocks of any
                              ///< size, or full rows of what another store packs once
  bool shared = false;        ///< codes lie in another plane's memory; only scales are stored
  bool writes = true;         ///< codes are made from its rows
  bool evicts = true;         ///< slots may be dropped

  /// Rows of a full block; blocks of once-packed planes have no such size.
  int block_rows() const noexcept;
  bool by_token() const noexcept { return packing->format.axis == ScaleAxis::kToken; }
  size_t row_bytes() const noexcept { return static_cast<size_t>(head_dim) * dtype_bytes(dtype); }
  /// Bytes set aside for a block of `rows` rows.
  size_t block_bytes(int rows) const noexcept;
  /// Bytes in use by `rows` packed rows of one block.
  size_t packed_bytes(int rows) const noexcept;
  /// From a block's begin to its scales.
  size_t scales_offset(int rows) const noexcept;
  /// The zero points of a block whose scales are there; null if the format stores none.
  std::byte* zeros_behind(std::byte* scales, int rows) const noexcept;

  /// Enough for `planes` planes that hold `packed_rows` rows ever packed between them, in `spans`
  /// blocks each if packed once, and `full_rows` unpacked at a time.
  PlaneCapacity capacity(int64_t planes, int64_t packed_rows, int64_t spans,
                         int64_t full_rows) const noexcept;
};

}  // namespace kvlm
