#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/cpu/vnni/layout.h"
#include "kernels/cpu/vnni/target.h"

KVLM_BEFORE_VNNI()
namespace kvlm::cpu::vnni {

/// Builds a section of a tile of values. A SIMD lane is a channel, and its dword holds that channel
/// of four rows: one product multiplies them with four weights, broadcast to all lanes, and a
/// lane's sum is its channel's.
///   rows      (kValueRows,) packed rows, filled up with the last
///   count     rows present
///   next      (kValueRows,) rows to prefetch
///   unpacked  (count, section.width + kRowSlack) workspace
///   tile      (section.width / 16, kValueRows / 4, 16, 4)
void load_value_tile(const PaddedSection& section, const uint8_t* const* rows, size_t count,
                     const uint8_t* const* next, uint8_t* unpacked, uint8_t* tile);

}  // namespace kvlm::cpu::vnni
KVLM_AFTER_VNNI()
