#include "tools/kv/attention_probe.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string_view>

#include "kvcache/make_cache.h"
#include "kvcache/spec/policy.h"
#include "tests/kvcache/feeder.h"
#include "tests/kvcache/plans.h"
#include "tests/watched_cache.h"

namespace kvlm {
namespace {

using namespace testlife;

constexpr size_t kArena = size_t{4} << 20;
const CacheShape kShape = shape_of(2, 2, 2, 16);

std::unique_ptr<PolicyCache> policy(const std::string& spec) {
  return std::make_unique<PolicyCache>(test::plan_of(spec, kShape), kArena, Device{});
}

AttentionProbe probe_of(const std::string& spec) {
  std::vector<std::unique_ptr<PolicyCache>> policies;
  policies.push_back(policy(spec));
  return {make_cache(test::plan_of("f16", kShape), kArena, Device{}), std::move(policies)};
}

/// Feeds a prompt and `steps` generated rows.
void feed(KvCache& cache, Feeder& feeder, const std::vector<int16_t>& prompt, int steps) {
  const SequenceId id = cache.open(size_of(prompt, steps), "s");
  feeder.pass(cache, {{'a', id, 0, prompt, true}});
  for (int step = 0; step < steps; ++step) {
    feeder.pass(cache, {{'a', id, static_cast<int>(prompt.size()) + step, {kTextRow}, false}});
  }
  cache.close(id);
}

TEST(AttentionProbe, PlainRowsHaveNoErrorAtAll) {
  Feeder feeder(kShape);
  AttentionProbe probe = probe_of("f16");
  const std::vector<int16_t> prompt = PromptShape{5, {23, 19}, 9}.modality();
  feed(probe, feeder, prompt, 40);
  for (const AttentionError& error : probe.errors(SequenceId{})[0]) {
    EXPECT_EQ(error.difference, 0);
    EXPECT_EQ(error.visual_difference, 0);
    EXPECT_EQ(error.text_difference, 0);
    EXPECT_GT(error.reference, 0);
    EXPECT_EQ(error.steps, 40);
    EXPECT_EQ(error.slots / error.steps, static_cast<double>(prompt.size()) + 20.5);
  }
  EXPECT_EQ(probe.scores(SequenceId{})[0].quantized, probe.scores(SequenceId{})[0].exact);
  EXPECT_EQ(probe.scores(SequenceId{})[0].calibrated, probe.scores(SequenceId{})[0].exact);
}

/// Plain rows of pictures that are stored apart from text are the same weights in another order.
TEST(AttentionProbe, WeightsAreOfTheSameRows) {
  Feeder feeder(kShape);
  AttentionProbe probe = probe_of("f16,scope=visual + kivi,residual=128,scope=text");
  feed(probe, feeder, PromptShape{5, {23, 19}, 9}.modality(), 40);
  for (const AttentionError& error : probe.errors(SequenceId{})[0]) {
    EXPECT_LT(error.weight_difference, 1e-20);
    EXPECT_EQ(error.weights, 4 * (57 * 40 + 820));  // heads, rows of 40 steps
  }
}

TEST(AttentionProbe, WeightsOfDroppedRowsAreNotCompared) {
  Feeder feeder(kShape);
  AttentionProbe probe = probe_of("streaming,keep=0.5");
  feed(probe, feeder, PromptShape{5, {23}, 9}.modality(), 4);
  for (const AttentionError& error : probe.errors(SequenceId{})[0]) {
    EXPECT_EQ(error.weights, 0);
    EXPECT_EQ(error.weight_difference, 0);
  }
}

/// Text, picture, text with weights 1/2, 1/4 and 1/4; held with the picture first as 1/2, 1/4 and
/// 1/4: differences 1/4, -1/4 and 0.
TEST(AttentionProbe, DifferenceOfWeightsByHand) {
  const std::vector<double> exact{0.5, 0.25, 0.25};
  const std::vector<int16_t> came{kTextRow, 0, kTextRow};
  const std::vector<int16_t> apart{0, kTextRow, kTextRow};
  const auto of = [&](const std::vector<int16_t>& tags) {
    return AttentionProbe::weight_difference(exact, came, {0.5, 0.25, 0.25}, tags);
  };
  EXPECT_EQ(of(apart), 0.125);
  EXPECT_EQ(of(came), 0);
  EXPECT_EQ(of({kTextRow, kTextRow, 0}), std::nullopt);  // in an order that no cache has
  EXPECT_EQ(AttentionProbe::weight_difference(exact, came, {0.5, 0.5}, {0, kTextRow}),
            std::nullopt);
}

/// At 1 bit no layer's weights are the exact ones.
TEST(AttentionProbe, FewBitsChangeWeights) {
  Feeder feeder(kShape);
  AttentionProbe probe = probe_of("kivi,bits=1,group=8,residual=8");
  feed(probe, feeder, PromptShape{5, {23}, 9}.modality(), 4);
  for (const AttentionError& error : probe.errors(SequenceId{})[0]) {
    EXPECT_GT(error.weight_difference, 1e-4);
    EXPECT_EQ(error.weights, 4 * (37 * 4 + 10));
  }
}

class AnyPolicy : public ::testing::TestWithParam<const char*> {};

TEST_P(AnyPolicy, IsMeasured) {
  // Its first layer is as the reference is.
  const bool has_exact_layer = std::string_view(GetParam()) == "int4 + f16,layers=0";
  Feeder feeder(kShape);
  AttentionProbe probe = probe_of(GetParam());
  feed(probe, feeder, PromptShape{5, {23, 19}, 9}.modality(), 40);
  const auto& errors = probe.errors(SequenceId{})[0];
  for (const AttentionError& error : errors) {
    if (has_exact_layer && &error == errors.data()) {
      EXPECT_EQ(error.difference, 0);
    } else {
      EXPECT_GT(error.difference, 0);
    }
    EXPECT_LT(error.difference, 10 * error.reference);
    EXPECT_TRUE(std::isfinite(error.visual_difference + error.text_difference));
    EXPECT_GT(error.slots, 40);
    EXPECT_LE(error.slots / error.steps, 57 + 20.5);
  }
}

TEST_P(AnyPolicy, IsMeasuredAlikeInCompany) {
  const std::vector<int16_t> one = PromptShape{5, {23, 19}, 9}.modality();
  const std::vector<int16_t> other = PromptShape{3, {31}, 4}.modality();
  Feeder feeder(kShape);
  AttentionProbe alone = probe_of(GetParam());
  feed(alone, feeder, one, 40);
  AttentionProbe together = probe_of(GetParam());
  const auto first = together.open(size_of(other, 25), "b");
  feeder.pass(together, {{'b', first, 0, other, true}});
  const auto second = together.open(size_of(one, 40), "a");
  feeder.pass(together, {{'a', second, 0, one, true}});
  for (int step = 0; step < 40; ++step) {
    std::vector<Feeder::Input> inputs;
    if (step < 25) {  // it leaves
      inputs.push_back({'b', first, static_cast<int>(other.size()) + step, {kTextRow}, false});
    }
    inputs.push_back({'a', second, static_cast<int>(one.size()) + step, {kTextRow}, false});
    feeder.pass(together, inputs);
  }
  for (size_t layer = 0; layer < 2; ++layer) {
    const AttentionError& a = alone.errors(SequenceId{})[0][layer];
    const AttentionError& b = together.errors(second)[0][layer];
    EXPECT_EQ(a.difference, b.difference);
    EXPECT_EQ(a.visual_difference, b.visual_difference);
    EXPECT_EQ(a.text_difference, b.text_difference);
    EXPECT_EQ(a.reference, b.reference);
    EXPECT_EQ(a.slots, b.slots);
    EXPECT_EQ(a.tokens, b.tokens);
    EXPECT_EQ(together.errors(first)[0][layer].steps, 25);
  }
  EXPECT_EQ(alone.scores(SequenceId{})[0].calibrated, together.scores(second)[0].calibrated);
}

INSTANTIATE_TEST_SUITE_P(Specs, AnyPolicy, ::testing::ValuesIn(kSpecs), name_of_spec);

/// An onlooker whose stored rows are looked at, and the parts of its attention found anew: with the
/// scores of each picture remapped by themselves, in the order of the tokens.
class PicturesOnTheirOwn final : public test::WatchedCache {
 public:
  explicit PicturesOnTheirOwn(const std::string& spec) : WatchedCache(policy(spec)) {}
  void begin(std::span<const StepRows> step, Stream& stream) override {
    for (const StepRows& rows : step) {
      if (rows.prompt) tags_.assign(rows.modality.begin(), rows.modality.end());
      if (!rows.prompt) tags_.push_back(kTextRow);
      decodes_ = !rows.prompt;
      id_ = rows.sequence;
    }
    WatchedCache::begin(step, stream);
  }
  void attend(int layer, ConstTensorView q, ConstTensorView k, ConstTensorView v, TensorView out,
              float scale, Stream& stream) override {
    const std::vector<float> queries(q.as<float>(), q.as<float>() + q.elements());
    WatchedCache::attend(layer, q, k, v, out, scale, stream);
    if (!decodes_) return;
    const size_t dim = 16;
    for (size_t head = 0; head < 4; ++head) {
      const HeadRows rows = cache().inspect(id_, layer, stream)[head / 2];
      // Pictures come first, in the order of the prompt.
      std::vector<int16_t> tags;
      for (const int16_t image : {int16_t{0}, int16_t{1}}) {
        tags.insert(tags.end(), std::count(tags_.begin(), tags_.end(), image), image);
      }
      tags.insert(tags.end(), std::count(tags_.begin(), tags_.end(), kTextRow), kTextRow);
      std::vector<double> scores(tags.size());
      for (size_t j = 0; j < tags.size(); ++j) {
        for (size_t d = 0; d < dim; ++d) {
          scores[j] += static_cast<double>(queries[head * dim + d]) *
                       static_cast<double>(rows.keys[j * dim + d]) * static_cast<double>(scale);
        }
      }
      for (const int16_t image :
           {int16_t{0}, int16_t{1}}) {  // tau=1:2: [low, high] becomes [low - 1, high - 2]
        double low = 1e9;
        double high = -1e9;
        for (size_t j = 0; j < tags.size(); ++j) {
          if (tags[j] != image) continue;
          low = std::min(low, scores[j]);
          high = std::max(high, scores[j]);
        }
        const double slope = std::max(0.0, (high - 2 - (low - 1)) / (high - low));
        for (size_t j = 0; j < tags.size(); ++j) {
          if (tags[j] == image) scores[j] = (low - 1) + slope * (scores[j] - low);
        }
      }
      double sum = 0;
      for (double& score : scores) sum += score = std::exp(score);
      for (size_t d = 0; d < dim; ++d) {
        double visual = 0;
        double text = 0;
        for (size_t j = 0; j < tags.size(); ++j) {
          (tags[j] == kTextRow ? text : visual) +=
              scores[j] / sum * static_cast<double>(rows.values[j * dim + d]);
        }
        visual_.push_back(visual);
        text_.push_back(text);
        // What the cache itself has made of the same rows.
        ASSERT_NEAR(out.as<float>()[head * dim + d], visual + text, 1e-4);
      }
    }
  }
  /// Of every generated row, layer, query head and channel.
  const std::vector<double>& visual() const { return visual_; }
  const std::vector<double>& text() const { return text_; }

 private:
  SequenceId id_{};
  bool decodes_ = false;
  std::vector<int16_t> tags_;
  std::vector<double> visual_, text_;
};

TEST(AttentionProbe, RemapsEachPictureByItselfWhereThePolicyDoes) {
  const char* spec = "calibquant,bits=2,span=per_image,tau=1:2";
  const std::vector<int16_t> prompt = PromptShape{5, {23, 19}, 9}.modality();
  Feeder feeder(kShape);
  AttentionProbe probe = probe_of(spec);
  feed(probe, feeder, prompt, 20);
  PicturesOnTheirOwn own(spec);
  feed(own, feeder, prompt, 20);

  // The same of plain rows: the exact parts.
  const auto kept = [&](const Feeder::Input& input, int layer) {
    std::pair both{feeder.k(input, layer), feeder.v(input, layer)};
    for (float& x : both.first) x = to_float(to_f16(x));
    for (float& x : both.second) x = to_float(to_f16(x));
    return both;
  };
  std::vector<double> visual_difference(2);
  std::vector<double> text_difference(2);
  size_t at = 0;
  for (int step = 0; step < 20; ++step) {
    std::vector<int16_t> tags = prompt;
    tags.resize(prompt.size() + static_cast<size_t>(step) + 1, kTextRow);
    const Feeder::Input all{'a', {}, 0, tags, false};
    const Feeder::Input newest{'a', {}, static_cast<int>(tags.size()) - 1, {kTextRow}, false};
    for (int layer = 0; layer < 2; ++layer) {
      const auto [k, v] = kept(all, layer);
      const std::vector<float> q = feeder.q(newest, layer);
      for (size_t head = 0; head < 4; ++head) {
        const auto row = [&](size_t j) { return (j * 2 + head / 2) * 16; };
        std::vector<double> weight(tags.size());
        double sum = 0;
        for (size_t j = 0; j < tags.size(); ++j) {
          double score = 0;
          for (size_t d = 0; d < 16; ++d) {
            score += static_cast<double>(q[head * 16 + d]) * static_cast<double>(k[row(j) + d]);
          }
          sum += weight[j] = std::exp(score * static_cast<double>(feeder.scale()));
        }
        for (size_t d = 0; d < 16; ++d, ++at) {
          double visual = 0;
          double text = 0;
          for (size_t j = 0; j < tags.size(); ++j) {
            (tags[j] == kTextRow ? text : visual) +=
                weight[j] / sum * static_cast<double>(v[row(j) + d]);
          }
          visual_difference[static_cast<size_t>(layer)] += std::pow(own.visual()[at] - visual, 2);
          text_difference[static_cast<size_t>(layer)] += std::pow(own.text()[at] - text, 2);
        }
      }
    }
  }
  for (size_t layer = 0; layer < 2; ++layer) {
    const AttentionError& error = probe.errors(SequenceId{})[0][layer];
    EXPECT_GT(visual_difference[layer], 0.1);
    EXPECT_NEAR(error.visual_difference, visual_difference[layer], 1e-9);
    EXPECT_NEAR(error.text_difference, text_difference[layer], 1e-9);
  }
}

}  // namespace
}  // namespace kvlm
