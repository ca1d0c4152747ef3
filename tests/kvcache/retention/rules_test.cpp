// What holds for every retention rule, whatever its options.
#include "tests/kvcache/retention/rules.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <numeric>

#include "kvcache/retention/common.h"
#include "tests/allocations.h"

namespace kvlm {
namespace {

using namespace kvlm::testing;  // NOLINT(google-build-using-namespace)

struct Rule {
  const RetentionEntry* entry;
  Options options;
  bool quantized = false;
  bool profiled = false;

  std::string str() const {
    std::string text(entry->info.name);
    for (const auto& [key, value] : options) text.append(",").append(key).append("=").append(value);
    return text + (quantized ? " quantized" : "") + (profiled ? " profiled" : "");
  }
};

/// Combinations of options that need a test of their own.
const std::vector<Rule>& special_rules() {
  static const std::vector<Rule> kRules = {
      {&retention::uniform, {{"sinks", "4"}, {"last", "7"}}},
      {&retention::uniform, {{"sinks", "30"}, {"last", "40"}}},
      {&retention::uniform, {{"evict", "window"}, {"sinks", "0"}, {"last", "40"}}},
      {&retention::uniform, {{"profile", "official"}}},
      {&retention::uniform, {{"profile", "paper"}}},
      {&retention::elastic, {{"profile", "official"}}},
      {&retention::elastic, {{"anchors", "inner"}, {"sinks", "30"}, {"last", "40"}}},
      {&retention::prefixkv, {{"mode", "online"}, {"profile", "official"}}},
      {&retention::prefixkv, {{"mode", "online"}, {"profile", "paper"}}},
      {&retention::prefixkv, {{"protect", "official"}, {"sinks", "4"}}},
      {&retention::prefixkv, {{"fit", "rescale"}}},
      {&retention::prefixkv, {{"evict", "none"}, {"sinks", "0"}}},
      {&retention::prefixkv, {{"merge", "feature"}, {"distance", "3"}}},
      {&retention::prefixkv, {}, false, /*profiled=*/true},
      {&retention::prefixkv, {{"evict", "none"}}, false, /*profiled=*/true},
      {&retention::streaming, {{"budget", "proportional"}, {"sinks", "1"}}},
      {&retention::h2o, {{"prefill_only", "on"}}},
      {&retention::h2o, {{"colmean", "on"}}},
      {&retention::snapkv, {{"window", "8"}}},
      {&retention::snapkv, {{"window", "8"}, {"evict", "score"}}},
      {&retention::snapkv, {{"window", "8"}, {"head_shared", "on"}, {"evict", "sliding"}}},
      {&retention::tgv, {{"budgets", "clipped"}, {"sinks", "30"}}},
      {&retention::mixkv, {{"window", "8"}}},
      {&retention::mixkv, {{"window", "8"}, {"head_shared", "on"}, {"evict", "score"}}},
      {&retention::pyramidkv, {{"window", "8"}}},
      {&retention::pyramidkv, {{"window", "8"}, {"evict", "fixed_index"}}},
      {&retention::pyramidkv, {{"window", "8"}, {"no_floor", "on"}, {"head_shared", "on"}}},
      {&retention::vlcache, {{"recent", "0"}, {"evict", "sliding"}}},
      {&retention::vlcache, {{"recent", "1"}, {"sinks", "30"}}},
      {&retention::vlcache, {{"head_shared", "off"}, {"evict", "score"}}},
      {&retention::vlcache, {{"profile", "paper"}}},
      {&retention::tova, {{"evict", "fixed_index"}, {"sinks", "3"}}},
      {&retention::tova, {{"evict", "score"}, {"sinks", "30"}}},
      {&retention::random, {{"head_shared", "on"}, {"seed", "7"}}},
      {&retention::pyramidinfer, {{"profile", "official"}}},
      {&retention::pyramidinfer, {{"profile", "paper"}, {"decay", "0.2"}, {"sinks", "0"}}},
      {&retention::pyramidinfer, {{"evict", "none"}, {"recent", "1"}, {"sinks", "30"}}},
  };
  return kRules;
}

/// Every registered rule as it is by default, alone and beside a quantizer, with one set of rows
/// for all heads and with each eviction of its own; and special_rules().
const std::vector<Rule>& rules() {
  static const std::vector<Rule> kRules = [] {
    std::vector<Rule> all;
    for (const RetentionEntry* entry : registered_rules()) {
      all.push_back({entry, {}});
      all.push_back({entry, {}, /*quantized=*/true});
      if (has_option(*entry, "head_shared")) all.push_back({entry, {{"head_shared", "on"}}});
      for (const OptionInfo& option : entry->info.options) {
        if (option.key != "evict") continue;
        for (const std::string_view rule : split_words(option.choices, '|')) {
          if (rule != option.standard) all.push_back({entry, {{"evict", std::string(rule)}}});
        }
      }
    }
    all.insert(all.end(), special_rules().begin(), special_rules().end());
    return all;
  }();
  return kRules;
}

constexpr std::array kKeeps = {"0.01", "0.1", "0.35", "0.5", "0.8", "0.99"};

struct Made {
  std::unique_ptr<Retention> rule;
  std::unique_ptr<PolicyProfile> profile;
};

Made make(const Rule& of, const std::string& keep, const CacheShape& shape, bool sharing = false) {
  Made made;
  Options options = of.options;
  options.emplace_back("keep", keep);
  PolicyContext context{.shape = &shape, .with_quantizer = of.quantized, .with_sharing = sharing};
  if (of.profiled) {
    made.profile = std::make_unique<PolicyProfile>();
    made.profile->forget_keep = std::stod(keep);
    for (int l = 0; l < shape.layers; ++l) {
      const double swing = (l % 2 == 0 ? 0.9 : -0.9) * std::min(0.5, 1 - std::stod(keep));
      made.profile->forget["means"].push_back(std::clamp(1 - std::stod(keep) + swing, 0.0, 1.0));
    }
    context.profile = made.profile.get();
  }
  made.rule = make_rule(*of.entry, options, context);
  return made;
}

void expect_valid(const Retention& rule, const Prompt& prompt, const LayerSelection& selection) {
  ASSERT_THAT(selection.slots.size(),
              rule.per_head() ? ::testing::Eq(static_cast<size_t>(prompt.shape.kv_heads))
                              : ::testing::Eq(size_t{1}));
  EXPECT_GE(selection.forget, 0);
  EXPECT_LE(selection.forget, 1);
  if (!selection.scores.empty()) {
    ASSERT_EQ(selection.scores.size(), selection.slots.size());
    for (const std::vector<float>& scores : selection.scores) {
      ASSERT_EQ(static_cast<int>(scores.size()), selection.kept());
    }
  }
  for (const std::vector<int32_t>& slots : selection.slots) {
    ASSERT_EQ(static_cast<int>(slots.size()), selection.kept());
    ASSERT_FALSE(slots.empty());
    EXPECT_GE(slots.front(), 0);
    EXPECT_EQ(slots.back(), prompt.rows - 1);
    for (size_t i = 1; i < slots.size(); ++i) ASSERT_LT(slots[i - 1], slots[i]);
  }
}

TEST(EveryRule, KeepsAscendingRowsAndTheLastOne) {
  for (const Rule& of : rules()) {
    for (const std::string keep : kKeeps) {
      for (const int n : {1, 2, 3, 4, 7, 8, 9, 40, 100}) {
        SCOPED_TRACE(of.str() + " keep " + keep + " of " + std::to_string(n));
        const Prompt prompt = random_prompt(4, 3, n, static_cast<unsigned>(n));
        const Made made = make(of, keep, prompt.shape);
        const auto selections = testing::select(*made.rule, prompt);
        ASSERT_EQ(selections.size(), 4u);
        for (const LayerSelection& selection : selections) {
          expect_valid(*made.rule, prompt, selection);
        }
      }
    }
  }
}

TEST(EveryRule, SelectsTheSameForOneLayerAsForAll) {
  for (const Rule& of : rules()) {
    const Prompt prompt = random_prompt(5, 2, 60, 3);
    const Made made = make(of, "0.4", prompt.shape);
    if (made.rule->joint()) continue;
    const auto all = made.rule->select(prompt.view(), {});
    const auto one_by_one = testing::select(*made.rule, prompt);
    ASSERT_EQ(all.size(), one_by_one.size()) << of.str();
    for (size_t l = 0; l < all.size(); ++l) {
      EXPECT_EQ(all[l].slots, one_by_one[l].slots) << of.str();
      EXPECT_EQ(all[l].forget, one_by_one[l].forget) << of.str();
    }
  }
}

TEST(EveryRule, PeakRowsBoundWhatALayerHolds) {
  std::mt19937 rng(1);
  std::uniform_real_distribution<float> unit;
  for (const Rule& of : rules()) {
    for (const std::string keep : kKeeps) {
      for (const int n : {1, 2, 3, 9, 40, 100}) {
        const Prompt prompt = random_prompt(6, 2, n, static_cast<unsigned>(n) + 7);
        for (const std::vector<int>& pairs :
             {std::vector<int>{}, std::vector<int>{0, 1, 2, 2, 4, 4}}) {
          const Made made = make(of, keep, prompt.shape, !pairs.empty());
          if (made.rule->per_head() && !pairs.empty()) continue;
          const auto selections = testing::select(*made.rule, prompt, pairs);
          std::vector<DecodingLayer> layers;
          for (const LayerSelection& selection : selections) {
            layers.emplace_back(*made.rule, prompt, selection);
          }
          for (int steps = 0; steps <= 150; ++steps) {
            int64_t sum = 0;
            int64_t held = 0;
            for (size_t l = 0; l < layers.size(); ++l) {
              const int peak =
                  made.rule->peak_rows(selections[l].kept(), selections[l].forget, n, n + steps);
              ASSERT_LE(layers[l].peak(), peak) << of.str() << " keep " << keep << " n " << n
                                                << " steps " << steps << " layer " << l;
              EXPECT_LE(peak, layers[l].peak() + 1);  // and is no idle promise
              sum += peak;
              held += layers[l].peak();
            }
            const int most = made.rule->peak_rows_of_layer(6, n, n + steps);
            for (const LayerSelection& of_layer : selections) {
              ASSERT_LE(made.rule->peak_rows(of_layer.kept(), of_layer.forget, n, n + steps), most)
                  << of.str() << " keep " << keep << " n " << n << " steps " << steps;
            }
            const int64_t total = made.rule->peak_rows_total(6, n, n + steps);
            ASSERT_LE(sum, total) << of.str() << " keep " << keep << " n " << n << " steps "
                                  << steps << " pairs " << pairs.size();
            const bool loses = of.str().find("budgets=clipped") != std::string::npos;
            if (n >= 40 && std::stod(keep) >= 0.1 && !loses) {
              // A rescaled fit ends within five rows of its total.
              EXPECT_LE(total, held + 5 * 6 + 5) << of.str();
            }
            for (DecodingLayer& layer : layers) layer.step(unit(rng));
          }
        }
      }
    }
  }
}

/// The prompt's question is at its end: it stays, when the prompt ends and in decode, unless the
/// rule is asked for as it was published.
TEST(EveryRule, SparesBothEndsOfThePromptByDefault) {
  for (const Rule& of : rules()) {
    if (!has_option(*of.entry, "last") || (!of.options.empty() && of.options[0].first != "seed"))
      continue;
    for (const int n : {120, 600}) {
      // Causal sums: the earlier a row, the more rows have looked at it.
      Prompt prompt = random_prompt(4, 2, n, 51);
      for (size_t i = 0; i < prompt.importance.size(); ++i) {
        prompt.importance[i] *=
            static_cast<double>(n) - static_cast<double>(i % static_cast<size_t>(n));
      }
      SCOPED_TRACE(of.str() + " of " + std::to_string(n));
      const Made made = make(of, "0.5", prompt.shape);
      for (const LayerSelection& selection : testing::select(*made.rule, prompt)) {
        const std::vector<int32_t>& slots = selection.slots.at(0);
        const int tail = std::min(16, selection.kept() / 2);
        EXPECT_EQ(slots.front(), 0);
        EXPECT_EQ(slots[slots.size() - static_cast<size_t>(tail)], n - tail);
        DecodingLayer layer(*made.rule, prompt, selection);
        for (int t = 1; t <= 60; ++t) {
          const int label = layer.step();
          EXPECT_NE(label, 0) << t;
          EXPECT_FALSE(label >= selection.kept() - tail && label < selection.kept())
              << label << " at " << t;
        }
      }
    }
  }
}

/// sinks= beyond the budget raises it, in every rule that has the option: sinks and the last row
/// stay when the prompt ends and in decode, whatever else is protected.
TEST(EveryRule, KeepsItsSinksBeyondTheBudget) {
  constexpr int kSinks = 30;
  for (const RetentionEntry* entry : registered_rules()) {
    if (!has_option(*entry, "sinks")) continue;
    for (const char* evict :
         {"auto", "step", "none", "score", "window", "fixed_index", "sliding"}) {
      for (const char* last : {"1", "16", "900"}) {
        Options options = {{"keep", "0.02"}, {"sinks", std::to_string(kSinks)}};
        if (has_option(*entry, "evict", evict)) options.emplace_back("evict", evict);
        if (has_option(*entry, "last")) options.emplace_back("last", last);
        if (has_option(*entry, "recent")) options.emplace_back("recent", "1");
        for (const int n : {kSinks + 1, kSinks + 2, 100, 600}) {
          SCOPED_TRACE(::testing::Message() << entry->info.name << " evict " << evict << " last "
                                            << last << " of " << n);
          const Prompt prompt = random_prompt(4, 2, n, static_cast<unsigned>(n));
          const auto rule = make_rule(*entry, options, {.shape = &prompt.shape});
          for (const LayerSelection& selection : testing::select(*rule, prompt)) {
            const std::vector<int32_t>& slots = selection.slots.at(0);
            ASSERT_GE(selection.kept(), kSinks + 1);
            EXPECT_LE(selection.kept(), kSinks + 2);
            EXPECT_EQ(slots[kSinks - 1], kSinks - 1);
            EXPECT_EQ(slots.back(), n - 1);
            DecodingLayer layer(*rule, prompt, selection);
            for (int t = 1; t <= 60; ++t) {
              const int label = layer.step();
              EXPECT_TRUE(label < 0 || label >= kSinks) << label << " at " << t;
            }
          }
        }
      }
    }
  }
}

/// Protected rows are inside the budget: they do not change how many rows stay.
TEST(EveryRule, KeepsAsManyRowsWhateverIsProtected) {
  for (const RetentionEntry* entry : registered_rules()) {
    if (!has_option(*entry, "last")) continue;
    for (const std::string keep : kKeeps) {
      for (const int n : {9, 40, 100, 600}) {
        const Prompt prompt = random_prompt(4, 2, n, static_cast<unsigned>(n) + 3);
        const auto sum = [&](const char* last) {
          const std::vector<int> rows = kept(testing::select(
              *make_rule(*entry, {{"keep", keep}, {"last", last}}, {.shape = &prompt.shape}),
              prompt));
          return std::accumulate(rows.begin(), rows.end(), 0);
        };
        EXPECT_EQ(sum("16"), sum("1")) << entry->info.name << " keep " << keep << " of " << n;
        EXPECT_EQ(sum("900"), sum("1")) << entry->info.name << " keep " << keep << " of " << n;
      }
    }
  }
}

TEST(EveryRule, EvictsAtMostOneOldRowAndAllocatesNothing) {
  std::vector<float> weights(400, 1.0f);
  for (const Rule& of : rules()) {
    const Prompt prompt = random_prompt(2, 1, 200, 5);
    const Made made = make(of, "0.3", prompt.shape);
    const auto selection = testing::select(*made.rule, prompt)[0];
    int rows = selection.kept();
    std::vector<float> scores(static_cast<size_t>(selection.kept()), 0.5f);
    const size_t before = allocations();
    bool evicted = false;
    for (int t = 1; t <= 120; ++t) {
      ++rows;
      const DecodeView view{.rows = rows,
                            .prompt_rows = 200,
                            .step = t,
                            .kept = selection.kept(),
                            .forget = selection.forget,
                            .scored = static_cast<int>(scores.size()),
                            .weights = {weights.data(), static_cast<size_t>(rows)}};
      int slot = made.rule->evict(view);
      EXPECT_TRUE(slot != kLeastScore || made.rule->evicts_by_score()) << of.str();
      if (slot == kLeastScore) slot = least_scored(*made.rule->least_weight(view), scores);
      EXPECT_GE(slot, -1) << of.str();
      EXPECT_LT(slot, rows - 1) << of.str();
      evicted |= slot >= 0;
      if (slot >= 0) --rows;
      if (slot >= 0 && slot < static_cast<int>(scores.size())) scores.pop_back();
    }
    EXPECT_EQ(allocations(), before) << of.str();
    // A GPU asks only rules that say so.
    EXPECT_EQ(made.rule->evicts(), evicted) << of.str();
  }
}

TEST(EveryRule, KeepsEverythingAtKeepOne) {
  for (const Rule& of : rules()) {
    for (const int n : {1, 5, 77}) {
      const Prompt prompt = random_prompt(3, 2, n, 11);
      const Made made = make(of, "1", prompt.shape);
      SCOPED_TRACE(of.str());
      EXPECT_EQ(made.rule->needs().rows, ImportanceNeeds::Rows::kNone);
      EXPECT_EQ(made.rule->needs().decode_weights, ImportanceNeeds::DecodeWeights::kNone);
      EXPECT_FALSE(made.rule->needs().sees_rows() || made.rule->needs().sees_queries());
      EXPECT_EQ(made.rule->merge(), MergeRule::kNone);
      EXPECT_FALSE(made.rule->rerotates());
      EXPECT_FALSE(made.rule->evicts());
      EXPECT_TRUE(made.rule->same_in_all_layers());
      for (const LayerSelection& selection : testing::select(*made.rule, prompt)) {
        EXPECT_EQ(selection.kept(), n);
        DecodingLayer layer(*made.rule, prompt, selection);
        for (int t = 1; t <= 100; ++t) EXPECT_EQ(layer.step(), -1);
        EXPECT_EQ(made.rule->peak_rows(n, selection.forget, n, n + 100), n + 100);
      }
      EXPECT_EQ(made.rule->peak_rows_total(3, n, n + 100), 3 * (n + 100));
    }
  }
}

TEST(EveryRule, IgnoresScaleAndOrderOfHeads) {
  for (const Rule& of : rules()) {
    const Prompt prompt = random_prompt(4, 3, 90, 21);
    const Made made = make(of, "0.4", prompt.shape);
    const auto expected = testing::select(*made.rule, prompt);
    Prompt scaled = prompt;
    for (double& x : scaled.importance) x *= 37.5;
    const bool mixes = of.entry == &retention::mixkv;  // its score() has scaled them
    for (double& x : scaled.row_scores) x *= mixes ? 1 : 37.5;
    EXPECT_EQ(testing::select(*made.rule, scaled)[1].slots, expected[1].slots) << of.str();
    if (made.rule->per_head()) continue;
    Prompt turned = prompt;  // heads 0, 1, 2 become 1, 2, 0
    for (int l = 0; l < 4; ++l) {
      for (std::vector<double>* scores : {&turned.importance, &turned.row_scores}) {
        const auto begin = scores->begin() + l * 3 * 90;
        std::rotate(begin, begin + 90, begin + 3 * 90);
      }
    }
    const auto selections = testing::select(*made.rule, turned);
    for (size_t l = 0; l < 4; ++l) EXPECT_EQ(selections[l].slots, expected[l].slots) << of.str();
  }
}

TEST(EveryRule, SelectsTheSameByMeansOfHeads) {
  constexpr int kHeads = 3;
  constexpr int kRows = 90;
  for (const Rule& of : rules()) {
    const Prompt prompt = random_prompt(4, kHeads, kRows, 22);
    const Made made = make(of, "0.4", prompt.shape);
    if (made.rule->per_head()) continue;
    std::vector<double> means, weighted;
    for (int l = 0; l < 4; ++l) {
      const auto add = [](std::vector<double>& all, std::span<const double> layer) {
        const std::vector<double> mean = retention::head_mean(layer, kHeads);
        all.insert(all.end(), mean.begin(), mean.end());
      };
      add(means, prompt.view(l).importance);
      add(weighted, prompt.view(l).weighted);
    }
    const auto expected = testing::select(*made.rule, prompt);
    for (int l = made.rule->joint() ? -1 : 0; l < (made.rule->joint() ? 0 : 4); ++l) {
      PromptView view = l < 0 ? prompt.view() : prompt.view(l);
      const auto of_view = [&](std::span<const double> all) {
        return l < 0 ? all : all.subspan(static_cast<size_t>(l) * kRows, kRows);
      };
      view.importance = of_view(means);
      view.weighted = of_view(weighted);
      view.head_means = true;
      const auto found = made.rule->select(view, {});
      for (size_t i = 0; i < found.size(); ++i) {
        const size_t layer = l < 0 ? i : static_cast<size_t>(l);
        EXPECT_EQ(found[i].slots, expected[layer].slots) << of.str();
        EXPECT_EQ(found[i].forget, expected[layer].forget) << of.str();
      }
    }
  }
}

TEST(EveryRule, GivesOneSelectionToAPair) {
  const std::vector<int> pairs = {0, 1, 2, 2, 4, 4};
  for (const Rule& of : rules()) {
    const Prompt prompt = random_prompt(6, 2, 80, 31);
    const Made made = make(of, "0.4", prompt.shape, /*sharing=*/true);
    if (made.rule->per_head()) continue;
    const auto selections = testing::select(*made.rule, prompt, pairs);
    ASSERT_EQ(selections.size(), 6u);
    for (const size_t l : {size_t{2}, size_t{4}}) {
      EXPECT_EQ(selections[l].slots, selections[l + 1].slots) << of.str();
      EXPECT_EQ(selections[l].forget, selections[l + 1].forget) << of.str();
    }
  }
}

TEST(EveryRule, SurvivesScoresThatAreNotNumbers) {
  for (const Rule& of : rules()) {
    Prompt prompt = random_prompt(3, 2, 50, 41);
    const Made made = make(of, "0.4", prompt.shape);
    for (size_t i = 0; i < prompt.importance.size(); i += 7) {
      prompt.importance[i] = prompt.row_scores[i] = std::nan("");
    }
    for (const LayerSelection& selection : testing::select(*made.rule, prompt)) {
      expect_valid(*made.rule, prompt, selection);
    }
    std::fill(prompt.importance.begin(), prompt.importance.end(), 0.0);
    std::fill(prompt.row_scores.begin(), prompt.row_scores.end(), 0.0);
    for (const LayerSelection& selection : testing::select(*made.rule, prompt)) {
      expect_valid(*made.rule, prompt, selection);
    }
  }
}

TEST(EveryRule, NamesLegalValuesInItsTable) {
  for (const RetentionEntry* entry : registered_rules()) {
    EXPECT_EQ(entry->info.kind, PartKind::kRetention);
    for (const OptionInfo& option : entry->info.options) {
      for (const std::string_view value : {option.standard, option.official, option.paper}) {
        if (value.empty()) continue;
        EXPECT_EQ(checked_value(entry->info.name, option, value), value) << option.key;
      }
      EXPECT_FALSE(option.help.empty());
    }
  }
}

}  // namespace
}  // namespace kvlm
