#include "vision/smart_resize.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "kernels/base/error.h"

namespace kvlm {

namespace {

constexpr double kMostPixels = 1 << 28;  // as resize()

void check_positive(int height, int width, int factor) {
  if (height > 0 && width > 0 && factor > 0) return;
  throw Error(ErrorCode::kInvalidArgument,
              fmt::format("an image of {} x {} pixels cannot be resized to multiples of {}; "
                          "expected positive numbers",
                          width, height, factor));
}

/// Of `height` x `width`, which were the picture's `shown` width and height before.
void check_aspect(double height, double width, std::array<int, 2> shown) {
  if (std::max(height, width) / std::min(height, width) <= 200.0) return;
  throw Error(ErrorCode::kInvalidArgument,
              fmt::format("an image of {} x {} pixels is more than 200 times as long as wide, "
                          "which this model does not take; crop it",
                          shown[0], shown[1]));
}

/// Sides that are multiples of `factor` for `frames` frames (as doubles, all below 2^53); `deep` is
/// how many the budget counts.
std::array<int, 2> fit(double frames, double deep, double height, double width, double factor,
                       const PixelBudget& budget) {
  // std::nearbyint rounds halves to even, as Python's round does.
  double to_height = std::nearbyint(height / factor) * factor;
  double to_width = std::nearbyint(width / factor) * factor;
  const auto least = static_cast<double>(budget.min_pixels);
  const auto most = static_cast<double>(budget.max_pixels);
  if (deep * to_height * to_width > most) {
    const double shrink = std::sqrt(frames * height * width / most);
    to_height = std::max(factor, std::floor(height / shrink / factor) * factor);
    to_width = std::max(factor, std::floor(width / shrink / factor) * factor);
  } else if (deep * to_height * to_width < least) {
    const double grow = std::sqrt(least / (frames * height * width));
    to_height = std::ceil(height * grow / factor) * factor;
    to_width = std::ceil(width * grow / factor) * factor;
  }
  // A side can still be 0 where the least size is; written so that NaN is refused too.
  if (!(to_height >= 1 && to_width >= 1 && to_height * to_width <= kMostPixels)) {
    throw Error(
        ErrorCode::kInvalidArgument,
        fmt::format("an image of {} x {} pixels would be resized to {} x {}; expected 1 to 2^28 "
                    "pixels; check min_pixels ({}) and max_pixels ({})",
                    width, height, to_width, to_height, budget.min_pixels, budget.max_pixels));
  }
  return {static_cast<int>(to_height), static_cast<int>(to_width)};
}

/// Numbers of a file whose products have to stay below 2^63.
void check_cap(int frames, int depth, int factor, int64_t max_video_tokens) {
  constexpr int kMostSide = 1 << 12;
  constexpr int64_t kMostTokens = 1 << 24;
  if (frames >= 1 && depth >= 1 && depth <= kMostSide && factor >= 1 && factor <= kMostSide &&
      max_video_tokens >= 1 && max_video_tokens <= kMostTokens) {
    return;
  }
  throw Error(ErrorCode::kInvalidArgument,
              fmt::format("a video of {} frames, {} a slice, with tokens of {} x {} pixels cannot "
                          "be capped at {} tokens; expected numbers from 1 to {}, and {} tokens at "
                          "most",
                          frames, depth, factor, factor, max_video_tokens, kMostSide, kMostTokens));
}

int64_t floor_of_cap(const PixelBudget& budget) {
  return static_cast<int64_t>(static_cast<double>(budget.min_pixels) * 1.05);
}

}  // namespace

std::array<int, 2> smart_resize(int height, int width, int factor, const PixelBudget& budget) {
  check_positive(height, width, factor);
  check_aspect(height, width, {width, height});
  return fit(1, 1, height, width, factor, budget);
}

std::array<int, 2> smart_resize_clip(int frames, int height, int width, int depth, int factor,
                                     const PixelBudget& budget) {
  check_positive(height, width, factor);
  if (depth < 1 || frames < depth) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("a video of {} frames is too short for this model, which takes at "
                            "least {}; give more frames, or an image",
                            frames, depth));
  }
  double tall = height;
  double wide = width;
  if (height < factor || width < factor) {
    const double scale =
        std::max(static_cast<double>(factor) / height, static_cast<double>(factor) / width);
    tall = std::trunc(height * scale);
    wide = std::trunc(width * scale);
  }
  check_aspect(tall, wide, {width, height});
  const double deep = std::nearbyint(static_cast<double>(frames) / depth) * depth;
  return fit(frames, deep, tall, wide, factor, budget);
}

PixelBudget capped_frame_budget(const PixelBudget& budget, int frames, int depth, int factor,
                                int64_t max_video_tokens) {
  check_cap(frames, depth, factor, max_video_tokens);
  const auto total =
      static_cast<int64_t>(static_cast<double>(max_video_tokens * factor * factor) * 0.9);
  const int64_t share = total * depth / frames;
  return {budget.min_pixels, std::max(std::min(budget.max_pixels, share), floor_of_cap(budget))};
}

PixelBudget capped_clip_budget(const PixelBudget& budget, int frames, int factor,
                               int64_t max_video_tokens) {
  check_cap(frames, 1, factor, max_video_tokens);
  const int64_t frame =
      std::max(std::min(max_video_tokens * factor * factor, budget.max_pixels / frames),
               floor_of_cap(budget));
  return {budget.min_pixels, frame * frames};
}

PatchGrid patch_grid(int frames, int height, int width, int patch, int depth) {
  if (frames < 1 || patch < 1 || depth < 1 || height < patch || width < patch) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("{} images of {} x {} pixels have no patches of {} x {}, {} images "
                            "deep; expected one image or more, each of at least one patch",
                            frames, width, height, patch, patch, depth));
  }
  return {(frames - 1) / depth + 1, height / patch, width / patch};
}

}  // namespace kvlm
