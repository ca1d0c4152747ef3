#include "runtime/loading/decoder_config.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "kernels/base/error.h"
#include "kernels/base/printable.h"
#include "runtime/loading/fields.h"

namespace kvlm {

namespace {

/// What the positions were before they were scaled: the text's own key comes before the scaling's,
/// and without either it is max_position_embeddings.
int original_positions(const ConfigReader& text, const ConfigReader& scaling, int max_positions) {
  constexpr std::string_view kKey = "original_max_position_embeddings";
  const ConfigReader& from = text.has(kKey) ? text : scaling;
  return static_cast<int>(from.integer(kKey, max_positions, 1, kMaxPositions));
}

/// What YaRN multiplies cos and sin by. Source: transformers, _compute_yarn_parameters.
double yarn_magnitude(const ConfigReader& scaling, double factor) {
  if (scaling.has("attention_factor")) {
    return scaling.required_number("attention_factor", 1e-6, 1e6);
  }
  const auto magnitude = [&](double scale) {
    return factor <= 1 ? 1.0 : 0.1 * scale * std::log(factor) + 1.0;
  };
  const double mscale = scaling.number("mscale", 0, 0, 1e6);
  const double mscale_all_dim = scaling.number("mscale_all_dim", 0, 0, 1e6);
  if (mscale > 0 && mscale_all_dim > 0) return magnitude(mscale) / magnitude(mscale_all_dim);
  return magnitude(1);
}

void parse_yarn(const ConfigReader& text, const ConfigReader& scaling, RopeConfig& rope) {
  rope.type = RopeConfig::Type::kYarn;
  rope.original_max_positions = original_positions(text, scaling, rope.max_positions);
  rope.factor = scaling.is_null("factor")
                    ? static_cast<double>(rope.max_positions) / rope.original_max_positions
                    : scaling.required_number("factor", 1e-6, 1e6);
  // 0 is none, for the reference's `or`.
  const auto beta = [&](std::string_view key, double fallback) {
    const double value = scaling.number(key, fallback, 0, 1e6);
    return value > 0 ? value : fallback;
  };
  rope.beta_fast = beta("beta_fast", 32);
  rope.beta_slow = beta("beta_slow", 1);
  rope.truncate = !scaling.is_null("truncate") && scaling.boolean("truncate", true);
  rope.attention_factor = yarn_magnitude(scaling, rope.factor);
}

/// rope_theta + rope_scaling (older), which the reference prefers where a file has both, or
/// rope_parameters (newer); models.md 2.2.
RopeConfig parse_rope(const ConfigReader& text, const LlamaConfig& llama) {
  RopeConfig rope;
  rope.rotary_dim = llama.head_dim;
  rope.max_positions = llama.max_positions;
  rope.theta = text.number("rope_theta", 1e4, 1, 1e12);
  const bool older = text.has("rope_scaling") && !text.raw("rope_scaling").empty();
  const ConfigReader scaling = text.object(older ? "rope_scaling" : "rope_parameters");
  rope.theta = scaling.number("rope_theta", rope.theta, 1, 1e12);
  for (const ConfigReader* reader : {&text, &scaling}) {
    if (reader->number("partial_rotary_factor", 1, 0, 1) != 1) {
      reader->fail("partial_rotary_factor", "1: rotating some channels of a head is not built in");
    }
  }
  const std::string type = scaling.string("rope_type", scaling.string("type", "default"));
  const auto read_factor = [&] { rope.factor = scaling.required_number("factor", 1e-6, 1e6); };
  if (type == "default") {
    rope.type = RopeConfig::Type::kDefault;
  } else if (type == "linear") {
    rope.type = RopeConfig::Type::kLinear;
    read_factor();
  } else if (type == "dynamic") {
    rope.type = RopeConfig::Type::kDynamic;
    read_factor();
  } else if (type == "llama3") {
    rope.type = RopeConfig::Type::kLlama3;
    read_factor();
    rope.low_freq_factor = scaling.required_number("low_freq_factor", 1e-6, 1e6);
    rope.high_freq_factor = scaling.required_number("high_freq_factor", 1e-6, 1e6);
    if (rope.high_freq_factor <= rope.low_freq_factor) {
      scaling.fail("high_freq_factor", "more than low_freq_factor");
    }
    rope.original_max_positions = original_positions(text, scaling, rope.max_positions);
  } else if (type == "yarn") {
    parse_yarn(text, scaling, rope);
  } else {
    throw Error(
        ErrorCode::kUnsupported,
        fmt::format("{}: rope_type is \"{}\"; built in are default, linear, dynamic, llama3 and "
                    "yarn",
                    scaling.path(), printable(type)));
  }
  return rope;
}

/// Positions that the decoder may be run to. Linear and dynamic scaling leave
/// max_position_embeddings at what the model was trained on and reach `factor` times as far; YaRN
/// reaches as far beyond its original context.
int context_of(const RopeConfig& rope) {
  const double factor = std::max(rope.factor, 1.0);
  double positions = rope.max_positions;
  if (rope.type == RopeConfig::Type::kLinear || rope.type == RopeConfig::Type::kDynamic) {
    positions *= factor;
  } else if (rope.type == RopeConfig::Type::kYarn) {
    positions = std::max(positions, rope.original_max_positions * factor);
  }
  return static_cast<int>(std::min(positions, static_cast<double>(kMaxPositions)));
}

}  // namespace

LlamaConfig parse_llama_config(const ConfigReader& text) {
  const std::string type = text.string("model_type", "llama");
  const bool mistral = type == "mistral";
  if (type != "llama" && !mistral) {
    throw Error(
        ErrorCode::kUnsupported,
        fmt::format("{}: model_type is \"{}\"; the decoders built in for this family are llama "
                    "and mistral",
                    text.path(), printable(type)));
  }
  LlamaConfig llama;
  llama.vocab_size = field(text, "vocab_size", 32000, kMaxVocab);
  llama.hidden = field(text, "hidden_size", 4096, kMaxWidth);
  llama.intermediate = field(text, "intermediate_size", mistral ? 14336 : 11008, kMaxWidth);
  llama.layers = field(text, "num_hidden_layers", 32, kMaxLayers);
  llama.q_heads = field(text, "num_attention_heads", 32, kMaxWidth);
  llama.kv_heads = field(text, "num_key_value_heads", mistral ? 8 : llama.q_heads, kMaxWidth);
  if (llama.q_heads % llama.kv_heads != 0) {
    text.fail("num_key_value_heads",
              fmt::format("a divisor of num_attention_heads {}", llama.q_heads));
  }
  if (!text.has("head_dim") && llama.hidden % llama.q_heads != 0) {
    text.fail("hidden_size", fmt::format("a multiple of num_attention_heads {}", llama.q_heads));
  }
  llama.head_dim = field(text, "head_dim", std::max(1, llama.hidden / llama.q_heads), 4096);
  if (llama.head_dim % 2 != 0) text.fail("head_dim", "an even number");
  if (int64_t{llama.q_heads} * llama.head_dim > kMaxWidth) {
    text.fail("head_dim", fmt::format("at most {}, with num_attention_heads {}",
                                      kMaxWidth / llama.q_heads, llama.q_heads));
  }
  llama.max_positions =
      field(text, "max_position_embeddings", mistral ? 131072 : 2048, kMaxPositions);
  llama.rms_eps = static_cast<float>(text.number("rms_norm_eps", 1e-6, 0, 1));
  llama.tie_embeddings = text.boolean("tie_word_embeddings", false);
  if (!mistral) {
    llama.qkv_bias = llama.output_bias = text.boolean("attention_bias", false);
    llama.mlp_bias = text.boolean("mlp_bias", false);
  }
  if (parse_activation(text, "hidden_act", "silu") != Activation::kSilu) {
    text.fail("hidden_act", "silu");
  }
  llama.rope = parse_rope(text, llama);
  llama.max_positions = context_of(llama.rope);
  if (mistral && !text.is_null("sliding_window")) {
    // Every row of a sequence that fits into the window sees all before it; a longer one is not
    // served.
    llama.sliding_window = static_cast<int>(text.integer("sliding_window", 4096, 1, kMaxPositions));
    llama.max_positions = std::min(llama.max_positions, llama.sliding_window);
  }
  return llama;
}

}  // namespace kvlm
