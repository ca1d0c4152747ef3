#include "runtime/families/internvl/config.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <string_view>
#include <vector>

#include "kernels/base/error.h"
#include "kernels/base/printable.h"
#include "runtime/loading/fields.h"

// config.json of an InternVL checkpoint, of transformers (-hf) or of its authors, to the same
// fields. Decoders that were released and are not built in are refused by name.
namespace kvlm {

namespace {

/// The first is what a configuration of transformers means that names none.
constexpr std::array kDecoders = {DecoderType::kQwen2, DecoderType::kLlama, DecoderType::kQwen3};

/// Decoders by the class that llm_config.architectures of the originals names.
struct NamedDecoder {
  std::string_view architecture;
  DecoderType type;
};
constexpr std::array kArchitectures = {
    NamedDecoder{"InternLM2ForCausalLM", DecoderType::kInternLm2},
    NamedDecoder{"LlamaForCausalLM", DecoderType::kLlama},
    NamedDecoder{"Qwen2ForCausalLM", DecoderType::kQwen2},
    NamedDecoder{"Qwen3ForCausalLM", DecoderType::kQwen3},
};

/// Decoders that released checkpoints have and this project has not.
struct UnbuiltDecoder {
  std::array<std::string_view, 2> names;  // architecture, model_type
  std::string_view reason;
};
constexpr std::array kUnbuilt = {
    UnbuiltDecoder{{"Qwen3MoeForCausalLM", "qwen3_moe"}, "a mixture of experts"},
    UnbuiltDecoder{{"GptOssForCausalLM", "gpt_oss"}, "a mixture of experts"},
    UnbuiltDecoder{{"InternLM3ForCausalLM", "internlm3"}, "the decoder of InternVL3-9B"},
    UnbuiltDecoder{{"Phi3ForCausalLM", "phi3"}, "a decoder with its own positions (longrope)"},
};

void refuse_unbuilt(const ConfigReader& text, std::string_view key, std::string_view name) {
  for (const UnbuiltDecoder& decoder : kUnbuilt) {
    if (std::ranges::find(decoder.names, name) == decoder.names.end()) continue;
    throw Error(ErrorCode::kUnsupported,
                fmt::format("{}: {} is \"{}\", {}, which is not supported; use an InternVL with a "
                            "dense InternLM2, LLaMA, Qwen2 or Qwen3 decoder",
                            text.path(), key, name, decoder.reason));
  }
}

/// One number, or the same twice, as transformers has sizes.
int side(const ConfigReader& reader, std::string_view key, int fallback) {
  const nlohmann::json& value = reader.raw(key);
  if (!value.is_array()) return field(reader, key, fallback, kMaxEdge);
  const bool square = value.size() == 2 && value[0] == value[1] && value[0].is_number_integer() &&
                      value[0] >= 1 && value[0] <= kMaxEdge;
  if (!square) reader.fail(key, fmt::format("1 to {}, or that twice", kMaxEdge));
  return value[0].get<int>();
}

/// What a tower's configuration leaves out, and how its two spellings call the same.
struct VisionKeys {
  InternVitConfig absent;
  std::string_view qkv_bias, qk_norm;
};

InternVitConfig parse_vision(const ConfigReader& vision, const VisionKeys& keys) {
  const InternVitConfig& absent = keys.absent;
  InternVitConfig vit;
  vit.hidden = field(vision, "hidden_size", absent.hidden, kMaxWidth);
  vit.intermediate = field(vision, "intermediate_size", absent.intermediate, kMaxWidth);
  vit.layers = field(vision, "num_hidden_layers", absent.layers, kMaxLayers);
  vit.heads = field(vision, "num_attention_heads", absent.heads, kMaxWidth);
  vit.image_size = side(vision, "image_size", absent.image_size);
  vit.patch_size = side(vision, "patch_size", absent.patch_size);
  vit.eps = static_cast<float>(vision.number("layer_norm_eps", 1e-6, 0, 1));
  vit.activation = parse_activation(vision, "hidden_act", "gelu");
  vit.qkv_bias = vision.boolean(keys.qkv_bias, absent.qkv_bias);
  vit.qk_norm = vision.boolean(keys.qk_norm, absent.qk_norm);
  const bool rms = absent.norm == VitConfig::Norm::kRms;
  const std::string norm = vision.string("norm_type", rms ? "rms_norm" : "layer_norm");
  if (norm != "layer_norm" && norm != "rms_norm") {
    vision.fail("norm_type", "layer_norm or rms_norm");
  }
  vit.norm = norm == "rms_norm" ? VitConfig::Norm::kRms : VitConfig::Norm::kLayer;
  if (vision.integer("num_channels", 3, 1, kMaxWidth) != 3) vision.fail("num_channels", "3");
  if (vit.hidden % vit.heads != 0) {
    vision.fail("hidden_size", fmt::format("a multiple of num_attention_heads {}", vit.heads));
  }
  if (vit.patch_size > vit.image_size) {
    vision.fail("patch_size", fmt::format("at most image_size {}", vit.image_size));
  }
  return vit;
}

/// downsample_ratio is one row for how many patches along a side.
int parse_merge(const ConfigReader& config, const InternVitConfig& vision) {
  constexpr std::string_view kKey = "downsample_ratio";
  const int patches = vision.image_size / vision.patch_size;
  const double merge = 1 / config.number(kKey, 0.5, 1e-3, 1);
  const auto whole = static_cast<int>(std::lround(merge));
  if (merge != whole || patches % whole != 0) {
    config.fail(
        kKey, fmt::format("1 / n, where n divides the {} patches along a side of a tile", patches));
  }
  if (int64_t{vision.hidden} * whole * whole > kMaxWidth) {
    config.fail(kKey,
                fmt::format("more, with hidden_size {} of the tower: rows of at most {} values",
                            vision.hidden, kMaxWidth));
  }
  return whole;
}

/// Which hidden state of the tower is used.
int feature_layer(const ConfigReader& config, std::string_view key, const InternVitConfig& vision) {
  return static_cast<int>(config.integer(key, -1, -vision.layers - 1, vision.layers));
}

DecoderType chat_decoder(const ConfigReader& text) {
  const nlohmann::json& classes = text.raw("architectures");
  if (!classes.is_array() || classes.empty() || !classes[0].is_string()) {
    text.fail("architectures", "the decoder's class, as in [\"Qwen2ForCausalLM\"]");
  }
  const auto name = classes[0].get<std::string>();
  std::vector<std::string_view> known;
  for (const NamedDecoder& decoder : kArchitectures) {
    if (decoder.architecture == name) return decoder.type;
    known.push_back(decoder.architecture);
  }
  refuse_unbuilt(text, "architectures", name);
  throw Error(ErrorCode::kUnsupported,
              fmt::format("{}: architectures is \"{}\"; supported decoders of this family are {}",
                          text.path(), printable(name), fmt::join(known, ", ")));
}

/// Keys of the originals for which there is something to say.
void refuse_unbuilt_chat(const ConfigReader& config) {
  if (config.boolean("flash_mode", false)) {
    throw Error(ErrorCode::kUnsupported,
                fmt::format("{}: flash_mode is true: InternVL3.5-Flash gives a tile 64 or 256 "
                            "tokens depending on the rest of the batch, so that answers are not "
                            "batch-invariant, and is not supported; use InternVL3.5 without Flash",
                            config.path()));
  }
  if (config.boolean("pad2square", false)) {
    throw Error(ErrorCode::kUnsupported,
                fmt::format("{}: pad2square is true; images padded to a square are not supported "
                            "for this family, and no released InternVL has them",
                            config.path()));
  }
}

DynamicTiling parse_tiling(const ConfigReader& config, int tile) {
  DynamicTiling tiling{.tile = tile, .thumbnail = config.boolean("use_thumbnail", false)};
  if (!config.boolean("dynamic_image_size", false)) {
    tiling.min_tiles = tiling.max_tiles = 1;
    return tiling;
  }
  tiling.min_tiles = static_cast<int>(config.integer("min_dynamic_patch", 1, 1, 1024));
  tiling.max_tiles =
      static_cast<int>(config.integer("max_dynamic_patch", 6, tiling.min_tiles, 1024));
  return tiling;
}

}  // namespace

void check_tile_rows(const ConfigReader& config, const InternVlConfig& model) {
  constexpr std::string_view kKey = "image_seq_length";
  const int64_t rows = model.tile_rows();
  if (config.integer(kKey, rows, 1, kMaxPositions) == rows) return;
  config.fail(
      kKey, fmt::format("{}, the tokens that the tower and downsample_ratio make of a tile", rows));
}

InternVlHfConfig parse_internvl_config(const ConfigReader& config) {
  InternVlHfConfig hf;
  InternVlConfig& model = hf.model;
  const ConfigReader text = config.object("text_config");
  refuse_unbuilt(text, "model_type", text.string("model_type", ""));
  hf.decoder = decoder_type(text, kDecoders);
  model.text = parse_decoder_config(text, hf.decoder);
  // The class says tied, and whether lm_head is there decides, as in transformers.
  if (config.boolean("tie_word_embeddings", true)) model.text.tie_embeddings = true;

  const ConfigReader vision = config.object("vision_config");
  VisionKeys keys{.absent = {}, .qkv_bias = "attention_bias", .qk_norm = "use_qk_norm"};
  keys.absent.qkv_bias = false;
  model.vision = parse_vision(vision, keys);
  model.vision.feature_layer = feature_layer(config, "vision_feature_layer", model.vision);
  if (!vision.boolean("use_absolute_position_embeddings", true)) {
    vision.fail("use_absolute_position_embeddings",
                "true, as in every released InternVL: false is not supported");
  }
  if (!vision.boolean("use_mean_pooling", true)) {
    // A layer norm whatever norm_type says, and only of the state that is called last.
    if (model.vision.norm == VitConfig::Norm::kRms) {
      vision.fail("use_mean_pooling", "true, with norm_type rms_norm");
    }
    model.vision.final_norm = model.vision.feature_layer == -1;
  }
  if (config.string("vision_feature_select_strategy", "default") != "default") {
    config.fail("vision_feature_select_strategy",
                "default: with the class token the patches of a tile are not a square");
  }
  if (parse_activation(config, "projector_hidden_act", "gelu") != Activation::kGelu) {
    config.fail("projector_hidden_act", "gelu, as in every released InternVL");
  }
  model.merge = parse_merge(config, model.vision);
  check_tile_rows(config, model);
  hf.image_id = static_cast<int32_t>(config.integer("image_token_id", 151667, 0, kMaxVocab));
  if (hf.image_id >= model.text.vocab_size) {
    config.fail("image_token_id", fmt::format("0 to {}", model.text.vocab_size - 1));
  }
  return hf;
}

InternVlChatConfig parse_internvl_chat_config(const ConfigReader& config) {
  refuse_unbuilt_chat(config);
  InternVlChatConfig chat;
  InternVlConfig& model = chat.model;
  const ConfigReader text = config.object("llm_config");
  chat.decoder = chat_decoder(text);
  model.text = parse_decoder_config(text, chat.decoder);

  VisionKeys keys{.absent = {}, .qkv_bias = "qkv_bias", .qk_norm = "qk_normalization"};
  keys.absent = {.hidden = 3200,
                 .intermediate = 12800,
                 .layers = 48,
                 .heads = 25,
                 .image_size = 224,
                 .norm = VitConfig::Norm::kRms,
                 .qkv_bias = false,
                 .qk_norm = true};
  model.vision = parse_vision(config.object("vision_config"), keys);
  model.vision.feature_layer = feature_layer(config, "select_layer", model.vision);
  const int tile =
      static_cast<int>(config.integer("force_image_size", model.vision.image_size, 1, kMaxEdge));
  if (tile != model.vision.image_size) {
    config.fail(
        "force_image_size",
        fmt::format(
            "vision_config.image_size {}: resizing the tower's position table is not supported",
            model.vision.image_size));
  }
  model.merge = parse_merge(config, model.vision);
  const std::string order = config.string("ps_version", "v1");
  if (order != "v1" && order != "v2") config.fail("ps_version", "v1 or v2");
  model.columns_first = order == "v1";
  chat.tiling = parse_tiling(config, tile);
  chat.conversation = config.required_string("template");
  if (config.has("system_message")) chat.system_message = config.string("system_message", "");
  return chat;
}

}  // namespace kvlm
