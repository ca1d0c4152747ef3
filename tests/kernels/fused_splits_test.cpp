#include "kernels/cuda/fused_splits.h"

#include <gtest/gtest.h>

#include <algorithm>

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

}  // namespace
}  // namespace kvlm::cuda::packed
