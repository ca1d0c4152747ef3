#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "llm/position.h"

namespace kvlm {

/// Where text goes on after an image or video, and decode after the prompt. Both rules agree for
/// images, and for videos whose times stay below max(height, width).
enum class MropeRule : uint8_t {
  /// One after the largest position so far, as the models were trained: Qwen's fine-tuning code
  /// (rope2d.py), vLLM, transformers to 5.2.
  kTrained,
  /// max(height, width) after the first position of the image or video, and decode one after the
  /// last token of the prompt: transformers from 5.3. Text is then inside the time of the video.
  kTransformers5,
};

/// Positions of three axes: text has the same on all, a cell its slice's time, its row and its
/// column, all from where the span begins.
/// Source: Wang et al. 2024, "Qwen2-VL", sec. 2.1, as transformers' get_rope_index has it.
PromptPositions mrope_positions(std::span<const PositionSpan> spans, MropeRule rule);

/// Times of a video's slices: `tokens_per_second` positions a second, in float, rounded down slice
/// by slice, as transformers 5.23 does for Qwen2.5-VL (from 4.52 to 5.2, whole seconds a slice
/// counted).
std::vector<int32_t> clip_times(int slices, double tokens_per_second, double seconds_per_slice);

}  // namespace kvlm
