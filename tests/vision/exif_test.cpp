#include "vision/exif.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>
#include <string>
#include <string_view>
#include <vector>

namespace kvlm {
namespace {

using namespace std::string_literals;

std::span<const std::byte> bytes_of(std::string_view text) {
  return std::as_bytes(std::span(text));
}

std::optional<int> exif(std::string_view text) { return exif_orientation(bytes_of(text)); }
std::optional<int> xmp(std::string_view text) { return xmp_orientation(bytes_of(text)); }

// A directory of one SHORT: tag 274, count 1, value 6.
const std::string kLittle = "II*\0\x08\0\0\0\x01\0\x12\x01\x03\0\x01\0\0\0\x06\0\0\0\0\0\0\0"s;
const std::string kBig = "MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01\0\x06\0\0\0\0\0\0"s;

TEST(Exif, ReadsBothByteOrders) {
  EXPECT_EQ(exif(kLittle), 6);
  EXPECT_EQ(exif(kBig), 6);
}

TEST(Exif, SkipsOneOrTwoPrefixes) {
  EXPECT_EQ(exif("Exif\0\0"s + kLittle), 6);
  EXPECT_EQ(exif("Exif\0\0Exif\0\0"s + kBig), 6);
  EXPECT_EQ(exif("Exif\0\0Exif\0\0Exif\0\0"s + kBig), std::nullopt);
}

TEST(Exif, FindsTheTagAmongOthersAndTakesTheLast) {
  const std::string other = "\x0f\x01\x02\0\x05\0\0\0\xff\xff\xff\xff"s;
  const std::string entry = kLittle.substr(10, 12);
  std::string second = entry;
  second[8] = 3;
  EXPECT_EQ(exif("II*\0\x08\0\0\0\x03\0"s + other + entry + other), 6);
  EXPECT_EQ(exif("II*\0\x08\0\0\0\x02\0"s + entry + second), 3);
}

TEST(Exif, ReadsLongValuesAndIgnoresOtherTypes) {
  std::string block = kLittle;
  block[12] = 4;  // LONG
  EXPECT_EQ(exif(block), 6);
  for (const int type : {0, 1, 2, 5, 7, 10, 12, 13, 100}) {
    block[12] = static_cast<char>(type);
    EXPECT_EQ(exif(block), std::nullopt) << type;
  }
  block[12] = 3;
  block[14] = 2;  // two values
  EXPECT_EQ(exif(block), std::nullopt);
}

TEST(Exif, EveryTruncationIsHarmless) {
  for (size_t length = 0; length < 22; ++length) {
    EXPECT_EQ(exif(kLittle.substr(0, length)), std::nullopt) << length;
    EXPECT_EQ(exif(kBig.substr(0, length)), std::nullopt) << length;
  }
}

TEST(Exif, OffsetsAndCountsOutsideTheBlockAreHarmless) {
  for (const std::string& offset : {"\xff\xff\xff\xff"s, "\xfe\xff\xff\xff"s, "\x1a\0\0\0"s,
                                    "\x19\0\0\0"s, "\x00\x00\x00\x80"s}) {
    std::string block = kLittle;
    block.replace(4, 4, offset);
    EXPECT_EQ(exif(block), std::nullopt);
  }
  std::string block = kLittle;
  block.replace(8, 2, "\xff\xff");
  EXPECT_EQ(exif(block), 6);  // what is there still counts
}

TEST(Exif, RandomBytesAreHarmless) {
  std::mt19937 random(1);
  for (int i = 0; i < 20000; ++i) {
    std::string block = i % 2 == 0 ? kLittle : kBig;
    for (int change = 0; change < 3; ++change) {
      block[4 + random() % (block.size() - 4)] = static_cast<char>(random());
    }
    block.resize(random() % (block.size() + 1));
    exif(block);
  }
}

TEST(Xmp, ReadsAttributeAndElement) {
  EXPECT_EQ(xmp("<a tiff:Orientation=\"6\"/>"), 6);
  EXPECT_EQ(xmp("<tiff:Orientation>8</tiff:Orientation>"), 8);
  EXPECT_EQ(xmp("<tiff:Orientation x>8</tiff:Orientation> tiff:Orientation=\"2"), 2);
}

TEST(Xmp, NothingWhereNothingIs) {
  for (const char* text : {"", "tiff:Orientation", "tiff:Orientation=", "tiff:Orientation=\"",
                           "tiff:Orientation=\"x", "tiff:Orientation='6'"}) {
    EXPECT_EQ(xmp(text), std::nullopt) << text;
  }
}

}  // namespace
}  // namespace kvlm
