#include "runtime/loading/siglip_config.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "kernels/base/error.h"
#include "tests/runtime/loading/safetensors_writer.h"

namespace kvlm {
namespace {

using nlohmann::json;
using test::failure;
using testing::AllOf;
using testing::HasSubstr;

SiglipConfig siglip(const json& vision, bool absent = false) {
  return parse_siglip_config(ConfigReader(vision, "config.json: vision_config"), absent);
}

TEST(SiglipConfig, MissingVisionConfigIsTheTowerOfOnevision) {
  const SiglipConfig tower = siglip(json::object(), true);
  EXPECT_EQ(tower.hidden, 1152);
  EXPECT_EQ(tower.intermediate, 4304);
  EXPECT_EQ(tower.layers, 26);
  EXPECT_EQ(tower.heads, 16);
  EXPECT_EQ(tower.image_size, 384);
  EXPECT_EQ(tower.patch_size, 14);
}

TEST(SiglipConfig, MissingFieldsTakeTheClassDefaults) {
  const SiglipConfig tower = siglip(json::object());
  EXPECT_EQ(tower.hidden, 768);
  EXPECT_EQ(tower.intermediate, 3072);
  EXPECT_EQ(tower.layers, 12);
  EXPECT_EQ(tower.heads, 12);
  EXPECT_EQ(tower.image_size, 224);
  EXPECT_EQ(tower.patch_size, 16);
  EXPECT_EQ(tower.eps, 1e-6f);
  EXPECT_EQ(tower.activation, Activation::kGeluTanh);
}

TEST(SiglipConfig, ReadsWhatTheFileSays) {
  const SiglipConfig tower = siglip({{"hidden_size", 32},
                                     {"intermediate_size", 64},
                                     {"num_hidden_layers", 3},
                                     {"num_attention_heads", 2},
                                     {"image_size", 30},
                                     {"patch_size", 7},
                                     {"layer_norm_eps", 1e-5},
                                     {"hidden_act", "gelu"}});
  EXPECT_EQ(tower.hidden, 32);
  EXPECT_EQ(tower.intermediate, 64);
  EXPECT_EQ(tower.layers, 3);
  EXPECT_EQ(tower.heads, 2);
  EXPECT_EQ(tower.image_size, 30);
  EXPECT_EQ(tower.patch_size, 7);
  EXPECT_EQ(tower.eps, 1e-5f);
  EXPECT_EQ(tower.activation, Activation::kGelu);
}

TEST(SiglipConfig, RefusesWhatNoTowerHas) {
  const auto refusal = [](const json& vision) { return failure([&] { siglip(vision); }); };
  EXPECT_THAT(refusal({{"hidden_size", 0}}), HasSubstr("hidden_size is 0"));
  EXPECT_THAT(refusal({{"hidden_size", 100}, {"num_attention_heads", 3}}),
              AllOf(HasSubstr("hidden_size is 100"), HasSubstr("num_attention_heads 3")));
  EXPECT_THAT(refusal({{"image_size", 28}, {"patch_size", 29}}),
              AllOf(HasSubstr("patch_size is 29"), HasSubstr("image_size 28")));
}

}  // namespace
}  // namespace kvlm
