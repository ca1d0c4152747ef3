#include "vision/image.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <jpeglib.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <string>
#include <vector>

#include "tests/vision/test_images.h"

namespace kvlm {
namespace {

using namespace std::string_literals;
using test::crc32;
using test::data_file;
using test::data_folder;
using test::error_of;
using ::testing::AllOf;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::StartsWith;

std::string message_of(ErrorCode code, std::span<const std::byte> bytes) {
  return error_of(code, [&] { decode_image(bytes, "cat.png"); });
}

std::string message_of(ErrorCode code, std::string_view bytes) {
  return message_of(code, std::as_bytes(std::span(bytes)));
}

/// A file or folder that is removed at the end of a test.
class TemporaryFile {
 public:
  TemporaryFile(const std::string& name, std::string_view content)
      : path_(std::filesystem::temp_directory_path() /
              ("kvlm_" + std::to_string(getpid()) + "_" + name)) {
    std::ofstream(path_, std::ios::binary) << content;
  }
  ~TemporaryFile() { std::filesystem::remove(path_); }
  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
};

TEST(Image, EveryFixtureEqualsPillow) {
  for (auto& in : test::goldens("decode")) {
    std::string name;
    int width, height;
    in >> name >> width >> height;
    const uint32_t expected = test::read_crc(in);
    const Image image = load_image(data_folder() / name);
    EXPECT_EQ(image.width, width) << name;
    EXPECT_EQ(image.height, height) << name;
    EXPECT_EQ(crc32(image), expected) << name;
  }
}

TEST(Image, OrientationCanBeIgnored) {
  const Image upright = load_image(data_folder() / "orientation1.jpg");
  for (int value = 2; value <= 8; ++value) {
    const auto path = data_folder() / ("orientation" + std::to_string(value) + ".jpg");
    EXPECT_EQ(load_image(path, Orientation::kIgnore).rgb, upright.rgb) << value;
    EXPECT_NE(load_image(path).rgb, upright.rgb) << value;
  }
}

TEST(Image, OrientationSix) {  // the one of a telephone held upright: turn to the right
  const Image stored = load_image(data_folder() / "orientation6.jpg", Orientation::kIgnore);
  const Image upright = load_image(data_folder() / "orientation6.jpg");
  ASSERT_EQ(upright.height, stored.width);
  ASSERT_EQ(upright.width, stored.height);
  // The first stored row is the right column.
  const auto last = static_cast<size_t>(upright.width - 1) * 3;
  EXPECT_EQ(upright.rgb[last], stored.rgb[0]);
  EXPECT_EQ(upright.rgb[last + 1], stored.rgb[1]);
}

TEST(Image, MissingDirectoryAndEmpty) {
  EXPECT_THAT(error_of(ErrorCode::kCorruptFile, [] { load_image("/no/such/cat.png"); }),
              AllOf(HasSubstr("/no/such/cat.png does not exist"),
                    HasSubstr("give the path of a PNG, JPEG, WebP, GIF, BMP, PNM"),
                    EndsWith(" or TGA file")));
  EXPECT_THAT(error_of(ErrorCode::kCorruptFile, [] { load_image(data_folder()); }),
              HasSubstr("is a directory"));
  const TemporaryFile empty("empty.png", "");
  EXPECT_THAT(
      error_of(ErrorCode::kCorruptFile, [&] { load_image(empty.path()); }),
      AllOf(HasSubstr("empty.png"), HasSubstr("is empty (zero bytes); give a PNG, JPEG, WebP")));
}

TEST(Image, TextIsCalledText) {
  const TemporaryFile text("note.png", "This is a note.\nIt is not a picture: \xc3\xa9.\n");
  EXPECT_THAT(error_of(ErrorCode::kCorruptFile, [&] { load_image(text.path()); }),
              AllOf(HasSubstr("note.png"), HasSubstr("is text, not an image")));
  EXPECT_THAT(message_of(ErrorCode::kCorruptFile, "<!DOCTYPE html><html>"), HasSubstr("is text"));
  EXPECT_THAT(
      message_of(ErrorCode::kCorruptFile, "BMW builds cars, not pictures, and has done so."),
      HasSubstr("is text"));
  EXPECT_THAT(message_of(ErrorCode::kCorruptFile, "\x01\x02\x03\x04"s),
              HasSubstr("not in a known image format"));
}

TEST(Image, OtherFormatsAreNamed) {
  const std::vector<std::pair<std::string, std::string>> files = {
      {"\0\0\0\x18"
       "ftypavif\0\0\0\0"s,
       "an AVIF file"},
      {"\0\0\0\x0cJXL \r\n\x87\n"s, "a JPEG XL file"},
      {"\0\0\0\x0cjP  \r\n\x87\n"s, "a JPEG 2000 file"},
      {"8BPS\0\1"s, "a Photoshop (PSD) file"},
      {"P3\n1 1\n255\n1 2 3", "a PNM file in text, of bits or with alpha (P3)"},
      {"P4\n8 1\n\1", "a PNM file in text, of bits or with alpha (P4)"},
      {"%PDF-1.4\n", "a PDF file"},
      {"<?xml version=\"1.0\"?><svg/>", "an SVG file"}};
  for (const auto& [bytes, kind] : files) {
    EXPECT_THAT(
        message_of(ErrorCode::kUnsupported, bytes),
        AllOf(StartsWith("image cat.png is " + kind), EndsWith("convert it to PNG or JPEG")));
  }
}

TEST(Image, AVideoIsNamed) {
  const std::vector<std::pair<std::string, std::string>> files = {
      {"\0\0\0\x18"
       "ftypisom\0\0\0\0"s,
       "a video (MP4)"},
      {"\x1a\x45\xdf\xa3\x01\0\0\0"s, "a video (Matroska)"},
      {"RIFF\x10\0\0\0AVI LIST\0\0\0\0"s, "a video (AVI)"}};
  for (const auto& [bytes, kind] : files) {
    EXPECT_THAT(message_of(ErrorCode::kUnsupported, bytes),
                AllOf(StartsWith("image cat.png is " + kind), HasSubstr("give it as a video")));
  }
}

TEST(Image, EveryTruncationIsStated) {
  for (auto& in : test::goldens("decode")) {
    std::string name;
    in >> name;
    const auto bytes = data_file(name);
    const Image whole = decode_image(bytes, name);
    size_t needed = bytes.size();
    if (name == "animated.gif") needed = 1000;  // somewhere in its first image
    const size_t step = std::max<size_t>(needed / 150, 1);
    int served = 0;
    for (size_t length = 0; length < needed; length += length + step < needed ? step : 1) {
      const auto part = std::span(bytes).first(length);
      try {
        const Image image = decode_image(part, name);
        ++served;
        if (image.rgb == whole.rgb && image.height == whole.height) continue;
        ASSERT_FALSE(image.warnings.empty()) << name << ' ' << length << " of " << bytes.size();
        EXPECT_THAT(image.warnings[0], HasSubstr("ends early")) << name << ' ' << length;
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), ErrorCode::kCorruptFile) << name << ' ' << error.what();
        if (length >= 18) {  // a TGA's header, and more than any signature
          EXPECT_THAT(error.what(), HasSubstr("truncated")) << name << ' ' << length;
        }
      }
    }
    EXPECT_TRUE(served > 0 || name.starts_with("animated") || whole.height * whole.width < 20)
        << name;
  }
}

TEST(Image, DamageIsAnErrorOrAnImage) {
  for (const char* name :
       {"lossy_alpha.webp", "animated_part.webp", "orientation6.webp", "interlaced.gif",
        "beyond.gif", "rgb10.ppm", "palette24.tga", "pillow_rle.tga", "interlaced.png",
        "palette4.png", "grey16.png", "baseline.jpg", "progressive.jpg", "cmyk.jpg",
        "orientation6.jpg", "rgb24.bmp", "palette4.bmp"}) {
    auto bytes = data_file(name);
    for (size_t i = 0; i < bytes.size(); i += 3) {
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
  }
}

TEST(Image, AChangedPngPixelIsNoticed) {
  auto bytes = data_file("filtered.png");
  bytes[bytes.size() - 40] ^= std::byte{1};
  EXPECT_THAT(message_of(ErrorCode::kCorruptFile, bytes),
              AllOf(HasSubstr("damaged PNG"), HasSubstr("copy or download it again")));
}

void put_u32(std::vector<std::byte>& bytes, size_t at, uint32_t value, bool big_endian) {
  for (size_t i = 0; i < 4; ++i) {
    bytes[at + i] = static_cast<std::byte>(value >> 8 * (big_endian ? 3 - i : i));
  }
}

TEST(Image, BombsAreRefusedBeforeAllocation) {
  auto bmp = data_file("rgb24.bmp");
  put_u32(bmp, 18, 60000, false);
  put_u32(bmp, 22, 60000, false);
  EXPECT_THAT(message_of(ErrorCode::kCorruptFile, bmp),
              AllOf(HasSubstr("60000 x 60000 pixels"), HasSubstr("268435456")));

  auto jpeg = data_file("baseline.jpg");
  const std::array marker{std::byte{0xff}, std::byte{0xc0}};
  const auto sof = std::search(jpeg.begin(), jpeg.end(), marker.begin(), marker.end());
  std::fill_n(sof + 5, 4, std::byte{0xee});  // height and width
  EXPECT_THAT(message_of(ErrorCode::kCorruptFile, jpeg), HasSubstr("61166 x 61166 pixels"));
  std::fill_n(sof + 5, 4, std::byte{0x20});  // small enough, but not for this file
  EXPECT_THAT(message_of(ErrorCode::kCorruptFile, jpeg), HasSubstr("truncated"));

  auto png = data_file("rgb8.png");
  put_u32(png, 16, 100000, true);
  put_u32(png, 20, 100000, true);
  put_u32(png, 29, crc32(png.data() + 12, 17), true);
  EXPECT_THAT(message_of(ErrorCode::kCorruptFile, png), HasSubstr("100000 x 100000 pixels"));
  put_u32(png, 16, 16000, true);
  put_u32(png, 20, 16000, true);
  put_u32(png, 29, crc32(png.data() + 12, 17), true);
  EXPECT_THAT(message_of(ErrorCode::kCorruptFile, png), HasSubstr("truncated"));
}

TEST(Image, BmpSizesThatMakeNoSense) {
  for (const uint32_t size : {0u, 0x80000000u, 0xffffffffu}) {
    for (const size_t at : {18, 22}) {
      auto bmp = data_file("rgb24.bmp");
      put_u32(bmp, at, size, false);
      if (at == 22 && size == 0xffffffffu) continue;  // one row, from the top
      message_of(ErrorCode::kCorruptFile, bmp);
    }
  }
  auto compressed = data_file("palette8.bmp");
  put_u32(compressed, 30, 1, false);
  EXPECT_THAT(message_of(ErrorCode::kUnsupported, compressed), HasSubstr("compressed BMP"));
}

TEST(Image, GifSizesThatMakeNoSense) {
  auto wide = data_file("part.gif");
  std::fill_n(wide.begin() + 6, 4, std::byte{0xff});  // the canvas
  EXPECT_THAT(message_of(ErrorCode::kCorruptFile, wide),
              AllOf(HasSubstr("a GIF of 65535 x 65535 pixels"), HasSubstr("scale it down")));
  auto hollow = data_file("global.gif");
  hollow[hollow.size() - 178] = std::byte{0};  // the length of its only piece of codes
  EXPECT_THAT(message_of(ErrorCode::kCorruptFile, hollow),
              HasSubstr("codes end before its pixels"));
}

/// An 8-bit grey GIF of that many rows of 100 pixels, whose table of codes is never started anew.
std::string gif_of_one_table(size_t rows) {
  std::string codes;
  unsigned bits = 0;
  unsigned count = 0;
  unsigned width = 9;
  const auto put = [&](unsigned code) {
    bits |= code << count;
    for (count += width; count >= 8; count -= 8, bits >>= 8) codes += static_cast<char>(bits);
  };
  put(256);
  for (size_t i = 0; i < 100 * rows; ++i) {
    put(static_cast<unsigned>(i * 7 % 256));  // each of which makes an entry but the first
    if (258 + i == size_t{1} << width && width < 12) ++width;
  }
  put(257);
  width = 8;
  put(0);
  std::string file = "GIF89a\x64\0"s + static_cast<char>(rows) + "\0\0\0\0,\0\0\0\0\x64\0"s +
                     static_cast<char>(rows) + "\0\0\x08"s;
  for (size_t at = 0; at < codes.size(); at += 255) {
    const std::string piece = codes.substr(at, 255);
    file += static_cast<char>(piece.size()) + piece;
  }
  return file + "\0;"s;
}

TEST(Image, AGifMayKeepItsTable) {
  for (const size_t rows : {70u, 255u}) {
    const std::string file = gif_of_one_table(rows);
    const Image image = decode_image(std::as_bytes(std::span(file)), "one table");
    ASSERT_EQ(image.height, static_cast<int>(rows));
    for (size_t i = 0; i < 100 * rows; ++i) ASSERT_EQ(image.rgb[3 * i], i * 7 % 256) << i;
  }
}

TEST(Image, TgaOfColoursPassesOverItsPalette) {
  auto plain = data_file("rgb24.tga");
  auto with = plain;
  with[1] = std::byte{1};
  with[5] = std::byte{2};   // entries
  with[7] = std::byte{24};  // bits of each
  with.insert(with.begin() + 18, 6, std::byte{77});
  EXPECT_EQ(decode_image(with, "a").rgb, decode_image(plain, "b").rgb);
}

TEST(Image, PnmHeadersThatMakeNoSense) {
  for (const char* file : {"P6\n", "P6\n1", "P5\n1 1\n255", "P5 # only a comment"}) {
    EXPECT_THAT(message_of(ErrorCode::kCorruptFile, std::string_view(file)),
                HasSubstr("truncated"));
  }
  for (const char* file : {"P6\n-1 1\n255\nabc", "P6\nx 1\n255\nabc", "P6\n1x 1\n255\nabc",
                           "P6\n0 1\n255\nabc", "P6\n1 1\n0\nabc", "P6\n1 1\n65536\nabcdef",
                           "P6\n99999999999 1\n255\nabc", "P6\n9999999999 1\n255\nabc"}) {
    message_of(ErrorCode::kCorruptFile, std::string_view(file));
  }
}

TEST(Image, UnusualJpegIsNamed) {
  auto bytes = data_file("baseline.jpg");
  const std::array marker{std::byte{0xff}, std::byte{0xc0}};
  const auto sof = std::search(bytes.begin(), bytes.end(), marker.begin(), marker.end());
  *(sof + 4) = std::byte{12};  // bits a sample
  EXPECT_THAT(message_of(ErrorCode::kUnsupported, bytes), HasSubstr("JPEG of an unusual kind"));
}

/// A whole JPEG of that size, of one colour.
std::vector<std::byte> large_jpeg(unsigned width, unsigned height, bool progressive = false) {
  jpeg_compress_struct codec{};
  jpeg_error_mgr errors{};
  codec.err = jpeg_std_error(&errors);
  jpeg_create_compress(&codec);
  unsigned char* data = nullptr;
  unsigned long bytes = 0;  // NOLINT(google-runtime-int): libjpeg's type
  jpeg_mem_dest(&codec, &data, &bytes);
  codec.image_width = width;
  codec.image_height = height;
  codec.input_components = 3;
  codec.in_color_space = JCS_RGB;
  jpeg_set_defaults(&codec);
  if (progressive) jpeg_simple_progression(&codec);
  jpeg_start_compress(&codec, TRUE);
  std::vector<unsigned char> row(size_t{width} * 3, 128);
  unsigned char* rows = row.data();
  while (codec.next_scanline < height) jpeg_write_scanlines(&codec, &rows, 1);
  jpeg_finish_compress(&codec);
  const auto view = std::as_bytes(std::span(data, bytes));
  std::vector<std::byte> copy(view.begin(), view.end());
  jpeg_destroy_compress(&codec);
  std::free(data);
  return copy;
}

TEST(Image, ALargePhotographIsQuick) {
  const auto bytes = large_jpeg(8000, 6000);
  const auto start = std::chrono::steady_clock::now();
  const Image image = decode_image(bytes, "large");
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
  EXPECT_EQ(image.width, 8000);
  EXPECT_EQ(image.height, 6000);
  EXPECT_EQ(image.rgb.front(), 128);
  EXPECT_EQ(image.rgb.back(), 128);
  RecordProperty("seconds", std::to_string(seconds.count()));
  EXPECT_LT(seconds.count(), 20.0);  // some 0.3 s; sanitizers and a busy machine are slower
}

TEST(Image, ScansAreBoundedByTheSize) {
  const auto bytes = large_jpeg(8192, 8192, true);
  const Image image = decode_image(bytes, "progressive");
  EXPECT_EQ(image.rgb.front(), 128);
  // One scan again and again before the last, each of which is a pass over all of the picture.
  const std::array start{std::byte{0xff}, std::byte{0xda}};
  const auto last = std::find_end(bytes.begin(), bytes.end(), start.begin(), start.end());
  const auto before = std::find_end(bytes.begin(), last, start.begin(), start.end());
  const std::vector<std::byte> scan(before, last);
  std::vector<std::byte> hostile(bytes.begin(), last);
  for (int i = 0; i < 50; ++i) hostile.insert(hostile.end(), scan.begin(), scan.end());
  hostile.insert(hostile.end(), last, bytes.end());
  EXPECT_THAT(message_of(ErrorCode::kCorruptFile, hostile), HasSubstr("more than 32 scans"));
}

}  // namespace
}  // namespace kvlm
