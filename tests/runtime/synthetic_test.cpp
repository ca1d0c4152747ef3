#include "runtime/synthetic.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <numeric>

#include "kernels/base/error.h"
#include "runtime/family.h"
#include "runtime/generator.h"
#include "runtime/submodel_config.h"
#include "tests/runtime/golden.h"
#include "tests/runtime/safetensors_writer.h"

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

TEST(Synthetic, NamesAreTheReleasedShapes) {
  EXPECT_THAT(synthetic_names(),
              testing::IsSupersetOf({"llava-1.5-7b", "llava-1.5-13b", "llava-tinyllama-1.1b"}));
  for (const std::string_view name : synthetic_names()) {
    const ModelSource source = synthetic_source(name, DType::kBF16);
    EXPECT_EQ(source.name, fmt::format("synthetic:{}", name));
    EXPECT_NO_THROW(family_of(source.config, source.name).cache_shape(source.config));
  }
  // models.md 1.2.
  const ModelSource source = synthetic_source("llava-1.5-7b", DType::kF16);
  const CacheShape shape = family_of(source.config, source.name).cache_shape(source.config);
  EXPECT_EQ(shape.layers, 32);
  EXPECT_EQ(shape.q_heads, 32);
  EXPECT_EQ(shape.kv_heads, 32);
  EXPECT_EQ(shape.head_dim, 128);
  EXPECT_EQ(shape.elements_per_token() * 2, 524288u) << "half a MiB a token in f16";
}

TEST(Synthetic, LayersCanBeChosen) {
  const auto layers = [](const char* text) {
    const ModelSource source = synthetic_source(text, DType::kF16);
    return family_of(source.config, source.name).cache_shape(source.config).layers;
  };
  EXPECT_EQ(layers("llava-1.5-7b,layers=3"), 3);
  EXPECT_EQ(layers("llava-1.5-7b,layers=1024"), 1024);
}

TEST(Synthetic, RefusesWhatItDoesNotKnow) {
  const auto failure = [](const char* text) {
    const Error error = error_of([&] { synthetic_source(text, DType::kF16); });
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    return std::string(error.what());
  };
  EXPECT_THAT(failure("lava-1.5-7b"), HasSubstr("did you mean synthetic:llava-1.5-7b?"));
  EXPECT_THAT(failure(""), HasSubstr("built in are"));
  for (const char* option : {"layers=0", "layers=1025", "layers=-1", "layers=", "layers=2x",
                             "layers", "layer=2", "", "layers=99999999999", "layers=2,layers=3"}) {
    EXPECT_THAT(failure(fmt::format("llava-1.5-7b,{}", option).c_str()),
                AllOf(HasSubstr(fmt::format("\"{}\"", option)), HasSubstr("layers=N")));
  }
}

/// Matrices are random with the variance of a usual initialisation, different for each name and the
/// same in every run; vectors are ones and biases zeros.
TEST(Synthetic, WeightsAreWhatAFreshModelHas) {
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
    const auto take = [&](const char* name, const Shape& shape) {
      ModelSource source = synthetic_source("llava-1.5-7b", dtype);
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
    EXPECT_THAT(take("norm.weight", {5}), testing::Each(1.0f));
    EXPECT_THAT(take("norm.bias", {5}), testing::Each(0.0f));
  }
}

/// A synthetic model of a small shape answers a prompt with a picture, end to end.
TEST(Synthetic, ModelsRunWithoutAnyFile) {
  ModelSource source = synthetic_source("llava-1.5-7b,layers=1", DType::kBF16);
  source.config["text_config"].update({{"hidden_size", 32},
                                       {"intermediate_size", 48},
                                       {"num_attention_heads", 2},
                                       {"num_key_value_heads", 1}});
  source.config["vision_config"] = {{"hidden_size", 16},      {"intermediate_size", 24},
                                    {"num_hidden_layers", 2}, {"num_attention_heads", 2},
                                    {"image_size", 336},      {"patch_size", 112}};
  ThreadPool pool(1);
  Stream stream(pool);
  const Family& family = family_of(source.config, source.name);
  const auto model = family.load(std::move(source), LoadOptions(), stream);
  EXPECT_EQ(model->dtype(), DType::kBF16);
  EXPECT_EQ(model->max_image_tokens(), 9);
  const CacheSpec spec = parse_spec("f16");
  const CacheShape shape = model->decoder().cache_shape();
  const auto cache = make_cache(spec, shape, reserved_bytes(spec, shape, {1, 0, 200}), {});
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
