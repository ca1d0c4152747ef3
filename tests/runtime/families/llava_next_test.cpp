#include "runtime/families/llava_next.h"

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
using test::LoadedModel;
using test::with_file;
using testing::AllOf;
using testing::HasSubstr;

constexpr const char* kFolder = "llava_next";
using Edit = std::function<void(ModelSource&)>;

LoadedModel load(const Edit& edit = {}, const LoadOptions& options = {}) {
  return LoadedModel(test::golden_root() / kFolder, options, 1, edit);
}

Edit with_config(const std::function<void(json&)>& edit) {
  return [edit](ModelSource& source) { edit(source.config); };
}

/// The image processor's file, edited; nothing else says how pictures are cut.
Edit with_processor(const std::function<void(json&)>& edit) {
  return [edit](ModelSource& source) {
    json processor =
        json::parse(test::read_file(test::golden_root() / kFolder / "preprocessor_config.json"));
    edit(processor);
    source.file = [text = processor.dump(), inner = source.file](const std::string& name) {
      if (name == "processor_config.json") return std::optional<std::string>();
      return name == "preprocessor_config.json" ? std::optional(text) : inner(name);
    };
  };
}

std::string refusal(const Edit& edit, ErrorCode code = ErrorCode::kCorruptFile,
                    const LoadOptions& options = {}) {
  std::string message = failure([&] { load(edit, options); }, code);
  EXPECT_EQ(message.find('\n'), std::string::npos);
  return message;
}

TEST(LlavaNext, EverySpellingLoadsToTheSameLogitsBitForBit) {
  test::expect_same_logits_of_every_spelling(kFolder, {"saved", "canonical"});
}

TEST(LlavaNext, SaysWhatItIs) {
  const LoadedModel model = load();
  EXPECT_EQ(model->family(), "llava-next");
  EXPECT_EQ(model->image_token(), "<image>");
  EXPECT_TRUE(model->video_token().empty());
  const json config = json::parse(test::read_file(test::golden_root() / kFolder / "config.json"));
  EXPECT_EQ(llava_next_cache_shape(config).kv_heads, 2);
}

/// As the reference, which lays out no row of a line of pixels, or rows of nothing but a newline.
TEST(LlavaNext, FlatPicturesAreTheirFirstTile) {
  const LoadedModel model = load();
  struct Flat {
    int height, width;
    int64_t rows;
  };
  for (const auto& [height, width, rows] : {Flat{1, 4000, 16}, Flat{4000, 1, 16 + 4}}) {
    const Image image{height, width, std::vector<uint8_t>(size_t{4000} * 3, 90)};
    const VisualInput input = model->prepare(image, 1);
    EXPECT_EQ(model->picture_text({height, width}, 1).rows(), rows);
    EXPECT_EQ(input.rows, rows);
    const VisualInput* inputs[] = {&input};
    const VisualRows features = model->encode(inputs, model.stream(), {});
    EXPECT_EQ(features.each.at(0).rows.shape()[0], rows);
  }
}

/// Rows of a picture do not depend on how many there are, nor its features on the others.
TEST(LlavaNext, EveryPictureIsTiledOnItsOwn) {
  const LoadedModel model = load();
  const Image wide{28, 84, std::vector<uint8_t>(28 * 84 * 3, 30)};
  const Image tall{60, 20, std::vector<uint8_t>(60 * 20 * 3, 200)};
  EXPECT_EQ(model->picture_text({28, 84}, 1), model->picture_text({28, 84}, 2));
  const VisualInput inputs[] = {model->prepare(wide, 2), model->prepare(tall, 2)};
  const VisualInput* both[] = {&inputs[0], &inputs[1]};
  const VisualInput* second[] = {&inputs[1]};
  const VisualRows together = model->encode(both, model.stream(), {});
  const VisualRows alone = model->encode(second, model.stream(), {});
  const std::vector<float> a = test::floats_of(together.each.at(1).rows, model.stream());
  const std::vector<float> b = test::floats_of(alone.each.at(0).rows, model.stream());
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) ASSERT_NEAR(a[i], b[i], 1e-5f) << i;
}

TEST(LlavaNext, PinpointsOfBothFilesBelongTogether) {
  const auto canvases = [](const json& list) {
    return [list](json& file) { file["image_grid_pinpoints"] = list; };
  };
  EXPECT_THAT(refusal(with_config(canvases({{28, 56}, {56, 28}}))),
              AllOf(HasSubstr("image_grid_pinpoints"), HasSubstr("do not belong together")));
  EXPECT_THAT(refusal(with_processor(canvases({{28, 56}, {56, 28}}))),
              AllOf(HasSubstr("preprocessor_config.json"), HasSubstr("config.json"),
                    HasSubstr("do not belong together")));
  // Their order decides among canvases that fit alike; the image processor's counts.
  EXPECT_NO_THROW(load(with_config(canvases({{56, 28}, {28, 56}, {56, 56}, {84, 28}, {28, 84}}))));
  for (const json& list :
       {json::array(), json(28), json("a"), json::array({28, 56}), json::array({{28, 57}}),
        json::array({{28}}), json::array({{0, 28}}), json::array({{-28, 28}}),
        json::array({{28, 28.5}}), json::array({{28 * 64, 28 * 64}}),
        json::array({{28, int64_t{28} << 40}})}) {
    EXPECT_THAT(refusal(with_processor(canvases(list))),
                AllOf(HasSubstr("image_grid_pinpoints"), HasSubstr("multiples of the tile's 28")))
        << list;
  }
  // The class has canvases of its own, of tiles of 336 pixels.
  EXPECT_THAT(refusal(with_processor([](json& file) { file.erase("image_grid_pinpoints"); })),
              HasSubstr("do not belong together"));
}

TEST(LlavaNext, TilesOfAnotherSizeThanTheTowersAreRefused) {
  EXPECT_THAT(refusal(with_processor([](json& file) { file["crop_size"] = 56; })),
              AllOf(HasSubstr("56 x 56"), HasSubstr("28 x 28")));
  EXPECT_THAT(refusal(with_processor([](json& file) {
                file["size"] = {{"shortest_edge", 56}};
              })),
              AllOf(HasSubstr("size is an object"), HasSubstr("28")));
  EXPECT_THAT(refusal(with_processor(
                          [](json& file) { file["image_processor_type"] = "CLIPImageProcessor"; }),
                      ErrorCode::kUnsupported),
              AllOf(HasSubstr("\"CLIPImageProcessor\""), HasSubstr("LlavaNextImageProcessor")));
}

TEST(LlavaNext, RowsOfTilesArePatches) {
  EXPECT_THAT(
      refusal(with_config([](json& config) { config["vision_feature_select_strategy"] = "full"; })),
      AllOf(HasSubstr("vision_feature_select_strategy is \"full\""), HasSubstr("class token")));
}

TEST(LlavaNext, FeatureLayersMayBeAList) {
  const test::GoldenCase golden = test::golden_cases(kFolder).front();
  EXPECT_EQ(
      test::logits(load(with_config([](json& config) { config["vision_feature_layer"] = {-2}; })),
                   golden),
      test::logits(load(), golden));
  EXPECT_THAT(refusal(with_config([](json& config) {
                config["vision_feature_layer"] = {-2, -1};
              })),
              HasSubstr("linear_1.weight"))
      << "two layers need a wider projector";
}

TEST(LlavaNext, RefusesWhatItIsNotMadeFor) {
  EXPECT_THAT(
      refusal(with_config([](json& config) { config["text_config"]["model_type"] = "qwen2_moe"; }),
              ErrorCode::kUnsupported),
      AllOf(HasSubstr("\"qwen2_moe\""), HasSubstr("llama, mistral, qwen2")));
  EXPECT_THAT(refusal(with_file("chat_template.jinja", nullptr)),
              AllOf(HasSubstr("llava_next has no chat template"), HasSubstr("download")));
  EXPECT_THAT(refusal([](ModelSource& source) {
                source.weights.rename([](std::string_view name) {
                  return name.find("image_newline") == std::string_view::npos ? std::string(name)
                                                                              : std::string();
                });
              }),
              HasSubstr("model.image_newline"));
  EXPECT_THAT(refusal(with_config([](json& config) { config["image_token_index"] = 299; })),
              AllOf(HasSubstr("<image> is token 299"), HasSubstr("image_token_index")));
  for (const ImageAspect aspect : {ImageAspect::kCrop, ImageAspect::kPad, ImageAspect::kAnyres}) {
    LoadOptions options;
    options.image_aspect = aspect;
    EXPECT_THAT(refusal({}, ErrorCode::kInvalidArgument, options),
                AllOf(HasSubstr("--image-aspect"), HasSubstr("LLaVA-NeXT")));
  }
  LoadOptions tiles;
  tiles.max_tiles = 4;
  EXPECT_THAT(refusal({}, ErrorCode::kInvalidArgument, tiles), HasSubstr("--tiles"));
  LoadOptions pixels;
  pixels.max_pixels = 400;
  EXPECT_THAT(refusal({}, ErrorCode::kInvalidArgument, pixels), HasSubstr("--max-pixels"));
}

TEST(LlavaNext, TakesNoVideos) {
  EXPECT_EQ(error_of([] { load()->sample_frames({}, {}); }).code(), ErrorCode::kUnsupported);
}

}  // namespace
}  // namespace kvlm
