// Video files, in a build with FFmpeg and in one without.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <string>
#include <vector>

#include "tests/vision/test_videos.h"
#include "vision/decoders.h"
#include "vision/video.h"

namespace kvlm {
namespace {

using namespace std::string_literals;
using test::all_of;
using test::error_of;
using test::numbered;
using test::TemporaryFolder;
using test::video_data;
using test::video_error;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

class FfmpegVideo : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!reads_video_files()) GTEST_SKIP() << "a build without FFmpeg";
  }
};

std::string as_string(const std::string& name) {
  const auto bytes = test::file_bytes(video_data() / name);
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

TEST(NoFfmpegVideo, SaysHowToGetIt) {
  if (reads_video_files()) GTEST_SKIP() << "a build with FFmpeg";
  for (const char* name : {"reordered.mp4", "raw.avi", "sampling.txt"}) {
    EXPECT_THAT(video_error(ErrorCode::kUnsupported, video_data() / name),
                AllOf(StartsWith("video "), HasSubstr(name), HasSubstr("this build has no FFmpeg"),
                      HasSubstr("tools/setup.sh --video"), HasSubstr("a folder of frames")));
  }
}

TEST_F(FfmpegVideo, EveryFrameIsTheOneThatWasCoded) {
  std::ifstream in(video_data() / "goldens.txt");
  int clips = 0;
  for (std::string line; std::getline(in, line);) {
    std::istringstream words(line);
    std::string kind;
    std::string name;
    double fps = 0;
    int64_t count = 0;
    words >> kind >> name >> fps >> count;
    if (kind != "coded" || name.starts_with("turned")) continue;
    SCOPED_TRACE(name);
    const auto file = open_video(video_data() / name);
    EXPECT_EQ(file->info().frames, count);
    EXPECT_NEAR(file->info().fps, fps, 1e-4);
    EXPECT_EQ(file->info().height, 16);
    EXPECT_EQ(file->info().width, 24);
    const Video video = file->read(all_of(*file));
    ASSERT_EQ(video.frames.size(), static_cast<size_t>(count));
    for (int i = 0; i < count; ++i) {
      EXPECT_EQ(video.frames[static_cast<size_t>(i)].rgb, numbered(i).rgb) << i;
    }
    ++clips;
  }
  EXPECT_EQ(clips, 6);
}

TEST_F(FfmpegVideo, AnyFrameAloneIsTheSame) {
  for (const char* name : {"reordered.mp4", "open_gop.mkv", "no_times.hevc", "ffv1.mkv"}) {
    const auto file = open_video(video_data() / name);
    for (int64_t i = 0; i < file->info().frames; ++i) {
      for (int64_t j = i; j < file->info().frames; ++j) {
        const std::vector<int64_t> pair = {i, j};
        const Video video = file->read(pair);
        ASSERT_EQ(video.frames[0].rgb, numbered(static_cast<int>(i)).rgb) << name << i << j;
        ASSERT_EQ(video.frames[1].rgb, numbered(static_cast<int>(j)).rgb) << name << i << j;
      }
    }
  }
}

/// What rests keeps enough to find its frames, also a part of them.
TEST_F(FfmpegVideo, AnyFrameOfOneThatRestsIsTheSame) {
  for (const char* name : {"reordered.mp4", "open_gop.mkv", "no_times.hevc", "ffv1.mkv"}) {
    const int64_t count = open_video(video_data() / name)->info().frames;
    for (int64_t i = 0; i < count; ++i) {
      for (int64_t j = i; j < count; ++j) {
        const auto file = open_video(video_data() / name);
        const std::vector<int64_t> pair = {i, j};
        file->rest(pair);
        for (int round = 0; round < 2; ++round) {
          const Video video = file->read(pair);
          ASSERT_EQ(video.frames[0].rgb, numbered(static_cast<int>(i)).rgb) << name << i << j;
          ASSERT_EQ(video.frames[1].rgb, numbered(static_cast<int>(j)).rgb) << name << i << j;
        }
        file->rest(std::span(pair).subspan(1));
        ASSERT_EQ(file->read(std::span(pair).subspan(1)).frames[0].rgb,
                  numbered(static_cast<int>(j)).rgb);
      }
    }
  }
}

TEST_F(FfmpegVideo, TimesAreThoseOfTheFile) {
  const auto uneven = open_video(video_data() / "uneven.mkv");
  EXPECT_THAT(uneven->times_s(), ::testing::ElementsAre(0, 0.04, 0.5, 1.25));
  const auto even = open_video(video_data() / "reordered.mp4");
  for (size_t i = 0; i < 12; ++i) {
    EXPECT_NEAR(even->times_s()[i], 0.1 * static_cast<double>(i), 1e-9);
  }
  EXPECT_NEAR(even->info().duration_s, 1.2, 1e-9);
  EXPECT_THAT(even->info().format, HasSubstr("mp4"));
  const auto without = open_video(video_data() / "no_times.hevc");
  EXPECT_EQ(without->times_s().size(), 12u);
}

TEST_F(FfmpegVideo, PacketsThatAreNotShownAreNoFrames) {
  const auto file = open_video(video_data() / "hidden.webm");  // 24 packets
  EXPECT_EQ(file->info().frames, 16);
  const Video video = file->read(all_of(*file));
  for (size_t i = 1; i < video.frames.size(); ++i) {
    EXPECT_GT(video.frames[i].rgb[0], video.frames[i - 1].rgb[0]) << i;
  }
}

TEST_F(FfmpegVideo, ATurnIsApplied) {
  const std::vector<int64_t> first = {0};
  for (const int orientation : {3, 5, 6}) {
    const auto file = open_video(video_data() / ("turned" + std::to_string(orientation) + ".mp4"));
    const Image upright = apply_orientation(numbered(0), orientation);
    EXPECT_EQ(file->info().height, upright.height);
    EXPECT_EQ(file->info().width, upright.width);
    EXPECT_EQ(file->read(first).frames[0].rgb, upright.rgb) << orientation;
  }
}

TEST_F(FfmpegVideo, ColoursAreOfTheStatedMatrixAndRange) {
  struct Case {
    const char* name;
    double red;    // of V, from the matrix
    double green;  // of V
    double of_u;   // green of U
    double blue;   // of U
    bool full;
  };
  for (const Case& c : {Case{"none", 1.402, 0.714136, 0.344136, 1.772, false},
                        Case{"bt601", 1.402, 0.714136, 0.344136, 1.772, false},
                        Case{"bt709", 1.5748, 0.468124, 0.187324, 1.8556, false},
                        Case{"full", 1.5748, 0.468124, 0.187324, 1.8556, true}}) {
    const auto file = open_video(video_data() / ("colour_"s + c.name + ".mkv"));
    const Image image = file->read(all_of(*file)).frames[0];
    const double y = c.full ? 81 : (81 - 16) * 255.0 / 219;
    const double scale = c.full ? 1 : 255.0 / 224;
    const double u = (90 - 128) * scale;
    const double v = (240 - 128) * scale;
    const std::array<double, 3> expected = {y + c.red * v, y - c.green * v - c.of_u * u,
                                            y + c.blue * u};
    for (size_t i = 0; i < image.rgb.size(); ++i) {
      ASSERT_NEAR(image.rgb[i], std::clamp(expected[i % 3], 0.0, 255.0), 1.5) << c.name << ' ' << i;
    }
  }
}

TEST_F(FfmpegVideo, FilesWithoutAFrame) {
  EXPECT_THAT(video_error(ErrorCode::kCorruptFile, video_data() / "no_frame.avi"),
              AllOf(HasSubstr("no_frame.avi"), HasSubstr("without a frame")));
  EXPECT_THAT(
      video_error(ErrorCode::kCorruptFile, video_data() / "sound.mkv"),
      AllOf(HasSubstr("sound.mkv"), HasSubstr("without a video stream, so it has no frame")));
}

TEST_F(FfmpegVideo, AFrameOfAnotherSize) {
  const auto file = open_video(video_data() / "sizes.ts");
  ASSERT_EQ(file->info().frames, 6);
  const std::vector<int64_t> before = {0, 1, 2};
  EXPECT_EQ(file->read(before).frames.size(), 3u);
  EXPECT_THAT(error_of(ErrorCode::kCorruptFile, [&] { file->read(all_of(*file)); }),
              HasSubstr("frame 3 is 32 x 16, the first is 24 x 16"));
}

TEST_F(FfmpegVideo, NothingElseIsOpened) {
  const TemporaryFolder folder;
  const std::string clip = (video_data() / "ffv1.mkv").string();
  for (const auto& [name, content] :
       {std::pair{"a.m3u8", "#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\nfile://" + clip + "\n"},
        std::pair{"a.ffconcat", "ffconcat version 1.0\nfile '" + clip + "'\n"},
        std::pair{"a.sdp",
                  "v=0\no=- 0 0 IN IP4 127.0.0.1\nc=IN IP4 127.0.0.1\nm=video 5004 RTP/AVP 96\n"s},
        std::pair{"a.txt", "only text\n"s}}) {
    EXPECT_THAT(video_error(ErrorCode::kUnsupported, folder.file(name, content)),
                AllOf(HasSubstr(name), HasSubstr("is not a video that the FFmpeg")));
  }
}

TEST_F(FfmpegVideo, FfmpegSaysNothing) {
  const TemporaryFolder folder;
  std::string damaged = as_string("no_times.hevc");
  for (size_t i = damaged.size() / 2; i < damaged.size(); i += 5) damaged[i] = 'x';
  const auto path = folder.file("damaged.hevc", damaged);
  ::testing::internal::CaptureStderr();
  try {
    const auto file = open_video(path);
    file->read(all_of(*file));
  } catch (const Error&) {
  }
  EXPECT_EQ(::testing::internal::GetCapturedStderr(), "");
}

TEST_F(FfmpegVideo, TruncatedAndDamagedFilesAreAnErrorOrRight) {
  const TemporaryFolder folder;
  for (const char* name : {"reordered.mp4", "ffv1.mkv", "raw.avi", "no_times.hevc", "sizes.ts"}) {
    const std::string whole = as_string(name);
    for (size_t length = 1; length < whole.size(); length += whole.size() / 23) {
      try {
        const auto file = open_video(folder.file("part_"s + name, whole.substr(0, length)));
        const Video video = file->read(all_of(*file));
        EXPECT_LE(video.frames.size(), 12u);
      } catch (const Error& error) {
        EXPECT_THAT(error.what(), AllOf(HasSubstr("part_"s + name), Not(HasSubstr("\n"))));
      }
    }
    for (size_t at = 0; at < whole.size(); at += 1 + whole.size() / 61) {
      std::string bytes = whole;
      bytes[at] = static_cast<char>(bytes[at] ^ 0x5a);
      try {
        const auto file = open_video(folder.file("damaged_"s + name, bytes));
        file->decode(all_of(*file), [](const Image&) {});
      } catch (const Error& error) {
        EXPECT_THAT(error.what(), AllOf(HasSubstr("damaged_"s + name), Not(HasSubstr("\n"))));
      }
    }
  }
}

TEST_F(FfmpegVideo, ADamagedFrameIsNoOtherFrame) {
  const TemporaryFolder folder;
  int refused = 0;
  for (const char* name : {"reordered.mp4", "ffv1.mkv"}) {
    const std::string whole = as_string(name);
    for (size_t at = whole.size() / 4; at + 20 < whole.size() * 3 / 4; at += 97) {
      std::string bytes = whole;
      std::fill_n(bytes.begin() + static_cast<std::ptrdiff_t>(at), 20, '\xff');
      std::unique_ptr<VideoFile> file;
      try {
        file = open_video(folder.file(name, bytes));
      } catch (const Error&) {
        continue;
      }
      for (const int64_t frame : all_of(*file)) {
        const std::vector<int64_t> one = {frame};
        try {
          file->read(one);
        } catch (const Error& error) {
          EXPECT_THAT(error.what(),
                      HasSubstr("frame " + std::to_string(frame) + " cannot be decoded"));
          ++refused;
        }
      }
    }
  }
  EXPECT_GT(refused, 5);  // a decoder cannot see most damage: codes have no checksums
}

TEST_F(FfmpegVideo, LargeFramesAreRefused) {
  const TemporaryFolder folder;
  std::string bytes = as_string("ffv1.mkv");
  const auto set_side = [&](char id, size_t value) {  // PixelWidth 0xb0, PixelHeight 0xba
    const std::string element = {id, '\x81', id == '\xb0' ? '\x18' : '\x10'};
    const size_t at = bytes.find(element);
    ASSERT_NE(at, std::string::npos);
    bytes.replace(at, 3, {id, '\x82', static_cast<char>(value >> 8), static_cast<char>(value)});
  };
  set_side('\xb0', 60000);
  set_side('\xba', 60000);
  EXPECT_THAT(video_error(ErrorCode::kCorruptFile, folder.file("large.mkv", bytes)),
              HasSubstr("large.mkv"));
}

}  // namespace
}  // namespace kvlm
