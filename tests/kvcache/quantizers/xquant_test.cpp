#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <vector>

#include "kernels/base/error.h"
#include "kernels/pack.h"
#include "tests/kvcache/quantizers/make.h"

namespace kvlm {
namespace {

using test::nominal;
using test::quantizer;
using test::shape_of;
using testing::ElementsAre;
using testing::HasSubstr;

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

/// Codes that layers 0 and 1 share of values whose codes would be 0 to 3 by row and by column.
std::vector<int> averaged(const std::string& options) {
  constexpr int kDim = 16;
  const auto made =
      quantizer("xquant,vq=2,vm=0,group=16,meta=f32,merge=average" + options, shape_of(2, 1, kDim));
  ThreadPool pool(1);
  Stream stream(pool);
  std::array<std::byte, kDim / 4> codes{};
  for (const int layer : {0, 1}) {
    std::vector<float> x;
    for (int i = 0; i < kDim; ++i) {
      x.push_back(layer == 0 ? static_cast<float>(i / 4) : static_cast<float>(2 * (i % 4) - 7));
    }
    const Packing& packing = made->packing(KvSide::kValues, layer);
    float scale = 0;
    float zero = 0;
    const PackJob job{x.data(), 1, codes.data(), reinterpret_cast<std::byte*>(&scale),
                      reinterpret_cast<std::byte*>(&zero)};
    pack(packing.format, packing.rules, {&job, 1}, stream);
    // The layer's own range, with ends moved by 0.045 of it.
    EXPECT_FLOAT_EQ(scale, layer == 0 ? 0.91f : 1.82f);
    EXPECT_FLOAT_EQ(zero, layer == 0 ? 0.135f : -6.73f);
  }
  std::vector<int> integers;
  for (int i = 0; i < kDim; ++i) {
    integers.push_back(
        code_at(reinterpret_cast<const uint8_t*>(codes.data()), CodeFormat::kBits2, i));
  }
  return integers;
}

/// XQuant, table 4 and appendix F: at 2 bits gamma makes six cases, by hand. Row: code of the first
/// layer; column: of the second.
TEST(XQuant, AveragesCodesInSixCases) {
  EXPECT_THAT(averaged(",gamma=0"), ElementsAre(0, 1, 2, 3,  //
                                                0, 1, 2, 3,  //
                                                0, 1, 2, 3,  //
                                                0, 1, 2, 3));
  EXPECT_EQ(averaged(",gamma=0.16"), averaged(",gamma=0"));
  EXPECT_THAT(averaged(",gamma=0.17"), ElementsAre(0, 1, 2, 2,  //
                                                   0, 1, 2, 3,  //
                                                   0, 1, 2, 3,  //
                                                   1, 1, 2, 3));
  EXPECT_EQ(averaged(",gamma=0.24"), averaged(",gamma=0.17"));
  EXPECT_THAT(averaged(",gamma=0.26"), ElementsAre(0, 1, 1, 2,  //
                                                   0, 1, 2, 2,  //
                                                   1, 1, 2, 3,  //
                                                   1, 2, 2, 3));
  EXPECT_EQ(averaged(",gamma=0.49"), averaged(",gamma=0.26"));
  EXPECT_THAT(averaged(",gamma=0.51"), ElementsAre(0, 0, 1, 1,  //
                                                   1, 1, 1, 2,  //
                                                   1, 2, 2, 2,  //
                                                   2, 2, 3, 3));
  EXPECT_EQ(averaged(",gamma=0.74"), averaged(",gamma=0.51"));
  EXPECT_THAT(averaged(",gamma=0.76"), ElementsAre(0, 0, 0, 1,  //
                                                   1, 1, 1, 1,  //
                                                   2, 2, 2, 2,  //
                                                   2, 3, 3, 3));
  EXPECT_EQ(averaged(",gamma=0.83"), averaged(",gamma=0.76"));
  EXPECT_EQ(averaged(""), averaged(",gamma=0.8"));
  EXPECT_THAT(averaged(",gamma=1"), ElementsAre(0, 0, 0, 0,  //
                                                1, 1, 1, 1,  //
                                                2, 2, 2, 2,  //
                                                3, 3, 3, 3));
  EXPECT_EQ(averaged(",gamma=0.84"), averaged(",gamma=1"));
}

TEST(XQuant, RoundsAveragesDownOrUp) {  // table 4, "Flooring" and "Ceiling"
  EXPECT_THAT(averaged(",gamma=0.5,round=floor"), ElementsAre(0, 0, 1, 1,  //
                                                              0, 1, 1, 2,  //
                                                              1, 1, 2, 2,  //
                                                              1, 2, 2, 3));
  EXPECT_THAT(averaged(",gamma=0.5,round=ceil"), ElementsAre(0, 1, 1, 2,  //
                                                             1, 1, 2, 2,  //
                                                             1, 2, 2, 3,  //
                                                             2, 2, 3, 3));
  EXPECT_THAT(averaged(",gamma=0.5"), ElementsAre(0, 0, 1, 2,  // ties to even
                                                  0, 1, 2, 2,  //
                                                  1, 2, 2, 2,  //
                                                  2, 2, 2, 3));
  // The mean of equal codes is that code: 0.9 * 3 + 0.1 * 3 is less than 3 in f64.
  for (const char* options : {",gamma=0.9,round=floor", ",gamma=0.7,round=ceil"}) {
    const std::vector<int> codes = averaged(options);
    for (size_t code = 0; code < 4; ++code) EXPECT_EQ(codes[5 * code], code);
  }
}

TEST(XQuant, RefusesAveragesThatCannotBe) {
  const auto why = [](const std::string& options) -> std::string {
    try {
      quantizer(spec(0, 0, 0, 0) + options, shape_of(4, 1, 32));
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  };
  EXPECT_EQ(why(",merge=average,layer_group=3"),
            "--kv xquant,merge=average,layer_group=3: only codes of pairs of layers are averaged; "
            "use layer_group=2, or leave out merge=average");
  EXPECT_THAT(why(",merge=average,dominant=1"), HasSubstr("dominant=1 has no effect"));
  // Codes of 1 bit: the mean rounds to the first layer's.
  EXPECT_THROW(quantizer("xquant,kq=0,km=0,vq=0,vm=0,merge=average", shape_of(4, 1, 32)), Error);
  EXPECT_NO_THROW(quantizer("xquant,kq=0,km=0,vq=0,vm=0,merge=average,gamma=0.5,round=ceil",
                            shape_of(4, 1, 32)));
  EXPECT_THAT(why(",gamma=0.5"), HasSubstr("gamma=0.5 has no effect"));
  EXPECT_THAT(why(",round=floor"), HasSubstr("round=floor has no effect"));
  EXPECT_THAT(why(",merge=floor"), HasSubstr("dominant, average"));
  EXPECT_THROW(quantizer("xquant,km=1024,vm=1024,merge=average", shape_of(4, 1, 32)), Error);
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
