#include "kernels/cpu/vnni/layout.h"

#include <algorithm>

namespace kvlm::cpu::vnni {

namespace {

/// Codes per byte of keys that are shifted and masked without unpacking; 0 if codes straddle bytes,
/// or a group of channels ends within a dword.
size_t direct_codes_per_byte(const PackedFormat& format, CodeFormat code) {
  size_t count = with_code(code, [&](auto of) -> size_t {
    if constexpr (codecs::Codebook<decltype(of)>) return 0;
    if constexpr (of.kBits != 0) return 8 % of.kBits == 0 ? 8 / of.kBits : 0;
    return kIsTrits<decltype(of)> && format.axis != ScaleAxis::kToken ? 5 : 0;
  });
  if (format.axis == ScaleAxis::kToken && count != 0 &&
      static_cast<size_t>(format.group_size) % (4 * count) != 0 &&
      format.group_size < format.channels()) {
    count = 0;
  }
  return count;
}

}  // namespace

PaddedFormat pad(const PackedFormat& format) {
  PaddedFormat padded;
  size_t row_offset = 0;
  size_t channel = 0;
  for (int i = 0; i < format.sections; ++i) {
    const PackedSection& stored = format.section[static_cast<size_t>(i)];
    PaddedSection& section = padded.section[padded.sections++];
    section.stored = &stored;
    section.row_offset = row_offset;
    section.first_channel = channel;
    section.first = padded.width;
    const auto channels = static_cast<size_t>(stored.channels);
    const size_t direct = direct_codes_per_byte(format, stored.code);
    section.unpack = direct == 0;
    section.codes_per_byte = std::max<size_t>(direct, 1);
    section.columns = ((section.unpack ? channels : stored.row_bytes()) + 3) / 4;
    section.width = round_up(std::max(channels, section.columns * 4 * section.codes_per_byte), 32);
    padded.width += section.width;
    row_offset += stored.row_bytes();
    channel += channels;
  }
  return padded;
}

}  // namespace kvlm::cpu::vnni
