#include "vision/video.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <filesystem>
#include <fstream>
#include <string>
#include <tuple>
#include <vector>

#include "tests/vision/test_images.h"
#include "tests/vision/test_videos.h"
#include "vision/video_sources.h"

namespace kvlm {
namespace {

using namespace std::string_literals;
using test::all_of;
using test::crc32;
using test::data_folder;
using test::error_of;
using test::TemporaryFolder;
using test::video_data;
using test::video_error;
using ::testing::AllOf;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

/// One line of goldens.txt.
struct Clip {
  std::string name;
  int width = 0;
  int height = 0;
  std::vector<int64_t> delays_ms;  // as stored
  std::vector<uint32_t> crcs;
};

std::vector<Clip> golden_clips() {
  std::vector<Clip> clips;
  std::ifstream in(video_data() / "goldens.txt");
  for (std::string line; std::getline(in, line);) {
    std::istringstream words(line);
    std::string kind;
    Clip clip;
    words >> kind >> clip.name >> clip.width >> clip.height;
    if (kind != "frames") continue;
    char colon = 0;
    int64_t delay = 0;
    uint32_t crc = 0;
    while (words >> std::dec >> delay >> colon >> std::hex >> crc) {
      clip.delays_ms.push_back(delay);
      clip.crcs.push_back(crc);
    }
    clips.push_back(clip);
  }
  EXPECT_FALSE(clips.empty());
  return clips;
}

TEST(Video, EveryFrameEqualsPillow) {
  for (const Clip& clip : golden_clips()) {
    SCOPED_TRACE(clip.name);
    const auto file = open_video(video_data() / clip.name);
    ASSERT_EQ(file->info().frames, static_cast<int64_t>(clip.crcs.size()));
    EXPECT_EQ(file->info().width, clip.width);
    EXPECT_EQ(file->info().height, clip.height);
    EXPECT_EQ(file->info().format, clip.name.ends_with(".gif") ? "GIF" : "WebP");
    const Video video = file->read(all_of(*file));
    double time_s = 0;
    for (size_t i = 0; i < clip.crcs.size(); ++i) {
      EXPECT_EQ(crc32(video.frames[i]), clip.crcs[i]) << i;
      EXPECT_NEAR(video.times_s[i], time_s, 1e-9) << i;
      time_s += clip.delays_ms[i] < 20 ? 0.1 : static_cast<double>(clip.delays_ms[i]) / 1000;
    }
    EXPECT_NEAR(file->info().duration_s, time_s, 1e-9);
    EXPECT_NEAR(file->info().fps, static_cast<double>(clip.crcs.size()) / time_s, 1e-9);
    EXPECT_EQ(video.fps, file->info().fps);
    EXPECT_THAT(video.name, EndsWith(clip.name));
    EXPECT_THAT(video.frames[0].name, EndsWith(clip.name + " (frame 0)"));
  }
}

TEST(Video, FramesAreTakenInAnyNumberAndAgain) {
  for (const char* name : {"mixed3.gif", "lossy.webp"}) {
    SCOPED_TRACE(name);
    const auto file = open_video(video_data() / name);
    const Video whole = file->read(all_of(*file));
    const std::vector<int64_t> some = {1, 1, 4, 5, 5, 5};
    for (int round = 0; round < 2; ++round) {
      const Video part = file->read(some);
      ASSERT_EQ(part.frames.size(), some.size());
      for (size_t i = 0; i < some.size(); ++i) {
        EXPECT_EQ(part.frames[i].rgb, whole.frames[static_cast<size_t>(some[i])].rgb) << i;
        EXPECT_EQ(part.times_s[i], file->times_s()[static_cast<size_t>(some[i])]);
        EXPECT_THAT(part.frames[i].name, EndsWith("(frame " + std::to_string(some[i]) + ")"));
      }
    }
    EXPECT_TRUE(file->read({}).frames.empty());
  }
}

TEST(Video, OneThatRestsHasItsFramesAndNoFile) {
  const TemporaryFolder folder;
  std::filesystem::create_directory(folder.path() / "frames");
  for (int i = 0; i < 7; ++i) {
    std::filesystem::copy(test::source_folder() / "tests/golden/llava_gqa/image0.png",
                          folder.path() / "frames" / fmt::format("{}.png", i));
  }
  std::vector<std::filesystem::path> videos = {folder.path() / "frames"};
  for (const char* name : {"mixed3.gif", "lossy.webp", "reordered.mp4", "no_times.hevc"}) {
    if (!reads_video_files() && !std::string_view(name).ends_with('f') &&
        !std::string_view(name).ends_with('p')) {
      continue;
    }
    std::filesystem::copy(video_data() / name, folder.path() / name);
    videos.push_back(folder.path() / name);
  }
  const auto open_files = [] {
    return std::distance(std::filesystem::directory_iterator("/proc/self/fd"),
                         std::filesystem::directory_iterator());
  };
  const auto before = open_files();
  const std::vector<int64_t> kept = {1, 3, 3, 4};
  for (const std::filesystem::path& path : videos) {
    SCOPED_TRACE(path.string());
    const Video expected = open_video(path)->read(kept);
    const auto file = open_video(path);
    file->rest(kept);
    EXPECT_EQ(open_files(), before);
    EXPECT_TRUE(file->times_s().empty());
    for (const std::vector<int64_t>& some : {kept, {1}, {4, 4}, {}}) {
      const Video video = file->read(some);
      ASSERT_EQ(video.frames.size(), some.size());
      EXPECT_EQ(open_files(), before);
    }
    const Video video = file->read(kept);
    for (size_t i = 0; i < kept.size(); ++i) {
      EXPECT_EQ(video.frames[i].rgb, expected.frames[i].rgb) << i;
    }
    EXPECT_THAT(error_of(ErrorCode::kInvalidArgument,
                         [&] {
                           file->read(std::vector<int64_t>{1, 2});
                         }),
                HasSubstr("is closed"));
    if (std::filesystem::is_directory(path)) continue;
    std::ofstream(path, std::ios::app) << "x";
    EXPECT_THAT(error_of(ErrorCode::kCorruptFile, [&] { file->read(kept); }),
                HasSubstr("was changed after it was opened"));
    std::filesystem::remove(path);
    EXPECT_THAT(error_of(ErrorCode::kCorruptFile, [&] { file->read(kept); }),
                HasSubstr("does not exist"));
    EXPECT_EQ(open_files(), before);
  }
}

TEST(Video, FramesAreGivenOneByOne) {
  const auto file = open_video(video_data() / "mixed3.gif");
  int taken = 0;
  EXPECT_THAT(error_of(ErrorCode::kCancelled,
                       [&] {
                         file->decode(all_of(*file), [&](const Image&) {
                           if (++taken == 3) throw Error(ErrorCode::kCancelled, "enough");
                         });
                       }),
              "enough");
  EXPECT_EQ(taken, 3);
}

TEST(Video, NumbersThatAreNone) {
  const auto file = open_video(video_data() / "mixed1.gif");
  const auto message = [&](const std::vector<int64_t>& frames) {
    return error_of(ErrorCode::kInvalidArgument, [&] { file->read(frames); });
  };
  EXPECT_THAT(message({0, 3}), HasSubstr("mixed1.gif has no frame number 3; it has 3"));
  EXPECT_THAT(message({-1}), HasSubstr("has no frame number -1"));
  EXPECT_THAT(message({2, 1}), HasSubstr("frame 1 was asked for after frame 2"));
}

TEST(Video, WhatIsHeldAtOnceIsBounded) {
  const auto file = open_video(video_data() / "mixed3.gif");  // 6 x 12
  const std::vector<int64_t> frames((size_t{1} << 30) / 72 + 1, 6);
  EXPECT_THAT(error_of(ErrorCode::kOutOfMemory, [&] { file->read(frames); }),
              AllOf(HasSubstr("mixed3.gif is 6 x 12"), HasSubstr("take fewer frames")));
}

TEST(Video, AFolderOfFramesIsInNaturalOrder) {
  const TemporaryFolder folder;
  for (const int number : {10, 9, 2, 100, 1}) {
    folder.file("frame" + std::to_string(number) + ".ppm",
                "P6 1 1 255 " + std::string(3, static_cast<char>(number)));
  }
  folder.file(".hidden.ppm");
  folder.file("notes.txt", "no picture");
  std::filesystem::create_directory(folder.path() / "frame5.ppm");
  const auto file = open_video(folder.path());
  const VideoInfo& info = file->info();
  EXPECT_EQ(info.format, "folder of images");
  EXPECT_EQ(info.frames, 5);
  EXPECT_EQ(info.fps, 0);
  EXPECT_EQ(info.duration_s, 0);
  const Video video = file->read(all_of(*file));
  EXPECT_TRUE(video.times_s.empty());
  std::vector<int> order;
  for (const Image& image : video.frames) order.push_back(image.rgb[0]);
  EXPECT_THAT(order, ::testing::ElementsAre(1, 2, 9, 10, 100));
}

TEST(Video, FoldersThatAreNoVideo) {
  const TemporaryFolder folder;
  const auto message = [&](std::vector<int64_t> frames = {0, 1}) {
    return error_of(ErrorCode::kCorruptFile, [&] { open_video(folder.path())->read(frames); });
  };
  EXPECT_THAT(message(), AllOf(HasSubstr(folder.path().filename().string()),
                               HasSubstr("without image files")));
  folder.file("notes.txt", "no picture");
  EXPECT_THAT(message(), HasSubstr("without image files"));
  folder.file("a.ppm", "P6 1 1 255 abc");
  folder.file("b.ppm", "P6 2 1 255 abcdef");
  EXPECT_THAT(message(), AllOf(StartsWith("video "), HasSubstr("a frame of another size"),
                               HasSubstr("frame 1 is 2 x 1, the first is 1 x 1")));
  folder.file("b.ppm", "P6 4 1 255 abc");
  EXPECT_THAT(message(), AllOf(HasSubstr("b.ppm"), HasSubstr("truncated")));
}

TEST(Video, FilesThatAreNoVideo) {
  const TemporaryFolder folder;
  EXPECT_THAT(video_error(ErrorCode::kCorruptFile, folder.path() / "none.mp4"),
              AllOf(StartsWith("video "), HasSubstr("none.mp4 does not exist")));
  EXPECT_THAT(video_error(ErrorCode::kCorruptFile, folder.file("empty.mp4")),
              AllOf(HasSubstr("empty.mp4 is empty"), HasSubstr("no frame")));
  EXPECT_THAT(
      video_error(ErrorCode::kCorruptFile, data_folder() / "rgb8.png"),
      AllOf(HasSubstr("rgb8.png is an image (PNG), not a video"), HasSubstr("as an image")));
  EXPECT_THAT(video_error(ErrorCode::kCorruptFile, "/dev/zero"), HasSubstr("is a device"));
  const auto fifo = folder.path() / "a.fifo";
  ASSERT_EQ(mkfifo(fifo.c_str(), 0600), 0);
  EXPECT_THAT(video_error(ErrorCode::kCorruptFile, fifo), HasSubstr("is a pipe"));
  EXPECT_THAT(video_error(ErrorCode::kInvalidArgument, "a.gif\0b"s), HasSubstr("has a NUL"));
  EXPECT_THAT(video_error(ErrorCode::kCorruptFile, "/none/\x1b[31mred\n.mp4"),
              HasSubstr("/none/\\x1b[31mred\\x0a.mp4 does not exist"));
  EXPECT_THAT(video_error(ErrorCode::kUnsupported, folder.file("notes.mp4", "This is no video.")),
              HasSubstr("notes.mp4 is no"));
}

std::string u16(int value) {
  return {static_cast<char>(value & 0xff), static_cast<char>(value >> 8)};
}

/// A picture block of one code, which says the end.
std::string gif_picture(int left, int top, int width, int height) {
  return ","s + u16(left) + u16(top) + u16(width) + u16(height) + "\0\2\1\x2d\0"s;
}

TEST(Video, AnimationsThatAreNone) {
  const TemporaryFolder folder;
  const std::string screen = "GIF89a" + u16(8) + u16(8) + "\0\0\0"s;
  const auto message = [&](const std::string& file) {
    return video_error(ErrorCode::kCorruptFile, folder.file("a.gif", file));
  };
  EXPECT_THAT(message(screen + ";"),
              AllOf(HasSubstr("a.gif"), HasSubstr("is a GIF without a frame")));
  EXPECT_THAT(message(screen + gif_picture(0, 0, 8, 8).substr(0, 13)), HasSubstr("truncated"));
  EXPECT_THAT(message(screen + gif_picture(0, 0, 8, 8) + gif_picture(4, 0, 8, 2) + ";"),
              AllOf(HasSubstr("a frame of another size"), HasSubstr("frame 1 reaches to 12 x 2"),
                    HasSubstr("8 x 8")));
  const std::string large = "GIF89a" + u16(65535) + u16(65535) + "\0\0\0"s;
  EXPECT_THAT(message(large + gif_picture(0, 0, 1, 1) + ";"), HasSubstr("65535 x 65535 pixels"));
  const std::string above = "GIF89a" + u16(8193) + u16(8192) + "\0\0\0"s;
  EXPECT_THAT(message(above + gif_picture(0, 0, 1, 1) + ";"),
              HasSubstr("is 8193 x 8192, more than the limit of 67108864 pixels"));
  std::string many = "GIF89a" + u16(8192) + u16(8192) + "\0\0\0"s;
  for (int i = 0; i < 257; ++i) many += gif_picture(0, 0, 8192, 8192);
  EXPECT_THAT(message(many), AllOf(HasSubstr("more than 17179869184 pixels in all")));
  const auto opened = open_video(folder.file("b.gif", screen + gif_picture(0, 0, 8, 8) + ";"));
  const std::vector<int64_t> first = {0};
  EXPECT_THAT(error_of(ErrorCode::kCorruptFile, [&] { opened->read(first); }),
              HasSubstr("its codes end before its pixels"));
}

std::unique_ptr<VideoFile> open_bytes(std::span<const std::byte> bytes, const std::string& name) {
  std::vector<std::byte> copy(bytes.begin(), bytes.end());
  return name.ends_with(".gif") ? open_gif_video(std::move(copy), name)
                                : open_webp_video(std::move(copy), name);
}

constexpr std::array kDamaged = {"mixed16.gif", "grey2.gif", "parts.webp", "lossy_alpha.webp"};

TEST(Video, TruncatedAnimationsSaySo) {
  for (const char* name : kDamaged) {
    const auto whole = test::file_bytes(video_data() / name);
    const int64_t frames = open_bytes(whole, name)->info().frames;
    for (size_t length = 13; length < whole.size(); ++length) {
      try {  // a GIF may end after any of its images
        const auto file = open_bytes(std::span(whole).first(length), name);
        const bool whole_but_its_mark = length == whole.size() - 1;
        EXPECT_LT(file->info().frames, frames + (whole_but_its_mark ? 1 : 0)) << name << length;
        file->decode(all_of(*file), [](const Image&) {});
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), ErrorCode::kCorruptFile);
        EXPECT_THAT(error.what(), HasSubstr("truncated")) << name << ' ' << length;
      }
    }
  }
}

/// A GIF of that many frames with that delay each.
std::string gif_of_frames(int frames, int delay_cs) {
  std::string file = "GIF89a" + u16(8) + u16(8) + "\0\0\0"s;
  for (int i = 0; i < frames; ++i) {
    file += "!\xf9\x04\0"s + u16(delay_cs) + "\0\0"s + gif_picture(0, 0, 8, 8);
  }
  return file + ";";
}

TEST(Video, RatesAreRoundedOnce) {
  const TemporaryFolder folder;
  for (const auto& [frames, delay_cs, fps] :
       {std::tuple(30, 10, 10.0), {7, 4, 25.0}, {90, 5, 20.0}, {33, 20, 5.0}}) {
    const auto file = open_video(folder.file("a.gif", gif_of_frames(frames, delay_cs)));
    EXPECT_EQ(file->info().fps, fps);
    EXPECT_EQ(file->times_s().back(), (frames - 1) * delay_cs / 100.0);
    EXPECT_EQ(file->info().duration_s, frames * delay_cs / 100.0);
  }
}

TEST(Video, AFolderCountsWhatItLeavesOut) {
  const TemporaryFolder folder;
  for (const char* name : {"a.ppm", "b.jpe", "c.apng", "d.jfif"}) {
    folder.file(name, "P6 1 1 255 abc");
  }
  EXPECT_THAT(open_video(folder.path())->info().warnings, ::testing::IsEmpty());
  EXPECT_EQ(open_video(folder.path())->info().frames, 4);
  const auto png = test::data_file("rgb8.png");
  const std::string text(reinterpret_cast<const char*>(png.data()), png.size());
  folder.file("e", text);
  folder.file("f", text);
  folder.file("README", "P6 is no image");
  const auto file = open_video(folder.path());
  EXPECT_EQ(file->info().frames, 4);
  EXPECT_THAT(file->info().warnings,
              ::testing::ElementsAre(AllOf(HasSubstr("leaves out 2 files"), HasSubstr(".png"))));
}

TEST(Video, DamageIsAnErrorOrAVideo) {
  for (const char* name : kDamaged) {
    auto bytes = test::file_bytes(video_data() / name);
    for (std::byte& byte : bytes) {
      const std::byte before = byte;
      byte ^= std::byte{0x15};
      try {
        const auto file = open_bytes(bytes, name);
        if (int64_t{file->info().height} * file->info().width < 1 << 16) {
          file->decode(all_of(*file), [](const Image&) {});
        }
      } catch (const Error& error) {
        EXPECT_THAT(error.what(), AllOf(HasSubstr(name), Not(HasSubstr("\n"))));
      }
      byte = before;
    }
  }
}

}  // namespace
}  // namespace kvlm
