#include "runtime/families/llava_onevision.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "tests/runtime/golden.h"
#include "tests/runtime/spellings.h"

namespace kvlm {
namespace {

using nlohmann::json;
using test::error_of;
using test::failure;
using test::GoldenCase;
using test::LoadedModel;
using test::with_file;
using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;

constexpr const char* kFolder = "llava_onevision";
constexpr int64_t kTile = 16;  // rows of one
using Edit = std::function<void(ModelSource&)>;

LoadedModel load(const Edit& edit = {}, const LoadOptions& options = {}) {
  return LoadedModel(test::golden_root() / kFolder, options, 1, edit);
}

LoadedModel load(ImageAspect aspect) {
  LoadOptions options;
  options.image_aspect = aspect;
  return load({}, options);
}

Edit with_config(const std::function<void(json&)>& edit) {
  return [edit](ModelSource& source) { edit(source.config); };
}

/// processor_config.json, edited.
Edit with_processors(const std::function<void(json&)>& edit) {
  return [edit](ModelSource& source) {
    json processors =
        json::parse(test::read_file(test::golden_root() / kFolder / "processor_config.json"));
    edit(processors);
    source.file = [text = processors.dump(), inner = source.file](const std::string& name) {
      return name == "processor_config.json" ? std::optional(text) : inner(name);
    };
  };
}

GoldenCase golden_of(std::string_view kind) {
  for (GoldenCase& golden : test::golden_cases(kFolder)) {
    if (golden.kind() == kind) return std::move(golden);
  }
  throw std::runtime_error("no golden of that kind");
}

std::string refusal(const Edit& edit, ErrorCode code = ErrorCode::kCorruptFile) {
  std::string message = failure([&] { load(edit); }, code);
  EXPECT_EQ(message.find('\n'), std::string::npos);
  return message;
}

Image grey(int height, int width, uint8_t value) {
  return {
      height, width,
      std::vector<uint8_t>(static_cast<size_t>(height) * static_cast<size_t>(width) * 3, value)};
}

DecodedClip clip_of(size_t frames, uint8_t value) {
  DecodedClip clip;
  clip.clip.info.frames = static_cast<int64_t>(frames);
  for (size_t i = 0; i < frames; ++i) clip.clip.frames.push_back(static_cast<int64_t>(i));
  clip.frames.assign(frames, grey(20, 40, value));
  return clip;
}

TEST(LlavaOnevision, EverySpellingLoadsToTheSameLogitsBitForBit) {
  test::expect_same_logits_of_every_spelling(kFolder, {"saved", "canonical"});
}

TEST(LlavaOnevision, SaysWhatItIs) {
  const LoadedModel model = load();
  EXPECT_EQ(model->family(), "llava-onevision");
  EXPECT_EQ(model->image_token(), "<image>");
  EXPECT_EQ(model->video_token(), "<video>");
  EXPECT_TRUE(model->is_visual(323) && model->is_visual(324));
  EXPECT_FALSE(model->is_visual(322));
}

/// The reference's apply_chat_template() gives the pictures of a conversation as one list.
TEST(LlavaOnevision, APictureIsTiledIfItIsAlone) {
  const LoadedModel model = load();
  EXPECT_EQ(model->picture_text({51, 83}, 1).rows(), 44);
  EXPECT_EQ(model->picture_text({51, 83}, 2).rows(), kTile + 1);
  EXPECT_EQ(model->prepare(grey(51, 83, 9), 2).patches.grids.size(), 1u);
}

TEST(LlavaOnevision, AspectsChooseForEveryPicture) {
  const LoadedModel tiled = load(ImageAspect::kAnyres);
  EXPECT_EQ(tiled->picture_text({51, 83}, 2).rows(), 44);
  EXPECT_EQ(tiled->prepare(grey(51, 83, 9), 2).rows, 44);
  const LoadedModel squares = load(ImageAspect::kPad);
  const VisualInput square = squares->prepare(grey(20, 80, 200), 1);
  EXPECT_EQ(squares->picture_text({20, 80}, 1).rows(), kTile + 1);
  EXPECT_EQ(square.rows, kTile + 1);
  EXPECT_NEAR(patch_values(square.patches).as<float>()[0], 127 / 127.5f - 1, 1e-5f)
      << "the mean's colour above the picture";
  EXPECT_THAT(error_of([] { load(ImageAspect::kCrop); }).what(),
              AllOf(HasSubstr("--image-aspect crop"), HasSubstr("LLaVA-OneVision")));
}

/// The reference tiles each of several pictures that are given as a flat list.
TEST(LlavaOnevision, SeveralTiledPicturesAnswerAsTheReference) {
  const GoldenCase golden = golden_of("two_images");
  const test::GoldenTensors tensors(golden.goldens / "golden.safetensors");
  const auto result = test::generate(load(ImageAspect::kAnyres), "f32", golden.request());
  const std::vector<int64_t> ids = tensors.integers(golden.tensor("greedy_ids"));
  EXPECT_EQ(result.tokens, std::vector<int32_t>(ids.begin(), ids.end()));
}

TEST(LlavaOnevision, FlatPicturesAreServedAsTheReferenceDoes) {
  const LoadedModel model = load();
  for (const auto& [height, width] : {std::pair{1, 4000}, std::pair{4000, 1}}) {
    const Image image = grey(height, width, 90);
    for (const size_t pictures : {1, 2}) {
      const VisualInput input = model->prepare(image, pictures);
      EXPECT_EQ(model->picture_text({height, width}, pictures).rows(), input.rows);
      const VisualInput* inputs[] = {&input};
      EXPECT_EQ(model->encode(inputs, model.stream(), {}).each.at(0).rows.shape()[0], input.rows);
    }
  }
}

TEST(LlavaOnevision, AClipIsAQuarterOfItsFramesAndANewline) {
  const LoadedModel model = load();
  const DecodedClip clip = clip_of(3, 90);
  EXPECT_EQ(model->clip_text(clip.clip).rows(), 3 * 4 + 1);
  const VisualInput input = model->prepare_clip(clip);
  EXPECT_EQ(input.rows, 13);
  EXPECT_EQ(input.patches.grids.size(), 3u);
  // Equal frames give equal rows, and the newline is that of pictures.
  const VisualInput picture = model->prepare(grey(20, 40, 90), 2);
  const VisualInput* inputs[] = {&input, &picture};
  const VisualRows rows = model->encode(inputs, model.stream(), {});
  const std::vector<float> of_clip = test::floats_of(rows.each.at(0).rows, model.stream());
  const std::vector<float> of_picture = test::floats_of(rows.each.at(1).rows, model.stream());
  const auto hidden = static_cast<size_t>(model->decoder().hidden());
  for (size_t i = 0; i < hidden; ++i) {
    EXPECT_NEAR(of_clip[i], of_clip[4 * hidden + i], 1e-5f);
    EXPECT_EQ(of_clip[12 * hidden + i], of_picture[kTile * hidden + i]);
  }
}

TEST(LlavaOnevision, FramesAreTakenAsAskedOrAsTheFileSays) {
  VideoInfo info;
  info.frames = 10;
  info.fps = 10;
  EXPECT_EQ(load()->sample_frames(info, {}).size(), 10u);
  EXPECT_THAT(load()->sample_frames(info, {.fps = {}, .frames = 2}), ElementsAre(0, 5));
  const auto sampling = [](const json& fields) {
    return with_processors([fields](json& all) { all["video_processor"].update(fields); });
  };
  const LoadedModel four = load(sampling({{"do_sample_frames", true}, {"num_frames", 4}}));
  EXPECT_EQ(four->sample_frames(info, {}).size(), 4u);
  EXPECT_EQ(four->sample_frames(info, {.fps = 5, .frames = {}}).size(), 5u);
  EXPECT_EQ(load(sampling({{"num_frames", 4}}))->sample_frames(info, {}).size(), 10u)
      << "without do_sample_frames nothing is sampled";
  EXPECT_THAT(refusal(sampling({{"do_sample_frames", true}, {"num_frames", 0}})),
              HasSubstr("num_frames is 0"));
}

TEST(LlavaOnevision, FramesHaveAProcessorOfTheirOwn) {
  const LoadedModel other = load(with_processors([](json& all) {
    all["video_processor"]["image_mean"] = {0.0, 0.0, 0.0};
  }));
  EXPECT_NEAR(patch_values(other->prepare_clip(clip_of(1, 255)).patches).as<float>()[0], 2, 1e-5f);
  EXPECT_NEAR(patch_values(other->prepare(grey(9, 9, 255), 1).patches).as<float>()[0], 1, 1e-5f);
  EXPECT_THAT(refusal(with_processors([](json& all) {
                all["video_processor"]["size"] = {{"height", 60}, {"width", 60}};
              })),
              AllOf(HasSubstr("60 x 60"), HasSubstr("30 x 30")));
}

/// The 0.5B, whose own level says false.
TEST(LlavaOnevision, HeadsMayBeTied) {
  const LoadedModel tied = load([](ModelSource& source) {
    source.config["tie_word_embeddings"] = false;
    source.config["text_config"]["tie_word_embeddings"] = true;
    source.weights.rename([](std::string_view name) {
      return name.find("lm_head") == std::string_view::npos ? std::string(name) : std::string();
    });
  });
  EXPECT_EQ(tied->weight_bytes() + 4 * 336 * 48, load()->weight_bytes());
}

TEST(LlavaOnevision, RefusesWhatItIsNotMadeFor) {
  for (const json& value : {json("anyres"), json("anyres_max_"), json("anyres_max_0"),
                            json("anyres_max_9x"), json("pad"), json(9)}) {
    EXPECT_THAT(refusal(with_config([&](json& config) { config["vision_aspect_ratio"] = value; })),
                HasSubstr("vision_aspect_ratio is"))
        << value;
  }
  EXPECT_THAT(
      refusal(with_config([](json& config) { config["text_config"]["model_type"] = "llama"; }),
              ErrorCode::kUnsupported),
      AllOf(HasSubstr("\"llama\""), HasSubstr("qwen2")));
  EXPECT_THAT(refusal(with_config([](json& config) { config["video_token_index"] = 322; })),
              AllOf(HasSubstr("<video> is token 322"), HasSubstr("video_token_index")));
  EXPECT_THAT(refusal(with_config([](json& config) { config.erase("video_token_index"); })),
              AllOf(HasSubstr("video_token_index is missing"), HasSubstr("0 to 335")));
  EXPECT_THAT(refusal(with_config([](json& config) {
                config["image_grid_pinpoints"] = {{30, 30}};
              })),
              HasSubstr("do not belong together"));
  EXPECT_THAT(refusal(with_file("chat_template.jinja", nullptr)), HasSubstr("no chat template"));
}

}  // namespace
}  // namespace kvlm
