// Files that end early or are damaged: what is there is decoded, what is missing is stated, and
// nothing is lost in silence.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <string>
#include <vector>

#include "tests/vision/test_images.h"
#include "tests/vision/test_videos.h"
#include "vision/decoders.h"
#include "vision/video_sources.h"

namespace kvlm {
namespace {

using namespace std::string_literals;
using test::data_file;
using test::error_of;
using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::ElementsAre;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::StartsWith;

std::string file_text(const std::string& name) {
  const auto bytes = data_file(name);
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

Image decode(std::string_view file) {
  return decode_image(std::as_bytes(std::span(file)), "cat.img");
}

/// The share that the only warning of an image states, in percent; 100 if it is refused for that.
double stated_percent(std::string_view file) {
  std::string message;
  try {
    const Image image = decode(file);
    if (image.warnings.empty()) return 0;
    EXPECT_EQ(image.warnings.size(), 1u);
    message = image.warnings[0];
    EXPECT_THAT(message, StartsWith("image cat.img is a "));
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kCorruptFile);
    EXPECT_THAT(error.what(), HasSubstr("copy or download it again"));
    return 100;
  }
  if (message.find("its pixels are whole") != std::string::npos) return 0;
  EXPECT_THAT(message, EndsWith(" of its pixels are missing; copy or download it again"));
  const size_t end = message.find(" % of its pixels");
  return std::stod(message.substr(message.rfind(' ', end - 1) + 1));
}

/// The share of the pixels in which two images differ, in percent.
double different_percent(const Image& a, const Image& b) {
  size_t different = 0;
  for (size_t i = 0; i < a.rgb.size(); i += 3) {
    different += !std::equal(a.rgb.begin() + static_cast<std::ptrdiff_t>(i),
                             a.rgb.begin() + static_cast<std::ptrdiff_t>(i + 3),
                             b.rgb.begin() + static_cast<std::ptrdiff_t>(i));
  }
  return 100 * static_cast<double>(different) / static_cast<double>(a.rgb.size() / 3);
}

// Large enough that the bytes which a decoder reads ahead are few of them.
constexpr std::array kJpegs = {"half_chroma.jpg", "full_chroma.jpg"};

TEST(Damage, AJpegNeedsNoEndMark) {
  for (const std::string name : {"baseline.jpg", "grey.jpg", "restarts.jpg", "cmyk.jpg",
                                 "half_chroma.jpg", "full_chroma.jpg", "progressive.jpg"}) {
    const std::string whole = file_text(name);
    const Image expected = decode(whole);
    EXPECT_THAT(expected.warnings, IsEmpty());
    const std::string body = whole.substr(0, whole.size() - 2);
    for (const std::string& end :
         {""s, "\xff"s, std::string(9, '\0'), std::string(5000, '\0'), std::string(50, '\xff'),
          "a trailer of a telephone, in text"s, "\xff\xd9\x01\x02 after it"s,
          "other bytes\xff\xc5 with a mark\xff\xd8"s, whole}) {
      const Image image = decode(body + end);
      EXPECT_EQ(image.rgb, expected.rgb) << name << ' ' << end.size();
      EXPECT_THAT(image.warnings, IsEmpty()) << name << ' ' << end.size();
    }
  }
}

TEST(Damage, AJpegStatesWhatIsMissing) {
  for (const char* name : kJpegs) {
    const std::string whole = file_text(name);
    const Image expected = decode(whole);
    for (const double part : {0.7, 0.8, 0.9, 0.97}) {
      const auto length = static_cast<size_t>(static_cast<double>(whole.size()) * part);
      const std::string cut = whole.substr(0, length);
      const std::string zeros(whole.size() - length + 100, '\0');
      for (const std::string& file : {cut, cut + zeros, cut + zeros + "\xff\xd9"}) {
        SCOPED_TRACE(fmt::format("{} {} {}", name, part, file.size()));
        const double stated = stated_percent(file);
        if (stated == 100) continue;  // small files are most of all headers
        EXPECT_NEAR(stated, different_percent(decode(file), expected), 12);
      }
    }
  }
}

/// The only warning of an image; that of the error if it is refused.
std::string warning_of(std::string_view file) {
  try {
    const Image image = decode(file);
    EXPECT_LE(image.warnings.size(), 1u);
    return image.warnings.empty() ? "" : image.warnings[0];
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kCorruptFile);
    return error.what();
  }
}

// Codes are read on from another place than they were written, which shows much later.
TEST(Damage, AJpegWithItsEndMarkStatesNoShareThatIsTooSmall) {
  for (const char* name : {"half_chroma.jpg", "full_chroma.jpg", "grey.jpg", "cmyk.jpg"}) {
    const std::string whole = file_text(name);
    const Image expected = decode(whole);
    const size_t scan = whole.find("\xff\xda") + 14;
    int stated = 0;
    for (size_t at = scan; at + 60 < whole.size(); at += 17) {
      std::string file = whole;
      file.erase(at, 40);
      SCOPED_TRACE(fmt::format("{} {}", name, at));
      const std::string warning = warning_of(file);
      if (warning.empty()) continue;  // codes without a trace of it
      EXPECT_THAT(warning, HasSubstr("damaged JPEG"));
      if (warning.find("of its pixels are missing") != std::string::npos) {
        EXPECT_EQ(stated_percent(file), 100);  // refused
        continue;
      }
      EXPECT_THAT(warning, AnyOf(HasSubstr("on at the latest; copy or download it again"),
                                 HasSubstr("an unknown share of its pixels is wrong")));
      ++stated;
    }
    EXPECT_GT(stated, 10) << name;
  }
}

TEST(Damage, ACutArithmeticJpegStatesWhatIsMissing) {
  const std::string whole = file_text("arithmetic.jpg");
  const Image expected = decode(whole);
  EXPECT_THAT(expected.warnings, IsEmpty());
  EXPECT_EQ(decode(whole.substr(0, whole.size() - 2)).rgb, expected.rgb);
  for (const double part : {0.55, 0.7, 0.8}) {
    const std::string cut = whole.substr(0, static_cast<size_t>(1585 * part));
    const double stated = stated_percent(cut);
    const double different = different_percent(decode(cut), expected);
    EXPECT_GE(stated + 1, different) << part;
    EXPECT_LT(stated, different + 20) << part;  // a row of blocks is 17 %
  }
}

TEST(Damage, AProgressiveJpegMayLackFineDetail) {
  const std::string whole = file_text("progressive.jpg");
  const Image expected = decode(whole);
  const size_t last = whole.rfind("\xff\xda");
  const size_t middle = (last + whole.size()) / 2;
  std::string hole = whole;
  hole.erase(middle, 9);
  for (const std::string& file : {whole.substr(0, last), whole.substr(0, middle), hole}) {
    const Image image = decode(file);
    ASSERT_EQ(image.warnings.size(), 1u);
    EXPECT_THAT(image.warnings[0], HasSubstr("fine detail of its pixels is missing or wrong"));
    int most = 0;
    for (size_t i = 0; i < image.rgb.size(); ++i) {
      most = std::max(most, std::abs(image.rgb[i] - expected.rgb[i]));
    }
    EXPECT_LT(most, 80);
  }
  const size_t second = whole.find("\xff\xda", whole.find("\xff\xda") + 2);
  EXPECT_EQ(stated_percent(whole.substr(0, second)), 100);
}

TEST(Damage, AHeavilyDamagedJpegIsRefused) {
  for (const char* name : {"half_chroma.jpg", "full_chroma.jpg", "baseline.jpg", "restarts.jpg"}) {
    const std::string whole = file_text(name);
    const size_t scan = whole.find("\xff\xda") + 14;
    const std::string cut = whole.substr(0, scan + (whole.size() - scan) / 14);
    const std::string zeros(whole.size() - cut.size(), '\0');
    for (const std::string& file : {cut, cut + "\xff\xd9", cut + zeros, cut + zeros + "\xff\xd9"}) {
      EXPECT_EQ(stated_percent(file), 100) << name << ' ' << file.size();
    }
  }
}

TEST(Damage, DataLeftOverInAJpegIsNoticed) {
  const std::string whole = file_text("full_chroma.jpg");
  std::string more = whole;
  more.insert(whole.size() - 2, "these bytes are data of pixels that are not there");
  EXPECT_THAT(
      decode(more).warnings,
      ElementsAre(AllOf(HasSubstr("damaged JPEG"), HasSubstr("bytes of its data are left over"),
                        HasSubstr("an unknown share of its pixels is wrong"))));
  std::string padded = whole;
  padded.insert(whole.size() - 2, "\1\2\3");
  EXPECT_THAT(decode(padded).warnings, IsEmpty());
}

TEST(Damage, OneRestartIntervalIsNotAll) {
  std::string file = file_text("restarts.jpg");
  const Image expected = decode(file);
  const size_t mark = file.find("\xff\xd1");
  ASSERT_NE(mark, std::string::npos);
  file.insert(mark, "these bytes belong to no pixel of it");
  const double stated = stated_percent(file);
  EXPECT_GT(stated, 0);
  EXPECT_LT(stated, 60);
  EXPECT_EQ(decode(file).rgb, expected.rgb);
}

TEST(Damage, EveryFormatStatesWhatIsMissing) {
  for (const char* name : {"rgb8.png", "filtered.png", "palette8_key.png", "grey8.png", "rgb24.bmp",
                           "rgb24_top_down.bmp", "rgb.ppm", "grey.pgm", "rgb24.tga", "rgba32.tga",
                           "ramp.gif", "global.gif"}) {
    const std::string whole = file_text(name);
    const Image expected = decode(whole);
    int served = 0;
    for (const double part : {0.75, 0.85, 0.95}) {
      const auto length = static_cast<size_t>(static_cast<double>(whole.size()) * part);
      const std::string cut = whole.substr(0, length);
      SCOPED_TRACE(fmt::format("{} {}", name, part));
      const double stated = stated_percent(cut);
      if (stated == 100) continue;
      ++served;
      const double different = different_percent(decode(cut), expected);
      EXPECT_GE(stated + 1, different);  // black pixels may be right
    }
    EXPECT_GT(served, 0) << name;
  }
}

TEST(Damage, AChunkOfAPngThatIsWrongCountsFromItsBeginning) {
  const std::string whole = file_text("rgb8.png");
  const size_t chunk = whole.find("IDAT");
  ASSERT_NE(chunk, std::string::npos);
  std::string wrong = whole;
  wrong[chunk + 20] = static_cast<char>(wrong[chunk + 20] ^ 0x40);
  EXPECT_EQ(stated_percent(wrong), 100);
}

TEST(Damage, WhatFollowsThePixelsMayBeMissing) {
  for (const char* name : {"exif_after.png", "orientation6.webp", "orientation_xmp.webp"}) {
    const std::string whole = file_text(name);
    const Image image = decode(whole.substr(0, whole.size() - 14));
    ASSERT_EQ(image.warnings.size(), 1u) << name;
    EXPECT_THAT(image.warnings[0], HasSubstr("orientation may be missing")) << name;
  }
}

TEST(Damage, WhatFollowsThePixelsMayBeWrong) {
  for (const char* name : {"rgb8.png", "palette8_key.png"}) {
    std::string file = file_text(name);
    const Image expected = decode(file);
    file[file.size() - 3] ^= 0x20;  // the checksum of the end mark
    const Image image = decode(file);
    EXPECT_EQ(image.rgb, expected.rgb);
    EXPECT_THAT(image.warnings, ElementsAre(HasSubstr("its pixels are whole")));
  }
}

TEST(Damage, ATiffHasItsRowsAndItsChecksum) {
  if (!is_tiff("II*\0\0\0\0\0"s)) GTEST_SKIP() << "a build without libtiff";
  for (const char* name : {"rgb.tif", "grey.tif", "rgb16.tif"}) {
    const std::string whole = file_text(name);
    const Image expected = decode(whole);
    for (const double part : {0.7, 0.8, 0.95}) {
      const auto length = static_cast<size_t>(static_cast<double>(whole.size()) * part);
      const std::string cut = whole.substr(0, length);
      const double stated = stated_percent(cut);
      EXPECT_NEAR(stated, different_percent(decode(cut), expected), 2) << name << ' ' << part;
      EXPECT_NEAR(stated, 100 * (1 - part), 15) << name << ' ' << part;
    }
  }
  const std::string whole = file_text("deflate.tif");
  const Image expected = decode(whole);
  const size_t data = whole.find("\x78\x9c");
  ASSERT_NE(data, std::string::npos);
  int served = 0;
  for (size_t at = data + 2; at < data + 700; at += 7) {
    std::string wrong = whole;
    wrong[at] ^= 0x11;
    const std::string warning = warning_of(wrong);
    EXPECT_THAT(warning, HasSubstr("damaged TIFF")) << at;
    served += warning.find("an unknown share") != std::string::npos;
  }
  EXPECT_GT(served, 0);
}

TEST(Damage, AlphaThatHoldsTheImageIsStated) {
  const auto warned =
      ElementsAre(AllOf(HasSubstr("has transparency (all of its pixels have one colour)"),
                        HasSubstr("flatten it onto a background")));
  for (const char* name : {"shape.png", "shape_grey.png", "shape_palette.png", "shape.webp",
                           "shape.tga", "shape.bmp", "shape.tif"}) {
    if (std::string_view(name).ends_with(".tif") && !is_tiff("II*\0\0\0\0\0"s)) continue;
    EXPECT_THAT(load_image(test::data_folder() / name).warnings, warned) << name;
  }
  std::string tga = file_text("shape.tga");
  const auto set_alpha = [&](char alpha) {  // of two thirds
    for (size_t i = 18; i < 18 + size_t{4} * 32 * 16; i += 4) {
      tga[i] = static_cast<char>(i);
      tga[i + 3] = alpha;
    }
  };
  set_alpha(0);
  EXPECT_THAT(decode(tga).warnings, ElementsAre(HasSubstr("% of its pixels are clear)")));
  set_alpha(9);
  EXPECT_THAT(decode(tga).warnings, IsEmpty());
  set_alpha(0);
  tga[17] &= 0x30;  // without alpha
  EXPECT_THAT(decode(tga).warnings, IsEmpty());
}

TEST(Damage, ClippedGreyIsStated) {
  for (const char* name : {"grey16.png", "grey16_noise.png", "grey16.pgm"}) {
    const Image image = load_image(test::data_folder() / name);
    ASSERT_EQ(image.warnings.size(), 1u) << name;
    EXPECT_THAT(image.warnings[0], AllOf(HasSubstr("16-bit grey"), HasSubstr("become white"),
                                         HasSubstr("convert it to 8 bits")));
    const double white = 100 * static_cast<double>(std::ranges::count(image.rgb, uint8_t{255})) /
                         static_cast<double>(image.rgb.size());
    const size_t end = image.warnings[0].find(" % of its pixels");
    const double stated =
        std::stod(image.warnings[0].substr(image.warnings[0].rfind(' ', end - 1) + 1));
    EXPECT_NEAR(stated, white, 1) << name;  // 255 itself is white without a loss
  }
  for (const char* name : {"grey8.png", "rgb16.png", "grey_alpha16.png", "rgb16.ppm"}) {
    EXPECT_THAT(load_image(test::data_folder() / name).warnings, IsEmpty()) << name;
  }
}

TEST(Damage, AnAnimationHasItsWholeFrames) {
  for (const char* name : {"mixed16.gif", "pillow.gif", "parts.webp", "lossy.webp"}) {
    const auto whole = test::file_bytes(test::video_data() / name);
    const bool gif = std::string_view(name).ends_with("gif");
    const auto open = [&](size_t length) {
      std::vector<std::byte> bytes(whole.begin(),
                                   whole.begin() + static_cast<std::ptrdiff_t>(length));
      return gif ? open_gif_video(std::move(bytes), name) : open_webp_video(std::move(bytes), name);
    };
    const auto all = open(whole.size());
    EXPECT_THAT(all->info().warnings, IsEmpty());
    const auto part = open(whole.size() * 3 / 4);
    ASSERT_LT(part->info().frames, all->info().frames) << name;
    EXPECT_THAT(part->info().warnings,
                ElementsAre(AllOf(HasSubstr(name), HasSubstr("ends early: only its first"))));
    const Video expected = all->read(test::all_of(*part));
    const Video video = part->read(test::all_of(*part));
    for (size_t i = 0; i < video.frames.size(); ++i) {
      EXPECT_EQ(video.frames[i].rgb, expected.frames[i].rgb) << name << ' ' << i;
    }
  }
}

TEST(Damage, AVideoFileHasItsWholeFrames) {
  if (!reads_video_files()) GTEST_SKIP() << "a build without FFmpeg";
  const test::TemporaryFolder folder;
  for (const std::string name :
       {"ffv1.mkv", "open_gop.mkv", "uneven.mkv", "reordered.mp4", "raw.avi"}) {
    const auto bytes = test::file_bytes(test::video_data() / name);
    const std::string whole(reinterpret_cast<const char*>(bytes.data()), bytes.size());
    const auto all = open_video(folder.file(name, whole));
    EXPECT_THAT(all->info().warnings, IsEmpty()) << name;
    bool stated = false;
    for (const double part : {0.6, 0.8, 0.9}) {
      const auto length = static_cast<size_t>(static_cast<double>(whole.size()) * part);
      const auto path = folder.file("cut_" + name, whole.substr(0, length));
      try {
        const auto cut = open_video(path);
        if (cut->info().frames == all->info().frames) continue;  // what follows the frames
        ASSERT_EQ(cut->info().warnings.size(), 1u) << name << ' ' << part;
        EXPECT_THAT(cut->info().warnings[0],
                    AllOf(HasSubstr("ends early"), HasSubstr("copy or download it again")));
        const Video video = cut->read(test::all_of(*cut));
        EXPECT_EQ(video.frames.size(), static_cast<size_t>(cut->info().frames));
        stated = true;
      } catch (const Error& error) {
        EXPECT_THAT(error.what(), HasSubstr("cut_" + name));  // its header is cut, or too much
      }
    }
    EXPECT_TRUE(stated || (name != "ffv1.mkv" && name != "open_gop.mkv")) << name;
  }
}

TEST(Damage, ACutVideoIsNamedAsSuch) {
  if (!reads_video_files()) GTEST_SKIP() << "a build without FFmpeg";
  const test::TemporaryFolder folder;
  for (const std::string name : {"reordered.mp4", "raw.avi", "ffv1.mkv"}) {
    const auto bytes = test::file_bytes(test::video_data() / name);
    const std::string whole(reinterpret_cast<const char*>(bytes.data()), bytes.size());
    int refused = 0;
    for (size_t length = 400; length < whole.size(); length += whole.size() / 40) {
      const auto path = folder.file("cut_" + name, whole.substr(0, length));
      try {
        open_video(path);
      } catch (const Error& error) {
        ++refused;
        EXPECT_THAT(error.what(),
                    AllOf(HasSubstr("ends early"), HasSubstr("copy or download it again")));
      }
    }
    EXPECT_GT(refused, 0) << name;
  }
}

TEST(Damage, AnAnimationIsNoImage) {
  const test::TemporaryFolder folder;
  for (const std::string name : {"mixed16.gif", "lossy.webp"}) {
    const auto bytes = test::file_bytes(test::video_data() / name);
    const std::string whole(reinterpret_cast<const char*>(bytes.data()), bytes.size());
    const auto path = folder.file(name, whole.substr(0, 60));
    EXPECT_THAT(error_of(ErrorCode::kCorruptFile, [&] { open_video(path); }),
                AllOf(StartsWith("video "), HasSubstr(name + " is a ")));
  }
}

TEST(Damage, TheRuleIsOneForFramesToo) {
  VideoInfo info{.name = "a.mkv", .format = "matroska,webm", .frames = 3};
  warn_of_missing_frames(info, 5);
  EXPECT_THAT(info.warnings, ElementsAre("video a.mkv is a matroska,webm that ends early: 5 of 8 "
                                         "frames are missing (62.5 %); copy or download it again"));
  VideoInfo one{.name = "b.avi", .format = "avi", .frames = 2};
  warn_of_missing_frames(one, 1);
  EXPECT_THAT(one.warnings, ElementsAre("video b.avi is an avi that ends early: 1 of 3 frames is "
                                        "missing (33.3 %); copy or download it again"));
  EXPECT_THAT(error_of(ErrorCode::kCorruptFile, [&] { warn_of_missing_frames(info, 7); }),
              AllOf(HasSubstr("truncated"), HasSubstr("7 of 10 frames are missing (70.0 %)")));
}

}  // namespace
}  // namespace kvlm
