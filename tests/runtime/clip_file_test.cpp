// From a video file to the frames that a model takes, on the tiny checkpoint internvl.
#include "runtime/clip_file.h"

#include <gmock/gmock.h>

#include "kernels/base/error.h"
#include "tests/runtime/golden.h"
#include "tests/runtime/loading/safetensors_writer.h"

namespace kvlm {
namespace {

using test::error_of;
using test::LoadedModel;
using testing::ElementsAre;
using testing::HasSubstr;

const std::filesystem::path& folder() {
  static const std::filesystem::path path = test::golden_root() / "internvl";
  return path;
}

TEST(LoadClip, HasTheFramesThatTheModelChose) {
  const LoadedModel model(folder());
  const DecodedClip all = load_clip(*model, folder() / "video0");
  EXPECT_EQ(all.clip.info.frames, 3);
  EXPECT_THAT(all.clip.frames, ElementsAre(0, 1, 2));
  const DecodedClip some = load_clip(*model, folder() / "video0", {.fps = {}, .frames = 2});
  EXPECT_EQ(some.clip.frames, model->sample_frames(all.clip.info, {.fps = {}, .frames = 2}));
  ASSERT_EQ(some.frames.size(), some.clip.frames.size());
  for (size_t i = 0; i < some.frames.size(); ++i) {
    const auto number = static_cast<size_t>(some.clip.frames[i]);
    EXPECT_EQ(some.frames[i].rgb, all.frames[number].rgb) << i;
  }
}

TEST(ChooseFrames, DecodesNone) {
  const LoadedModel model(folder());
  const OpenClip open = choose_frames(*model, open_video(folder() / "video0"), {});
  EXPECT_EQ(model->clip_text(open.clip).rows(), model->prepare_clip(open.decode()).rows);
}

TEST(ChooseFrames, AModelThatTakesNoVideosSaysSo) {
  const LoadedModel model(test::golden_root() / "llava_gqa");
  const Error error = error_of([&] { load_clip(*model, folder() / "video0"); });
  EXPECT_EQ(error.code(), ErrorCode::kUnsupported);
  EXPECT_THAT(error.what(), HasSubstr("takes no videos"));
}

}  // namespace
}  // namespace kvlm
