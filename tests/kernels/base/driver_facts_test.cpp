#include "kernels/base/driver_facts.h"

#include <gtest/gtest.h>

namespace kvlm::cuda {
namespace {

TEST(WhyNone, NamesWhatIsMissing) {
  EXPECT_EQ(why_none({0, 13020, false, ""}), "no CUDA driver is installed");
  EXPECT_EQ(why_none({0, 13020, true, "insufficient"}), "no CUDA driver is installed");
  EXPECT_EQ(why_none({13020, 13020, false, ""}), "the driver reports no GPU");
  EXPECT_EQ(why_none({13020, 13020, false, "no CUDA-capable device is detected"}),
            "the driver says \"no CUDA-capable device is detected\"");
}

TEST(WhyNone, AnOldDriverIsToldWhatItServesAndWhatIsNeeded) {
  EXPECT_EQ(why_none({12040, 13020, true, "CUDA driver version is insufficient"}),
            "the driver serves CUDA 12.4 and this program needs 13.2; update it");
  EXPECT_EQ(why_none({11080, 12000, true, ""}),
            "the driver serves CUDA 11.8 and this program needs 12.0; update it");
}

}  // namespace
}  // namespace kvlm::cuda
