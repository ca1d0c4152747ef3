// Passes of a decoder that a GPU repeats from a recording, against a decoder that never records.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "kernels/base/queue.h"
#include "kvcache/make_cache.h"
#include "kvcache/plan/planner.h"
#include "kvcache/spec/spec.h"
#include "llm/llama.h"
#include "tests/cuda/fixture.h"
#include "tests/reference/random_weights.h"
#include "tests/watched_cache.h"

namespace kvlm {
namespace {

using testing::kGpu;

LlamaConfig small_config(int hidden = 64, int intermediate = 96) {
  LlamaConfig config;
  config.layers = 2;
  config.hidden = hidden;
  config.intermediate = intermediate;
  config.q_heads = 4;
  config.kv_heads = 2;
  config.head_dim = 128;
  config.vocab_size = 53;
  config.max_positions = 512;
  config.rms_eps = 1e-5f;
  config.rope.rotary_dim = 128;
  config.rope.max_positions = 512;
  return config;
}

reference::RandomWeights make_weights(const LlamaConfig& config) {
  reference::RandomWeights weights(DType::kF16);
  const int q_width = config.q_heads * config.head_dim;
  const int kv_width = config.kv_heads * config.head_dim;
  for (int i = 0; i < config.layers; ++i) {
    const std::string layer = fmt::format("layers.{}.", i);
    weights.vector(layer + "input_layernorm.weight", config.hidden, 1);
    weights.vector(layer + "post_attention_layernorm.weight", config.hidden, 1);
    weights.matrix(layer + "self_attn.q_proj.weight", {q_width, config.hidden});
    weights.matrix(layer + "self_attn.k_proj.weight", {kv_width, config.hidden});
    weights.matrix(layer + "self_attn.v_proj.weight", {kv_width, config.hidden});
    weights.matrix(layer + "self_attn.o_proj.weight", {config.hidden, q_width});
    weights.matrix(layer + "mlp.gate_proj.weight", {config.intermediate, config.hidden});
    weights.matrix(layer + "mlp.up_proj.weight", {config.intermediate, config.hidden});
    weights.matrix(layer + "mlp.down_proj.weight", {config.hidden, config.intermediate});
  }
  weights.vector("norm.weight", config.hidden, 1);
  weights.add("embed_tokens.weight", {config.vocab_size, config.hidden}, 0, 1);
  weights.add("lm_head.weight", {config.vocab_size, config.hidden}, 0, 0.4f);
  return weights;
}

class RepeatedPasses : public testing::Cuda {
 protected:
  void SetUp() override {
    Cuda::SetUp();
    if (IsSkipped()) return;
    const LlamaConfig config = small_config();
    const reference::RandomWeights weights = make_weights(config);
    for (std::unique_ptr<Decoder>* decoder : {&repeats_, &never_}) {
      WeightMap map = weights.map();
      map.place_on(*gpu_);
      *decoder = make_llama(config, map, "");
    }
  }

  /// Two caches of one spec: one for each decoder, fed alike.
  struct Twins {
    std::unique_ptr<KvCache> repeated, plain;
    std::vector<SequenceId> ids;
    std::vector<int32_t> fed;
  };
  Twins twins(const std::string& spec) {
    Twins made;
    for (std::unique_ptr<KvCache>* cache : {&made.repeated, &made.plain}) {
      *cache =
          make_cache(plan_cache(parse_spec(spec), repeats_->cache_shape()), size_t{64} << 20, kGpu);
    }
    return made;
  }
  void open(Twins& t, int rows) {
    const SequenceSize size{rows, rows / 2, rows + 300};
    t.ids.push_back(t.repeated->open(size, "s"));
    ASSERT_EQ(t.plain->open(size, "s"), t.ids.back());
    std::vector<int16_t> tags(static_cast<size_t>(rows), kTextRow);
    std::fill_n(tags.begin(), rows / 2, int16_t{0});
    const StepRows step{t.ids.back(), rows, true, true, tags};
    pass(t, {&step, 1}, following_positions(0, static_cast<size_t>(rows)));
    t.fed.push_back(rows);
  }
  /// A token more for every sequence.
  void step(Twins& t) {
    std::vector<StepRows> rows;
    std::vector<Position> positions;
    for (size_t i = 0; i < t.ids.size(); ++i) {
      rows.push_back({t.ids[i], 1, false, false, {}});
      positions.push_back(Position::on_every_axis(t.fed[i]));
    }
    pass(t, rows, positions);
    for (int32_t& fed : t.fed) ++fed;
  }
  void pass(Twins& t, std::span<const StepRows> rows, std::span<const Position> positions) {
    const auto count = static_cast<int64_t>(positions.size());
    const Tensor numbers = testing::normal_tensor(DType::kF32, {count, 64}, ++seed_);
    const auto run = [&](Decoder& decoder, KvCache& cache, Tensor& x, const Tap& tap) {
      const TensorView own = x.view().slice(0, count);
      copy(own, numbers, *gpu_);
      return on_host(decoder.forward({rows, positions, own}, cache, *gpu_, tap));
    };
    const Tensor expected = run(*never_, *t.plain, x_[0], [](std::string_view, ConstTensorView) {});
    const Tensor found = run(*repeats_, *t.repeated, x_[1], {});
    ASSERT_EQ(testing::values_of(found), testing::values_of(expected)) << "pass " << seed_;
  }

  std::unique_ptr<Decoder> repeats_, never_;
  Tensor x_[2] = {device_rows(), device_rows()};
  uint32_t seed_ = 0;

 private:
  static Tensor device_rows() {
    return cuda::device_count() == 0 ? Tensor() : Tensor(DType::kF32, {256, 64}, kGpu);
  }
};

/// Sequences join, prompts move buffers, another cache takes its turns, scratch memory grows.
TEST_F(RepeatedPasses, GiveTheSameLogits) {
  for (const char* spec : {"f16", "kivi,group=16,residual=32", "calibquant,bits=2", "int4",
                           "vidkv,group=16,residual=32", "prefixkv,keep=0.5", "h2o,keep=0.5",
                           "tova,keep=0.5", "calibquant,bits=2 + int4,scope=text",
                           "h2o,keep=0.5 + int4", "tova,keep=0.5 + kivi,group=16,residual=32"}) {
    SCOPED_TRACE(spec);
    Twins first = twins(spec);
    Twins second = twins(spec);
    open(first, 70);
    for (int i = 0; i < 40; ++i) step(first);
    open(first, 131);
    for (int i = 0; i < 30; ++i) step(first);
    gpu_->queue().scratch(0, (size_t{1} << 20) << (seed_ % 8));
    for (int i = 0; i < 12; ++i) step(first);
    open(second, 33);
    for (int i = 0; i < 12; ++i) {
      step(first);
      step(second);
    }
    for (int i = 0; i < 90; ++i) step(second);
    if (HasFatalFailure()) return;
    EXPECT_EQ(first.repeated->bytes(), first.plain->bytes());
    EXPECT_EQ(second.repeated->bytes(), second.plain->bytes());
  }
}

/// Counts the passes that were replayed.
class CountedCache final : public test::WatchedCache {
 public:
  using WatchedCache::WatchedCache;
  uint64_t repetition() const noexcept override { return cache().repetition(); }
  void repeated() noexcept override {
    ++count_;
    cache().repeated();
  }
  int count() const noexcept { return count_; }

 private:
  int count_ = 0;
};

/// As a service steps the sequences of several cache policies.
TEST_F(RepeatedPasses, AreRecordedForCachesThatTakeTurns) {
  std::vector<Twins> all;
  std::vector<const CountedCache*> counted;
  for (const char* spec : {"f16", "int4", "kivi,group=16,residual=64", "f32"}) {
    Twins& made = all.emplace_back(twins(spec));
    auto cache = std::make_unique<CountedCache>(
        std::make_unique<PolicyCache>(plan_cache(parse_spec(spec), repeats_->cache_shape()),
                                      std::make_shared<Arena>(kGpu, size_t{64} << 20)));
    counted.push_back(cache.get());
    made.repeated = std::move(cache);
    open(made, 40);
  }
  for (int i = 0; i < 20; ++i) {
    for (Twins& each : all) step(each);
  }
  for (const CountedCache* cache : counted) EXPECT_GE(cache->count(), 15) << cache->spec();
}

/// Steps of so many sequences that their angles are looked up.
TEST_F(RepeatedPasses, GiveTheSameLogitsToMany) {
  Twins t = twins("f16");
  for (int i = 0; i < 33; ++i) open(t, 5 + i % 3);
  for (int i = 0; i < 20; ++i) step(t);
}

/// Angles of many rows are looked up on the GPU, those of few or beyond the table are uploaded, and
/// the gates of many are taken inside their product where it is wide: all as the CPU has it.
TEST_F(RepeatedPasses, GiveTheLogitsOfTheCpu) {
  const LlamaConfig config = small_config(1024, 2056);
  const reference::RandomWeights weights = make_weights(config);
  WeightMap map = weights.map();
  const std::unique_ptr<Decoder> on_cpu = make_llama(config, map, "");
  WeightMap gpu_map = weights.map();
  gpu_map.place_on(*gpu_);
  const std::unique_ptr<Decoder> on_gpu = make_llama(config, gpu_map, "");
  for (const auto& [rows, first] : {std::pair{31, 7}, {32, 7}, {70, 400}, {40, 490}}) {
    const Tensor numbers = testing::normal_tensor(DType::kF32, {rows, config.hidden}, 5);
    const std::vector<int16_t> tags(static_cast<size_t>(rows), kTextRow);
    const auto logits = [&](Decoder& decoder, Device device, Stream& stream) {
      const auto cache = make_cache(plan_cache(parse_spec("f16"), decoder.cache_shape()),
                                    size_t{16} << 20, device);
      const StepRows step{cache->open({rows, 0, rows}, "s"), rows, true, true, tags};
      Tensor x(DType::kF32, numbers.shape(), device);
      copy(x, numbers, stream);
      return on_host(
          decoder.forward({{&step, 1}, following_positions(first, static_cast<size_t>(rows)), x},
                          *cache, stream, {}));
    };
    EXPECT_LE(error(logits(*on_gpu, kGpu, *gpu_), logits(*on_cpu, Device{}, cpu_)), 2e-2)
        << rows << " rows from " << first;
  }
}

/// A step that fails leaves a cache whose other sequences can be served on.
TEST_F(RepeatedPasses, GoOnAfterOneHasFailed) {
  Twins t = twins("f16");
  open(t, 40);
  for (int i = 0; i < 20; ++i) step(t);
  const StepRows too_far{t.ids[0], 1, false, false, {}};
  for (KvCache* cache : {t.repeated.get(), t.plain.get()}) {
    cache->begin({&too_far, 1}, *gpu_);  // and nothing more
  }
  for (int i = 0; i < 20; ++i) step(t);
}

}  // namespace
}  // namespace kvlm
