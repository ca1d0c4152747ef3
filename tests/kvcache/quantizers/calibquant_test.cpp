#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/kvcache/quantizers/make.h"

namespace kvlm {
namespace {

using test::quantizer;
using test::shape_of;

const CacheShape kShape = shape_of(2, 2, 64);

TEST(CalibQuant, ProfilesOfTheSpec) {  // specs 5.5
  const auto standard = quantizer("calibquant", kShape);
  EXPECT_TRUE(standard->visual_only());
  EXPECT_FLOAT_EQ(standard->plan(Part::kKeys, 0).rules[0].eta, 0.25f);
  EXPECT_FLOAT_EQ(standard->plan(Part::kValues, 0).rules[0].eta, 0.35f);
  ASSERT_NE(standard->remap(0), nullptr);
  EXPECT_EQ(standard->remap(0)->tau_low, 0);
  EXPECT_EQ(standard->remap(0)->tau_high, 3);
  EXPECT_TRUE(standard->remap(0)->guarded);

  const auto official = quantizer("calibquant,profile=official", kShape);
  EXPECT_FLOAT_EQ(official->plan(Part::kKeys, 0).rules[0].kappa, 0.5f);
  EXPECT_FLOAT_EQ(official->plan(Part::kValues, 0).rules[0].kappa, 0.3f);
  EXPECT_EQ(official->plan(Part::kKeys, 0).rules[0].eta, 0);
  EXPECT_FALSE(official->remap(0)->guarded);

  const auto paper = quantizer("calibquant,profile=paper", kShape);
  EXPECT_EQ(paper->plan(Part::kKeys, 0).rules[0].kappa, 1);
  EXPECT_EQ(paper->plan(Part::kKeys, 0).rules[0].eta, 0);
}

TEST(CalibQuant, ConstantsBelongToOneBit) {
  for (const char* spec : {"calibquant,bits=2", "calibquant,bits=2,profile=official"}) {
    const auto two = quantizer(spec, kShape);
    EXPECT_EQ(two->plan(Part::kKeys, 0).rules[0].eta, 0);
    EXPECT_EQ(two->plan(Part::kKeys, 0).rules[0].kappa, 1);
    EXPECT_NE(two->remap(0), nullptr);  // calib_bits=2
  }
  EXPECT_EQ(quantizer("calibquant,bits=4", kShape)->remap(0), nullptr);
  EXPECT_EQ(quantizer("calibquant,tau=0:0", kShape)->remap(0), nullptr);
  PolicyProfile profile;
  profile.tau = {1, 2};
  EXPECT_EQ(quantizer("calibquant", kShape, &profile)->remap(0)->tau_low, 1);
  EXPECT_EQ(quantizer("calibquant,tau=0:3", kShape, &profile)->remap(0)->tau_low, 0);
}

}  // namespace
}  // namespace kvlm
