#include "runtime/submodel_config.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "kernels/base/error.h"

namespace kvlm {

namespace {

constexpr int64_t kMaxLayers = 1024;
constexpr int64_t kMaxWidth = 1 << 20;
constexpr int64_t kMaxVocab = 1 << 24;
constexpr int64_t kMaxPositions = 1 << 27;

int field(const ConfigReader& reader, std::string_view key, int64_t fallback, int64_t max) {
  return static_cast<int>(reader.integer(key, fallback, 1, max));
}

/// rope_parameters (newer) or rope_theta + rope_scaling (older), models.md 2.2.
RopeConfig parse_rope(const ConfigReader& text, const LlamaConfig& llama) {
  RopeConfig rope;
  rope.rotary_dim = llama.head_dim;
  rope.max_positions = llama.max_positions;
  rope.theta = text.number("rope_theta", 1e4, 1, 1e12);
  const ConfigReader scaling =
      text.object(text.has("rope_parameters") ? "rope_parameters" : "rope_scaling");
  rope.theta = scaling.number("rope_theta", rope.theta, 1, 1e12);
  const std::string type = scaling.string("rope_type", scaling.string("type", "default"));
  if (type == "default") {
    rope.type = RopeConfig::Type::kDefault;
    return rope;
  }
  rope.factor = scaling.number("factor", 1, 1e-6, 1e6);
  if (type == "linear") {
    rope.type = RopeConfig::Type::kLinear;
  } else if (type == "dynamic") {
    rope.type = RopeConfig::Type::kDynamic;
  } else if (type == "llama3") {
    rope.type = RopeConfig::Type::kLlama3;
    rope.low_freq_factor = scaling.number("low_freq_factor", 1, 1e-6, 1e6);
    rope.high_freq_factor = scaling.number("high_freq_factor", 4, 1e-6, 1e6);
    if (rope.high_freq_factor <= rope.low_freq_factor) {
      scaling.fail("high_freq_factor", "more than low_freq_factor");
    }
    rope.original_max_positions = static_cast<int>(
        scaling.required_integer("original_max_position_embeddings", 1, kMaxPositions));
  } else if (type == "yarn") {
    rope.type = RopeConfig::Type::kYarn;
    rope.beta_fast = scaling.number("beta_fast", 32, 1e-6, 1e6);
    rope.beta_slow = scaling.number("beta_slow", 1, 1e-6, 1e6);
    rope.attention_factor = scaling.number("attention_factor", 0, 0, 1e6);
    rope.original_max_positions = static_cast<int>(
        scaling.integer("original_max_position_embeddings", llama.max_positions, 1, kMaxPositions));
  } else {
    throw Error(
        ErrorCode::kUnsupported,
        fmt::format("{}: rope_type is \"{}\"; built in are default, linear, dynamic, llama3 and "
                    "yarn",
                    scaling.path(), type));
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

std::array<double, 3> parse_triple(const ConfigReader& reader, std::string_view key,
                                   const std::array<double, 3>& fallback) {
  const nlohmann::json& value = reader.raw(key);
  if (value.is_null()) return fallback;
  const bool ok = value.is_array() && value.size() == 3 &&
                  std::all_of(value.begin(), value.end(),
                              [](const nlohmann::json& entry) { return entry.is_number(); });
  if (!ok) reader.fail(key, "three numbers");
  return {value[0].get<double>(), value[1].get<double>(), value[2].get<double>()};
}

constexpr int64_t kMaxEdge = 16384;

void parse_size(const ConfigReader& processor, PreprocessSpec& spec) {
  const nlohmann::json& size = processor.raw("size");
  if (size.is_number()) {
    spec.shortest_edge = static_cast<int>(processor.integer("size", 224, 1, kMaxEdge));
    return;
  }
  const ConfigReader reader = processor.object("size");
  if (reader.has("height") || reader.has("width")) {
    spec.shortest_edge = 0;
    spec.resize_height = static_cast<int>(reader.required_integer("height", 1, kMaxEdge));
    spec.resize_width = static_cast<int>(reader.required_integer("width", 1, kMaxEdge));
  } else {
    spec.shortest_edge = static_cast<int>(reader.integer("shortest_edge", 224, 1, kMaxEdge));
  }
}

void parse_crop(const ConfigReader& processor, PreprocessSpec& spec) {
  const nlohmann::json& crop = processor.raw("crop_size");
  if (crop.is_number()) {
    spec.crop_height = spec.crop_width =
        static_cast<int>(processor.integer("crop_size", 224, 1, kMaxEdge));
    return;
  }
  const ConfigReader reader = processor.object("crop_size");
  spec.crop_height = static_cast<int>(reader.integer("height", 224, 1, kMaxEdge));
  spec.crop_width = static_cast<int>(reader.integer("width", 224, 1, kMaxEdge));
}

void append_ids(const ConfigReader& reader, std::string_view key, std::vector<int32_t>& ids) {
  const nlohmann::json& value = reader.raw(key);
  const auto append = [&](const nlohmann::json& entry) {
    if (!entry.is_number_integer() || entry.get<int64_t>() < 0 ||
        entry.get<int64_t>() > kMaxVocab) {
      reader.fail(key, "a token id or a list of token ids");
    }
    ids.push_back(entry.get<int32_t>());
  };
  if (value.is_array()) {
    for (const nlohmann::json& entry : value) append(entry);
  } else if (!value.is_null()) {
    append(value);
  }
}

}  // namespace

Activation parse_activation(const ConfigReader& reader, std::string_view key,
                            std::string_view fallback) {
  const std::string name = reader.string(key, fallback);
  if (name == "quick_gelu") return Activation::kQuickGelu;
  if (name == "gelu") return Activation::kGelu;
  if (name == "gelu_pytorch_tanh" || name == "gelu_new") return Activation::kGeluTanh;
  if (name == "silu" || name == "swish") return Activation::kSilu;
  reader.fail(key, "quick_gelu, gelu, gelu_pytorch_tanh or silu");
}

LlamaConfig parse_llama_config(const ConfigReader& text) {
  const std::string type = text.string("model_type", "llama");
  const bool mistral = type == "mistral";
  if (type != "llama" && !mistral) {
    throw Error(
        ErrorCode::kUnsupported,
        fmt::format("{}: model_type is \"{}\"; the decoders built in for this family are llama "
                    "and mistral",
                    text.path(), type));
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
  if (mistral && text.has("sliding_window") &&
      text.integer("sliding_window", 0, 0, kMaxPositions) < llama.max_positions) {
    text.fail("sliding_window", "null: attention over a sliding window is not built in");
  }
  llama.rope = parse_rope(text, llama);
  llama.max_positions = context_of(llama.rope);
  return llama;
}

ClipConfig parse_clip_config(const ConfigReader& vision, const ConfigReader& model) {
  // LLaVA's own default tower is CLIP-L/14-336; a vision_config without sizes is CLIP's class
  // default.
  const bool absent = !model.has("vision_config");
  const std::string type = vision.string("model_type", "clip_vision_model");
  if (type != "clip_vision_model") {
    throw Error(ErrorCode::kUnsupported,
                fmt::format("{}: model_type is \"{}\"; the tower built in for this family is "
                            "clip_vision_model",
                            vision.path(), type));
  }
  ClipConfig clip;
  clip.hidden = field(vision, "hidden_size", absent ? 1024 : 768, kMaxWidth);
  clip.intermediate = field(vision, "intermediate_size", absent ? 4096 : 3072, kMaxWidth);
  clip.layers = field(vision, "num_hidden_layers", absent ? 24 : 12, kMaxLayers);
  clip.heads = field(vision, "num_attention_heads", absent ? 16 : 12, kMaxWidth);
  clip.image_size = field(vision, "image_size", absent ? 336 : 224, kMaxEdge);
  clip.patch_size = field(vision, "patch_size", absent ? 14 : 32, kMaxEdge);
  clip.eps = static_cast<float>(vision.number("layer_norm_eps", 1e-5, 0, 1));
  clip.activation = parse_activation(vision, "hidden_act", "quick_gelu");
  if (clip.hidden % clip.heads != 0) {
    vision.fail("hidden_size", fmt::format("a multiple of num_attention_heads {}", clip.heads));
  }
  if (clip.patch_size > clip.image_size) {
    vision.fail("patch_size", fmt::format("at most image_size {}", clip.image_size));
  }

  const nlohmann::json& layer = model.raw("vision_feature_layer");
  if (layer.is_array()) {
    clip.feature_layers.clear();
    for (const nlohmann::json& entry : layer) {
      if (!entry.is_number_integer()) model.fail("vision_feature_layer", "integers");
      clip.feature_layers.push_back(static_cast<int>(
          std::clamp<int64_t>(entry.get<int64_t>(), -kMaxLayers - 1, kMaxLayers + 1)));
    }
    if (clip.feature_layers.empty()) model.fail("vision_feature_layer", "at least one layer");
  } else {
    clip.feature_layers = {
        static_cast<int>(model.integer("vision_feature_layer", -2, -kMaxLayers, kMaxLayers))};
  }
  const std::string strategy = model.string("vision_feature_select_strategy", "default");
  if (strategy != "default" && strategy != "full") {
    model.fail("vision_feature_select_strategy", "default or full");
  }
  clip.keep_class_token = strategy == "full";
  return clip;
}

PreprocessSpec parse_preprocess(const ConfigReader& processor, const LoadOptions& options) {
  PreprocessSpec spec;
  spec.resize_backend = options.image_backend;
  spec.normalize_backend = options.image_backend == ResizeBackend::kPil
                               ? NormalizeBackend::kPil
                               : NormalizeBackend::kTorchvision;
  spec.do_resize = processor.boolean("do_resize", true);
  spec.do_center_crop = processor.boolean("do_center_crop", true);
  spec.do_rescale = processor.boolean("do_rescale", true);
  spec.do_normalize = processor.boolean("do_normalize", true);
  spec.do_pad = options.pad_to_square.value_or(processor.boolean("do_pad", false));
  parse_size(processor, spec);
  parse_crop(processor, spec);
  spec.resample = static_cast<Resample>(processor.integer("resample", 3, 0, 5));
  spec.rescale_factor = processor.number("rescale_factor", spec.rescale_factor, 0, 1e6);
  spec.mean = parse_triple(processor, "image_mean", spec.mean);
  spec.std = parse_triple(processor, "image_std", spec.std);
  if (std::any_of(spec.std.begin(), spec.std.end(), [](double value) { return !(value > 0); })) {
    processor.fail("image_std", "positive numbers");
  }
  return spec;
}

GenerationDefaults parse_generation(const ConfigReader& generation, const ConfigReader& model) {
  GenerationDefaults defaults;
  append_ids(generation, "eos_token_id", defaults.eos_ids);
  if (defaults.eos_ids.empty()) append_ids(model, "eos_token_id", defaults.eos_ids);
  if (defaults.eos_ids.empty()) {
    append_ids(model.object("text_config"), "eos_token_id", defaults.eos_ids);
  }
  if (defaults.eos_ids.empty()) defaults.eos_ids = {2};
  defaults.max_tokens =
      static_cast<int>(generation.integer("max_new_tokens", defaults.max_tokens, 1, kMaxPositions));
  SamplerOptions& sampling = defaults.sampling;
  sampling.repetition_penalty = generation.number("repetition_penalty", 1, 1e-3, 1e3);
  if (generation.boolean("do_sample", false)) {
    sampling.temperature = generation.number("temperature", 1, 0, 1e3);
    sampling.top_k = static_cast<int>(generation.integer("top_k", 50, 0, kMaxVocab));
    sampling.top_p = generation.number("top_p", 1, 0, 1);
  }
  return defaults;
}

std::unique_ptr<Tokenizer> load_tokenizer(const ModelSource& source,
                                          const AddedToken& placeholder) {
  const auto read = [&](const char* file) { return source.file(file).value_or(std::string()); };
  TokenizerConfig config =
      parse_tokenizer_config(read("tokenizer_config.json"), read("special_tokens_map.json"),
                             read("added_tokens.json"), "tokenizer_config.json");
  if (const auto json = source.file("tokenizer.json")) {
    return make_json_tokenizer(*json, config, "tokenizer.json");
  }
  if (const auto model = source.file("tokenizer.model")) {
    const bool known =
        std::any_of(config.added_tokens.begin(), config.added_tokens.end(),
                    [&](const AddedToken& token) { return token.content == placeholder.content; });
    if (!known) config.added_tokens.push_back(placeholder);
    return make_sentencepiece_tokenizer(*model, config, "tokenizer.model");
  }
  throw Error(
      ErrorCode::kCorruptFile,
      fmt::format("{} has neither tokenizer.json nor tokenizer.model; download one of them from "
                  "the model's page",
                  source.name));
}

ChatTemplate load_chat_template(const ModelSource& source, std::string_view builtin) {
  if (const auto jinja = source.file("chat_template.jinja")) {
    return ChatTemplate(*jinja, "chat_template.jinja");
  }
  if (const auto text = source.file("chat_template.json")) {
    const nlohmann::json json = parse_json(*text, "chat_template.json");
    return ChatTemplate(ConfigReader(json, "chat_template.json").required_string("chat_template"),
                        "chat_template.json");
  }
  if (const auto text = source.file("tokenizer_config.json")) {
    const nlohmann::json json = parse_json(*text, "tokenizer_config.json");
    const ConfigReader reader(json, "tokenizer_config.json");
    const nlohmann::json& value = reader.raw("chat_template");
    if (value.is_string()) return ChatTemplate(value.get<std::string>(), "tokenizer_config.json");
    if (value.is_array()) {
      for (const nlohmann::json& entry : value) {
        const ConfigReader named(entry, "tokenizer_config.json: chat_template");
        if (named.required_string("name") == "default") {
          return ChatTemplate(named.required_string("template"), "tokenizer_config.json");
        }
      }
      reader.fail("chat_template", "a template named default");
    }
  }
  return ChatTemplate(builtin, "the built-in template");
}

}  // namespace kvlm
