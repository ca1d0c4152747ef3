#include "kvcache/engine/gained_counts.h"

#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "kvcache/plan/sequence_bounds.h"
#include "kvcache/policy_cache.h"
#include "tests/kvcache/feeder.h"
#include "tests/kvcache/plans.h"

namespace kvlm {
namespace {

using namespace testlife;

/// What a buffer holds, and where.
void expect_same(const KvBuffer& found, const KvBuffer& expected, const std::string& where) {
  ASSERT_EQ(found.bytes(), expected.bytes()) << where;
  ASSERT_EQ(found.packed(), expected.packed()) << where;
  ASSERT_EQ(found.full(), expected.full()) << where;
  if (expected.full() > 0) {
    ASSERT_EQ(found.ring.row(0), expected.ring.row(0)) << where;
  }
  ASSERT_EQ(found.blocks.all().size(), expected.blocks.all().size()) << where;
  for (size_t i = 0; i < expected.blocks.all().size(); ++i) {
    ASSERT_EQ(found.blocks.all()[i].codes, expected.blocks.all()[i].codes) << where;
    ASSERT_EQ(found.blocks.all()[i].scales, expected.blocks.all()[i].scales) << where;
    ASSERT_EQ(found.blocks.all()[i].rows, expected.blocks.all()[i].rows) << where;
  }
}

class GainedCountsOfSpec : public ::testing::TestWithParam<const char*> {
 protected:
  /// A copy of what the cache holds of its only sequence.
  void copy(PolicyCache& cache, SequenceId id, int rows) {
    copied_.layers.clear();
    for (int layer = 0; layer < cache.shape().layers; ++layer) {
      copied_.layers.push_back(cache.layer(id, layer));
    }
    copied_.rows = rows;
    copied_.uncounted = 0;
  }

  void check(Device device);

  Sequence copied_;
};

/// What is counted in a few numbers is what a cache on the CPU counts buffer by buffer, at every
/// step the bytes and, whenever it is caught up, every row and block.
void GainedCountsOfSpec::check(Device device) {
  const CacheShape shape = shape_of(3, 2, 2, 16);
  const auto plan = test::plan_of(GetParam(), shape);
  const CacheTraits traits(plan, device);
  const GainedCounts counts(traits);
  Feeder feeder(shape);
  const std::vector<int16_t> prompt = PromptShape{5, {40}, 9}.modality();
  constexpr int kSteps = 150;
  copied_.size = size_of(prompt, kSteps);
  PolicyCache cache(plan, SequenceBounds(*plan).reservation(copied_.size).bytes(), Device{});
  const SequenceId id = cache.open(copied_.size, "s");
  const auto n = static_cast<int>(prompt.size());
  feeder.pass(cache, {{'a', id, 0, prompt, true}});
  copied_.prompt_rows = n;
  copy(cache, id, n);
  counts.start(copied_);
  size_t bytes = cache.bytes();
  std::vector<int> dropped(static_cast<size_t>(shape.layers));
  int counted = 0;
  for (int step = 0; step < kSteps; ++step) {
    feeder.pass(cache, {{'a', id, n + step, {kTextRow}, false}});
    const Gain gain = counts.gain(copied_, dropped);
    ++copied_.rows;
    if (gain.host) {  // the host has flushed or dropped, and tells the GPU what is left
      copy(cache, id, n + step + 1);
      counts.start(copied_);
      bytes = cache.bytes();
      continue;
    }
    ++counted;
    bytes += gain.bytes;
    ASSERT_EQ(bytes, cache.bytes()) << "step " << step;
    copied_.on_gpu = true;
    for (size_t layer = 0; layer < dropped.size(); ++layer) {
      ASSERT_EQ(copied_.slots_of(layer), cache.layer(id, static_cast<int>(layer)).heads[0].slots());
    }
    if (step % 7 != 0) continue;
    counts.catch_up(copied_);
    for (int layer = 0; layer < shape.layers; ++layer) {
      const LayerState& found = copied_.layers[static_cast<size_t>(layer)];
      const LayerState& expected = cache.layer(id, layer);
      for (size_t h = 0; h < found.heads.size(); ++h) {
        const std::string where = "step " + std::to_string(step) + ", layer " +
                                  std::to_string(layer) + ", head " + std::to_string(h);
        for (const KvSide side : {KvSide::kKeys, KvSide::kValues}) {
          expect_same(found.heads[h].buffer(kRest, side), expected.heads[h].buffer(kRest, side),
                      where);
        }
        ASSERT_EQ(found.heads[h].tags, expected.heads[h].tags) << where;
        ASSERT_EQ(found.heads[h].scores, expected.heads[h].scores) << where;
      }
      ASSERT_EQ(found.heads[0].slots(), expected.heads[0].slots());
      ASSERT_EQ(found.rotated_by, expected.rotated_by);
    }
  }
  EXPECT_GT(counted, kSteps / 2);
}

TEST_P(GainedCountsOfSpec, AreWhatAHostsBuffersCount) { check(Device{}); }

/// Where a GPU chooses by score, each KV head for itself, the host finds out when it is asked.
class GainedCountsByScore : public GainedCountsOfSpec {};

TEST_P(GainedCountsByScore, AreWhatAHostsBuffersCount) {
  const Device gpu{DeviceKind::kCuda, 0};
  const CacheTraits traits(test::plan_of(GetParam(), shape_of(3, 2, 2, 16)), gpu);
  ASSERT_TRUE(traits.table().scores);
  check(gpu);
}

INSTANTIATE_TEST_SUITE_P(Specs, GainedCountsByScore,
                         ::testing::Values("random,keep=0.5", "prefixkv,keep=0.4",
                                           "snapkv,keep=0.5,window=8,evict=score",
                                           "uniform,keep=0.3,sinks=3",
                                           "knorm,keep=0.7,evict=score"),
                         name_of_spec);

INSTANTIATE_TEST_SUITE_P(
    Specs, GainedCountsOfSpec,
    ::testing::Values("kivi,group=8,residual=16", "kivi,bits=3,group=4,residual=8",
                      "asymkv,key_layers=1,value_layers=2,group=8,residual=16", "int4", "int8",
                      "calibquant,bits=2", "calibquant,bits=4 + int4,scope=text",
                      "xquant,group=8,residual=16", "head_quantile", "uniform,keep=0.5",
                      "prefixkv,keep=0.4", "prefixkv,keep=0.5,evict=sliding",
                      "prefixkv,keep=0.5 + int4", "prefixkv,keep=0.5 + kivi,group=8,residual=16",
                      "knorm,keep=0.5", "vlcache,keep=0.5", "streaming,keep=0.4,rerotate=on",
                      "streaming,keep=0.6,budget=proportional",
                      "streaming,keep=0.5,rerotate=on,sinks=0",
                      "snapkv,keep=0.5,window=8,evict=window,distance=6"),
    name_of_spec);

/// Where a row goes for each that comes, by its weight, bytes and slots stay as they are.
TEST(GainedCountsTest, StayWhereAGpuDropsTheRowOfLeastWeight) {
  const CacheShape shape = shape_of(3, 2, 2, 16);
  for (const char* spec : {"h2o,keep=0.5", "h2o,keep=0.5,head_shared=on", "tova,keep=0.5"}) {
    const auto plan = test::plan_of(spec, shape);
    const CacheTraits traits(plan, Device{DeviceKind::kCuda, 0});
    ASSERT_TRUE(traits.table().weighs) << spec;
    const GainedCounts counts(traits);
    Feeder feeder(shape);
    const std::vector<int16_t> prompt = PromptShape{5, {40}, 9}.modality();
    Sequence sequence;
    sequence.size = size_of(prompt, 30);
    PolicyCache cache(plan, SequenceBounds(*plan).reservation(sequence.size).bytes(), Device{});
    const SequenceId id = cache.open(sequence.size, "s");
    const auto n = static_cast<int>(prompt.size());
    feeder.pass(cache, {{'a', id, 0, prompt, true}});
    for (int layer = 0; layer < shape.layers; ++layer) {
      sequence.layers.push_back(cache.layer(id, layer));
    }
    counts.start(sequence);
    sequence.on_gpu = true;
    std::vector<int> dropped(static_cast<size_t>(shape.layers));
    for (int step = 0; step < 30; ++step) {
      const size_t bytes = cache.bytes();
      feeder.pass(cache, {{'a', id, n + step, {kTextRow}, false}});
      const Gain gain = counts.gain(sequence, dropped);
      ASSERT_EQ(cache.bytes(), bytes + gain.bytes) << spec;
      ASSERT_FALSE(gain.host || gain.due[0] || gain.due[1]);
      ASSERT_EQ(sequence.slots_of(0), cache.layer(id, 0).heads[0].slots());
    }
  }
}

/// Which rows that go by their weights a GPU drops, and which of these it packs.
TEST(GainedCountsTest, LeaveRowsThatGoByWeightToTheGpuThatPacksThem) {
  const CacheShape shape = shape_of(2, 1, 2, 16);
  const Device gpu{DeviceKind::kCuda, 0};
  const auto drops = [&](const char* spec, Device device) {
    const CacheTraits traits(test::plan_of(spec, shape), device);
    return std::pair(traits.table().weighs, traits.table().places);
  };
  EXPECT_EQ(drops("h2o,keep=0.5", gpu), std::pair(true, false));
  EXPECT_EQ(drops("h2o,keep=0.5 + int4", gpu), std::pair(true, true));
  EXPECT_EQ(drops("tova,keep=0.5 + kivi,group=8,residual=16", gpu), std::pair(true, true));
  for (const char* spec : {"knorm,keep=0.5", "h2o,keep=0.5 + vidkv,group=8,residual=16,protect=0.2",
                           "h2o,keep=0.5 + calibquant,key_bits=16"}) {
    EXPECT_EQ(drops(spec, gpu), std::pair(false, false)) << spec;
  }
  EXPECT_EQ(drops("h2o,keep=0.5 + calibquant", gpu), std::pair(true, true));
  EXPECT_EQ(drops("h2o,keep=0.95,head_shared=on + int4,tail_keep=0 + share=codes", gpu),
            std::pair(true, true));
  // The host packs, after the GPU has dropped.
  EXPECT_EQ(drops("h2o,keep=0.5 + vidkv,group=8,residual=16", gpu), std::pair(true, true));
  EXPECT_EQ(drops("h2o,keep=0.5 + int4", Device{}), std::pair(false, false));
  // Rows that the host names, the same for all KV heads.
  EXPECT_EQ(drops("streaming,keep=0.5 + int4", gpu), std::pair(false, true));
  EXPECT_EQ(drops("streaming,keep=0.5", gpu), std::pair(false, false));
  EXPECT_EQ(drops("streaming,keep=0.5 + int4,layers=0", gpu), std::pair(false, false));
}

/// A window that the host flushes ends what a GPU can count.
TEST(GainedCountsTest, LeaveAWindowThatIsPackedAnewToTheHost) {
  const CacheShape shape = shape_of(2, 1, 2, 16);
  const auto plan = test::plan_of("vidkv,group=8,residual=16", shape);
  const CacheTraits traits(plan, Device{});
  EXPECT_TRUE(traits.host_flushes(0, KvSide::kKeys));
  EXPECT_TRUE(traits.host_flushes(0, KvSide::kValues));
  const CacheTraits kivi(test::plan_of("kivi,group=8,residual=16", shape), Device{});
  EXPECT_FALSE(kivi.host_flushes(0, KvSide::kKeys));
  EXPECT_FALSE(kivi.host_flushes(0, KvSide::kValues));
}

}  // namespace
}  // namespace kvlm
