#include "kvcache/plane.h"

#include <gtest/gtest.h>

#include <vector>

namespace kvlm {
namespace {

/// A plane of rows that are packed one by one, behind a ring of `places` rows.
struct OneByOne {
  explicit OneByOne(int places, const Plane* owner = nullptr) {
    packing.format.axis = ScaleAxis::kToken;
    packing.format.group_size = 8;
    packing.format.section[0] = {.code = CodeFormat::kBits4, .channels = 8};
    layout.packing = &packing;
    layout.head_dim = 8;
    layout.shared = owner != nullptr;
    layout.writes = owner == nullptr;
    start(memory, places, owner);
  }
  void start(std::vector<std::byte>& in, int places, const Plane* owner) {
    const PlaneCapacity capacity = Plane::capacity(layout, 1, 400, 1, places);
    in.resize(capacity.bytes());
    plane.place(layout, capacity, in.data(), in.data() + capacity.packed_bytes, owner);
    for (int i = 0; i + 1 < places; ++i) plane.push_row();
  }
  /// A row comes, the oldest is packed.
  void step() {
    plane.push_row();
    plane.push_packed(1);
    plane.pop_rows(1);
  }
  std::ptrdiff_t offset(const std::byte* p) const { return p - memory.data(); }

  Packing packing;
  Plane::Layout layout;
  std::vector<std::byte> memory;
  Plane plane;
};

/// What gain() counts at once is what rows count one by one, across blocks of 32 and ring ends.
TEST(PlaneTest, GainsAsRowByRow) {
  const FlushRule window{1, 0, 0, 1};
  for (const int places : {1, 5, 33}) {
    for (const int before : {1, 31, 32, 40}) {
      for (const int rows : {1, 2, 31, 33}) {
        OneByOne slow(places);
        OneByOne fast(places);
        for (int i = 0; i < before; ++i) slow.step(), fast.step();
        for (int i = 0; i < rows; ++i) slow.step();
        FlushRule rule = window;
        rule.trigger = places;
        fast.plane.gain(rows, &rule);
        EXPECT_EQ(fast.plane.packed(), before + rows);
        EXPECT_EQ(fast.plane.full(), slow.plane.full());
        EXPECT_EQ(fast.plane.bytes(), slow.plane.bytes());
        ASSERT_EQ(fast.plane.blocks().size(), slow.plane.blocks().size());
        for (size_t i = 0; i < fast.plane.blocks().size(); ++i) {
          EXPECT_EQ(fast.offset(fast.plane.blocks()[i].codes),
                    slow.offset(slow.plane.blocks()[i].codes));
          EXPECT_EQ(fast.plane.blocks()[i].rows, slow.plane.blocks()[i].rows);
        }
        // The next row of both goes to the same place.
        EXPECT_EQ(fast.offset(fast.plane.push_row()), slow.offset(slow.plane.push_row()));
      }
    }
  }
}

/// Rows that come at once lie where they would one by one.
TEST(PlaneTest, TakesRowsSideBySide) {
  OneByOne slow(9);
  OneByOne fast(9);
  for (OneByOne* plane : {&slow, &fast}) plane->plane.pop_rows(8);
  for (const int rows : {3, 1, 4}) {
    const std::byte* first = fast.plane.push_rows(rows);
    EXPECT_EQ(fast.offset(first), slow.offset(slow.plane.push_row()));
    for (int i = 1; i < rows; ++i) slow.plane.push_row();
    EXPECT_EQ(fast.plane.full(), slow.plane.full());
    EXPECT_EQ(fast.plane.bytes(), slow.plane.bytes());
  }
}

/// Blocks of a plane that drops nothing lie where those of one that may do.
TEST(PlaneTest, NeedsNoPlaceForWhatWouldBeDropped) {
  OneByOne drops(1);
  OneByOne keeps(1);
  keeps.layout.evicts = false;
  keeps.start(keeps.memory, 1, nullptr);
  for (int i = 0; i < 100; ++i) {
    for (OneByOne* plane : {&drops, &keeps}) plane->step();
    if (i != 50) continue;
    for (OneByOne* plane : {&drops, &keeps}) plane->plane.clear_packed();
  }
  ASSERT_EQ(keeps.plane.blocks().size(), drops.plane.blocks().size());
  for (size_t i = 0; i < keeps.plane.blocks().size(); ++i) {
    EXPECT_EQ(keeps.offset(keeps.plane.blocks()[i].codes),
              drops.offset(drops.plane.blocks()[i].codes));
  }
  // A block that loses all of its rows is the next one's place.
  const std::ptrdiff_t first = drops.offset(drops.plane.blocks()[0].codes);
  for (int i = 0; i < 32; ++i) EXPECT_EQ(drops.plane.evict(0).ring, nullptr);
  for (int i = drops.plane.blocks().back().rows; i <= 32; ++i) drops.step();
  EXPECT_EQ(drops.offset(drops.plane.blocks().back().codes), first);
}

/// A GPU finds block i of a plane at i strides, its own or, of shared codes, the other plane's.
TEST(PlaneTest, SaysWhereTheRowsItGainsLie) {
  OneByOne owner(5);
  OneByOne sharer(5, &owner.plane);
  for (int i = 0; i < 70; ++i) owner.step(), sharer.step();
  for (const OneByOne* of : {&owner, &sharer}) {
    const GrowingRows rows = of->plane.growing();
    EXPECT_EQ(rows.shares_codes, of == &sharer);
    EXPECT_EQ(rows.packed, 70);
    EXPECT_EQ(rows.full, 4);
    EXPECT_EQ(rows.ring_rows, 5);
    EXPECT_EQ(rows.ring + rows.first * 16, of->plane.full_row(0));
    ASSERT_EQ(of->plane.blocks().size(), 3U);
    for (int i = 0; i < 3; ++i) {
      const PackedBlock& block = of->plane.blocks()[static_cast<size_t>(i)];
      EXPECT_EQ(rows.codes + i * rows.code_stride, block.codes);
      EXPECT_EQ(rows.scales + i * rows.scale_stride, block.scales);
      EXPECT_EQ(rows.zeros + i * rows.scale_stride, block.zeros);
    }
  }
}

/// Kernels that are told so look at the first and the last block only (SlotRun).
TEST(PlaneTest, SaysThatBlocksLieEvenlyUnlessOneIsLongerThanTheFirst) {
  Packing packing;
  packing.format.axis = ScaleAxis::kChannel;
  packing.format.block_rows = 8;
  packing.format.section[0] = {.code = CodeFormat::kBits2, .channels = 16};
  Plane::Layout layout;
  layout.packing = &packing;
  layout.head_dim = 16;
  const PlaneCapacity capacity = Plane::capacity(layout, 1, 64, 1, 0);
  std::vector<std::byte> memory(capacity.bytes());
  const auto evenly = [&](const std::vector<int>& lengths) {
    Plane plane;
    plane.place(layout, capacity, memory.data(), memory.data() + capacity.packed_bytes, nullptr);
    for (const int rows : lengths) static_cast<void>(plane.push_packed(rows));
    SlotRun run[3];
    RunList runs(run);
    plane.add_packed(runs);
    return run[0].code_stride != 0;
  };
  EXPECT_TRUE(evenly({8, 8, 8}));
  EXPECT_TRUE(evenly({8, 8, 5}));
  EXPECT_FALSE(evenly({8, 5, 8}));
  EXPECT_FALSE(evenly({5, 8}));
}

}  // namespace
}  // namespace kvlm
