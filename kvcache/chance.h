#pragma once

#include <cstdint>

namespace kvlm {

/// Output of splitmix64 for `state` (Steele et al. 2014, "Fast Splittable Pseudorandom Number
/// Generators", fig. 17).
constexpr uint64_t splitmix64(uint64_t state) noexcept {
  state += 0x9e3779b97f4a7c15u;
  state = (state ^ (state >> 30)) * 0xbf58476d1ce4e5b9u;
  state = (state ^ (state >> 27)) * 0x94d049bb133111ebu;
  return state ^ (state >> 31);
}

/// The upper 53 bits of a random word as a number in [0, 1).
constexpr double unit_number(uint64_t word) noexcept {
  return static_cast<double>(word >> 11) * 0x1p-53;
}

}  // namespace kvlm
