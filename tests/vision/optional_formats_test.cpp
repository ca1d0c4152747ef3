// HEIC and TIFF, in a build with their libraries and in one without.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <string>

#include "tests/vision/test_images.h"
#include "vision/decoders.h"

namespace kvlm {
namespace {

using namespace std::string_literals;
using namespace std::string_view_literals;
using test::crc32;
using test::data_file;
using test::data_folder;
using test::error_of;
using ::testing::AllOf;
using ::testing::EndsWith;
using ::testing::HasSubstr;

bool is_read(const std::string& name) {
  const std::string_view tiff = "II*\0\0\0\0\0\0\0\0\0"sv;
  const std::string_view heic =
      "\0\0\0\x18"
      "ftypheic"sv;
  return name.ends_with(".tif") ? is_tiff(tiff) : is_heif(heic);
}

TEST(OptionalFormats, EveryFixtureEqualsPillow) {
  for (auto& in : test::goldens("optional")) {
    std::string name;
    int width, height;
    in >> name >> width >> height;
    const uint32_t expected = test::read_crc(in);
    if (!is_read(name)) continue;
    const Image image = load_image(data_folder() / name);
    EXPECT_EQ(image.width, width) << name;
    EXPECT_EQ(image.height, height) << name;
    EXPECT_EQ(crc32(image), expected) << name;
    const ImageInfo info = probe_image(data_folder() / name);
    EXPECT_EQ(info.width, width) << name;
    EXPECT_EQ(info.height, height) << name;
    EXPECT_EQ(image.warnings.empty(), name != "grey16.tif" && name != "shape.tif") << name;
  }
}

TEST(OptionalFormats, HeicIsCloseToWhatWasCodedAndUpright) {
  if (!is_read("a.heic")) GTEST_SKIP() << "a build without libheif";
  for (const std::string name : {"photo.heic", "turned.heic"}) {
    const Image image = load_image(data_folder() / name);
    Image coded = test::picture("smooth", 64, 96);
    if (name == "turned.heic") coded = apply_orientation(std::move(coded), 6);
    ASSERT_EQ(image.width, coded.width) << name;
    ASSERT_EQ(image.height, coded.height) << name;
    double sum = 0;
    for (size_t i = 0; i < coded.rgb.size(); ++i) sum += std::abs(image.rgb[i] - coded.rgb[i]);
    EXPECT_LT(sum / static_cast<double>(coded.rgb.size()), 8) << name;
  }
}

TEST(OptionalFormats, WithoutTheLibraryTheCureIsNamed) {
  for (const std::string name : {"photo.heic", "rgb.tif", "lzw.tif"}) {
    if (is_read(name)) continue;
    EXPECT_THAT(error_of(ErrorCode::kUnsupported, [&] { load_image(data_folder() / name); }),
                AllOf(HasSubstr("this build, without lib"), HasSubstr("tools/setup.sh --images"),
                      EndsWith("convert it to PNG or JPEG")));
  }
}

TEST(OptionalFormats, AreNamedWhereTheyAreRead) {
  const std::string message = error_of(ErrorCode::kCorruptFile, [&] { decode_image({}, "a"); });
  EXPECT_EQ(message.find("TIFF") != std::string::npos, is_read("a.tif"));
  EXPECT_EQ(message.find("HEIC") != std::string::npos, is_read("a.heic"));
}

TEST(OptionalFormats, DamageIsAnErrorOrAnImage) {
  for (const std::string name : {"lzw.tif", "jpeg.tif", "rgb.tif", "bits.tif", "odd.heic"}) {
    if (!is_read(name)) continue;
    auto bytes = data_file(name);
    for (size_t i = 0; i < bytes.size(); ++i) {
      const std::byte before = bytes[i];
      bytes[i] ^= std::byte{0x15};
      try {
        const Image image = decode_image(bytes, name);
        EXPECT_EQ(image.rgb.size(),
                  static_cast<size_t>(image.height) * static_cast<size_t>(image.width) * 3);
      } catch (const Error& error) {
        EXPECT_THAT(error.what(), HasSubstr(name));
      }
      bytes[i] = before;
    }
    for (size_t length = 0; length < bytes.size(); length += 7) {
      try {
        decode_image(std::span(bytes).first(length), name);
      } catch (const Error& error) {
        EXPECT_THAT(error.what(), HasSubstr(name));
      }
    }
  }
}

}  // namespace
}  // namespace kvlm
