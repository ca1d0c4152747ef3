#include "vision/frame_folder.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

namespace kvlm {
namespace {

using ::testing::ElementsAre;

TEST(FrameFolder, NaturalOrder) {
  std::vector<std::string> names = {"b1",
                                    "frame10",
                                    "frame9",
                                    "frame010",
                                    "a",
                                    "frame2x",
                                    "frame2",
                                    "frame",
                                    "99999999999999999999999",
                                    "100000000000000000000000",
                                    ""};
  std::ranges::sort(names, natural_less);
  EXPECT_THAT(names,
              ElementsAre("", "99999999999999999999999", "100000000000000000000000", "a", "b1",
                          "frame", "frame2", "frame2x", "frame9", "frame010", "frame10"));
  for (const std::string& a : names) {
    EXPECT_FALSE(natural_less(a, a)) << a;
    for (const std::string& b : names) EXPECT_EQ(natural_less(a, b) || natural_less(b, a), a != b);
  }
  EXPECT_TRUE(natural_less("1_000", "1_00a"));
  EXPECT_TRUE(natural_less("t0.1", "t0.10"));
}

TEST(FrameFolder, PictureSuffixes) {
  for (const char* name : {"a.png", "A.JPG", "x.y.WebP", "f.tiff"}) {
    EXPECT_TRUE(has_picture_suffix(name)) << name;
  }
  for (const char* name : {"png", "a.txt", "a.png.txt", "a.", ""}) {
    EXPECT_FALSE(has_picture_suffix(name)) << name;
  }
}

}  // namespace
}  // namespace kvlm
