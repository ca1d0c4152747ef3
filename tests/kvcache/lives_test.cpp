// Sequences of every policy whose caches have other histories.
#include "tests/kvcache/lives.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/base/error.h"
#include "kernels/base/watch.h"

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

class Lives : public ::testing::TestWithParam<const char*> {};

/// On a GPU: tests/cuda/policy_test.cpp.
TEST_P(Lives, DoNotDependOnWhatElseHappens) { check_lives(GetParam(), Device{}); }

TEST_P(Lives, GoOnWhileAPromptPauses) { check_pauses(GetParam(), Device{}); }

/// Wants no more when it was asked `patience` times.
class Canceller final : public Watch {
 public:
  explicit Canceller(int patience) : patience_(patience) {}
  void progress(std::string_view, size_t, size_t) override {}
  bool cancelled() const noexcept override { return ++asked_ >= patience_; }

 private:
  int patience_;
  mutable std::atomic<int> asked_ = 0;
};

/// A prompt that is given up anywhere leaves nothing to the next one, which gets its memory.
TEST_P(Lives, LeaveNothingOfAPromptThatWasGivenUp) {
  const CacheShape shape = shape_of(5, 2, 1, 16);
  Feeder feeder(shape);
  const auto plan = test::plan_of(GetParam(), shape);
  const std::vector<int16_t> prompt = PromptShape{5, {23, 19}, 9}.modality();
  const SequenceSize size = size_of(prompt, 2);
  const auto answer = [&](PolicyCache& cache) {
    Feeder::Input input{'a', cache.open(size, "s"), 0, prompt, true};
    feeder.pass(cache, {input});
    input = {'a', input.id, static_cast<int>(prompt.size()), {kTextRow}, false};
    return feeder.pass(cache, {input});
  };
  PolicyCache fresh(plan, 4 << 20, Device{});
  const auto expected = answer(fresh);
  bool cancelled = true;
  for (int patience = 1; cancelled; patience += 5) {
    PolicyCache cache(plan, 4 << 20, Device{});
    const SequenceId id = cache.open(size, "s");
    Canceller canceller(patience);
    try {
      const WatchScope scope(feeder.stream(), &canceller);
      feeder.pass(cache, {{'b', id, 0, prompt, true}});
      cancelled = false;
    } catch (const Error& error) {
      ASSERT_EQ(error.code(), ErrorCode::kCancelled);
    }
    cache.close(id);
    ASSERT_EQ(answer(cache), expected) << "given up when it was asked " << patience << " times";
    ASSERT_LT(patience, 10000);
  }
}

/// What is seen of a cache in the middle of a step is what its attention has just read.
TEST_P(Lives, AreSeenInTheMiddleOfAStep) {
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
        const Shape heads{1, shape.kv_heads, shape.head_dim};
        cache->attend(layer, q, TensorView(x[1].data(), DType::kF32, heads),
                      TensorView(x[2].data(), DType::kF32, heads), q, feeder.scale(),
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

INSTANTIATE_TEST_SUITE_P(Specs, Lives, ::testing::ValuesIn(kSpecs), name_of_spec);

}  // namespace
}  // namespace kvlm
