// Rules that drop the slot of least weight, where rows are numbered instead of in order: as a GPU
// keeps them, whose newest row takes the place of the one that went.
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <optional>
#include <random>
#include <vector>

#include "kernels/decode_table.h"
#include "tests/kvcache/retention/rules.h"

namespace kvlm {
namespace {

using namespace kvlm::testing;  // NOLINT(google-build-using-namespace)

constexpr int kFree = WeighedRows::kNoRow;

/// What a layer holds: numbers of rows and their weights, and how many are the prompt's.
struct Held {
  std::vector<int> came;
  std::vector<float> weights;
  int scored = 0;

  void drop(int slot) {
    came.erase(came.begin() + slot);
    weights.erase(weights.begin() + slot);
    if (slot < scored) --scored;
  }
};

DecodeView view_of(const Held& held, int kept, int rows) {
  DecodeView view;
  view.rows = rows;
  view.prompt_rows = 2 * kept;
  view.kept = kept;
  view.scored = held.scored;
  return view;
}

/// The number that goes of rows in places.
int least_in_places(const LeastWeight& least, const std::vector<int>& came,
                    const std::vector<float>& by_number, int next) {
  int found = -1;
  const auto weight = [&](int number) { return by_number[static_cast<size_t>(number)]; };
  for (const int number : came) {
    if (!least.may_drop(number, next)) continue;
    if (found < 0 || weight(number) < weight(found) ||
        (weight(number) == weight(found) && number > found)) {
      found = number;
    }
  }
  return found;
}

/// The same rows go, also where many weights are equal.
void check(const Retention& rule, int kept, int steps) {
  std::mt19937 random(static_cast<unsigned>(kept));
  Held held;
  for (int i = 0; i < kept; ++i) held.came.push_back(i);
  held.weights.assign(static_cast<size_t>(kept), 0.0f);
  held.scored = kept;
  std::vector<int> places = held.came;
  const std::optional<LeastWeight> least = rule.least_weight(view_of(held, kept, kept + 1));
  ASSERT_TRUE(least.has_value());
  for (int step = 0; step < steps; ++step) {
    const int next = kept + step + 1;
    held.came.push_back(next - 1);
    held.weights.push_back(0);
    if (step == 0) places.push_back(kFree);
    *std::find(places.begin(), places.end(), kFree) = next - 1;
    std::vector<float> by_number(static_cast<size_t>(next));
    for (size_t i = 0; i < held.came.size(); ++i) {
      held.weights[i] += static_cast<float>(random() % 4);
      by_number[static_cast<size_t>(held.came[i])] = held.weights[i];
    }
    DecodeView view = view_of(held, kept, kept + 1);
    view.weights = held.weights;
    const int slot = rule.evict(view);
    ASSERT_GE(slot, 0);
    const int number = least_in_places(*least, places, by_number, next);
    ASSERT_EQ(number, held.came[static_cast<size_t>(slot)]) << "step " << step;
    *std::find(places.begin(), places.end(), number) = kFree;
    held.drop(slot);
  }
}

TEST(LeastWeight, IsTheSameRowWhereverRowsLie) {
  for (const int kept : {2, 3, 7, 40}) {
    check(*make_rule(retention::h2o, {{"keep", "0.5"}}), kept, 120);
    check(*make_rule(retention::tova, {{"keep", "0.5"}, {"profile", "official"}}), kept, 120);
  }
  check(*make_rule(retention::tova, {{"keep", "0.5"}}), 40, 120);  // a sink and the prompt's end
  check(*make_rule(retention::tova, {{"keep", "0.5"}, {"sinks", "9"}}), 40, 120);
}

/// Whatever the vector's length: 16 scores at a time are compared, then those that are left.
TEST(LeastScore, IsTheLastOfTheLeast) {
  std::mt19937 random(7);
  for (int rows = 2; rows < 70; ++rows) {
    std::vector<float> scores;
    for (int i = 0; i < rows; ++i) scores.push_back(static_cast<float>(random() % 5));
    for (const LeastWeight& of :
         {LeastWeight{0, rows - 1, rows}, LeastWeight{rows / 3, rows - rows / 4, rows},
          LeastWeight{rows / 2, 3 * rows, 4 * rows}}) {
      int least = -1;
      for (int i = of.first; i < std::min(of.spared, rows); ++i) {
        const auto score = [&](int slot) { return scores[static_cast<size_t>(slot)]; };
        if (least < 0 || score(i) <= score(least)) least = i;
      }
      EXPECT_EQ(least_scored(of, scores), least) << rows << " rows from " << of.first;
    }
  }
}

/// As on a GPU: a row goes that has a weight.
TEST(LeastWeight, IsOfANumberIfThereIsOne) {
  const float none = std::numeric_limits<float>::quiet_NaN();
  const LeastWeight least;
  EXPECT_EQ(least_weighed(least, std::vector{none, 2.0f, 1.0f, none, 0.0f}), 2);
  EXPECT_EQ(least_weighed(least, std::vector{2.0f, none, 0.0f}), 0);
  EXPECT_EQ(least_weighed(least, std::vector{none, none, none, 0.0f}), 2);
  EXPECT_EQ(least_weighed(least, std::vector{0.0f}), -1);
}

/// Where all but the newest are spared, and where other rules decide.
TEST(LeastWeight, IsNotWhereARuleGoesByPlace) {
  Held held;
  held.scored = 5;
  const DecodeView view = view_of(held, 5, 6);
  const auto rule = [](const char* sinks, const char* evict) {
    return make_rule(retention::tova, {{"keep", "0.5"}, {"sinks", sinks}, {"evict", evict}});
  };
  EXPECT_FALSE(rule("4", "step")->least_weight(view).has_value());
  EXPECT_TRUE(rule("2", "step")->least_weight(view).has_value());
  EXPECT_FALSE(rule("2", "window")->least_weight(view).has_value());
  EXPECT_FALSE(make_rule(retention::h2o, {{"keep", "0.5"}, {"prefill_only", "on"}})
                   ->least_weight(view)
                   .has_value());
}

}  // namespace
}  // namespace kvlm
