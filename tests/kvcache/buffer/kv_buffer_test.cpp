#include "kvcache/buffer/kv_buffer.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <utility>
#include <vector>

namespace kvlm {
namespace {

/// A buffer of rows that are packed one by one, behind a ring of `places` rows.
struct OneByOne {
  explicit OneByOne(int places, const KvBuffer* owner = nullptr) {
    packing.format.axis = ScaleAxis::kToken;
    packing.format.group_size = 8;
    packing.format.section[0] = {.code = CodeFormat::kBits4, .channels = 8};
    layout.packing = &packing;
    layout.head_dim = 8;
    layout.shared = owner != nullptr;
    layout.writes = owner == nullptr;
    start(memory, places, owner);
  }
  void start(std::vector<std::byte>& in, int places, const KvBuffer* owner) {
    const BufferCapacity capacity = layout.capacity(1, 400, 1, places);
    in.resize(capacity.bytes());
    buffer.place(layout, capacity, in.data(), in.data() + capacity.packed_bytes, owner);
    for (int i = 0; i + 1 < places; ++i) buffer.ring.push();
  }
  /// A row comes, the oldest is packed.
  void step() {
    buffer.ring.push();
    buffer.blocks.push(1);
    buffer.ring.pop(1);
  }
  std::ptrdiff_t offset(const std::byte* p) const { return p - memory.data(); }

  Packing packing;
  BufferLayout layout;
  std::vector<std::byte> memory;
  KvBuffer buffer;
};

/// What gain() counts at once is what rows count one by one, across blocks of 32 and ring ends.
TEST(BufferTest, GainsAsRowByRow) {
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
        fast.buffer.gain(rows, &rule);
        EXPECT_EQ(fast.buffer.packed(), before + rows);
        EXPECT_EQ(fast.buffer.full(), slow.buffer.full());
        EXPECT_EQ(fast.buffer.bytes(), slow.buffer.bytes());
        ASSERT_EQ(fast.buffer.blocks.all().size(), slow.buffer.blocks.all().size());
        for (size_t i = 0; i < fast.buffer.blocks.all().size(); ++i) {
          EXPECT_EQ(fast.offset(fast.buffer.blocks.all()[i].codes),
                    slow.offset(slow.buffer.blocks.all()[i].codes));
          EXPECT_EQ(fast.buffer.blocks.all()[i].rows, slow.buffer.blocks.all()[i].rows);
        }
        // The next row of both goes to the same place.
        EXPECT_EQ(fast.offset(fast.buffer.ring.push()), slow.offset(slow.buffer.ring.push()));
      }
    }
  }
}

/// Rows that come at once lie where they would one by one.
TEST(BufferTest, TakesRowsSideBySide) {
  OneByOne slow(9);
  OneByOne fast(9);
  for (OneByOne* buffer : {&slow, &fast}) buffer->buffer.ring.pop(8);
  for (const int rows : {3, 1, 4}) {
    const std::byte* first = fast.buffer.ring.push(rows);
    EXPECT_EQ(fast.offset(first), slow.offset(slow.buffer.ring.push()));
    for (int i = 1; i < rows; ++i) slow.buffer.ring.push();
    EXPECT_EQ(fast.buffer.full(), slow.buffer.full());
    EXPECT_EQ(fast.buffer.bytes(), slow.buffer.bytes());
  }
}

/// Blocks of a buffer that drops nothing lie where those of one that may do.
TEST(BufferTest, NeedsNoPlaceForWhatWouldBeDropped) {
  OneByOne drops(1);
  OneByOne keeps(1);
  keeps.layout.evicts = false;
  keeps.start(keeps.memory, 1, nullptr);
  for (int i = 0; i < 100; ++i) {
    for (OneByOne* buffer : {&drops, &keeps}) buffer->step();
    if (i != 50) continue;
    for (OneByOne* buffer : {&drops, &keeps}) buffer->buffer.blocks.clear();
  }
  ASSERT_EQ(keeps.buffer.blocks.all().size(), drops.buffer.blocks.all().size());
  for (size_t i = 0; i < keeps.buffer.blocks.all().size(); ++i) {
    EXPECT_EQ(keeps.offset(keeps.buffer.blocks.all()[i].codes),
              drops.offset(drops.buffer.blocks.all()[i].codes));
  }
  // A block that loses all of its rows is the next one's place.
  const std::ptrdiff_t first = drops.offset(drops.buffer.blocks.all()[0].codes);
  for (int i = 0; i < 32; ++i) EXPECT_EQ(drops.buffer.evict(0).ring, nullptr);
  for (int i = drops.buffer.blocks.all().back().rows; i <= 32; ++i) drops.step();
  EXPECT_EQ(drops.offset(drops.buffer.blocks.all().back().codes), first);
}

/// A GPU finds block i of a buffer at i strides, its own or, of shared codes, the other buffer's.
TEST(BufferTest, SaysWhereTheRowsItGainsLie) {
  OneByOne owner(5);
  OneByOne sharer(5, &owner.buffer);
  for (int i = 0; i < 70; ++i) owner.step(), sharer.step();
  for (const OneByOne* of : {&owner, &sharer}) {
    const GrowingRows rows = of->buffer.growing();
    EXPECT_EQ(rows.shares_codes, of == &sharer);
    EXPECT_EQ(rows.packed, 70);
    EXPECT_EQ(rows.full, 4);
    EXPECT_EQ(rows.ring_rows, 5);
    EXPECT_EQ(rows.ring + rows.first * 16, of->buffer.ring.row(0));
    ASSERT_EQ(of->buffer.blocks.all().size(), 3U);
    for (int i = 0; i < 3; ++i) {
      const PackedBlock& block = of->buffer.blocks.all()[static_cast<size_t>(i)];
      EXPECT_EQ(rows.codes + i * rows.code_stride, block.codes);
      EXPECT_EQ(rows.scales + i * rows.scale_stride, block.scales);
      EXPECT_EQ(rows.zeros + i * rows.scale_stride, block.zeros);
    }
  }
}

/// Kernels that are told so look at the first and the last block only (SlotSegment).
TEST(BufferTest, SaysThatBlocksLieEvenlyUnlessOneIsLongerThanTheFirst) {
  Packing packing;
  packing.format.axis = ScaleAxis::kChannel;
  packing.format.block_rows = 8;
  packing.format.section[0] = {.code = CodeFormat::kBits2, .channels = 16};
  BufferLayout layout;
  layout.packing = &packing;
  layout.head_dim = 16;
  const BufferCapacity capacity = layout.capacity(1, 64, 1, 0);
  std::vector<std::byte> memory(capacity.bytes());
  const auto evenly = [&](const std::vector<int>& lengths) {
    KvBuffer buffer;
    buffer.place(layout, capacity, memory.data(), memory.data() + capacity.packed_bytes, nullptr);
    for (const int rows : lengths) static_cast<void>(buffer.blocks.push(rows));
    SlotSegment segment[3];
    SegmentList segments(segment);
    buffer.blocks.add_to(segments);
    return segment[0].code_stride != 0;
  };
  EXPECT_TRUE(evenly({8, 8, 8}));
  EXPECT_TRUE(evenly({8, 8, 5}));
  EXPECT_FALSE(evenly({8, 5, 8}));
  EXPECT_FALSE(evenly({5, 8}));
}

/// A GPU drops rows where they lie and fills the places of blocks that have lost all of theirs.
/// What it says of them is what eviction on the host comes to: the same slots in the same order,
/// the same bytes; and numbers lie where rows do.
TEST(BufferTest, BecomesWhatAGpuHasMadeOfIt) {
  constexpr int kPlaces = 5;
  OneByOne host(kPlaces);
  OneByOne gpu(kPlaces);
  std::mt19937 random(7);
  PlacedRows::Side side;  // as placed() begins
  for (int i = 0; i < 70; ++i) host.step(), gpu.step();
  const GrowingRows begin = gpu.buffer.placed();
  EXPECT_TRUE(gpu.buffer.owns_blocks());
  EXPECT_EQ(begin.blocks, 3);
  EXPECT_EQ(begin.packed, 96) << "places of blocks, of rows or not";
  EXPECT_EQ(begin.filling, 2);
  EXPECT_EQ(begin.filled, 6);
  gpu.buffer.number_places({}, /*stays=*/false, side.came);
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
    static_cast<void>(host.buffer.evict(slot));
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
      host.buffer.ring.push();
      in_ring(side.full++) = next;
      numbers.push_back(next++);
    }
    gpu.buffer.take_placed(side);
    ASSERT_EQ(gpu.buffer.packed(), host.buffer.packed()) << "step " << step;
    ASSERT_EQ(gpu.buffer.full(), host.buffer.full()) << "step " << step;
    ASSERT_EQ(gpu.buffer.bytes(), host.buffer.bytes()) << "step " << step;
    ASSERT_EQ(gpu.buffer.blocks.all().size(), host.buffer.blocks.all().size()) << "step " << step;
    for (size_t b = 0; b < gpu.buffer.blocks.all().size(); ++b) {
      const PackedBlock& have = gpu.buffer.blocks.all()[b];
      const PackedBlock& want = host.buffer.blocks.all()[b];
      ASSERT_EQ(have.rows, want.rows) << "step " << step << ", block " << b;
      ASSERT_EQ(have.live_rows, want.live_rows) << "step " << step << ", block " << b;
      ASSERT_EQ(have.live == nullptr, want.live == nullptr || want.live_rows == want.rows);
      for (int row = 0; row < have.rows && have.live != nullptr; ++row) {
        ASSERT_EQ(have.live[0] >> row & 1, want.live[0] >> row & 1) << "step " << step;
      }
    }
    std::vector<int> came;  // by slots
    gpu.buffer.number_places({}, /*stays=*/false, came);
    for (size_t at = 0; at < numbers.size(); ++at) {
      ASSERT_EQ(came[static_cast<size_t>(place_of(numbers[at]))], static_cast<int>(at));
    }
  }
  EXPECT_GT(side.blocks, 3);
  EXPECT_LT(side.blocks, 9) << "blocks that ended were filled again";
}

}  // namespace
}  // namespace kvlm
