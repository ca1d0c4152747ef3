#include "kvcache/policy_cache.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "kernels/base/error.h"
#include "kvcache/make_cache.h"
#include "kvcache/plan/formula.h"
#include "kvcache/plan/sequence_bounds.h"
#include "kvcache/retention/common.h"
#include "kvcache/spec/registry.h"
#include "tests/allocations.h"
#include "tests/kvcache/feeder.h"
#include "tests/kvcache/plans.h"
#include "tests/reference/policy_cache.h"

namespace kvlm {
namespace {

using namespace testlife;
using test::plan_of;
using ::testing::HasSubstr;

std::unique_ptr<PolicyCache> make(const std::string& spec, const CacheShape& shape,
                                  const SequenceSize& size, int sequences = 1) {
  const auto plan = plan_of(spec, shape);
  const size_t bytes = SequenceBounds(*plan).reservation(size).bytes();
  return std::make_unique<PolicyCache>(plan, static_cast<size_t>(sequences) * bytes, Device{});
}

void expect_near(const std::vector<float>& got, const std::vector<std::vector<double>>& rows,
                 double tolerance, const std::string& where) {
  std::vector<double> expected;
  for (const auto& row : rows) expected.insert(expected.end(), row.begin(), row.end());
  ASSERT_EQ(got.size(), expected.size()) << where;
  double top = 0;
  for (const double x : expected) top = std::max(top, std::abs(x));
  for (size_t i = 0; i < got.size(); ++i) {
    ASSERT_NEAR(static_cast<double>(got[i]), expected[i], tolerance * top)
        << where << ", element " << i;
  }
}

struct LifeCycle {
  std::string spec;
  CacheShape shape;
  PromptShape prompt;
  int steps;
  int later_prompt = 0;  ///< rows of a second prompt half way
};

std::string name_of(const LifeCycle& c) {
  return fmt::format("{} [layers {}, heads {}x{}, dim {}]", c.spec, c.shape.layers,
                     c.shape.kv_heads, c.shape.q_per_kv(), c.shape.head_dim);
}

/// Outputs, slots and bytes of every step equal the reference's.
void check_life_cycle(const LifeCycle& c) {
  SCOPED_TRACE(name_of(c));
  const std::vector<int16_t> prompt = c.prompt.modality();
  const SequenceSize size = size_of(prompt, c.steps + c.later_prompt);
  const auto cache = make(c.spec, c.shape, size);
  Feeder feeder(c.shape);
  reference::PolicySequence expected(c.spec, c.shape);
  const SequenceId id = cache->open(size, "s");
  int fed = 0;
  for (int step = 0; step <= c.steps; ++step) {
    Feeder::Input input{'s', id, fed, {kTextRow}, false};
    if (step == 0) input = {'s', id, fed, prompt, true};
    if (step == c.steps / 2 && c.later_prompt > 0 && step > 0 && !cache->needs().one_prompt) {
      input = {'s', id, fed, std::vector<int16_t>(static_cast<size_t>(c.later_prompt), kTextRow),
               true};
    }
    if (step == 0 && cache->needs().prompt_embeddings) {
      const std::vector<float> all = feeder.values(input, 0, 3, kHidden);
      reference::Rows embeddings;
      for (auto row = all.begin(); row != all.end(); row += kHidden) {
        embeddings.emplace_back(row, row + kHidden);
      }
      expected.see_embeddings(embeddings, input.modality);
    }
    const auto outputs = feeder.pass(*cache, {input});
    for (int layer = 0; layer < c.shape.layers; ++layer) {
      const auto rows =
          expected.attend(layer, feeder.q(input, layer).data(), feeder.k(input, layer).data(),
                          feeder.v(input, layer).data(), input.modality.size(), input.prompt,
                          input.modality, static_cast<double>(feeder.scale()));
      expect_near(outputs[static_cast<size_t>(layer)], rows, 2e-5,
                  fmt::format("step {}, layer {}", step, layer));
      if (testing::Test::HasFatalFailure()) return;
    }
    expected.end(input.prompt);
    fed += static_cast<int>(input.modality.size());
    for (int layer = 0; layer < c.shape.layers; ++layer) {
      for (size_t head = 0; head < static_cast<size_t>(c.shape.kv_heads); ++head) {
        ASSERT_EQ(static_cast<size_t>(cache->layer(id, layer).heads[head].slots()),
                  expected.slots(layer, head))
            << "step " << step << ", layer " << layer << ", head " << head;
      }
    }
    ASSERT_EQ(cache->bytes(), expected.bytes()) << "step " << step;
    ASSERT_EQ(cache->report(id).bytes, expected.bytes());
  }
}

const CacheShape kSmall = shape_of(2, 2, 2, 16);

std::unique_ptr<KvCache> make_plain(const std::string& format, const SequenceSize& size) {
  const auto plan = plan_of(format, kSmall);
  return make_cache(plan, reservation(*plan, size).bytes(), {});
}

class PolicyLife : public testing::TestWithParam<const char*> {};

TEST_P(PolicyLife, EqualsTheReferenceStepByStep) {
  check_life_cycle({GetParam(), kSmall, {5, {40}, 9}, 300, 7});
  check_life_cycle({GetParam(), shape_of(3, 1, 3, 20), {3, {17, 30}, 4}, 70});
  check_life_cycle({GetParam(), kSmall, {1, {}, 0}, 40});       // one token
  check_life_cycle({GetParam(), kSmall, {2, {70}, 1}, 3});      // text is rare
  check_life_cycle({GetParam(), kSmall, {33, {}, 0}, 40, 33});  // no picture
}

INSTANTIATE_TEST_SUITE_P(Specs, PolicyLife, testing::ValuesIn(kSpecs), name_of_spec);

/// XQuant's groups in more layers than a prompt packs together, which groups of 3 cross, and with a
/// short last group: each dominant layer, alone and where a group's layers drop rows together.
TEST(XQuantGroups, EqualTheReferenceInManyLayers) {
  for (const int group : {2, 3, 4}) {
    for (int dominant = 0; dominant < group; ++dominant) {
      for (const char* shared : {"kq=0,km=0,vq=0,vm=3", "kq=0,km=5,vq=24,vm=2"}) {
        const std::string xquant = fmt::format(
            "xquant,group=8,residual=16,{},layer_group={},dominant={}", shared, group, dominant);
        for (const char* rule : {"", "prefixkv,keep=0.6 + ", "h2o,keep=0.5,head_shared=on + "}) {
          check_life_cycle({rule + xquant, shape_of(7, 1, 2, 16), {5, {40}, 9}, 90, 7});
        }
        check_life_cycle({xquant, shape_of(9, 1, 1, 20), {33, {}, 0}, 40, 33});
        if (HasFatalFailure()) return;
      }
    }
  }
}

/// Averages of pairs, where keys and values share from different layers and the last layer has no
/// partner.
TEST(XQuantGroups, AveragesEqualTheReferenceInManyLayers) {
  for (const char* average : {"gamma=0.2", "gamma=0.6", "gamma=0.5,round=floor", "round=ceil"}) {
    for (const char* shared : {"kq=2,km=0,vq=2,vm=3", "kq=0,km=5,vq=24,vm=2"}) {
      const std::string xquant =
          fmt::format("xquant,group=8,residual=16,{},merge=average,{}", shared, average);
      for (const char* rule : {"", "uniform,keep=0.5 + ", "prefixkv,keep=0.5 + "}) {
        check_life_cycle({rule + xquant, shape_of(7, 1, 2, 16), {5, {40}, 9}, 90, 7});
      }
      check_life_cycle({xquant, shape_of(9, 1, 1, 20), {33, {}, 0}, 40, 33});
      if (HasFatalFailure()) return;
    }
  }
}

/// XQuant, appendix F: below 1/6 and above 5/6 the average is the code of one layer.
TEST(XQuantGroups, OuterAveragesAreDominantLayers) {
  const CacheShape shape = shape_of(4, 2, 2, 16);
  const std::string xquant = "xquant,group=8,residual=16,kq=2,km=0,vq=2,vm=0,";
  const std::vector<int16_t> prompt = PromptShape{}.modality();
  const SequenceSize size = size_of(prompt, 60);
  for (const auto& [average, dominant] :
       {std::pair("gamma=0.16", "dominant=1"), std::pair("gamma=0.84", "dominant=0")}) {
    Feeder feeder(shape);
    const auto averages = make(xquant + "merge=average," + average, shape, size);
    const auto dominates = make(xquant + dominant, shape, size);
    const SequenceId ids[] = {averages->open(size, "s"), dominates->open(size, "s")};
    int fed = 0;
    for (int step = 0; step < 60; ++step) {
      Feeder::Input input{'s', ids[0], fed, step == 0 ? prompt : std::vector{kTextRow}, step == 0};
      const auto found = feeder.pass(*averages, {input});
      input.id = ids[1];
      ASSERT_EQ(found, feeder.pass(*dominates, {input})) << average << ", step " << step;
      fed += static_cast<int>(input.modality.size());
    }
  }
}

/// A policy that nobody feeds is checked against nothing.
TEST(PolicyLives, NameEveryPolicy) {
  for (const PolicyInfo* info : policies()) {
    if (find_format(info->name).has_value()) continue;
    EXPECT_TRUE(std::ranges::any_of(
        kSpecs,
        [&](std::string_view spec) { return spec.find(info->name) != std::string_view::npos; }))
        << info->name << " is in no spec of tests/kvcache/feeder.h";
  }
}

/// The plain cache's outputs of the same passes, to the bit, from rules that are run and drop
/// nothing: their budget rounds to every row (at keep=1 there would be no rule at all).
class Identity : public testing::TestWithParam<std::string> {};

TEST_P(Identity, EqualsThePlainCacheBitForBit) {
  const std::vector<int16_t> prompt = PromptShape{7, {60, 33}, 300}.modality();
  for (const char* rows : {"f16", "bf16", "f32"}) {
    const std::string spec = fmt::format("{} + {}", rows, GetParam());
    const SequenceSize size = size_of(prompt, 40);
    const auto plan = plan_of(spec, kSmall);
    ASSERT_NE(plan->retention, nullptr) << "no rule is run";
    PolicyCache cache(plan, SequenceBounds(*plan).reservation(size).bytes(), {});
    const auto plain = make_plain(rows, size);
    Feeder feeder(kSmall, 3);
    const SequenceId a = cache.open(size, "s");
    const SequenceId b = plain->open(size, "s");
    int fed = 0;
    for (int step = 0; step <= 40; ++step) {
      Feeder::Input input{'s', a, fed, step == 0 ? prompt : std::vector<int16_t>{kTextRow},
                          step == 0};
      const auto mine = feeder.pass(cache, {input});
      input.id = b;
      ASSERT_EQ(mine, feeder.pass(*plain, {input})) << spec << ", step " << step;
      fed += static_cast<int>(input.modality.size());
      ASSERT_EQ(cache.bytes(), plain->bytes()) << spec << ", step " << step;
    }
  }
}

/// What it takes for a rule to hold more rows than when the prompt had ended.
std::string_view growing(const PolicyInfo& info) {
  if (info.name == "h2o") return ",prefill_only=on";
  if (info.name == "streaming") return ",budget=proportional";
  const auto stays = [](const OptionInfo& option) {
    return option.key == "evict" && option.standard == "step";
  };
  return std::any_of(info.options.begin(), info.options.end(), stays) ? ",evict=none" : "";
}

/// Every rule of the registry.
std::vector<std::string> keeping_all() {
  std::vector<std::string> specs = {
      "prefixkv,keep=0.999999999999,merge=feature",
      "streaming,keep=0.999999999999,budget=proportional,rerotate=on"};
  for (const PolicyInfo* info : policies()) {
    if (info->kind != PartKind::kRetention) continue;
    specs.push_back(fmt::format("{},keep=0.999999999999{}", info->name, growing(*info)));
  }
  return specs;
}

INSTANTIATE_TEST_SUITE_P(Rules, Identity, testing::ValuesIn(keeping_all()));

/// keep=1 makes no rule, whichever is named.
TEST_P(Identity, KeepOneMakesNoRule) {
  const std::string name = GetParam().substr(0, GetParam().find(','));
  EXPECT_EQ(plan_of(name + ",keep=1", kSmall)->retention, nullptr);
}

class EverySpec : public testing::TestWithParam<const char*> {};

/// The logits of the first token come from the prompt's own rows, whatever is kept of them.
TEST_P(EverySpec, PromptsAreExact) {
  const std::vector<int16_t> prompt = PromptShape{5, {40, 21}, 19}.modality();
  const SequenceSize size = size_of(prompt, 1);
  const auto cache = make(GetParam(), kSmall, size);
  const auto plain = make_plain("f16", size);
  Feeder feeder(kSmall, 2);
  const auto mine = feeder.pass(*cache, {{'s', cache->open(size, "s"), 0, prompt, true}});
  EXPECT_EQ(mine, feeder.pass(*plain, {{'s', plain->open(size, "s"), 0, prompt, true}}));
}

/// A cache that is filled without queries is the same afterwards, whatever policy needs none; and
/// sequences that are filled one after the other need room for one prompt only.
TEST_P(EverySpec, PromptsMayComeWithoutQueries) {
  const std::vector<int16_t> prompt = PromptShape{5, {40, 21}, 19}.modality();
  const SequenceSize size = size_of(prompt, 40);
  const auto plan = plan_of(GetParam(), kSmall);
  const Reservation each = reservation(*plan, size);
  const auto cache = make_cache(plan, 3 * each.kept + each.staging, {});
  const bool queries = cache->needs().prompt_queries;
  const auto whole = make(GetParam(), kSmall, size);
  Feeder feeder(kSmall);
  const SequenceId expected = whole->open(size, "s");
  feeder.pass(*whole, {{'s', expected, 0, prompt, true}});
  std::vector<SequenceId> ids;
  for (int i = 0; i < 3; ++i) {
    ids.push_back(cache->open(size, "s"));
    feeder.pass(*cache, {{'s', ids.back(), 0, prompt, true}}, queries);
  }
  for (int step = 0; step < 40; ++step) {
    const int fed = size.prompt_rows + step;
    const auto outputs = feeder.pass(*whole, {{'s', expected, fed, {kTextRow}, false}});
    for (const SequenceId id : ids) {
      ASSERT_EQ(feeder.pass(*cache, {{'s', id, fed, {kTextRow}, false}}), outputs) << step;
      ASSERT_EQ(cache->report(id).bytes, whole->report(expected).bytes);
    }
  }
  EXPECT_THROW(cache->open(size, "s"), Error);
}

/// A prompt between two generated rows of one pass: what is stored together lies apart.
TEST_P(EverySpec, APromptBetweenGeneratedRowsChangesNothing) {
  const std::vector<int16_t> prompts[] = {PromptShape{5, {40}, 9}.modality(),
                                          PromptShape{2, {13, 30}, 20}.modality(),
                                          PromptShape{20, {}, 0}.modality()};
  constexpr int kSteps = 2;
  std::vector<std::vector<std::vector<std::vector<float>>>> alone(3);
  const auto plan = plan_of(GetParam(), kSmall);
  size_t bytes = 0;
  for (size_t s = 0; s < 3; ++s) {
    const SequenceSize size = size_of(prompts[s], kSteps);
    bytes += SequenceBounds(*plan).reservation(size).bytes();
    const auto cache = make(GetParam(), kSmall, size);
    Feeder feeder(kSmall);
    const SequenceId id = cache->open(size, "s");
    const char name = static_cast<char>('a' + s);
    alone[s].push_back(feeder.pass(*cache, {{name, id, 0, prompts[s], true}}));
    for (int step = 0; step < kSteps; ++step) {
      alone[s].push_back(
          feeder.pass(*cache, {{name, id, size.prompt_rows + step, {kTextRow}, false}}));
    }
  }
  PolicyCache cache(plan, bytes, {});
  Feeder feeder(kSmall, 3);
  SequenceId ids[3];
  for (size_t s = 0; s < 3; ++s) ids[s] = cache.open(size_of(prompts[s], kSteps), "s");
  const auto generated = [&](size_t s, int step) {
    return Feeder::Input{static_cast<char>('a' + s),
                         ids[s],
                         static_cast<int>(prompts[s].size()) + step,
                         {kTextRow},
                         false};
  };
  feeder.pass(cache, {{'a', ids[0], 0, prompts[0], true}});
  feeder.pass(cache, {{'c', ids[2], 0, prompts[2], true}});
  feeder.pass(cache, {generated(0, 0), {'b', ids[1], 0, prompts[1], true}, generated(2, 0)});
  const auto together = feeder.pass(cache, {generated(0, 1), generated(2, 1)});
  const auto width = static_cast<size_t>(kSmall.q_heads) * static_cast<size_t>(kSmall.head_dim);
  for (size_t layer = 0; layer < together.size(); ++layer) {
    const auto begin = together[layer].begin();
    const auto middle = begin + static_cast<std::ptrdiff_t>(width);
    ASSERT_EQ(std::vector<float>(begin, middle), alone[0][2][layer]) << "layer " << layer;
    ASSERT_EQ(std::vector<float>(middle, together[layer].end()), alone[2][2][layer])
        << "layer " << layer;
  }
}

/// Sequences of other lengths and pictures that come and go change nothing.
TEST_P(EverySpec, CompanyChangesNothing) {
  const std::vector<int16_t> prompts[] = {PromptShape{5, {40}, 9}.modality(),
                                          PromptShape{2, {13, 30}, 20}.modality(),
                                          PromptShape{20, {}, 0}.modality()};
  const int steps[] = {50, 20, 35};
  std::vector<std::vector<std::vector<std::vector<float>>>> alone(3);
  for (size_t s = 0; s < 3; ++s) {
    const SequenceSize size = size_of(prompts[s], steps[s]);
    const auto cache = make(GetParam(), kSmall, size);
    Feeder feeder(kSmall);
    const SequenceId id = cache->open(size, "s");
    const char name = static_cast<char>('a' + s);
    alone[s].push_back(feeder.pass(*cache, {{name, id, 0, prompts[s], true}}));
    for (int step = 0; step < steps[s]; ++step) {
      const int fed = size.prompt_rows + step;
      alone[s].push_back(feeder.pass(*cache, {{name, id, fed, {kTextRow}, false}}));
    }
  }
  // Room for the largest of each: a sequence that leaves gives its memory to the next.
  const auto plan = plan_of(GetParam(), kSmall);
  size_t bytes = 0;
  for (size_t s = 0; s < 3; ++s) {
    bytes += SequenceBounds(*plan).reservation(size_of(prompts[s], steps[s])).bytes();
  }
  PolicyCache cache(plan, bytes, {});
  Feeder feeder(kSmall, 3);
  std::vector<SequenceId> ids(3);
  std::vector<int> done(3, -1);
  for (int round = 0; round < 80; ++round) {
    std::vector<Feeder::Input> inputs;
    std::vector<size_t> who;
    for (size_t s = 0; s < 3; ++s) {
      if (done[s] == -1 && static_cast<size_t>(round) >= 7 * s) {  // joins, prefilled by itself
        ids[s] = cache.open(size_of(prompts[s], steps[s]), "s");
        const char name = static_cast<char>('a' + s);
        ASSERT_EQ(feeder.pass(cache, {{name, ids[s], 0, prompts[s], true}}), alone[s][0]);
        done[s] = 0;
      } else if (done[s] >= 0 && done[s] < steps[s]) {
        inputs.push_back({static_cast<char>('a' + s),
                          ids[s],
                          static_cast<int>(prompts[s].size()) + done[s],
                          {kTextRow},
                          false});
        who.push_back(s);
      }
    }
    if (inputs.empty()) continue;
    const auto together = feeder.pass(cache, inputs);
    const auto width = static_cast<size_t>(kSmall.q_heads) * static_cast<size_t>(kSmall.head_dim);
    for (size_t i = 0; i < who.size(); ++i) {
      const size_t s = who[i];
      ++done[s];
      for (size_t layer = 0; layer < together.size(); ++layer) {
        const auto begin = together[layer].begin() + static_cast<std::ptrdiff_t>(i * width);
        const std::vector<float> mine(begin, begin + static_cast<std::ptrdiff_t>(width));
        ASSERT_EQ(mine, alone[s][static_cast<size_t>(done[s])][layer])
            << "sequence " << s << ", step " << done[s] << ", layer " << layer;
      }
      if (done[s] == steps[s]) cache.close(ids[s]);
    }
  }
  EXPECT_EQ(cache.bytes(), 0u);
}

/// How often the second half of some decode steps asks for memory.
size_t allocations_of_decode(const char* spec, const CacheShape& shape, int sequences, int steps) {
  const std::vector<int16_t> prompt = PromptShape{5, {40}, 9}.modality();
  const SequenceSize size = size_of(prompt, steps);
  const auto cache = make(spec, shape, size, sequences);
  ThreadPool pool(2);
  Stream stream(pool);
  Feeder feeder(shape);
  std::vector<StepRows> step(static_cast<size_t>(sequences));
  for (StepRows& rows : step) {
    rows.sequence = cache->open(size, "s");
    rows.rows = 1;
    feeder.pass(*cache, {{'s', rows.sequence, 0, prompt, true}});
  }
  const auto row = static_cast<size_t>(sequences) * static_cast<size_t>(shape.head_dim);
  std::vector<float> q(row * static_cast<size_t>(shape.q_heads), 0.5f);
  std::vector<float> k(row * static_cast<size_t>(shape.kv_heads), 0.25f);
  const auto view = [&](std::vector<float>& x, int heads) {
    return TensorView(x.data(), DType::kF32, {sequences, heads, shape.head_dim});
  };
  size_t before = 0;
  for (int i = 0; i < steps; ++i) {
    // The first flush of a window sizes the scratch of the workers.
    if (i == steps / 2) before = allocations();
    cache->begin(step, stream);
    for (int layer = 0; layer < shape.layers; ++layer) {
      k[static_cast<size_t>(i) % k.size()] += 0.5f;
      cache->attend(layer, view(q, shape.q_heads), view(k, shape.kv_heads), view(k, shape.kv_heads),
                    view(q, shape.q_heads), 0.25f, stream);
    }
    cache->end(stream);
  }
  return allocations() - before;
}

TEST_P(EverySpec, DecodeAllocatesNothing) {
  EXPECT_EQ(allocations_of_decode(GetParam(), kSmall, 1, 120), 0u);
}

/// Rows that a rule first drops in decode ask for no memory either, once scratch is warm.
TEST(PolicyCacheTest, SinksHaveTheirMemoryBeforeTheFirstRowGoes) {
  constexpr int kSteps = 12;
  const SequenceSize size{1, 0, 1 + kSteps};
  const auto cache = make("streaming,keep=0.5,rerotate=on", kSmall, size, 2);
  Feeder feeder(kSmall);
  std::vector<float> q(static_cast<size_t>(kSmall.q_heads * kSmall.head_dim), 0.5f);
  std::vector<float> k(static_cast<size_t>(kSmall.kv_heads * kSmall.head_dim), 0.25f);
  const auto view = [](std::vector<float>& x, int heads) {
    return TensorView(x.data(), DType::kF32, {1, heads, kSmall.head_dim});
  };
  size_t asked = 0;
  for (const char name : {'a', 'b'}) {  // the second finds what the first has made
    StepRows step;
    step.sequence = cache->open(size, "s");
    step.rows = 1;
    feeder.pass(*cache, {{name, step.sequence, 0, {kTextRow}, true}});
    const size_t before = allocations();
    for (int i = 0; i < kSteps; ++i) {
      cache->begin({&step, 1}, feeder.stream());
      for (int layer = 0; layer < kSmall.layers; ++layer) {
        cache->attend(layer, view(q, kSmall.q_heads), view(k, kSmall.kv_heads),
                      view(k, kSmall.kv_heads), view(q, kSmall.q_heads), 0.25f, feeder.stream());
      }
      cache->end(feeder.stream());
    }
    asked = allocations() - before;
    EXPECT_GT(cache->layer(step.sequence, 0).sink_rows, 0);
  }
  EXPECT_EQ(asked, 0u);
}

/// Room for several sequences holds the rows of one prompt beside what all of them keep.
TEST_P(EverySpec, SequencesThatComeOneByOneShareTheRoomOfTheirPrompts) {
  constexpr int kSequences = 5;
  const auto prompt = PromptShape{5, {40}, 9}.modality();
  const SequenceSize size = size_of(prompt, 30);
  const auto plan = plan_of(GetParam(), kSmall);
  const SequenceBounds bounds(*plan);
  const size_t bytes = bounds.session_bytes(size.max_rows, kSequences);
  const size_t staged = bounds.staging_bytes({size.max_rows, 0, size.max_rows});
  EXPECT_EQ(bytes, kSequences * bounds.session_bytes(size.max_rows) -
                       (kSequences - 1) * Arena::rounded(staged));
  PolicyCache cache(plan, bytes, {});
  Feeder feeder(kSmall);
  for (int i = 0; i < kSequences; ++i) {
    const SequenceId id = cache.open(size, "s");
    feeder.pass(cache, {{static_cast<char>('a' + i), id, 0, prompt, true}});
  }
}

/// Whatever part of its rows are the prompt's, and of those the pictures'.
TEST_P(EverySpec, RoomForASequenceHoldsAnyOfItsLength) {
  const auto plan = plan_of(GetParam(), kSmall);
  const SequenceBounds bounds(*plan);
  for (const int max_rows : {1, 7, 84, 333, 1000}) {
    const size_t room = bounds.session_bytes(max_rows);
    for (int prompt = 1; prompt <= max_rows; ++prompt) {
      for (const int visual : {0, prompt / 3, prompt / 2, prompt - 1, prompt}) {
        const SequenceSize size{prompt, visual, max_rows};
        ASSERT_GE(room - Arena::rounded(bounds.staging_bytes({max_rows, 0, max_rows})),
                  bounds.reservation(size).kept)
            << prompt << " rows, " << visual << " visual, of " << max_rows;
      }
    }
  }
}

/// A size that was refused changes nothing, and what reservation() says is enough.
TEST_P(EverySpec, ReservesWhatItNeeds) {
  for (const auto& prompt : {PromptShape{5, {40}, 9}.modality(), PromptShape{1, {}, 0}.modality(),
                             PromptShape{2, {200}, 3}.modality()}) {
    const SequenceSize size = size_of(prompt, 90);
    const auto plan = plan_of(GetParam(), kSmall);
    const size_t bytes = SequenceBounds(*plan).reservation(size).bytes();
    EXPECT_LE(bytes, SequenceBounds(*plan).session_bytes(size.max_rows));
    PolicyCache enough(plan, bytes, {});
    Feeder feeder(kSmall);
    const SequenceId id = enough.open(size, "s");
    EXPECT_THROW(enough.open(size, "another"), Error);
    feeder.pass(enough, {{'s', id, 0, prompt, true}});
    for (int step = 0; step < 90; ++step) {
      feeder.pass(enough, {{'s', id, size.prompt_rows + step, {kTextRow}, false}});
    }
    PolicyCache less(plan, bytes - 64, {});
    EXPECT_THROW(less.open(size, "s"), Error);
    EXPECT_EQ(less.bytes(), 0u);
  }
}

INSTANTIATE_TEST_SUITE_P(Specs, EverySpec, testing::ValuesIn(kSpecs), name_of_spec);

class ManyHeads : public testing::TestWithParam<const char*> {};

/// From some thousand KV heads on, threads share the bookkeeping (kSharedHeads): outputs, slots and
/// bytes are those of one thread, and of sequences by themselves, to the bit.
TEST_P(ManyHeads, ThreadsChangeNothing) {
  const CacheShape shape = shape_of(2, 8, 1, 8);
  constexpr int kSequences = 140;
  constexpr int kSteps = 20;
  const auto prompt_of = [](int s) { return PromptShape{2, {6 + s % 13}, 3 + s % 7}.modality(); };
  const auto plan = plan_of(GetParam(), shape);
  size_t bytes = 0;
  for (int s = 0; s < kSequences; ++s) {
    bytes += SequenceBounds(*plan).reservation(size_of(prompt_of(s), kSteps)).bytes();
  }
  PolicyCache alone(plan, bytes, {});
  PolicyCache one(plan, bytes, {});
  PolicyCache many(plan, bytes, {});
  Feeder feeder(shape, 1);
  Feeder threads(shape, 4);
  const auto pass = [&](const std::vector<Feeder::Input>& inputs, const std::string& where) {
    std::vector<std::vector<float>> expected(static_cast<size_t>(shape.layers));
    for (const Feeder::Input& input : inputs) {
      const auto rows = feeder.pass(alone, {input});
      for (size_t layer = 0; layer < rows.size(); ++layer) {
        expected[layer].insert(expected[layer].end(), rows[layer].begin(), rows[layer].end());
      }
    }
    ASSERT_EQ(feeder.pass(one, inputs), expected) << where;
    ASSERT_EQ(threads.pass(many, inputs), expected) << where;
    ASSERT_EQ(one.bytes(), alone.bytes()) << where;
    ASSERT_EQ(many.bytes(), alone.bytes()) << where;
  };
  std::vector<Feeder::Input> step;
  for (int s = 0; s < kSequences; ++s) {
    const SequenceId id = alone.open(size_of(prompt_of(s), kSteps), "s");
    ASSERT_EQ(one.open(size_of(prompt_of(s), kSteps), "s"), id);
    ASSERT_EQ(many.open(size_of(prompt_of(s), kSteps), "s"), id);
    const char name = static_cast<char>(s);
    pass({{name, id, 0, prompt_of(s), true}}, fmt::format("prompt {}", s));
    step.push_back({name, id, static_cast<int>(prompt_of(s).size()), {kTextRow}, false});
  }
  for (int i = 0; i < kSteps; ++i) {
    pass(step, fmt::format("step {}", i));
    if (HasFatalFailure()) return;
    for (Feeder::Input& input : step) ++input.first;
    if (i == kSteps / 2) {  // still enough without some
      for (int s = 0; s < 10; ++s) {
        const auto gone = step.begin() + 9 * s;
        for (PolicyCache* cache : {&alone, &one, &many}) cache->close(gone->id);
        step.erase(gone);
      }
    }
  }
  for (const Feeder::Input& input : step) {
    for (int layer = 0; layer < shape.layers; ++layer) {
      for (size_t head = 0; head < 8; ++head) {
        ASSERT_EQ(many.layer(input.id, layer).heads[head].slots(),
                  alone.layer(input.id, layer).heads[head].slots());
      }
    }
  }
}

TEST_P(ManyHeads, DecodeAllocatesNothing) {
  EXPECT_EQ(allocations_of_decode(GetParam(), shape_of(2, 8, 1, 8), 130, 40), 0u);
}

INSTANTIATE_TEST_SUITE_P(
    Specs, ManyHeads,
    testing::Values("kivi,group=4,residual=8", "int4", "calibquant + int4,scope=text",
                    "vidkv,group=4,residual=8", "vidkv,group=4,residual=8,protect=0.2",
                    "vidkv,group=4,residual=8,flush=requant_key",
                    "vidkv,group=4,residual=8,flush=requant_all,protect=0.2",
                    "vidkv,group=4,residual=8,flush=requant_all,criterion=variance",
                    "prefixkv,keep=0.7 + kivi,group=4,residual=8",
                    "h2o,keep=0.7 + kivi,group=4,residual=8",
                    "kivi,group=4,residual=8 + share=codes"),
    name_of_spec);

/// bytes() is what the closed formulas (docs/formulas.md, "Stored bits") say, after the prompt
/// and each of 300 steps.
TEST(PolicyCacheTest, BytesEqualTheFormulaWhereNothingIsDropped) {
  for (const char* text :
       {"int8", "int4", "kivi", "kivi,bits=3,group=16,residual=32", "asymkv,key_layers=1",
        "head_quantile", "calibquant,bits=2", "xquant", "xquant,kq=2,vq=0,km=0,vm=0", "vidkv",
        "vidkv,protect=0.2", "vidkv,profile=official", "vidkv,mask_scope=head",
        "calibquant + kivi,scope=text", "kivi + share=codes", "int4,scope=text", "kivi,meta=f32"}) {
    SCOPED_TRACE(text);
    const CacheShape shape = shape_of(2, 2, 2, 40);
    const auto plan = plan_of(text, shape);
    const std::vector<int16_t> prompt = PromptShape{7, {140}, 30}.modality();
    const SequenceSize size = size_of(prompt, 300);
    const auto cache = make(text, shape, size);
    Feeder feeder(shape);
    const SequenceId id = cache->open(size, "s");
    for (int step = 0; step <= 300; ++step) {
      const bool first = step == 0;
      feeder.pass(*cache, {{'s', id, first ? 0 : size.prompt_rows + step - 1,
                            first ? prompt : std::vector<int16_t>{kTextRow}, first}});
      const LayerCounts counts{size.prompt_rows, size.visual_rows, 1, step};
      size_t expected = 0;
      for (const PartBytes& layer : formula(*plan, std::vector(2, counts))) {
        expected += layer.total();
      }
      ASSERT_EQ(cache->bytes(), expected) << "step " << step;
    }
  }
}

/// Caches of several policies in one arena give what each gives in its own, and share its bytes.
TEST(PolicyCacheTest, CachesShareAnArena) {
  const CacheShape shape = shape_of(2, 2, 2, 40);
  const std::vector<int16_t> prompt = PromptShape{7, {20}, 30}.modality();
  const SequenceSize size = size_of(prompt, 9);
  const std::vector<std::string> specs = {"kivi,group=8,residual=8", "f16", "h2o,keep=0.5"};
  size_t bytes = 0;
  for (const std::string& spec : specs) {
    bytes += SequenceBounds(*plan_of(spec, shape)).reservation(size).bytes();
  }
  const auto arena = std::make_shared<Arena>(Device{}, bytes);
  std::vector<std::unique_ptr<KvCache>> shared;
  std::vector<std::unique_ptr<PolicyCache>> alone;
  std::vector<std::pair<SequenceId, SequenceId>> ids;
  for (const std::string& spec : specs) {
    shared.push_back(make_cache(plan_of(spec, shape), arena));
    alone.push_back(make(spec, shape, size));
    EXPECT_TRUE(shared.back()->fits(size)) << spec;
    ids.emplace_back(shared.back()->open(size, "s"), alone.back()->open(size, "s"));
  }
  Feeder feeder(shape);
  for (int step = 0; step <= 9; ++step) {
    const bool first = step == 0;
    size_t sum = 0;
    for (size_t i = 0; i < specs.size(); ++i) {
      const auto pass = [&](KvCache& cache, SequenceId id) {
        return feeder.pass(cache, {{'s', id, first ? 0 : size.prompt_rows + step - 1,
                                    first ? prompt : std::vector<int16_t>{kTextRow}, first}});
      };
      ASSERT_EQ(pass(*shared[i], ids[i].first), pass(*alone[i], ids[i].second)) << specs[i];
      ASSERT_EQ(shared[i]->bytes(), alone[i]->bytes()) << specs[i];
      sum += shared[i]->bytes();
    }
    ASSERT_EQ(arena->used(), sum);
  }
  EXPECT_FALSE(shared[1]->fits(size));
  EXPECT_THROW(shared[1]->open(size, "one more"), Error);
  shared[1]->close(ids[1].first);
  EXPECT_EQ(shared[1]->bytes(), 0u);
  EXPECT_TRUE(shared[1]->fits(size));
  shared.clear();
  EXPECT_EQ(arena->reserved(), 0u);
}

/// A first prompt in several passes is what it is in one, for policies that wait for all of it: the
/// same outputs, slots and bytes. Others refuse it.
TEST(PolicyCacheTest, PromptsMayComeInChunks) {
  const std::vector<int16_t> prompt = PromptShape{5, {40}, 9}.modality();
  const SequenceSize size = size_of(prompt, 40);
  for (const char* spec : {"f32 + prefixkv,keep=0.4", "f32 + prefixkv,keep=0.5,evict=sliding",
                           "f32 + prefixkv,keep=0.5,merge=position"}) {
    const auto whole = make(spec, kSmall, size);
    const auto chunked = make(spec, kSmall, size);
    Feeder feeder(kSmall);
    const SequenceId a = whole->open(size, "a");
    const SequenceId b = chunked->open(size, "b");
    const auto expected = feeder.pass(*whole, {{'s', a, 0, prompt, true}});
    const auto close = [&](const std::vector<std::vector<float>>& got,
                           const std::vector<std::vector<float>>& from, size_t first) {
      for (size_t layer = 0; layer < got.size(); ++layer) {
        for (size_t i = 0; i < got[layer].size(); ++i) {
          ASSERT_NEAR(got[layer][i], from[layer][first + i], 1e-5) << spec << ", layer " << layer;
        }
      }
    };
    size_t at = 0;
    for (const size_t end : {size_t{1}, size_t{20}, size_t{39}, prompt.size()}) {
      const std::vector<int16_t> chunk(prompt.begin() + static_cast<std::ptrdiff_t>(at),
                                       prompt.begin() + static_cast<std::ptrdiff_t>(end));
      close(feeder.pass(*chunked, {{'s', b, static_cast<int>(at), chunk, true,
                                    /*ends_prompt=*/end == prompt.size()}}),
            expected, at * static_cast<size_t>(kSmall.q_heads * kSmall.head_dim));
      at = end;
    }
    for (int step = 0; step < 40; ++step) {
      const int fed = size.prompt_rows + step;
      for (size_t layer = 0; layer < 2; ++layer) {
        for (size_t head = 0; head < 2; ++head) {
          ASSERT_EQ(chunked->layer(b, static_cast<int>(layer)).heads[head].slots(),
                    whole->layer(a, static_cast<int>(layer)).heads[head].slots());
        }
      }
      ASSERT_EQ(chunked->bytes(), whole->bytes()) << spec << ", step " << step;
      close(feeder.pass(*chunked, {{'s', b, fed, {kTextRow}, false}}),
            feeder.pass(*whole, {{'s', a, fed, {kTextRow}, false}}), 0);
    }
  }
  for (const char* spec : {"kivi,group=8,residual=16", "uniform,keep=0.5", "vlcache,keep=0.5"}) {
    const auto cache = make(spec, kSmall, size);
    Feeder feeder(kSmall);
    const SequenceId id = cache->open(size, "s");
    const std::vector<int16_t> chunk(prompt.begin(), prompt.begin() + 20);
    EXPECT_THROW(feeder.pass(*cache, {{'s', id, 0, chunk, true, /*ends_prompt=*/false}}), Error)
        << spec;
  }
}

/// Scores the rows of a prompt by the first channel of their keys, as a kernel on a device would,
/// and keeps the best half of each layer.
class FirstChannel final : public Retention {
 public:
  explicit FirstChannel(bool joint, bool queries) : joint_(joint), queries_(queries) {}

  ImportanceNeeds needs() const noexcept override {
    return {.row_scores = true, .queries = queries_};
  }
  bool joint() const noexcept override { return joint_; }
  void score(const LayerRows& layer, std::span<double> scores, Stream&) const override {
    seen.emplace_back();
    for (const StoredRows& keys : layer.keys) {
      EXPECT_EQ(keys.dtype, DType::kF32);
      for (int64_t j = 0; j < keys.rows; ++j) {
        const auto* row = reinterpret_cast<const float*>(keys.data) + j * layer.shape->head_dim;
        scores[static_cast<size_t>(&keys - layer.keys.data()) * keys.rows + j] = row[0];
      }
    }
    const float* first_value = reinterpret_cast<const float*>(layer.values[1].data);
    seen.back().assign(first_value, first_value + layer.shape->head_dim);
    if (queries_) {
      const float* q = layer.queries.as<float>();
      seen.back().insert(seen.back().end(), q, q + layer.queries.elements());
    } else {
      EXPECT_TRUE(layer.queries.empty());
    }
  }
  std::vector<LayerSelection> select(const PromptView& prompt,
                                     std::span<const int> pairs) const override {
    std::vector<LayerSelection> selections;
    for (const retention::Unit& unit : retention::units_of(prompt, pairs)) {
      const auto scores = retention::unit_row_scores(prompt, unit, -1);
      selections.push_back({{retention::keep_best(scores, prompt.rows / 2, 0, 1)}, 0.5});
    }
    return selections;
  }
  int peak_rows(int kept, double, int prompt_rows, int max_rows) const noexcept override {
    return retention::growing_peak(kept, prompt_rows, max_rows);
  }
  int64_t peak_rows_total(int layers, int prompt_rows, int max_rows) const noexcept override {
    return int64_t{layers} * peak_rows(prompt_rows / 2, 0, prompt_rows, max_rows);
  }

  /// Of each call: the first value row of kv_head 1, then all queries.
  mutable std::vector<std::vector<float>> seen;

 private:
  bool joint_;
  bool queries_;
};

/// A rule is shown the rows that a layer has stored and the queries as they came, before attention
/// puts its output in their place; what it makes of them chooses the rows that stay.
TEST(PolicyCacheTest, RulesScoreWhatIsStored) {
  const std::vector<int16_t> prompt = PromptShape{5, {20}, 5}.modality();
  const SequenceSize size = size_of(prompt, 4);
  for (const bool joint : {false, true}) {
    for (const bool queries : {false, true}) {
      const auto plan = plan_of("f32 + uniform,keep=0.5", kSmall);
      auto owned = std::make_unique<FirstChannel>(joint, queries);
      const FirstChannel& rule = *owned;
      plan->retention = std::move(owned);
      PolicyCache cache(plan, SequenceBounds(*plan).reservation(size).bytes(), {});
      EXPECT_EQ(cache.needs().prompt_queries, queries);
      Feeder feeder(kSmall);
      const SequenceId id = cache.open(size, "s");
      const Feeder::Input input{'s', id, 0, prompt, true};
      if (joint && !queries) {  // keys alone may come in parts
        const std::vector<int16_t> first(prompt.begin(), prompt.begin() + 12);
        const std::vector<int16_t> rest(prompt.begin() + 12, prompt.end());
        feeder.pass(cache, {{'s', id, 0, first, true, /*ends_prompt=*/false}});
        EXPECT_TRUE(rule.seen.empty());
        feeder.pass(cache, {{'s', id, 12, rest, true}});
      } else {
        feeder.pass(cache, {input});
      }
      ASSERT_EQ(rule.seen.size(), 2u);
      for (int layer = 0; layer < 2; ++layer) {
        const std::vector<float> k = feeder.k(input, layer);
        const std::vector<float> v = feeder.v(input, layer);
        std::vector<float> expected(v.begin() + 16, v.begin() + 32);
        if (queries) {
          const std::vector<float> q = feeder.q(input, layer);
          expected.insert(expected.end(), q.begin(), q.end());
        }
        EXPECT_EQ(rule.seen[static_cast<size_t>(layer)], expected);
        std::array<double, 2> magnitude{};
        for (size_t i = 0; i < k.size(); i += 16) {
          magnitude[i / 16 % 2] += std::abs(static_cast<double>(k[i]));
        }
        std::vector<double> scores;
        for (size_t j = 0; j < prompt.size(); ++j) {
          scores.push_back(static_cast<double>(k[j * 32]) / magnitude[0] +
                           static_cast<double>(k[j * 32 + 16]) / magnitude[1]);
        }
        std::vector<float> kept;
        for (const int32_t j : retention::keep_best(scores, 15, 0, 1)) {
          const auto row = k.begin() + j * 32;
          kept.insert(kept.end(), row, row + 16);
        }
        EXPECT_EQ(cache.inspect(id, layer, feeder.stream())[0].keys, kept) << "layer " << layer;
      }
    }
  }
}

/// What is stored turned is told as the model made it, packed rows and full ones.
TEST(PolicyCacheTest, TurnedRowsAreInspectedAsTheyCame) {
  const std::vector<int16_t> prompt = PromptShape{5, {20}, 5}.modality();
  const SequenceSize size = size_of(prompt, 4);
  const auto plan = plan_of("kivi,bits=8,group=8,residual=16,rotate=hadamard", kSmall);
  PolicyCache cache(plan, SequenceBounds(*plan).reservation(size).bytes(), {});
  Feeder feeder(kSmall);
  const Feeder::Input input{'s', cache.open(size, "s"), 0, prompt, true};
  feeder.pass(cache, {input});
  for (int layer = 0; layer < 2; ++layer) {
    const std::vector<float> k = feeder.k(input, layer);
    const std::vector<float> v = feeder.v(input, layer);
    const HeadRows rows = cache.inspect(input.id, layer, feeder.stream())[1];
    for (size_t j = 0; j < prompt.size(); ++j) {
      for (size_t i = 0; i < 16; ++i) {
        ASSERT_NEAR(rows.keys[j * 16 + i], k[j * 32 + 16 + i], 0.03) << j << ", " << i;
        ASSERT_NEAR(rows.values[j * 16 + i], v[j * 32 + 16 + i], 0.03) << j << ", " << i;
      }
    }
  }
}

/// In the order of the tokens, where visual tokens are stored separately and KV heads keep
/// different ones, too.
TEST(PolicyCacheTest, ShowsWhatItHoldsOfAPrompt) {
  const std::vector<int16_t> prompt = PromptShape{5, {20, 13}, 6}.modality();
  SequenceSize size = size_of(prompt, 4);
  size.records = true;
  for (const std::string spec : {"f16", "kivi,bits=8,group=8,residual=16", "calibquant,bits=8",
                                 "knorm,keep=0.4 + calibquant,bits=8", "uniform,keep=0.5"}) {
    SCOPED_TRACE(spec);
    const auto plan = plan_of(spec, kSmall);
    PolicyCache cache(plan, SequenceBounds(*plan).reservation(size).bytes(), {});
    Feeder feeder(kSmall);
    const Feeder::Input input{'s', cache.open(size, "s"), 0, prompt, true};
    feeder.pass(cache, {input});
    for (int layer = 0; layer < kSmall.layers; ++layer) {
      const std::vector<float> k = feeder.k(input, layer);
      const std::vector<float> v = feeder.v(input, layer);
      const CachedLayer held = cache.cached_prompt(input.id, layer, feeder.stream());
      const auto slots = static_cast<size_t>(held.slots);
      ASSERT_EQ(held.kept.size(), 2 * slots);
      EXPECT_EQ(slots == prompt.size(), spec.find("keep") == std::string::npos);
      for (size_t h = 0; h < 2; ++h) {
        const auto first = held.kept.begin() + static_cast<std::ptrdiff_t>(h * slots);
        EXPECT_TRUE(std::is_sorted(first, first + held.slots));
        for (size_t j = 0; j < slots; ++j) {
          const auto row = static_cast<size_t>(held.kept[h * slots + j]);
          ASSERT_EQ(held.tags[h * slots + j], prompt[row]);
          const bool whole = spec == "f16" || prompt[row] == kTextRow;
          const float near = whole && !spec.starts_with("kivi") ? 2e-3F : 0.05F;
          for (size_t i = 0; i < 16; ++i) {
            const size_t at = (h * slots + j) * 16 + i;
            ASSERT_NEAR(held.keys[at], k[row * 32 + h * 16 + i], near) << row;
            ASSERT_NEAR(held.values[at], v[row * 32 + h * 16 + i], near) << row;
          }
        }
      }
    }
    feeder.pass(cache, {{'s', input.id, static_cast<int>(prompt.size()), {kTextRow}, false}});
    EXPECT_THROW(cache.cached_prompt(input.id, 0, feeder.stream()), Error);
  }
}

TEST(PolicyCacheTest, QueriesThatAreScoredComeInOnePass) {
  const std::vector<int16_t> prompt = PromptShape{5, {20}, 5}.modality();
  const SequenceSize size = size_of(prompt, 4);
  const auto plan = plan_of("f32 + uniform,keep=0.5", kSmall);
  plan->retention = std::make_unique<FirstChannel>(/*joint=*/true, /*queries=*/true);
  PolicyCache cache(plan, SequenceBounds(*plan).reservation(size).bytes(), {});
  Feeder feeder(kSmall);
  const std::vector<int16_t> chunk(prompt.begin(), prompt.begin() + 12);
  try {
    feeder.pass(cache, {{'s', cache.open(size, "s"), 0, chunk, true, /*ends_prompt=*/false}});
    ADD_FAILURE() << "nothing was thrown";
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), HasSubstr("must be passed in one call; 12 of 30 tokens were passed"));
  }
}

/// With q_per_kv query heads for each kv_head, keys and values copied once for each query head give
/// the same outputs in every composition: scales belong to a kv_head, and nothing else changes.
TEST(PolicyCacheTest, GroupedQueriesEqualCopiedHeads) {
  const CacheShape grouped = shape_of(2, 2, 3, 16);
  const CacheShape copied = shape_of(2, 6, 1, 16);
  for (const char* spec :
       {"kivi,group=8,residual=16", "calibquant", "head_quantile", "vidkv,group=8,residual=16",
        "xquant,group=8,residual=16", "prefixkv,keep=0.5 + kivi,group=8,residual=16"}) {
    const std::vector<int16_t> prompt = PromptShape{5, {40}, 9}.modality();
    const SequenceSize size = size_of(prompt, 30);
    const auto a = make(spec, grouped, size);
    const auto b = make(spec, copied, size);
    Feeder feeder(grouped);
    const SequenceId id_a = a->open(size, "a");
    const SequenceId id_b = b->open(size, "b");
    int fed = 0;
    for (int step = 0; step <= 30; ++step) {
      const Feeder::Input input{'s', id_a, fed, step == 0 ? prompt : std::vector<int16_t>{kTextRow},
                                step == 0};
      const auto expected = feeder.pass(*a, {input});
      StepRows rows;
      rows.sequence = id_b;
      rows.rows = static_cast<int>(input.modality.size());
      rows.prompt = rows.ends_prompt = input.prompt;
      rows.modality = input.modality;
      b->begin({&rows, 1}, feeder.stream());
      for (int layer = 0; layer < 2; ++layer) {
        std::vector<float> q = feeder.q(input, layer);
        const auto copy = [&](const std::vector<float>& x) {
          std::vector<float> all;
          for (size_t row = 0; row < input.modality.size(); ++row) {
            for (size_t head = 0; head < 6; ++head) {
              const auto from = x.begin() + static_cast<std::ptrdiff_t>((row * 2 + head / 3) * 16);
              all.insert(all.end(), from, from + 16);
            }
          }
          return all;
        };
        std::vector<float> k = copy(feeder.k(input, layer));
        std::vector<float> v = copy(feeder.v(input, layer));
        const auto view = [&](std::vector<float>& x) {
          return TensorView(x.data(), DType::kF32, {rows.rows, 6, 16});
        };
        b->attend(layer, view(q), view(k), view(v), view(q), feeder.scale(), feeder.stream());
        for (size_t i = 0; i < q.size(); ++i) {
          ASSERT_NEAR(q[i], expected[static_cast<size_t>(layer)][i], 1e-5) << spec << " " << step;
        }
      }
      b->end(feeder.stream());
      fed += rows.rows;
    }
  }
}

}  // namespace
}  // namespace kvlm
