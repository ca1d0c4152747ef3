#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "llm/position.h"

namespace kvlm {

/// Where text goes on behind a picture or clip.
enum class MropeAdvance : uint8_t {
  kLongestSide,      ///< max(height, width) behind its first: transformers from 5.3
  kLargestPosition,  ///< one behind the largest position so far: before
};

/// Positions of three axes: text has the same on all, a cell its slice's time, its row and its
/// column, all from where the span begins. Next is one behind the largest.
/// Source: Wang et al. 2024, "Qwen2-VL", sec. 2.1, as transformers' get_rope_index has it.
PromptPositions mrope_positions(std::span<const PositionSpan> spans, MropeAdvance advance);

/// Times of a clip's slices: `tokens_per_second` positions a second, rounded down slice by slice,
/// as transformers 5.23 does for Qwen2.5-VL (from 4.52 to 5.2, whole seconds a slice counted).
std::vector<int32_t> clip_times(int slices, double tokens_per_second, double seconds_per_slice);

}  // namespace kvlm
