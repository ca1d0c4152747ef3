#include "runtime/synthetic.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>

#include "kernels/base/error.h"
#include "kernels/fill.h"
#include "kvcache/spec.h"
#include "runtime/loading/config.h"

namespace kvlm {

namespace {

/// Shapes from models.md 1.2 to 1.4. Every decoder runs as LLaMA does: rotations of one angle a
/// position where Qwen2.5-VL has three, and no scaling of them where InternLM2.5 scales beyond
/// max_positions.
struct DecoderShape {
  std::string_view name;
  int layers, hidden, intermediate, q_heads, kv_heads, vocab, max_positions;
  double rope_theta = 1e4;
  double rms_eps = 1e-5;
};

constexpr std::array kShapes = {
    DecoderShape{"llava-1.5-7b", 32, 4096, 11008, 32, 32, 32064, 4096},
    DecoderShape{"llava-1.5-13b", 40, 5120, 13824, 40, 40, 32064, 4096},
    // Not released: LLaVA-1.5's tower with the decoder of TinyLlama-1.1B, to measure small
    // machines.
    DecoderShape{"llava-tinyllama-1.1b", 22, 2048, 5632, 32, 4, 32064, 2048},
    // Decoders of families whose towers are not built yet: LLaVA-1.5's tower stands in. Those of
    // Qwen2 also have biases on q, k and v, too small to measure, which these have not.
    DecoderShape{"internvl2.5-8b", 32, 4096, 14336, 32, 8, 92553, 32768, 1e6},
    DecoderShape{"internvl2.5-26b", 48, 6144, 16384, 48, 8, 92553, 32768, 1e6},
    DecoderShape{"qwen2.5-vl-7b", 28, 3584, 18944, 28, 4, 152064, 128000, 1e6, 1e-6},
    DecoderShape{"llava-onevision-7b", 28, 3584, 18944, 28, 4, 152128, 32768, 1e6, 1e-6},
};

nlohmann::json config_of(const DecoderShape& shape, int layers) {
  return {{"model_type", "llava"},
          {"image_token_index", 32000},
          {"text_config",
           {{"model_type", "llama"},
            {"num_hidden_layers", layers},
            {"hidden_size", shape.hidden},
            {"intermediate_size", shape.intermediate},
            {"num_attention_heads", shape.q_heads},
            {"num_key_value_heads", shape.kv_heads},
            {"vocab_size", shape.vocab},
            {"max_position_embeddings", shape.max_positions},
            {"rope_theta", shape.rope_theta},
            {"rms_norm_eps", shape.rms_eps}}}};
}

constexpr std::string_view kPreprocessor =
    R"({"size": {"shortest_edge": 336}, "crop_size": {"height": 336, "width": 336}})";

/// A byte-level vocabulary, so that a synthetic model can be prompted; its answers are noise.
std::string byte_tokenizer(int image_id) {
  nlohmann::json vocab = {{"<unk>", 0}, {"<s>", 1}, {"</s>", 2}};
  for (int byte = 0; byte < 256; ++byte) vocab[fmt::format("<0x{:02X}>", byte)] = 3 + byte;
  const auto special = [](int id, const char* content) {
    return nlohmann::json{{"id", id},        {"content", content}, {"single_word", false},
                          {"lstrip", false}, {"rstrip", false},    {"normalized", false},
                          {"special", true}};
  };
  const nlohmann::json tokenizer = {
      {"added_tokens",
       {special(0, "<unk>"), special(1, "<s>"), special(2, "</s>"), special(image_id, "<image>")}},
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

/// Uniform values with the variance of a usual initialisation, on the stream's device; vectors are
/// ones, biases zeros, on the host.
std::shared_ptr<Tensor> random_tensor(std::string_view name, const kvlm::Shape& shape, DType dtype,
                                      Stream& stream) {
  if (shape.rank() == 1) {
    auto vector = std::make_shared<Tensor>(DType::kF32, shape, Device{}, MemoryUse::kWeights);
    std::fill_n(vector->as<float>(), shape.elements(), name.ends_with("bias") ? 0.0f : 1.0f);
    return vector;
  }
  auto tensor = std::make_shared<Tensor>(dtype, shape, stream.device(), MemoryUse::kWeights);
  const int64_t inputs = shape.elements() / shape[0];
  fill_random(*tensor, seed_of(name), std::sqrt(3.0f / static_cast<float>(inputs)), stream);
  stream.synchronize();  // products may read weights before what is queued ahead is done
  return tensor;
}

/// What `synthetic:TEXT` names.
struct Choice {
  const DecoderShape* shape;
  int layers;
};

Choice parse_choice(std::string_view text) {
  const size_t comma = text.find(',');
  const std::string_view name = text.substr(0, comma);
  const auto shape = std::find_if(kShapes.begin(), kShapes.end(),
                                  [&](const DecoderShape& entry) { return entry.name == name; });
  if (shape == kShapes.end()) {
    throw Error(
        ErrorCode::kInvalidArgument,
        fmt::format("synthetic:{} is not known; did you mean synthetic:{}? (built in are {})", name,
                    nearest_spelling(name, synthetic_names()), fmt::join(synthetic_names(), ", ")));
  }
  int layers = shape->layers;
  if (comma != std::string_view::npos) {
    const std::string_view option = text.substr(comma + 1);
    const std::string_view number = option.substr(std::min<size_t>(option.size(), 7));
    const auto [end, error] = std::from_chars(number.data(), number.data() + number.size(), layers);
    if (!option.starts_with("layers=") || error != std::errc() ||
        end != number.data() + number.size() || layers < 1 || layers > 1024) {
      throw Error(
          ErrorCode::kInvalidArgument,
          fmt::format("synthetic:{} has the option \"{}\"; write layers=N with N from 1 to 1024",
                      name, option));
    }
  }
  return {&*shape, layers};
}

}  // namespace

std::vector<std::string_view> synthetic_names() {
  std::vector<std::string_view> names;
  for (const DecoderShape& shape : kShapes) names.push_back(shape.name);
  return names;
}

nlohmann::json synthetic_config(std::string_view text) {
  const Choice choice = parse_choice(text);
  return config_of(*choice.shape, choice.layers);
}

size_t synthetic_weight_bytes(std::string_view text, DType dtype) {
  const Choice choice = parse_choice(text);
  const DecoderShape& shape = *choice.shape;
  const auto hidden = static_cast<size_t>(shape.hidden);
  const size_t kv_width =
      hidden / static_cast<size_t>(shape.q_heads) * static_cast<size_t>(shape.kv_heads);
  const size_t layer =
      hidden * (2 * hidden + 2 * kv_width + 3 * static_cast<size_t>(shape.intermediate));
  const size_t decoder =
      static_cast<size_t>(choice.layers) * layer + 2 * hidden * static_cast<size_t>(shape.vocab);
  // CLIP ViT-L/14 of 336 pixels, whose last layer is not used, and a projector of two layers.
  constexpr size_t kTower = 1024;
  const size_t tower = 23 * (4 * kTower * kTower + 2 * kTower * 4096) + kTower * 3 * 14 * 14;
  const size_t projector = kTower * hidden + hidden * hidden;
  return dtype_bytes(dtype) * (decoder + tower + projector);
}

ModelSource synthetic_source(std::string_view text, DType dtype, Stream& stream) {
  ModelSource source;
  source.name = fmt::format("synthetic:{}", text);
  source.config = synthetic_config(text);
  source.file = [](const std::string& file) -> std::optional<std::string> {
    if (file == "preprocessor_config.json") return std::string(kPreprocessor);
    if (file == "tokenizer.json") return byte_tokenizer(32000);
    return std::nullopt;
  };
  source.weights.make_missing(
      [dtype, &stream](std::string_view tensor, const kvlm::Shape& tensor_shape, bool wide) {
        return random_tensor(tensor, tensor_shape, wide ? DType::kF32 : dtype, stream);
      });
  return source;
}

}  // namespace kvlm
