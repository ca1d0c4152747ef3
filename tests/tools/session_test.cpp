#include "tools/common/session.h"

#include <gtest/gtest.h>

#include "kvcache/policy_cache.h"
#include "tests/runtime/golden.h"
#include "tools/common/program.h"

namespace kvlm {
namespace {

const CachePlan* plan_of(const KvCache& cache) {
  return &dynamic_cast<const PolicyCache&>(cache).plan();
}

/// What a spec means is found out when the model is opened; every cache is made of that.
TEST(Session, CachesShareThePlanOfTheirSession) {
  SessionOptions options;
  options.model = (test::golden_root() / "llava_gqa").string();
  options.device = device_name(test::test_device());
  options.dtype = "f16";
  options.kv = "uniform,keep=0.5 + int8";
  Session session(options);
  const auto one = session.make_cache(1, 40, std::nullopt);
  const auto other = session.make_cache(3, 80, size_t{1} << 22);
  EXPECT_EQ(plan_of(*one), session.plan().get());
  EXPECT_EQ(plan_of(*other), session.plan().get());
}

/// The plan is older than the weights, whose type prompts attend in on a GPU.
TEST(Session, ThePlanIsOfTheLoadedDecoder) {
  for (const char* dtype : {"f32", "f16", "bf16"}) {
    SessionOptions options;
    options.model = (test::golden_root() / "llava_gqa").string();
    options.device = device_name(test::test_device());
    options.dtype = dtype;
    Session session(options);
    const CacheShape shape = session.model().decoder().cache_shape();
    EXPECT_EQ(session.plan()->shape.multiply, parse_float_dtype(dtype));
    EXPECT_EQ(session.plan()->shape.layers, shape.layers);
    EXPECT_EQ(session.plan()->shape.rope_frequencies, shape.rope_frequencies);
    EXPECT_EQ(session.make_cache(1, 8, std::nullopt)->shape().multiply, shape.multiply);
  }
}

}  // namespace
}  // namespace kvlm
