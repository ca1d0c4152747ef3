#include "kvcache/plane/plane.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <utility>
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
    const PlaneCapacity capacity = layout.capacity(1, 400, 1, places);
    in.resize(capacity.bytes());
    plane.place(layout, capacity, in.data(), in.data() + capacity.packed_bytes, owner);
    for (int i = 0; i + 1 < places; ++i) plane.ring.push();
  }
  /// A row comes, the oldest is packed.
  void step() {
    plane.ring.push();
    plane.blocks.push(1);
    plane.ring.pop(1);
  }
  std::ptrdiff_t offset(const std::byte* p) const { return p - memory.data(); }

  Packing packing;
  PlaneLayout layout;
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
        ASSERT_EQ(fast.plane.blocks.all().size(), slow.plane.blocks.all().size());
        for (size_t i = 0; i < fast.plane.blocks.all().size(); ++i) {
          EXPECT_EQ(fast.offset(fast.plane.blocks.all()[i].codes),
                    slow.offset(slow.plane.blocks.all()[i].codes));
          EXPECT_EQ(fast.plane.blocks.all()[i].rows, slow.plane.blocks.all()[i].rows);
        }
        // The next row of both goes to the same place.
        EXPECT_EQ(fast.offset(fast.plane.ring.push()), slow.offset(slow.plane.ring.push()));
      }
    }
  }
}

/// Rows that come at once lie where they would one by one.
TEST(PlaneTest, TakesRowsSideBySide) {
  OneByOne slow(9);
  OneByOne fast(9);
  for (OneByOne* plane : {&slow, &fast}) plane->plane.ring.pop(8);
  for (const int rows : {3, 1, 4}) {
    const std::byte* first = fast.plane.ring.push(rows);
    EXPECT_EQ(fast.offset(first), slow.offset(slow.plane.ring.push()));
    for (int i = 1; i < rows; ++i) slow.plane.ring.push();
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
    for (OneByOne* plane : {&drops, &keeps}) plane->plane.blocks.clear();
  }
  ASSERT_EQ(keeps.plane.blocks.all().size(), drops.plane.blocks.all().size());
  for (size_t i = 0; i < keeps.plane.blocks.all().size(); ++i) {
    EXPECT_EQ(keeps.offset(keeps.plane.blocks.all()[i].codes),
              drops.offset(drops.plane.blocks.all()[i].codes));
  }
  // A block that loses all of its rows is the next one's place.
  const std::ptrdiff_t first = drops.offset(drops.plane.blocks.all()[0].codes);
  for (int i = 0; i < 32; ++i) EXPECT_EQ(drops.plane.evict(0).ring, nullptr);
  for (int i = drops.plane.blocks.all().back().rows; i <= 32; ++i) drops.step();
  EXPECT_EQ(drops.offset(drops.plane.blocks.all().back().codes), first);
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
    EXPECT_EQ(rows.ring + rows.first * 16, of->plane.ring.row(0));
    ASSERT_EQ(of->plane.blocks.all().size(), 3U);
    for (int i = 0; i < 3; ++i) {
      const PackedBlock& block = of->plane.blocks.all()[static_cast<size_t>(i)];
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
  PlaneLayout layout;
  layout.packing = &packing;
  layout.head_dim = 16;
  const PlaneCapacity capacity = layout.capacity(1, 64, 1, 0);
  std::vector<std::byte> memory(capacity.bytes());
  const auto evenly = [&](const std::vector<int>& lengths) {
    Plane plane;
    plane.place(layout, capacity, memory.data(), memory.data() + capacity.packed_bytes, nullptr);
    for (const int rows : lengths) static_cast<void>(plane.blocks.push(rows));
    SlotRun run[3];
    RunList runs(run);
    plane.blocks.add_to(runs);
    return run[0].code_stride != 0;
  };
  EXPECT_TRUE(evenly({8, 8, 8}));
  EXPECT_TRUE(evenly({8, 8, 5}));
  EXPECT_FALSE(evenly({8, 5, 8}));
  EXPECT_FALSE(evenly({5, 8}));
}

/// A GPU drops rows where they lie and fills the places of blocks that have lost all of theirs.
/// What it says of them is what eviction on the host comes to: the same slots in the same order,
/// the same bytes; and numbers lie where rows do.
TEST(PlaneTest, BecomesWhatAGpuHasMadeOfIt) {
  constexpr int kPlaces = 5;
  OneByOne host(kPlaces);
  OneByOne gpu(kPlaces);
  std::mt19937 random(7);
  PlacedRows::Side side;  // as placed() begins
  for (int i = 0; i < 70; ++i) host.step(), gpu.step();
  const GrowingRows begin = gpu.plane.placed();
  EXPECT_TRUE(gpu.plane.owns_blocks());
  EXPECT_EQ(begin.blocks, 3);
  EXPECT_EQ(begin.packed, 96) << "places of blocks, of rows or not";
  EXPECT_EQ(begin.filling, 2);
  EXPECT_EQ(begin.filled, 6);
  gpu.plane.number_places({}, /*stays=*/false, side.came);
  const int ring = begin.most_blocks * begin.block_rows;
  EXPECT_EQ(side.came[69], 69);
  EXPECT_EQ(side.came[70], WeighedRows::kNoRow);
  EXPECT_EQ(side.came[static_cast<size_t>(ring + begin.first)], 70);
  side.first = begin.first, side.full = begin.full, side.blocks = begin.blocks;
  side.filling = begin.filling, side.filled = begin.filled;
  std::vector<int> numbers(74);
  std::iota(numbers.begin(), numbers.end(), 0);
  int next = 74;
  const auto place_of = [&](int number) {
    return static_cast<int>(std::find(side.came.begin(), side.came.end(), number) -
                            side.came.begin());
  };
  const auto live_in = [&](int block) {
    const auto first = side.came.begin() + block * 32;
    return 32 - std::count(first, first + 32, WeighedRows::kNoRow);
  };
  const auto in_ring = [&](int row) -> int& {
    return side.came[static_cast<size_t>(ring + (side.first + row) % kPlaces)];
  };
  for (int step = 0; step < 300; ++step) {
    host.step();
    in_ring(side.full) = next;
    numbers.push_back(next++);
    if (side.filling < 0) {  // a block that has no rows, or a new one
      for (side.filling = 0; side.filling < side.blocks && live_in(side.filling) > 0;) {
        ++side.filling;
      }
      side.blocks = std::max(side.blocks, side.filling + 1);
      side.filled = 0;
    }
    side.came[static_cast<size_t>(side.filling * 32 + side.filled++)] =
        std::exchange(in_ring(0), WeighedRows::kNoRow);
    side.first = (side.first + 1) % kPlaces;
    if (side.filled == 32) side.filling = -1;
    // Mostly packed rows go, from near the begin, so that blocks end.
    const auto slots = static_cast<int>(numbers.size());
    const int slot =
        static_cast<int>(random()) % 7 == 0 ? slots - 2 : static_cast<int>(random() % 40);
    const int place = place_of(numbers[static_cast<size_t>(slot)]);
    static_cast<void>(host.plane.evict(slot));
    numbers.erase(numbers.begin() + slot);
    if (place < ring) {
      side.came[static_cast<size_t>(place)] = WeighedRows::kNoRow;
      if (place / 32 == side.filling && live_in(place / 32) == 0) side.filling = -1;
    } else {
      int gap = (place - ring - side.first + kPlaces) % kPlaces;
      for (; gap + 1 < side.full; ++gap) in_ring(gap) = in_ring(gap + 1);
      in_ring(gap) = WeighedRows::kNoRow;
      --side.full;
    }
    if (side.full < kPlaces - 1) {  // the window has room for a row more
      host.plane.ring.push();
      in_ring(side.full++) = next;
      numbers.push_back(next++);
    }
    gpu.plane.take_placed(side);
    ASSERT_EQ(gpu.plane.packed(), host.plane.packed()) << "step " << step;
    ASSERT_EQ(gpu.plane.full(), host.plane.full()) << "step " << step;
    ASSERT_EQ(gpu.plane.bytes(), host.plane.bytes()) << "step " << step;
    ASSERT_EQ(gpu.plane.blocks.all().size(), host.plane.blocks.all().size()) << "step " << step;
    for (size_t b = 0; b < gpu.plane.blocks.all().size(); ++b) {
      const PackedBlock& have = gpu.plane.blocks.all()[b];
      const PackedBlock& want = host.plane.blocks.all()[b];
      ASSERT_EQ(have.rows, want.rows) << "step " << step << ", block " << b;
      ASSERT_EQ(have.live_rows, want.live_rows) << "step " << step << ", block " << b;
      ASSERT_EQ(have.live == nullptr, want.live == nullptr || want.live_rows == want.rows);
      for (int row = 0; row < have.rows && have.live != nullptr; ++row) {
        ASSERT_EQ(have.live[0] >> row & 1, want.live[0] >> row & 1) << "step " << step;
      }
    }
    std::vector<int> came;  // by slots
    gpu.plane.number_places({}, /*stays=*/false, came);
    for (size_t at = 0; at < numbers.size(); ++at) {
      ASSERT_EQ(came[static_cast<size_t>(place_of(numbers[at]))], static_cast<int>(at));
    }
  }
  EXPECT_GT(side.blocks, 3);
  EXPECT_LT(side.blocks, 9) << "blocks that ended were filled again";
}

}  // namespace
}  // namespace kvlm
