#include "tools/common/room.h"

#include <gmock/gmock.h>

#include <cstdint>

#include "kernels/base/error.h"

namespace kvlm {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::Not;

constexpr Device kGpu{DeviceKind::kCuda, 1};

constexpr size_t kMega = 1'000'000;

std::string refusal(size_t weights, size_t cache, size_t free) {
  try {
    require_room({"a model", weights, cache}, kGpu, {"card", free, 1000 * kMega});
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kOutOfMemory);
    return error.what();
  }
  return "";
}

TEST(Room, WhatFitsToTheLastByteIsTaken) {
  EXPECT_EQ(refusal(900, 0, 900), "");
  EXPECT_EQ(refusal(700, 200, 900), "");
  EXPECT_EQ(refusal(0, 0, 0), "");
}

TEST(Room, AModelThatIsTooLargeIsToldBothFigures) {
  EXPECT_EQ(refusal(901 * kMega, 0, 900 * kMega),
            "a model does not fit on cuda:1 (card): its weights take 901.00 MB, and 900.00 MB of "
            "1.00 GB are free; use a smaller model, or --device cpu");
}

TEST(Room, ACacheThatIsTooLargeIsNamedToo) {
  EXPECT_THAT(refusal(700 * kMega, 201 * kMega, 900 * kMega),
              AllOf(HasSubstr("take 700.00 MB and --kv-memory 201.00 MB, and 900.00 MB of 1.00 GB"),
                    HasSubstr("a smaller model or cache")));
  EXPECT_THAT(refusal(1, SIZE_MAX, 900), HasSubstr("does not fit")) << "the sum overflows";
  EXPECT_THAT(refusal(SIZE_MAX, SIZE_MAX, 900), HasSubstr("does not fit"));
}

TEST(Room, WhatTheMachineCannotHoldIsRefusedOnTheCpuToo) {
  EXPECT_NO_THROW(require_memory({"a model", 700 * kMega, 200 * kMega}, 900 * kMega));
  try {
    require_memory({"a model", 700 * kMega, 201 * kMega}, 900 * kMega);
    FAIL() << "expected an Error";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kOutOfMemory);
    EXPECT_STREQ(error.what(),
                 "a model does not fit in memory: its weights take 700.00 MB and --kv-memory "
                 "201.00 MB, but there are 900.00 MB in all; use a smaller model or cache");
  }
  EXPECT_THROW(require_memory({"a model", SIZE_MAX, SIZE_MAX}, SIZE_MAX), Error);
}

TEST(Room, TheMachineHasSomeMemory) {
  EXPECT_GT(memory_limit(), 64 * kMega);
  EXPECT_LT(memory_limit(), SIZE_MAX);
}

}  // namespace
}  // namespace kvlm
