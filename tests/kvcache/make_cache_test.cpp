#include "kvcache/make_cache.h"

#include <gtest/gtest.h>

#include "kernels/base/error.h"
#include "tests/kvcache/plans.h"

namespace kvlm {
namespace {

using test::plan_of;

constexpr const char* kFormats[] = {"f16", "bf16", "f32"};

const CacheShape kShape{3, 8, 2, 12, {}};

TEST(MakeCache, ReservesWholeCacheLinesPerLayer) {
  // One layer: 2 x 2 x 12 x 5 x 2 bytes = 480, rounded up to 512.
  EXPECT_EQ(reservation(*plan_of("f16", kShape), {1, 0, 5}).bytes(), 3u * 512);
  EXPECT_EQ(reservation(*plan_of("f16", kShape), {5, 0, 5}).bytes(), 3u * 512);
  // More than 32 bits: keys and values of 80 layers x 64 heads x 128 channels x 131072 rows.
  const CacheShape big{80, 64, 64, 128, {}};
  EXPECT_EQ(reservation(*plan_of("f32", big), {1, 0, 131072}).bytes(),
            size_t{4} * 2 * 80 * 64 * 128 * 131072);
}

/// What reservation() says is exactly enough.
TEST(MakeCache, ReservedBytesAdmitOneSequenceAndNotOneByteLess) {
  for (const char* name : kFormats) {
    const auto plan = plan_of(name, kShape);
    const size_t bytes = reservation(*plan, {3, 0, 7}).bytes();
    const auto enough = make_cache(plan, 2 * bytes, {});
    enough->open({3, 0, 7}, "a");
    enough->open({3, 0, 7}, "b");
    EXPECT_THROW(enough->open({1, 0, 1}, "c"), Error);
    const auto short_of = make_cache(plan, 2 * bytes - 64, {});
    short_of->open({3, 0, 7}, "a");
    EXPECT_THROW(short_of->open({3, 0, 7}, "b"), Error);
  }
}

TEST(MakeCache, RefusesMoreMemoryThanThereIs) {
  try {
    make_cache(plan_of("f16", kShape), size_t{1} << 60, {});
    FAIL() << "expected an Error";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kOutOfMemory);
  }
}

TEST(MakeCache, CachesSayTheirShapeAndSpec) {
  for (const char* name : kFormats) {
    const auto cache = make_cache(plan_of(name, kShape), 1 << 16, {});
    EXPECT_EQ(cache->spec(), name);
    EXPECT_EQ(cache->shape().layers, 3);
    EXPECT_EQ(cache->shape().q_per_kv(), 4);
    EXPECT_FALSE(cache->needs().prompt_embeddings);
  }
}

}  // namespace
}  // namespace kvlm
