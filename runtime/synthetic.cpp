#include "runtime/synthetic.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <cmath>

#include "kernels/base/error.h"
#include "kernels/base/printable.h"
#include "kernels/fill.h"
#include "kvcache/spec/words.h"
#include "runtime/loading/config.h"
#include "runtime/synthetic_shapes.h"

// Models of released shapes with random weights, made on the device, for benchmarks: a config.json,
// a byte-level vocabulary and tensors whose variance is that of a usual initialisation, the same in
// every run.
namespace kvlm {

namespace {

using nlohmann::json;

size_t number(const json& config, const char* key) { return config.at(key).get<size_t>(); }

/// Elements of the matrices of transformer layers; a gated MLP has three.
size_t layer_elements(size_t layers, size_t width, size_t attended, size_t inner, bool gated) {
  return layers * (2 * width * attended + (gated ? 3 : 2) * width * inner);
}

/// Of a decoder of LLaMA's kind, embedding and head included.
size_t decoder_elements(const json& text) {
  const size_t hidden = number(text, "hidden_size");
  const size_t heads = number(text, "num_attention_heads");
  const size_t head_dim = text.value("head_dim", hidden / heads);
  return layer_elements(number(text, "num_hidden_layers"), hidden,
                        head_dim * (heads + number(text, "num_key_value_heads")),
                        number(text, "intermediate_size"), true) +
         2 * hidden * number(text, "vocab_size");
}

/// Of a tower and of what is between it and the decoder; position tables are left out.
size_t tower_elements(const json& config) {
  const json& vision = config.at("vision_config");
  const size_t hidden = number(config.at("text_config"), "hidden_size");
  const size_t width = number(vision, "hidden_size");
  const size_t inner = number(vision, "intermediate_size");
  const json& sides = vision.at("patch_size");
  const size_t patch = sides.is_array() ? sides[0].get<size_t>() : sides.get<size_t>();
  const size_t pixels = 3 * patch * patch * width;
  if (vision.contains("depth")) {  // Qwen-VL: patches of two frames, mergers of four patches
    const size_t mergers = 1 + vision.value("deepstack_visual_indexes", json::array()).size();
    return layer_elements(number(vision, "depth"), width, 2 * width, inner,
                          vision.at("hidden_act") == "silu") +
           2 * pixels + mergers * (16 * width * width + 4 * width * hidden);
  }
  size_t layers = number(vision, "num_hidden_layers");
  size_t rows = width;  // that the projector takes
  if (config.at("model_type") == "internvl") {
    rows *= 4;
  } else if (config.value("vision_feature_layer", -2) == -2) {
    --layers;  // the last is not used
  }
  return layer_elements(layers, width, 2 * width, inner, false) + pixels + rows * hidden +
         hidden * hidden;
}

/// A byte-level vocabulary, so that a synthetic model can be prompted; its answers are noise.
std::string byte_tokenizer(const json& more_tokens) {
  json vocab = {{"<unk>", 0}, {"<s>", 1}, {"</s>", 2}};
  for (int byte = 0; byte < 256; ++byte) vocab[fmt::format("<0x{:02X}>", byte)] = 3 + byte;
  json added = json::array();
  const auto add = [&](int id, const std::string& content) {
    added.push_back({{"id", id},
                     {"content", content},
                     {"single_word", false},
                     {"lstrip", false},
                     {"rstrip", false},
                     {"normalized", false},
                     {"special", true}});
  };
  add(0, "<unk>");
  add(1, "<s>");
  add(2, "</s>");
  for (const json& token : more_tokens) add(token[0], token[1]);
  const nlohmann::json tokenizer = {
      {"added_tokens", added},
      {"normalizer", nullptr},
      {"pre_tokenizer", nullptr},
      {"post_processor", nullptr},
      {"decoder",
       {{"type", "Sequence"}, {"decoders", {{{"type", "ByteFallback"}}, {{"type", "Fuse"}}}}}},
      {"model",
       {{"type", "BPE"},
        {"unk_token", "<unk>"},
        {"fuse_unk", true},
        {"byte_fallback", true},
        {"vocab", vocab},
        {"merges", nlohmann::json::array()}}}};
  return tokenizer.dump();
}

/// FNV-1a: a seed of its own for every tensor, the same in every run.
uint64_t seed_of(std::string_view name) {
  uint64_t seed = 0xcbf29ce484222325ull;
  for (const char letter : name) seed = (seed ^ static_cast<uint8_t>(letter)) * 0x100000001b3ull;
  return seed;
}

/// Uniform values with the variance of a usual initialisation, on `device`, the stream's or the
/// CPU; vectors are ones, biases zeros, on the CPU.
std::shared_ptr<Tensor> random_tensor(std::string_view name, const kvlm::Shape& shape, DType dtype,
                                      Device device, Stream& stream) {
  if (shape.rank() == 1) {
    auto vector = std::make_shared<Tensor>(DType::kF32, shape, Device{}, MemoryUse::kWeights);
    std::fill_n(vector->as<float>(), shape.elements(), name.ends_with("bias") ? 0.0f : 1.0f);
    return vector;
  }
  auto tensor = std::make_shared<Tensor>(dtype, shape, device, MemoryUse::kWeights);
  const int64_t inputs = shape.elements() / shape[0];
  Stream host(stream.pool());
  Stream& by = device == stream.device() ? stream : host;
  fill_random(*tensor, seed_of(name), std::sqrt(3.0f / static_cast<float>(inputs)), by);
  by.synchronize();  // products may read weights before what is queued ahead is done
  return tensor;
}

/// What `synthetic:TEXT` names.
struct Choice {
  const SyntheticShape* shape;
  json config;
};

Choice parse_choice(std::string_view text) {
  const size_t comma = text.find(',');
  const std::string_view name = text.substr(0, comma);
  const auto shapes = synthetic_shapes();
  const auto shape = std::find_if(shapes.begin(), shapes.end(),
                                  [&](const SyntheticShape& entry) { return entry.name == name; });
  if (shape == shapes.end()) {
    const std::string_view nearest = nearest_spelling(name, synthetic_names());
    throw Error(
        ErrorCode::kInvalidArgument,
        fmt::format("there is no model synthetic:{}{} (supported are {})", printable(name),
                    nearest.empty() ? "" : fmt::format("; did you mean synthetic:{}?", nearest),
                    fmt::join(synthetic_names(), ", ")));
  }
  json config = json::parse(shape->config);
  config["vision_config"] = json::parse(shape->vision);
  if (comma != std::string_view::npos) {
    const std::string_view option = text.substr(comma + 1);
    const std::string_view count = option.substr(std::min<size_t>(option.size(), 7));
    int layers = 0;
    const auto [end, error] = std::from_chars(count.data(), count.data() + count.size(), layers);
    if (!option.starts_with("layers=") || error != std::errc() ||
        end != count.data() + count.size() || layers < 1 || layers > 1024) {
      throw Error(
          ErrorCode::kInvalidArgument,
          fmt::format("synthetic:{} has the option \"{}\"; write layers=N with N from 1 to 1024",
                      name, option));
    }
    config["text_config"]["num_hidden_layers"] = layers;
  }
  return {&*shape, std::move(config)};
}

}  // namespace

std::vector<std::string_view> synthetic_names() {
  std::vector<std::string_view> names;
  for (const SyntheticShape& shape : synthetic_shapes()) names.push_back(shape.name);
  return names;
}

nlohmann::json synthetic_config(std::string_view text) { return parse_choice(text).config; }

size_t synthetic_weight_bytes(std::string_view text, DType dtype) {
  const json config = synthetic_config(text);
  return dtype_bytes(dtype) * (decoder_elements(config.at("text_config")) + tower_elements(config));
}

WeightMap blank_weights(DType dtype) {
  WeightMap weights;
  weights.make_missing([dtype](std::string_view name, const kvlm::Shape& shape, bool wide, Device) {
    const bool vector = shape.rank() == 1;
    auto tensor = std::make_shared<Tensor>(wide || vector ? DType::kF32 : dtype, shape, Device{},
                                           MemoryUse::kWeights);
    if (vector)
      std::fill_n(tensor->as<float>(), shape.elements(), name.ends_with("bias") ? 0.f : 1.f);
    return tensor;
  });
  return weights;
}

ModelSource synthetic_source(std::string_view text, DType dtype, Stream& stream) {
  Choice choice = parse_choice(text);
  ModelSource source;
  source.name = fmt::format("synthetic:{}", text);
  source.config = std::move(choice.config);
  source.file = [shape = choice.shape](const std::string& file) -> std::optional<std::string> {
    if (file == "preprocessor_config.json") return std::string(shape->preprocessor);
    if (file == "tokenizer.json") return byte_tokenizer(json::parse(shape->tokens));
    if (file == "chat_template.jinja" && !shape->chat_template.empty()) {
      return std::string(shape->chat_template);
    }
    return std::nullopt;
  };
  source.weights.make_missing([dtype, &stream](std::string_view tensor,
                                               const kvlm::Shape& tensor_shape, bool wide,
                                               Device device) {
    return random_tensor(tensor, tensor_shape, wide ? DType::kF32 : dtype, device, stream);
  });
  return source;
}

}  // namespace kvlm
