// What InternVL's room reads and refuses. What its models compute is family_golden_test.cpp's
// business.
#include "runtime/families/internvl.h"

#include <fmt/format.h>
#include <gmock/gmock.h>

#include <cmath>
#include <span>
#include <utility>

#include "kernels/base/error.h"
#include "runtime/families/internvl/config.h"
#include "tests/runtime/gates.h"
#include "tests/runtime/golden.h"
#include "tests/runtime/loading/safetensors_writer.h"

namespace kvlm {
namespace {

using nlohmann::json;
using test::failure;
using test::golden_root;
using test::LoadedModel;
using test::with_file;
using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;

using Edit = std::function<void(ModelSource&)>;

LoadedModel load(const char* folder, const Edit& edit = {}, const LoadOptions& options = {}) {
  return LoadedModel(golden_root() / folder, options, 1, edit);
}

/// Options with one of them given.
template <class Value>
LoadOptions with(std::optional<Value> LoadOptions::*option, std::optional<Value> value) {
  LoadOptions options;
  options.*option = value;
  return options;
}

json config_of(const char* folder) {
  return json::parse(test::read_file(golden_root() / folder / "config.json"));
}

/// The configuration with a patch (RFC 7396) applied; null removes a key.
Edit with_config(const json& patch) {
  return [patch](ModelSource& source) { source.config.merge_patch(patch); };
}

/// A file of the folder with other text.
Edit with_text(const std::string& name, const std::string& text) {
  return [name, text](ModelSource& source) {
    source.file = [name, text, inner = source.file](const std::string& wanted) {
      return wanted == name ? std::optional(text) : inner(wanted);
    };
  };
}

/// A JSON file of the folder with a patch applied.
Edit with_json(const char* folder, const std::string& name, const json& patch) {
  json content = json::parse(test::read_file(golden_root() / folder / name));
  content.merge_patch(patch);
  return with_text(name, content.dump());
}

std::string load_failure(const char* folder, const Edit& edit,
                         ErrorCode code = ErrorCode::kCorruptFile,
                         const LoadOptions& options = {}) {
  return failure([&] { load(folder, edit, options); }, code);
}

Image picture(const char* folder) { return load_image(golden_root() / folder / "image0.png"); }

/// What tower and projector make of a picture.
std::vector<float> features(const LoadedModel& model, const VisualInput& input) {
  const VisualInput* inputs[] = {&input};
  const VisualRows rows = model->encode(inputs, model.stream(), {});
  return test::floats_of(rows.each[0].rows, model.stream());
}

/// Logits of every row of a prompt with one picture that is ready for the tower.
std::vector<float> logits(const LoadedModel& model, const Prompt& prompt,
                          const VisualInput& input) {
  const VisualInput* inputs[] = {&input};
  const VisualRows visual = model->encode(inputs, model.stream(), {});
  Decoder& decoder = model->decoder();
  const auto rows = static_cast<int>(prompt.ids.size());
  const auto cache = model.cache("f32", rows);
  const SequenceId id = cache->open({rows, 0, rows}, "test");
  Tensor all(DType::kF32, {rows, decoder.hidden()}, test::test_device());
  embed_prompt(*model, prompt, 0, visual.each, all, model.stream());
  const StepRows step{id, rows, true, true, prompt.modality};
  const TensorView out =
      decoder.forward({{&step, 1}, prompt.positions, all, true}, *cache, model.stream(), {});
  return test::floats_of(out, model.stream());
}

Prompt prompt_of(const LoadedModel& model, const Image& image) {
  const PictureShape shapes[] = {{image.height, image.width, image.name}};
  return make_prompt(
      *model, outline_prompt(*model, {user_message("what?", 1, model->image_token())},
                             visual_texts(*model, std::span<const PictureShape>(shapes), {})));
}

std::string render(const LoadedModel& model, const std::vector<ChatMessage>& messages) {
  return model->render(messages);
}

ChatMessage says(std::string role, std::string text) {
  return {std::move(role), {{ContentItem::Kind::kText, std::move(text)}}};
}

// ----------------------------------------------------------------------------------------- names

/// Packed weights are the same numbers: equal pixels and ids give equal bits.
TEST(InternVlNames, OriginalsAreTheSameModelsBitForBit) {
  for (const auto& [saved, original] : {std::pair{"internvl", "internvl_original"},
                                        std::pair{"internvl_26b", "internvl_original_internlm2"}}) {
    for (const std::optional<DType> dtype : {std::optional<DType>(), std::optional(DType::kBF16)}) {
      const LoadedModel expected = load(saved, {}, with(&LoadOptions::dtype, dtype));
      const LoadedModel model = load(original, {}, with(&LoadOptions::dtype, dtype));
      const Image image = picture(saved);
      const VisualInput input = expected->prepare(image, 1);
      const Prompt prompt = prompt_of(expected, image);
      EXPECT_EQ(features(model, input), features(expected, input)) << original;
      EXPECT_EQ(logits(model, prompt, input), logits(expected, prompt, input)) << original;
      EXPECT_EQ(model->weight_bytes(), expected->weight_bytes());
    }
  }
}

TEST(InternVlNames, EverySpellingOfTransformersIsTheSameModelBitForBit) {
  const json spellings =
      json::parse(test::read_file(golden_root() / "internvl" / "names.json")).at("spellings");
  const LoadedModel expected = load("internvl");
  const Image image = picture("internvl");
  const VisualInput input = expected->prepare(image, 1);
  const Prompt prompt = prompt_of(expected, image);
  for (const auto& [spelling, names] : spellings.items()) {
    std::map<std::string, std::string, std::less<>> from_saved;
    for (const auto& [canonical, name] : spellings.at("saved").items()) {
      from_saved[name] = names.at(canonical);
    }
    const LoadedModel model = load("internvl", [&](ModelSource& source) {
      source.weights.rename([&](std::string_view name) { return from_saved.find(name)->second; });
    });
    EXPECT_EQ(logits(model, prompt, input), logits(expected, prompt, input)) << spelling;
  }
  EXPECT_GE(spellings.size(), 2u);
}

TEST(InternVlNames, WhatHasNoPlaceIsRefused) {
  const auto with = [](const char* name) {
    return [name](ModelSource& source) {
      auto tensor = std::make_shared<Tensor>(DType::kF32, Shape{3});
      source.weights.add(name, std::as_const(*tensor).view(), tensor);
    };
  };
  for (const char* folder : {"internvl", "internvl_original"}) {
    EXPECT_THAT(load_failure(folder, with("adapter.weight")), HasSubstr("adapter.weight"));
  }
  EXPECT_THAT(load_failure("internvl_original", with("mlp1.2.weight")), HasSubstr("mlp1.2.weight"));
  EXPECT_THAT(load_failure("internvl_original", with("mlp2.0.weight"), ErrorCode::kUnsupported),
              AllOf(HasSubstr("mlp2.0.weight"), HasSubstr("InternVL3.5-Flash")));
}

TEST(InternVlNames, PackedTensorsOfAnotherShapeAreRefusedByName) {
  EXPECT_THAT(load_failure("internvl_original_internlm2",
                           with_config({{"llm_config", {{"num_key_value_heads", 4}}}})),
              HasSubstr("self_attn.qkv.weight has shape (96, 48), but config.json implies 144"));
  EXPECT_THAT(
      load_failure("internvl_original", with_config({{"vision_config", {{"hidden_size", 26}}}})),
      HasSubstr("attention.qkv"));
}

/// The class of transformers says that heads are tied; what is in the file decides.
TEST(InternVlNames, HeadIsTiedWhereThereIsNone) {
  const Edit no_head = [](ModelSource& source) {
    source.config.erase("tie_word_embeddings");
    source.weights.rename([](std::string_view name) {
      return name.ends_with("lm_head.weight") ? std::string() : std::string(name);
    });
  };
  EXPECT_NO_THROW(load("internvl", no_head));
  EXPECT_THAT(load_failure("internvl_original",
                           [](ModelSource& source) {
                             source.weights.rename([](std::string_view name) {
                               return name.ends_with("lm_head.weight") ? std::string()
                                                                       : std::string(name);
                             });
                           }),
              HasSubstr("lm_head.weight"));
}

// ----------------------------------------------------------------------------------------- tower

TEST(InternVlTower, UsesTheLayerThatIsSelected) {
  const LoadedModel saved = load("internvl", with_config({{"vision_feature_layer", -2}}));
  const LoadedModel original = load("internvl_original", with_config({{"select_layer", -2}}));
  const VisualInput input = saved->prepare(picture("internvl"), 1);
  EXPECT_EQ(features(original, input), features(saved, input));
  EXPECT_NE(features(load("internvl"), input), features(saved, input));
  EXPECT_THAT(load_failure("internvl", with_config({{"vision_feature_layer", 3}})),
              HasSubstr("vision_feature_layer is 3; expected -3 to 2"));
}

/// v1 is the older code's order: cells column by column.
TEST(InternVlTower, RowsGoColumnByColumnInTheFirstPixelShuffle) {
  const LoadedModel first = load("internvl_original", with_config({{"ps_version", "v1"}}));
  const LoadedModel second = load("internvl_original");
  const VisualInput input = second->prepare(picture("internvl_original"), 1);
  const std::vector<float> columns = features(first, input);
  const std::vector<float> rows = features(second, input);
  ASSERT_EQ(columns.size(), 3u * 4 * 48);
  constexpr std::array<size_t, 4> kPlace = {0, 2, 1, 3};
  for (size_t i = 0; i < columns.size(); ++i) {
    const size_t row = i / 48;
    EXPECT_EQ(columns[i], rows[(row / 4 * 4 + kPlace[row % 4]) * 48 + i % 48]) << i;
  }
  EXPECT_THAT(load_failure("internvl_original", with_config({{"ps_version", "v3"}})),
              HasSubstr("ps_version is \"v3\"; expected v1 or v2"));
}

// -------------------------------------------------------------------------------------- pictures

int64_t rows_of(const LoadedModel& model, int height, int width) {
  return model->picture_text({height, width, ""}, 1).rows();
}

TEST(InternVlPictures, TilesAndThumbnail) {
  for (const char* folder : {"internvl", "internvl_original"}) {
    const LoadedModel model = load(folder);
    EXPECT_EQ(rows_of(model, 33, 31), 4);       // one tile, and no thumbnail
    EXPECT_EQ(rows_of(model, 41, 83), 3 * 4);   // two and the thumbnail
    EXPECT_EQ(rows_of(model, 100, 100), 5 * 4)  // more pixels than two tiles by two are half of
        << folder;
    EXPECT_EQ(rows_of(model, 20, 2000), 5 * 4);
    EXPECT_EQ(model->prepare(picture(folder), 1).rows, 3 * 4);
    EXPECT_EQ(model->picture_text({41, 83, ""}, 1).text, "<img><IMG_CONTEXT></img>");
  }
}

TEST(InternVlPictures, CallerLimitsTheTiles) {
  for (const char* folder : {"internvl", "internvl_original"}) {
    const auto with_tiles = [&](int tiles) {
      return load(folder, {}, with(&LoadOptions::max_tiles, std::optional(tiles)));
    };
    EXPECT_EQ(rows_of(with_tiles(1), 20, 2000), 4);
    EXPECT_EQ(with_tiles(1)->prepare(picture(folder), 1).rows, 4);
    EXPECT_EQ(rows_of(with_tiles(3), 20, 2000), 4 * 4);
    EXPECT_EQ(rows_of(with_tiles(64), 20, 2000), 65 * 4);
    for (const int tiles : {-1, 0, 1025}) {
      EXPECT_THAT(
          load_failure(folder, {}, ErrorCode::kInvalidArgument,
                       with(&LoadOptions::max_tiles, std::optional(tiles))),
          AllOf(HasSubstr("--tiles is " + std::to_string(tiles)), HasSubstr("expected 1 to 1024")));
    }
  }
  EXPECT_THAT(
      load_failure("internvl_original", with_config({{"min_dynamic_patch", 2}}),
                   ErrorCode::kInvalidArgument, with(&LoadOptions::max_tiles, std::optional(1))),
      HasSubstr("expected 2 to 1024"));
}

TEST(InternVlPictures, OriginalWithoutDynamicSizeHasOneTile) {
  const LoadedModel model = load("internvl_original", with_config({{"dynamic_image_size", false}}));
  EXPECT_EQ(rows_of(model, 20, 2000), 4);
  EXPECT_EQ(model->prepare(picture("internvl_original"), 1).rows, 4);
}

TEST(InternVlPictures, OriginalWithoutThumbnail) {
  const LoadedModel model = load("internvl_original", with_config({{"use_thumbnail", false}}));
  EXPECT_EQ(rows_of(model, 20, 2000), 4 * 4);
}

/// Pillow's arithmetic is the originals' own, torchvision's that of transformers.
TEST(InternVlPictures, BackendIsTheReferencesUnlessTheCallerSays) {
  const Image image = picture("internvl");
  const auto pixels = [&](const char* folder, std::optional<ResizeBackend> backend) {
    const LoadedModel model = load(folder, {}, with(&LoadOptions::image_backend, backend));
    const VisualInput input = model->prepare(image, 1);
    const Tensor rows = patch_values(input.patches);
    return std::vector<float>(rows.as<float>(), rows.as<float>() + rows.shape().elements());
  };
  using enum ResizeBackend;
  EXPECT_EQ(pixels("internvl", {}), pixels("internvl", kTorchvision));
  EXPECT_NE(pixels("internvl", {}), pixels("internvl", kPil));
  EXPECT_EQ(pixels("internvl_original", {}), pixels("internvl_original", kPil));
  EXPECT_NE(pixels("internvl_original", {}), pixels("internvl_original", kTorchvision));
}

TEST(InternVlPictures, OlderFilesHaveAFileForEachProcessorOrOneForBoth) {
  const Edit one = with_file("processor_config.json", nullptr);
  const LoadedModel model = load("internvl", one);
  EXPECT_EQ(rows_of(model, 41, 83), 3 * 4);
  EXPECT_EQ(model->clip_text({{.name = "v", .format = "", .frames = 3}, {0, 1}}).rows(), 2 * 4);
  const auto two = [&](const char* video) {
    return [one, video](ModelSource& source) {
      one(source);
      with_text("video_preprocessor_config.json", video)(source);
    };
  };
  EXPECT_NO_THROW(load("internvl", two(R"({"size": {"height": 28, "width": 28}})")));
  EXPECT_THAT(load_failure("internvl", two(R"({"size": {"height": 28, "width": 30}})")),
              HasSubstr("video_preprocessor_config.json: size.width is 30; expected 28"));
}

TEST(InternVlPictures, FilesThatDoNotBelongToTheTowerAreRefused) {
  const auto image = [](const json& patch) {
    return with_json("internvl", "processor_config.json", {{"image_processor", patch}});
  };
  EXPECT_THAT(load_failure("internvl", image({{"size", {{"height", 30}}}})),
              HasSubstr("image_processor.size.height is 30; expected 28"));
  EXPECT_THAT(load_failure("internvl", image({{"do_resize", false}})), HasSubstr("do_resize"));
  EXPECT_THAT(load_failure("internvl", image({{"min_patches", 5}})), HasSubstr("max_patches is 4"));
  EXPECT_THAT(load_failure("internvl", image({{"image_processor_type", "CLIPImageProcessor"}}),
                           ErrorCode::kUnsupported),
              AllOf(HasSubstr("CLIPImageProcessor"), HasSubstr("GotOcr2ImageProcessor")));
  EXPECT_NO_THROW(load("internvl", image({{"image_processor_type", "GotOcr2ImageProcessorFast"}})));
  EXPECT_NO_THROW(load("internvl", image({{"crop_to_patches", false}})));
  EXPECT_THAT(load_failure("internvl", with_json("internvl", "processor_config.json",
                                                 {{"image_seq_length", 256}})),
              HasSubstr("processor_config.json: image_seq_length is 256; expected 4"));
  const auto video = [](const json& patch) {
    return with_json("internvl", "processor_config.json", {{"video_processor", patch}});
  };
  EXPECT_THAT(load_failure("internvl", video({{"size", {{"width", 14}}}})),
              HasSubstr("width is 14; expected 28"));
}

// ---------------------------------------------------------------------------------------- videos

TEST(InternVlVideos, FramesAreLinesOfOneTileEach) {
  const LoadedModel model = load("internvl");
  const VisualText text = model->clip_text({{.name = "v", .format = "", .frames = 9}, {0, 4}});
  EXPECT_EQ(text.text, "Frame1: <img><IMG_CONTEXT></img>\nFrame2: <img><IMG_CONTEXT></img>");
  ASSERT_EQ(text.spans.size(), 2u);
  EXPECT_EQ(text.spans[0].rows, 4);
  EXPECT_EQ(text.rows(), 8);
}

TEST(InternVlVideos, FramesAreTakenAsEachReferenceDoes) {
  const VideoInfo info{.name = "v", .format = "", .frames = 10, .fps = 5};
  EXPECT_THAT(load("internvl")->sample_frames(info, {.fps = {}, .frames = 3}),
              ElementsAre(1, 5, 8));
  EXPECT_THAT(load("internvl_original")->sample_frames(info, {.fps = {}, .frames = 3}),
              ElementsAre(1, 4, 7));
  EXPECT_EQ(load("internvl")->sample_frames(info, {}).size(), 10u);
}

TEST(InternVlVideos, ProcessorMaySayHowManyFrames) {
  const auto video = [](const json& patch) {
    return with_json("internvl", "processor_config.json", {{"video_processor", patch}});
  };
  const VideoInfo info{.name = "v", .format = "", .frames = 10, .fps = 5};
  const LoadedModel two = load("internvl", video({{"do_sample_frames", true}, {"num_frames", 2}}));
  EXPECT_THAT(two->sample_frames(info, {}), ElementsAre(2, 7));
  EXPECT_EQ(two->sample_frames(info, {.fps = {}, .frames = 5}).size(), 5u);
  const LoadedModel off = load("internvl", video({{"num_frames", 2}}));
  EXPECT_EQ(off->sample_frames(info, {}).size(), 10u);
  EXPECT_THAT(
      load_failure("internvl", video({{"do_sample_frames", true}, {"initial_shift", false}})),
      HasSubstr("initial_shift is false; expected true"));
}

// ------------------------------------------------------------------------------------------ text

TEST(InternVlText, ConversationsOfTheOriginals) {
  const std::vector<ChatMessage> hello = {says("user", "hi")};
  const auto with_template = [](const char* name) {
    return with_config({{"template", name}, {"system_message", nullptr}});
  };
  EXPECT_EQ(
      render(load("internvl_original", with_template("internvl2_5")), hello),
      "<|im_start|>system\n你是书生·万象，英文名是InternVL，是由上海人工智能实验室、清华大学及"
      "多家合作单位联合开发的多模态大语言模型。<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n"
      "<|im_start|>assistant\n");
  const std::string of_2 =
      "<|im_start|>system\n你是由上海人工智能实验室联合商汤科技开发的书生多模态大模型，英文名叫"
      "InternVL, 是一个有用无害的人工智能助手。<|im_end|><|im_start|>user\nhi<|im_end|>"
      "<|im_start|>assistant\n";
  EXPECT_EQ(render(load("internvl_original", with_template("Hermes-2")), hello), of_2);
  EXPECT_EQ(render(load("internvl_original", with_template("internlm2-chat")), hello), of_2);
  EXPECT_THAT(
      load_failure("internvl_original", with_template("phi3-chat"), ErrorCode::kUnsupported),
      AllOf(HasSubstr("template is \"phi3-chat\""),
            HasSubstr("internvl2_5, internlm2-chat, Hermes-2")));
  EXPECT_THAT(load_failure("internvl_original", with_config({{"template", nullptr}})),
              HasSubstr("template is missing"));
}

TEST(InternVlText, SystemTextIsTheCallersThenTheConfigurations) {
  const auto system_of = [](const LoadedModel& model, const std::vector<ChatMessage>& messages) {
    const std::string text = render(model, messages);
    return text.substr(0, text.find("<|im_end|>"));
  };
  const LoadedModel own = load("internvl_original", with_config({{"system_message", "be kind"}}));
  EXPECT_EQ(system_of(own, {says("user", "hi")}), "<|im_start|>system\nbe kind");
  EXPECT_EQ(system_of(own, {says("system", "be brief"), says("user", "hi")}),
            "<|im_start|>system\nbe brief");
  const LoadedModel empty = load("internvl_original", with_config({{"system_message", ""}}));
  EXPECT_EQ(system_of(empty, {says("user", "hi")}), "<|im_start|>system\n");
}

/// The original code writes its prompts itself, whatever template the decoder's tokenizer brings.
TEST(InternVlText, TokenizersTemplateIsNotTheOriginals) {
  const std::vector<ChatMessage> hello = {says("user", "hi")};
  const LoadedModel model =
      load("internvl_original", with_json("internvl_original", "tokenizer_config.json",
                                          {{"chat_template", "{{ of the decoder }}"}}));
  EXPECT_EQ(render(model, hello), render(load("internvl_original"), hello));
  const LoadedModel saved = load("internvl", with_file("chat_template.jinja", "other"));
  EXPECT_EQ(render(saved, hello), "other");
}

TEST(InternVlText, BuiltInTemplateRendersWhatThePublishedOneDoes) {
  const LoadedModel model = load("internvl", with_file("chat_template.jinja", nullptr));
  for (const test::GoldenCase& golden : test::golden_cases("internvl")) {
    if (golden.folder.filename() != "internvl") continue;
    EXPECT_EQ(model->render(golden.messages()), golden.entry.at("prompt")) << golden.name();
  }
}

/// tokenizer.json, vocab.json with merges.txt, and tokenizer.model with its added tokens.
TEST(InternVlText, TokenizersOfEverySpelling) {
  for (const char* folder :
       {"internvl", "internvl_26b", "internvl_original", "internvl_original_internlm2"}) {
    const LoadedModel model = load(folder);
    const Tokenizer& tokenizer = model->tokenizer();
    const json cases =
        json::parse(test::read_file(golden_root() / folder / "tokenizer_cases.json"));
    for (const json& one : cases) {
      const std::string text = one.at("text");
      const std::vector<int32_t> ids = one.at("ids");
      EXPECT_EQ(tokenizer.encode(text), ids) << folder << ": " << text;
      EXPECT_EQ(tokenizer.decode(ids, true), one.at("decoded")) << folder << ": " << text;
    }
    EXPECT_GT(cases.size(), 20u);
  }
}

TEST(InternVlText, VocabularyOfAnotherTokenizerIsRefused) {
  const auto of_class = [](const json& name) {
    return with_json("internvl_original", "tokenizer_config.json", {{"tokenizer_class", name}});
  };
  EXPECT_THAT(
      load_failure("internvl_original", of_class("GPT2Tokenizer"), ErrorCode::kUnsupported),
      AllOf(HasSubstr("GPT2Tokenizer"), HasSubstr("Qwen2Tokenizer"), HasSubstr("tokenizer.json")));
  EXPECT_NO_THROW(load("internvl_original", of_class("Qwen2TokenizerFast")));
  EXPECT_THAT(load_failure("internvl_original", with_text("merges.txt", "a \xff\n")),
              HasSubstr("merges.txt is not UTF-8"));
  EXPECT_THAT(load_failure("internvl_original", with_text("merges.txt", "no pair\n")),
              HasSubstr("vocab.json and merges.txt"));
  EXPECT_THAT(load_failure("internvl_original", with_text("vocab.json", "[]")), HasSubstr("vocab"));
  EXPECT_THAT(load_failure("internvl_original", with_file("merges.txt", nullptr)),
              AllOf(HasSubstr("neither tokenizer.json"), HasSubstr("vocab.json with merges.txt")));
}

TEST(InternVlText, AnswersEndWhereATurnEnds) {
  const auto ends = [](const LoadedModel& model) {
    EXPECT_EQ(model->defaults().sampling.rules.eos_ids, model->defaults().eos_ids);
    return model->defaults().eos_ids;
  };
  EXPECT_THAT(ends(load("internvl")), ElementsAre(322, 320));
  EXPECT_THAT(ends(load("internvl_original")), ElementsAre(322));
  EXPECT_THAT(ends(load("internvl_original",
                        with_file("generation_config.json", R"({"eos_token_id": 7})"))),
              ElementsAre(7, 322));
  EXPECT_THAT(ends(load("internvl_original_internlm2")), ElementsAre(300, 301));
}

TEST(InternVlText, TokensWithoutWhichNoPictureCanBeShown) {
  const auto without = [](const char* folder, const char* file, const std::string& token) {
    std::string text = test::read_file(golden_root() / folder / file);
    for (size_t at; (at = text.find('"' + token + '"')) != std::string::npos;) {
      text.replace(at, token.size() + 2, "\"other\"");
    }
    return with_text(file, text);
  };
  EXPECT_THAT(load_failure("internvl", without("internvl", "tokenizer.json", "<img>")),
              AllOf(HasSubstr("no token <img>"), HasSubstr("model's page")));
  EXPECT_THAT(load_failure("internvl", with_config({{"image_token_id", 324}})),
              HasSubstr("image_token_id"));
  EXPECT_THAT(
      load_failure("internvl_original", with_config({{"llm_config", {{"vocab_size", 325}}}})),
      HasSubstr("<IMG_CONTEXT> is token 325, but vocab_size of config.json is 325"));
}

// -------------------------------------------------------------------------------------- refusals

TEST(InternVlConfig, DecodersThatAreNotBuiltInAreRefusedByName) {
  const auto original = [](const char* name) {
    return load_failure("internvl_original",
                        with_config({{"llm_config", {{"architectures", json::array({name})}}}}),
                        ErrorCode::kUnsupported);
  };
  const auto saved = [](const char* name) {
    return load_failure("internvl", with_config({{"text_config", {{"model_type", name}}}}),
                        ErrorCode::kUnsupported);
  };
  for (const std::string& message : {original("Qwen3MoeForCausalLM"), saved("qwen3_moe"),
                                     original("GptOssForCausalLM"), saved("gpt_oss")}) {
    EXPECT_THAT(message, AllOf(HasSubstr("mixture of experts"), HasSubstr("dense")));
  }
  EXPECT_THAT(original("Phi3ForCausalLM"), HasSubstr("longrope"));
  for (const std::string& message : {original("InternLM3ForCausalLM"), saved("internlm3")}) {
    EXPECT_THAT(message, HasSubstr("the decoder of InternVL3-9B, which is not supported"));
  }
  EXPECT_THAT(original("MambaForCausalLM"),
              AllOf(HasSubstr("\"MambaForCausalLM\""), HasSubstr("InternLM2ForCausalLM")));
  EXPECT_THAT(saved("mamba"), AllOf(HasSubstr("\"mamba\""), HasSubstr("qwen2, llama, qwen3")));
  EXPECT_THAT(load_failure("internvl_original",
                           with_config({{"llm_config", {{"architectures", nullptr}}}})),
              HasSubstr("llm_config.architectures is missing"));
}

TEST(InternVlConfig, WithoutADecodersNameItIsQwen2) {
  EXPECT_NO_THROW(load("internvl", with_config({{"text_config", {{"model_type", nullptr}}}})));
}

TEST(InternVlConfig, WhatWouldChangeTheAnswersIsRefused) {
  const auto original = [](const json& patch, ErrorCode code = ErrorCode::kCorruptFile) {
    return load_failure("internvl_original", with_config(patch), code);
  };
  EXPECT_THAT(original({{"flash_mode", true}}, ErrorCode::kUnsupported),
              AllOf(HasSubstr("InternVL3.5-Flash"), HasSubstr("not batch-invariant")));
  EXPECT_THAT(original({{"pad2square", true}}, ErrorCode::kUnsupported), HasSubstr("pad2square"));
  EXPECT_THAT(original({{"force_image_size", 56}}),
              HasSubstr("force_image_size is 56; expected vision_config.image_size 28"));
  EXPECT_THAT(original({{"downsample_ratio", 0.4}}), HasSubstr("downsample_ratio is 0.4"));
  EXPECT_THAT(original({{"downsample_ratio", 1.0 / 3}}),
              HasSubstr("n divides the 4 patches along a side"));
  EXPECT_THAT(original({{"downsample_ratio", 0.25}, {"vision_config", {{"hidden_size", 1 << 17}}}}),
              HasSubstr("downsample_ratio is 0.25; expected more"));
  EXPECT_THAT(original({{"min_dynamic_patch", 5}}), HasSubstr("max_dynamic_patch is 4"));
  EXPECT_THAT(
      original({{"llm_config", {{"rope_scaling", {{"type", "spiral"}}}}}}, ErrorCode::kUnsupported),
      HasSubstr("rope_type is \"spiral\""));
  const auto saved = [](const json& patch) { return load_failure("internvl", with_config(patch)); };
  EXPECT_THAT(saved({{"image_seq_length", 256}}), HasSubstr("image_seq_length is 256; expected 4"));
  EXPECT_THAT(saved({{"vision_feature_select_strategy", "full"}}),
              HasSubstr("vision_feature_select_strategy"));
  EXPECT_THAT(saved({{"projector_hidden_act", "silu"}}), HasSubstr("projector_hidden_act"));
  EXPECT_THAT(saved({{"vision_config", {{"use_mean_pooling", false}, {"norm_type", "rms_norm"}}}}),
              HasSubstr("use_mean_pooling is false"));
  EXPECT_THAT(saved({{"vision_config", {{"use_mean_pooling", false}}}}),
              HasSubstr("model.vision_tower.layernorm.weight"));
  EXPECT_THAT(saved({{"vision_config", {{"norm_type", "batch_norm"}}}}),
              HasSubstr("norm_type is \"batch_norm\""));
  EXPECT_THAT(saved({{"vision_config", {{"image_size", {28, 14}}}}}), HasSubstr("image_size"));
  EXPECT_THAT(saved({{"image_token_id", 336}}), HasSubstr("image_token_id is 336"));
}

/// A tower without mean pooling normalises what its last layer gives, and no other state.
TEST(InternVlConfig, WithoutMeanPoolingTheTowerEndsWithANorm) {
  constexpr const char* kFolder = "internvl";
  const int hidden = config_of(kFolder)["vision_config"]["hidden_size"];
  const auto with_norm = [&](const json& patch) {
    return [=](ModelSource& source) {
      source.config.merge_patch(patch);
      for (const auto& [name, step] : {std::pair{"weight", 0.01F}, std::pair{"bias", -0.02F}}) {
        auto tensor = std::make_shared<Tensor>(DType::kF32, Shape{hidden});
        for (int i = 0; i < hidden; ++i) {
          tensor->as<float>()[i] = 1 + step * static_cast<float>(i);
        }
        const ConstTensorView view = std::as_const(*tensor).view();
        source.weights.add(fmt::format("model.vision_tower.layernorm.{}", name), view, tensor);
      }
    };
  };
  const auto selected = [&](const LoadedModel& model) {
    test::Taps taps;
    const VisualInput input = model->prepare(picture(kFolder), 1);
    const VisualInput* inputs[] = {&input};
    model->encode(inputs, model.stream(), test::collect(taps));
    return taps.at("vision.selected");
  };
  std::vector<float> expected = selected(load(kFolder));
  for (size_t row = 0; row < expected.size(); row += static_cast<size_t>(hidden)) {
    const std::span<float> values = std::span(expected).subspan(row, static_cast<size_t>(hidden));
    double mean = 0;
    double square = 0;
    for (const double value : values) mean += value / hidden;
    for (const double value : values) square += std::pow(value - mean, 2) / hidden;
    for (int i = 0; i < hidden; ++i) {
      float& value = values[static_cast<size_t>(i)];
      value = static_cast<float>(
          (double{value} - mean) / std::sqrt(square + 1e-6) * (1 + 0.01 * i) + (1 - 0.02 * i));
    }
  }
  const json without = {{"vision_config", {{"use_mean_pooling", false}}}};
  const std::vector<float> found = selected(load(kFolder, with_norm(without)));
  ASSERT_EQ(found.size(), expected.size());
  for (size_t i = 0; i < found.size(); ++i) ASSERT_NEAR(found[i], expected[i], 1e-4) << i;
  // The state before the last layer is not normalised, and the norm is left unread.
  json earlier = without;
  earlier["vision_feature_layer"] = -2;
  EXPECT_EQ(selected(load(kFolder, with_norm(earlier))),
            selected(load(kFolder, with_config({{"vision_feature_layer", -2}}))));
}

TEST(InternVlConfig, OptionsOfOtherFamiliesAreRefused) {
  for (const char* folder : {"internvl", "internvl_original"}) {
    EXPECT_THAT(load_failure(folder, {}, ErrorCode::kInvalidArgument,
                             with(&LoadOptions::min_pixels, std::optional<int64_t>(100))),
                AllOf(HasSubstr("--min-pixels"), HasSubstr("InternVL")));
  }
}

TEST(InternVlConfig, CacheShapeComesFromTheConfigAlone) {
  for (const char* folder : {"internvl", "internvl_original", "internvl_original_internlm2"}) {
    const json config = config_of(folder);
    const CacheShape shape = family_of(config, "x").cache_shape(config);
    EXPECT_EQ(shape.layers, 2) << folder;
    EXPECT_EQ(shape.q_heads, 4);
    EXPECT_EQ(shape.kv_heads, 2);
    EXPECT_EQ(shape.head_dim, 12);
  }
}

/// The defaults of transformers 5.23's InternVLConfig() and the originals' InternVLChatConfig().
TEST(InternVlConfig, MissingFieldsTakeTheClassDefaults) {
  const json absent = json::object();
  const InternVlHfConfig hf = parse_internvl_config(ConfigReader(absent, "config.json"));
  EXPECT_EQ(hf.image_id, 151667);
  EXPECT_EQ(hf.model.vision.hidden, 1024);
  EXPECT_EQ(hf.model.vision.layers, 24);
  EXPECT_FALSE(hf.model.vision.qkv_bias || hf.model.vision.qk_norm);
  EXPECT_EQ(hf.model.vision.norm, VitConfig::Norm::kLayer);
  EXPECT_EQ(hf.model.tile_rows(), 256);
  EXPECT_FALSE(hf.model.columns_first);
  EXPECT_TRUE(hf.model.text.qkv_bias && hf.model.text.tie_embeddings);

  const json least = {{"template", "internvl2_5"},
                      {"llm_config", {{"architectures", {"LlamaForCausalLM"}}}}};
  const InternVlChatConfig chat = parse_internvl_chat_config(ConfigReader(least, "config.json"));
  EXPECT_EQ(chat.model.vision.hidden, 3200);
  EXPECT_EQ(chat.model.vision.heads, 25);
  EXPECT_EQ(chat.model.vision.image_size, 224);
  EXPECT_TRUE(chat.model.vision.qk_norm);
  EXPECT_EQ(chat.model.vision.norm, VitConfig::Norm::kRms);
  EXPECT_TRUE(chat.model.columns_first);
  EXPECT_EQ(chat.tiling.max_tiles, 1);
  EXPECT_FALSE(chat.tiling.thumbnail);
  EXPECT_EQ(chat.decoder, DecoderType::kLlama);
}

}  // namespace
}  // namespace kvlm
