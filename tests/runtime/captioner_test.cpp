// The short way through the library says what the long way says, on the tiny checkpoint llava_gqa.
#include "runtime/captioner.h"

#include <gmock/gmock.h>

#include "kernels/base/error.h"
#include "runtime/clip_file.h"
#include "runtime/generator.h"
#include "tests/runtime/golden.h"
#include "tests/runtime/loading/safetensors_writer.h"

namespace kvlm {
namespace {

using test::error_of;
using test::generate;
using test::LoadedModel;
using testing::HasSubstr;

std::filesystem::path folder() { return test::golden_root() / "llava_gqa"; }
Image picture() { return load_image(folder() / "image0.png"); }

std::string long_way(const std::string& question, int max_tokens) {
  LoadedModel loaded(folder(), {}, 1);
  GenerationRequest request;
  request.id = "long";
  request.messages = {user_message(question, 1, "<image>")};
  request.images.push_back(picture());
  request.max_tokens = max_tokens;
  return generate(loaded, "f16", std::move(request)).text;
}

TEST(Captioner, SaysWhatAGeneratorSays) {
  Captioner captioner(folder(), {.threads = 1});
  const std::string text = captioner.describe(picture(), "What is this?", 9);
  EXPECT_NE(text, "");
  EXPECT_EQ(text, long_way("What is this?", 9));
  EXPECT_EQ(captioner.describe(picture(), "What is this?", 9), text);  // nothing is left over
}

/// Frames in a folder, of a model that takes videos.
TEST(Captioner, DescribesAClip) {
  const std::filesystem::path checkpoint = test::golden_root() / "internvl";
  Captioner captioner(checkpoint, {.threads = 1});
  const LoadedModel loaded(checkpoint);
  GenerationRequest request;
  request.messages = {
      user_message("what moves?", 0, loaded->image_token(), 1, loaded->video_token())};
  request.videos.push_back(load_clip(*loaded, checkpoint / "video0", {.fps = {}, .frames = 2}));
  EXPECT_EQ(request.videos[0].frames.size(), 2u);
  request.max_tokens = 9;
  const std::string expected = generate(loaded, "f16", std::move(request)).text;
  const auto describe = [&] {
    return captioner.describe(
        load_clip(captioner.model(), checkpoint / "video0", {.fps = {}, .frames = 2}),
        "what moves?", 9);
  };
  EXPECT_EQ(describe(), expected);
  EXPECT_EQ(describe(), expected);
}

TEST(Captioner, AModelThatTakesNoVideosSaysSo) {
  Captioner captioner(folder(), {.threads = 1});
  DecodedClip clip;
  clip.clip.frames = {0};
  clip.frames = {picture()};
  EXPECT_THAT(error_of([&] { captioner.describe(clip, "what?", 4); }).what(),
              HasSubstr("takes no videos"));
}

TEST(Captioner, TellsWhatTheLatestTook) {
  Captioner captioner(folder(), {.kv = "f32", .threads = 1});
  EXPECT_TRUE(captioner.last().tokens.empty());
  const std::string text = captioner.describe(picture(), "What is this?", 9);
  EXPECT_EQ(captioner.last().text, text);
  EXPECT_FALSE(captioner.last().tokens.empty());
  EXPECT_DOUBLE_EQ(captioner.last().cache.stored_bits, 32);
  EXPECT_THROW(captioner.describe(picture(), "<image><image>", 4), Error);
  EXPECT_TRUE(captioner.last().tokens.empty());
}

TEST(Captioner, AsksForACaptionWithoutAQuestion) {
  Captioner captioner(folder(), {.threads = 1});
  EXPECT_EQ(captioner.describe(picture(), "", 7),
            long_way(std::string(captioner.model().caption_prompt()), 7));
}

TEST(Captioner, GivesTheTextWhileItIsMade) {
  Captioner captioner(folder(), {.threads = 1});
  std::string pieces;
  int calls = 0;
  const std::string text =
      captioner.describe(picture(), "Name it", 12, [&](std::string_view piece) {
        pieces += piece;
        ++calls;
      });
  EXPECT_EQ(pieces, text);
  EXPECT_GT(calls, 1);
}

TEST(Captioner, TakesAPolicy) {
  Captioner captioner(folder(), {.kv = "f32", .threads = 1});
  EXPECT_NE(captioner.describe(picture(), "", 4), "");
}

TEST(Captioner, RefusesBeforeAnyWeightIsRead) {
  EXPECT_THAT(error_of([] { Captioner("/nowhere"); }).what(), HasSubstr("/nowhere"));
  EXPECT_THAT(error_of([] { Captioner(folder(), {.kv = "kiwi"}); }).what(), HasSubstr("kiwi"));
  EXPECT_THAT(error_of([] { Captioner(folder(), {.kv = "kivi,group=33"}); }).what(),
              HasSubstr("kivi"));
}

TEST(Captioner, APictureThatCannotBeServedLeavesTheNextAlone) {
  Captioner captioner(folder(), {.threads = 1});
  EXPECT_THAT(error_of([&] { captioner.describe(picture(), "<image><image>", 4); }).what(),
              HasSubstr("2"));
  EXPECT_NE(captioner.describe(picture(), "", 4), "");
}

}  // namespace
}  // namespace kvlm
