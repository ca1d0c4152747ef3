#include "runtime/loading/clip_config.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "kernels/base/error.h"
#include "tests/runtime/loading/safetensors_writer.h"

namespace kvlm {
namespace {

using nlohmann::json;
using test::failure;
using testing::AllOf;
using testing::HasSubstr;

ClipConfig clip(const json& config) {
  const ConfigReader reader(config, "config.json");
  return parse_clip_config(reader.object("vision_config"), !reader.has("vision_config"));
}

TEST(ClipConfig, MissingVisionConfigIsTheTowerOfLlava) {
  for (const json& config : {json::object(), json{{"vision_config", nullptr}}}) {
    const ClipConfig tower = clip(config);
    EXPECT_EQ(tower.hidden, 1024);
    EXPECT_EQ(tower.intermediate, 4096);
    EXPECT_EQ(tower.layers, 24);
    EXPECT_EQ(tower.heads, 16);
    EXPECT_EQ(tower.image_size, 336);
    EXPECT_EQ(tower.patch_size, 14);
    EXPECT_EQ(tower.eps, 1e-5f);
    EXPECT_EQ(tower.activation, Activation::kQuickGelu);
  }
}

TEST(ClipConfig, MissingFieldsTakeTheClassDefaultsOfClip) {
  for (const json& vision : {json::object(), json{{"model_type", "clip_vision_model"}}}) {
    const ClipConfig tower = clip({{"vision_config", vision}});
    EXPECT_EQ(tower.hidden, 768);
    EXPECT_EQ(tower.intermediate, 3072);
    EXPECT_EQ(tower.layers, 12);
    EXPECT_EQ(tower.heads, 12);
    EXPECT_EQ(tower.image_size, 224);
    EXPECT_EQ(tower.patch_size, 32);
    EXPECT_EQ(tower.eps, 1e-5f);
    EXPECT_EQ(tower.activation, Activation::kQuickGelu);
  }
}

TEST(ClipConfig, ReadsWhatTheFileSays) {
  const ClipConfig tower = clip({{"vision_config",
                                  {{"hidden_size", 32},
                                   {"intermediate_size", 64},
                                   {"num_hidden_layers", 3},
                                   {"num_attention_heads", 2},
                                   {"image_size", 56},
                                   {"patch_size", 14},
                                   {"layer_norm_eps", 1e-6},
                                   {"hidden_act", "gelu"}}}});
  EXPECT_EQ(tower.hidden, 32);
  EXPECT_EQ(tower.intermediate, 64);
  EXPECT_EQ(tower.layers, 3);
  EXPECT_EQ(tower.heads, 2);
  EXPECT_EQ(tower.image_size, 56);
  EXPECT_EQ(tower.patch_size, 14);
  EXPECT_EQ(tower.eps, 1e-6f);
  EXPECT_EQ(tower.activation, Activation::kGelu);
}

TEST(ClipConfig, RefusesWhatNoTowerHas) {
  const auto vision_failure = [](const json& vision) {
    return failure([&] { clip({{"vision_config", vision}}); });
  };
  for (const char* key : {"hidden_size", "intermediate_size", "num_hidden_layers",
                          "num_attention_heads", "image_size", "patch_size"}) {
    for (const json& value : {json(0), json(-14), json(int64_t{1} << 33), json("x"), json(2.5)}) {
      EXPECT_THAT(vision_failure({{key, value}}),
                  AllOf(HasSubstr("vision_config."), HasSubstr(key)))
          << value;
    }
  }
  EXPECT_THAT(vision_failure({{"hidden_size", 100}, {"num_attention_heads", 3}}),
              AllOf(HasSubstr("hidden_size is 100"), HasSubstr("num_attention_heads 3")));
  EXPECT_THAT(vision_failure({{"image_size", 28}, {"patch_size", 29}}),
              AllOf(HasSubstr("patch_size is 29"), HasSubstr("image_size 28")));
  EXPECT_THAT(vision_failure({{"hidden_act", "relu"}}), HasSubstr("\"relu\""));
}

TEST(ClipConfig, RefusesOtherChannelsThanThree) {
  EXPECT_EQ(clip({{"vision_config", {{"num_channels", 3}}}}).hidden, 768);
  for (const json& channels : {json(-1), json(0), json(1), json(4), json("3"), json::array({3})}) {
    EXPECT_THAT(failure([&] {
                  clip({{"vision_config", {{"num_channels", channels}}}});
                }),
                HasSubstr("num_channels"))
        << channels;
  }
}

}  // namespace
}  // namespace kvlm
