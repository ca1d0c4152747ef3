#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/cpu/vnni/layout.h"
#include "kernels/cpu/vnni/target.h"

KVLM_BEFORE_VNNI()
namespace kvlm::cpu::vnni {

/// A section of a tile of values: lanes are channels, and a dword holds one channel of four rows,
/// so that four weights, broadcast to all lanes, meet four rows at once and a lane's sum is its
/// channel's.
///   rows      (kValueRows,) packed rows, the last repeated where there are fewer
///   count     of rows that are there
///   next      (kValueRows,) rows to fetch meanwhile
///   unpacked  (count, section.width + kRowSlack) workspace
///   tile      (section.width / 16, kValueRows / 4, 16, 4)
void load_value_tile(const PaddedSection& section, const uint8_t* const* rows, size_t count,
                     const uint8_t* const* next, uint8_t* unpacked, uint8_t* tile);

}  // namespace kvlm::cpu::vnni
KVLM_AFTER_VNNI()
