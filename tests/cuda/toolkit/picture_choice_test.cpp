// Which lanes picture_lanes.cu serves. Needs the CUDA toolkit, but no GPU.
#include "kernels/cuda/attend/picture_choice.h"

#include <gtest/gtest.h>

#include <array>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "tests/kvcache/quantizers/make.h"

namespace kvlm::cuda::packed {
namespace {

constexpr PictureLimits kHopper{227 << 10, true};

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
  int kernel(int head_dim = 128, const PictureLimits& limits = kHopper) const {
    return has_rows_behind(lane) ? picture_kernel(lane, head_dim, limits) : 0;
  }
  /// Packed rows; nothing reads them.
  void set_rows(int rows) {
    for (const size_t side : {size_t{0}, size_t{1}}) {
      runs[side][0].slots = blocks[side][0].rows = blocks[side][0].live_rows = rows;
    }
    remap.slots = rows;
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

TEST(PictureChoice, RowsBehindMayBePackedOtherwise) {
  const auto text = test::quantizer("int4", test::shape_of(4, 1, 128));
  Lane mixed("calibquant");
  mixed.runs[0][1].format = &text->packing(KvSide::kKeys, 0).format;
  EXPECT_FALSE(has_rows_behind(mixed.lane));
  EXPECT_EQ(picture_kernel(mixed.lane, 128, kHopper), Lane("calibquant").kernel());
}

/// Scores of a lane must fit into the shared memory of the blocks that share it.
TEST(PictureChoice, AsManyRowsAsTheGpuHolds) {
  constexpr PictureLimits kAmpere{163 << 10, false};
  constexpr PictureLimits kSmall{99 << 10, false};  // compute capability 8.6 and 8.9
  const auto most = [](const char* spec, const PictureLimits& limits) {
    Lane lane(spec);
    int rows = 0;
    for (int more = 1 << 15; more > 0; more /= 2) {
      lane.set_rows(rows + more);
      if (lane.kernel(128, limits) != 0) rows += more;
    }
    return rows;
  };
  EXPECT_EQ(most("calibquant", kHopper), 16384);
  EXPECT_EQ(most("calibquant,bits=8", kHopper), 16384);
  // Chunks of 64 rows take 1 KB each beside stages of 24, 32, 64 and 128 KB and 12.2 KB for all.
  EXPECT_EQ(most("calibquant", kAmpere), 76 * 64);
  EXPECT_EQ(most("calibquant,bits=2", kAmpere), 68 * 64);
  EXPECT_EQ(most("calibquant,bits=8", kAmpere), 22 * 64);
  EXPECT_EQ(most("calibquant", kSmall), 62 * 64);
  EXPECT_EQ(most("calibquant,bits=4", kSmall), 22 * 64);
  EXPECT_EQ(most("calibquant,bits=8", kSmall), 0);
}

}  // namespace
}  // namespace kvlm::cuda::packed
