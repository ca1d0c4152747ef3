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
  std::vector<std::pair<int, std::string>> read(int most = 100) {
    std::vector<std::pair<int, std::string>> lines;
    for_each_line(path_, "--data x", [&](int number, std::string_view line) {
      lines.emplace_back(number, line);
      return static_cast<int>(lines.size()) < most;
    });
    return lines;
  }
  static std::string refusal(const std::string& path) {
    try {
      for_each_line(path, "--data x", [](int, std::string_view) { return true; });
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kCorruptFile);
      return error.what();
    }
    return "";
  }

  std::string path_;
};

TEST_F(Lines, ComeWithTheirNumbersAndWithoutTheirEnds) {
  write("a\n\nb\r\n\xff");
  EXPECT_THAT(read(), ElementsAre(Pair(1, "a"), Pair(2, ""), Pair(3, "b"), Pair(4, "\xff")));
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
  EXPECT_THAT(refusal(path_), StartsWith("--data x line 2 is longer than 16777216 bytes"));
  EXPECT_THAT(refusal("/dev/zero"), StartsWith("--data x line 1 is longer"));
}

TEST_F(Lines, OfWhatIsNoFileAreRefused) {
  EXPECT_THAT(refusal("/"), HasSubstr("--data x cannot be read: Is a directory"));
  EXPECT_THAT(refusal(path_ + ".gone"), HasSubstr("cannot be read: No such file"));
}

}  // namespace
}  // namespace kvlm
