#include "runtime/loading/weight_names.h"

#include <gtest/gtest.h>

#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tests/source_folder.h"

namespace kvlm {
namespace {

/// One kind of tensor in every spelling found on disk.
struct Kind {
  std::string canonical;    // transformers 5.x module tree
  std::string legacy;       // up to 4.57, and 5.x saving a model it has loaded
  std::string created;      // 5.6 and later saving a model created from a config
  std::string memory_4_52;  // the module tree of 4.52 to 4.57
  std::string original;     // the authors' repositories
};

Kind text_kind(const std::string& rest) {
  return {"model.language_model." + rest, "language_model.model." + rest,
          "language_model.model." + rest, "model.language_model." + rest, "model." + rest};
}

Kind tower_kind(const std::string& rest) {
  return {"model.vision_tower." + rest, "vision_tower.vision_model." + rest, "vision_tower." + rest,
          "model.vision_tower.vision_model." + rest,
          "model.vision_tower.vision_tower.vision_model." + rest};
}

Kind projector_kind(int linear, const std::string& rest) {
  const std::string name = "multi_modal_projector.linear_" + std::to_string(linear) + "." + rest;
  return {"model." + name, name, name, "model." + name,
          "model.mm_projector." + std::string(linear == 1 ? "0." : "2.") + rest};
}

std::vector<Kind> all_kinds() {
  std::vector<Kind> kinds = {
      {"lm_head.weight", "language_model.lm_head.weight", "language_model.lm_head.weight",
       "lm_head.weight", "lm_head.weight"},
      {"model.image_newline", "image_newline", "image_newline", "model.image_newline",
       "model.image_newline"},
  };
  for (const char* rest :
       {"embed_tokens.weight", "norm.weight", "layers.0.input_layernorm.weight",
        "layers.31.post_attention_layernorm.weight", "layers.1.mlp.gate_proj.weight",
        "layers.1.mlp.up_proj.weight", "layers.1.mlp.down_proj.weight",
        "layers.12.self_attn.q_proj.weight", "layers.12.self_attn.k_proj.bias",
        "layers.12.self_attn.v_proj.weight", "layers.12.self_attn.o_proj.weight"}) {
    kinds.push_back(text_kind(rest));
  }
  for (const char* rest :
       {"embeddings.class_embedding", "embeddings.patch_embedding.weight",
        "embeddings.patch_embedding.bias", "embeddings.position_embedding.weight",
        "pre_layrnorm.weight", "pre_layrnorm.bias", "encoder.layers.0.layer_norm1.weight",
        "encoder.layers.0.layer_norm2.bias", "encoder.layers.22.self_attn.q_proj.weight",
        "encoder.layers.22.self_attn.k_proj.bias", "encoder.layers.22.self_attn.v_proj.weight",
        "encoder.layers.22.self_attn.out_proj.bias", "encoder.layers.5.mlp.fc1.weight",
        "encoder.layers.5.mlp.fc2.bias"}) {
    kinds.push_back(tower_kind(rest));
  }
  for (const int linear : {1, 2}) {
    kinds.push_back(projector_kind(linear, "weight"));
    kinds.push_back(projector_kind(linear, "bias"));
  }
  return kinds;
}

TEST(CanonicalLlavaName, MapsEverySpellingOfEveryKind) {
  for (const Kind& kind : all_kinds()) {
    for (const std::string& spelling :
         {kind.canonical, kind.legacy, kind.created, kind.memory_4_52, kind.original}) {
      EXPECT_EQ(canonical_llava_name(spelling), kind.canonical) << spelling;
    }
  }
}

/// The spellings that transformers itself wrote, recorded by tools/golden.
TEST(CanonicalLlavaName, MapsTheSpellingsOfTheGoldenCheckpoint) {
  std::ifstream file(test::source_folder() / "tests/golden/llava_gqa/names.json");
  const nlohmann::json spellings = nlohmann::json::parse(file)["spellings"];
  ASSERT_GE(spellings.size(), 4u);
  for (const auto& [version, names] : spellings.items()) {
    for (const auto& [canonical, spelling] : names.items()) {
      const bool is_read = canonical.find(".post_layernorm.") == std::string::npos;
      EXPECT_EQ(canonical_llava_name(spelling.get<std::string>()), is_read ? canonical : "")
          << version;
    }
  }
}

TEST(CanonicalLlavaName, AcceptsATextModelWithoutItsInnerLevel) {
  EXPECT_EQ(canonical_llava_name("language_model.layers.3.mlp.up_proj.weight"),
            "model.language_model.layers.3.mlp.up_proj.weight");
}

TEST(CanonicalLlavaName, DropsTheResamplerSegment) {
  EXPECT_EQ(canonical_llava_name("model.vision_resampler.mm_projector.0.weight"),
            "model.multi_modal_projector.linear_1.weight");
}

TEST(CanonicalLlavaName, KeepsInternVlAndUnknownNames) {
  EXPECT_EQ(canonical_llava_name("vision_tower.encoder.layer.2.lambda_1"),
            "model.vision_tower.encoder.layer.2.lambda_1");
  EXPECT_EQ(canonical_llava_name("multi_modal_projector.layer_norm.weight"),
            "model.multi_modal_projector.layer_norm.weight");
  EXPECT_EQ(canonical_llava_name("adapter.lora_A"), "adapter.lora_A");
  EXPECT_EQ(canonical_llava_name("model.mm_projector.weight"), "model.mm_projector.weight");
}

TEST(CanonicalLlavaName, IgnorableTensorsHaveNoName) {
  for (const Kind& kind :
       {tower_kind("post_layernorm.weight"), tower_kind("post_layernorm.bias"),
        tower_kind("embeddings.position_ids"), tower_kind("head.attention.in_proj_weight"),
        tower_kind("head.probe"), text_kind("layers.7.self_attn.rotary_emb.inv_freq"),
        text_kind("layers.7.self_attn.rotary_emb.cos_cached"),
        text_kind("layers.7.self_attn.rotary_emb.sin_cached")}) {
    for (const std::string& spelling :
         {kind.canonical, kind.legacy, kind.created, kind.memory_4_52, kind.original}) {
      EXPECT_EQ(canonical_llava_name(spelling), "") << spelling;
    }
  }
  EXPECT_EQ(canonical_llava_name("visual_projection.weight"), "");
  EXPECT_EQ(canonical_llava_name("vision_tower.visual_projection.weight"), "");
}

}  // namespace
}  // namespace kvlm
