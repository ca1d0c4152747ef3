#include "kernels/base/printable.h"

#include <gtest/gtest.h>

#include <string>

namespace kvlm {
namespace {

TEST(Printable, LettersOfEveryScriptStay) {
  for (const char* text : {"", "plain text ~", "Größe", "日本語", "Ελληνικά", "𝛼🙂"}) {
    EXPECT_EQ(printable(text), text);
  }
}

TEST(Printable, ControlsAndTurnedWritingAreSpelledOut) {
  EXPECT_EQ(printable("a\x1b[31mb\n"), "a\\x1b[31mb\\x0a");
  EXPECT_EQ(printable(std::string("\0\x7f", 2)), "\\x00\\x7f");
  EXPECT_EQ(printable("\xc2\x9b"
                      "31m"),
            "\\u009b31m");  // a C1 control
  EXPECT_EQ(printable("\xe2\x80\xae"
                      "gpj"),
            "\\u202egpj");                               // right to left
  EXPECT_EQ(printable("\xef\xbb\xbf"), "\\ufeff");       // byte order mark
  EXPECT_EQ(printable("\xf3\xa0\x81\x81"), "\\ue0041");  // an invisible tag
}

TEST(Printable, BytesThatAreNotUtf8AreSpelledOut) {
  EXPECT_EQ(printable("\xff"
                      "a"),
            "\\xffa");
  EXPECT_EQ(printable("\xc3"), "\\xc3");                    // cut
  EXPECT_EQ(printable("\xc3("), "\\xc3(");                  // no second byte
  EXPECT_EQ(printable("\xc0\xaf"), "\\xc0\\xaf");           // overlong
  EXPECT_EQ(printable("\xed\xa0\x80"), "\\xed\\xa0\\x80");  // a surrogate
  EXPECT_EQ(printable("\xf4\x90\x80\x80"), "\\xf4\\x90\\x80\\x80");
}

TEST(Printable, LongTextsAreCutBetweenLetters) {
  EXPECT_EQ(printable(std::string(120, 'a')), std::string(120, 'a'));
  EXPECT_EQ(printable(std::string(121, 'a')), std::string(120, 'a') + "...");
  EXPECT_EQ(printable(std::string(119, 'a') + "öö"), std::string(119, 'a') + "ö...");
}

}  // namespace
}  // namespace kvlm
