#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/kvcache/quantizers/make.h"

namespace kvlm {
namespace {

using test::quantizer;
using test::shape_of;

const CacheShape kShape = shape_of(2, 2, 64);

TEST(HeadQuantile, TailsNarrowWithTheWidth) {
  EXPECT_FLOAT_EQ(quantizer("head_quantile", kShape)->plan(Part::kKeys, 0).rules[0].alpha, 0.2f);
  float last = 0.2f;
  for (const char* spec :
       {"head_quantile,bits=2", "head_quantile,bits=4", "head_quantile,bits=8"}) {
    const float alpha = quantizer(spec, kShape)->plan(Part::kKeys, 0).rules[0].alpha;
    EXPECT_LT(alpha, last);
    last = alpha;
  }
  const auto given = quantizer("head_quantile,bits=8,alpha=0.2", kShape);
  EXPECT_FLOAT_EQ(given->plan(Part::kKeys, 0).rules[0].alpha, 0.2f);
  EXPECT_EQ(given->plan(Part::kKeys, 0).format.axis, ScaleAxis::kHead);
}

}  // namespace
}  // namespace kvlm
