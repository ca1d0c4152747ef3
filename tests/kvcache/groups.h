#pragma once

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "kvcache/policy_cache.h"
#include "tests/kvcache/feeder.h"
#include "tests/kvcache/plans.h"

namespace kvlm::testlife {

/// What a cache makes of each layer: outputs of each step, then the stored rows
/// of its KV heads.
struct LayersMade {
  std::vector<std::vector<std::vector<float>>> outputs;  // by step
  std::vector<std::vector<HeadRows>> rows;
};

inline LayersMade make_layers(const std::string& spec, int layers, Device device) {
  const CacheShape shape = shape_of(layers, 2, 2, 16);
  const std::vector<int16_t> prompts[] = {PromptShape{3, {30}, 9}.modality(),
                                          PromptShape{2, {5, 12}, 4}.modality()};
  constexpr int kSteps = 12;
  PolicyCache cache(test::plan_of(spec, shape), size_t{4} << 20, device);
  Feeder feeder(shape, 2, device);
  std::vector<Feeder::Input> inputs;
  for (const std::vector<int16_t>& prompt : prompts) {  // of one step, together
    const SequenceId id = cache.open(size_of(prompt, kSteps), "s");
    inputs.push_back({static_cast<char>('a' + inputs.size()), id, 0, prompt, true});
  }
  LayersMade made;
  for (int step = 0; step < kSteps; ++step) {
    made.outputs.push_back(feeder.pass(cache, inputs));
    for (Feeder::Input& input : inputs) {
      input.first += static_cast<int>(input.modality.size());
      input.modality = {kTextRow};
      input.prompt = false;
    }
  }
  for (int layer = 0; layer < layers; ++layer) {
    made.rows.push_back(cache.inspect(inputs[1].id, layer, feeder.stream()));
  }
  return made;
}

/// A prompt's end finishes layers in groups, some behind the attention of others. A rule that
/// chooses layer by layer makes the same of a layer however many follow it.
inline void check_groups(const std::string& spec, Device device) {
  SCOPED_TRACE(spec);
  const LayersMade all = make_layers(spec, 9, device);
  for (const int layers : {1, 2, 3, 4, 5, 6, 7}) {
    const LayersMade some = make_layers(spec, layers, device);
    for (int layer = 0; layer < layers; ++layer) {
      const auto at = static_cast<size_t>(layer);
      const std::string where = fmt::format("layer {} of {}", layer, layers);
      for (size_t step = 0; step < all.outputs.size(); ++step) {
        ASSERT_EQ(some.outputs[step][at], all.outputs[step][at]) << where << ", step " << step;
      }
      for (size_t head = 0; head < all.rows[at].size(); ++head) {
        ASSERT_EQ(some.rows[at][head].keys, all.rows[at][head].keys) << where;
        ASSERT_EQ(some.rows[at][head].values, all.rows[at][head].values) << where;
      }
    }
  }
}

/// By sums of each KV head and by their means, with weights that go on and without, packed and not.
inline constexpr const char* kGroupedSpecs[] = {
    "h2o,keep=0.5",
    "h2o,keep=0.5 + int4",
    "snapkv,keep=0.5,window=8",
    "snapkv,keep=0.5,window=8,head_shared=on + kivi,group=8,residual=16",
    "tova,keep=0.5",
    "pyramidinfer,keep=0.5,schedule=geometric,decay=1",
    "streaming,keep=0.5",
    "knorm,keep=0.5",
    "kivi,group=8,residual=16"};

}  // namespace kvlm::testlife
