// Tiny quantized checkpoints against transformers with the format's own package
// (tests/runtime/data/weights): towers in 16 bits, one decoder layer of packed matrices.

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <fstream>

#include "kernels/elementwise.h"
#include "kvcache/make_cache.h"
#include "kvcache/plan/planner.h"
#include "kvcache/spec/spec.h"
#include "llm/llama.h"
#include "runtime/families/llava_parts.h"
#include "runtime/loading/checkpoint.h"
#include "runtime/loading/source.h"
#include "runtime/loading/weight_names.h"
#include "tests/runtime/golden.h"
#include "tests/source_folder.h"
#include "vision/clip_vit.h"
#include "vision/projector.h"

namespace kvlm {
namespace {

constexpr std::array kDecoders = {DecoderType::kLlama};
constexpr LlavaDefaults kDefaults{"clip_vision_model", kDecoders, -2, "default", 32000};

/// One of the checkpoints, loaded without a tokenizer, which it has not.
class TinyModel {
 public:
  TinyModel(const std::string& name, const LoadOptions& options)
      : folder_(test::source_folder() / "tests/runtime/data/weights" / name), checkpoint_(folder_) {
    const LlavaConfig config =
        parse_llava_config(ConfigReader(checkpoint_.config(), "config.json"), kDefaults);
    WeightMap weights = checkpoint_.take_weights();
    weights.rename(&canonical_llava_name);
    if (name == "tiny-llava-awq" && options.exact_activations) round_matrices(weights, config.text);
    prepare_weights(weights, options, stream_);
    image_id_ = config.image_id;
    const auto& clip = std::get<ClipConfig>(config.tower);
    tower_ = make_clip_vit(clip, weights, "model.vision_tower.", size_t{1} << 20);
    projector_ = std::make_unique<MlpProjector>(tower_->width(), config.text.hidden,
                                                config.projector_activation, config.projector_bias,
                                                weights, "model.multi_modal_projector.");
    decoder_ = make_llama(config.text, weights, "model.language_model.");
    plan_ = plan_cache(parse_spec("f32"), decoder_->cache_shape());
    std::ifstream file(folder_ / "golden.json");
    golden_ = nlohmann::json::parse(file);
  }

  const nlohmann::json& golden() const { return golden_; }
  Decoder& decoder() { return *decoder_; }

  /// Logits of all rows of the prompt, then of each further id.
  std::vector<float> logits(std::vector<int32_t> further) {
    auto ids = golden_.at("ids").get<std::vector<int32_t>>();
    const auto rows = static_cast<int>(ids.size());
    const int all = rows + static_cast<int>(further.size());
    const auto cache = make_cache(plan_, reservation(*plan_, {all, 0, all}).bytes(), Device{});
    const SequenceId id = cache->open({rows, 0, all}, "tiny");
    std::vector<float> found;
    std::vector<Position> positions;
    for (int i = 0; i < rows; ++i) positions.push_back(Position::on_every_axis(i));
    Tensor embedded(DType::kF32, {rows, decoder_->hidden()});
    embed(ids, embedded);
    const StepRows first{id, rows, true, true, {}};
    append(found, decoder_->forward({{&first, 1}, positions, embedded, true}, *cache, stream_, {}));
    for (size_t i = 0; i < further.size(); ++i) {
      Tensor one(DType::kF32, {1, decoder_->hidden()});
      decoder_->embed({&further[i], 1}, one, stream_);
      const Position position = Position::on_every_axis(rows + static_cast<int32_t>(i));
      const StepRows next{id, 1, false, false, {}};
      append(found, decoder_->forward({{&next, 1}, {&position, 1}, one}, *cache, stream_, {}));
    }
    cache->close(id);
    return found;
  }

 private:
  /// AWQ's package rounds scale * (code - zero) to f16 before it multiplies.
  void round_matrices(WeightMap& weights, const LlamaConfig& text) {
    const int q = text.q_heads * text.head_dim;
    const int kv = text.kv_heads * text.head_dim;
    const std::pair<const char*, Shape> matrices[] = {
        {"self_attn.q_proj", {q, text.hidden}},
        {"self_attn.k_proj", {kv, text.hidden}},
        {"self_attn.v_proj", {kv, text.hidden}},
        {"self_attn.o_proj", {text.hidden, q}},
        {"mlp.gate_proj", {text.intermediate, text.hidden}},
        {"mlp.up_proj", {text.intermediate, text.hidden}},
        {"mlp.down_proj", {text.hidden, text.intermediate}}};
    for (const auto& [matrix, shape] : matrices) {
      const std::string name = fmt::format("model.language_model.layers.0.{}.weight", matrix);
      const ConstTensorView halves = weights.take(name, shape);
      EXPECT_EQ(halves.dtype(), DType::kF16);
      weights.add(name, halves, nullptr);
    }
  }
  static void append(std::vector<float>& to, ConstTensorView logits) {
    to.insert(to.end(), logits.as<float>(), logits.as<float>() + logits.elements());
  }
  /// Text from the table, and the image's rows in place of its placeholders.
  void embed(const std::vector<int32_t>& ids, Tensor& out) {
    decoder_->embed(ids, out, stream_);
    const auto pixels = golden_.at("pixel_values").get<std::vector<float>>();
    constexpr int64_t kPatch = 7;
    constexpr int64_t kGrid = 2;
    VisualPatches image{Tensor(DType::kF32, {kGrid * kGrid, 3 * kPatch * kPatch}),
                        {{1, kGrid, kGrid}}};
    float* to = image.rows.as<float>();
    for (int64_t patch = 0; patch < kGrid * kGrid; ++patch) {
      for (int64_t channel = 0; channel < 3; ++channel) {
        for (int64_t dy = 0; dy < kPatch; ++dy) {
          const int64_t y = patch / kGrid * kPatch + dy;
          const int64_t x = patch % kGrid * kPatch;
          const auto from = pixels.begin() + (channel * kGrid * kPatch + y) * kGrid * kPatch + x;
          to = std::copy(from, from + kPatch, to);
        }
      }
    }
    const VisualPatches* images[] = {&image};
    const Tensor features = projector_->project(tower_->encode(images, stream_, {}, {}), stream_);
    int64_t row = 0;
    for (size_t i = 0; i < ids.size(); ++i) {
      if (ids[i] != image_id_) continue;
      copy(out.view().slice(static_cast<int64_t>(i), 1), features.view().slice(row++, 1), stream_);
    }
  }

  std::filesystem::path folder_;
  Checkpoint checkpoint_;
  ThreadPool pool_{2};
  Stream stream_{pool_};
  int32_t image_id_ = 0;
  std::unique_ptr<VisionEncoder> tower_;
  std::unique_ptr<MlpProjector> projector_;
  std::unique_ptr<Decoder> decoder_;
  std::shared_ptr<CachePlan> plan_;
  nlohmann::json golden_;
};

class QuantizedGolden : public testing::TestWithParam<const char*> {};

std::vector<int32_t> first_maxima(const std::vector<float>& logits, size_t width, size_t from) {
  std::vector<int32_t> ids;
  for (size_t row = from; row < logits.size() / width; ++row) {
    const auto begin = logits.begin() + static_cast<std::ptrdiff_t>(row * width);
    const auto end = begin + static_cast<std::ptrdiff_t>(width);
    ids.push_back(static_cast<int32_t>(std::max_element(begin, end) - begin));
  }
  return ids;
}

/// The reference is transformers in f32, whose products are exact in the weights.
TEST_P(QuantizedGolden, EqualsTransformers) {
  LoadOptions options;
  options.dtype = DType::kF32;
  options.exact_activations = true;
  TinyModel model(GetParam(), options);
  const auto greedy = model.golden().at("greedy").get<std::vector<int32_t>>();
  const std::vector<float> logits = model.logits({greedy.begin(), greedy.end() - 1});
  const auto want = model.golden().at("logits_f32").get<std::vector<float>>();
  for (size_t i = 0; i < want.size(); ++i) ASSERT_NEAR(logits[i], want[i], 1e-5f) << i;
  EXPECT_EQ(first_maxima(logits, 64, 9), greedy);
}

/// Activations of 8 bits change little.
TEST_P(QuantizedGolden, IsCloseWithActivationsOf8Bits) {
  TinyModel model(GetParam(), {});
  const std::vector<float> logits = model.logits({});
  const auto want = model.golden().at("logits_f32").get<std::vector<float>>();
  double error = 0;
  double norm = 0;
  for (size_t i = 0; i < want.size(); ++i) {
    error += std::pow(logits[i] - want[i], 2);
    norm += std::pow(want[i], 2);
  }
  EXPECT_LT(std::sqrt(error / norm), 0.02);
}

INSTANTIATE_TEST_SUITE_P(Tiny, QuantizedGolden,
                         testing::Values("tiny-llava-w4a16", "tiny-llava-awq"),
                         [](const auto& name) {
                           return std::string(name.param) == "tiny-llava-awq" ? "Awq" : "W4A16";
                         });

}  // namespace
}  // namespace kvlm
