#include "vision/smart_resize.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "tests/vision/test_images.h"

namespace kvlm {
namespace {

using test::error_of;
using ::testing::HasSubstr;

constexpr PixelBudget kReleased{3136, 12845056};

TEST(SmartResize, TestVectors) {
  struct Case {
    int height, width;
    std::array<int, 2> released, small;
    int64_t tokens;
  };
  for (const Case& c :
       {Case{480, 640, {476, 644}, {476, 644}, 391},
        Case{1080, 1920, {1092, 1932}, {728, 1316}, 2691},
        Case{899, 1024, {896, 1036}, {896, 1036}, 1184},
        Case{1365, 2048, {1372, 2044}, {812, 1204}, 3577},
        Case{2000, 3000, {1988, 2996}, {812, 1204}, 7597}, Case{42, 70, {56, 56}, {56, 56}, 4},
        Case{70, 98, {56, 112}, {56, 112}, 8}, Case{10, 10, {56, 56}, {56, 56}, 4},
        Case{14, 2800, {28, 812}, {28, 812}, 29}, Case{28, 2000, {28, 1988}, {28, 1988}, 71}}) {
    const auto [height, width] = smart_resize(c.height, c.width, 28, kReleased);
    EXPECT_EQ((std::array{height, width}), c.released) << c.height << " x " << c.width;
    EXPECT_EQ(patch_grid(1, height, width, 14, 2).cells(2), c.tokens);
    EXPECT_EQ(smart_resize(c.height, c.width, 28, {3136, 1003520}), c.small);
  }
}

TEST(SmartResize, EqualsTheReferenceOnManySizes) {
  int refused = 0;
  for (auto& in : test::goldens("size", "geometry.txt")) {
    int height, width;
    in >> height >> width;
    for (int skipped, i = 0; i < 8; ++i) in >> skipped;
    const int frames = 2 + (7 * height + width) % 31;
    const auto check = [&](int factor, auto&& resize) {
      std::string tall, wide;
      in >> tall >> wide;
      ASSERT_TRUE(in);
      if (tall == "-") {
        ++refused;
        EXPECT_THAT(error_of(ErrorCode::kInvalidArgument, resize), HasSubstr("200 times"));
      } else {
        EXPECT_EQ(resize(), (std::array{std::stoi(tall) * factor, std::stoi(wide) * factor}))
            << height << " x " << width;
      }
    };
    check(28, [&] { return smart_resize(height, width, 28, kReleased); });
    check(32, [&] { return smart_resize_clip(frames, height, width, 2, 32, {131072, 786432}); });
  }
  EXPECT_GT(refused, 20);
}

TEST(SmartResize, DividesInTheReferencesOrder) {
  for (auto& in : test::goldens("budget", "geometry.txt")) {
    int height, width;
    PixelBudget budget;
    std::array<int, 2> expected;
    in >> height >> width >> budget.min_pixels >> budget.max_pixels >> expected[0] >> expected[1];
    ASSERT_TRUE(in);
    EXPECT_EQ(smart_resize(height, width, 28, budget), expected) << in.str();
  }
}

TEST(SmartResize, CappedBudgetsEqualTheReference) {
  for (auto& in : test::goldens("cap", "geometry.txt")) {
    std::string kind;
    int frames, height, width;
    std::array<int, 2> expected;
    in >> kind >> frames >> height >> width >> expected[0] >> expected[1];
    ASSERT_TRUE(in);
    if (kind == "qwen2") {
      const auto budget = capped_frame_budget({100352, 602112}, frames, 2, 28, 128000);
      EXPECT_EQ(smart_resize(height, width, 28, budget), expected) << in.str();
    } else {
      const auto budget = capped_clip_budget({131072, 786432}, frames, 32, 768);
      EXPECT_EQ(smart_resize_clip(frames, height, width, 2, 32, budget), expected) << in.str();
    }
  }
}

TEST(SmartResize, CapsByWhatIsScarcest) {
  const PixelBudget frame{100352, 602112};
  // 128000 tokens of 784 pixels, 90 % of them, two frames a slice.
  EXPECT_EQ(capped_frame_budget(frame, 2, 2, 28, 128000).max_pixels, 602112);
  EXPECT_EQ(capped_frame_budget(frame, 700, 2, 28, 128000).max_pixels, 258048);
  EXPECT_EQ(capped_frame_budget(frame, 70000, 2, 28, 128000).max_pixels, 105369);
  const PixelBudget clip{131072, 7864320};
  EXPECT_EQ(capped_clip_budget(clip, 2, 32, 768).max_pixels, 2 * 786432);
  EXPECT_EQ(capped_clip_budget(clip, 20, 32, 768).max_pixels, 20 * 393216);
  EXPECT_EQ(capped_clip_budget(clip, 200, 32, 768).max_pixels, 200 * 137625);
  error_of(ErrorCode::kInvalidArgument, [&] { capped_frame_budget(frame, 0, 2, 28, 9); });
  error_of(ErrorCode::kInvalidArgument, [&] { capped_frame_budget(frame, 2, 2, 28, 0); });
  error_of(ErrorCode::kInvalidArgument,
           [&] { capped_clip_budget(clip, 2, 32, std::numeric_limits<int64_t>::max()); });
}

TEST(SmartResize, StaysInTheBudgetAndCloseToTheShape) {
  for (const int height : {1, 28, 97, 101, 480, 997, 4001}) {
    for (const int width : {1, 27, 29, 127, 640, 1009, 5003}) {
      if (height > 200 * width || width > 200 * height) continue;
      const auto [tall, wide] = smart_resize(height, width, 28, {3136, 1003520});
      EXPECT_EQ(tall % 28, 0);
      EXPECT_EQ(wide % 28, 0);
      EXPECT_GE(tall * wide, 3136);
      EXPECT_LE(tall * wide, 1003520) << height << " x " << width;
      const auto grid = patch_grid(1, tall, wide, 14, 2);
      EXPECT_EQ(grid, (PatchGrid{1, tall / 14, wide / 14}));
    }
  }
}

TEST(SmartResize, RefusesWhatTheFamilyRefuses) {
  EXPECT_THAT(error_of(ErrorCode::kInvalidArgument, [] { smart_resize(1, 4000, 28, kReleased); }),
              HasSubstr("4000 x 1 pixels is more than 200 times as long as wide"));
  EXPECT_NO_THROW(smart_resize(1, 200, 28, kReleased));
  error_of(ErrorCode::kInvalidArgument, [] { smart_resize(1, 201, 28, kReleased); });
  error_of(ErrorCode::kInvalidArgument, [] { smart_resize(201, 1, 28, kReleased); });
  // The sides that a flat clip has after it was enlarged count, the message shows those it had.
  EXPECT_THAT(error_of(ErrorCode::kInvalidArgument,
                       [] { smart_resize_clip(4, 1, 4000, 2, 32, kReleased); }),
              HasSubstr("4000 x 1 pixels"));
  EXPECT_THAT(
      error_of(ErrorCode::kInvalidArgument, [] { smart_resize_clip(1, 64, 64, 2, 32, kReleased); }),
      HasSubstr("a video of 1 frames is too short"));
  for (const auto& [height, width, factor] :
       {std::array{0, 5, 28}, std::array{5, -1, 28}, std::array{5, 5, 0}}) {
    error_of(ErrorCode::kInvalidArgument, [&] { smart_resize(height, width, factor, kReleased); });
  }
}

TEST(SmartResize, RefusesABudgetThatCannotBe) {
  constexpr int64_t kHuge = std::numeric_limits<int64_t>::max();
  EXPECT_THAT(error_of(ErrorCode::kInvalidArgument,
                       [] {
                         smart_resize(480, 640, 28, {kHuge, kHuge});
                       }),
              HasSubstr("check min_pixels (9223372036854775807)"));
  for (const PixelBudget& budget :
       {PixelBudget{kHuge, 1}, PixelBudget{-1, -1}, PixelBudget{0, 0}, PixelBudget{kHuge, kHuge}}) {
    for (const int height : {1, 20, 480}) {
      try {  // refused, or a size that can be
        const auto [tall, wide] = smart_resize(height, 20, 28, budget);
        EXPECT_GE(tall, 28);
        EXPECT_GE(wide, 28);
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
      }
    }
  }
}

TEST(PatchGrid, RoundsFramesUpAndPixelsDown) {
  EXPECT_EQ(patch_grid(1, 28, 29, 14, 2), (PatchGrid{1, 2, 2}));
  EXPECT_EQ(patch_grid(5, 384, 384, 14, 2), (PatchGrid{3, 27, 27}));
  EXPECT_EQ(patch_grid(4, 16, 16, 16, 1), (PatchGrid{4, 1, 1}));
  error_of(ErrorCode::kInvalidArgument, [] { patch_grid(1, 13, 28, 14, 2); });
  error_of(ErrorCode::kInvalidArgument, [] { patch_grid(0, 28, 28, 14, 2); });
  error_of(ErrorCode::kInvalidArgument, [] { patch_grid(1, 28, 28, 14, 0); });
}

}  // namespace
}  // namespace kvlm
