#pragma once

#include "kernels/codecs/bits.h"
#include "kernels/codecs/bits21.h"
#include "kernels/codecs/lloyd_max.h"
#include "kernels/codecs/nf4.h"
#include "kernels/codecs/trits.h"

namespace kvlm {

/// Whether a number is a code.
constexpr bool is_code(CodeFormat format) noexcept {
  return format >= CodeFormat::kBits1 && format < CodeFormat::kEnd;
}

/// Returns with(codecs::Code<format>()), the one dispatch over codes. `format` must be a code.
#if defined(__CUDACC__)
#pragma nv_exec_check_disable
#endif
template <CodeFormat kFormat = CodeFormat::kBits1, class With>
VLM_HD constexpr auto with_code(CodeFormat format, const With& with) {
  constexpr auto kNext = static_cast<CodeFormat>(static_cast<int>(kFormat) + 1);
  if constexpr (kNext != CodeFormat::kEnd) {
    if (format != kFormat) return with_code<kNext>(format, with);
  }
  return with(codecs::Code<kFormat>());
}

/// Bits of one stored code; 0 if not a whole number.
VLM_HD constexpr int code_bits(CodeFormat format) noexcept {
  return with_code(format, [](auto code) { return code.kBits; });
}

/// The greatest stored code.
VLM_HD constexpr int max_code(CodeFormat format) noexcept {
  return with_code(format, [](auto code) { return code.kMaxCode; });
}

/// The rule that makes codes of a format.
VLM_HD constexpr CodeRule rule_of(CodeFormat format) noexcept {
  return with_code(format, [](auto code) { return code.kRule; });
}

/// Codes of a unit of packing (whole bytes).
VLM_HD constexpr int unit_codes(CodeFormat format) noexcept {
  return with_code(format, [](auto code) { return code.kUnitCodes; });
}

/// Bytes of a row of `elements` codes.
VLM_HD constexpr size_t code_row_bytes(CodeFormat format, int elements) noexcept {
  return with_code(format, [elements](auto code) {
    return (static_cast<size_t>(elements) * code.kUnitBytes + (code.kUnitCodes - 1)) /
           code.kUnitCodes;
  });
}

/// The integer c of code i of a row.
VLM_HD constexpr int code_at(const uint8_t* row, CodeFormat format, int i) noexcept {
  return with_code(format, [row, i](auto code) { return code.at(row, i); });
}

/// Packs a row of `count` codes, given one per byte: its units from `first` on, at most `units`.
VLM_HD constexpr void pack_row(uint8_t* row, CodeFormat format, const uint8_t* codes, int count,
                               int first = 0, int units = 1 << 30) noexcept {
  with_code(format, [=](auto code) {
    for (int i = first; i < first + units && i * code.kUnitCodes < count; ++i) {
      const int n = count - i * code.kUnitCodes;
      code.pack(row + i * code.kUnitBytes, codes + i * code.kUnitCodes,
                n < code.kUnitCodes ? n : code.kUnitCodes);
    }
  });
}

}  // namespace kvlm
