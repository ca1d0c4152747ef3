#include "kvcache/engine/step_checks.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "kernels/base/error.h"
#include "kvcache/plan/sequence_bounds.h"
#include "kvcache/policy_cache.h"
#include "tests/kvcache/feeder.h"
#include "tests/kvcache/plans.h"

namespace kvlm {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;

const CacheShape kShape = testlife::shape_of(2, 2, 2, 16);
const Device kGpu{DeviceKind::kCuda, 0};

TEST(StepChecks, EachReasonForOnePromptIsNamed) {
  const auto why = [](const char* spec, Device device) {
    return std::string(why_one_prompt(*test::plan_of(spec, kShape), device));
  };
  EXPECT_THAT(why("prefixkv,keep=0.5 + xquant,kq=2,vq=0,km=0,vm=0", {}), HasSubstr("share codes"));
  EXPECT_THAT(why("prefixkv,keep=0.5 + xquant,kq=2,vq=0,km=0,vm=0", kGpu),
              HasSubstr("share codes"));
  EXPECT_THAT(why("h2o,keep=0.5", kGpu), HasSubstr("attention weights, which are on the GPU"));
  EXPECT_THAT(why("tova,keep=0.5", kGpu), HasSubstr("attention weights, which are on the GPU"));
  EXPECT_THAT(why("h2o,keep=0.5", {}), IsEmpty());
  EXPECT_THAT(why("prefixkv,keep=0.5", kGpu), IsEmpty());
  EXPECT_THAT(why("xquant,kq=2,vq=0,km=0,vm=0", kGpu), IsEmpty());
}

TEST(StepChecks, ASecondPromptIsRefusedWithItsReason) {
  const auto plan =
      test::plan_of("prefixkv,keep=0.5 + xquant,group=8,residual=16,kq=2,vq=0,km=0,vm=0", kShape);
  const SequenceSize size{20, 0, 40};
  PolicyCache cache(plan, SequenceBounds(*plan).reservation(size).bytes(), {});
  testlife::Feeder feeder(kShape);
  const SequenceId id = cache.open(size, "s");
  feeder.pass(cache, {{'s', id, 0, std::vector<int16_t>(20, kTextRow), true}});
  const StepRows rows{id, 2, true, true, {}};
  try {
    cache.begin({&rows, 1}, feeder.stream());
    ADD_FAILURE() << "was taken";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kUnsupported);
    EXPECT_THAT(error.what(), HasSubstr("takes no second prompt: its layers share codes"));
    EXPECT_THAT(error.what(), HasSubstr("prefill the whole conversation again"));
  }
}

}  // namespace
}  // namespace kvlm
