#include "kvcache/simulation.h"

#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "kernels/base/error.h"
#include "kvcache/plan/sequence_bounds.h"
#include "kvcache/policy_cache.h"
#include "tests/kvcache/feeder.h"
#include "tests/kvcache/lives.h"
#include "tests/kvcache/plans.h"
#include "tests/kvcache/simulated.h"

namespace kvlm {
namespace {

using namespace testlife;

const CacheShape kSmall = shape_of(3, 2, 2, 16);

/// A cache that has read one prompt, and what each layer holds of it.
struct AfterPrompt {
  AfterPrompt(const std::string& spec, const std::vector<int16_t>& prompt, const CacheShape& shape)
      : feeder(shape, 1) {
    SequenceSize size = size_of(prompt, 8);
    size.records = true;
    const auto plan = test::plan_of(spec, shape);
    const size_t bytes = SequenceBounds(*plan).reservation(size).bytes();
    cache = std::make_unique<PolicyCache>(plan, bytes, Device{});
    input = {'s', cache->open(size, "s"), 0, prompt, true};
    outputs = feeder.pass(*cache, {input});
    for (int layer = 0; layer < shape.layers; ++layer) {
      layers.push_back(cache->cached_prompt(input.id, layer, feeder.stream()));
    }
  }

  Feeder feeder;
  std::unique_ptr<PolicyCache> cache;
  Feeder::Input input;
  std::vector<std::vector<float>> outputs;
  std::vector<CachedLayer> layers;
};

/// It changes the tokens that a prompt keeps, but for the newest, and neither the prompt's own
/// attention nor a byte.
TEST(Simulation, TakesThePlaceOfKeptRows) {
  test::register_rounded();
  const std::vector<int16_t> prompt = PromptShape{5, {20, 13}, 6}.modality();
  for (const std::string rule : {"f16", "knorm,keep=0.4", "uniform,keep=0.5", "h2o,keep=0.5"}) {
    SCOPED_TRACE(rule);
    const std::string simulated = rule == "f16" ? "rounded,hold=7" : rule + " + rounded,hold=7";
    const AfterPrompt plain(rule, prompt, kSmall);
    const AfterPrompt changed(simulated, prompt, kSmall);
    EXPECT_EQ(changed.outputs, plain.outputs);
    EXPECT_EQ(changed.cache->bytes(), plain.cache->bytes());
    for (size_t layer = 0; layer < plain.layers.size(); ++layer) {
      const CachedLayer& before = plain.layers[layer];
      const CachedLayer& after = changed.layers[layer];
      ASSERT_EQ(after.kept, before.kept);
      for (size_t i = 0; i < before.keys.size(); ++i) {
        const size_t slot = i / 16 % static_cast<size_t>(before.slots);
        const bool stays = slot + 7 >= static_cast<size_t>(before.slots);
        const float key = stays ? before.keys[i] : std::round(before.keys[i] * 8) / 8;
        ASSERT_EQ(after.keys[i], key) << "layer " << layer << ", slot " << slot;
        ASSERT_EQ(after.values[i], stays ? before.values[i] : -before.values[i]);
      }
    }
  }
}

TEST(Simulation, HoldsAllOfAShortPrompt) {
  test::register_rounded();
  const std::vector<int16_t> prompt(9, kTextRow);
  const AfterPrompt plain("f16", prompt, kSmall);
  const AfterPrompt held("rounded,hold=9", prompt, kSmall);
  EXPECT_EQ(held.layers[1].keys, plain.layers[1].keys);
  EXPECT_EQ(held.layers[1].values, plain.layers[1].values);
}

TEST(Simulation, HasANameOfItsOwn) {
  test::register_rounded();
  const SimulationEntry* found = find_simulation("rounded");
  ASSERT_NE(found, nullptr);
  EXPECT_EQ(find_policy("rounded"), &found->info);
  EXPECT_EQ(found->info.kind, PartKind::kSimulation);
  EXPECT_THROW(register_simulation({{.name = "rounded"}, found->make}), Error);
  EXPECT_THROW(register_simulation({{.name = "kivi"}, found->make}), Error);
  EXPECT_THROW(register_retention({{.name = "rounded"}, {}}), Error);
}

}  // namespace
}  // namespace kvlm
