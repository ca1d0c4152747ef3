#include "tools/common/lines.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <utility>
#include <vector>

#include "kernels/base/error.h"

namespace kvlm {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::Pair;
using testing::StartsWith;

class Lines : public testing::Test {
 protected:
  void SetUp() override {
    std::string name = (std::filesystem::temp_directory_path() / "kvlm-lines-XXXXXX").string();
    const int descriptor = mkstemp(name.data());
    ASSERT_GE(descriptor, 0);
    close(descriptor);
    path_ = name;
  }
  void TearDown() override { std::filesystem::remove(path_); }

  void write(const std::string& text) { std::ofstream(path_, std::ios::binary) << text; }
  std::vector<std::pair<size_t, std::string>> read(size_t most = 100) {
    std::vector<std::pair<size_t, std::string>> lines;
    const int descriptor = open(path_.c_str(), O_RDONLY | O_CLOEXEC);
    TextLines text(descriptor, "x");
    for (std::string line; lines.size() < most && text.next(line);) {
      lines.emplace_back(text.number(), line);
    }
    close(descriptor);
    return lines;
  }
  static std::string refusal(const std::string& path) {
    const int descriptor = open(path.c_str(), O_RDONLY | O_CLOEXEC);
    TextLines text(descriptor, "x");
    std::string message;
    try {
      for (std::string line; text.next(line);) continue;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kCorruptFile);
      message = error.what();
    }
    close(descriptor);
    return message;
  }

  std::string path_;
};

TEST_F(Lines, ComeWithTheirNumbersAndWithoutTheirEnds) {
  write(
      "\xef\xbb\xbf"
      "a\n\nb\r\nc\r");
  EXPECT_THAT(read(), ElementsAre(Pair(1, "a"), Pair(2, ""), Pair(3, "b"), Pair(4, "c")));
  write(
      std::string("\xff\xfe"
                  "a\0\r\0\n\0b\0",
                  10));
  EXPECT_THAT(read(), ElementsAre(Pair(1, "a"), Pair(2, "b")));
  write("");
  EXPECT_THAT(read(), ElementsAre());
  write("a\n");
  EXPECT_THAT(read(), ElementsAre(Pair(1, "a")));
}

TEST_F(Lines, AreReadAcrossChunks) {
  const std::string line(200'001, 'x');
  write(line + "\n" + line + "y\n");
  EXPECT_THAT(read(), ElementsAre(Pair(1, line), Pair(2, line + "y")));
}

TEST_F(Lines, EndWhenNoMoreAreWanted) {
  write("a\nb\nc\n");
  EXPECT_THAT(read(2), ElementsAre(Pair(1, "a"), Pair(2, "b")));
}

TEST_F(Lines, AreRefusedWhereTheyDoNotEnd) {
  write("a\n" + std::string(kMaxLineBytes, 'x'));
  EXPECT_EQ(refusal(path_), "");
  write("a\n" + std::string(kMaxLineBytes + 1, 'x'));
  EXPECT_THAT(refusal(path_), StartsWith("x line 2 is longer than 16777216 bytes"));
  EXPECT_THAT(refusal("/dev/zero"), StartsWith("x line 1 is longer"));
}

TEST_F(Lines, OfWhatIsNoFileAreRefused) {
  EXPECT_THAT(refusal("/"), HasSubstr("x cannot be read: Is a directory"));
  EXPECT_THAT(refusal(path_ + ".gone"), HasSubstr("x cannot be read: Bad file descriptor"));
  write("a\ncaf\xe9\n");
  EXPECT_THAT(refusal(path_), StartsWith("x is not UTF-8: line 2 has the byte 0xe9"));
}

}  // namespace
}  // namespace kvlm
