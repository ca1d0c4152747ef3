#include "kernels/base/human_bytes.h"

#include <gtest/gtest.h>

namespace kvlm {
namespace {

TEST(HumanBytes, HaveTheUnitThatSuitsThem) {
  EXPECT_EQ(human_bytes(0), "0 bytes");
  EXPECT_EQ(human_bytes(999), "999 bytes");
  EXPECT_EQ(human_bytes(1000), "1.0 kB");
  EXPECT_EQ(human_bytes(1536), "1.5 kB");
  EXPECT_EQ(human_bytes(12'300'000), "12.30 MB");
  EXPECT_EQ(human_bytes(5'000'000'000), "5.00 GB");
}

}  // namespace
}  // namespace kvlm
