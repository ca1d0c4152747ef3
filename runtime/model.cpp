#include "runtime/model.h"

#include <fmt/format.h>

#include <numeric>

#include "kernels/base/error.h"
#include "kernels/base/printable.h"

namespace kvlm {

namespace {

[[noreturn]] void refuse_videos(const Model& model) {
  throw Error(ErrorCode::kUnsupported,
              fmt::format("{} ({}) takes no videos; give images, or a model that does",
                          printable(model.name()), model.family()));
}

int64_t rows_of(std::span<const PositionSpan> spans) {
  return std::accumulate(spans.begin(), spans.end(), int64_t{0},
                         [](int64_t sum, const PositionSpan& span) { return sum + span.rows; });
}

}  // namespace

int64_t VisualText::rows() const noexcept { return rows_of(spans); }

std::vector<int64_t> Model::sample_frames(const VideoInfo& /*info*/,
                                          const SamplingRequest& /*request*/) const {
  refuse_videos(*this);
}

VisualText Model::clip_text(const Clip& /*clip*/) const { refuse_videos(*this); }

VisualInput Model::prepare_clip(const DecodedClip& /*clip*/) const { refuse_videos(*this); }

Image Model::fit_frame(const Clip& /*clip*/, Image frame) const { return frame; }

PromptPositions Model::positions(std::span<const PositionSpan> spans) const {
  const auto rows = static_cast<size_t>(rows_of(spans));
  return {following_positions(0, rows), static_cast<int32_t>(rows)};
}

}  // namespace kvlm
