#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "kernels/base/dtype.h"
#include "kernels/base/host_device.h"
#include "kernels/codecs/list.h"

namespace kvlm {

/// Which elements share one scale (and zero point).
enum class ScaleAxis : uint8_t {
  kHead,     ///< all rows and channels of a block
  kChannel,  ///< one channel over all rows of a block
  kToken,    ///< `group_size` channels of one row
};

/// A range of channels with one code. Code c of channel d stands for
///
///   x = slope * s * c + z,   z the stored zero point, or offset_d * s if none is stored
///
/// with s the stored scale of its group. Zero points of ternary digits, codebooks (section_of())
/// and signs (slope 2, offset -1) are implied.
struct PackedSection {
  CodeFormat code = CodeFormat::kBits8;
  int channels = 0;
  bool zero_stored = true;
  float slope = 1;
  float offset = 0;
  /// First channel of the section whose offset is offset_after: the imaginary parts of VidKV's
  /// zero_mean spectra.
  int split = 1 << 30;
  float offset_after = 0;

  VLM_HD constexpr float offset_of(int channel) const noexcept {
    return channel < split ? offset : offset_after;
  }
  VLM_HD constexpr size_t row_bytes() const noexcept { return code_row_bytes(code, channels); }
  bool operator==(const PackedSection&) const = default;
};

/// A section with the slope and offset of its codec.
constexpr PackedSection section_of(CodeFormat format, int channels) noexcept {
  return with_code(format, [=](auto code) {
    return PackedSection{.code = format,
                         .channels = channels,
                         .zero_stored = code.kZeroStored,
                         .slope = codecs::slope_of<decltype(code)>(channels),
                         .offset = codecs::offset_of<decltype(code)>(channels)};
  });
}

/// How the keys or the values of one kv_head are packed. A block of rows is
///
///   codes   (rows, row_bytes())            the sections of a row adjacent, each from a whole byte
///   scales  kHead (1,) | kChannel (channels(),) | kToken (rows, groups())     dtype `meta`
///   zeros   as scales, over the sections with zero_stored only
///
/// Two sections occur with kChannel only (VidKV's 2-bit and 1-bit channels).
struct PackedFormat {
  ScaleAxis axis = ScaleAxis::kToken;
  /// kToken: channels that share a scale; the last group may be shorter.
  int group_size = 0;
  /// kHead, kChannel: rows of a full block, which share scales; 0 means all rows packed together.
  int block_rows = 0;
  DType meta = DType::kF16;  ///< f16 | f32
  int sections = 1;
  std::array<PackedSection, 2> section{};

  VLM_HD constexpr int channels() const noexcept {
    return section[0].channels + (sections > 1 ? section[1].channels : 0);
  }
  VLM_HD constexpr size_t row_bytes() const noexcept {
    return section[0].row_bytes() + (sections > 1 ? section[1].row_bytes() : 0);
  }
  /// kToken: scales of a row.
  VLM_HD constexpr int groups() const noexcept {
    return (channels() + group_size - 1) / group_size;
  }
  /// Scales of a block of `rows` rows.
  VLM_HD constexpr size_t scales(int rows) const noexcept {
    if (axis == ScaleAxis::kHead) return 1;
    if (axis == ScaleAxis::kChannel) return static_cast<size_t>(channels());
    return static_cast<size_t>(rows) * static_cast<size_t>(groups());
  }
  /// Zero points of a block of `rows` rows.
  VLM_HD constexpr size_t zeros(int rows) const noexcept {
    if (sections == 1) return section[0].zero_stored ? scales(rows) : 0;
    size_t sum = 0;
    for (const PackedSection& part : section) {
      if (part.zero_stored) sum += static_cast<size_t>(part.channels);
    }
    return sum;
  }
  /// Bytes of the scales and zero points of a block.
  VLM_HD constexpr size_t meta_bytes(int rows) const noexcept {
    return (scales(rows) + zeros(rows)) * dtype_bytes(meta);
  }
  bool operator==(const PackedFormat&) const = default;
};

/// Memory of a packed block of tokens. If the block shares codes, `codes` is the other layer's.
struct PackedBlock {
  const std::byte* codes = nullptr;  ///< on CUDA readable up to the next multiple of 4
  const std::byte* scales = nullptr;
  const std::byte* zeros = nullptr;  ///< null if no section stores them
  int rows = 0;                      ///< tokens, evicted ones included
  int live_rows = 0;                 ///< tokens not evicted
  const uint64_t* live = nullptr;    ///< bit r: row r is not evicted; null: none is
};

}  // namespace kvlm
