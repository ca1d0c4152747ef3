#include "runtime/loading/plain_text.h"

#include <gmock/gmock.h>

#include "kernels/base/error.h"

namespace kvlm {
namespace {

using testing::HasSubstr;
using testing::StartsWith;

std::string bytes(std::initializer_list<int> values) {
  std::string text;
  for (const int value : values) text += static_cast<char>(value);
  return text;
}

std::string refusal(std::string_view text) {
  try {
    plain_text(text, "-p @a.txt");
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kCorruptFile);
    return error.what();
  }
  return "";
}

TEST(PlainText, DropsMarksAndReturns) {
  EXPECT_EQ(plain_text("a\r\nb\r\n\r\n", "x"), "a\nb\n\n");
  EXPECT_EQ(plain_text("\xef\xbb\xbf"
                       "caf\xc3\xa9?\r",
                       "x"),
            "caf\xc3\xa9?");
  EXPECT_EQ(plain_text("a\rb\r\r\n", "x"), "a\rb\r\n") << "a lone return is a character";
  EXPECT_EQ(plain_text("", "x"), "");
  EXPECT_EQ(plain_text("\xef\xbb\xbf", "x"), "");
  EXPECT_EQ(plain_text("ab", "x"), "ab");
  EXPECT_EQ(plain_text("a\xef\xbb\xbf", "x"), "a\xef\xbb\xbf") << "no mark within the text";
}

TEST(PlainText, ReturnsAloneEndLinesWhereNoNewlineIs) {
  EXPECT_EQ(plain_text("a\rb\r\rc", "x"), "a\nb\n\nc");
  EXPECT_EQ(plain_text("a\rb\r", "x"), "a\nb");
  EXPECT_EQ(plain_text("a\nb\rc", "x"), "a\nb\rc");
  EXPECT_EQ(plain_text(bytes({0xff, 0xfe, 'a', 0, '\r', 0, 'b', 0}), "x"), "a\nb");
}

TEST(PlainText, DropsTheEndMarkOfDos) {
  EXPECT_EQ(plain_text("a\r\n\x1a", "x"), "a\n");
  EXPECT_EQ(plain_text("a\x1a\x1a", "x"), "a\x1a") << "one mark";
  EXPECT_EQ(plain_text("\x1a"
                       "a",
                       "x"),
            "\x1a"
            "a");
}

TEST(PlainText, ConvertsUtf16) {
  EXPECT_EQ(plain_text(bytes({0xff, 0xfe, 'a', 0, 0xe9, 0, '\r', 0, '\n', 0}), "x"), "a\xc3\xa9\n");
  EXPECT_EQ(plain_text(bytes({0xfe, 0xff, 0, 'a', 0x20, 0xac}), "x"), "a\xe2\x82\xac");
  EXPECT_EQ(plain_text(bytes({'a', 0, 'b', 0, 0xe9, 0}), "x"), "ab\xc3\xa9") << "without a mark";
  EXPECT_EQ(plain_text(bytes({0, '{', 0, '}'}), "x"), "{}");
  EXPECT_EQ(plain_text(bytes({'a', 0}), "x"), "a");
  EXPECT_EQ(plain_text(bytes({0xff, 0xfe, 0x3d, 0xd8, 0x00, 0xde}), "x"), "\xf0\x9f\x98\x80");
  EXPECT_EQ(plain_text(bytes({0xff, 0xfe}), "x"), "");
}

TEST(PlainText, RefusesWhatItWouldHaveToGuess) {
  EXPECT_EQ(refusal("What\ncaf\xe9?"),
            "-p @a.txt is not UTF-8: line 2 has the byte 0xe9, as Latin-1 and Windows-1252 write "
            "letters; convert it, for example with iconv -f WINDOWS-1252 -t UTF-8");
  EXPECT_THAT(refusal("\x93quoted\x94"), HasSubstr("line 1 has the byte 0x93"));
  EXPECT_THAT(refusal("cut \xe2\x82"), HasSubstr("byte 0xe2"));
  EXPECT_THAT(refusal(bytes({0xff, 0xfe, 0, 0, 'a', 0, 0, 0})), HasSubstr("is UTF-32 text"));
  EXPECT_THAT(refusal(bytes({'a', 0, 0, 0, 'b', 0, 0, 0})), HasSubstr("iconv -f UTF-32LE"));
  EXPECT_THAT(refusal(bytes({0x16, 0x04, 0, 0})), HasSubstr("is UTF-32LE text"));
  EXPECT_THAT(refusal(bytes({0, 0, 0, 'a', 0, 0, 0, 'b'})), HasSubstr("is UTF-32BE text"));
  EXPECT_THAT(refusal("+AHs-a+AH0-"), HasSubstr("is UTF-7 text"));
  EXPECT_THAT(refusal("+/v8-What?"), HasSubstr("iconv -f UTF-7"));
  EXPECT_THAT(refusal("one\ntwo" + bytes({0}) + "three"),
              StartsWith("-p @a.txt has a NUL byte in line 2; remove it"));
  EXPECT_THAT(refusal(bytes({0xff, 0xfe, 'a', 0, 0, 0})), HasSubstr("NUL byte in line 1"));
  EXPECT_THAT(refusal(bytes({0xff, 0xfe, 'a', 0, 'b'})), HasSubstr("ends within a character"));
  for (const std::string& half :
       {bytes({0xff, 0xfe, 0x3d, 0xd8}), bytes({0xff, 0xfe, 0x3d, 0xd8, 'a', 0}),
        bytes({0xff, 0xfe, 0x00, 0xde, 'a', 0}), bytes({0xff, 0xfe, 0x3d, 0xd8, 0x3d, 0xd8})}) {
    EXPECT_THAT(refusal(half), StartsWith("-p @a.txt is UTF-16 text with half of a surrogate"));
  }
}

TEST(PlainText, ComesInPiecesOfAnySize) {
  const std::string smile = "\xf0\x9f\x98\x80";
  for (const auto& [text, expected] :
       {std::pair(std::string("\xef\xbb\xbf"
                              "a\r\n\r\nb\rc\r"),
                  std::string("a\n\nb\rc")),
        std::pair(std::string("a\rb\r\rcd\r"), std::string("a\nb\n\ncd")),
        std::pair(std::string("ab\r\n\r\n\r\x1a"), std::string("ab\n\n")),
        std::pair(std::string("ab\x1a\r\n\x1a"), std::string("ab\x1a\n")),
        std::pair(bytes({0xff, 0xfe, 'a', 0, '\r', 0, '\n', 0, 0x3d, 0xd8, 0x00, 0xde}),
                  "a\n" + smile),
        std::pair(bytes({0, 'a', 0, 'b', 0, '\r', 0, '\n', 0xd8, 0x3d, 0xde, 0x00}),
                  "ab\n" + smile)}) {
    for (size_t size = 1; size <= text.size(); ++size) {
      TextDecoder decoder("x");
      std::string got;
      for (size_t at = 0; at < text.size(); at += size) {
        got += decoder.decode(std::string_view(text).substr(at, size), false);
      }
      got += decoder.decode("", true);
      EXPECT_EQ(got, expected) << size;
    }
  }
}

}  // namespace
}  // namespace kvlm
