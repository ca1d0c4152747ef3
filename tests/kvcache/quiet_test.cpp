// Steps that take up the lanes of the last one, against a cache that describes them anew each time.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "kernels/base/error.h"
#include "kvcache/policy_cache.h"
#include "tests/kvcache/feeder.h"
#include "tests/kvcache/plans.h"

namespace kvlm {
namespace {

using namespace testlife;

TEST(FloatSpaceTest, IsEmptyAfterThereWasNoRoom) {
  FloatSpace space{Device{}};
  space.grow(10);
  EXPECT_THROW(space.grow(size_t{1} << 60), Error);
  EXPECT_EQ(space.size(), 0u);
  space.grow(5);
  EXPECT_NE(space.data(), nullptr);
}

/// Two caches that are fed alike. Opening and closing a sequence makes the second forget its lanes.
class Twins {
 public:
  Twins(const std::string& spec, const CacheShape& shape)
      : shape_(shape), feeder_(shape), kept_(make(spec, shape)), anew_(make(spec, shape)) {}

  void open(const std::vector<int16_t>& prompt, int steps) {
    const SequenceSize size = size_of(prompt, steps);
    const SequenceId id = kept_->open(size, "s");
    EXPECT_EQ(anew_->open(size, "s"), id);
    const char name = static_cast<char>('a' + names_++ % 26);
    sequences_.push_back({name, id, 0, size.max_rows});
    pass({{name, id, 0, prompt, true}});
    sequences_.back().fed = size.prompt_rows;
  }
  void close(size_t i) {
    kept_->close(sequences_[i].id);
    anew_->close(sequences_[i].id);
    sequences_.erase(sequences_.begin() + static_cast<std::ptrdiff_t>(i));
  }
  /// A row more for each of `who` that has room.
  void step(const std::vector<size_t>& who) {
    std::vector<Feeder::Input> inputs;
    for (const size_t i : who) {
      Life& s = sequences_[i];
      if (s.fed < s.most) inputs.push_back({s.name, s.id, s.fed++, {kTextRow}, false});
    }
    if (!inputs.empty()) pass(inputs);
  }
  /// A step that its caller gives up before any layer has attended.
  void give_up() {
    std::vector<StepRows> rows;
    for (const Life& s : sequences_) {
      if (s.fed < s.most) rows.push_back({s.id, 1, false, false, {}});
    }
    kept_->begin(rows, feeder_.stream());
  }
  size_t size() const { return sequences_.size(); }
  void check_reports() {
    for (const Life& s : sequences_) {
      const CacheReport a = kept_->report(s.id);
      const CacheReport b = anew_->report(s.id);
      ASSERT_EQ(a.bytes, b.bytes);
      ASSERT_EQ(a.slots, b.slots);
      ASSERT_EQ(a.nominal_bits, b.nominal_bits);
      ASSERT_EQ(kept_->next_position(s.id), anew_->next_position(s.id));
    }
  }

 private:
  struct Life {
    char name;
    SequenceId id;
    int fed;
    int most;
  };
  static std::unique_ptr<PolicyCache> make(const std::string& spec, const CacheShape& shape) {
    return std::make_unique<PolicyCache>(test::plan_of(spec, shape), size_t{16} << 20, Device{});
  }
  void pass(const std::vector<Feeder::Input>& inputs) {
    anew_->close(anew_->open({1, 0, 1}, "forgotten"));
    ASSERT_EQ(feeder_.pass(*kept_, inputs), feeder_.pass(*anew_, inputs));
    ASSERT_EQ(kept_->bytes(), anew_->bytes());
  }

  CacheShape shape_;
  Feeder feeder_;
  std::unique_ptr<PolicyCache> kept_, anew_;
  std::vector<Life> sequences_;
  int names_ = 0;
};

class QuietSteps : public ::testing::TestWithParam<const char*> {};

/// Sequences come and go, steps take some of them in any order, some are given up.
TEST_P(QuietSteps, EqualStepsThatDescribeTheirLanes) {
  for (const unsigned seed : {1u, 2u}) {
    std::mt19937 random(seed);
    const auto pick = [&](int n) { return static_cast<int>(random() % static_cast<unsigned>(n)); };
    Twins twins(GetParam(), seed == 1 ? shape_of(2, 2, 2, 16) : shape_of(4, 1, 3, 20));
    std::vector<size_t> who;
    for (int round = 0; round < 250; ++round) {
      const int what = pick(30);
      if (twins.size() == 0 || (what == 0 && twins.size() < 4)) {
        const std::vector<int> images =
            pick(2) == 0 ? std::vector<int>{} : std::vector{pick(50) + 1};
        twins.open(PromptShape{1 + pick(8), images, pick(30)}.modality(), 20 + pick(150));
        who.clear();
      } else if (what == 1) {
        twins.close(static_cast<size_t>(pick(static_cast<int>(twins.size()))));
        who.clear();
      } else if (what == 2) {
        twins.check_reports();
      } else if (what == 3) {
        twins.give_up();
        who.resize(twins.size());  // and tried again
        std::iota(who.begin(), who.end(), size_t{0});
      }
      if (who.empty() || what == 4) {
        who.clear();
        for (size_t i = 0; i < twins.size(); ++i) {
          if (pick(5) > 0) who.push_back(i);
        }
        std::shuffle(who.begin(), who.end(), random);
      }
      twins.step(who);
      if (HasFatalFailure()) return;
    }
  }
}

/// What is seen of a cache in the middle of a step is what its attention has just read.
TEST_P(QuietSteps, ShowTheirRowsAsStepsThatDescribeTheirLanes) {
  const CacheShape shape = shape_of(2, 2, 2, 16);
  Feeder feeder(shape);
  const auto plan = test::plan_of(GetParam(), shape);
  const bool drops = plan->retention != nullptr;
  PolicyCache kept(plan, 4 << 20, Device{});
  PolicyCache anew(plan, 4 << 20, Device{});
  const std::vector<int16_t> prompt = PromptShape{5, {23, 19}, 9}.modality();
  const int steps = 60;
  const SequenceId id = kept.open(size_of(prompt, steps), "s");
  ASSERT_EQ(anew.open(size_of(prompt, steps), "s"), id);
  Feeder::Input input{'a', id, 0, prompt, true};
  feeder.pass(kept, {input});
  feeder.pass(anew, {input});
  input = {'a', id, static_cast<int>(prompt.size()), {kTextRow}, false};
  for (; input.first < static_cast<int>(prompt.size()) + steps; ++input.first) {
    anew.close(anew.open({1, 0, 1}, "forgotten"));
    const StepRows rows{id, 1, false, false, {}};
    kept.begin({&rows, 1}, feeder.stream());
    anew.begin({&rows, 1}, feeder.stream());
    for (int layer = 0; layer < shape.layers; ++layer) {
      for (PolicyCache* cache : {&kept, &anew}) {
        std::vector<float> x[3] = {feeder.q(input, layer), feeder.k(input, layer),
                                   feeder.v(input, layer)};
        const TensorView q(x[0].data(), DType::kF32, {1, shape.q_heads, shape.head_dim});
        const Shape lanes{1, shape.kv_heads, shape.head_dim};
        cache->attend(layer, q, TensorView(x[1].data(), DType::kF32, lanes),
                      TensorView(x[2].data(), DType::kF32, lanes), q, feeder.scale(),
                      feeder.stream());
      }
      for (size_t head = 0; head < static_cast<size_t>(shape.kv_heads); ++head) {
        SCOPED_TRACE(fmt::format("token {}, layer {}, head {}", input.first, layer, head));
        const HeadRows seen = kept.inspect(id, layer, feeder.stream())[head];
        const HeadRows expected = anew.inspect(id, layer, feeder.stream())[head];
        ASSERT_EQ(seen.keys, expected.keys);
        ASSERT_EQ(seen.values, expected.values);
        ASSERT_EQ(seen.tags, expected.tags);
        ASSERT_EQ(seen.keys.size(), seen.tags.size() * static_cast<size_t>(shape.head_dim));
        ASSERT_EQ(seen.tags.back(), kTextRow) << "the row of this step";
        if (drops) continue;
        std::vector<int16_t> tags = prompt;
        tags.resize(static_cast<size_t>(input.first) + 1, kTextRow);
        ASSERT_THAT(seen.tags, ::testing::UnorderedElementsAreArray(tags));
      }
    }
    kept.end(feeder.stream());
    anew.end(feeder.stream());
  }
}

INSTANTIATE_TEST_SUITE_P(Specs, QuietSteps, ::testing::ValuesIn(kSpecs), name_of_spec);

}  // namespace
}  // namespace kvlm
