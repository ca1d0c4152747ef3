#include "kvcache/engine/row_order.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <vector>

#include "kernels/decode_table.h"

namespace kvlm {
namespace {

using ::testing::ElementsAre;

constexpr int kNone = WeighedRows::kNoRow;

/// Five places, of rows of two channels. Row 4 took the place of row 1; row 2 has gone since.
HeadRows rows_by_place() {
  HeadRows rows;
  rows.keys = {0, 0.5, 4, 4.5, 2, 2.5, 3, 3.5, 5, 5.5};
  rows.values = {10, 10.5, 14, 14.5, 12, 12.5, 13, 13.5, 15, 15.5};
  rows.tags = {7, kTextRow, 8, kTextRow, kTextRow};
  return rows;
}

TEST(RowOrder, IsThatOfTheNumbers) {
  HeadRows rows = rows_by_place();
  put_in_order(rows, std::vector{0, 4, kNone, 3, 5}, /*newest=*/false, 2);
  EXPECT_THAT(rows.keys, ElementsAre(0, 0.5, 3, 3.5, 4, 4.5, 5, 5.5));
  EXPECT_THAT(rows.values, ElementsAre(10, 10.5, 13, 13.5, 14, 14.5, 15, 15.5));
  EXPECT_THAT(rows.tags, ElementsAre(7, kTextRow, kTextRow, kTextRow));
}

TEST(RowOrder, HasTheNewestRowInTheFreePlace) {
  HeadRows rows = rows_by_place();
  put_in_order(rows, std::vector{0, 4, kNone, 3, 5}, /*newest=*/true, 2);
  EXPECT_THAT(rows.keys, ElementsAre(0, 0.5, 3, 3.5, 4, 4.5, 5, 5.5, 2, 2.5));
  EXPECT_EQ(rows.tags.back(), kTextRow);
}

TEST(RowOrder, ForgetsARowWhoseStepHasNotEnded) {
  std::vector<int> came{0, 4, 6, 3, 5};
  forget_newest(came);
  EXPECT_THAT(came, ElementsAre(0, 4, kNone, 3, 5));
  forget_newest(came);  // no more than one
  EXPECT_THAT(came, ElementsAre(0, 4, kNone, 3, 5));
}

}  // namespace
}  // namespace kvlm
