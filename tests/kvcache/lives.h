#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "kvcache/policy_cache.h"
#include "tests/kvcache/feeder.h"
#include "tests/kvcache/plans.h"

namespace kvlm::testlife {

/// Two caches that are fed alike. Steps of the first are given up now and then; the second opens
/// and closes a sequence before every step.
class Twins {
 public:
  Twins(const std::string& spec, const CacheShape& shape, Device device)
      : shape_(shape),
        feeder_(shape, 2, device),
        first_(make(spec, shape, device)),
        second_(make(spec, shape, device)) {}

  void open(const std::vector<int16_t>& prompt, int steps) {
    const SequenceSize size = size_of(prompt, steps);
    const SequenceId id = first_->open(size, "s");
    EXPECT_EQ(second_->open(size, "s"), id);
    const char name = static_cast<char>('a' + names_++ % 26);
    sequences_.push_back({name, id, 0, size.max_rows});
    pass({{name, id, 0, prompt, true}});
    sequences_.back().fed = size.prompt_rows;
  }
  void close(size_t i) {
    first_->close(sequences_[i].id);
    second_->close(sequences_[i].id);
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
    first_->begin(rows, feeder_.stream());
  }
  size_t size() const { return sequences_.size(); }
  void check_reports() {
    for (const Life& s : sequences_) {
      const CacheReport a = first_->report(s.id);
      const CacheReport b = second_->report(s.id);
      ASSERT_EQ(a.bytes, b.bytes);
      ASSERT_EQ(a.slots, b.slots);
      ASSERT_EQ(a.nominal_bits, b.nominal_bits);
      ASSERT_EQ(first_->next_position(s.id), second_->next_position(s.id));
    }
  }

 private:
  struct Life {
    char name;
    SequenceId id;
    int fed;
    int most;
  };
  static std::unique_ptr<PolicyCache> make(const std::string& spec, const CacheShape& shape,
                                           Device device) {
    return std::make_unique<PolicyCache>(test::plan_of(spec, shape), size_t{16} << 20, device);
  }
  void pass(const std::vector<Feeder::Input>& inputs) {
    second_->close(second_->open({1, 0, 1}, "forgotten"));
    ASSERT_EQ(feeder_.pass(*first_, inputs), feeder_.pass(*second_, inputs));
    ASSERT_EQ(first_->bytes(), second_->bytes());
  }

  CacheShape shape_;
  Feeder feeder_;
  std::unique_ptr<PolicyCache> first_, second_;
  std::vector<Life> sequences_;
  int names_ = 0;
};

/// Sequences come and go, steps take some of them in any order, some are given up: outputs, bytes
/// and reports are those of a cache to which other things happen.
inline void check_lives(const std::string& spec, Device device) {
  for (const unsigned seed : {1u, 2u}) {
    std::mt19937 random(seed);
    const auto pick = [&](int n) { return static_cast<int>(random() % static_cast<unsigned>(n)); };
    Twins twins(spec, seed == 1 ? shape_of(2, 2, 2, 16) : shape_of(4, 1, 3, 20), device);
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
      if (::testing::Test::HasFatalFailure()) return;
    }
  }
}

/// Prompts that pause between layers, in which other sequences get tokens, come to their end or are
/// given up: outputs and bytes are those of a cache in which one pass follows the other.
inline void check_pauses(const std::string& spec, Device device) {
  const CacheShape shape = shape_of(5, 2, 2, 16);
  Feeder feeder(shape, 2, device);
  PolicyCache paused(test::plan_of(spec, shape), size_t{16} << 20, device);
  PolicyCache plain(test::plan_of(spec, shape), size_t{16} << 20, device);
  constexpr int kSteps = 60;
  std::vector<Feeder::Input> running;
  const auto step = [&](PolicyCache& cache) { return feeder.pass(cache, running); };
  const auto advance = [&] {
    for (Feeder::Input& input : running) ++input.first;
  };
  for (int number = 0; number < 9; ++number) {
    const std::vector<int16_t> prompt =
        PromptShape{1 + number, {40, 7 * number}, 3 * number}.modality();
    const SequenceId id = paused.open(size_of(prompt, kSteps), "s");
    ASSERT_EQ(plain.open(size_of(prompt, kSteps), "s"), id);
    const Feeder::Input input{static_cast<char>('a' + number), id, 0, prompt, true};
    std::vector<std::vector<std::vector<float>>> expected, found;
    const auto at_first = running;
    const auto outputs = feeder.pass(paused, {input}, true, [&] {
      if (running.empty()) return;
      found.push_back(step(paused));
      advance();
    });
    running = at_first;
    if (number % 2 == 0) {
      ASSERT_EQ(feeder.pass(plain, {input}), outputs);
    }
    for (size_t i = 0; i < found.size(); ++i, advance()) expected.push_back(step(plain));
    if (number % 2 != 0) {
      ASSERT_EQ(feeder.pass(plain, {input}), outputs);
    }
    ASSERT_EQ(found, expected) << "prompt " << number;
    running.push_back({input.name, id, static_cast<int>(prompt.size()), {kTextRow}, false});
    ASSERT_EQ(step(paused), step(plain)) << "prompt " << number;
    advance();
    ASSERT_EQ(paused.bytes(), plain.bytes());
    if (running.size() < 4) continue;
    paused.close(running.front().id);
    plain.close(running.front().id);
    running.erase(running.begin());
  }
  // A step that fails in the pause costs the prompt nothing.
  const std::vector<int16_t> prompt = PromptShape{5, {23, 19}, 9}.modality();
  const Feeder::Input input{'z', paused.open(size_of(prompt, kSteps), "s"), 0, prompt, true};
  ASSERT_EQ(plain.open(size_of(prompt, kSteps), "s"), input.id);
  const auto outputs = feeder.pass(paused, {input}, true, [&] {
    if (running.empty()) return;
    const StepRows rows{running.back().id, 1, false, false, {}};
    paused.begin({&rows, 1}, feeder.stream());
    paused.close(running.back().id);
    running.pop_back();
  });
  ASSERT_EQ(outputs, feeder.pass(plain, {input}));
  running = {{'z', input.id, static_cast<int>(prompt.size()), {kTextRow}, false}};
  ASSERT_EQ(step(paused), step(plain));
}

}  // namespace kvlm::testlife
