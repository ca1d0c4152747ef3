// Assembling models from checkpoints as they are found: spellings, files that are missing or in
// another place, and what must be refused. What the models compute is golden_test.cpp's business.
#include <fmt/format.h>
#include <gmock/gmock.h>

#include <set>

#include "kernels/base/error.h"
#include "runtime/families/llava15.h"
#include "runtime/family.h"
#include "runtime/synthetic.h"
#include "tests/runtime/golden.h"
#include "tests/runtime/loading/safetensors_writer.h"
#include "tests/runtime/spellings.h"

namespace kvlm {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using test::error_of;
using test::failure;
using test::FileTensor;
using test::golden_case;
using test::golden_root;
using test::GoldenCase;
using test::GoldenTensors;
using test::LoadedModel;
using test::logits;
using test::read_tensors;
using test::TempFolder;
using test::with_file;
using test::write_checkpoint;
using testing::AllOf;
using testing::HasSubstr;

using Edit = std::function<void(ModelSource&)>;

LoadedModel load(const char* folder, const Edit& edit = {}, const LoadOptions& options = {}) {
  return LoadedModel(golden_root() / folder, options, 1, edit);
}

Edit with_config(const std::function<void(json&)>& edit) {
  return [edit](ModelSource& source) { edit(source.config); };
}

std::string load_failure(const char* folder, const Edit& edit,
                         ErrorCode code = ErrorCode::kCorruptFile) {
  return failure([&] { load(folder, edit); }, code);
}

// ------------------------------------------------------------------------------------- the table

TEST(Families, KnowTheirModelType) {
  std::set<std::string_view> types;
  for (const Family& family : families()) {
    EXPECT_TRUE(types.insert(family.model_type).second) << family.model_type;
    EXPECT_EQ(&family_of({{"model_type", family.model_type}}, "x"), &family);
  }
  EXPECT_TRUE(types.contains("llava"));
}

TEST(Families, UnknownModelTypeIsRefusedWithWhatIsBuiltIn) {
  const Error error = error_of([] { family_of({{"model_type", "llava_next_video"}}, "my-model"); });
  EXPECT_EQ(error.code(), ErrorCode::kUnsupported);
  EXPECT_THAT(error.what(),
              AllOf(HasSubstr("my-model"), HasSubstr("\"llava_next_video\""), HasSubstr("llava")));
  EXPECT_EQ(error_of([] { family_of(json::object(), "x"); }).code(), ErrorCode::kCorruptFile);
  EXPECT_THAT(error_of([] {
                family_of({{"model_type", 7}}, "x");
              }).what(),
              HasSubstr("model_type is 7"));
}

TEST(Families, CacheShapeComesFromTheConfigAlone) {
  const json config = json::parse(test::read_file(golden_root() / "llava_gqa" / "config.json"));
  const CacheShape shape = family_of(config, "x").cache_shape(config);
  EXPECT_EQ(shape.layers, 2);
  EXPECT_EQ(shape.q_heads, 4);
  EXPECT_EQ(shape.kv_heads, 2);
  EXPECT_EQ(shape.head_dim, 12);
  json damaged = config;
  damaged["text_config"]["num_key_value_heads"] = 3;
  EXPECT_THAT(error_of([&] { family_of(config, "x").cache_shape(damaged); }).what(),
              HasSubstr("num_key_value_heads is 3"));
}

// ----------------------------------------------------------------------------------------- names

/// Every spelling under which published LLaVA weights are found gives the same bits.
TEST(LlavaNames, EverySpellingLoadsToTheSameLogitsBitForBit) {
  test::expect_same_logits_of_every_spelling("llava_gqa",
                                             {"saved", "canonical", "v451", "original"});
}

TEST(LlavaNames, ShardsGiveTheSameLogitsBitForBit) {
  for (const char* name : {"case0", "case2"}) {
    const GoldenCase golden = golden_case("llava_gqa", name);
    EXPECT_EQ(logits(load("llava_gqa_sharded"), golden), logits(load("llava_gqa"), golden));
  }
}

TEST(LlavaNames, TensorsThatNobodyReadsAreIgnored) {
  const fs::path folder = golden_root() / "llava_gqa";
  std::vector<FileTensor> tensors = read_tensors(folder / "model.safetensors");
  tensors.push_back({"language_model.model.layers.0.self_attn.rotary_emb.inv_freq",
                     "F32",
                     {6},
                     std::string(24, '\0')});
  tensors.push_back(
      {"vision_tower.embeddings.position_ids", "I64", {1, 17}, std::string(17 * 8, '\0')});
  TempFolder temp;
  write_checkpoint(folder, temp.path(), tensors);
  const GoldenCase golden = golden_case("llava_gqa", "case0");
  EXPECT_EQ(logits(LoadedModel(temp.path()), golden), logits(LoadedModel(folder), golden));
}

TEST(LlavaNames, TensorsWithoutAPlaceAreRefused) {
  const auto with = [](const char* name) {
    return [name](ModelSource& source) {
      auto tensor = std::make_shared<Tensor>(DType::kF32, Shape{3});
      const ConstTensorView view = *tensor;
      source.weights.add(name, view, tensor);
    };
  };
  EXPECT_THAT(load_failure("llava_gqa", with("language_model.model.layers.2.mlp.up_proj.weight")),
              AllOf(HasSubstr("model.language_model.layers.2.mlp.up_proj.weight"),
                    HasSubstr("config.json")));
  EXPECT_THAT(load_failure("llava_gqa", with("image_newline")), HasSubstr("image_newline"));
  EXPECT_THAT(load_failure("llava_gqa", with("adapter.weight")), HasSubstr("adapter.weight"));
  // A layer of the tower that is not needed has a place.
  EXPECT_NO_THROW(load("llava_gqa", with("vision_tower.encoder.layers.2.extra")));
}

TEST(LlavaNames, ConfigAndWeightsThatDoNotBelongTogetherAreRefusedByTensor) {
  const auto text = [](const char* key, int value) {
    return with_config([=](json& config) { config["text_config"][key] = value; });
  };
  EXPECT_THAT(load_failure("llava_gqa", text("num_hidden_layers", 3)),
              HasSubstr("layers.2.input_layernorm.weight"));
  EXPECT_THAT(load_failure("llava_gqa", text("num_hidden_layers", 1)), HasSubstr("layers.1."));
  EXPECT_THAT(load_failure("llava_gqa", text("num_key_value_heads", 4)),
              HasSubstr("k_proj.weight"));
  EXPECT_THAT(load_failure("llava_gqa", text("intermediate_size", 97)), HasSubstr("mlp."));
  EXPECT_THAT(load_failure("llava_gqa", text("vocab_size", 321)), HasSubstr("embed_tokens.weight"));
  EXPECT_THAT(load_failure("llava_gqa", text("head_dim", 16)), HasSubstr("q_proj.weight"));
  const auto vision = [](const char* key, int value) {
    return with_config([=](json& config) { config["vision_config"][key] = value; });
  };
  EXPECT_THAT(load_failure("llava_gqa", vision("image_size", 70)),
              HasSubstr("position_embedding.weight"));
  EXPECT_THAT(load_failure("llava_gqa", vision("patch_size", 7)),
              HasSubstr("patch_embedding.weight"));
  EXPECT_THAT(load_failure("llava_gqa", vision("num_hidden_layers", 5)),
              HasSubstr("encoder.layers.3."));
}

// ----------------------------------------------------------------------------------------- files

TEST(LlavaFiles, ImageProcessorMayBeNestedOrOnItsOwn) {
  const GoldenCase golden = golden_case("llava_gqa", "case0");
  const std::vector<float> expected = logits(load("llava_gqa"), golden);
  EXPECT_EQ(logits(load("llava_gqa", with_file("preprocessor_config.json", nullptr)), golden),
            expected);
  EXPECT_EQ(logits(load("llava_gqa", with_file("processor_config.json", nullptr)), golden),
            expected);
  const Edit neither = [](ModelSource& source) {
    with_file("preprocessor_config.json", nullptr)(source);
    with_file("processor_config.json", R"({"patch_size": 14})")(source);
  };
  EXPECT_THAT(load_failure("llava_gqa", neither),
              AllOf(HasSubstr("llava_gqa has no preprocessor_config.json"), HasSubstr("download")));
}

TEST(LlavaFiles, DamagedJsonIsRefusedByName) {
  for (const char* file : {"generation_config.json", "processor_config.json",
                           "tokenizer_config.json", "tokenizer.json"}) {
    EXPECT_THAT(load_failure("llava_gqa", with_file(file, "{\"a\": ")), HasSubstr(file));
  }
  EXPECT_THAT(load_failure("llava_gqa", with_file("generation_config.json", "[]")),
              AllOf(HasSubstr("generation_config.json"), HasSubstr("expected an object")));
}

TEST(LlavaFiles, GenerationConfigIsOptional) {
  const LoadedModel model = load("llava_gqa", with_file("generation_config.json", nullptr));
  EXPECT_THAT(model->defaults().eos_ids, testing::ElementsAre(2));
  const LoadedModel own =
      load("llava_gqa",
           with_file("generation_config.json",
                     R"({"eos_token_id": [5, 9], "repetition_penalty": 1.1, "do_sample": true})"));
  EXPECT_THAT(own->defaults().eos_ids, testing::ElementsAre(5, 9));
  EXPECT_EQ(own->defaults().sampling.repetition_penalty, 1.1);
  EXPECT_EQ(own->defaults().sampling.temperature, 1);
}

/// The order of transformers 5.23: processor_config.json, chat_template.json, chat_template.jinja,
/// tokenizer_config.json, then the prompt of the Hugging Face conversions.
TEST(LlavaFiles, ChatTemplateIsTheFirstThatExists) {
  const std::vector<ChatMessage> messages = {user_message("hi", 0, "<image>")};
  const auto rendered = [&](const char* jinja, const char* template_json, const char* tokenizer) {
    const std::string original =
        test::read_file(golden_root() / "llava_gqa" / "tokenizer_config.json");
    const LoadedModel model = load("llava_gqa", [&](ModelSource& source) {
      with_file("chat_template.jinja", jinja)(source);
      with_file("chat_template.json", template_json)(source);
      if (tokenizer == nullptr) return;
      json config = json::parse(original);
      config["chat_template"] = json::parse(tokenizer);
      source.file = [text = config.dump(), inner = source.file](const std::string& name) {
        return name == "tokenizer_config.json" ? std::optional(text) : inner(name);
      };
    });
    return model->render(messages);
  };
  const char* in_json = R"({"chat_template": "from json"})";
  const char* in_tokenizer = R"("from tokenizer")";
  const char* in_list =
      R"([{"name": "rag", "template": "no"}, {"name": "default", "template": "from list"}])";
  EXPECT_EQ(rendered("from jinja", in_json, in_tokenizer), "from json");
  EXPECT_EQ(rendered("from jinja", nullptr, in_tokenizer), "from jinja");
  EXPECT_EQ(rendered(nullptr, in_json, in_tokenizer), "from json");
  EXPECT_EQ(rendered(nullptr, nullptr, in_tokenizer), "from tokenizer");
  EXPECT_EQ(rendered(nullptr, nullptr, in_list), "from list");
  EXPECT_EQ(rendered(nullptr, nullptr, nullptr), "USER: hi ASSISTANT:");
  EXPECT_THAT(error_of([&] { rendered(nullptr, "{}", nullptr); }).what(),
              AllOf(HasSubstr("chat_template.json"), HasSubstr("chat_template is missing")));
  EXPECT_THAT(error_of([&] {
                rendered(nullptr, nullptr, R"([{"name": "rag", "template": "no"}])");
              }).what(),
              AllOf(HasSubstr("tokenizer_config.json"), HasSubstr("default")));
}

TEST(LlavaFiles, ChatTemplateOfTheProcessorComesFirst) {
  const LoadedModel model = load("llava_gqa", [](ModelSource& source) {
    json processor =
        json::parse(test::read_file(golden_root() / "llava_gqa" / "processor_config.json"));
    processor["chat_template"] = "from processor";
    source.file = [text = processor.dump(), inner = source.file](const std::string& name) {
      if (name == "chat_template.json") return std::optional<std::string>("{}");  // not looked at
      return name == "processor_config.json" ? std::optional(text) : inner(name);
    };
  });
  EXPECT_EQ(model->render({user_message("hi", 0, "<image>")}), "from processor");
}

TEST(LlavaFiles, TemplatesKnowTheTokenizersNames) {
  const LoadedModel model = load("llava_gqa", [](ModelSource& source) {
    json config =
        json::parse(test::read_file(golden_root() / "llava_gqa" / "tokenizer_config.json"));
    config["pad_token"] = "<pad!>";
    config["unk_token"] = {{"content", "<unk>"}};
    config["extra_special_tokens"] = {{"image_token", "<image>"}};
    with_file("chat_template.jinja",
              "{{ pad_token }}{{ unk_token }}{{ image_token }}{{ bos_token }}")(source);
    source.file = [text = config.dump(), inner = source.file](const std::string& name) {
      return name == "tokenizer_config.json" ? std::optional(text) : inner(name);
    };
  });
  EXPECT_EQ(model->render({}), "<pad!><unk><image><s>");
}

TEST(LlavaFiles, BuiltInTemplateRendersWhatThePublishedOneDoes) {
  for (const GoldenCase& golden : test::golden_cases()) {
    if (golden.folder.filename() != "llava_gqa") continue;
    const LoadedModel model = load("llava_gqa", with_file("chat_template.jinja", nullptr));
    EXPECT_EQ(model->render(golden.messages()), golden.entry.at("prompt")) << golden.name();
  }
}

TEST(LlavaFiles, SentencepieceModelServesWithoutTokenizerJson) {
  const LoadedModel model = load("llava_mha", with_file("tokenizer.json", nullptr));
  for (const GoldenCase& golden : test::golden_cases()) {
    if (golden.folder.filename() != "llava_mha") continue;
    const GoldenTensors tensors(golden.goldens / "golden.safetensors");
    const std::vector<int> pictures(golden.images().size(), 16);
    const Prompt prompt = test::prompt_of(*model, golden.messages(), pictures);
    const std::vector<int64_t> expected = tensors.integers(golden.tensor("input_ids"));
    EXPECT_EQ(prompt.ids, std::vector<int32_t>(expected.begin(), expected.end())) << golden.name();
  }
  EXPECT_THAT(load_failure("llava_gqa", with_file("tokenizer.json", nullptr)),
              AllOf(HasSubstr("llava_gqa has neither tokenizer.json nor tokenizer.model"),
                    HasSubstr("download")));
}

// ---------------------------------------------------------------------------------------- config

TEST(LlavaConfig, NamesOfTheFileArePrintable) {
  for (const json& config : std::vector<json>{
           {{"model_type", "llava\x1b[2J\n"}},
           {{"model_type", "llava"}, {"mm_vision_tower", "\x1b[2J\n"}},
           {{"model_type", "llava"}, {"text_config", {{"model_type", "\x1b[2J\n"}}}},
           {{"model_type", "llava"}, {"vision_config", {{"model_type", "\x1b[2J\n"}}}},
           {{"model_type", "llava"},
            {"text_config", {{"rope_scaling", {{"type", "\x1b[2J\n"}}}}}}}) {
    const Error error = error_of([&] { family_of(config, "m").cache_shape(config); });
    const std::string message = error.what();
    EXPECT_EQ(message.find_first_of("\x1b\n"), std::string::npos) << config;
    EXPECT_THAT(message, HasSubstr("\\x1b[2J")) << config;
  }
}

TEST(LlavaConfig, CheckpointsOfTheOriginalRepositoryAreRefusedWithTheCure) {
  const json config = {{"model_type", "llava"}, {"mm_vision_tower", "openai/clip-vit-large"}};
  const Error error = error_of([&] { llava15_cache_shape(config); });
  EXPECT_EQ(error.code(), ErrorCode::kUnsupported);
  EXPECT_THAT(error.what(), AllOf(HasSubstr("openai/clip-vit-large"), HasSubstr("llava-hf")));
}

TEST(LlavaConfig, ImageIdHasTwoSpellings) {
  EXPECT_TRUE(load("llava_gqa")->is_visual(300));
  EXPECT_TRUE(load("llava_gqa", with_config([](json& config) {
                     config.erase("image_token_index");
                     config["image_token_id"] = 300;
                   }))
                  ->is_visual(300));
  EXPECT_THAT(load_failure("llava_gqa",
                           with_config([](json& config) { config["image_token_index"] = 320; })),
              HasSubstr("image_token_index is 320"));
  EXPECT_THAT(
      load_failure("llava_gqa", with_config([](json& config) { config["image_token_id"] = -200; })),
      HasSubstr("image_token_id is -200"));
}

/// The default of the class, 32000, does not exist in a vocabulary of 320.
TEST(LlavaConfig, MissingImageIdOutsideTheVocabularyIsRefusedAtLoad) {
  EXPECT_THAT(load_failure("llava_gqa",
                           with_config([](json& config) { config.erase("image_token_index"); })),
              AllOf(HasSubstr("image_token_index"), HasSubstr("319")));
}

TEST(LlavaConfig, FeatureLayerListOfOneIsTheLayer) {
  const GoldenCase golden = golden_case("llava_gqa", "case0");
  const LoadedModel list =
      load("llava_gqa", with_config([](json& config) { config["vision_feature_layer"] = {-2}; }));
  const LoadedModel positive =
      load("llava_gqa", with_config([](json& config) { config["vision_feature_layer"] = 2; }));
  const std::vector<float> expected = logits(load("llava_gqa"), golden);
  EXPECT_EQ(logits(list, golden), expected);
  EXPECT_EQ(logits(positive, golden), expected);
  const LoadedModel last =
      load("llava_gqa", with_config([](json& config) { config["vision_feature_layer"] = -1; }));
  EXPECT_NE(logits(last, golden), expected);
}

TEST(LlavaConfig, FeatureLayerOutsideTheTowerIsRefused) {
  for (const int layer : {4, -5}) {
    EXPECT_THAT(
        load_failure("llava_gqa",
                     with_config([=](json& config) { config["vision_feature_layer"] = layer; })),
        AllOf(HasSubstr(fmt::format("vision_feature_layer is {}", layer)), HasSubstr("-4 to 3")));
  }
  EXPECT_THAT(load_failure("llava_gqa", with_config([](json& config) {
                             config["vision_feature_layer"] = {-2, -3};
                           })),
              HasSubstr("linear_1.weight"))
      << "two layers need a wider projector";
}

TEST(LlavaConfig, FullStrategyKeepsTheClassToken) {
  const LoadedModel full =
      load("llava_gqa",
           with_config([](json& config) { config["vision_feature_select_strategy"] = "full"; }));
  EXPECT_EQ(full->picture_text({}, 1).rows(), 17);
  const auto result = test::generate(full, "f32", golden_case("llava_gqa", "case0").request());
  EXPECT_EQ(result.prompt_tokens, 48);
  EXPECT_EQ(result.visual_tokens, 17);
}

TEST(LlavaConfig, TowersAreToldByTheirType) {
  EXPECT_EQ(load("llava_interleave")->picture_text({}, 1).rows(), 16);
  EXPECT_THAT(load_failure("llava_interleave", with_config([](json& config) {
                             config.erase("vision_feature_select_strategy");
                           })),
              AllOf(HasSubstr("vision_feature_select_strategy is missing"),
                    HasSubstr("full: a SigLIP tower")));
  EXPECT_THAT(load_failure("llava_interleave", with_config([](json& config) {
                             config["vision_config"]["model_type"] = "convnext";
                           }),
                           ErrorCode::kUnsupported),
              AllOf(HasSubstr("\"convnext\""), HasSubstr("clip_vision_model"),
                    HasSubstr("siglip_vision_model")));
}

TEST(LlavaConfig, RenamedKeysMeanTheSame) {
  const GoldenCase golden = golden_case("llava_gqa", "case0");
  const std::vector<float> expected = logits(load("llava_gqa"), golden);
  const LoadedModel older = load("llava_gqa", with_config([](json& config) {
                                   json& text = config["text_config"];
                                   text.erase("rope_parameters");
                                   text["rope_theta"] = 10000.0;
                                   text["rope_scaling"] = nullptr;
                                   text["torch_dtype"] = "float32";
                                   config["torch_dtype"] = "float32";
                                   config.erase("dtype");
                                 }));
  EXPECT_EQ(logits(older, golden), expected);
  // As differences from the class defaults.
  const LoadedModel sparse =
      load("llava_gqa", with_config([](json& config) {
             for (const char* key : {"hidden_act", "attention_bias", "mlp_bias", "head_dim",
                                     "rope_parameters", "tie_word_embeddings"}) {
               config["text_config"].erase(key);
             }
             for (const char* key : {"hidden_act", "layer_norm_eps"}) {
               config["vision_config"].erase(key);
             }
             for (const char* key :
                  {"multimodal_projector_bias", "projector_hidden_act", "vision_feature_layer",
                   "tie_word_embeddings", "vision_feature_select_strategy"}) {
               config.erase(key);
             }
           }));
  EXPECT_EQ(logits(sparse, golden), expected);
}

TEST(LlavaConfig, TyingIsAsked) {
  const Edit drop_head = [](ModelSource& source) {
    source.weights.rename([](std::string_view name) {
      return name.find("lm_head") == std::string_view::npos ? std::string(name) : std::string();
    });
  };
  EXPECT_THAT(load_failure("llava_gqa", drop_head), HasSubstr("lm_head.weight"));
  for (const char* level : {"top", "text"}) {
    const LoadedModel tied = load("llava_gqa", [&](ModelSource& source) {
      drop_head(source);
      json& where = std::string_view(level) == "top" ? source.config : source.config["text_config"];
      where["tie_word_embeddings"] = true;
    });
    EXPECT_EQ(tied->weight_bytes() + 4 * 320 * 48, load("llava_gqa")->weight_bytes()) << level;
  }
}

TEST(LlavaModel, SaysWhatItIs) {
  const LoadedModel model = load("llava_gqa");
  EXPECT_EQ(model->name(), "llava_gqa");
  EXPECT_EQ(model->family(), "llava-1.5");
  EXPECT_EQ(model->dtype(), DType::kF32);
  EXPECT_EQ(model->image_token(), "<image>");
  EXPECT_EQ(model->picture_text({}, 1).rows(), 16);
  EXPECT_FALSE(model->caption_prompt().empty());
  EXPECT_EQ(model->decoder().max_positions(), 512);
}

TEST(LlavaModel, PicturesArePreparedAsTheOptionsSay) {
  LoadOptions pad;
  pad.image_aspect = ImageAspect::kPad;
  const LoadedModel cropped = load("llava_gqa");
  const LoadedModel padded = load("llava_gqa", {}, pad);
  Image wide{20, 80, std::vector<uint8_t>(20 * 80 * 3, 200)};
  const VisualInput a = cropped->prepare(wide, 1);
  const VisualInput b = padded->prepare(wide, 1);
  EXPECT_EQ(a.rows, 16);
  const Shape patches{16, 3 * 14 * 14};
  EXPECT_EQ(a.patches.rows.shape(), patches);
  EXPECT_EQ(b.patches.rows.shape(), patches);
  const Tensor of_a = patch_values(a.patches);
  const Tensor of_b = patch_values(b.patches);
  const float inside = of_a.as<float>()[0];
  EXPECT_NEAR(inside, (200 / 255.0f - 0.48145466f) / 0.26862954f, 1e-5f);
  EXPECT_NEAR(of_b.as<float>()[0], (122 / 255.0f - 0.48145466f) / 0.26862954f, 1e-5f)
      << "the mean's colour above the picture";
  EXPECT_NEAR(of_b.as<float>()[10 * 3 * 14 * 14], inside, 1e-5f);
}

/// SigLIP's processor squeezes a picture, so that there is nothing to crop; and no LLaVA-1.5 tiles.
TEST(LlavaModel, AspectsThatMeanNothingAreRefused) {
  const auto refusal = [](const char* folder, ImageAspect aspect) {
    LoadOptions options;
    options.image_aspect = aspect;
    const Error error = error_of([&] { load(folder, {}, options); });
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    return std::string(error.what());
  };
  EXPECT_THAT(refusal("llava_interleave", ImageAspect::kCrop), HasSubstr("--image-aspect crop"));
  EXPECT_THAT(
      refusal("llava_gqa", ImageAspect::kAnyres),
      AllOf(HasSubstr("--image-aspect anyres is for LLaVA-OneVision"), HasSubstr("LLaVA-1.5")));
  LoadOptions pad;
  pad.image_aspect = ImageAspect::kPad;
  const LoadedModel padded = load("llava_interleave", {}, pad);
  const Image wide{20, 80, std::vector<uint8_t>(20 * 80 * 3, 200)};
  EXPECT_NEAR(patch_values(padded->prepare(wide, 1).patches).as<float>()[0], 127 / 127.5f - 1,
              1e-5f)
      << "the mean's colour above the picture";
}

/// Crop and tower sizes that differ are found at the first picture.
TEST(LlavaFiles, PicturesOfAnotherSizeThanTheTowersAreRefused) {
  for (const char* other :
       {R"({"image_processor": {"size": {"shortest_edge": 42}, "crop_size": 42}})",
        R"({"image_processor": {"size": {"shortest_edge": 56}, "do_center_crop": false}})"}) {
    EXPECT_THAT(
        load_failure("llava_gqa", with_file("processor_config.json", other)),
        AllOf(HasSubstr("preprocessor_config.json"), HasSubstr("56 x 56"), HasSubstr("image_size")))
        << other;
  }
}

TEST(LlavaFiles, AnotherIdForPicturesThanTheTokenizersIsRefused) {
  const Edit other = with_config([](json& config) {
    for (const char* key : {"image_token_index", "image_token_id"}) {
      if (config.contains(key)) config[key] = config[key].get<int>() - 1;
    }
  });
  EXPECT_THAT(load_failure("llava_gqa", other),
              AllOf(HasSubstr("image_token_index"), HasSubstr("the tokenizer's <image> is token")));
}

}  // namespace
}  // namespace kvlm
