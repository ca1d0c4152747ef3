#include "tools/run/chat_line.h"

#include <gmock/gmock.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "kernels/base/error.h"

namespace kvlm {
namespace {

using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::Not;
using Kind = ChatLine::Kind;

std::string refusal_of(std::string_view line) {
  try {
    static_cast<void>(parse_chat_line(line));
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    return error.what();
  }
  ADD_FAILURE() << line << " was taken";
  return {};
}

std::string image_of(std::string_view line) {
  const ChatLine wanted = parse_chat_line(line);
  EXPECT_EQ(wanted.kind, Kind::kImage);
  return wanted.text;
}

TEST(ChatLineTest, CommandsAndQuestions) {
  EXPECT_EQ(parse_chat_line("").kind, Kind::kNothing);
  EXPECT_EQ(parse_chat_line("  ").kind, Kind::kNothing);
  EXPECT_EQ(parse_chat_line("/clear ").kind, Kind::kClear);
  EXPECT_EQ(parse_chat_line("/quit").kind, Kind::kQuit);
  EXPECT_EQ(parse_chat_line("/exit").kind, Kind::kQuit);
  const ChatLine question = parse_chat_line("what is / this");
  EXPECT_EQ(question.kind, Kind::kQuestion);
  EXPECT_EQ(question.text, "what is / this");
}

TEST(ChatLineTest, AQuestionKeepsItsBlanks) {
  for (const char* question : {"  what is it", "what is it \t", " /image cat.png", "\tand now  "}) {
    const ChatLine wanted = parse_chat_line(question);
    EXPECT_EQ(wanted.kind, Kind::kQuestion) << question;
    EXPECT_EQ(wanted.text, question);
  }
}

TEST(ChatLineTest, HelpAndTheEndHaveSeveralNames) {
  for (const char* line : {"/help", "/?", "/help "}) {
    EXPECT_EQ(parse_chat_line(line).kind, Kind::kHelp) << line;
  }
  for (const char* line : {"exit", "quit", " exit ", "/bye"}) {
    EXPECT_EQ(parse_chat_line(line).kind, Kind::kQuit) << line;
  }
  EXPECT_EQ(parse_chat_line("exit signs?").kind, Kind::kQuestion);
}

TEST(ChatLineTest, AVideoIsAFile) {
  const ChatLine wanted = parse_chat_line("/video  'a cat.mp4'");
  EXPECT_EQ(wanted.kind, Kind::kVideo);
  EXPECT_EQ(wanted.text, "a cat.mp4");
}

TEST(ChatLineTest, UnknownCommandsAreToldTheNearest) {
  EXPECT_THAT(refusal_of("/imgae x.png"), HasSubstr("did you mean /image?"));
  EXPECT_THAT(refusal_of("/claer"), HasSubstr("did you mean /clear?"));
  EXPECT_THAT(refusal_of("/x\x1b[2J"), HasSubstr("\\x1b"));
}

TEST(ChatLineTest, NothingFarFetchedIsSuggested) {
  for (const char* line : {"/étage 3?", "/gone/cat.png", "/usr is what?", "/42"}) {
    EXPECT_THAT(refusal_of(line),
                AllOf(Not(HasSubstr("did you mean")), HasSubstr("a blank before")))
        << line;
  }
}

TEST(ChatBlockTest, LinesBetweenQuotesAreOneQuestion) {
  ChatBlock block;
  bool joined = true;
  std::string line = "what is it";
  EXPECT_TRUE(block.take(line, joined));
  EXPECT_FALSE(joined);
  for (const char* part : {"\"\"\"", "/clear is a word,", ""}) {
    line = part;
    EXPECT_FALSE(block.take(line, joined)) << part;
  }
  line = "is it not? \"\"\"";
  EXPECT_TRUE(block.take(line, joined));
  EXPECT_TRUE(joined);
  EXPECT_EQ(line, "/clear is a word,\n\nis it not? ");
  line = "\"\"\"one line\"\"\"";
  EXPECT_TRUE(block.take(line, joined));
  EXPECT_EQ(line, "one line");
  line = "\"\"\"first";
  EXPECT_FALSE(block.take(line, joined));
  line = "\"\"\"";
  EXPECT_TRUE(block.take(line, joined));
  EXPECT_EQ(line, "first");
}

TEST(ChatBlockTest, IsBounded) {
  ChatBlock block;
  bool joined = false;
  std::string line = "\"\"\"";
  EXPECT_FALSE(block.take(line, joined));
  line.assign(kMaxChatLine / 2, 'x');
  EXPECT_FALSE(block.take(line, joined));
  line.assign(kMaxChatLine / 2, 'x');
  EXPECT_FALSE(block.take(line, joined));
  line = "more";
  EXPECT_THROW(block.take(line, joined), Error);
}

TEST(ChatLineTest, CommandsSayHowTheyAreUsed) {
  EXPECT_THAT(refusal_of("/image"), AllOf(HasSubstr("FILE"), HasSubstr("/image cat.png")));
  EXPECT_THAT(refusal_of("/video "), AllOf(HasSubstr("FILE"), HasSubstr("/video cat.mp4")));
  EXPECT_THAT(refusal_of("/clear all"), AllOf(HasSubstr("/clear"), HasSubstr("\"all\"")));
}

/// A folder of its own to be in, with HOME beside it.
class ChatFiles : public testing::Test {
 protected:
  void SetUp() override {
    folder_ = std::filesystem::path(testing::TempDir()) / ("chat_line_" + std::to_string(getpid()));
    std::filesystem::create_directories(folder_ / "pics");
    for (const char* name : {"two  blanks.png", "it's.png", "cat.png", "car.png", "pics/été.png",
                             "pics/étoile.png", ".hidden"}) {
      std::ofstream(folder_ / name) << "x";
    }
    before_ = std::filesystem::current_path();
    std::filesystem::current_path(folder_);
    setenv("HOME", folder_.c_str(), 1);
  }
  void TearDown() override {
    std::filesystem::current_path(before_);
    std::filesystem::remove_all(folder_);
  }

  std::filesystem::path folder_, before_;
};

TEST_F(ChatFiles, PathsAreReadAsAPersonWritesThem) {
  EXPECT_EQ(image_of("/image   cat.png "), "cat.png");
  EXPECT_EQ(image_of("/image two  blanks.png"), "two  blanks.png");
  EXPECT_EQ(image_of("/image two\\ \\ blanks.png"), "two  blanks.png");
  EXPECT_EQ(image_of("/image 'two  blanks.png'"), "two  blanks.png");
  EXPECT_EQ(image_of("/image \"two  blanks.png\""), "two  blanks.png");
  EXPECT_EQ(image_of("/image it's.png"), "it's.png");
  EXPECT_EQ(image_of("/image ~/cat.png"), (folder_ / "cat.png").string());
}

TEST_F(ChatFiles, AFileThatWasDroppedOnTheTerminalIsKnown) {
  EXPECT_THAT(refusal_of((folder_ / "cat.png").string()), HasSubstr("did you mean /image "));
}

TEST_F(ChatFiles, TabCompletesFiles) {
  EXPECT_EQ(complete_chat_line("/image cat").insert, ".png");
  EXPECT_EQ(complete_chat_line("/image ca").insert, "");
  EXPECT_THAT(complete_chat_line("/image ca").choices, ElementsAre("car.png", "cat.png"));
  EXPECT_EQ(complete_chat_line("/image two").insert, "\\ \\ blanks.png");
  EXPECT_EQ(complete_chat_line("/image 'two").insert, "  blanks.png'");
  EXPECT_EQ(complete_chat_line("/image pi").insert, "cs/");
  EXPECT_EQ(complete_chat_line("/image pics/").insert, "ét");
  EXPECT_EQ(complete_chat_line("/image pics/étoi").insert, "le.png");
  EXPECT_EQ(complete_chat_line("/image ~/pi").insert, "cs/");
  EXPECT_EQ(complete_chat_line("/image .hi").insert, "dden");
  EXPECT_EQ(complete_chat_line("/image none").insert, "");
  EXPECT_EQ(complete_chat_line("/video pi").insert, "cs/");
  EXPECT_EQ(complete_chat_line("/clear pi").insert, "");
  EXPECT_EQ(complete_chat_line("what is ca").insert, "");
}

TEST_F(ChatFiles, WhatTabMadeIsRead) {
  for (const std::string typed : {"/image two", "/image it", "/image 'two", "/image ~/cat"}) {
    const std::string line = typed + complete_chat_line(typed).insert;
    EXPECT_TRUE(std::filesystem::exists(image_of(line))) << line;
  }
}

TEST(CompleteChatLine, CompletesCommands) {
  EXPECT_EQ(complete_chat_line("/i").insert, "mage ");
  EXPECT_EQ(complete_chat_line("/v").insert, "ideo ");
  EXPECT_EQ(complete_chat_line("/c").insert, "lear");
  EXPECT_THAT(complete_chat_line("/").choices,
              ElementsAre("/image", "/video", "/clear", "/help", "/quit", "/exit"));
}

}  // namespace
}  // namespace kvlm
