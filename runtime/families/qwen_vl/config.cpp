#include "runtime/families/qwen_vl/config.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <string>
#include <vector>

#include "kernels/base/error.h"
#include "kernels/base/printable.h"
#include "runtime/loading/decoder_config.h"
#include "runtime/loading/fields.h"

// config.json of the three generations of Qwen-VL, which spell the same fields differently, to one
// QwenVlConfig.
namespace kvlm {

namespace {

constexpr int64_t kMaxMerge = 16;
constexpr int64_t kMaxDepth = 64;

struct Generation {
  std::string_view model_type;
  QwenVlGeneration generation;
  std::string_view family;
};

constexpr std::array kGenerations = {
    Generation{"qwen2_vl", QwenVlGeneration::kQwen2, "qwen2-vl"},
    Generation{"qwen2_5_vl", QwenVlGeneration::kQwen25, "qwen2.5-vl"},
    Generation{"qwen3_vl", QwenVlGeneration::kQwen3, "qwen3-vl"},
};

const Generation& generation_of(const ConfigReader& config) {
  const std::string model_type = config.required_string("model_type");
  for (const Generation& generation : kGenerations) {
    if (generation.model_type == model_type) return generation;
  }
  config.fail("model_type", "qwen2_vl, qwen2_5_vl or qwen3_vl");
}

LlamaConfig parse_text(const ConfigReader& config, DecoderType type) {
  const bool nested = config.has("text_config");
  const ConfigReader text = nested ? config.object("text_config") : config;
  if (nested && text.has("model_type")) decoder_type(text, {&type, 1});
  LlamaConfig llama = parse_decoder_config(text, type);
  if (config.boolean("tie_word_embeddings", false)) llama.tie_embeddings = true;
  return llama;
}

/// A list of layers below `bound`.
std::vector<int> layer_list(const ConfigReader& vision, std::string_view key,
                            const std::vector<int>& fallback, int64_t bound) {
  const nlohmann::json own = vision.has(key) ? vision.raw(key) : nlohmann::json(fallback);
  const auto is_layer = [&](const nlohmann::json& entry) {
    return entry.is_number_integer() && entry.get<int64_t>() >= 0 && entry.get<int64_t>() < bound;
  };
  if (!own.is_array() || !std::all_of(own.begin(), own.end(), is_layer)) {
    vision.fail(key, fmt::format("a list of layers from 0 to {}", bound - 1));
  }
  return own.get<std::vector<int>>();
}

/// The reference asks for each of its layers whether the list has it: order, repetitions and layers
/// that the tower has not change nothing.
std::vector<int> parse_full_attention(const ConfigReader& vision, int layers) {
  std::vector<int> list = layer_list(vision, "fullatt_block_indexes", {7, 15, 23, 31}, kMaxLayers);
  std::erase_if(list, [&](int layer) { return layer >= layers; });
  std::ranges::sort(list);
  list.erase(std::unique(list.begin(), list.end()), list.end());
  return list;
}

/// The reference takes them in the order of the tower, and its mergers in the order of the list.
std::vector<int> parse_deepstack(const ConfigReader& vision, int layers) {
  constexpr std::string_view kKey = "deepstack_visual_indexes";
  std::vector<int> parsed = layer_list(vision, kKey, {8, 16, 24}, layers);
  if (std::adjacent_find(parsed.begin(), parsed.end(), std::greater_equal<>()) != parsed.end()) {
    vision.fail(kKey, "layers in ascending order");
  }
  return parsed;
}

/// What the fields of all three generations say.
void parse_common(const ConfigReader& vision, const Generation& of, QwenVitConfig& tower) {
  const std::string type = vision.string("model_type", of.model_type);
  if (type != of.model_type && type != fmt::format("{}_vision", of.model_type)) {
    throw Error(ErrorCode::kUnsupported,
                fmt::format("{}: model_type is \"{}\"; the supported tower of {} is {}_vision",
                            vision.path(), printable(type), of.model_type, of.model_type));
  }
  const bool third = of.generation == QwenVlGeneration::kQwen3;
  tower.layers = field(vision, "depth", third ? 27 : 32, kMaxLayers);
  tower.heads = field(vision, "num_heads", 16, kMaxWidth);
  tower.patch_size = field(vision, "patch_size", third ? 16 : 14, kMaxEdge);
  tower.merge = field(vision, "spatial_merge_size", 2, kMaxMerge);
  tower.depth = field(vision, "temporal_patch_size", 2, kMaxDepth);
  for (const char* key : {"in_channels", "in_chans"}) {
    if (vision.integer(key, 3, 1, kMaxWidth) != 3) vision.fail(key, "3: red, green and blue");
  }
  const ConfigReader rope = vision.object("rope_parameters");
  if (rope.number("rope_theta", 1e4, 1, 1e12) != 1e4) {
    rope.fail("rope_theta", "10000, as in every released tower");
  }
}

void parse_qwen2(const ConfigReader& vision, QwenVitConfig& tower) {
  tower.hidden = field(vision, "embed_dim", 1280, kMaxWidth);
  tower.out = field(vision, "hidden_size", 3584, kMaxWidth);
  tower.intermediate =
      static_cast<int>(tower.hidden * vision.number("mlp_ratio", 4, 1.0 / tower.hidden, 64));
  tower.activation = parse_activation(vision, "hidden_act", "quick_gelu");
}

void parse_qwen25(const ConfigReader& vision, QwenVitConfig& tower) {
  tower.hidden = field(vision, "hidden_size", 3584, kMaxWidth);
  tower.out = field(vision, "out_hidden_size", 3584, kMaxWidth);
  tower.intermediate = field(vision, "intermediate_size", 3420, kMaxWidth);
  tower.activation = parse_activation(vision, "hidden_act", "silu");
  tower.rms_norm = tower.gated_mlp = true;
  tower.window = field(vision, "window_size", 112, kMaxEdge) / tower.merge / tower.patch_size;
  if (tower.window < 1) {
    vision.fail("window_size", fmt::format("at least {}, a merged cell (spatial_merge_size times "
                                           "patch_size)",
                                           tower.merge * tower.patch_size));
  }
  tower.full_attention = parse_full_attention(vision, tower.layers);
}

void parse_qwen3(const ConfigReader& vision, QwenVitConfig& tower) {
  tower.hidden = field(vision, "hidden_size", 1152, kMaxWidth);
  tower.out = field(vision, "out_hidden_size", 3584, kMaxWidth);
  tower.intermediate = field(vision, "intermediate_size", 4304, kMaxWidth);
  tower.activation = parse_activation(vision, "hidden_act", "gelu_pytorch_tanh");
  tower.patch_bias = tower.linear_names = true;
  const int positions = field(vision, "num_position_embeddings", 2304, kMaxWidth);
  tower.position_side = static_cast<int>(std::lround(std::sqrt(positions)));
  if (tower.position_side * tower.position_side != positions) {
    vision.fail("num_position_embeddings", "the square of a whole number");
  }
  tower.deepstack = parse_deepstack(vision, tower.layers);
}

/// A visual token's id; the tokenizer has to agree (read_text_files).
int32_t parse_id(const ConfigReader& config, std::string_view key, int64_t fallback, int vocab) {
  const int64_t id = config.integer(key, fallback, 0, vocab - 1);
  if (id >= vocab) config.fail(key, fmt::format("0 to {}", vocab - 1));
  return static_cast<int32_t>(id);
}

}  // namespace

QwenVlConfig parse_qwen_vl(const ConfigReader& config) {
  const Generation& of = generation_of(config);
  QwenVlConfig qwen;
  qwen.generation = of.generation;
  qwen.family = of.family;
  if (of.generation == QwenVlGeneration::kQwen3) qwen.decoder = DecoderType::kQwen3Vl;
  qwen.text = parse_text(config, qwen.decoder);
  const ConfigReader vision = config.object("vision_config");
  parse_common(vision, of, qwen.vision);
  switch (of.generation) {
    case QwenVlGeneration::kQwen2:
      parse_qwen2(vision, qwen.vision);
      break;
    case QwenVlGeneration::kQwen25:
      parse_qwen25(vision, qwen.vision);
      qwen.tokens_per_second = vision.number("tokens_per_second", 4, 0, 1e6);
      break;
    case QwenVlGeneration::kQwen3:
      parse_qwen3(vision, qwen.vision);
      break;
  }
  if (qwen.vision.out != qwen.text.hidden) {
    vision.fail(of.generation == QwenVlGeneration::kQwen2 ? "hidden_size" : "out_hidden_size",
                fmt::format("{}, the decoder's hidden_size", qwen.text.hidden));
  }
  if (std::ssize(qwen.vision.deepstack) > qwen.text.layers) {
    vision.fail("deepstack_visual_indexes",
                fmt::format("at most {}, one for each decoder layer", qwen.text.layers));
  }
  qwen.image_id = parse_id(config, "image_token_id", 151655, qwen.text.vocab_size);
  qwen.video_id = parse_id(config, "video_token_id", 151656, qwen.text.vocab_size);
  if (qwen.image_id == qwen.video_id) {
    config.fail("video_token_id", "another token than image_token_id");
  }
  return qwen;
}

}  // namespace kvlm
