#include "kvcache/engine/table_load.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <iterator>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "kvcache/engine/placed_rows.h"
#include "kvcache/plan/sequence_bounds.h"
#include "kvcache/policy_cache.h"
#include "tests/kvcache/feeder.h"
#include "tests/kvcache/plans.h"

namespace kvlm {
namespace {

using namespace testlife;

constexpr int kSteps = 60;

/// The numbers of the rows that places have, in their order.
std::vector<int> numbers_in(std::span<const int> came) {
  std::vector<int> numbers;
  std::copy_if(came.begin(), came.end(), std::back_inserter(numbers),
               [](int number) { return number != WeighedRows::kNoRow; });
  std::sort(numbers.begin(), numbers.end());
  return numbers;
}

PlacedRows::Side side_of(std::span<const int> came, const GrowingRows& gained) {
  return {{came.begin(), came.end()},
          gained.first,
          gained.full,
          gained.blocks,
          gained.filling,
          gained.filled};
}

/// What a KV head is described as is what it becomes again: keys and values have the same rows.
void check_placed(const CacheTraits& traits, PlacedHeads& heads, const HeadState& head, int layer,
                  const std::string& where) {
  std::vector<SlotSegment> memory(8);
  SegmentList segments(memory.data());
  TableHead table_head;
  heads.describe(head, layer, 0, {}, segments, table_head);
  if (table_head.weighed.came.empty()) return;  // in order
  std::vector<int> all(static_cast<size_t>(head.slots()));
  std::iota(all.begin(), all.end(), 0);
  ASSERT_EQ(numbers_in(table_head.weighed.came), all) << where;
  ASSERT_EQ(numbers_in(table_head.weighed.values_came), all) << where;
  PlacedRows rows{{side_of(table_head.weighed.came, table_head.keys_gained),
                   side_of(table_head.weighed.values_came, table_head.values_gained)},
                  {}};
  HeadState again = head;
  take_placed(traits.layer(layer), again, rows, head.slots());
  ASSERT_EQ(again.tags, head.tags) << where;
  for (const size_t store : {size_t{kVisual}, size_t{kRest}}) {
    for (const KvSide side : {KvSide::kKeys, KvSide::kValues}) {
      const KvBuffer& found = again.buffer(store, side);
      const KvBuffer& expected = head.buffer(store, side);
      ASSERT_EQ(found.bytes(), expected.bytes()) << where;
      ASSERT_EQ(found.packed(), expected.packed()) << where;
      ASSERT_EQ(found.full(), expected.full()) << where;
      ASSERT_EQ(found.blocks.all().size(), expected.blocks.all().size()) << where;
      for (size_t b = 0; b < expected.blocks.all().size(); ++b) {
        ASSERT_EQ(found.blocks.all()[b].codes, expected.blocks.all()[b].codes) << where;
        ASSERT_EQ(found.blocks.all()[b].live_rows, expected.blocks.all()[b].live_rows) << where;
      }
    }
  }
}

/// A life of each of three prompts.
void check_lives(const std::shared_ptr<const CachePlan>& plan, const CacheTraits& traits) {
  const CacheShape& shape = plan->shape;
  for (const PromptShape& prompt_shape :
       {PromptShape{5, {40}, 9}, PromptShape{2, {13, 30}, 20}, PromptShape{20, {}, 0}}) {
    const std::vector<int16_t> prompt = prompt_shape.modality();
    Sequence sequence;
    sequence.size = size_of(prompt, kSteps);
    sequence.open = true;
    const TableLoad room = table_load(traits, {&sequence, 1}, {});
    PolicyCache cache(plan, SequenceBounds(*plan).reservation(sequence.size).bytes(), Device{});
    const SequenceId id = cache.open(sequence.size, "s");
    Feeder feeder(shape);
    PlacedHeads heads(traits);
    feeder.pass(cache, {{'a', id, 0, prompt, true}});
    for (int step = 0; step <= kSteps; ++step) {
      sequence.layers.clear();
      for (int layer = 0; layer < shape.layers; ++layer) {
        sequence.layers.push_back(cache.layer(id, layer));
        const std::string where =
            "step " + std::to_string(step) + ", layer " + std::to_string(layer);
        check_placed(traits, heads, cache.layer(id, layer).heads[0], layer, where);
        if (testing::Test::HasFatalFailure()) return;
      }
      sequence.prompted = true;
      sequence.places = -1;
      const TableLoad counted = table_load(traits, {&sequence, 1}, {});
      sequence.places = most_places(sequence);
      EXPECT_EQ(table_load(traits, {&sequence, 1}, {}).weighed_rows, counted.weighed_rows);
      const TableLoad placed = placed_load(traits, sequence);
      ASSERT_GT(placed.weighed_rows, 0);
      ASSERT_LE(placed.weighed_rows, room.weighed_rows);
      ASSERT_LE(placed.blocks, room.blocks);
      ASSERT_LE(placed.fixed_blocks, room.fixed_blocks);
      if (step == kSteps) break;
      const int row = static_cast<int>(prompt.size()) + step;
      feeder.pass(cache, {{'a', id, row, {kTextRow}, false}});
    }
  }
}

/// Room that is made before a prompt is enough for what it leaves and for all that follows, and
/// where rows lie is said right at every step of a host that drops them.
TEST(TableLoadTest, HasRoomForWhatIsPlaced) {
  int placed = 0;  // specs
  for (const char* spec : kSpecs) {
    SCOPED_TRACE(spec);
    const auto plan = test::plan_of(spec, shape_of(3, 2, 2, 16));
    const CacheTraits traits(plan, Device{DeviceKind::kCuda, 0});
    if (!traits.table().places) continue;
    check_lives(plan, traits);
    if (HasFatalFailure()) return;
    ++placed;
  }
  EXPECT_GE(placed, 20);
}

/// Blocks that a table may have to list, of pictures that are packed in windows as well.
TEST(TableLoadTest, HasRoomForTheBlocksOfLongPictures) {
  const std::vector<int16_t> prompt = PromptShape{5, {2885}, 9}.modality();
  for (const char* spec : {"int4,scope=visual", "kivi,group=8,residual=16,scope=visual",
                           "streaming,keep=0.9 + int4,scope=visual", "streaming,keep=0.9 + int4"}) {
    SCOPED_TRACE(spec);
    const auto plan = test::plan_of(spec, shape_of(2, 1, 2, 16));
    const CacheTraits traits(plan, Device{DeviceKind::kCuda, 0});
    const SequenceSize size = size_of(prompt, 40);
    const size_t bytes = 2 * SequenceBounds(*plan).reservation(size).bytes();
    PolicyCache cache(plan, bytes, Device{});
    Feeder feeder(plan->shape);
    const SequenceId id = cache.open(size, "s");
    feeder.pass(cache, {{'a', id, 0, prompt, true}});
    const SequenceId fork = cache.fork(id, size.max_rows, "f", feeder.stream());
    std::vector<Sequence> sequences(2);
    for (Sequence& sequence : sequences) {
      sequence.size = size;
      sequence.open = true;
    }
    sequences[1].goes_on_elsewhere = true;
    for (int layer = 0; layer < plan->shape.layers; ++layer) {
      sequences[1].layers.push_back(cache.layer(fork, layer));
    }
    const TableLoad room = table_load(traits, sequences, {});
    for (const LayerState& layer : sequences[1].layers) {
      int blocks = 0;
      for (const StoreBuffers& buffers : layer.heads[0].stores) {
        for (const KvBuffer* buffer : {&buffers.keys, &buffers.values}) {
          for (const PackedBlock& block : buffer->blocks.all()) blocks += block.rows / 256 + 1;
        }
      }
      EXPECT_GE(room.listed_blocks, blocks);
    }
  }
}

}  // namespace
}  // namespace kvlm
