// Which KV heads the fused decode attention serves. Needs the CUDA toolkit, but no GPU.
#include "kernels/cuda/attend/fused_choice.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <array>

#include "tests/kvcache/quantizers/make.h"

namespace kvlm::cuda::packed {
namespace {

constexpr int kMostShared = 227 << 10;  // of an H100

/// The kernel of a KV head with a block of 32 rows of a spec's formats, and then full rows. Nothing
/// is read but where they lie.
int kernel_of(const std::string& spec, int head_dim, size_t misplaced = 0,
              int most_shared = kMostShared, bool weights_wanted = false) {
  alignas(16) static constexpr std::array<std::byte, 32> kMemory{};
  const auto made = test::quantizer(spec, test::shape_of(4, 1, head_dim));
  std::array<PackedBlock, 2> blocks;
  std::array<std::array<SlotSegment, 2>, 2> segments;
  for (const KvSide side : {KvSide::kKeys, KvSide::kValues}) {
    const auto which = static_cast<size_t>(side);
    const std::byte* at = kMemory.data();
    blocks[which] = {at, at + misplaced, at, 32, 32, nullptr};
    segments[which][0].slots = 32;
    segments[which][0].format = &made->packing(side, 0).format;
    segments[which][0].blocks = {&blocks[which], 1};
    segments[which][1].slots = 5;
    segments[which][1].rows = at;
  }
  PackedHead head;
  head.keys = segments[0];
  head.values = segments[1];
  head.slots = 37;
  head.weights_wanted = weights_wanted;
  return fused_head(head, head_dim, most_shared).pair;
}

TEST(FusedChoice, EveryHeadDimOfTheTable) {
  for (const char* spec : {"kivi", "kivi,bits=4", "kivi,bits=8", "int4", "int8"}) {
    for (const int head_dim : {64, 80, 96, 128, 256}) {
      EXPECT_NE(kernel_of(spec, head_dim), 0) << fmt::format("{}, head_dim {}", spec, head_dim);
    }
    for (const int head_dim : {20, 32, 112, 160}) {
      EXPECT_EQ(kernel_of(spec, head_dim), 0) << fmt::format("{}, head_dim {}", spec, head_dim);
    }
  }
}

/// Instances of rare widths are left out where few models would use them: they take long to
/// compile.
TEST(FusedChoice, RareWidthsHaveOnePassAt64And128) {
  for (const char* spec : {"kivi,bits=1", "kivi,bits=3", "kivi,bits=5", "head_quantile"}) {
    for (const int head_dim : {64, 128}) {
      EXPECT_NE(kernel_of(spec, head_dim), 0) << fmt::format("{}, head_dim {}", spec, head_dim);
    }
    for (const int head_dim : {80, 96, 256}) {
      EXPECT_EQ(kernel_of(spec, head_dim), 0) << fmt::format("{}, head_dim {}", spec, head_dim);
    }
  }
}

/// Their keys and values stay in the same slots while tokens are evicted by weight.
TEST(FusedChoice, CodesByTokenGiveWeightsInOnePass) {
  for (const char* spec : {"int4", "int8"}) {
    EXPECT_NE(kernel_of(spec, 128, 0, kMostShared, /*weights_wanted=*/true), 0) << spec;
  }
  for (const char* spec : {"kivi", "calibquant"}) {
    EXPECT_EQ(kernel_of(spec, 128, 0, kMostShared, /*weights_wanted=*/true), 0) << spec;
  }
}

TEST(FusedChoice, CodebooksHaveOnePassByTokenAndBy64Channels) {
  for (const int head_dim : {64, 128}) {
    EXPECT_NE(kernel_of("nf4", head_dim), 0) << head_dim;
    EXPECT_NE(kernel_of("nf4,group=128", head_dim), 0) << head_dim;
    EXPECT_EQ(kernel_of("nf4,group=32", head_dim), 0) << head_dim;
  }
  EXPECT_EQ(kernel_of("nf4", 256), 0);
}

TEST(FusedChoice, VidKvIsServedAt128) {
  for (const char* spec :
       {"vidkv", "vidkv,profile=official", "vidkv,profile=paper", "vidkv,value_axis=token",
        "vidkv,value_bits=2", "vidkv,value_bits=1", "vidkv,trits=trit2b", "vidkv,fft=off"}) {
    EXPECT_NE(kernel_of(spec, 128), 0) << spec;
  }
  EXPECT_EQ(kernel_of("vidkv", 64), 0);
  EXPECT_EQ(kernel_of("vidkv", 256), 0);
}

/// What scales a row is copied 4, 8 or 16 bytes at a time: by as much as its groups take, or by 8.
TEST(FusedChoice, ScalesLieAsTheyAreCopied) {
  for (const int head_dim : {64, 80, 96, 128, 256}) {
    EXPECT_EQ(kernel_of("kivi", head_dim, 2), 0) << head_dim;
    EXPECT_EQ(kernel_of("kivi", head_dim, 8), 0) << head_dim;  // keys' by 16
    EXPECT_NE(kernel_of("int4", head_dim, 2), 0) << head_dim;
  }
}

TEST(FusedChoice, OneThatFitsTheSharedMemory) {
  EXPECT_EQ(kernel_of("kivi,bits=8", 256, 0, 99 << 10), 0);
  EXPECT_NE(kernel_of("kivi", 256, 0, 99 << 10), 0);
  EXPECT_EQ(kernel_of("kivi", 64, 0, 8 << 10), 0);
}

}  // namespace
}  // namespace kvlm::cuda::packed
