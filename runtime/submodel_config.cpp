#include "runtime/submodel_config.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>

#include "kernels/base/error.h"
#include "kernels/base/printable.h"

namespace kvlm {

namespace {

constexpr int64_t kMaxLayers = 1024;
constexpr int64_t kMaxWidth = 1 << 20;
constexpr int64_t kMaxVocab = 1 << 24;
constexpr int64_t kMaxPositions = 1 << 27;

int field(const ConfigReader& reader, std::string_view key, int64_t fallback, int64_t max) {
  return static_cast<int>(reader.integer(key, fallback, 1, max));
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

std::array<double, 3> parse_triple(const ConfigReader& reader, std::string_view key,
                                   const std::array<double, 3>& fallback) {
  const nlohmann::json& value = reader.raw(key);
  if (value.is_null()) return fallback;
  if (value.is_number()) {  // of all three channels
    const auto same = value.get<double>();
    return {same, same, same};
  }
  const bool ok = value.is_array() && value.size() == 3 &&
                  std::all_of(value.begin(), value.end(),
                              [](const nlohmann::json& entry) { return entry.is_number(); });
  if (!ok) reader.fail(key, "a number or three");
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
    return;
  }
  for (const char* key : {"longest_edge", "max_height", "max_width"}) {
    if (reader.has(key)) {
      reader.fail(key, "null: a limit on the longer side is not built in for this family");
    }
  }
  spec.shortest_edge = static_cast<int>(reader.integer("shortest_edge", 224, 1, kMaxEdge));
}

/// Whether pictures are padded to a square before all else. That is what do_pad means to LLaVA's
/// image processor, which also reads files without a type; to CLIP's it means padding pictures of
/// different sizes afterwards, which the tower does not take. Refuses other processors: what a file
/// leaves out is different for each.
bool pads_to_square(const ConfigReader& processor) {
  std::string type = processor.string("image_processor_type", "");
  if (type.empty()) {  // the older name
    type = processor.string("feature_extractor_type", "LlavaImageProcessor");
    if (const size_t at = type.find("FeatureExtractor"); at != std::string::npos) {
      type.replace(at, std::string_view("FeatureExtractor").size(), "ImageProcessor");
    }
  }
  std::string_view name = type;
  for (const std::string_view backend : {"Fast", "Pil"}) {
    if (name.ends_with(backend)) name.remove_suffix(backend.size());
  }
  if (name != "CLIPImageProcessor" && name != "LlavaImageProcessor") {
    throw Error(ErrorCode::kUnsupported,
                fmt::format("{}: image_processor_type is \"{}\"; built in for this family are "
                            "CLIPImageProcessor and LlavaImageProcessor",
                            processor.path(), printable(type)));
  }
  const bool do_pad = processor.boolean("do_pad", false);
  if (name == "LlavaImageProcessor") return do_pad;
  if (do_pad && processor.has("pad_size")) {
    processor.fail("pad_size", "null: padding after the crop is not built in");
  }
  return false;
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

ClipConfig parse_clip_config(const ConfigReader& vision, const ConfigReader& model) {
  // LLaVA's own default tower is CLIP-L/14-336; a vision_config without sizes is CLIP's class
  // default.
  const bool absent = !model.has("vision_config");
  const std::string type = vision.string("model_type", "clip_vision_model");
  if (type != "clip_vision_model") {
    throw Error(ErrorCode::kUnsupported,
                fmt::format("{}: model_type is \"{}\"; the tower built in for this family is "
                            "clip_vision_model",
                            vision.path(), printable(type)));
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
  const bool do_pad = pads_to_square(processor);
  spec.do_pad = options.pad_to_square.value_or(do_pad);
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

namespace {

/// Keys of generation_config.json that change what the reference generates and are not built, with
/// the values at which they change nothing. Whatever is not named in this file changes nothing in a
/// greedy or sampled generation of one sequence.
void refuse_unbuilt_generation(const ConfigReader& generation, bool samples) {
  const auto refuse = [&](std::string_view key) {
    throw Error(ErrorCode::kUnsupported,
                fmt::format("{}: {} is not built in, and without it the answers would differ; "
                            "remove the key from the file to go without",
                            generation.path(), key));
  };
  const auto number_other_than = [&](std::string_view key, double neutral) {
    const nlohmann::json& value = generation.raw(key);
    if (value.is_null() || (value.is_number() && value.get<double>() == neutral)) return;
    refuse(key);
  };
  for (const char* key : {"num_beams", "num_beam_groups", "num_return_sequences",
                          "encoder_repetition_penalty", "guidance_scale"}) {
    number_other_than(key, 1);
  }
  for (const char* key : {"encoder_no_repeat_ngram_size", "penalty_alpha", "diversity_penalty"}) {
    number_other_than(key, 0);
  }
  for (const char* key :
       {"exponential_decay_length_penalty", "sequence_bias", "constraints", "force_words_ids",
        "watermarking_config", "dola_layers", "stop_strings", "max_time"}) {
    if (generation.has(key)) refuse(key);
  }
  if (generation.boolean("token_healing", false)) refuse("token_healing");
  if (generation.string("cache_implementation", "") == "quantized") refuse("cache_implementation");
  if (!samples) return;
  for (const char* key : {"typical_p", "top_h"}) number_other_than(key, 1);
  for (const char* key : {"epsilon_cutoff", "eta_cutoff", "min_p"}) number_other_than(key, 0);
}

std::vector<int32_t> ids_of(const ConfigReader& reader, std::string_view key) {
  std::vector<int32_t> ids;
  append_ids(reader, key, ids);
  return ids;
}

/// bad_words_ids: a list of lists of ids.
std::vector<std::vector<int32_t>> read_bad_words(const ConfigReader& generation) {
  constexpr std::string_view kKey = "bad_words_ids";
  const nlohmann::json& list = generation.raw(kKey);
  std::vector<std::vector<int32_t>> words;
  if (list.is_null()) return words;
  const auto is_id = [](const nlohmann::json& id) {
    return id.is_number_integer() && id.get<int64_t>() >= 0 && id.get<int64_t>() <= kMaxVocab;
  };
  const auto is_word = [&](const nlohmann::json& word) {
    return word.is_array() && !word.empty() && std::all_of(word.begin(), word.end(), is_id);
  };
  if (!list.is_array() || !std::all_of(list.begin(), list.end(), is_word)) {
    generation.fail(kKey, "a list of lists of token ids");
  }
  for (const nlohmann::json& word : list) words.push_back(word.get<std::vector<int32_t>>());
  return words;
}

LogitRuleOptions parse_rules(const ConfigReader& generation, const std::vector<int32_t>& eos_ids) {
  LogitRuleOptions rules;
  const auto count = [&](std::string_view key) {
    return static_cast<int>(generation.integer(key, 0, 0, kMaxPositions));
  };
  rules.min_new_tokens = count("min_new_tokens");
  rules.min_length = count("min_length");
  rules.no_repeat_ngram_size = count("no_repeat_ngram_size");
  rules.eos_ids = eos_ids;
  rules.suppress_tokens = ids_of(generation, "suppress_tokens");
  rules.begin_suppress_tokens = ids_of(generation, "begin_suppress_tokens");
  rules.bad_words = read_bad_words(generation);
  const std::vector<int32_t> forced = ids_of(generation, "forced_eos_token_id");
  if (forced.size() > 1) generation.fail("forced_eos_token_id", "one token id");
  if (!forced.empty()) rules.forced_eos_token = forced.front();
  return rules;
}

}  // namespace

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
  const bool samples = generation.boolean("do_sample", false);
  refuse_unbuilt_generation(generation, samples);
  SamplerOptions& sampling = defaults.sampling;
  sampling.rules = parse_rules(generation, defaults.eos_ids);
  sampling.repetition_penalty = generation.number("repetition_penalty", 1, 1e-3, 1e3);
  if (samples) {
    sampling.temperature = generation.number("temperature", 1, 0, 1e3);
    sampling.top_k = static_cast<int>(generation.integer("top_k", 50, 0, kMaxVocab));
    sampling.top_p = generation.number("top_p", 1, 0, 1);
  }
  return defaults;
}

TokenizerConfig read_tokenizer_config(const ModelSource& source) {
  const auto read = [&](const char* file) { return source.file(file).value_or(std::string()); };
  return parse_tokenizer_config(read("tokenizer_config.json"), read("special_tokens_map.json"),
                                read("added_tokens.json"), "tokenizer_config.json");
}

std::unique_ptr<Tokenizer> load_tokenizer(const ModelSource& source, TokenizerConfig config,
                                          const AddedToken& placeholder) {
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

namespace {

/// The template of a key that holds it, or a list of {name, template}; nothing if there is none.
std::optional<ChatTemplate> template_of(const ConfigReader& reader, const std::string& file) {
  const nlohmann::json& value = reader.raw("chat_template");
  if (value.is_null()) return std::nullopt;
  if (value.is_string()) return ChatTemplate(value.get<std::string>(), file);
  if (!value.is_array()) reader.fail("chat_template", "a template or a list of them");
  for (const nlohmann::json& entry : value) {
    const ConfigReader named(entry, file + ": chat_template");
    if (named.required_string("name") == "default") {
      return ChatTemplate(named.required_string("template"), file);
    }
  }
  reader.fail("chat_template", "a template named default");
}

}  // namespace

ChatTemplate load_chat_template(const ModelSource& source, std::string_view builtin) {
  const auto in_json = [&](const std::string& file) -> std::optional<ChatTemplate> {
    const auto text = source.file(file);
    if (!text) return std::nullopt;
    const nlohmann::json json = parse_json(*text, file);
    const ConfigReader reader(json, file);
    if (file == "chat_template.json") reader.required_string("chat_template");
    return template_of(reader, file);
  };
  for (const char* file : {"processor_config.json", "chat_template.json"}) {
    if (auto found = in_json(file)) return std::move(*found);
  }
  if (const auto jinja = source.file("chat_template.jinja")) {
    return ChatTemplate(*jinja, "chat_template.jinja");
  }
  if (auto found = in_json("tokenizer_config.json")) return std::move(*found);
  return ChatTemplate(builtin, "the built-in template");
}

}  // namespace kvlm
