#pragma once

#include <array>
#include <cstdint>

#include "vision/patch_order.h"

namespace kvlm {

/// How many pixels a picture may have after it has been resized; size.shortest_edge and
/// size.longest_edge of a Qwen preprocessor file, or its older min_pixels and max_pixels.
struct PixelBudget {
  int64_t min_pixels = 3136;
  int64_t max_pixels = 1003520;
};

/// The size, {height, width}, to which the Qwen families resize a picture: multiples of `factor`
/// (patch times merge), within the budget where one fits, of about the picture's shape.
///
/// Frames of a Qwen2-VL or Qwen2.5-VL clip are sized by this as well, each by itself, with the
/// budget of the video processor.
///
/// Throws Error{kInvalidArgument} for a picture more than 200 times as long as wide, a size or
/// factor that is not positive, and a budget that asks for more than 2^28 pixels.
/// Source: transformers, qwen2_vl/image_processing_qwen2_vl.py, whose double arithmetic it follows.
std::array<int, 2> smart_resize(int height, int width, int factor, const PixelBudget& budget);

/// The size, {height, width}, of every frame of a Qwen3-VL clip: the budget is that of all frames
/// together, and a frame with a side below `factor` is first enlarged. `depth` frames make a slice.
///
/// Throws as smart_resize(), and for fewer than `depth` frames.
/// Source: transformers, qwen3_vl/video_processing_qwen3_vl.py.
std::array<int, 2> smart_resize_clip(int frames, int height, int width, int depth, int factor,
                                     const PixelBudget& budget);

/// The budget of a frame with cap_pixels_per_frame of Qwen2-VL's video processor: no more than an
/// even share of 90 % of `max_video_tokens` tokens, but 1.05 of the least size.
PixelBudget capped_frame_budget(const PixelBudget& budget, int frames, int depth, int factor,
                                int64_t max_video_tokens);

/// The same of Qwen3-VL's, for all frames together: no frame is given more than `max_video_tokens`
/// tokens.
PixelBudget capped_clip_budget(const PixelBudget& budget, int frames, int factor,
                               int64_t max_video_tokens);

/// The patches of `frames` pictures of one size; the last slice repeats the last frame where
/// `depth` does not divide them. Throws Error{kInvalidArgument} if one of them is not positive or
/// the picture smaller than a patch.
PatchGrid patch_grid(int frames, int height, int width, int patch, int depth);

}  // namespace kvlm
