#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "kernels/base/error.h"
#include "tests/kvcache/quantizers/make.h"

namespace kvlm {
namespace {

using test::nominal;
using test::quantizer;
using test::shape_of;
using testing::ElementsAre;

std::string spec(int kq, int vq, int km, int vm) {
  return fmt::format("xquant,kq={},vq={},km={},vm={}", kq, vq, km, vm);
}

TEST(XQuant, NominalBitsCountSharedCodesOnce) {  // docs/arithmetic.md, "Nominal bits"
  const CacheShape shape = shape_of(32, 1, 32);
  EXPECT_EQ(nominal(spec(30, 2, 32, 16), shape), 1.375);
  EXPECT_EQ(nominal(spec(28, 0, 32, 28), shape), 1.40625);
  EXPECT_EQ(nominal(spec(32, 0, 32, 20), shape), 1.40625);
  EXPECT_EQ(nominal(spec(32, 0, 32, 16), shape), 1.375);
}

TEST(XQuant, ThresholdsScaleWithTheLayers) {  // docs/arithmetic.md, "XQuant"
  EXPECT_EQ(nominal("xquant", shape_of(32, 1, 32)), 1.375);
  EXPECT_EQ(nominal("xquant", shape_of(24, 1, 32)),
            nominal(spec(22, 2, 24, 12), shape_of(24, 1, 32)));
  EXPECT_EQ(nominal("xquant", shape_of(24, 1, 32)), 1.375);
  EXPECT_EQ(nominal("xquant", shape_of(28, 1, 32)),
            nominal(spec(26, 2, 28, 14), shape_of(28, 1, 32)));
  EXPECT_EQ(nominal("xquant", shape_of(28, 1, 32)), 1.375);
  EXPECT_EQ(nominal("xquant", shape_of(30, 1, 32)),
            nominal(spec(28, 2, 30, 16), shape_of(30, 1, 32)));
  EXPECT_NEAR(nominal("xquant", shape_of(30, 1, 32)), 1.383, 0.0005);
}

TEST(XQuant, PairsShareFromTheirThreshold) {
  const ShareMap share = quantizer(spec(6, 2, 4, 2), shape_of(7, 1, 32))->share();
  EXPECT_THAT(share.key_owner, ElementsAre(0, 1, 2, 3, 4, 4, 6));  // the last layer has no pair
  EXPECT_THAT(share.value_owner, ElementsAre(0, 1, 2, 2, 4, 4, 6));
}

TEST(XQuant, LevelsMoveByWidth) {
  const auto made = quantizer(spec(2, 0, 4, 4), shape_of(4, 1, 32));
  EXPECT_FLOAT_EQ(made->plan(Part::kKeys, 0).rules[0].eta, 0.045f);
  EXPECT_FLOAT_EQ(made->plan(Part::kKeys, 2).rules[0].eta, 1.0f / 6);
  EXPECT_FLOAT_EQ(made->plan(Part::kValues, 0).rules[0].eta, 1.0f / 6);
  PolicyProfile profile;
  profile.eta = {{1, 0.25}, {2, 0.09}};
  const auto fitted = quantizer(spec(2, 0, 4, 4), shape_of(4, 1, 32), &profile);
  EXPECT_FLOAT_EQ(fitted->plan(Part::kKeys, 0).rules[0].eta, 0.09f);
  EXPECT_FLOAT_EQ(fitted->plan(Part::kValues, 0).rules[0].eta, 0.25f);
  profile.eta.erase(2);  // fitted at 1 bit alone: 2 bits have their own
  const auto half = quantizer(spec(2, 0, 4, 4), shape_of(4, 1, 32), &profile);
  EXPECT_FLOAT_EQ(half->plan(Part::kKeys, 0).rules[0].eta, 0.045f);
  EXPECT_FLOAT_EQ(half->plan(Part::kValues, 0).rules[0].eta, 0.25f);
}

TEST(XQuant, RefusesAPairOfTwoWidths) {  // docs/arithmetic.md, "XQuant"
  EXPECT_THROW(quantizer(spec(3, 0, 0, 4), shape_of(4, 1, 32)), Error);
  EXPECT_THROW(quantizer(spec(4, 1, 4, 0), shape_of(4, 1, 32)), Error);
  EXPECT_NO_THROW(quantizer(spec(3, 0, 4, 4), shape_of(4, 1, 32)));  // nothing is shared
}

}  // namespace
}  // namespace kvlm
