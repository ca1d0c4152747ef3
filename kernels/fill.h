#pragma once

#include <cstdint>

#include "kernels/base/host_device.h"
#include "kernels/base/tensor.h"

namespace kvlm {

/// Number `i` of the sequence that `seed` starts: uniform over [-width, width), in steps of
/// width * 2^-23. Of i and the seed alone, so that any part of a sequence can be made anywhere.
/// Source: Steele, Lea & Flood 2014, "Fast splittable pseudorandom number generators", the
/// finaliser of SplitMix64 (Stafford's variant 13).
VLM_HD constexpr float random_value(uint64_t seed, uint64_t i, float width) noexcept {
  uint64_t bits = seed + (i + 1) * 0x9e3779b97f4a7c15ull;
  bits = (bits ^ (bits >> 30)) * 0xbf58476d1ce4e5b9ull;
  bits = (bits ^ (bits >> 27)) * 0x94d049bb133111ebull;
  bits ^= bits >> 31;
  const auto steps = static_cast<int32_t>(bits >> 40) - (1 << 23);
  return static_cast<float>(steps) * 0x1p-23f * width;
}

/// out[i] = random_value(seed, i, width), rounded to out's dtype (which may round the largest up to
/// width itself); the same bits on every device.
///
///   out    any shape  f32 | f16 | bf16
///   width  finite, at least 0
///
/// Asynchronous on CUDA. Throws Error{kInvalidArgument} on a dtype or device mismatch.
void fill_random(TensorView out, uint64_t seed, float width, Stream& stream);

}  // namespace kvlm
