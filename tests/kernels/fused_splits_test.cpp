#include "kernels/cuda/attend/fused_splits.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <queue>
#include <random>
#include <vector>

// How KV heads are cut for the fused decode attention: arithmetic that needs no GPU.
namespace kvlm::cuda::packed {
namespace {

constexpr int kMostSlots = 40000;  // beyond the last length at which splits become longer

TEST(FusedSplits, HoldEverySlotOnce) {
  for (int slots = 1; slots <= kMostSlots; ++slots) {
    const int split = fused_split_slots(slots);
    const int splits = fused_splits_of(slots);
    ASSERT_GE(splits * split, slots);
    ASSERT_LT((splits - 1) * split, slots) << "the last of " << splits << " is empty";
    ASSERT_EQ(split % 128, 0) << "no whole items for four warps";
  }
}

TEST(FusedSplits, NoShorterHeadHasMoreThanTheMost) {
  int most = 1;
  for (int slots = 1; slots <= kMostSlots; ++slots) {
    most = std::max(most, fused_splits_of(slots));
    ASSERT_GE(most_fused_splits(slots), most) << slots;
  }
}

TEST(WarpParts, HaveEveryPartOfEverySplitOnce) {
  for (const bool alone : {false, true}) {
    for (int first = 0; first < 5; ++first) {
      for (int end = first; end <= first + 21; ++end) {
        std::vector<int> taken(static_cast<size_t>(end * kSplitParts));
        int own = 0;
        for (int warp = 0; warp < kSplitParts; ++warp) {
          const WarpParts parts(first, end, warp, alone);
          ASSERT_EQ(parts.turns(), end - first) << "warps would wait for each other";
          for (int turn = 0; turn < parts.turns(); ++turn) {
            own += parts.alone(turn) ? 1 : 0;
            ++taken.at(static_cast<size_t>(parts.split(turn) * kSplitParts + parts.part(turn)));
          }
        }
        ASSERT_EQ(own, alone ? (end - first) / kSplitParts * kSplitParts * kSplitParts : 0);
        for (size_t i = 0; i < taken.size(); ++i) {
          ASSERT_EQ(taken[i], static_cast<int>(i) >= first * kSplitParts ? 1 : 0) << i;
        }
      }
    }
  }
}

TEST(WarpParts, FollowEachOtherWhereAWarpIsAlone) {
  for (const int slots : {1, 31, 256, 3328, 4097, 8192, 8193, 16385, 20001}) {
    const int splits = fused_splits_of(slots);
    for (int warp = 0; warp < kSplitParts; ++warp) {
      const WarpParts parts(0, splits, warp, true);
      for (int turn = 1; turn < parts.turns() && parts.alone(turn); ++turn) {
        ASSERT_EQ(parts.slots(turn, slots).first, parts.slots(turn - 1, slots).end) << slots;
        const bool begins = turn % kSplitParts == 0;
        ASSERT_EQ(parts.split(turn), parts.split(turn - 1) + (begins ? 1 : 0));
        ASSERT_EQ(parts.part(turn), begins ? 0 : parts.part(turn - 1) + 1);
      }
    }
  }
}

TEST(FusedSplits, AreTheirParts) {
  for (int slots = 1; slots <= kMostSlots; slots += 1 + slots / 97) {
    int at = 0;
    for (int split = 0; split < fused_splits_of(slots); ++split) {
      for (int part = 0; part < kSplitParts; ++part) {
        const SlotRange range = fused_part(slots, split, part);
        ASSERT_EQ(range.first, at) << slots;
        ASSERT_LE(range.end - range.first, fused_split_slots(slots) / kSplitParts);
        ASSERT_TRUE((range.end - range.first) % 32 == 0 || range.end == slots) << slots;
        at = range.end;
      }
    }
    ASSERT_EQ(at, slots);
  }
}

/// When the last of the blocks ends that a GPU takes in order, each as soon as one of `resident`
/// places is free, and a split takes 1.
double end_of(int heads, int splits, int blocks, int resident) {
  std::priority_queue<double, std::vector<double>, std::greater<>> free;
  for (int place = 0; place < resident; ++place) free.push(0);
  double end = 0;
  for (int block = 0; block < blocks; ++block) {
    const int taken = (block + 1) * splits / blocks - block * splits / blocks;
    for (int head = 0; head < heads; ++head) {
      const double at = free.top() + taken + 0.1;
      free.pop();
      free.push(at);
      end = std::max(end, at);
    }
  }
  return end;
}

TEST(FusedBlocks, AreOneASplitWhereThatLeavesPlaces) {
  for (const int heads : {1, 8, 31}) {
    for (const int splits : {1, 2, 13, 16}) {
      EXPECT_EQ(fused_blocks_of_head(heads, splits, 528), splits) << heads;
    }
  }
}

TEST(FusedBlocks, TakeAllSplitsWhereHeadsFillTheGpu) {
  EXPECT_EQ(fused_blocks_of_head(512, 14, 528), 1);
  EXPECT_EQ(fused_blocks_of_head(4096, 3, 528), 1);
  EXPECT_EQ(fused_blocks_of_head(int64_t{1} << 32, 1024, 528), 1);  // no number overflows
}

TEST(FusedBlocks, AreThoseThatWereMeasuredFastest) {
  // `vlm-bench kernels`, 8192 rows, batch 32: 2 and 4 blocks 2.78x and 2.82x of f16 rows, 3 and 5
  // blocks 2.62x and 2.64x (kivi, 2 bits); steps of 16 sequences of 3328: 4 blocks 7.65 ms, 3 and 6
  // blocks 7.89 and 7.83.
  const int of_kernel = fused_blocks_of_head(256, 17, 528);
  EXPECT_TRUE(of_kernel == 2 || of_kernel == 4) << of_kernel;
  EXPECT_EQ(fused_blocks_of_head(128, 14, 528), 4);
}

TEST(FusedBlocks, EndAboutAsEarlyAsAnyOther) {
  std::mt19937 random(7);
  for (int round = 0; round < 200; ++round) {
    const int heads = 1 + static_cast<int>(random() % 700);
    const int splits = 1 + static_cast<int>(random() % 17);
    const int resident = 132 * (2 + static_cast<int>(random() % 3));
    const int blocks = fused_blocks_of_head(heads, splits, resident);
    ASSERT_GE(blocks, 1);
    ASSERT_LE(blocks, splits);
    double least = end_of(heads, splits, 1, resident);
    for (int other = 2; other <= splits; ++other) {
      least = std::min(least, end_of(heads, splits, other, resident));
    }
    EXPECT_LE(end_of(heads, splits, blocks, resident), 1.2 * least + 0.1)
        << heads << " heads of " << splits << " splits, " << resident << " places: " << blocks;
  }
}

}  // namespace
}  // namespace kvlm::cuda::packed
