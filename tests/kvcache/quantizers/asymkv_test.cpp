#include <gtest/gtest.h>

#include "tests/kvcache/quantizers/make.h"

namespace kvlm {
namespace {

using test::nominal;
using test::shape_of;

const CacheShape kShape = shape_of(32, 2, 128);

TEST(AsymKv, NominalBitsAreTheMeanOfLayers) {  // docs/formulas.md, "AsymKV"
  EXPECT_EQ(nominal("asymkv,key_layers=32,value_layers=0", kShape), 1.5);
  EXPECT_EQ(nominal("asymkv,key_layers=24,value_layers=32", kShape), 1.875);
  EXPECT_EQ(nominal("asymkv,key_layers=16,value_layers=32", kShape), 1.75);
  EXPECT_EQ(nominal("asymkv,key_layers=8,value_layers=32", kShape), 1.625);
  EXPECT_EQ(nominal("asymkv,key_layers=0,value_layers=32", kShape), 1.5);
}

}  // namespace
}  // namespace kvlm
