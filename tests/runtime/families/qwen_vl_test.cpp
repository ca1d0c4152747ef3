// The Qwen-VL room: files as they are found, options, refusals, and prompts that are not prefilled
// at once. What the models compute is family_golden_test.cpp's business.
#include "runtime/families/qwen_vl.h"

#include <fmt/format.h>
#include <gmock/gmock.h>

#include <cmath>
#include <map>

#include "kernels/base/error.h"
#include "kernels/elementwise.h"
#include "runtime/families/qwen_vl/config.h"
#include "tests/runtime/golden.h"
#include "tests/runtime/loading/safetensors_writer.h"
#include "tests/runtime/recording_model.h"

namespace kvlm {
namespace {

using nlohmann::json;
using test::error_of;
using test::failure;
using test::golden_root;
using test::GoldenCase;
using test::LoadedModel;
using test::RecordingModel;
using test::with_file;
using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;

using Edit = std::function<void(ModelSource&)>;

constexpr std::array kFamilies = {"qwen2_vl", "qwen2_5_vl", "qwen3_vl"};

LoadedModel load(const std::string& folder, const Edit& edit = {},
                 const LoadOptions& options = {}) {
  return LoadedModel(golden_root() / folder, options, 1, edit);
}

Edit with_config(const std::function<void(json&)>& edit) {
  return [edit](ModelSource& source) { edit(source.config); };
}

/// A file of the checkpoint, changed.
Edit with_fields(const std::string& file, const std::function<void(json&)>& edit) {
  return [file, edit](ModelSource& source) {
    json fields = json::parse(source.file(file).value_or("{}"));
    edit(fields);
    source.file = [file, text = fields.dump(), inner = source.file](const std::string& name) {
      return name == file ? std::optional(text) : inner(name);
    };
  };
}

std::string load_failure(const std::string& folder, const Edit& edit,
                         ErrorCode code = ErrorCode::kCorruptFile,
                         const LoadOptions& options = {}) {
  return failure([&] { load(folder, edit, options); }, code);
}

GoldenCase case_of(const std::string& folder, std::string_view kind) {
  const json manifest = test::golden_manifest(golden_root() / folder);
  for (const json& entry : manifest.at("cases")) {
    if (entry.at("kind") == kind) return {golden_root() / folder, golden_root() / folder, entry};
  }
  throw std::runtime_error(fmt::format("{} has no case {}", folder, kind));
}

/// Logits of every row of a prompt.
std::vector<float> logits(const LoadedModel& model, const GoldenCase& golden) {
  std::vector<float> all;
  const auto cache = model.cache("f32");
  Generator generator(*model, *cache, model.stream());
  generator.set_tap([&](std::string_view name, ConstTensorView view) {
    if (name == "logits_prefill") {
      all.assign(view.as<float>(), view.as<float>() + view.elements());
    }
  });
  generator.admit(golden.request(), {});
  return all;
}

Image grey(int height, int width) {
  return {height, width, std::vector<uint8_t>(static_cast<size_t>(height) * width * 3, 90),
          "a.png"};
}

Clip clip_of(int64_t frames, int height, int width, double fps) {
  Clip clip{{.name = "b.mp4", .format = "mp4", .frames = frames, .height = height, .width = width},
            {}};
  clip.info.fps = fps;
  for (int64_t i = 0; i < frames; ++i) clip.frames.push_back(i);
  return clip;
}

/// {height, width} in pixels that a picture is resized to.
std::array<int, 2> picture_size(const LoadedModel& model, int height, int width) {
  const PatchGrid grid = model->prepare(grey(height, width), 1).patches.grids.at(0);
  return {grid.rows * 4, grid.columns * 4};
}

// ----------------------------------------------------------------------------------------- names

TEST(QwenVlNames, EverySpellingBecomesTheCanonicalOne) {
  EXPECT_EQ(canonical_qwen_vl_name("visual.merger.ln_q.weight"), "model.visual.merger.ln_q.weight");
  EXPECT_EQ(canonical_qwen_vl_name("model.visual.merger.ln_q.weight"),
            "model.visual.merger.ln_q.weight");
  EXPECT_EQ(canonical_qwen_vl_name("model.norm.weight"), "model.language_model.norm.weight");
  EXPECT_EQ(canonical_qwen_vl_name("model.language_model.norm.weight"),
            "model.language_model.norm.weight");
  EXPECT_EQ(canonical_qwen_vl_name("lm_head.weight"), "lm_head.weight");
  EXPECT_EQ(canonical_qwen_vl_name("visual.rotary_pos_emb.inv_freq"), "");
  EXPECT_EQ(canonical_qwen_vl_name("adapter.weight"), "adapter.weight");
}

/// Every spelling under which published weights are found gives the same bits.
TEST(QwenVlNames, EverySpellingLoadsToTheSameLogitsBitForBit) {
  for (const char* folder : {"qwen2_vl", "qwen2_vl_tied", "qwen2_5_vl", "qwen3_vl"}) {
    const json spellings =
        json::parse(test::read_file(golden_root() / folder / "names.json")).at("spellings");
    const GoldenCase golden = case_of(folder, "one_image");
    const std::vector<float> expected = logits(load(folder), golden);
    std::set<std::string> seen;
    for (const auto& [spelling, names] : spellings.items()) {
      std::map<std::string, std::string> from_saved;
      for (const auto& [canonical, name] : spellings.at("saved").items()) {
        from_saved[name] = names.at(canonical);
      }
      const LoadedModel model = load(folder, [&](ModelSource& source) {
        source.weights.rename(
            [&](std::string_view name) { return from_saved.at(std::string(name)); });
      });
      EXPECT_EQ(logits(model, golden), expected) << folder << " " << spelling;
      seen.insert(spelling);
    }
    EXPECT_THAT(seen, testing::IsSupersetOf({"saved", "canonical"})) << folder;
  }
}

TEST(QwenVlNames, TensorsWithoutAPlaceAreRefused) {
  const auto with = [](const char* name) {
    return [name](ModelSource& source) {
      auto tensor = std::make_shared<Tensor>(DType::kF32, Shape{3});
      const ConstTensorView view = *tensor;
      source.weights.add(name, view, tensor);
    };
  };
  EXPECT_THAT(load_failure("qwen2_5_vl", with("visual.blocks.3.norm1.weight")),
              HasSubstr("model.visual.blocks.3.norm1.weight"));
  EXPECT_THAT(load_failure("qwen3_vl", with("model.visual.deepstack_merger_list.2.norm.weight")),
              HasSubstr("deepstack_merger_list.2"));
  EXPECT_NO_THROW(load("qwen2_5_vl", with("visual.rotary_pos_emb.inv_freq")));
}

// ---------------------------------------------------------------------------------------- config

/// As on the hub until 2025, and as transformers 5 saves it.
TEST(QwenVlConfig, FlatAndNestedFilesGiveTheSameLogitsBitForBit) {
  const Edit nest = with_config([](json& config) {
    json text;
    for (const char* key :
         {"hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
          "num_key_value_heads", "vocab_size", "max_position_embeddings", "rms_norm_eps",
          "hidden_act", "bos_token_id", "eos_token_id"}) {
      text[key] = config.at(key);
      config.erase(key);
    }
    text["model_type"] = config.at("model_type").get<std::string>() + "_text";
    text["rope_parameters"] = {{"rope_type", "default"},
                               {"rope_theta", config.at("rope_theta")},
                               {"mrope_section", config.at("rope_scaling").at("mrope_section")}};
    config.erase("rope_theta");
    config.erase("rope_scaling");
    config["text_config"] = text;
  });
  for (const char* folder : {"qwen2_5_vl", "qwen2_vl_tied"}) {
    const GoldenCase golden = case_of(folder, "one_image");
    EXPECT_EQ(logits(load(folder, nest), golden), logits(load(folder), golden)) << folder;
  }
}

QwenVlConfig parse(const json& config) {
  return parse_qwen_vl(ConfigReader(config, "config.json"));
}

/// The fields that released files leave out.
TEST(QwenVlConfig, AbsentFieldsTakeTheClassDefaults) {
  const json sections = {{"type", "mrope"}, {"mrope_section", {16, 24, 24}}};
  const json text = {{"hidden_size", 3584},        {"num_attention_heads", 28},
                     {"num_key_value_heads", 4},   {"num_hidden_layers", 28},
                     {"intermediate_size", 18944}, {"rope_scaling", sections}};
  json config = text;
  config["model_type"] = "qwen2_vl";
  const QwenVlConfig qwen2 = parse(config);
  EXPECT_EQ(qwen2.family, "qwen2-vl");
  EXPECT_EQ(qwen2.text.rope.theta, 1e6);
  EXPECT_EQ(qwen2.vision.hidden, 1280);
  EXPECT_EQ(qwen2.vision.intermediate, 5120);
  EXPECT_EQ(qwen2.vision.layers, 32);
  EXPECT_EQ(qwen2.vision.activation, Activation::kQuickGelu);
  EXPECT_EQ(qwen2.token_side(), 28);
  EXPECT_EQ(qwen2.image_id, 151655);
  EXPECT_EQ(qwen2.video_id, 151656);

  config["model_type"] = "qwen2_5_vl";
  config["vision_config"] = {{"hidden_size", 1280}, {"tokens_per_second", 2}};
  const QwenVlConfig qwen25 = parse(config);
  EXPECT_EQ(qwen25.family, "qwen2.5-vl");
  EXPECT_EQ(qwen25.vision.intermediate, 3420);
  EXPECT_EQ(qwen25.vision.window, 4);
  EXPECT_THAT(qwen25.vision.full_attention, ElementsAre(7, 15, 23, 31));
  EXPECT_TRUE(qwen25.vision.rms_norm && qwen25.vision.gated_mlp);
  EXPECT_EQ(qwen25.tokens_per_second, 2);

  const QwenVlConfig qwen3 = parse({{"model_type", "qwen3_vl"},
                                    {"tie_word_embeddings", true},
                                    {"text_config", {{"num_hidden_layers", 36}}},
                                    {"vision_config", {{"out_hidden_size", 4096}}}});
  EXPECT_EQ(qwen3.family, "qwen3-vl");
  EXPECT_TRUE(qwen3.text.tie_embeddings && qwen3.text.qk_norm && qwen3.text.rope.interleaved);
  EXPECT_EQ(qwen3.text.head_dim, 128);
  EXPECT_THAT(qwen3.text.rope.sections, ElementsAre(24, 20, 20));
  EXPECT_EQ(qwen3.vision.hidden, 1152);
  EXPECT_EQ(qwen3.vision.layers, 27);
  EXPECT_EQ(qwen3.vision.position_side, 48);
  EXPECT_THAT(qwen3.vision.deepstack, ElementsAre(8, 16, 24));
  EXPECT_EQ(qwen3.token_side(), 32);
}

TEST(QwenVlConfig, CacheShapeComesFromTheConfigAlone) {
  for (const char* folder : kFamilies) {
    const json config = json::parse(test::read_file(golden_root() / folder / "config.json"));
    const CacheShape shape = qwen_vl_cache_shape(config);
    EXPECT_EQ(shape.kv_heads, 2) << folder;
    EXPECT_EQ(shape.head_dim, std::string_view(folder) == "qwen3_vl" ? 16 : 12) << folder;
  }
}

struct Defect {
  std::string folder;
  std::function<void(json&)> edit;
  std::vector<std::string> says;
  ErrorCode code = ErrorCode::kCorruptFile;
};

TEST(QwenVlConfig, WhatIsNotBuiltInIsRefusedByField) {
  const auto vision = [](const char* key, const json& value) {
    return [=](json& config) { config["vision_config"][key] = value; };
  };
  const auto top = [](const char* key, const json& value) {
    return [=](json& config) { config[key] = value; };
  };
  for (const Defect& defect : std::vector<Defect>{
           {"qwen2_5_vl",
            top("model_type", "qwen2_5_omni"),
            {"\"qwen2_5_omni\"", "qwen2_5_vl"},
            ErrorCode::kUnsupported},
           {"qwen3_vl",
            top("model_type", "qwen3_vl_moe"),
            {"\"qwen3_vl_moe\"", "qwen3_vl"},
            ErrorCode::kUnsupported},
           {"qwen3_vl",
            [](json& config) { config["text_config"]["model_type"] = "qwen3_vl_moe_text"; },
            {"text_config", "\"qwen3_vl_moe_text\"", "qwen3_vl_text"},
            ErrorCode::kUnsupported},
           {"qwen2_vl",
            vision("model_type", "siglip"),
            {"vision_config", "\"siglip\""},
            ErrorCode::kUnsupported},
           {"qwen2_5_vl",
            [](json& config) { config["rope_scaling"]["type"] = "longrope"; },
            {"rope_scaling", "\"longrope\""},
            ErrorCode::kUnsupported},
           {"qwen2_5_vl",
            [](json& config) {
              config["rope_scaling"]["mrope_section"] = {1, 2, 4};
            },
            {"mrope_section", "add up to 6"}},
           {"qwen2_5_vl", top("use_sliding_window", true), {"use_sliding_window"}},
           {"qwen2_5_vl", top("hidden_act", "gelu"), {"hidden_act is \"gelu\"", "silu"}},
           {"qwen2_5_vl", vision("hidden_act", "mish"), {"vision_config.hidden_act is \"mish\""}},
           {"qwen2_5_vl", vision("in_chans", 4), {"in_chans is 4", "3"}},
           {"qwen2_5_vl", vision("window_size", 7), {"window_size is 7", "at least 8"}},
           {"qwen2_5_vl",
            vision("fullatt_block_indexes", {-1}),
            {"fullatt_block_indexes", "a list of layers from 0"}},
           {"qwen2_5_vl", vision("out_hidden_size", 40), {"out_hidden_size is 40", "48"}},
           {"qwen2_vl", vision("hidden_size", 40), {"vision_config.hidden_size is 40", "48"}},
           {"qwen2_vl",
            [](json& config) { config["vision_config"]["rope_parameters"]["rope_theta"] = 5e5; },
            {"rope_parameters.rope_theta", "10000"}},
           {"qwen3_vl", vision("num_position_embeddings", 37), {"num_position_embeddings is 37"}},
           {"qwen3_vl",
            vision("deepstack_visual_indexes", {2, 0}),
            {"deepstack_visual_indexes", "ascend"}},
           {"qwen3_vl",
            vision("deepstack_visual_indexes", {0, 1, 2, 3}),
            {"deepstack_visual_indexes", "at most 3"}},
           {"qwen3_vl",
            vision("deepstack_visual_indexes", nullptr),
            {"deepstack_visual_indexes is missing", "0 to 3"}},
           {"qwen3_vl", top("image_token_id", 400), {"image_token_id is 400", "335"}},
           {"qwen3_vl", top("video_token_id", 326), {"video_token_id is 326"}},
           {"qwen3_vl",
            top("video_token_id", 325),
            {"video_token_id", "the tokenizer's <|video_pad|> is token 327"}},
           {"qwen3_vl",
            top("image_token_id", 325),
            {"image_token_id", "the tokenizer's <|image_pad|> is token 326"}},
       }) {
    const std::string message = load_failure(defect.folder, with_config(defect.edit), defect.code);
    for (const std::string& part : defect.says) EXPECT_THAT(message, HasSubstr(part));
    EXPECT_EQ(message.find('\n'), std::string::npos);
  }
}

// ------------------------------------------------------------------------------------- processor

TEST(QwenVlProcessor, EverySpellingOfTheBudgetIsTheSame) {
  const json older = {{"min_pixels", 256}, {"max_pixels", 1024}};
  const json newer = {{"size", {{"shortest_edge", 256}, {"longest_edge", 1024}}}};
  const json both = {{"min_pixels", 256},
                     {"max_pixels", 1024},
                     {"size", {{"min_pixels", 256}, {"max_pixels", 1024}}}};
  for (const json& spelling : {older, newer, both}) {
    json fields = {{"patch_size", 4}};
    fields.update(spelling);
    const Edit own = with_fields("preprocessor_config.json", [&](json& file) { file = fields; });
    const Edit nested = [&](ModelSource& source) {
      with_file("preprocessor_config.json", nullptr)(source);
      with_fields("processor_config.json", [&](json& file) {
        file = {{"image_processor", fields}};
      })(source);
    };
    for (const Edit& edit : {own, nested}) {
      const LoadedModel model = load("qwen2_5_vl", edit);
      EXPECT_THAT(picture_size(model, 90, 70), ElementsAre(32, 24)) << spelling;
      EXPECT_THAT(picture_size(model, 9, 12), ElementsAre(16, 24)) << spelling;
    }
  }
}

TEST(QwenVlProcessor, ClipsTakeTheVideoFileElseThePicturesBudget) {
  const Clip clip = clip_of(4, 40, 60, 2);
  const auto size = [&](const Edit& edit, const std::string& folder) {
    const PositionSpan span = load(folder, edit)->clip_text(clip).spans.at(0);
    return std::array{span.height * 8, span.width * 8};
  };
  EXPECT_THAT(size({}, "qwen2_5_vl"), ElementsAre(24, 32)) << "1024 pixels a frame";
  EXPECT_THAT(
      size(with_fields("video_preprocessor_config.json",
                       [](json& file) {
                         file = {{"patch_size", 4}, {"min_pixels", 64}, {"max_pixels", 4096}};
                       }),
           "qwen2_5_vl"),
      ElementsAre(40, 64));
  EXPECT_THAT(size({}, "qwen3_vl"), ElementsAre(16, 32)) << "2800 pixels in all";
  EXPECT_THAT(size(with_file("video_preprocessor_config.json", nullptr), "qwen3_vl"),
              ElementsAre(8, 16))
      << "1024 pixels in all";
  EXPECT_THAT(size(with_fields("processor_config.json",
                               [](json& file) {
                                 file["video_processor"] = {
                                     {"patch_size", 4},
                                     {"size", {{"shortest_edge", 256}, {"longest_edge", 9600}}}};
                               }),
                   "qwen3_vl"),
              ElementsAre(40, 56));
}

TEST(QwenVlProcessor, AClipsTokensAreCappedIfTheFileSaysSo) {
  const auto rows = [&](const char* folder, int64_t tokens) {
    const LoadedModel model =
        load(folder, with_fields("video_preprocessor_config.json", [&](json& file) {
               file["patch_size"] = 4;
               file["size"] = {{"shortest_edge", 64}, {"longest_edge", 100000}};
               file["cap_pixels_per_frame"] = tokens > 0;
               if (tokens > 0) file["max_video_tokens"] = tokens;
             }));
    return model->clip_text(clip_of(4, 80, 80, 2)).rows();
  };
  EXPECT_EQ(rows("qwen2_5_vl", 0), 200);
  EXPECT_EQ(rows("qwen2_5_vl", 100), 72) << "of 100 tokens 90, 45 a slice of two frames";
  EXPECT_EQ(rows("qwen3_vl", 0), 200);
  EXPECT_EQ(rows("qwen3_vl", 30), 50) << "30 tokens a frame";
}

TEST(QwenVlProcessor, PixelOptionsReplaceTheFilesBudget) {
  LoadOptions more;
  more.max_pixels = 4096;
  LoadOptions least;
  least.min_pixels = 1024;
  for (const char* folder : kFamilies) {
    EXPECT_THAT(picture_size(load(folder), 60, 60), ElementsAre(32, 32)) << folder;
    EXPECT_THAT(picture_size(load(folder, {}, more), 60, 60), ElementsAre(64, 64)) << folder;
    EXPECT_THAT(picture_size(load(folder, {}, least), 9, 12), ElementsAre(32, 40)) << folder;
  }
  // A frame of Qwen2-VL and Qwen2.5-VL is sized as a picture, a clip of Qwen3-VL is not.
  const Clip clip = clip_of(2, 60, 60, 2);
  EXPECT_EQ(load("qwen2_5_vl", {}, more)->clip_text(clip).rows(), 64);
  EXPECT_EQ(load("qwen2_vl", {}, more)->clip_text(clip).rows(), 64);
  EXPECT_EQ(load("qwen3_vl", {}, more)->clip_text(clip).rows(),
            load("qwen3_vl")->clip_text(clip).rows());
  // Limits of the video file that no option touches are no reason to refuse one for pictures.
  const Edit large_frames = with_fields("video_preprocessor_config.json", [](json& file) {
    file = {{"patch_size", 4}, {"min_pixels", 8192}, {"max_pixels", 9000}};
  });
  EXPECT_NO_THROW(load("qwen2_5_vl", large_frames, more));
}

TEST(QwenVlProcessor, PixelOptionsOutOfRangeAreRefused) {
  const auto failure = [](std::optional<int64_t> min, std::optional<int64_t> max) {
    LoadOptions options;
    options.min_pixels = min;
    options.max_pixels = max;
    return load_failure("qwen2_5_vl", {}, ErrorCode::kInvalidArgument, options);
  };
  EXPECT_THAT(failure(0, {}), AllOf(HasSubstr("--min-pixels is 0"), HasSubstr("1 to 268435456")));
  EXPECT_THAT(failure({}, 63), AllOf(HasSubstr("--max-pixels is 63"), HasSubstr("64 to")));
  EXPECT_THAT(failure({}, int64_t{1} << 29), HasSubstr("--max-pixels is 536870912"));
  EXPECT_THAT(failure(2048, {}), AllOf(HasSubstr("2048 pixels or more (--min-pixels)"),
                                       HasSubstr("1024 or fewer (preprocessor_config.json)")));
  EXPECT_THAT(failure(200, 100), HasSubstr("100 or fewer (--max-pixels)"));
}

TEST(QwenVlProcessor, OptionsOfOtherFamiliesAreRefused) {
  LoadOptions tiles;
  tiles.max_tiles = 4;
  EXPECT_THAT(load_failure("qwen3_vl", {}, ErrorCode::kInvalidArgument, tiles),
              AllOf(HasSubstr("--tiles"), HasSubstr("Qwen-VL")));
  LoadOptions aspect;
  aspect.image_aspect = ImageAspect::kPad;
  EXPECT_THAT(load_failure("qwen3_vl", {}, ErrorCode::kInvalidArgument, aspect),
              HasSubstr("--image-aspect"));
}

TEST(QwenVlProcessor, WhatIsNotBuiltInIsRefusedByField) {
  const auto failure = [](const char* file, const char* key, const json& value,
                          ErrorCode code = ErrorCode::kCorruptFile) {
    return load_failure("qwen3_vl", with_fields(file, [&](json& fields) { fields[key] = value; }),
                        code);
  };
  constexpr const char* kImage = "preprocessor_config.json";
  constexpr const char* kVideo = "video_preprocessor_config.json";
  EXPECT_THAT(
      failure(kImage, "image_processor_type", "CLIPImageProcessor", ErrorCode::kUnsupported),
      AllOf(HasSubstr("\"CLIPImageProcessor\""), HasSubstr("Qwen2VLImageProcessor")));
  EXPECT_THAT(
      failure(kVideo, "video_processor_type", "Qwen2VLVideoProcessor", ErrorCode::kUnsupported),
      AllOf(HasSubstr(kVideo), HasSubstr("Qwen3VLVideoProcessor")));
  EXPECT_THAT(failure(kImage, "do_resize", false), HasSubstr("do_resize is false"));
  EXPECT_THAT(failure(kImage, "patch_size", 16),
              AllOf(HasSubstr("patch_size is 16"), HasSubstr("vision_config.patch_size"),
                    HasSubstr("do not belong together")));
  EXPECT_THAT(failure(kVideo, "merge_size", 3), AllOf(HasSubstr(kVideo), HasSubstr("merge_size")));
  EXPECT_THAT(failure(kVideo, "temporal_patch_size", 1), HasSubstr("temporal_patch_size is 1"));
  EXPECT_THAT(failure(kVideo, "num_frames", 8), HasSubstr("num_frames is 8"));
  EXPECT_THAT(failure(kImage, "size", {{"shortest_edge", 256}}), HasSubstr("size.longest_edge"));
  EXPECT_THAT(failure(kImage, "image_std", {0, 1, 1}), HasSubstr("image_std"));
  EXPECT_THAT(failure(kVideo, "rescale_factor", 0), HasSubstr("rescale_factor is 0"));
  EXPECT_THAT(load_failure("qwen3_vl", with_file(kImage, nullptr)),
              AllOf(HasSubstr("qwen3_vl has no preprocessor_config.json"), HasSubstr("download")));
}

TEST(QwenVlProcessor, PicturesAndClipsThatCannotBeAreRefusedByName) {
  const LoadedModel model = load("qwen3_vl");
  const PictureShape thin{.height = 4000, .width = 1, .name = "thin.png"};
  const Error error = error_of([&] { static_cast<void>(model->picture_text(thin, 1)); });
  EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
  EXPECT_THAT(error.what(), AllOf(HasSubstr("thin.png"), HasSubstr("1 x 4000"), HasSubstr("200")));
  const Error clip = error_of([&] { static_cast<void>(model->clip_text(clip_of(1, 40, 60, 2))); });
  EXPECT_EQ(clip.code(), ErrorCode::kInvalidArgument);
  EXPECT_THAT(clip.what(), AllOf(HasSubstr("b.mp4"), HasSubstr("1 frames"), HasSubstr("2")));
  EXPECT_EQ(load("qwen2_5_vl")->clip_text(clip_of(1, 24, 24, 2)).rows(), 9)
      << "its last frame fills the slice";
  const Error slow =
      error_of([&] { static_cast<void>(load("qwen2_5_vl")->clip_text(clip_of(4, 40, 60, 1e-9))); });
  EXPECT_EQ(slow.code(), ErrorCode::kInvalidArgument);
  EXPECT_THAT(slow.what(), AllOf(HasSubstr("b.mp4"), HasSubstr("4e+09 seconds")));
}

/// The reference's image processor has two backends, its video processor one.
TEST(QwenVlProcessor, TheResizeBackendIsThatOfPictures) {
  const GoldenCase golden = case_of("qwen2_5_vl", "image_and_video");
  const std::vector<Image> images = golden.images();
  const std::vector<DecodedClip> clips = golden.videos();
  LoadOptions pil;
  pil.image_backend = ResizeBackend::kPil;
  const LoadedModel one = load("qwen2_5_vl");
  const LoadedModel other = load("qwen2_5_vl", {}, pil);
  const auto values = [](const VisualInput& input) {
    const Tensor rows = patch_values(input.patches);
    return std::vector<float>(rows.as<float>(), rows.as<float>() + rows.shape().elements());
  };
  const Image large = load_image(golden_root() / "qwen2_5_vl" / "image2.png");
  EXPECT_NE(values(one->prepare(large, 1)), values(other->prepare(large, 1)));
  EXPECT_EQ(values(one->prepare_clip(clips.at(0))), values(other->prepare_clip(clips.at(0))));
}

// ----------------------------------------------------------------------------------------- video

TEST(QwenVlVideo, FramesAreTakenAsTheReferenceTakesThem) {
  for (const char* folder : kFamilies) {
    const LoadedModel model = load(folder);
    const GoldenCase golden = case_of(folder, "video");
    const Clip clip = golden.videos().at(0).clip;
    EXPECT_EQ(model->sample_frames(clip.info, {}), clip.frames) << folder;
  }
  const VideoInfo minute = clip_of(600, 40, 60, 10).info;
  EXPECT_EQ(load("qwen3_vl")->sample_frames(minute, {}).size(), 120u) << "two a second";
  EXPECT_EQ(load("qwen2_5_vl")->sample_frames(minute, {}).size(), 600u);
  EXPECT_EQ(load("qwen2_5_vl")->sample_frames(minute, {.fps = 1, .frames = {}}).size(), 60u);
  EXPECT_EQ(load("qwen3_vl")->sample_frames(minute, {.fps = {}, .frames = 9}).size(), 9u);
  const Edit none = with_fields("video_preprocessor_config.json",
                                [](json& file) { file["do_sample_frames"] = false; });
  EXPECT_EQ(load("qwen3_vl", none)->sample_frames(minute, {}).size(), 600u);
}

TEST(QwenVlVideo, EveryGenerationHasItsOwnTimes) {
  const Clip clip = clip_of(5, 24, 24, 2.5);  // 0.8 seconds a slice
  const auto times = [&](const char* folder) {
    return load(folder)->clip_text(clip).spans.at(0).times;
  };
  EXPECT_THAT(times("qwen2_vl"), ElementsAre(0, 1, 2));
  EXPECT_THAT(times("qwen2_5_vl"), ElementsAre(0, 1, 3)) << "two positions a second";
  const VisualText text = load("qwen3_vl")->clip_text(clip);
  EXPECT_EQ(text.text,
            "<0.2 seconds><|vision_start|><|video_pad|><|vision_end|>"
            "<1.0 seconds><|vision_start|><|video_pad|><|vision_end|>"
            "<1.6 seconds><|vision_start|><|video_pad|><|vision_end|>");
  ASSERT_EQ(text.spans.size(), 3u);
  for (const PositionSpan& span : text.spans) EXPECT_THAT(span.times, ElementsAre(0));
}

// ---------------------------------------------------------------------------------------- prompts

TEST(QwenVlPrompt, BuiltInTemplateRendersWhatThePublishedOneDoes) {
  for (const char* folder : {"qwen2_vl", "qwen2_vl_tied", "qwen2_5_vl", "qwen3_vl"}) {
    const LoadedModel model = load(folder, [](ModelSource& source) {
      with_file("chat_template.jinja", nullptr)(source);
      with_file("chat_template.json", nullptr)(source);
      with_fields("tokenizer_config.json", [](json& file) { file.erase("chat_template"); })(source);
    });
    for (const json& entry : test::golden_manifest(golden_root() / folder).at("cases")) {
      if (entry.contains("template") || entry.at("messages").is_null()) continue;
      const GoldenCase golden{golden_root() / folder, golden_root() / folder, entry};
      EXPECT_EQ(model->render(golden.messages()), entry.at("prompt")) << folder << golden.name();
    }
  }
}

/// A prompt, and what the tower made of its pictures and clips.
struct Encoded {
  Prompt prompt;
  VisualRows visual;

  int64_t rows() const { return std::ssize(prompt.ids); }
};

Encoded encode(const LoadedModel& model, const GenerationRequest& request) {
  Encoded encoded;
  encoded.prompt =
      make_prompt(*model, outline_prompt(*model, request.messages,
                                         visual_texts(*model, request.images, request.videos)));
  std::vector<VisualInput> inputs;
  std::vector<const VisualInput*> visuals;
  for (const auto& [clip, index] : encoded.prompt.visuals) {
    inputs.push_back(clip ? model->prepare_clip(request.videos[index])
                          : model->prepare(request.images[index], request.images.size()));
  }
  for (const VisualInput& input : inputs) visuals.push_back(&input);
  encoded.visual = model->encode(visuals, model.stream(), {});
  return encoded;
}

/// Some rows of one of several prompts.
struct Chunk {
  size_t prompt = 0;
  int64_t rows = 0;
};

/// Logits at the end of every prompt, the passes being made of these chunks.
std::vector<std::vector<float>> prefill(const LoadedModel& model,
                                        const std::vector<Encoded>& prompts,
                                        const std::vector<std::vector<Chunk>>& passes) {
  Decoder& decoder = model->decoder();
  const auto cache = model.cache("f32", 256, prompts.size());
  std::vector<SequenceId> ids;
  for (const Encoded& encoded : prompts) {
    const auto rows = static_cast<int>(encoded.rows());
    ids.push_back(cache->open({rows, static_cast<int>(encoded.prompt.visual_rows()), rows}, "x"));
  }
  std::vector<int64_t> first(prompts.size(), 0);
  std::vector<std::vector<float>> last(prompts.size());
  for (const std::vector<Chunk>& pass : passes) {
    int64_t total = 0;
    for (const Chunk& chunk : pass) total += chunk.rows;
    Tensor embeddings(DType::kF32, {total, decoder.hidden()}, test::test_device());
    std::vector<StepRows> sequences;
    std::vector<Position> positions;
    std::vector<AddedRows> added;
    int64_t row = 0;
    for (const Chunk& chunk : pass) {
      const Encoded& encoded = prompts[chunk.prompt];
      const int64_t from = first[chunk.prompt];
      const auto offset = static_cast<size_t>(from);
      const auto count = static_cast<size_t>(chunk.rows);
      for (AddedRows rows :
           embed_prompt(*model, encoded.prompt, from, encoded.visual.each,
                        embeddings.view().slice(row, chunk.rows), model.stream())) {
        rows.row += row;
        added.push_back(rows);
      }
      first[chunk.prompt] += chunk.rows;
      sequences.push_back({ids[chunk.prompt], static_cast<int>(chunk.rows), true,
                           first[chunk.prompt] == encoded.rows(),
                           std::span(encoded.prompt.modality).subspan(offset, count)});
      const auto own = std::span(encoded.prompt.positions).subspan(offset, count);
      positions.insert(positions.end(), own.begin(), own.end());
      row += chunk.rows;
    }
    const TensorView logits = decoder.forward({sequences, positions, embeddings, false, added},
                                              *cache, model.stream(), {});
    for (size_t i = 0; i < pass.size(); ++i) {
      std::vector<float>& own = last[pass[i].prompt];
      own.resize(static_cast<size_t>(decoder.vocab_size()));
      copy(TensorView(own.data(), DType::kF32, {1, decoder.vocab_size()}),
           logits.slice(static_cast<int64_t>(i), 1), model.stream());
    }
  }
  model.stream().synchronize();
  return last;
}

/// A whole prompt in chunks of so many rows.
std::vector<std::vector<Chunk>> in_chunks(const Encoded& encoded, int64_t rows) {
  std::vector<std::vector<Chunk>> passes;
  for (int64_t at = 0; at < encoded.rows(); at += rows) {
    passes.push_back({{0, std::min(rows, encoded.rows() - at)}});
  }
  return passes;
}

double distance(const std::vector<float>& a, const std::vector<float>& b) {
  EXPECT_EQ(a.size(), b.size());
  double most = 0;
  for (size_t i = 0; i < std::min(a.size(), b.size()); ++i) {
    most = std::max(most, std::abs(static_cast<double>(a[i]) - static_cast<double>(b[i])));
  }
  return most;
}

constexpr double kSame = 1e-4;  // sums of another order

/// Qwen3-VL's deepstack: what is added after a layer belongs to exactly the rows of a chunk.
TEST(QwenVlPrompt, ChunksCutInsidePicturesGiveTheLogitsOfOnePass) {
  for (const char* folder : kFamilies) {
    const LoadedModel model = load(folder);
    for (const char* kind : {"two_images", "image_and_video"}) {
      std::vector<Encoded> prompts;
      prompts.push_back(encode(model, case_of(folder, kind).request()));
      const int64_t rows = prompts[0].rows();
      const std::vector<float> whole = prefill(model, prompts, in_chunks(prompts[0], rows))[0];
      for (const int64_t chunk : {int64_t{1}, int64_t{2}, int64_t{7}, rows / 2}) {
        const std::vector<float> parts = prefill(model, prompts, in_chunks(prompts[0], chunk))[0];
        EXPECT_LE(distance(whole, parts), kSame) << folder << " " << kind << " by " << chunk;
      }
      if (std::string_view(folder) != "qwen3_vl") continue;
      for (VisualFeatures& features : prompts[0].visual.each) {
        EXPECT_EQ(features.added.size(), 2u);
        features.added.clear();
      }
      EXPECT_GT(distance(whole, prefill(model, prompts, in_chunks(prompts[0], rows))[0]), 0.1)
          << "what is added after the layers has to tell";
    }
  }
}

TEST(QwenVlPrompt, PromptsOfOneBatchGiveTheLogitsThatTheyHaveAlone) {
  for (const char* folder : kFamilies) {
    const LoadedModel model = load(folder);
    std::vector<Encoded> prompts;
    for (const char* kind : {"two_images", "one_image"}) {
      prompts.push_back(encode(model, case_of(folder, kind).request()));
    }
    const std::array rows = {prompts[0].rows(), prompts[1].rows()};
    const auto apart = prefill(model, prompts, {{{0, rows[0]}}, {{1, rows[1]}}});
    const auto together = prefill(model, prompts, {{{0, rows[0]}, {1, rows[1]}}});
    // Chunks of both in one pass, cut inside the pictures of both.
    const auto mixed =
        prefill(model, prompts,
                {{{1, 17}, {0, 30}}, {{0, 6}, {1, 8}}, {{1, rows[1] - 25}, {0, rows[0] - 36}}});
    for (size_t i = 0; i < prompts.size(); ++i) {
      EXPECT_LE(distance(apart[i], together[i]), kSame) << folder << " " << i;
      EXPECT_LE(distance(apart[i], mixed[i]), kSame) << folder << " " << i;
    }
  }
}

void run(Generator& generator) {
  while (generator.active() > 0) {
    generator.step();
    generator.deliver();
  }
  generator.deliver();
}

ChatMessage says(const char* role, const std::string& text) {
  return {role, {{ContentItem::Kind::kText, text}}};
}

/// A second turn that brings a second picture goes on from what the cache holds.
TEST(QwenVlPrompt, ATurnWithAnotherPictureEqualsTheConversationReadAnew) {
  for (const char* folder : kFamilies) {
    const LoadedModel loaded = load(folder);
    RecordingModel model(*loaded);
    const auto cache = loaded.cache("f32", 400);
    Generator generator(model, *cache, loaded.stream());
    generator.set_session_rows(400);
    GenerationRequest request = case_of(folder, "one_image").request();
    request.max_tokens = 1;
    const int key = generator.admit(request, {});
    run(generator);
    const int before = generator.result(key).prompt_tokens;

    request.messages.push_back(says("assistant", "red"));
    request.messages.push_back({"user",
                                {{ContentItem::Kind::kText, "and this "},
                                 {ContentItem::Kind::kImage, {}},
                                 {ContentItem::Kind::kText, "?"}}});
    request.images.push_back(case_of(folder, "two_images").images().at(1));
    request.max_tokens = 16;
    model.passes().clear();
    generator.resume(key, request, {});
    run(generator);
    const GenerationResult result = generator.result(key);
    EXPECT_EQ(model.passes().at(0).rows, result.prompt_tokens - before) << folder;

    RecordingModel fresh(*loaded);
    const auto own = loaded.cache("f32", 400);
    EXPECT_EQ(test::generate(fresh, *own, loaded.stream(), request).tokens, result.tokens)
        << folder;
    EXPECT_EQ(fresh.passes().at(0).rows, result.prompt_tokens);
    EXPECT_LE(distance(fresh.passes().at(0).logits, model.passes().at(0).logits), kSame) << folder;
  }
}

/// The first token behind a clip stands after the clip's last time; in a conversation that is read
/// anew the same token is text, which follows the text before it.
TEST(QwenVlPrompt, ATurnAfterASlowClipEqualsTheConversationReadAnew) {
  const LoadedModel loaded = load("qwen2_5_vl");
  GenerationRequest request = case_of("qwen2_5_vl", "video").request();
  request.videos.at(0).clip.info.fps = 0.05;  // 80 positions a slice
  request.ignore_eos = true;
  request.max_tokens = 2;
  const Tokenizer& tokenizer = loaded->tokenizer();
  // A question whose answer begins with a token that its text is read back to.
  std::string answer;
  for (int i = 0; answer.empty() && i < 50; ++i) {
    request.messages.at(0).content.back().text = fmt::format("describe {}", i);
    const std::vector<int32_t> ids = test::generate(loaded, "f32", request).tokens;
    const std::string text = tokenizer.decode(std::span(ids).first(1), false);
    if (tokenizer.encode(text, {}) == std::vector<int32_t>{ids[0]}) answer = text;
  }
  ASSERT_FALSE(answer.empty());

  RecordingModel model(*loaded);
  const auto cache = loaded.cache("f32", 400);
  Generator generator(model, *cache, loaded.stream());
  generator.set_session_rows(400);
  const int key = generator.admit(request, {});
  run(generator);
  request.messages.push_back(says("assistant", answer));
  request.messages.push_back(says("user", "why?"));
  request.max_tokens = 16;
  model.passes().clear();
  generator.resume(key, request, {});
  run(generator);

  RecordingModel fresh(*loaded);
  const auto own = loaded.cache("f32", 400);
  EXPECT_EQ(test::generate(fresh, *own, loaded.stream(), request).tokens,
            generator.result(key).tokens);
  EXPECT_LE(distance(fresh.passes().at(0).logits, model.passes().at(0).logits), kSame);
}

/// As the reference, which asks for each of its layers whether the list has it.
TEST(QwenVlConfig, LayersOfFullAttentionAreThoseThatTheTowerHas) {
  const auto full_attention = [](const json& list, int depth) {
    json config = json::parse(test::read_file(golden_root() / "qwen2_5_vl/config.json"));
    config["vision_config"]["fullatt_block_indexes"] = list;
    config["vision_config"]["depth"] = depth;
    return parse_qwen_vl(ConfigReader(config, "config.json")).vision.full_attention;
  };
  EXPECT_THAT(full_attention(nullptr, 3), ElementsAre());
  EXPECT_THAT(full_attention(nullptr, 8), ElementsAre(7));
  EXPECT_THAT(full_attention(nullptr, 31), ElementsAre(7, 15, 23));
  EXPECT_THAT(full_attention(nullptr, 32), ElementsAre(7, 15, 23, 31));
  EXPECT_THAT(full_attention({7, 15, 23, 31}, 4), ElementsAre());
  EXPECT_THAT(full_attention({2, 0, 2, 9}, 3), ElementsAre(0, 2));
}

/// Worked by hand: 40 frames at 1 a second are 20 slices of 2 seconds, 4 positions each, of 1 x 2
/// cells; text goes on after the last slice, or inside the video as in transformers 5.
TEST(QwenVlPositions, OfALongVideoAreAsTrained) {
  for (const auto& [transformers5, first, next] :
       {std::tuple{false, 80, 83}, std::tuple{true, 5, 8}}) {
    LoadOptions options;
    options.transformers5 = transformers5;
    const LoadedModel model = load("qwen2_5_vl", {}, options);
    std::vector<int32_t> times;
    for (int slice = 0; slice < 20; ++slice) times.push_back(4 * slice);
    const PositionSpan spans[] = {
        {.rows = 3}, {.rows = 40, .times = times, .height = 1, .width = 2}, {.rows = 3}};
    const PromptPositions positions = model->positions(spans);
    ASSERT_EQ(positions.rows.size(), 46u);
    EXPECT_EQ(positions.rows[42], (Position{79, 3, 4}));
    EXPECT_EQ(positions.rows[43], Position::on_every_axis(first));
    EXPECT_EQ(positions.next, next);
  }
}

}  // namespace
}  // namespace kvlm
