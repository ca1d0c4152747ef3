#include "llm/llama.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <map>
#include <numeric>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/base/error.h"
#include "kvcache/make_cache.h"
#include "kvcache/plan/planner.h"
#include "kvcache/spec/spec.h"
#include "tests/allocations.h"
#include "tests/reference/dense.h"
#include "tests/reference/random_weights.h"

namespace kvlm {
namespace {

using reference::RandomWeights;
using reference::Row;
using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;

constexpr const char* kPrefix = "model.language_model.";

LlamaConfig small_config() {
  LlamaConfig config;
  config.layers = 2;
  config.hidden = 24;
  config.intermediate = 40;
  config.q_heads = 4;
  config.kv_heads = 2;
  config.head_dim = 6;
  config.vocab_size = 50;
  config.max_positions = 64;
  config.rms_eps = 1e-2f;  // large enough to be missed if it is not there
  config.rope.rotary_dim = 6;
  config.rope.max_positions = 64;
  config.rope.theta = 100;
  return config;
}

RandomWeights make_weights(const LlamaConfig& config, DType dtype = DType::kF32) {
  RandomWeights weights(dtype);
  const int q_width = config.q_heads * config.head_dim;
  const int kv_width = config.kv_heads * config.head_dim;
  const auto linear = [&](const std::string& name, int out, int in, bool bias) {
    weights.matrix(name + ".weight", {out, in});
    if (bias) weights.vector(name + ".bias", out, 0.1f);
  };
  const std::string prefix = kPrefix;
  for (int i = 0; i < config.layers; ++i) {
    const std::string layer = fmt::format("{}layers.{}.", prefix, i);
    weights.vector(layer + "input_layernorm.weight", config.hidden, 1);
    weights.vector(layer + "post_attention_layernorm.weight", config.hidden, 1);
    if (config.qk_norm) {
      weights.vector(layer + "self_attn.q_norm.weight", config.head_dim, 1);
      weights.vector(layer + "self_attn.k_norm.weight", config.head_dim, 1);
    }
    linear(layer + "self_attn.q_proj", q_width, config.hidden, config.qkv_bias);
    linear(layer + "self_attn.k_proj", kv_width, config.hidden, config.qkv_bias);
    linear(layer + "self_attn.v_proj", kv_width, config.hidden, config.qkv_bias);
    linear(layer + "self_attn.o_proj", config.hidden, q_width, config.output_bias);
    linear(layer + "mlp.gate_proj", config.intermediate, config.hidden, config.mlp_bias);
    linear(layer + "mlp.up_proj", config.intermediate, config.hidden, config.mlp_bias);
    linear(layer + "mlp.down_proj", config.hidden, config.intermediate, config.mlp_bias);
  }
  weights.vector(prefix + "norm.weight", config.hidden, 1);
  weights.add(prefix + "embed_tokens.weight", {config.vocab_size, config.hidden}, 0, 1);
  weights.add("lm_head.weight", {config.vocab_size, config.hidden}, 0, 0.4f);
  return weights;
}

/// The decoder in scalar double over one whole sequence: logits of every row.
std::vector<Row> reference_logits(const LlamaConfig& config, const RandomWeights& weights,
                                  std::span<const int32_t> ids, const char* head) {
  const std::string prefix = kPrefix;
  const auto hidden = static_cast<size_t>(config.hidden);
  const auto head_dim = static_cast<size_t>(config.head_dim);
  const auto q_heads = static_cast<size_t>(config.q_heads);
  const size_t q_per_kv = q_heads / static_cast<size_t>(config.kv_heads);
  const auto project = [&](const std::string& name, const Row& x) {
    return reference::linear(x, weights[name + ".weight"], weights.find(name + ".bias"));
  };
  const auto rotate = [&](Row& x, size_t position) {
    for (size_t first = 0; first < x.size(); first += head_dim) {
      for (size_t i = 0; i < head_dim / 2; ++i) {
        const double angle =
            static_cast<double>(position) *
            std::pow(config.rope.theta, -2.0 * static_cast<double>(i) / config.head_dim);
        const double a = x[first + i];
        const double b = x[first + i + head_dim / 2];
        x[first + i] = a * std::cos(angle) - b * std::sin(angle);
        x[first + i + head_dim / 2] = b * std::cos(angle) + a * std::sin(angle);
      }
    }
  };
  const auto norm_heads = [&](const std::string& name, Row& x) {
    for (size_t first = 0; first < x.size(); first += head_dim) {
      const auto at = x.begin() + static_cast<std::ptrdiff_t>(first);
      const Row normed = reference::rms_norm(Row(at, at + config.head_dim), weights[name],
                                             static_cast<double>(config.rms_eps));
      std::copy(normed.begin(), normed.end(), at);
    }
  };
  const std::span<const float> table = weights.find(prefix + "embed_tokens.weight").empty()
                                           ? weights["lm_head.weight"]
                                           : weights[prefix + "embed_tokens.weight"];
  std::vector<Row> x;
  for (const int32_t id : ids) {
    const auto row = table.subspan(static_cast<size_t>(id) * hidden, hidden);
    x.emplace_back(row.begin(), row.end());
  }
  for (int index = 0; index < config.layers; ++index) {
    const std::string layer = fmt::format("{}layers.{}.", prefix, index);
    std::vector<Row> queries;
    std::vector<Row> keys;
    std::vector<Row> values;
    for (size_t row = 0; row < x.size(); ++row) {
      const Row normed = reference::rms_norm(x[row], weights[layer + "input_layernorm.weight"],
                                             static_cast<double>(config.rms_eps));
      queries.push_back(project(layer + "self_attn.q_proj", normed));
      keys.push_back(project(layer + "self_attn.k_proj", normed));
      values.push_back(project(layer + "self_attn.v_proj", normed));
      if (config.qk_norm) {
        norm_heads(layer + "self_attn.q_norm.weight", queries.back());
        norm_heads(layer + "self_attn.k_norm.weight", keys.back());
      }
      rotate(queries.back(), row);
      rotate(keys.back(), row);
    }
    for (size_t row = 0; row < x.size(); ++row) {
      Row attended;
      for (size_t h = 0; h < q_heads; ++h) {
        const Row out = reference::attend(queries[row], h * head_dim, keys, values,
                                          h / q_per_kv * head_dim, row + 1, head_dim);
        attended.insert(attended.end(), out.begin(), out.end());
      }
      reference::add(x[row], project(layer + "self_attn.o_proj", attended));
      const Row normed =
          reference::rms_norm(x[row], weights[layer + "post_attention_layernorm.weight"],
                              static_cast<double>(config.rms_eps));
      Row inner = project(layer + "mlp.gate_proj", normed);
      const Row up = project(layer + "mlp.up_proj", normed);
      for (size_t i = 0; i < inner.size(); ++i) inner[i] = reference::silu(inner[i]) * up[i];
      reference::add(x[row], project(layer + "mlp.down_proj", inner));
    }
  }
  std::vector<Row> logits;
  for (const Row& row : x) {
    const Row normed = reference::rms_norm(row, weights[prefix + "norm.weight"],
                                           static_cast<double>(config.rms_eps));
    logits.push_back(reference::linear(normed, weights[head], {}));
  }
  return logits;
}

/// A decoder, a cache and the ids that its sequences were fed.
class Passes {
 public:
  Passes(const LlamaConfig& config, WeightMap weights, int threads = 1)
      : pool_(threads),
        stream_(pool_),
        decoder_(make_llama(config, weights, kPrefix)),
        cache_(make_cache(plan_cache(parse_spec("f32"), decoder_->cache_shape()), 1 << 20, {})) {}

  Decoder& decoder() { return *decoder_; }
  KvCache& cache() { return *cache_; }
  Stream& stream() { return stream_; }

  size_t open() {
    sequences_.push_back({cache_->open({20, 0, 60}, "x"), {}});
    return sequences_.size() - 1;
  }
  const std::vector<int32_t>& ids(size_t sequence) const { return sequences_[sequence].ids; }

  struct Feed {
    size_t sequence;
    std::vector<int32_t> ids;
  };
  /// One pass; the logits as (rows, vocab). One id is a decode row, more are a prompt.
  std::vector<std::vector<float>> step(const std::vector<Feed>& feeds, bool all = false,
                                       const Tap& tap = {}, std::span<const AddedRows> added = {}) {
    std::vector<int32_t> ids;
    std::vector<Position> positions;
    std::vector<StepRows> rows;
    for (const Feed& feed : feeds) {
      Sequence& sequence = sequences_[feed.sequence];
      for (size_t i = 0; i < feed.ids.size(); ++i) {
        positions.push_back(Position::on_every_axis(static_cast<int32_t>(sequence.ids.size() + i)));
      }
      const bool prompt = feed.ids.size() > 1;
      rows.push_back({sequence.id, static_cast<int>(feed.ids.size()), prompt, prompt, {}});
      ids.insert(ids.end(), feed.ids.begin(), feed.ids.end());
      sequence.ids.insert(sequence.ids.end(), feed.ids.begin(), feed.ids.end());
    }
    Tensor embeddings(DType::kF32, {static_cast<int64_t>(ids.size()), decoder_->hidden()});
    decoder_->embed(ids, embeddings, stream_);
    const ConstTensorView logits =
        decoder_->forward({rows, positions, embeddings, all, added}, *cache_, stream_, tap);
    std::vector<std::vector<float>> result;
    for (int64_t row = 0; row < logits.shape()[0]; ++row) {
      const float* values = logits.slice(row, 1).as<float>();
      result.emplace_back(values, values + decoder_->vocab_size());
    }
    return result;
  }

 private:
  struct Sequence {
    SequenceId id;
    std::vector<int32_t> ids;
  };
  ThreadPool pool_;
  Stream stream_;
  std::unique_ptr<Decoder> decoder_;
  std::unique_ptr<KvCache> cache_;
  std::vector<Sequence> sequences_;
};

void expect_near(const std::vector<float>& ours, const Row& expected, const std::string& what) {
  ASSERT_EQ(ours.size(), expected.size());
  for (size_t i = 0; i < ours.size(); ++i) {
    ASSERT_NEAR(static_cast<double>(ours[i]), expected[i], 5e-5) << what << ", logit " << i;
  }
}

struct Variant {
  std::string name;
  LlamaConfig config;
  DType dtype = DType::kF32;
};

std::vector<Variant> variants() {
  std::vector<Variant> all = {{"gqa", small_config()}};
  Variant mha{"mha", small_config()};
  mha.config.kv_heads = 4;
  all.push_back(mha);
  Variant one{"one_kv_head", small_config()};
  one.config.kv_heads = 1;
  all.push_back(one);
  Variant wide{"head_dim_of_its_own", small_config()};
  wide.config.head_dim = wide.config.rope.rotary_dim = 10;
  all.push_back(wide);
  Variant biases{"biases_everywhere", small_config()};
  biases.config.qkv_bias = biases.config.output_bias = biases.config.mlp_bias = true;
  all.push_back(biases);
  Variant qkv{"qkv_bias_only", small_config()};
  qkv.config.qkv_bias = true;
  all.push_back(qkv);
  Variant norms{"norms_of_heads", small_config()};
  norms.config.qk_norm = true;
  norms.config.head_dim = norms.config.rope.rotary_dim = 10;  // Qwen3's is not hidden / heads
  all.push_back(norms);
  all.push_back({"f16", biases.config, DType::kF16});
  all.push_back({"bf16", biases.config, DType::kBF16});
  return all;
}

/// Keys cannot be turned to another place where places are three numbers.
TEST(Llama, GivesACacheItsFrequenciesOnOneAxisOnly) {
  LlamaConfig config = small_config();
  EXPECT_EQ(llama_cache_shape(config).rope_frequencies.size(),
            static_cast<size_t>(config.rope.rotary_dim) / 2);
  config.rope.sections = {1, 1, config.rope.rotary_dim / 2 - 2};
  EXPECT_TRUE(llama_cache_shape(config).rope_frequencies.empty());
}

/// Deepstack (Qwen3-VL): after their layer, on their rows, nowhere else; in a pass of several
/// sequences too, and with the rows that a chunk of a prompt holds.
TEST(Llama, AddsRowsAfterTheirLayer) {
  const LlamaConfig config = small_config();
  const RandomWeights weights = make_weights(config, DType::kF32);
  Tensor values(DType::kF32, {3, config.hidden});
  for (int64_t i = 0; i < 3 * config.hidden; ++i) {
    values.as<float>()[i] = std::sin(static_cast<float>(i));
  }
  const auto states = [&](std::span<const AddedRows> added) {
    Passes run(config, weights.map());
    const size_t a = run.open();
    const size_t b = run.open();
    std::map<std::string, std::vector<float>, std::less<>> seen;
    run.step(
        {{a, {1, 2, 3, 4}}, {b, {5, 6, 7, 8, 9}}}, true,
        [&](std::string_view name, ConstTensorView x) {
          seen.emplace(name, std::vector<float>(x.as<float>(), x.as<float>() + x.elements()));
        },
        added);
    return seen;
  };
  const AddedRows rows{0, 5, values};
  const auto plain = states({});
  const auto added = states({&rows, 1});
  const auto width = static_cast<size_t>(config.hidden);
  EXPECT_EQ(added.at("llm.layer.0"), plain.at("llm.layer.0")) << "the tap is the layer's own";
  // Layer 1 of the other sequence and of earlier rows knows nothing of it; later rows do.
  const auto same = [&](size_t row) {
    const auto at = static_cast<std::ptrdiff_t>(row * width);
    const auto& a = plain.at("llm.layer.1");
    const auto& b = added.at("llm.layer.1");
    return std::equal(a.begin() + at, a.begin() + at + config.hidden, b.begin() + at);
  };
  for (size_t row = 0; row < 9; ++row) EXPECT_EQ(same(row), row < 5) << row;

  // What is added after the last layer is in what the last norm takes, and nowhere else.
  const AddedRows last{config.layers - 1, 5, values};
  const auto behind = states({&last, 1});
  const auto& before = plain.at("llm.layer.1");
  const auto magnitude = [&](const auto& value_of) {
    double squares = 0;
    for (size_t i = 0; i < width; ++i) squares += value_of(i) * value_of(i);
    return std::sqrt(squares / static_cast<double>(width) + static_cast<double>(config.rms_eps));
  };
  for (size_t row = 0; row < 9; ++row) {
    const auto was = [&](size_t i) { return static_cast<double>(before[row * width + i]); };
    const auto is = [&](size_t i) {
      const bool ours = row >= 5 && row < 8;
      return was(i) + (ours ? static_cast<double>(values.as<float>()[(row - 5) * width + i]) : 0.0);
    };
    for (size_t i = 0; i < width; ++i) {
      if (std::abs(was(i)) < 1e-2) continue;  // the norm's weight is found by dividing by it
      const double expected = static_cast<double>(plain.at("llm.norm")[row * width + i]) / was(i) *
                              magnitude(was) * is(i) / magnitude(is);
      ASSERT_NEAR(behind.at("llm.norm")[row * width + i], expected,
                  1e-4 * std::max(1.0, std::abs(expected)))
          << "row " << row << ", " << i;
    }
  }
}

class LlamaParity : public testing::TestWithParam<Variant> {};

/// Prompts and generated rows of several sequences in the same passes.
TEST_P(LlamaParity, LogitsEqualTheScalarReference) {
  const LlamaConfig& config = GetParam().config;
  const RandomWeights weights = make_weights(config, GetParam().dtype);
  Passes run(config, weights.map());
  const size_t a = run.open();
  const size_t b = run.open();
  const auto check = [&](const std::vector<std::vector<float>>& logits,
                         const std::vector<size_t>& sequences) {
    ASSERT_EQ(logits.size(), sequences.size());
    for (size_t i = 0; i < sequences.size(); ++i) {
      const auto expected =
          reference_logits(config, weights, run.ids(sequences[i]), "lm_head.weight");
      expect_near(logits[i], expected.back(), fmt::format("sequence {}", sequences[i]));
    }
  };
  check(run.step({{a, {3, 14, 15, 9, 26}}}), {a});
  check(run.step({{b, {7, 49, 0}}, {a, {5}}}), {b, a});
  check(run.step({{a, {35}}, {b, {8}}}), {a, b});
  std::vector<int32_t> longer(19);
  std::iota(longer.begin(), longer.end(), 20);
  check(run.step({{a, {9}}, {b, longer}}), {a, b});  // more rows than the streaming product takes
  check(run.step({{b, {1}}, {a, {2}}}), {b, a});
}

TEST_P(LlamaParity, AllLogitsAreThoseOfEveryRow) {
  const LlamaConfig& config = GetParam().config;
  const RandomWeights weights = make_weights(config, GetParam().dtype);
  Passes run(config, weights.map());
  const size_t a = run.open();
  const auto logits = run.step({{a, {3, 14, 15, 9}}}, /*all=*/true);
  const auto expected = reference_logits(config, weights, run.ids(a), "lm_head.weight");
  ASSERT_EQ(logits.size(), 4u);
  for (size_t row = 0; row < 4; ++row) {
    expect_near(logits[row], expected[row], fmt::format("row {}", row));
  }
}

INSTANTIATE_TEST_SUITE_P(, LlamaParity, testing::ValuesIn(variants()),
                         [](const auto& param) { return param.param.name; });

/// Neither the batch nor the threads change one bit of a sequence's logits.
TEST(Llama, LogitsDependOnTheSequenceAlone) {
  const LlamaConfig config = small_config();
  const RandomWeights weights = make_weights(config);
  const auto logits_of_a = [&](int threads, size_t others) {
    Passes run(config, weights.map(), threads);
    const size_t a = run.open();
    std::vector<std::vector<float>> logits = run.step({{a, {3, 14, 15, 9, 26}}});
    std::vector<Passes::Feed> feeds;
    for (size_t i = 0; i < others; ++i) {
      const size_t other = run.open();
      run.step({{other, {static_cast<int32_t>(i), 5, 6}}});
      feeds.push_back({other, {static_cast<int32_t>(10 + i)}});
    }
    const size_t place = others / 2;
    feeds.insert(feeds.begin() + static_cast<std::ptrdiff_t>(place), {a, {}});
    for (int32_t step = 0; step < 8; ++step) {
      feeds[place].ids = {20 + step};
      logits.push_back(run.step(feeds)[place]);
    }
    return logits;
  };
  const auto alone = logits_of_a(1, 0);
  for (const int threads : {1, 2, 3, 5}) {
    for (const size_t others : {0, 1, 7, 15}) {
      EXPECT_EQ(logits_of_a(threads, others), alone)
          << threads << " threads, " << others << " others";
    }
  }
}

TEST(Llama, TiesTheTablesAsTheCheckpointHasThem) {
  LlamaConfig config = small_config();
  const std::string embed = std::string(kPrefix) + "embed_tokens.weight";
  const std::vector<int32_t> ids = {3, 14, 15};
  const auto last = [&](const RandomWeights& weights) {
    Passes run(config, weights.map());
    return run.step({{run.open(), ids}}).back();
  };
  const size_t table = 4 * 50 * 24;

  config.tie_embeddings = true;
  RandomWeights both_differ = make_weights(config);  // the flag is wrong: presence decides
  expect_near(last(both_differ),
              reference_logits(config, both_differ, ids, "lm_head.weight").back(),
              "both, different");
  RandomWeights both_equal = make_weights(config);
  both_equal.copy(embed, "lm_head.weight");
  expect_near(last(both_equal), reference_logits(config, both_equal, ids, embed.c_str()).back(),
              "both, equal");
  RandomWeights embed_only = make_weights(config);
  embed_only.remove("lm_head.weight");
  expect_near(last(embed_only), reference_logits(config, embed_only, ids, embed.c_str()).back(),
              "embeddings only");
  RandomWeights head_only = make_weights(config);
  head_only.remove(embed);
  expect_near(last(head_only), reference_logits(config, head_only, ids, "lm_head.weight").back(),
              "head only");
  const size_t tied = Passes(config, embed_only.map()).decoder().weight_bytes();
  EXPECT_EQ(Passes(config, both_equal.map()).decoder().weight_bytes(), tied);
  EXPECT_EQ(Passes(config, both_differ.map()).decoder().weight_bytes(), tied + table);

  config.tie_embeddings = false;
  EXPECT_THROW(last(embed_only), Error);
  EXPECT_THROW(last(head_only), Error);
}

TEST(Llama, CountsTheBytesOfItsWeights) {
  const LlamaConfig config = small_config();
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    Passes run(config, make_weights(config, dtype).map());
    const size_t layer = 24 * 24 + 2 * 12 * 24 + 24 * 24 + 3 * 40 * 24;
    EXPECT_EQ(run.decoder().step_weight_bytes(), dtype_bytes(dtype) * (2 * layer + 50 * 24));
    EXPECT_EQ(run.decoder().weight_bytes(), dtype_bytes(dtype) * (2 * layer + 2 * 50 * 24));
    EXPECT_EQ(run.decoder().weight_dtype(), dtype);
  }
}

TEST(Llama, SaysItsShape) {
  const LlamaConfig config = small_config();
  Passes run(config, make_weights(config).map());
  const CacheShape shape = run.decoder().cache_shape();
  EXPECT_EQ(shape.layers, 2);
  EXPECT_EQ(shape.q_heads, 4);
  EXPECT_EQ(shape.kv_heads, 2);
  EXPECT_EQ(shape.head_dim, 6);
  EXPECT_EQ(run.decoder().hidden(), 24);
  EXPECT_EQ(run.decoder().vocab_size(), 50);
  EXPECT_EQ(run.decoder().max_positions(), 64);
}

TEST(Llama, TakesExactlyItsWeights) {
  const LlamaConfig config = small_config();
  RandomWeights weights = make_weights(config);
  weights.vector("somebody.else", 3, 0);
  WeightMap map = weights.map();
  const auto decoder = make_llama(config, map, kPrefix);
  EXPECT_THAT(map.remaining(), ElementsAre("somebody.else"));
}

TEST(Llama, NamesAMissingOrMisshapenTensor) {
  const LlamaConfig config = small_config();
  RandomWeights missing = make_weights(config);
  missing.remove("model.language_model.layers.1.mlp.up_proj.weight");
  try {
    Passes run(config, missing.map());
    FAIL() << "expected an Error";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kCorruptFile);
    EXPECT_THAT(error.what(), HasSubstr("layers.1.mlp.up_proj.weight"));
  }
  LlamaConfig other = config;
  other.kv_heads = 4;
  try {
    Passes run(other, make_weights(config).map());
    FAIL() << "expected an Error";
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), AllOf(HasSubstr("layers.0.self_attn.k_proj.weight"), HasSubstr("12"),
                                    HasSubstr("24")));
  }
}

TEST(Llama, TapsEveryLayerInOrder) {
  const LlamaConfig config = small_config();
  Passes run(config, make_weights(config).map());
  std::vector<std::string> names;
  run.step({{run.open(), {1, 2, 3}}}, false, [&](std::string_view name, ConstTensorView view) {
    names.emplace_back(name);
    EXPECT_EQ(view.shape(), Shape({3, 24}));
  });
  EXPECT_THAT(names, ElementsAre("llm.layer.0", "llm.layer.1", "llm.norm"));
}

TEST(Llama, DecodeAllocatesNothing) {
  const LlamaConfig config = small_config();
  for (const int threads : {1, 3}) {
    Passes run(config, make_weights(config).map(), threads);
    constexpr int64_t kSequences = 4;
    std::vector<SequenceId> sequences;
    for (int64_t i = 0; i < kSequences; ++i) sequences.push_back(run.cache().open({1, 0, 60}, "x"));
    std::vector<int32_t> ids = {1, 2, 3, 4};
    Tensor embeddings(DType::kF32, {kSequences, config.hidden});
    const TensorView rows_of_step = embeddings;
    std::vector<StepRows> rows(kSequences);
    const Tap no_tap;
    std::vector<Position> positions(kSequences);
    const auto step = [&](int32_t position, bool prompt) {
      for (size_t i = 0; i < rows.size(); ++i) {
        rows[i] = {sequences[i], 1, prompt, prompt, {}};
        positions[i] = Position::on_every_axis(position);
      }
      run.decoder().embed(ids, rows_of_step, run.stream());
      run.decoder().forward({rows, positions, rows_of_step}, run.cache(), run.stream(), no_tap);
    };
    step(0, /*prompt=*/true);
    step(1, /*prompt=*/false);
    const size_t before = allocations();
    for (int32_t position = 2; position < 60; ++position) step(position, /*prompt=*/false);
    EXPECT_EQ(allocations() - before, 0u) << threads << " threads";
  }
}

}  // namespace
}  // namespace kvlm
