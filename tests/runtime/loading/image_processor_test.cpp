#include "runtime/loading/image_processor.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "kernels/base/error.h"
#include "tests/runtime/loading/safetensors_writer.h"

namespace kvlm {
namespace {

using nlohmann::json;
using test::failure;
using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;

constexpr std::array kLlava15 = {ImageProcessor::kLlava, ImageProcessor::kClip};

PreprocessSpec preprocess_spec(const json& config, const LoadOptions& options = {},
                               std::span<const ImageProcessor> built_in = kLlava15) {
  return parse_preprocess(ConfigReader(config, "preprocessor_config.json"), built_in, options);
}

TEST(ParsePreprocess, MissingFieldsTakeTheClassDefaultsOfClip) {
  const PreprocessSpec spec = preprocess_spec(json::object());
  EXPECT_TRUE(spec.do_resize && spec.do_center_crop && spec.do_rescale && spec.do_normalize);
  EXPECT_FALSE(spec.do_pad);
  EXPECT_EQ(spec.shortest_edge, 224);
  EXPECT_EQ(spec.crop_height, 224);
  EXPECT_EQ(spec.crop_width, 224);
  EXPECT_EQ(spec.resample, Resample::kBicubic);
  EXPECT_EQ(spec.rescale_factor, 1.0 / 255);
  EXPECT_EQ(spec.mean[0], 0.48145466);
  EXPECT_EQ(spec.std[2], 0.27577711);
  EXPECT_EQ(spec.resize_backend, ResizeBackend::kTorchvision);
  EXPECT_EQ(spec.normalize_backend, NormalizeBackend::kTorchvision);
}

TEST(ParsePreprocess, TakesEverySpellingOfSizes) {
  EXPECT_EQ(preprocess_spec({{"size", 336}}).shortest_edge, 336);
  EXPECT_EQ(preprocess_spec({{"size", {{"shortest_edge", 336}}}}).shortest_edge, 336);
  const PreprocessSpec exact = preprocess_spec({{"size", {{"height", 30}, {"width", 40}}}});
  EXPECT_EQ(exact.shortest_edge, 0);
  EXPECT_EQ(exact.resize_height, 30);
  EXPECT_EQ(exact.resize_width, 40);
  EXPECT_EQ(preprocess_spec({{"crop_size", 336}}).crop_width, 336);
  const PreprocessSpec crop = preprocess_spec({{"crop_size", {{"height", 30}, {"width", 40}}}});
  EXPECT_EQ(crop.crop_height, 30);
  EXPECT_EQ(crop.crop_width, 40);
}

TEST(ParsePreprocess, OptionsChooseBackendAndPadding) {
  LoadOptions options;
  options.image_backend = ResizeBackend::kPil;
  EXPECT_EQ(preprocess_spec(json::object(), options).resize_backend, ResizeBackend::kPil);
  EXPECT_EQ(preprocess_spec(json::object(), options).normalize_backend, NormalizeBackend::kPil);
  EXPECT_TRUE(preprocess_spec({{"do_pad", true}}).do_pad);
  options.image_aspect = ImageAspect::kCrop;
  EXPECT_FALSE(preprocess_spec({{"do_pad", true}}, options).do_pad);
  options.image_aspect = ImageAspect::kPad;
  EXPECT_TRUE(preprocess_spec(json::object(), options).do_pad);
}

TEST(ParsePreprocess, RefusesWhatCannotBeDone) {
  for (const auto& [config, word] : std::vector<std::pair<json, const char*>>{
           {{{"size", 0}}, "size is 0"},
           {{{"size", {{"shortest_edge", -3}}}}, "shortest_edge is -3"},
           {{{"size", {{"height", 30}}}}, "width is missing"},
           {{{"size", "big"}}, "size is \"big\""},
           {{{"size", {{"shortest_edge", 224}, {"longest_edge", 400}}}}, "longest_edge is 400"},
           {{{"size", {{"max_height", 224}, {"max_width", 400}}}}, "max_height is 224"},
           {{{"size", {{"shortest_edge", 1000000}}}}, "shortest_edge is 1000000"},
           {{{"crop_size", {{"height", 0}}}}, "height is 0"},
           {{{"resample", 9}}, "resample is 9"},
           {{{"rescale_factor", -1}}, "rescale_factor is -1"},
           {{{"image_mean", {0.5, 0.5}}}, "image_mean is a list"},
           {{{"image_mean", {0.5, 0.5, "x"}}}, "image_mean"},
           {{{"image_std", {0.5, 0.5, 0}}}, "image_std"},
           {{{"image_std", {0.5, 0.5, -0.5}}}, "positive"},
           {{{"do_resize", "yes"}}, "do_resize"}}) {
    EXPECT_THAT(failure([&config = config] { preprocess_spec(config); }),
                AllOf(HasSubstr("preprocessor_config.json"), HasSubstr(word)));
  }
}

/// What a file leaves out is different for each processor.
TEST(ParsePreprocess, KnowsTheProcessorsType) {
  for (const char* type : {"CLIPImageProcessor", "CLIPImageProcessorFast", "CLIPImageProcessorPil",
                           "LlavaImageProcessor", "LlavaImageProcessorFast"}) {
    EXPECT_EQ(preprocess_spec({{"image_processor_type", type}}).mean[0], 0.48145466) << type;
  }
  EXPECT_NO_THROW(preprocess_spec({{"feature_extractor_type", "CLIPFeatureExtractor"}}));
  for (const json& config :
       std::vector<json>{{{"image_processor_type", "ConvNextImageProcessor"}},
                         {{"image_processor_type", "SiglipImageProcessor"}},
                         {{"image_processor_type", "ViTImageProcessorFast"}},
                         {{"image_processor_type", "\x1b[2J"}},
                         {{"feature_extractor_type", "ConvNextFeatureExtractor"}}}) {
    const std::string message = failure([&] { preprocess_spec(config); }, ErrorCode::kUnsupported);
    EXPECT_THAT(message, AllOf(HasSubstr("image_processor_type is \""),
                               HasSubstr("LlavaImageProcessor, CLIPImageProcessor")));
    EXPECT_EQ(message.find('\x1b'), std::string::npos);
  }
}

/// do_pad is a square before the resize for LLaVA's processor, padding after the crop for CLIP's.
TEST(ParsePreprocess, PaddingIsWhatTheProcessorMeans) {
  const auto pads = [](const char* type) {
    return preprocess_spec({{"do_pad", true}, {"image_processor_type", type}}).do_pad;
  };
  EXPECT_TRUE(pads("LlavaImageProcessor"));
  EXPECT_FALSE(pads("CLIPImageProcessor"));
  LoadOptions options;
  options.image_aspect = ImageAspect::kPad;
  EXPECT_TRUE(preprocess_spec({{"image_processor_type", "CLIPImageProcessor"}}, options).do_pad);
  EXPECT_THAT(failure([] {
                preprocess_spec({{"do_pad", true},
                                 {"image_processor_type", "CLIPImageProcessor"},
                                 {"pad_size", {{"height", 400}, {"width", 400}}}});
              }),
              HasSubstr("pad_size"));
}

/// Classes that squeeze pictures instead of cropping them, and those of tiles.
TEST(ParsePreprocess, MissingFieldsTakeTheDefaultsOfTheirClass) {
  const auto of = [](ImageProcessor type, const json& config = json::object()) {
    return preprocess_spec(config, {}, {&type, 1});
  };
  const PreprocessSpec siglip = of(ImageProcessor::kSiglip);
  EXPECT_THAT(siglip.mean, ElementsAre(0.5, 0.5, 0.5));
  EXPECT_THAT(siglip.std, ElementsAre(0.5, 0.5, 0.5));
  EXPECT_FALSE(siglip.do_center_crop);
  EXPECT_EQ(siglip.shortest_edge, 0);
  EXPECT_EQ(siglip.resize_height, 224);
  EXPECT_EQ(siglip.resize_width, 224);
  EXPECT_EQ(of(ImageProcessor::kSiglip, {{"size", 384}}).resize_width, 384);
  const PreprocessSpec next = of(ImageProcessor::kLlavaNext);
  EXPECT_EQ(next.shortest_edge, 224);
  EXPECT_TRUE(next.do_center_crop);
  EXPECT_EQ(next.mean[0], 0.48145466);
  const PreprocessSpec onevision = of(ImageProcessor::kLlavaOnevision);
  EXPECT_EQ(onevision.resize_height, 384);
  EXPECT_EQ(onevision.mean[0], 0.48145466);
  EXPECT_FALSE(onevision.do_center_crop);
  // Batches are filled up with tiles, which is not a square.
  EXPECT_FALSE(of(ImageProcessor::kLlavaNext, {{"do_pad", true}}).do_pad);
  EXPECT_FALSE(of(ImageProcessor::kLlavaOnevision, {{"do_pad", true}}).do_pad);
  for (const char* name : {"LlavaOnevisionImageProcessorFast", "LlavaOnevisionVideoProcessor"}) {
    EXPECT_NO_THROW(of(ImageProcessor::kLlavaOnevision, {{"image_processor_type", name}}));
    EXPECT_NO_THROW(of(ImageProcessor::kLlavaOnevision, {{"video_processor_type", name}}));
  }
}

TEST(ReadProcessor, FilesAreTakenInTheirOrder) {
  const auto source = [](std::map<std::string, std::string> files) {
    ModelSource made;
    made.name = "a-model";
    made.file = [files = std::move(files)](const std::string& name) {
      const auto found = files.find(name);
      return found == files.end() ? std::nullopt : std::optional(found->second);
    };
    return made;
  };
  const char* all = R"({"image_processor": {"size": 1}, "video_processor": {"size": 2}})";
  const ModelSource nested =
      source({{"processor_config.json", all}, {"preprocessor_config.json", R"({"size": 3})"}});
  EXPECT_EQ(read_image_processor(nested).content, (json{{"size", 1}}));
  EXPECT_EQ(read_video_processor(nested).content, (json{{"size", 2}}));
  EXPECT_EQ(read_video_processor(nested).path, "processor_config.json: video_processor");
  const ModelSource own = source({{"preprocessor_config.json", R"({"size": 3})"},
                                  {"video_preprocessor_config.json", R"({"size": 4})"}});
  EXPECT_EQ(read_image_processor(own).content, (json{{"size", 3}}));
  EXPECT_EQ(read_video_processor(own).content, (json{{"size", 4}}));
  const ModelSource older = source({{"preprocessor_config.json", R"({"size": 3})"}});
  EXPECT_EQ(read_video_processor(older).path, "preprocessor_config.json");
  for (const auto& read : {read_image_processor, read_video_processor}) {
    EXPECT_THAT(failure([&] { read(source({})); }),
                HasSubstr("a-model has no preprocessor_config.json"));
    EXPECT_THAT(failure([&] {
                  read(source({{"processor_config.json",
                                R"({"image_processor": 7, "video_processor": 7})"}}));
                }),
                HasSubstr("expected an object"));
  }
}

/// What an interrupted copy or a wrong file leaves is not as if there were none.
TEST(ReadProcessor, AFileThatSaysNothingIsRefused) {
  for (const char* text : {"", " ", "[]", "{}", "null", "[{\"size\": 4}]", "\"x\""}) {
    ModelSource made;
    made.file = [&](const std::string& name) -> std::optional<std::string> {
      if (name == "preprocessor_config.json") return R"({"size": 3})";
      if (name == "video_preprocessor_config.json") return text;
      return std::nullopt;
    };
    EXPECT_THAT(failure([&] { read_video_processor(made); }),
                HasSubstr("video_preprocessor_config.json"))
        << text;
  }
}

TEST(ParsePreprocess, OneMeanIsThatOfAllChannels) {
  EXPECT_THAT(preprocess_spec({{"image_mean", 0.5}}).mean, ElementsAre(0.5, 0.5, 0.5));
  EXPECT_THAT(preprocess_spec({{"image_std", 1}}).std, ElementsAre(1, 1, 1));
  EXPECT_THAT(failure([] { preprocess_spec({{"image_std", 0}}); }), HasSubstr("image_std"));
}

}  // namespace
}  // namespace kvlm
