#pragma once

#include <cstddef>

#include "kernels/attend_packed.h"
#include "kernels/cpu/packed_slots.h"

// Packed attention in integers, for CPUs with AVX-512 VNNI, VBMI and GFNI. A folded query, or the
// weights of a few tokens, are rounded to multiples of 2^-22 of their largest magnitude and split
// into three signed bytes. One SIMD lane of one instruction adds four products of such a byte with
// a code, and sums are exact. Codes become bytes in registers or in a tile that stays in the L1
// cache.
namespace kvlm::cpu::vnni {

/// Whether this CPU has the instructions.
bool available() noexcept;

/// Whether score_blocks and add_blocks support keys and values of this format: all except keys of
/// more than about 500 channels, and groups per token that do not begin at a vector.
bool scores(const PackedFormat& format) noexcept;
bool adds(const PackedFormat& format) noexcept;

/// Memory that a call needs, 64-byte aligned.
size_t scratch_bytes(const PackedFormat& format, size_t queries) noexcept;

/// scores[i * stride + j] = scale * q_i . K_j for the live rows of packed keys.
///   q  (queries, channels)
void score_blocks(const SlotSegment& segment, const float* q, size_t queries, float scale,
                  std::byte* scratch, float* scores, size_t stride) noexcept;

/// out_i += sum_j w_ij V_j over the live rows of packed values.
///   out  (queries, channels)
void add_blocks(const SlotSegment& segment, SlotWalk walk, const SlotWeights& weights,
                std::byte* scratch, float* out) noexcept;

}  // namespace kvlm::cpu::vnni
