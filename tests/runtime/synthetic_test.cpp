#include "runtime/synthetic.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <numeric>

#include "kernels/base/error.h"
#include "runtime/family.h"
#include "runtime/generator.h"
#include "runtime/loading/checkpoint.h"
#include "tests/runtime/golden.h"
#include "tests/runtime/loading/safetensors_writer.h"

namespace kvlm {
namespace {

using test::error_of;
using testing::AllOf;
using testing::HasSubstr;

std::vector<float> values(ConstTensorView view) {
  std::vector<float> all;
  for (int64_t i = 0; i < view.elements(); ++i) {
    switch (view.dtype()) {
      case DType::kF16:
        all.push_back(to_float(view.as<f16>()[i]));
        break;
      case DType::kBF16:
        all.push_back(to_float(view.as<bf16>()[i]));
        break;
      default:
        all.push_back(view.as<float>()[i]);
    }
  }
  return all;
}

CacheShape cache_shape(std::string_view text) {
  const nlohmann::json config = synthetic_config(text);
  return family_of(config, "synthetic").cache_shape(config);
}

TEST(Synthetic, NamesAreTheReleasedShapes) {
  EXPECT_THAT(synthetic_names(),
              testing::IsSupersetOf({"llava-1.5-7b", "llava-1.5-13b", "llava-tinyllama-1.1b"}));
  ThreadPool pool(1);
  Stream stream(pool);
  for (const std::string_view name : synthetic_names()) {
    const ModelSource source = synthetic_source(name, DType::kBF16, stream);
    EXPECT_EQ(source.name, fmt::format("synthetic:{}", name));
    EXPECT_EQ(source.config, synthetic_config(name));
    EXPECT_NO_THROW(cache_shape(name));
  }
  // llava-hf/llava-1.5-7b-hf, config.json.
  const CacheShape shape = cache_shape("llava-1.5-7b");
  EXPECT_EQ(shape.layers, 32);
  EXPECT_EQ(shape.q_heads, 32);
  EXPECT_EQ(shape.kv_heads, 32);
  EXPECT_EQ(shape.head_dim, 128);
  EXPECT_EQ(shape.elements_per_token() * 2, 524288u) << "half a MiB a token in f16";
}

/// By the config.json of the released checkpoints: layers, heads, and parameters of the decoder
/// without norms and biases.
TEST(Synthetic, LargerDecodersHaveTheReleasedShapes) {
  struct Case {
    const char* name;
    int layers, q_heads, kv_heads, context;
    int64_t millions;
  };
  for (const Case& c : {Case{"internvl2.5-8b", 32, 32, 8, 32768, 7737},
                        {"internvl2.5-26b", 48, 48, 8, 32768, 19860},
                        {"qwen2.5-vl-7b", 28, 28, 4, 128000, 7615},
                        {"llava-onevision-7b", 28, 28, 4, 32768, 7615}}) {
    const CacheShape shape = cache_shape(c.name);
    EXPECT_EQ(shape.layers, c.layers);
    EXPECT_EQ(shape.q_heads, c.q_heads);
    EXPECT_EQ(shape.kv_heads, c.kv_heads);
    EXPECT_EQ(shape.head_dim, 128);
    const nlohmann::json text = synthetic_config(c.name)["text_config"];
    EXPECT_EQ(text["max_position_embeddings"], c.context);
    const auto field = [&](const char* key) { return text[key].get<int64_t>(); };
    const int64_t hidden = field("hidden_size");
    const int64_t heads = 2 * field("num_attention_heads") + 2 * field("num_key_value_heads");
    const int64_t layer = hidden * 128 * heads + 3 * hidden * field("intermediate_size");
    const int64_t all = c.layers * layer + 2 * hidden * field("vocab_size");
    EXPECT_EQ(all / 1'000'000, c.millions) << c.name;
  }
}

TEST(Synthetic, LayersCanBeChosen) {
  EXPECT_EQ(cache_shape("llava-1.5-7b,layers=3").layers, 3);
  EXPECT_EQ(cache_shape("llava-1.5-7b,layers=1024").layers, 1024);
}

TEST(Synthetic, RefusesWhatItDoesNotKnow) {
  const auto failure = [](const char* text) {
    const Error error = error_of([&] { synthetic_config(text); });
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    return std::string(error.what());
  };
  EXPECT_THAT(failure("lava-1.5-7b"), HasSubstr("did you mean synthetic:llava-1.5-7b?"));
  EXPECT_THAT(failure(""), HasSubstr("supported are"));
  for (const char* option : {"layers=0", "layers=1025", "layers=-1", "layers=", "layers=2x",
                             "layers", "layer=2", "", "layers=99999999999", "layers=2,layers=3"}) {
    EXPECT_THAT(failure(fmt::format("llava-1.5-7b,{}", option).c_str()),
                AllOf(HasSubstr(fmt::format("\"{}\"", option)), HasSubstr("layers=N")));
  }
}

/// Matrices are random with the variance of a usual initialisation, different for each name and the
/// same in every run; vectors are ones and biases zeros.
TEST(Synthetic, WeightsAreWhatAFreshModelHas) {
  ThreadPool pool(2);
  Stream stream(pool);
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
    const auto take = [&](const char* name, const Shape& shape) {
      ModelSource source = synthetic_source("llava-1.5-7b", dtype, stream);
      const ConstTensorView view = source.weights.take(name, shape);
      EXPECT_EQ(view.dtype(), shape.rank() == 1 ? DType::kF32 : dtype);
      return values(view);
    };
    const std::vector<float> matrix = take("a.weight", {300, 400});
    double sum = 0;
    double squares = 0;
    for (const float x : matrix) {
      ASSERT_TRUE(std::isfinite(x));
      sum += static_cast<double>(x);
      squares += static_cast<double>(x) * static_cast<double>(x);
    }
    EXPECT_NEAR(sum / 120000, 0, 1e-3);
    EXPECT_NEAR(std::sqrt(squares / 120000), 1 / std::sqrt(400.0), 1e-3);
    EXPECT_EQ(take("a.weight", {300, 400}), matrix);
    EXPECT_NE(take("b.weight", {300, 400}), matrix);
    ModelSource source = synthetic_source("llava-1.5-7b", dtype, stream);
    const ConstTensorView wide = source.weights.take_f32("a.weight", {300, 400});
    EXPECT_EQ(wide.dtype(), DType::kF32);
    EXPECT_NEAR(values(wide).back(), matrix.back(), std::abs(matrix.back()) / 256);
    EXPECT_THAT(take("norm.weight", {5}), testing::Each(1.0f));
    EXPECT_THAT(take("norm.bias", {5}), testing::Each(0.0f));
  }
}

/// Known before any weight is made: all of a model but its vectors, which are a thousandth at most.
TEST(Synthetic, WeightBytesAreKnownBeforehand) {
  ThreadPool pool(2);
  Stream stream(pool);
  constexpr const char* kName = "llava-tinyllama-1.1b,layers=2";
  ModelSource source = synthetic_source(kName, DType::kBF16, stream);
  const Family& family = family_of(source.config, source.name);
  const auto model = family.load(std::move(source), LoadOptions(), stream);
  const auto known = static_cast<double>(synthetic_weight_bytes(kName, DType::kBF16));
  EXPECT_LE(known, static_cast<double>(model->weight_bytes()));
  EXPECT_GE(known, 0.995 * static_cast<double>(model->weight_bytes()));
  EXPECT_EQ(synthetic_weight_bytes("internvl2.5-26b", DType::kF32),
            2 * synthetic_weight_bytes("internvl2.5-26b", DType::kF16));
  EXPECT_NEAR(static_cast<double>(synthetic_weight_bytes("llava-1.5-7b", DType::kF16)), 14.1e9,
              0.01e9);
}

/// Towers, projectors and mergers are those of the released model, and counted. Matrices here are
/// memory that nobody touches.
TEST(Synthetic, WeightBytesCountEveryTower) {
  ThreadPool pool(1);
  Stream stream(pool);
  for (const std::string_view name : synthetic_names()) {
    if (name == "internvl2.5-26b") continue;                    // its tower alone has 11 GB
    const std::string text = fmt::format("{},layers=3", name);  // as many as deepstack wants
    ModelSource source = synthetic_source(text, DType::kBF16, stream);
    source.weights = WeightMap();
    source.weights.make_missing([](std::string_view, const Shape& shape, bool wide, Device) {
      const bool vector = wide || shape.rank() == 1;
      auto made = std::make_shared<Tensor>(vector ? DType::kF32 : DType::kBF16, shape);
      if (vector) std::fill_n(made->as<float>(), shape.elements(), 1.0f);
      return made;
    });
    const Family& family = family_of(source.config, source.name);
    const auto model = family.load(std::move(source), LoadOptions(), stream);
    const auto known = static_cast<double>(synthetic_weight_bytes(text, DType::kBF16));
    EXPECT_LE(known, static_cast<double>(model->weight_bytes())) << text;
    EXPECT_GE(known, 0.99 * static_cast<double>(model->weight_bytes())) << text;
  }
}

/// A synthetic model of a small shape answers a prompt with a picture, end to end.
TEST(Synthetic, ModelsRunWithoutAnyFile) {
  ThreadPool pool(1);
  Stream stream(pool);
  ModelSource source = synthetic_source("llava-1.5-7b,layers=1", DType::kBF16, stream);
  source.config["text_config"].update({{"hidden_size", 32},
                                       {"intermediate_size", 48},
                                       {"num_attention_heads", 2},
                                       {"num_key_value_heads", 1}});
  source.config["vision_config"] = {{"hidden_size", 16},      {"intermediate_size", 24},
                                    {"num_hidden_layers", 2}, {"num_attention_heads", 2},
                                    {"image_size", 336},      {"patch_size", 112}};
  const Family& family = family_of(source.config, source.name);
  const auto model = family.load(std::move(source), LoadOptions(), stream);
  EXPECT_EQ(model->dtype(), DType::kBF16);
  EXPECT_EQ(model->picture_text({}, 1).rows(), 9);
  const auto plan = plan_cache(parse_spec("f16"), model->decoder().cache_shape());
  const auto cache = make_cache(plan, reservation(*plan, {1, 0, 200}).bytes(), {});
  GenerationRequest request;
  request.messages = {user_message("What is it?", 1, model->image_token())};
  request.images.push_back({40, 50, std::vector<uint8_t>(40 * 50 * 3, 90)});
  request.max_tokens = 10;
  request.ignore_eos = true;
  const GenerationResult result = test::generate(*model, *cache, stream, request);
  EXPECT_EQ(result.tokens.size(), 10u);
  EXPECT_EQ(result.visual_tokens, 9);
}

}  // namespace
}  // namespace kvlm
