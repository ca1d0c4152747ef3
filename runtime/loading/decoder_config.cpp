#include "runtime/loading/decoder_config.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/base/error.h"
#include "kernels/base/printable.h"
#include "runtime/loading/fields.h"

// Reads the decoder's part of a config.json, in old and new spelling, with the defaults of each
// class for what the file leaves out. What no kernel computes, an unknown type of RoPE for one, is
// refused by name.
namespace kvlm {

namespace {

/// What the class of a decoder has where its configuration is silent (the defaults of transformers
/// 5.23's configuration class).
struct Defaults {
  std::array<std::string_view, 2> names;  ///< model_type
  int vocab_size, hidden, intermediate, layers, q_heads;
  int kv_heads;  ///< 0: as many as q_heads
  int head_dim;  ///< 0: hidden / q_heads
  int max_positions;
  double rms_eps;
  double theta;
  int eos_id;  ///< 0: none
};

const Defaults& defaults_of(DecoderType type) {
  static constexpr Defaults kLlama{{"llama"}, 32000, 4096, 11008, 32, 32, 0, 0, 2048, 1e-6, 1e4, 2};
  static constexpr Defaults kMistral{{"mistral"}, 32000, 4096,   14336, 32,  32,
                                     8,           0,     131072, 1e-6,  1e4, 2};
  static constexpr Defaults kQwen2{{"qwen2"}, 151936, 4096,  22016, 32,  32,
                                   32,        0,      32768, 1e-6,  1e4, 0};
  static constexpr Defaults kQwen3{{"qwen3"}, 151936, 4096,  22016, 32,  32,
                                   32,        128,    32768, 1e-6,  1e4, 0};
  static constexpr Defaults kQwen2Vl{{"qwen2_vl_text", "qwen2_5_vl_text"},
                                     152064,
                                     8192,
                                     29568,
                                     80,
                                     64,
                                     8,
                                     0,
                                     32768,
                                     1e-5,
                                     1e6,
                                     151645};
  static constexpr Defaults kQwen3Vl{
      {"qwen3_vl_text"}, 151936, 4096, 22016, 32, 32, 32, 128, 128000, 1e-6, 5e5, 0};
  static constexpr Defaults kInternLm2{{"internlm2"}, 103168, 4096, 11008, 32, 32, 0, 0,
                                       2048,          1e-6,   1e4,  2};
  switch (type) {
    case DecoderType::kLlama:
      return kLlama;
    case DecoderType::kMistral:
      return kMistral;
    case DecoderType::kQwen2:
      return kQwen2;
    case DecoderType::kQwen3:
      return kQwen3;
    case DecoderType::kQwen2Vl:
      return kQwen2Vl;
    case DecoderType::kQwen3Vl:
      return kQwen3Vl;
    case DecoderType::kInternLm2:
      return kInternLm2;
  }
  return kLlama;
}

/// Which products have biases: for Qwen2 that is no option.
void read_biases(const ConfigReader& text, DecoderType type, LlamaConfig& llama) {
  switch (type) {
    case DecoderType::kLlama:
      llama.mlp_bias = text.boolean("mlp_bias", false);
      [[fallthrough]];
    case DecoderType::kQwen3:
    case DecoderType::kQwen3Vl:
      llama.qkv_bias = llama.output_bias = text.boolean("attention_bias", false);
      return;
    case DecoderType::kQwen2:
    case DecoderType::kQwen2Vl:
      llama.qkv_bias = true;
      return;
    case DecoderType::kInternLm2:
      if (text.boolean("bias", true)) text.fail("bias", "false, as in every released InternLM2");
      return;
    case DecoderType::kMistral:
      return;
  }
}

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

/// The sections of M-RoPE. Released Qwen2-VL files have them; Qwen3-VL's class has a default.
void read_sections(const ConfigReader& scaling, DecoderType decoder, RopeConfig& rope) {
  constexpr std::string_view kKey = "mrope_section";
  rope.interleaved = decoder == DecoderType::kQwen3Vl;
  const nlohmann::json& value = scaling.raw(kKey);
  if (value.is_null() && rope.interleaved) {
    rope.sections = {24, 20, 20};
  } else {
    const auto is_count = [](const nlohmann::json& entry) {
      return entry.is_number_integer() && entry.get<int64_t>() >= 0 &&
             entry.get<int64_t>() <= kMaxWidth;
    };
    if (!value.is_array() || value.size() != 3 ||
        !std::all_of(value.begin(), value.end(), is_count)) {
      scaling.fail(kKey, "three numbers: how many frequencies rotate by time, height and width");
    }
    for (size_t i = 0; i < 3; ++i) rope.sections[i] = value[i].get<int>();
  }
  const int64_t sum = int64_t{rope.sections[0]} + rope.sections[1] + rope.sections[2];
  if (sum != rope.rotary_dim / 2) {
    scaling.fail(kKey, fmt::format("numbers that add up to {}, half of head_dim {}",
                                   rope.rotary_dim / 2, rope.rotary_dim));
  }
}

/// rope_theta and rope_scaling, as transformers 4 writes them, which version 5 prefers where a file
/// has both, or version 5's rope_parameters.
RopeConfig parse_rope(const ConfigReader& text, const LlamaConfig& llama, DecoderType decoder) {
  RopeConfig rope;
  rope.rotary_dim = llama.head_dim;
  rope.max_positions = llama.max_positions;
  rope.theta = text.number("rope_theta", defaults_of(decoder).theta, 1, 1e12);
  const bool older = text.has("rope_scaling") && !text.raw("rope_scaling").empty();
  const ConfigReader scaling = text.object(older ? "rope_scaling" : "rope_parameters");
  rope.theta = scaling.number("rope_theta", rope.theta, 1, 1e12);
  const std::string type = scaling.string("rope_type", scaling.string("type", "default"));
  for (const ConfigReader* reader : {&text, &scaling}) {
    // In the reference only scaled RoPE of these decoders reads the key.
    if (reader->number("partial_rotary_factor", 1, 0, 1) != 1 && type != "default" &&
        type != "mrope") {
      reader->fail("partial_rotary_factor", "1: rotating some channels of a head is not supported");
    }
  }
  const auto read_factor = [&] { rope.factor = scaling.required_number("factor", 1e-6, 1e6); };
  if (decoder == DecoderType::kQwen2Vl || decoder == DecoderType::kQwen3Vl) {
    read_sections(scaling, decoder, rope);
  }
  // "mrope" is the older name of the default with sections.
  if (type == "default" || (type == "mrope" && rope.axes() == 3)) {
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
        fmt::format(
            "{}: rope_type is \"{}\"; supported are default, linear, dynamic, llama3 and yarn",
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

/// What most of these decoders do not read: a list of words that the reference would refuse, or a
/// window that is no number, is a damaged file all the same.
void check_layer_types(const ConfigReader& text, int layers) {
  text.integer("sliding_window", 0, 0, kMaxPositions);
  const nlohmann::json& types = text.raw("layer_types");
  if (types.is_null()) return;
  const auto is_type = [](const nlohmann::json& type) {
    return type == "full_attention" || type == "sliding_attention";
  };
  if (!types.is_array() || std::ssize(types) != layers ||
      !std::all_of(types.begin(), types.end(), is_type)) {
    text.fail("layer_types",
              fmt::format("full_attention or sliding_attention for each of {} layers", layers));
  }
}

}  // namespace

DecoderType decoder_type(const ConfigReader& text, std::span<const DecoderType> built_in) {
  const std::string name = text.string("model_type", defaults_of(built_in.front()).names.front());
  std::vector<std::string_view> names;
  for (const DecoderType type : built_in) {
    for (const std::string_view known : defaults_of(type).names) {
      if (known == name) return type;
      if (!known.empty()) names.push_back(known);
    }
  }
  throw Error(ErrorCode::kUnsupported,
              fmt::format("{}: model_type is \"{}\"; supported decoders of this family are {}",
                          text.path(), printable(name), fmt::join(names, ", ")));
}

std::optional<int32_t> default_eos_id(DecoderType type) {
  const int id = defaults_of(type).eos_id;
  return id > 0 ? std::optional<int32_t>(id) : std::nullopt;
}

LlamaConfig parse_decoder_config(const ConfigReader& text, DecoderType type) {
  const Defaults& absent = defaults_of(type);
  LlamaConfig llama;
  llama.vocab_size = field(text, "vocab_size", absent.vocab_size, kMaxVocab);
  llama.hidden = field(text, "hidden_size", absent.hidden, kMaxWidth);
  llama.intermediate = field(text, "intermediate_size", absent.intermediate, kMaxWidth);
  llama.layers = field(text, "num_hidden_layers", absent.layers, kMaxLayers);
  llama.q_heads = field(text, "num_attention_heads", absent.q_heads, kMaxWidth);
  llama.kv_heads = field(text, "num_key_value_heads",
                         absent.kv_heads > 0 ? absent.kv_heads : llama.q_heads, kMaxWidth);
  if (llama.q_heads % llama.kv_heads != 0) {
    text.fail("num_key_value_heads",
              fmt::format("a divisor of num_attention_heads {}", llama.q_heads));
  }
  const bool divides = absent.head_dim == 0 && !text.has("head_dim");
  if (divides && llama.hidden % llama.q_heads != 0) {
    text.fail("hidden_size", fmt::format("a multiple of num_attention_heads {}", llama.q_heads));
  }
  llama.head_dim =
      field(text, "head_dim", divides ? std::max(1, llama.hidden / llama.q_heads) : absent.head_dim,
            4096);
  if (llama.head_dim % 2 != 0) text.fail("head_dim", "an even number");
  if (int64_t{llama.q_heads} * llama.head_dim > kMaxWidth) {
    text.fail("head_dim", fmt::format("at most {}, with num_attention_heads {}",
                                      kMaxWidth / llama.q_heads, llama.q_heads));
  }
  llama.max_positions = field(text, "max_position_embeddings", absent.max_positions, kMaxPositions);
  llama.rms_eps = static_cast<float>(text.number("rms_norm_eps", absent.rms_eps, 0, 1));
  llama.tie_embeddings = text.boolean("tie_word_embeddings", false);
  read_biases(text, type, llama);
  llama.qk_norm = type == DecoderType::kQwen3 || type == DecoderType::kQwen3Vl;
  if (parse_activation(text, "hidden_act", "silu") != Activation::kSilu) {
    text.fail("hidden_act", "silu");
  }
  llama.rope = parse_rope(text, llama, type);
  llama.max_positions = context_of(llama.rope);
  if (type == DecoderType::kMistral && !text.is_null("sliding_window")) {
    // Every row of a sequence that fits into the window sees all before it; a longer one is not
    // served.
    llama.sliding_window = static_cast<int>(text.integer("sliding_window", 4096, 1, kMaxPositions));
    llama.max_positions = std::min(llama.max_positions, llama.sliding_window);
  }
  if (text.boolean("use_sliding_window", false)) {
    text.fail("use_sliding_window", "false: windows of some layers are not supported");
  }
  check_layer_types(text, llama.layers);
  return llama;
}

}  // namespace kvlm
