// Which KV heads image_block.cu serves. Needs the CUDA toolkit, but no GPU.
#include "kernels/cuda/attend/image_choice.h"

#include <gtest/gtest.h>

#include <array>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "tests/kvcache/quantizers/make.h"

namespace kvlm::cuda::packed {
namespace {

constexpr ImageLimits kHopper{227 << 10, true};

/// A KV head whose packed keys and values are one block of 40 rows, in front of 5 full rows.
struct Head {
  alignas(16) static constexpr std::array<std::byte, 64> kMemory{};
  std::unique_ptr<Quantizer> quantizer;
  std::array<std::vector<PackedBlock>, 2> blocks;
  std::array<std::array<SlotSegment, 2>, 2> segments;
  ScoreRemap remap{0, 40, 0, 3, true};
  PackedHead head;

  explicit Head(const std::string& spec, int head_dim = 128)
      : quantizer(test::quantizer(spec, test::shape_of(4, 1, head_dim))) {
    for (const KvSide side : {KvSide::kKeys, KvSide::kValues}) {
      const auto which = static_cast<size_t>(side);
      const std::byte* at = kMemory.data();
      blocks[which] = {{at, at, at, 40, 40, nullptr}};
      segments[which][0].slots = 40;
      segments[which][0].format = &quantizer->packing(side, 0).format;
      segments[which][0].blocks = blocks[which];
      segments[which][1].slots = 5;
      segments[which][1].rows = at;
    }
    head.keys = segments[0];
    head.values = segments[1];
    head.remaps = {&remap, 1};
    head.slots = 45;
    head.weights_wanted = false;
  }
  int kernel(int head_dim = 128, const ImageLimits& limits = kHopper) const {
    return has_rows_behind(head) ? image_kernel(head, head_dim, limits) : 0;
  }
  /// Packed rows; nothing reads them.
  void set_rows(int rows) {
    for (const size_t side : {size_t{0}, size_t{1}}) {
      segments[side][0].slots = blocks[side][0].rows = blocks[side][0].live_rows = rows;
    }
    remap.slots = rows;
  }
};

TEST(ImageChoice, ImagesPackedOnceHaveAKernelOfTheirWidths) {
  std::vector<int> kernels;
  for (const char* spec : {"calibquant", "calibquant,bits=2", "calibquant,bits=4",
                           "calibquant,bits=8", "calibquant,key_bits=2,value_bits=1"}) {
    kernels.push_back(Head(spec).kernel());
    EXPECT_TRUE(is_image(kernels.back())) << spec;
    EXPECT_NE(kImageKernels >> kernels.back() & 1, 0u) << spec;
  }
  EXPECT_EQ(std::set<int>(kernels.begin(), kernels.end()).size(), kernels.size());
  EXPECT_EQ(Head("head_quantile").kernel(), kernels[0]);  // one scale a head
}

TEST(ImageChoice, OthersHaveNone) {
  EXPECT_EQ(Head("kivi").kernel(), 0);  // values by token
  EXPECT_EQ(Head("int4").kernel(), 0);
  EXPECT_EQ(Head("head_quantile,bits=3").kernel(), 0);  // bytes that codes do not fill
  EXPECT_EQ(Head("head_quantile,meta=f32").kernel(), 0);
  EXPECT_EQ(Head("calibquant", 64).kernel(64), 0);
}

TEST(ImageChoice, WhatDoesNotLieAsItMust) {
  Head dead("calibquant");
  const uint64_t live = ~uint64_t{0};
  dead.blocks[0][0].live = &live;
  EXPECT_EQ(dead.kernel(), 0);

  Head apart("calibquant");  // keys and values in other blocks
  apart.segments[1][0].slots = apart.blocks[1][0].rows = 30;
  apart.segments[1][1].slots = 15;
  EXPECT_EQ(apart.kernel(), 0);

  Head part("calibquant");  // a remap of some of its slots
  part.remap.slots = 30;
  EXPECT_EQ(part.kernel(), 0);

  Head two("calibquant");
  two.blocks[0] = {two.blocks[0][0], two.blocks[0][0]};
  two.segments[0][0].blocks = two.blocks[0];
  EXPECT_EQ(two.kernel(), 0);

  Head wanted("calibquant");
  wanted.head.weights_wanted = true;
  EXPECT_EQ(wanted.kernel(), 0);

  Head odd("calibquant");
  odd.segments[0][1].rows += 8;
  EXPECT_EQ(odd.kernel(), 0);
}

TEST(ImageChoice, RowsBehindMayBePackedOtherwise) {
  const auto text = test::quantizer("int4", test::shape_of(4, 1, 128));
  Head mixed("calibquant");
  mixed.segments[0][1].format = &text->packing(KvSide::kKeys, 0).format;
  EXPECT_FALSE(has_rows_behind(mixed.head));
  EXPECT_EQ(image_kernel(mixed.head, 128, kHopper), Head("calibquant").kernel());
}

/// Scores of a KV head must fit into the shared memory of the blocks that share it.
TEST(ImageChoice, AsManyRowsAsTheGpuHolds) {
  constexpr ImageLimits kAmpere{163 << 10, false};
  constexpr ImageLimits kSmall{99 << 10, false};  // compute capability 8.6 and 8.9
  const auto most = [](const char* spec, const ImageLimits& limits) {
    Head head(spec);
    int rows = 0;
    for (int more = 1 << 15; more > 0; more /= 2) {
      head.set_rows(rows + more);
      if (head.kernel(128, limits) != 0) rows += more;
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
