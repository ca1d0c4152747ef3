#include "runtime/families/internvl/chat_weights.h"

#include <fmt/format.h>

#include <array>
#include <utility>

#include "kernels/base/error.h"
#include "runtime/loading/weight_names.h"

namespace kvlm {

namespace {

using Alias = std::pair<std::string_view, std::string_view>;  // found, canonical

constexpr std::array kRoots = {
    Alias{"vision_model.embeddings.class_embedding", "model.vision_tower.embeddings.cls_token"},
    Alias{"vision_model.embeddings.position_embedding",
          "model.vision_tower.embeddings.position_embeddings"},
    Alias{"vision_model.embeddings.patch_embedding.",
          "model.vision_tower.embeddings.patch_embeddings.projection."},
    Alias{"vision_model.encoder.layers.", "model.vision_tower.encoder.layer."},
    Alias{"mlp1.0.", "model.multi_modal_projector.layer_norm."},
    Alias{"mlp1.1.", "model.multi_modal_projector.linear_1."},
    Alias{"mlp1.3.", "model.multi_modal_projector.linear_2."},
    Alias{"language_model.model.tok_embeddings.", "model.language_model.embed_tokens."},
    Alias{"language_model.output.", "lm_head."},
};
constexpr std::array kInTower = {
    Alias{".attn.qkv.", ".attention.qkv."},
    Alias{".attn.proj.", ".attention.projection_layer."},
    Alias{".attn.q_norm.", ".attention.q_norm."},
    Alias{".attn.k_norm.", ".attention.k_norm."},
    Alias{".norm1.", ".layernorm_before."},
    Alias{".norm2.", ".layernorm_after."},
    Alias{".ls1", ".lambda_1"},
    Alias{".ls2", ".lambda_2"},
};
constexpr std::array kInInternLm2 = {
    Alias{".attention.wqkv.", ".self_attn.qkv."},
    Alias{".attention.wo.", ".self_attn.o_proj."},
    Alias{".feed_forward.w1.", ".mlp.gate_proj."},
    Alias{".feed_forward.w2.", ".mlp.down_proj."},
    Alias{".feed_forward.w3.", ".mlp.up_proj."},
    Alias{".attention_norm.", ".input_layernorm."},
    Alias{".ffn_norm.", ".post_attention_layernorm."},
};

template <size_t N>
void replace_part(const std::array<Alias, N>& aliases, std::string& name) {
  for (const auto& [found, canonical] : aliases) {
    if (const size_t at = name.find(found); at != std::string::npos) {
      name.replace(at, found.size(), canonical);
      return;
    }
  }
}

void refuse_flash(std::string_view name) {
  for (const std::string_view part : {"mlp2.", "pooling_before_gating.", "gating."}) {
    if (!name.starts_with(part)) continue;
    throw Error(ErrorCode::kUnsupported,
                fmt::format("the weights hold tensor {} of InternVL3.5-Flash, which gives a tile "
                            "64 or 256 tokens depending on the rest of the batch and is not "
                            "supported; use InternVL3.5 without Flash",
                            name));
  }
}

}  // namespace

std::string canonical_internvl_chat_name(std::string_view name) {
  refuse_flash(name);
  std::string canonical(name);
  for (const auto& [found, root] : kRoots) {
    if (!canonical.starts_with(found)) continue;
    canonical.replace(0, found.size(), root);
    break;
  }
  canonical = canonical_llava_name(canonical);
  if (canonical.starts_with("model.vision_tower.encoder.")) replace_part(kInTower, canonical);
  if (canonical.starts_with("model.language_model.layers.")) replace_part(kInInternLm2, canonical);
  return canonical;
}

void unpack_internvl_chat(WeightMap& weights, const InternVlChatConfig& config) {
  const auto unpack = [&weights](const std::string& prefix, int64_t groups, int64_t q_rows,
                                 int64_t kv_rows) {
    for (const char* kind : {".weight", ".bias"}) {
      const WeightMap::Slice slices[] = {{prefix + "q_proj" + kind, q_rows},
                                         {prefix + "k_proj" + kind, kv_rows},
                                         {prefix + "v_proj" + kind, kv_rows}};
      weights.split(prefix + "qkv" + kind, groups, slices);
    }
  };
  const InternVitConfig& vision = config.model.vision;
  for (int layer = 0; layer < vision.layers; ++layer) {
    unpack(fmt::format("model.vision_tower.encoder.layer.{}.attention.", layer), 1, vision.hidden,
           vision.hidden);
  }
  if (config.decoder != DecoderType::kInternLm2) return;
  const LlamaConfig& text = config.model.text;
  const int64_t group = text.q_heads / text.kv_heads;
  for (int layer = 0; layer < text.layers; ++layer) {
    unpack(fmt::format("model.language_model.layers.{}.self_attn.", layer), text.kv_heads,
           group * text.head_dim, text.head_dim);
  }
}

}  // namespace kvlm
