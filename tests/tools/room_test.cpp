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

std::string refusal(size_t weights, size_t cache, size_t free) {
  try {
    require_room({"a model", weights, cache}, kGpu, {"card", free, 1000});
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
  EXPECT_EQ(refusal(901, 0, 900),
            "a model does not fit on cuda:1 (card): its weights take 901 bytes, and 900 of 1000 "
            "bytes are free; use a smaller model, or --device cpu");
}

TEST(Room, ACacheThatIsTooLargeIsNamedToo) {
  EXPECT_THAT(refusal(700, 201, 900),
              AllOf(HasSubstr("take 700 bytes and --kv-memory 201 bytes, and 900 of 1000"),
                    HasSubstr("a smaller model or cache")));
  EXPECT_THAT(refusal(1, SIZE_MAX, 900), HasSubstr("does not fit")) << "the sum overflows";
  EXPECT_THAT(refusal(SIZE_MAX, SIZE_MAX, 900), HasSubstr("does not fit"));
}

}  // namespace
}  // namespace kvlm
