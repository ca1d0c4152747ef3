#include "kernels/base/buffer.h"

#include <gtest/gtest.h>

#include <utility>

#include "kernels/base/error.h"
#include "kernels/base/tensor.h"

namespace kvlm {
namespace {

/// What is held on the CPU beyond what was held at the start of a test.
class Held : public testing::Test {
 protected:
  MemoryHeld now() const {
    const MemoryHeld held = memory_held({});
    return {held.workspace - start_.workspace, held.weights - start_.weights,
            held.cache - start_.cache, held.rounding - start_.rounding};
  }

 private:
  MemoryHeld start_ = memory_held({});
};

TEST_F(Held, EveryUseIsCountedByItself) {
  const Buffer scratch({}, 100);
  const Buffer weights({}, 2000, MemoryUse::kWeights);
  const Buffer cache({}, 30'000'000, MemoryUse::kCache);
  const Buffer empty({}, 0, MemoryUse::kCache);
  EXPECT_EQ(now().workspace, 100u);
  EXPECT_EQ(now().weights, 2000u);
  EXPECT_EQ(now().cache, 30'000'000u);
  EXPECT_EQ(now().rounding, 0u) << "pages are a GPU's";
  const Tensor tensor(DType::kF16, {7, 11}, {}, MemoryUse::kWeights);
  EXPECT_EQ(now().weights, 2000u + 2 * 7 * 11);
}

TEST_F(Held, BytesAreCountedUntilTheyAreFreedHoweverTheyMove) {
  {
    Buffer first({}, 64, MemoryUse::kWeights);
    Buffer second = std::move(first);
    EXPECT_EQ(now().weights, 64u);
    second = Buffer({}, 1000, MemoryUse::kCache);
    EXPECT_EQ(now().weights, 0u);
    EXPECT_EQ(now().cache, 1000u);
    first = std::move(second);
    EXPECT_EQ(now().cache, 1000u);
    first = Buffer();
    EXPECT_EQ(now().cache, 0u);
    second = Buffer({}, 5);
  }
  EXPECT_EQ(now().workspace + now().weights + now().cache, 0u);
}

TEST_F(Held, WhatCannotBeHadIsNotCounted) {
  EXPECT_THROW(Buffer({}, SIZE_MAX / 2), Error);
  EXPECT_THROW(Buffer({DeviceKind::kCuda, 4711}, 1 << 20), Error);
  EXPECT_EQ(now().workspace, 0u);
  EXPECT_EQ(memory_held({DeviceKind::kCuda, 4711}).workspace, 0u);
}

}  // namespace
}  // namespace kvlm
