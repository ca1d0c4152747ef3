// Which lanes picture_lanes.cu serves. Needs the CUDA toolkit, but no GPU.
#include "kernels/cuda/picture_choice.h"

#include <gtest/gtest.h>

#include <array>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "tests/kvcache/quantizers/make.h"

namespace kvlm::cuda::packed {
namespace {

constexpr int kMost = 4096;

/// A lane whose packed keys and values are one block of 40 rows, in front of 5 full rows.
struct Lane {
  alignas(16) static constexpr std::array<std::byte, 64> kMemory{};
  std::unique_ptr<Quantizer> quantizer;
  std::array<std::vector<PackedBlock>, 2> blocks;
  std::array<std::array<SlotRun, 2>, 2> runs;
  ScoreRemap remap{0, 40, 0, 3, true};
  PackedLane lane;

  explicit Lane(const std::string& spec, int head_dim = 128)
      : quantizer(test::quantizer(spec, test::shape_of(4, 1, head_dim))) {
    for (const KvSide side : {KvSide::kKeys, KvSide::kValues}) {
      const auto which = static_cast<size_t>(side);
      const std::byte* at = kMemory.data();
      blocks[which] = {{at, at, at, 40, 40, nullptr}};
      runs[which][0].slots = 40;
      runs[which][0].format = &quantizer->packing(side, 0).format;
      runs[which][0].blocks = blocks[which];
      runs[which][1].slots = 5;
      runs[which][1].rows = at;
    }
    lane.keys = runs[0];
    lane.values = runs[1];
    lane.remaps = {&remap, 1};
    lane.slots = 45;
    lane.weights_wanted = false;
  }
  int kernel(int head_dim = 128, int most = kMost) const {
    return picture_lane(lane, head_dim, most);
  }
};

TEST(PictureChoice, PicturesPackedOnceHaveAKernelOfTheirWidths) {
  std::vector<int> kernels;
  for (const char* spec : {"calibquant", "calibquant,bits=2", "calibquant,bits=4",
                           "calibquant,bits=8", "calibquant,key_bits=2,value_bits=1"}) {
    kernels.push_back(Lane(spec).kernel());
    EXPECT_TRUE(is_picture(kernels.back())) << spec;
    EXPECT_NE(kPictureKernels >> kernels.back() & 1, 0u) << spec;
  }
  EXPECT_EQ(std::set<int>(kernels.begin(), kernels.end()).size(), kernels.size());
  EXPECT_EQ(Lane("head_quantile").kernel(), kernels[0]);  // one scale a head
}

TEST(PictureChoice, OthersHaveNone) {
  EXPECT_EQ(Lane("kivi").kernel(), 0);  // values by token
  EXPECT_EQ(Lane("int4").kernel(), 0);
  EXPECT_EQ(Lane("head_quantile,bits=3").kernel(), 0);  // bytes that codes do not fill
  EXPECT_EQ(Lane("head_quantile,meta=f32").kernel(), 0);
  EXPECT_EQ(Lane("calibquant", 64).kernel(64), 0);
  EXPECT_EQ(Lane("calibquant").kernel(128, 39), 0);  // more rows than a cluster holds
}

TEST(PictureChoice, WhatDoesNotLieAsItMust) {
  Lane dead("calibquant");
  const uint64_t live = ~uint64_t{0};
  dead.blocks[0][0].live = &live;
  EXPECT_EQ(dead.kernel(), 0);

  Lane apart("calibquant");  // keys and values in other blocks
  apart.runs[1][0].slots = apart.blocks[1][0].rows = 30;
  apart.runs[1][1].slots = 15;
  EXPECT_EQ(apart.kernel(), 0);

  Lane part("calibquant");  // a remap of some of its slots
  part.remap.slots = 30;
  EXPECT_EQ(part.kernel(), 0);

  Lane two("calibquant");
  two.blocks[0] = {two.blocks[0][0], two.blocks[0][0]};
  two.runs[0][0].blocks = two.blocks[0];
  EXPECT_EQ(two.kernel(), 0);

  Lane wanted("calibquant");
  wanted.lane.weights_wanted = true;
  EXPECT_EQ(wanted.kernel(), 0);

  Lane odd("calibquant");
  odd.runs[0][1].rows += 8;
  EXPECT_EQ(odd.kernel(), 0);
}

}  // namespace
}  // namespace kvlm::cuda::packed
