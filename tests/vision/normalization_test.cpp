#include "vision/normalization.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/vision/test_images.h"

namespace kvlm {
namespace {

using test::error_of;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

TEST(NormalizationTable, FollowsItsFloatPath) {
  PreprocessSpec spec;
  spec.mean = {0.5, 0.25, 0.0};
  spec.std = {0.5, 0.25, 1.0};
  spec.normalize_backend = NormalizeBackend::kToTensor;
  const NormalizationTable table = normalization_table(spec);
  for (size_t value = 0; value < 256; ++value) {
    const float unit = static_cast<float>(value) / 255.0f;
    EXPECT_EQ(table[0][value], (unit - 0.5f) / 0.5f);
    EXPECT_EQ(table[1][value], (unit - 0.25f) / 0.25f);
    EXPECT_EQ(table[2][value], unit);
  }
}

TEST(NormalizationTable, RefusesConstantsThatDivideByZero) {
  PreprocessSpec spec;
  spec.std[2] = -1;
  EXPECT_THAT(error_of(ErrorCode::kInvalidArgument, [&] { normalization_table(spec); }),
              HasSubstr("image_std of channel 2 is -1"));
  spec.do_normalize = false;
  EXPECT_NO_THROW(normalization_table(spec));
  spec.rescale_factor = 0;
  error_of(ErrorCode::kInvalidArgument, [&] { normalization_table(spec); });
}

TEST(MeanColour, IsTruncatedToAByte) {
  EXPECT_THAT(mean_colour({0.48145466, 0.4578275, 0.40821073}), ElementsAre(122, 116, 104));
  EXPECT_THAT(mean_colour({0.5, 0.0, 1.0}), ElementsAre(127, 0, 255));
  EXPECT_THAT(mean_colour({-3.0, 7.0, 0.999}), ElementsAre(0, 255, 254));
}

}  // namespace
}  // namespace kvlm
