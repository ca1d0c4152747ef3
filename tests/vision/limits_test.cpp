// What hostile pictures may cost: memory and time are bounded by the size that is stated, however
// much a few bytes say.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <malloc.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>
#include <zlib.h>

#include <chrono>
#include <functional>
#include <string>
#include <vector>

#include "tests/vision/test_images.h"
#include "vision/preprocess.h"

namespace kvlm {
namespace {

using namespace std::string_literals;
using test::data_file;
using test::data_folder;
using test::error_of;
using ::testing::AllOf;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr size_t kMiB = size_t{1} << 20;

/// A folder that is removed with what is in it.
class TemporaryFolder {
 public:
  TemporaryFolder()
      : path_(std::filesystem::temp_directory_path() /
              ("kvlm_limits_" + std::to_string(getpid()))) {
    std::filesystem::create_directory(path_);
  }
  ~TemporaryFolder() { std::filesystem::remove_all(path_); }
  std::filesystem::path file(const std::string& name, std::string_view content = "") const {
    std::ofstream(path_ / name, std::ios::binary) << content;
    return path_ / name;
  }

 private:
  std::filesystem::path path_;
};

/// Runs `action` in a child process that can take only `bytes` more memory, and ends it: status 0
/// if the action throws an Error, whose message goes to stderr.
[[noreturn]] void with_little_memory(size_t bytes, const std::function<void()>& action) {
  // What earlier tests have freed may be used again without counting: actions need much more.
  malloc_trim(0);
  size_t pages = 0;
  std::ifstream("/proc/self/statm") >> pages;
  const rlim_t limit = pages * static_cast<size_t>(sysconf(_SC_PAGESIZE)) + bytes;
  const rlimit both{limit, limit};
  if (setrlimit(RLIMIT_AS, &both) != 0) std::_Exit(3);
  try {
    action();
  } catch (const Error& error) {
    std::fputs(error.what(), stderr);
    std::_Exit(0);
  } catch (const std::exception& error) {
    std::fputs(error.what(), stderr);
    std::_Exit(2);
  }
  std::_Exit(1);
}

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool kMemoryCanBeLimited = false;  // a sanitizer reserves terabytes
#else
constexpr bool kMemoryCanBeLimited = true;
#endif

std::string big_endian(uint32_t value) {
  std::string bytes;
  for (int shift = 24; shift >= 0; shift -= 8) bytes += static_cast<char>(value >> shift);
  return bytes;
}

std::string chunk(const std::string& type, const std::string& data) {
  const std::string body = type + data;
  return big_endian(static_cast<uint32_t>(data.size())) + body +
         big_endian(test::crc32(body.data(), body.size()));
}

std::string deflate(const std::string& data) {
  uLongf size = compressBound(data.size());
  std::string out(size, '\0');
  compress2(reinterpret_cast<Bytef*>(out.data()), &size,
            reinterpret_cast<const Bytef*>(data.data()), data.size(), 9);
  out.resize(size);
  return out;
}

/// An 8-bit grey PNG of that size, all black, with `extra` before its pixels.
std::string black_png(uint32_t width, uint32_t height, const std::string& extra = "") {
  const std::string pixels((size_t{width} + 1) * height, '\0');
  return "\x89PNG\r\n\x1a\n" +
         chunk("IHDR", big_endian(width) + big_endian(height) + "\x08\0\0\0\0"s) + extra +
         chunk("IDAT", deflate(pixels)) + chunk("IEND", "");
}

std::span<const std::byte> bytes_of(const std::string& text) {
  return std::as_bytes(std::span(text));
}

Image decode(const std::string& file) { return decode_image(bytes_of(file), "small.png"); }

/// The most memory that this process has held so far.
long peak_kib() {  // NOLINT(google-runtime-int): the system's type
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return usage.ru_maxrss;
}

TEST(ImageLimits, AChunkCostsNoMoreThanTheFile) {
  const std::string head = "\x89PNG\r\n\x1a\n" + chunk("IHDR", "\0\0\0\1\0\0\0\1\x08\0\0\0\0"s);
  for (const char* type : {"tEXt", "zTXt", "iTXt", "iCCP", "eXIf", "abCd"}) {
    const std::string file = head + "\x7f\xff\xff\xff" + type + "abcd";
    const auto before = peak_kib();
    EXPECT_THAT(error_of(ErrorCode::kCorruptFile, [&] { decode(file); }), HasSubstr("truncated"));
    EXPECT_LT(peak_kib() - before, 64 * 1024) << type;
  }
}

TEST(ImageLimits, CompressedTextIsNotInflatedForNothing) {
  std::string texts;
  const std::string inflated(16 * kMiB, 'a');
  const std::string text = chunk("zTXt", "Comment\0\0"s + deflate(inflated));
  const std::string profile = chunk("zTXt", "Raw profile type exif\0\0"s + deflate(inflated));
  for (int i = 0; i < 128; ++i) texts += text + profile;
  const std::string file = black_png(3, 2, texts);
  const auto start = std::chrono::steady_clock::now();
  EXPECT_EQ(decode(file).width, 3);
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
  EXPECT_LT(seconds.count(), 3.0);  // 0.1 s alone; inflating all took 25
}

TEST(ImageLimits, SidesAreBounded) {
  for (const auto& [width, height] : {std::pair{1u, 65536u}, {65536u, 1u}, {1u, 1u << 28}}) {
    // The header is enough: nothing is allocated for what will be refused.
    const std::string file =
        "\x89PNG\r\n\x1a\n" +
        chunk("IHDR", big_endian(width) + big_endian(height) + "\x08\0\0\0\0"s) +
        chunk("IDAT", "") + chunk("IEND", "");
    const auto refused = AllOf(HasSubstr("65535 per side"), HasSubstr("scale it down"));
    EXPECT_THAT(error_of(ErrorCode::kCorruptFile, [&] { decode(file); }), refused);
    EXPECT_THAT(
        error_of(ErrorCode::kCorruptFile, [&] { probe_image(bytes_of(file), "small.png"); }),
        refused);
  }
  EXPECT_EQ(decode(black_png(1, 65535)).height, 65535);
}

TEST(ImageLimits, WhatTheMemoryDoesNotHoldNamesThePicture) {
  if (!kMemoryCanBeLimited) GTEST_SKIP() << "a sanitizer needs the address space";
  const std::string turn = chunk("eXIf", "MM\0*\0\0\0\x08\0\1\1\x12\0\3\0\0\0\1\0\6\0\0\0\0\0\0"s);
  const std::string file = black_png(8000, 8000, turn);  // 192 MB decoded, and again to be turned
  const TemporaryFolder folder;
  const auto path = folder.file("large.png", file);
  for (const size_t room : {90 * kMiB, 280 * kMiB}) {
    EXPECT_EXIT(with_little_memory(room, [&] { decode(file); }), ::testing::ExitedWithCode(0),
                "small.png.*memory.*scale it down")
        << room;
  }
  std::filesystem::resize_file(path, 700 * kMiB);
  EXPECT_EXIT(with_little_memory(300 * kMiB, [&] { load_image(path); }),
              ::testing::ExitedWithCode(0), "large.png.*memory");
}

TEST(ImageLimits, WhatTheMemoryDoesNotHoldResizedNamesThePicture) {
  if (!kMemoryCanBeLimited) GTEST_SKIP() << "a sanitizer needs the address space";
  Image image{.height = 20, .width = 9000, .rgb = std::vector<uint8_t>(size_t{20} * 9000 * 3)};
  image.name = "wide.png";
  PreprocessSpec spec;
  spec.do_center_crop = false;
  EXPECT_EXIT(with_little_memory(80 * kMiB, [&] { fit(image, spec); }),
              ::testing::ExitedWithCode(0), "wide.png.*9000 x 20.*memory.*scale it down");
}

TEST(ImageLimits, OnlyRegularFilesAreRead) {
  const TemporaryFolder folder;
  const auto fifo = folder.file("a") += ".fifo";
  ASSERT_EQ(mkfifo(fifo.c_str(), 0600), 0);
  EXPECT_THAT(error_of(ErrorCode::kCorruptFile, [&] { load_image(fifo); }),
              AllOf(HasSubstr("a.fifo is a pipe"), HasSubstr("standard input")));
  for (const char* device : {"/dev/zero", "/dev/urandom", "/dev/null"}) {
    EXPECT_THAT(error_of(ErrorCode::kCorruptFile, [&] { load_image(device); }),
                AllOf(HasSubstr(device), HasSubstr("is a device, not a file")));
  }
}

TEST(ImageLimits, AFileIsReadOnlyIfItBeginsLikeAPicture) {
  if (!kMemoryCanBeLimited) GTEST_SKIP() << "a sanitizer needs the address space";
  const TemporaryFolder folder;
  const auto sparse = folder.file("sparse.png");
  std::filesystem::resize_file(sparse, 512 * kMiB);
  const auto begun = folder.file("begun.png", "\x89PNG\r\n\x1a\n");
  std::filesystem::resize_file(begun, 1025 * kMiB);
  const auto huge = folder.file("huge.png");
  std::filesystem::resize_file(huge, size_t{1} << 40);
  EXPECT_EXIT(with_little_memory(600 * kMiB, [&] { load_image(sparse); }),
              ::testing::ExitedWithCode(0), "sparse.png is not in a known image format");
  for (const auto& path : {begun, huge}) {
    EXPECT_EXIT(with_little_memory(64 * kMiB, [&] { load_image(path); }),
                ::testing::ExitedWithCode(0), "longer than 1 GiB");
  }
}

/// Runs `action` with that file as standard input.
template <class Action>
void with_input(const char* path, Action&& action) {
  const int kept = dup(STDIN_FILENO);
  const int file = open(path, O_RDONLY | O_CLOEXEC);
  ASSERT_GE(file, 0);
  ASSERT_EQ(dup2(file, STDIN_FILENO), STDIN_FILENO);
  action();
  close(file);
  dup2(kept, STDIN_FILENO);
  close(kept);
}

TEST(ImageLimits, StandardInputIsReadOnRequest) {
  const auto path = data_folder() / "rgb8.png";
  with_input(path.c_str(), [&] {
    const Image image = load_image("-");
    EXPECT_EQ(image.rgb, load_image(path).rgb);
    EXPECT_EQ(image.name, "standard input");
    EXPECT_THAT(error_of(ErrorCode::kCorruptFile, [] { load_image("-"); }),
                HasSubstr("image standard input is empty"));
  });
  with_input("/dev/zero", [] {
    EXPECT_THAT(error_of(ErrorCode::kCorruptFile, [] { load_image("-"); }),
                HasSubstr("image standard input is not in a known image format"));
  });
}

TEST(ImageLimits, NamesAreFitForMessages) {
  const auto message = [](const std::string& name) {
    return error_of(ErrorCode::kCorruptFile, [&] { load_image(name); });
  };
  EXPECT_THAT(message("/none/\x1b[31mred\n.png"), HasSubstr("/none/\\x1b[31mred\\x0a.png"));
  const std::string longest = message("/none/" + std::string(3000, 'x') + "/cat.png");
  EXPECT_THAT(longest, AllOf(HasSubstr("image ...xxx"), HasSubstr("x/cat.png ")));
  EXPECT_LT(longest.size(), 300u);
  const std::string decoded = error_of(ErrorCode::kCorruptFile, [] {
    decode_image(bytes_of("no picture"), "\x1b]0;title\x07.png");
  });
  EXPECT_THAT(decoded, HasSubstr("\\x1b]0;title\\x07.png"));

  const auto real = (data_folder() / "rgb8.png").string();
  EXPECT_THAT(error_of(ErrorCode::kInvalidArgument, [&] { load_image(real + "\0.txt"s); }),
              AllOf(HasSubstr("rgb8.png\\x00.txt has a NUL")));
  const auto bytes = data_file("rgb8.png");
  EXPECT_EQ(decode_image(bytes, "a\nb").name, "a\\x0ab");
}

TEST(ImageLimits, ASizeIsKnownWithoutDecoding) {
  for (auto& in : test::goldens("decode")) {
    std::string name;
    int width, height;
    in >> name >> width >> height;
    const ImageInfo info = probe_image(data_folder() / name);
    EXPECT_EQ(info.width, width) << name;
    EXPECT_EQ(info.height, height) << name;
  }
  const ImageInfo stored = probe_image(data_folder() / "orientation6.jpg", Orientation::kIgnore);
  const ImageInfo upright = probe_image(data_folder() / "orientation6.jpg");
  EXPECT_EQ(stored.height, upright.width);
  EXPECT_EQ(upright.format, "JPEG");
  EXPECT_THAT(error_of(ErrorCode::kCorruptFile, [] { probe_image("/none/cat.png"); }),
              HasSubstr("/none/cat.png does not exist"));
  if (!kMemoryCanBeLimited) return;
  const std::string large = "\x89PNG\r\n\x1a\n" +
                            chunk("IHDR", "\0\0\x40\0\0\0\x40\0\x08\0\0\0\0"s) +
                            chunk("IDAT", std::string(40000, '\0'));
  EXPECT_EXIT(with_little_memory(16 * kMiB,
                                 [&] {
                                   if (probe_image(bytes_of(large), "large").width == 16384) {
                                     throw Error(ErrorCode::kUnsupported, "its size is known");
                                   }
                                 }),
              ::testing::ExitedWithCode(0), "its size is known");
}

}  // namespace
}  // namespace kvlm
