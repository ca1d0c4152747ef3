#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "kernels/attend_packed.h"
#include "kernels/base/error.h"
#include "tests/kvcache/quantizers/make.h"

namespace kvlm {
namespace {

using test::quantizer;
using test::shape_of;
using testing::ElementsAre;
using testing::FloatNear;

const CacheShape kShape = shape_of(2, 2, 64);

/// What becomes of 1 and 3, the ends of a channel, as keys or as values.
std::vector<float> levels(const std::string& spec, KvSide side) {
  const auto made = quantizer(spec, shape_of(1, 1, 1));
  const PackedFormat& format = made->packing(side, 0).format;
  const std::vector<float> x{1, 3, 2.2f};
  std::vector<float> y(3);
  std::byte codes[3];
  std::byte scale[4];
  std::byte zero[4];
  ThreadPool pool(1);
  Stream stream(pool);
  const PackJob job{x.data(), 3, codes, scale, zero};
  pack(format, made->packing(side, 0).rules, {&job, 1}, stream);
  const PackedBlock block{codes, scale, zero, 3, 3, nullptr};
  unpack_blocks(format, {&block, 1}, y.data(), stream);
  EXPECT_EQ(y[2], y[1]) << "2.2 is nearer to 3";
  return {y[0], y[1]};
}

/// docs/formulas.md, "CalibQuant", "Shrink"; metadata is f16.
TEST(CalibQuant, LevelsOfEveryShrink) {
  const auto are = [](float low, float high) {
    return ElementsAre(FloatNear(low, 1e-3f), FloatNear(high, 2e-3f));
  };
  // Towards the middle by a quarter of the range, values by .35.
  EXPECT_THAT(levels("calibquant", KvSide::kKeys), are(1.5f, 2.5f));
  EXPECT_THAT(levels("calibquant", KvSide::kValues), are(1.7f, 2.3f));
  // Both ends times a half; 1 is the tie in the middle and goes down.
  EXPECT_THAT(levels("calibquant,profile=official", KvSide::kKeys), are(0.5f, 1.5f));
  // Both ends times .3: from .3 to .9, which all of the channel is nearer to.
  EXPECT_THAT(levels("calibquant,profile=official", KvSide::kValues), are(0.9f, 0.9f));
  // As they are.
  EXPECT_THAT(levels("calibquant,profile=paper,tau=0:3", KvSide::kKeys), are(1, 3));
  EXPECT_THAT(levels("calibquant,profile=paper,tau=0:3", KvSide::kValues), are(1, 3));
}

TEST(CalibQuant, RemapsOfItsProfiles) {  // docs/formulas.md, "Remap"
  const auto standard = quantizer("calibquant", kShape);
  EXPECT_TRUE(standard->visual_only());
  ASSERT_NE(standard->remap(0), nullptr);
  EXPECT_EQ(standard->remap(0)->tau_low, 0);
  EXPECT_EQ(standard->remap(0)->tau_high, 3);
  EXPECT_TRUE(standard->remap(0)->guarded);
  EXPECT_FALSE(quantizer("calibquant,profile=official", kShape)->remap(0)->guarded);
}

TEST(CalibQuant, ConstantsBelongToOneBit) {
  for (const char* spec : {"calibquant,bits=2", "calibquant,bits=2,profile=official"}) {
    const auto two = quantizer(spec, kShape);
    EXPECT_EQ(two->packing(KvSide::kKeys, 0).rules[0].eta, 0);
    EXPECT_EQ(two->packing(KvSide::kKeys, 0).rules[0].kappa, 1);
    EXPECT_NE(two->remap(0), nullptr);  // calib_bits=2
  }
  EXPECT_EQ(quantizer("calibquant,bits=4", kShape)->remap(0), nullptr);
  EXPECT_EQ(quantizer("calibquant,tau=0:0", kShape)->remap(0), nullptr);
  PolicyProfile profile;
  profile.tau[1] = {1, 2};
  EXPECT_EQ(quantizer("calibquant", kShape, &profile)->remap(0)->tau_low, 1);
  EXPECT_EQ(quantizer("calibquant,tau=0:3", kShape, &profile)->remap(0)->tau_low, 0);
  // The published code's own, whatever was fitted.
  EXPECT_EQ(quantizer("calibquant,profile=official", kShape, &profile)->remap(0)->tau_low, 0);
  // A value of 1 bit is none of 2.
  EXPECT_EQ(quantizer("calibquant,bits=2", kShape, &profile)->remap(0)->tau_low, 0);
  EXPECT_EQ(quantizer("calibquant,bits=2", kShape, &profile)->remap(0)->tau_high, 3);
}

/// The paper searches tau on the model (4.2); the constants of its code are not put in its place.
TEST(CalibQuant, ThePapersTauComesFromASearch) {
  PolicyProfile profile;
  profile.tau[1] = {1, 3};  // fitted to shrunk ranges, which the paper has not
  profile.tau_unshrunk[1] = {1, 2};
  EXPECT_EQ(quantizer("calibquant,profile=paper", kShape, &profile)->remap(0)->tau_high, 2);
  EXPECT_EQ(quantizer("calibquant,shrink=none", kShape, &profile)->remap(0)->tau_high, 2);
  EXPECT_EQ(quantizer("calibquant", kShape, &profile)->remap(0)->tau_high, 3);
  EXPECT_NE(quantizer("calibquant,profile=paper,bits=8", kShape), nullptr);  // has no remap
  for (const char* spec : {"calibquant,profile=paper", "calibquant,profile=paper,bits=2"}) {
    const PolicyProfile* given = std::string_view(spec).ends_with("2") ? &profile : nullptr;
    try {
      quantizer(spec, kShape, given);
      ADD_FAILURE() << spec;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kUnsupported);
      EXPECT_THAT(error.what(), ::testing::HasSubstr("vlm-kv profile --policy calibquant --bits"));
      EXPECT_THAT(error.what(), ::testing::HasSubstr("tau=A:B"));
    }
  }
}

/// CalibQuant's table 4: values with one range per head or per layer beside keys per channel; and
/// widths of keys and values apart. Scores are remapped by the width of keys.
TEST(CalibQuant, ValuesHaveTheirAxisAndWidth) {
  const CacheShape shape = shape_of(2, 2, 64);
  const auto head = quantizer("calibquant,value_axis=head", shape);
  EXPECT_EQ(head->packing(KvSide::kKeys, 0).format.axis, ScaleAxis::kChannel);
  EXPECT_EQ(head->packing(KvSide::kValues, 0).format.axis, ScaleAxis::kHead);
  EXPECT_FALSE(head->packing(KvSide::kValues, 0).range_of_layer);
  EXPECT_TRUE(
      quantizer("calibquant,value_axis=layer", shape)->packing(KvSide::kValues, 0).range_of_layer);
  const auto wide = quantizer("calibquant,bits=8,value_bits=2", shape);
  EXPECT_EQ(wide->packing(KvSide::kKeys, 0).format.row_bytes(), 64u);
  EXPECT_EQ(wide->packing(KvSide::kValues, 0).format.row_bytes(), 16u);
  EXPECT_EQ(wide->remap(0), nullptr);
  EXPECT_NE(quantizer("calibquant,value_bits=8", shape)->remap(0), nullptr);
  EXPECT_EQ(quantizer("calibquant,key_bits=16", shape)->remap(0), nullptr);
  for (const char* spec :
       {"calibquant,key_bits=16,tau=0:1", "calibquant,key_bits=16,eta_k=0.1",
        "calibquant,value_bits=16,value_axis=head", "calibquant,value_bits=16,eta_v=0.1",
        "calibquant,span=per_image,value_axis=layer", "calibquant,key_bits=16,value_bits=16"}) {
    EXPECT_THROW(quantizer(spec, shape), Error) << spec;
  }
}

}  // namespace
}  // namespace kvlm
