#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "tests/kvcache/retention/rules.h"

namespace kvlm {
namespace {

using namespace kvlm::testing;  // NOLINT(google-build-using-namespace)
using ::testing::DoubleNear;
using ::testing::ElementsAre;
using ::testing::Pointwise;

constexpr int kRows = 8;
const std::vector<int16_t> kOneImage = {-1, 0, 0, 0, 0, -1, -1, -1};
const std::vector<int16_t> kTwoImages = {-1, 0, 0, -1, 1, 1, -1, -1};

/// Attention of two layers, two heads and small exact inputs, as the cache sums it.
class Example {
 public:
  explicit Example(const std::vector<int16_t>& modality) {
    prompt.shape = {
        .layers = 2, .q_heads = 2, .kv_heads = 2, .head_dim = 4, .rope_frequencies = {}};
    prompt.rows = kRows;
    prompt.modality = modality;
    int first = kRows;
    while (modality[static_cast<size_t>(first - 1)] == kTextRow) --first;
    for (int layer = 0; layer < 2; ++layer) {
      std::vector<double> weight(kRows, 1.0);
      const std::vector<double> plain = sums(layer, first, weight);
      for (int i = first; i < kRows; ++i) {
        const auto at = static_cast<size_t>(i);
        weight[at] = (plain[at] + plain[at + kRows]) / 2 / (kRows - i);
      }
      const std::vector<double> weighted = sums(layer, first, weight);
      prompt.importance.insert(prompt.importance.end(), plain.begin(), plain.end());
      prompt.weighted.insert(prompt.weighted.end(), weighted.begin(), weighted.end());
    }
  }

  /// Kept rows of both layers.
  std::vector<std::vector<int32_t>> kept(Options options) const {
    options.emplace_back("last", "1");
    std::vector<std::vector<int32_t>> rows;
    for (const LayerSelection& layer :
         testing::select(*make_rule(retention::tgv, std::move(options)), prompt)) {
      EXPECT_EQ(layer.slots.size(), 1u);
      rows.push_back(layer.slots[0]);
    }
    return rows;
  }
  /// (rows,) of a list of a layer, mean over heads.
  std::vector<double> mean(const std::vector<double>& lists, int layer) const {
    std::vector<double> made;
    for (size_t j = 0; j < kRows; ++j) {
      const size_t at = static_cast<size_t>(layer) * 2 * kRows + j;
      made.push_back((lists[at] + lists[at + kRows]) / 2);
    }
    return made;
  }

  Prompt prompt;

 private:
  static double entry(int a, int b, int c, int m, int row, int head, int channel, int layer) {
    const double whole = (a * row + b * head + c * channel + layer) % m - m / 2;
    return layer == 0 ? whole / 4 : whole;
  }
  /// (heads, rows) sums over the rows from `first` on.
  static std::vector<double> sums(int layer, int first, const std::vector<double>& weight) {
    std::vector<double> all(2 * kRows);
    for (int h = 0; h < 2; ++h) {
      for (int i = first; i < kRows; ++i) {
        std::vector<double> looks;
        double sum = 0;
        for (int j = 0; j <= i; ++j) {
          double product = 0;
          for (int d = 0; d < 4; ++d) {
            product += entry(7, 3, 5, 11, i, h, d, layer) * entry(5, 4, 3, 13, j, h, d, layer);
          }
          looks.push_back(std::exp(product / 2));
          sum += looks.back();
        }
        for (size_t j = 0; j < looks.size(); ++j) {
          all[static_cast<size_t>(h * kRows) + j] +=
              weight[static_cast<size_t>(i)] * looks[j] / sum;
        }
      }
    }
    return all;
  }
};

/// The numbers of a numpy model of the formulas (docs/formulas.md, "TGV-KV").
TEST(Tgv, EqualsTheWorkedExample) {
  const Example example(kOneImage);
  const std::vector<double> plain0 = {.387948, .493160, .375176, .388154,
                                      .479910, .402030, .298034, .175589};
  EXPECT_THAT(example.mean(example.prompt.importance, 0), Pointwise(DoubleNear(2e-6), plain0));
  const std::vector<std::vector<double>> visual = {{.072282, .055387, .060733, .073904},
                                                   {.016655, .056810, .009020, .064055}};
  for (int layer = 0; layer < 2; ++layer) {
    std::vector<double> found = example.mean(example.prompt.weighted, layer);
    found = {found.begin() + 1, found.begin() + 5};
    EXPECT_THAT(found, Pointwise(DoubleNear(2e-6), visual[static_cast<size_t>(layer)]));
  }
  const auto rule = make_rule(retention::tgv, {});
  EXPECT_TRUE(rule->joint());
  EXPECT_TRUE(rule->needs().weighted_sums);
  EXPECT_EQ(rule->needs().rows, ImportanceNeeds::Rows::kPostVision);

  EXPECT_THAT(example.kept({{"keep", ".75"}}),
              ElementsAre(ElementsAre(0, 4, 5, 6, 7), ElementsAre(0, 1, 2, 4, 5, 6, 7)));
  EXPECT_THAT(example.kept({{"keep", ".625"}}),
              ElementsAre(ElementsAre(0, 5, 6, 7), ElementsAre(0, 2, 4, 5, 6, 7)));
  EXPECT_THAT(example.kept({{"keep", ".5"}}),
              ElementsAre(ElementsAre(0, 5, 7), ElementsAre(0, 4, 5, 6, 7)));
  EXPECT_THAT(example.kept({{"keep", ".25"}}),
              ElementsAre(ElementsAre(0, 5, 7), ElementsAre(0, 5, 7)));
  const Options clipped = {{"keep", ".25"}, {"budgets", "clipped"}};
  EXPECT_THAT(example.kept(clipped), ElementsAre(ElementsAre(0, 7), ElementsAre(0, 7)));
  Options sinks = clipped;
  sinks.emplace_back("sinks", "4");
  EXPECT_THAT(example.kept(sinks),
              ElementsAre(ElementsAre(0, 1, 2, 3, 7), ElementsAre(0, 1, 2, 3, 7)));
}

TEST(Tgv, KnowsImagesByTheirTags) {
  EXPECT_THAT(Example(kTwoImages).kept({{"keep", ".75"}}),
              ElementsAre(ElementsAre(0, 1, 3, 4, 6, 7), ElementsAre(0, 2, 3, 4, 6, 7)));
}

/// One layer's attention to the image by share, whatever its tokens: the budgets of the rows.
std::vector<int> budgets_of(const std::vector<double>& shares, const char* keep) {
  Prompt prompt;
  prompt.shape = {.layers = static_cast<int>(shares.size()),
                  .q_heads = 1,
                  .kv_heads = 1,
                  .head_dim = 1,
                  .rope_frequencies = {}};
  prompt.rows = 10;
  prompt.modality = {-1, 0, 0, 0, 0, 0, 0, 0, 0, -1};
  for (const double share : shares) {
    prompt.importance.insert(prompt.importance.end(), {.5, share, 0, 0, 0, 0, 0, 0, 0, .5});
  }
  prompt.weighted = prompt.importance;
  return kept(testing::select(*make_rule(retention::tgv, {{"keep", keep}, {"last", "1"}}), prompt));
}

TEST(Tgv, DividesTheExactTotalByDemand) {
  EXPECT_THAT(budgets_of({.7, .2, .1}, ".5"), ElementsAre(9, 3, 3));      // 15 of 30
  EXPECT_THAT(budgets_of({.7, .2, .1}, ".8"), ElementsAre(10, 9, 5));     // 24
  EXPECT_THAT(budgets_of({.5, .3, .2}, ".43333"), ElementsAre(6, 4, 3));  // 13
  EXPECT_THAT(budgets_of({0, 0, 0}, ".53333"), ElementsAre(6, 5, 5));     // 16
}

/// The published code, of which N = 100, f = 0.6 and 40 kept tokens, 7 of them after the images:
/// tokens go after steps 2, 4 and 5, the least attended but the first 4 and the newest 7.
TEST(Tgv, EvictsByStepAsPublished) {
  const auto rule = make_rule(retention::tgv, {{"keep", ".4"}, {"profile", "official"}});
  EXPECT_EQ(rule->needs().decode_weights, ImportanceNeeds::DecodeWeights::kOfStep);
  std::vector<float> weights(64, 1);
  for (const int slot : {0, 3, 36, 41}) weights[static_cast<size_t>(slot)] = 0.25f;
  weights[20] = 0.5f;
  DecodeView view;
  view.rows = view.kept = 40;
  view.prompt_rows = 100;
  view.forget = 0.6;
  view.tail = 7;
  std::vector<int> rows;
  for (view.step = 1; view.step <= 5; ++view.step) {
    ++view.rows;
    view.weights = std::span(weights).first(static_cast<size_t>(view.rows));
    const int slot = rule->evict(view);
    if (slot < 0) continue;
    // Slot 36 is one of the newest 7 until there are 44.
    EXPECT_EQ(slot, 20) << view.step;
    rows.push_back(--view.rows);
  }
  EXPECT_EQ(view.step, 6);
  EXPECT_THAT(rows, ElementsAre(41, 42, 42));
  view.rows = 44;
  view.step = 5;
  view.weights = std::span(weights).first(44);
  EXPECT_EQ(rule->evict(view), 36);
}

TEST(Tgv, KeepsAsManyNewestTokensAsTextAfterTheImages) {
  const Example example(kOneImage);
  const auto rule = make_rule(retention::tgv, {{"keep", ".5"}, {"last", "1"}});
  std::vector<int> tails;
  for (const auto& layer : testing::select(*rule, example.prompt)) tails.push_back(layer.tail);
  EXPECT_THAT(tails, ElementsAre(2, 3));  // of 0 5 7 and of 0 4 5 6 7
}

/// Without images, or without text after them, all tokens rank by attention in equal budgets.
TEST(Tgv, WithoutAQuestionAfterAnImageBudgetsAreEqual) {
  for (const std::vector<int16_t>& modality :
       {std::vector<int16_t>(6, kTextRow), std::vector<int16_t>{-1, -1, -1, 0, 0, 0}}) {
    Prompt prompt = prompt_of({{.1, .9, .2, .8, .3, .1}, {9, 1, 8, 2, 7, 3}});
    prompt.modality = modality;
    prompt.weighted = prompt.importance;
    const auto rule = make_rule(retention::tgv, {{"keep", ".5"}, {"last", "1"}});
    const auto selections = testing::select(*rule, prompt);
    EXPECT_THAT(selections[0].slots[0], ElementsAre(0, 1, 5));
    EXPECT_THAT(selections[1].slots[0], ElementsAre(0, 2, 5));
    EXPECT_EQ(selections[0].tail, 1);
  }
}

}  // namespace
}  // namespace kvlm
