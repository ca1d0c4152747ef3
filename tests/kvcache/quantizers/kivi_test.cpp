#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "kernels/base/error.h"
#include "tests/kvcache/quantizers/make.h"

namespace kvlm {
namespace {

using test::nominal;
using test::quantizer;
using test::shape_of;

const CacheShape kShape = shape_of(32, 2, 128);

/// docs/formulas.md, "KIVI": N = 300, R = 128.
TEST(Kivi, WatermarksOfTheWorkedExample) {
  const auto kivi = quantizer("kivi", kShape);
  const FlushRule& keys = kivi->packing(KvSide::kKeys, 0).flush;
  const FlushRule& values = kivi->packing(KvSide::kValues, 0).flush;
  EXPECT_EQ(keys.packed_after_prompt(300), 256);
  EXPECT_EQ(values.packed_after_prompt(300), 172);
  // The key window of 44 rows is full after 84 steps and then empty; values leave one by one.
  EXPECT_EQ(keys.trigger - 44, 84);
  EXPECT_EQ(keys.rows, 128);
  EXPECT_EQ(values.trigger, 129);
  EXPECT_EQ(values.rows, 1);
  for (const int n : {0, 1, 127, 128}) {
    EXPECT_EQ(keys.packed_after_prompt(n), n / 128 * 128);
    EXPECT_EQ(values.packed_after_prompt(n), 0);
  }
}

TEST(Kivi, KeepsATailForEvictionBesideRetention) {  // docs/formulas.md, "Windows"
  const auto plan = plan_cache(parse_spec("prefixkv,keep=0.5 + kivi"), kShape);
  const Quantizer& quantizer = *plan->packers[0].quantizer;
  const FlushRule& keys = quantizer.packing(KvSide::kKeys, 0).flush;
  EXPECT_EQ(keys.hold, 32);
  EXPECT_EQ(keys.trigger, 160);
  EXPECT_EQ(keys.rows, 128);
  EXPECT_EQ(keys.packed_after_prompt(300), 256);
  EXPECT_EQ(keys.packed_after_prompt(287), 128);
  EXPECT_EQ(quantizer.packing(KvSide::kValues, 0).flush.hold, 128);
}

TEST(Kivi, WidthsApart) {
  const auto kivi = quantizer("kivi,bits=4,value_bits=1", kShape);
  EXPECT_EQ(kivi->packing(KvSide::kKeys, 0).format.section[0].code, CodeFormat::kBits4);
  EXPECT_EQ(kivi->packing(KvSide::kValues, 0).format.section[0].code, CodeFormat::kBits1);
  EXPECT_EQ(nominal("kivi,bits=4,value_bits=1", kShape), 2.5);
}

TEST(Kivi, RefusesAWindowOfBrokenGroups) {
  try {
    quantizer("kivi,group=48,residual=128", kShape);
    FAIL();
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(),
                 "--kv kivi packs residual=128 tokens at a time, which is not a multiple of "
                 "group=48; use residual=144");
  }
}

}  // namespace
}  // namespace kvlm
