#include "kernels/cuda/fused_splits.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <queue>
#include <random>
#include <vector>

// How lanes are cut for the fused decode attention: arithmetic that needs no GPU.
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

TEST(FusedSplits, NoShorterLaneHasMoreThanTheMost) {
  int most = 1;
  for (int slots = 1; slots <= kMostSlots; ++slots) {
    most = std::max(most, fused_splits_of(slots));
    ASSERT_GE(most_fused_splits(slots), most) << slots;
  }
}

/// When the last of the blocks ends that a GPU takes in order, each as soon as one of `resident`
/// places is free, and a split takes 1.
double end_of(int lanes, int splits, int blocks, int resident) {
  std::priority_queue<double, std::vector<double>, std::greater<>> free;
  for (int place = 0; place < resident; ++place) free.push(0);
  double end = 0;
  for (int block = 0; block < blocks; ++block) {
    const int taken = (block + 1) * splits / blocks - block * splits / blocks;
    for (int lane = 0; lane < lanes; ++lane) {
      const double at = free.top() + taken + 0.1;
      free.pop();
      free.push(at);
      end = std::max(end, at);
    }
  }
  return end;
}

TEST(FusedBlocks, AreOneASplitWhereThatLeavesPlaces) {
  for (const int lanes : {1, 8, 31}) {
    for (const int splits : {1, 2, 13, 16}) {
      EXPECT_EQ(fused_blocks_of_lane(lanes, splits, 528), splits) << lanes;
    }
  }
}

TEST(FusedBlocks, TakeAllSplitsWhereLanesFillTheGpu) {
  EXPECT_EQ(fused_blocks_of_lane(512, 14, 528), 1);
  EXPECT_EQ(fused_blocks_of_lane(4096, 3, 528), 1);
  EXPECT_EQ(fused_blocks_of_lane(int64_t{1} << 32, 1024, 528), 1);  // no number overflows
}

TEST(FusedBlocks, AreThoseThatWereMeasuredFastest) {
  // `vlm-bench kernels`, 8192 rows, batch 32: 2 and 4 blocks 2.78x and 2.82x of f16 rows, 3 and 5
  // blocks 2.62x and 2.64x (kivi, 2 bits); steps of 16 sequences of 3328: 4 blocks 7.65 ms, 3 and 6
  // blocks 7.89 and 7.83.
  const int of_kernel = fused_blocks_of_lane(256, 17, 528);
  EXPECT_TRUE(of_kernel == 2 || of_kernel == 4) << of_kernel;
  EXPECT_EQ(fused_blocks_of_lane(128, 14, 528), 4);
}

TEST(FusedBlocks, EndAboutAsEarlyAsAnyOther) {
  std::mt19937 random(7);
  for (int round = 0; round < 200; ++round) {
    const int lanes = 1 + static_cast<int>(random() % 700);
    const int splits = 1 + static_cast<int>(random() % 17);
    const int resident = 132 * (2 + static_cast<int>(random() % 3));
    const int blocks = fused_blocks_of_lane(lanes, splits, resident);
    ASSERT_GE(blocks, 1);
    ASSERT_LE(blocks, splits);
    double least = end_of(lanes, splits, 1, resident);
    for (int other = 2; other <= splits; ++other) {
      least = std::min(least, end_of(lanes, splits, other, resident));
    }
    EXPECT_LE(end_of(lanes, splits, blocks, resident), 1.2 * least + 0.1)
        << lanes << " lanes of " << splits << " splits, " << resident << " places: " << blocks;
  }
}

}  // namespace
}  // namespace kvlm::cuda::packed
