#include "kernels/slot_weights.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <vector>

namespace kvlm {
namespace {

using ::testing::ElementsAre;

TEST(SlotWeights, AddTheMeanOverQueriesAndBeginNewSlotsAtZero) {
  ThreadPool pool(2);
  Stream stream(pool);
  const std::vector<float> weights{1, 2, 3, 5, 6, 9};  // two queries, three slots
  std::vector<float> sums{10, 20, 1e30f};              // the third has never been written
  const SlotWeights head{weights.data(), sums.data(), 3, 2};
  add_slot_weights({&head, 1}, 2, stream);
  EXPECT_THAT(sums, ElementsAre(13, 24, 6));
}

TEST(SlotWeights, OfOneStepAreItsOwn) {
  ThreadPool pool(2);
  Stream stream(pool);
  const std::vector<float> weights{1, 2, 3, 5, 6, 9};
  std::vector<float> sums{10, 20, 1e30f};
  const SlotWeights head{weights.data(), sums.data(), 3, 0};
  add_slot_weights({&head, 1}, 2, stream);
  EXPECT_THAT(sums, ElementsAre(3, 4, 6));
}

TEST(SlotWeights, MeanOfSomeArraysOfAList) {
  ThreadPool pool(2);
  Stream stream(pool);
  const std::vector<float> a{1, 2};
  const std::vector<float> b{3, 6};
  const std::vector<float> c{5, 1};
  const float* const arrays[] = {a.data(), b.data(), c.data()};
  std::vector<float> first(2);
  std::vector<float> all(2);
  const MeanJob jobs[] = {{0, 2, 2, first.data()}, {0, 3, 2, all.data()}};
  mean_arrays(arrays, jobs, stream);
  EXPECT_THAT(first, ElementsAre(2, 4));
  EXPECT_THAT(all, ElementsAre(3, 3));
}

}  // namespace
}  // namespace kvlm
