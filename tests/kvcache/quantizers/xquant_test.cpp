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

TEST(XQuant, NominalBitsCountSharedCodesOnce) {  // docs/formulas.md, "Nominal bits"
  const CacheShape shape = shape_of(32, 1, 32);
  EXPECT_EQ(nominal(spec(30, 2, 32, 16), shape), 1.375);
  EXPECT_EQ(nominal(spec(28, 0, 32, 28), shape), 1.40625);
  EXPECT_EQ(nominal(spec(32, 0, 32, 20), shape), 1.40625);
  EXPECT_EQ(nominal(spec(32, 0, 32, 16), shape), 1.375);
}

TEST(XQuant, ThresholdsScaleWithTheLayers) {  // docs/formulas.md, "XQuant"
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
  EXPECT_FLOAT_EQ(made->packing(KvSide::kKeys, 0).rules[0].eta, 0.045f);
  EXPECT_FLOAT_EQ(made->packing(KvSide::kKeys, 2).rules[0].eta, 1.0f / 6);
  EXPECT_FLOAT_EQ(made->packing(KvSide::kValues, 0).rules[0].eta, 1.0f / 6);
  PolicyProfile profile;
  profile.eta = {{1, 0.25}, {2, 0.09}};
  const auto fitted = quantizer(spec(2, 0, 4, 4), shape_of(4, 1, 32), &profile);
  EXPECT_FLOAT_EQ(fitted->packing(KvSide::kKeys, 0).rules[0].eta, 0.09f);
  EXPECT_FLOAT_EQ(fitted->packing(KvSide::kValues, 0).rules[0].eta, 0.25f);
  profile.eta.erase(2);  // fitted at 1 bit alone: 2 bits have their own
  const auto half = quantizer(spec(2, 0, 4, 4), shape_of(4, 1, 32), &profile);
  EXPECT_FLOAT_EQ(half->packing(KvSide::kKeys, 0).rules[0].eta, 0.045f);
  EXPECT_FLOAT_EQ(half->packing(KvSide::kValues, 0).rules[0].eta, 0.25f);
}

TEST(XQuant, RefusesAPairOfTwoWidths) {  // docs/formulas.md, "XQuant"
  EXPECT_THROW(quantizer(spec(3, 0, 0, 4), shape_of(4, 1, 32)), Error);
  EXPECT_THROW(quantizer(spec(4, 1, 4, 0), shape_of(4, 1, 32)), Error);
  EXPECT_NO_THROW(quantizer(spec(3, 0, 4, 4), shape_of(4, 1, 32)));  // nothing is shared
}

/// XQuant 4.3, table 5: groups of G layers, of which number k makes the codes.
TEST(XQuant, GroupsHaveADominantLayer) {
  const auto share = [](const char* options, int layers) {
    return quantizer(spec(0, 0, 0, 3) + options, shape_of(layers, 1, 32))->share();
  };
  const ShareMap threes = share(",layer_group=3", 7);
  EXPECT_THAT(threes.key_owner, ElementsAre(0, 0, 0, 3, 3, 3, 6));
  EXPECT_THAT(threes.key_writer, ElementsAre(0, 0, 0, 3, 3, 3, 6));
  EXPECT_THAT(threes.value_owner, ElementsAre(0, 1, 2, 3, 3, 3, 6));
  const ShareMap last = share(",layer_group=3,dominant=2", 8);
  EXPECT_THAT(last.key_owner, ElementsAre(0, 0, 0, 3, 3, 3, 6, 6));
  EXPECT_THAT(last.key_writer, ElementsAre(2, 2, 2, 5, 5, 5, 6, 6));  // the last group has no third
  EXPECT_THAT(last.value_owner, ElementsAre(0, 1, 2, 3, 3, 3, 6, 6));
  EXPECT_THAT(last.value_writer, ElementsAre(0, 1, 2, 5, 5, 5, 6, 6));
  const ShareMap fours = share(",layer_group=4,dominant=1", 6);
  EXPECT_THAT(fours.value_owner, ElementsAre(0, 1, 2, 0, 4, 4));
  EXPECT_THAT(fours.value_writer, ElementsAre(0, 1, 2, 0, 5, 5));  // layer 1 shares no values
}

TEST(XQuant, RefusesADominantLayerOutsideItsGroup) {
  EXPECT_THROW(quantizer(spec(0, 0, 0, 0) + ",dominant=2", shape_of(4, 1, 32)), Error);
  EXPECT_THROW(quantizer(spec(4, 0, 0, 0) + ",layer_group=3", shape_of(6, 1, 32)), Error);
  EXPECT_NO_THROW(quantizer(spec(3, 0, 0, 0) + ",layer_group=3", shape_of(6, 1, 32)));
  EXPECT_THROW(quantizer(spec(1, 0, 2, 0) + ",layer_group=4", shape_of(8, 1, 32)), Error);
  // Options that change nothing: no layer shares.
  EXPECT_THROW(quantizer(spec(0, 0, 8, 8) + ",dominant=1", shape_of(8, 1, 32)), Error);
  EXPECT_THROW(quantizer(spec(0, 0, 8, 8) + ",layer_group=3", shape_of(8, 1, 32)), Error);
}

/// Keys and values at 1 bit, all shared: a half, a third and a quarter of the codes are stored.
TEST(XQuant, NominalBitsOfGroups) {
  EXPECT_DOUBLE_EQ(nominal(spec(0, 0, 0, 0), shape_of(12, 1, 32)), 0.5);
  EXPECT_DOUBLE_EQ(nominal(spec(0, 0, 0, 0) + ",layer_group=3", shape_of(12, 1, 32)), 1.0 / 3);
  EXPECT_DOUBLE_EQ(nominal(spec(0, 0, 0, 0) + ",layer_group=4", shape_of(12, 1, 32)), 0.25);
}

/// The width that follows from thresholds. XQuant's table 6 names widths without thresholds; some
/// that have them: keys of 27 and of 20 layers
/// at 2 bits, values that pairs share from layers 14 and 12 on, (59 + 23) / 64 and (52 + 22) / 64.
TEST(XQuant, ThresholdsHaveTheWidthsOfTable6) {
  const CacheShape shape = shape_of(32, 1, 32);
  EXPECT_NEAR(nominal(spec(27, 0, 32, 14), shape), 1.28125, 1e-9);
  EXPECT_NEAR(nominal(spec(20, 0, 32, 12), shape), 1.15625, 1e-9);
}

}  // namespace
}  // namespace kvlm
