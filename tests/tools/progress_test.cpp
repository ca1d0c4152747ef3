#include "tools/common/progress.h"

#include <gmock/gmock.h>

#include <string>

namespace kvlm {
namespace {

using testing::HasSubstr;
using testing::Not;

ProgressLine batch_line() { return {"batch", 0.2, "3/15", 20.0, "8 running, 312 tokens"}; }

TEST(FormatProgress, WideTerminalsShowEverything) {
  EXPECT_EQ(format_progress(batch_line(), 120),
            "batch [#####.......................] 3/15, 20 s left, 8 running, 312 tokens");
}

TEST(FormatProgress, FortyColumnsShowTheBarAndTheTime) {
  EXPECT_EQ(format_progress(batch_line(), 40), "batch [###............] 3/15, 20 s left");
}

TEST(FormatProgress, NeverFillsALineOfAnyWidth) {
  for (size_t columns = 0; columns <= 200; ++columns) {
    const std::string line = format_progress(batch_line(), columns);
    EXPECT_LT(line.size(), columns + (columns == 0 ? 1 : 0)) << columns;
  }
}

TEST(FormatProgress, WideLettersCountTwice) {
  const ProgressLine line{"漢字漢字漢字", 0.5, "50 %", {}, ""};
  EXPECT_EQ(format_progress(line, 30), "漢字漢字漢字 [####.....] 50 %");
  EXPECT_EQ(format_progress(line, 8), "漢字漢");
}

TEST(FitColumns, CutsInWholeLetters) {
  EXPECT_EQ(fit_columns("abc", 2), "ab");
  EXPECT_EQ(fit_columns("aé漢", 3), "aé");
  EXPECT_EQ(fit_columns("aé漢", 4), "aé漢");
  EXPECT_EQ(fit_columns("e\u0301x", 1), "e\u0301");  // a mark of its own takes no column
  EXPECT_EQ(fit_columns("\xff\xfe", 1), "\xff");
}

TEST(SecondsLeft, FailedRecordsTookNoTime) {
  EXPECT_EQ(seconds_left({1, 1, 0}, 15, 0.01), std::nullopt);
  EXPECT_DOUBLE_EQ(seconds_left({2, 1, 0}, 15, 2).value(), 26);
}

TEST(SecondsLeft, RecordsUnderWayCountAsFarAsTheyAre) {
  // 1 of 15 done, 7 beside it nearly: 10 s for 8, so 7 more take 8.75 s.
  EXPECT_DOUBLE_EQ(seconds_left({1, 0, 7}, 15, 10).value(), 8.75);
  EXPECT_DOUBLE_EQ(seconds_left({15, 0, 0}, 15, 10).value(), 0);
}

TEST(HumanSeconds, SaysNoMoreThanItKnows) {
  EXPECT_EQ(human_seconds(12.3), "12 s");
  EXPECT_EQ(human_seconds(100), "2 min");
  EXPECT_EQ(human_seconds(3 * 3600), "3.0 h");
}

}  // namespace
}  // namespace kvlm
