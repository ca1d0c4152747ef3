#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "kernels/base/error.h"
#include "kvcache/plan/formula.h"
#include "tests/kvcache/quantizers/make.h"

namespace kvlm {
namespace {

using test::quantizer;
using test::shape_of;

const CacheShape kShape = shape_of(2, 2, 64);

/// Share of a standard normal variable above x.
double above(double x) { return std::erfc(x / std::sqrt(2.0)) / 2; }

/// Mean squared error of a standard normal variable coded to the nearest of 2^bits levels `step`
/// apart about 0. Of (x - level)^2 the integral from a to b is that of x^2, of -2 level x and of
/// level^2, each in closed form.
double error_of_step(int bits, double step) {
  const auto density = [](double x) {
    return std::isinf(x) ? 0 : std::exp(-x * x / 2) / std::sqrt(2 * std::acos(-1.0));
  };
  const auto moment = [&](double x) { return std::isinf(x) ? 0 : x * density(x); };
  const int half = 1 << (bits - 1);
  double error = 0;
  for (int i = 0; i < half; ++i) {  // the other half is its mirror image
    const double level = (i + 0.5) * step;
    const double a = i * step;
    const double b = i + 1 == half ? HUGE_VAL : a + step;
    const double share = above(a) - above(b);
    error += share + moment(a) - moment(b) - 2 * level * (density(a) - density(b)) +
             level * level * share;
  }
  return 2 * error;
}

/// The share of a Gaussian beyond the end level of the uniform quantizer of least error.
double best_tail(int bits) {
  double low = 1e-3;
  double high = 3;
  while (high - low > 1e-10) {  // the error has one minimum
    const double left = low + (high - low) / 3;
    const double right = high - (high - low) / 3;
    (error_of_step(bits, left) < error_of_step(bits, right) ? high : low) =
        error_of_step(bits, left) < error_of_step(bits, right) ? right : left;
  }
  return above((std::ldexp(1.0, bits) - 1) / 2 * low);
}

/// Above 1 bit, unless alpha is written, the share beyond either end is the Gaussian optimum; at 1
/// bit it is 0.2, near the optimum 0.2125 (docs/formulas.md, "head_quantile").
TEST(HeadQuantile, TailsAreTheGaussianOptimum) {
  const auto alpha = [](const std::string& spec) {
    return static_cast<double>(quantizer(spec, kShape)->packing(KvSide::kKeys, 0).rules[0].alpha);
  };
  EXPECT_FLOAT_EQ(static_cast<float>(alpha("head_quantile")), 0.2f);
  EXPECT_NEAR(best_tail(1), 0.2125, 1e-4);         // level sqrt(2 / pi)
  EXPECT_NEAR(best_tail(2), above(1.4935), 1e-4);  // Max 1960, table II: step 0.9957
  for (int bits = 2; bits <= 8; ++bits) {
    const double tail = best_tail(bits);
    EXPECT_NEAR(alpha("head_quantile,bits=" + std::to_string(bits)), tail, 0.01 * tail + 5e-6)
        << bits << " bits";
  }
  const auto given = quantizer("head_quantile,bits=8,alpha=0.2", kShape);
  EXPECT_FLOAT_EQ(given->packing(KvSide::kKeys, 0).rules[0].alpha, 0.2f);
  EXPECT_EQ(given->packing(KvSide::kKeys, 0).format.axis, ScaleAxis::kHead);
}

/// What was fitted at 1 bit clips so much that 8 bits are no better: it is for 1 bit alone.
TEST(HeadQuantile, AProfilesAlphaIsForItsWidth) {
  PolicyProfile profile;
  profile.alpha = {{1, 0.25}, {4, 0.01}};
  const auto alpha = [&](const std::string& spec) {
    return quantizer(spec, kShape, &profile)->packing(KvSide::kValues, 1).rules[0].alpha;
  };
  const auto own = [](const std::string& spec) {
    return quantizer(spec, kShape)->packing(KvSide::kValues, 1).rules[0].alpha;
  };
  EXPECT_FLOAT_EQ(alpha("head_quantile"), 0.25f);
  EXPECT_FLOAT_EQ(alpha("head_quantile,bits=4"), 0.01f);
  EXPECT_FLOAT_EQ(alpha("head_quantile,alpha=0.1"), 0.1f);
  for (const char* spec : {"head_quantile,bits=2", "head_quantile,bits=8"}) {
    EXPECT_FLOAT_EQ(alpha(spec), own(spec)) << spec;
  }
}

/// Eqs. 8-9 are for 1 bit; codes of more have the whole range (eqs. 3-6).
TEST(HeadQuantile, ThePaperHasQuantilesAtOneBitOnly) {
  PolicyProfile profile;
  profile.alpha[4] = 0.01;
  const auto alpha = [&](const std::string& spec) {
    return quantizer(spec, kShape, &profile)->packing(KvSide::kKeys, 0).rules[0].alpha;
  };
  EXPECT_FLOAT_EQ(alpha("head_quantile,profile=paper"), 0.2f);
  // Fitted to the nearest level of a range a head, and used there only.
  EXPECT_FLOAT_EQ(alpha("head_quantile,bits=4"), 0.01f);
  EXPECT_NE(alpha("head_quantile,bits=4,round=floor"), 0.01f);
  EXPECT_NE(alpha("head_quantile,bits=4,group_axes=channel"), 0.01f);
  EXPECT_EQ(alpha("head_quantile,bits=2,profile=paper"), 0);
  EXPECT_EQ(alpha("head_quantile,bits=4,profile=paper"), 0);
  EXPECT_FLOAT_EQ(alpha("head_quantile,bits=4,profile=paper,alpha=0.05"), 0.05f);
}

/// 1BitVKV's figure 3: widths of keys and values apart, 16 for those that are not packed.
TEST(HeadQuantile, KeysAndValuesHaveTheirWidths) {
  const auto made = quantizer("head_quantile,bits=4,value_bits=2", kShape);
  EXPECT_EQ(made->packing(KvSide::kKeys, 0).format.row_bytes(), 32u);
  EXPECT_EQ(made->packing(KvSide::kValues, 0).format.row_bytes(), 16u);
  EXPECT_FLOAT_EQ(made->packing(KvSide::kKeys, 0).rules[0].alpha, 0.00597f);
  EXPECT_FLOAT_EQ(made->packing(KvSide::kValues, 0).rules[0].alpha, 0.0676f);
  const auto keys_only = quantizer("head_quantile,value_bits=16", kShape);
  EXPECT_TRUE(keys_only->packs(KvSide::kKeys));
  EXPECT_FALSE(keys_only->packs(KvSide::kValues));
  EXPECT_DOUBLE_EQ(test::nominal("head_quantile,value_bits=16", kShape), 8.5);
}

/// A prompt of 100 visual rows, two layers, two heads of 64 channels: keys take 8 bytes a row and a
/// scale and a zero point a head, values 128 bytes a row.
TEST(HeadQuantile, BytesOfUnpackedValues) {
  const auto plan = plan_cache(parse_spec("head_quantile,value_bits=16"), kShape);
  LayerCounts counts;
  counts.rows = counts.visual = 100;
  counts.images = 1;
  const std::vector<PartBytes> bytes = formula(*plan, std::vector<LayerCounts>(2, counts));
  EXPECT_EQ(bytes[0].key_codes, 2u * 800);
  EXPECT_EQ(bytes[0].key_scales, 2u * 4);
  EXPECT_EQ(bytes[0].value_codes + bytes[0].value_scales, 0u);
  EXPECT_EQ(bytes[0].full_rows, 2u * 12800);
}

TEST(HeadQuantile, WidthsThatSayNothingAreRefused) {
  for (const char* spec :
       {"head_quantile,key_bits=16,value_bits=16", "head_quantile,bits=2,key_bits=1,value_bits=3",
        "head_quantile,value_bits=16 + share=codes"}) {
    EXPECT_THROW(plan_cache(parse_spec(spec), kShape), Error) << spec;
  }
}

}  // namespace
}  // namespace kvlm
