#include "tools/run/list_form.h"

#include <fmt/format.h>
#include <gmock/gmock.h>

#include "kernels/base/error.h"

namespace kvlm {
namespace {

using namespace std::string_literals;
using testing::AllOf;
using testing::HasSubstr;
using testing::Not;
using testing::StartsWith;

std::string refusal(std::string_view text, const std::string& name = "in.x",
                    const std::string& option = "--batch ") {
  try {
    require_text(text, option + name, name);
    return fmt::format("form {}", static_cast<int>(form_of_list(text, option + name, name)));
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kCorruptFile);
    return error.what();
  }
}

TEST(ListForm, IsSeenFromTheWhole) {
  const auto form = [](std::string_view text) { return form_of_list(text, "--batch x", "x"); };
  EXPECT_EQ(form(""), ListForm::kLines);
  EXPECT_EQ(form(" \n\n"), ListForm::kLines);
  EXPECT_EQ(form("{\"id\": 1}"), ListForm::kLines);
  EXPECT_EQ(form("{\"id\": 1}\n{\"id\": "), ListForm::kLines);
  EXPECT_EQ(form("{\"id\": 1, \n{\"id\": 2}"), ListForm::kLines) << "only one line is damaged";
  EXPECT_EQ(form("{\"id\": 1, \"image\": \n{\"id\": 2}"), ListForm::kLines);
  EXPECT_EQ(form("not JSON\n{\"id\": 2}"), ListForm::kLines);
  EXPECT_EQ(form("{\"id\": 1, \"meta\": {\"a\": [{}]}}"), ListForm::kLines);
  EXPECT_EQ(form("{\"id\": 1, \"body\": {}}"), ListForm::kLines);
  EXPECT_EQ(form("\n [{\"id\": 1}]"), ListForm::kArray);
  EXPECT_EQ(form("{\n  \"id\": 1,\n  \"image\": \"a.png\"\n}\n"), ListForm::kObject);
  EXPECT_EQ(form("a.png\n\nb/c d.JPG\nv.mp4\n"), ListForm::kNames);
  EXPECT_EQ(form("a.png\nno suffix\n"), ListForm::kNames);
}

TEST(ListForm, WhatIsNoListIsRefusedOnce) {
  for (const char* table :
       {"id,image\n1,a.png\n2,b.png\n", "1,a.png\n2,b.png", "id\timage\n1\ta.png",
        "a.png;A dog\nb.png;A cat\n", "id | image\n1 | a.png"}) {
    EXPECT_THAT(refusal(table), AllOf(StartsWith("--batch in.x is a table"), HasSubstr("{\"id\"")))
        << table;
  }
  EXPECT_THAT(refusal("image\na.png\n", "in.csv"), HasSubstr("is a table"));
  for (const char* object :
       {"{\"images\": [{\"id\": 1}], \"annotations\": []}", "{\"info\": {}, \"images\": []}",
        "{\n \"data\": [\n  {\"questionId\": 1}\n ]\n}", "{\"1.png\": {\"caption\": \"a\"}}",
        "{\"root\":\n[{\"image\": \"a.png\"}]}"}) {
    EXPECT_THAT(refusal(object), HasSubstr("is one JSON object with the keys ")) << object;
  }
  EXPECT_THAT(refusal("https://a.org/b.png\nhttps://a.org/c.png\n"), HasSubstr("lists addresses"));
  EXPECT_THAT(refusal("{\n \"id\": 1\n}\n{\n \"id\": 2\n}\n"), HasSubstr("jq -c"));
  for (const char* prose :
       {"Dear reader,\nthese are words.\n", "<html>\n</html>", "- id: 1\n", "7\n8"}) {
    EXPECT_THAT(refusal(prose), HasSubstr("is no list of records: its first line is ")) << prose;
  }
}

TEST(ListForm, RecordsOfOtherProgramsAreRefusedOnce) {
  for (const auto& [text, words] :
       {std::pair("{\"id\": 1},\n{\"id\": 2},\n{\"id\": 3}", "has a comma at the end"),
        {"{\"id\": 1},\n{\"id\": 2}", "sed 's/,$//'"},
        {"{'id': 7, 'image': 'x.jpg'}\n{'id': 8}", "has keys in single quotes"},
        {"{ 'id': 7}\n\n{'id': 8}\n{\"id\": 9}", "json.dumps()"},
        {"{image: 'x.jpg'}\n{image: 'y.jpg'}", "has keys without quotes"},
        {"{\"5\": \"x.jpg\", \"6\": \"y.jpg\"}", "is one JSON object with the keys 5, 6"},
        {"{\"x.jpg\": \"What?\"}", "is one JSON object"},
        {"{\"first\": \"x.jpg\", \"second\": \"y.mp4\"}", "is one JSON object"}}) {
    EXPECT_THAT(refusal(text), HasSubstr(words)) << text;
  }
  EXPECT_EQ(refusal("{'id': 7}"), "form 0") << "its error is enough";
  EXPECT_EQ(refusal("{\"id\": 1},\n{\"id\": 2}\n{\"id\": 3}"), "form 0") << "one line is damaged";
  EXPECT_EQ(refusal("{\"image\": \"x.jpg\", \"video\": \"y.mp4\"}"), "form 0");
  EXPECT_EQ(refusal("{\"images\": [\n\"x.jpg\",\n\"y.jpg\",\n\"z.jpg\"\n]}"), "form 2");
  EXPECT_THAT(refusal("{\"data\": [\n{\"id\": 1},\n{\"id\": 2},\n{\"id\": 3}\n]}"),
              HasSubstr("one JSON object with the keys data"));
  EXPECT_EQ(refusal("{\"img\": \"x.jpg\"}"), "form 0") << "its key is named";
}

TEST(ListForm, NamesAreAloneOnTheirLines) {
  for (const char* text :
       {"- image: x.jpg\n- image: y.jpg\n", "* x.jpg\n* y.jpg", "1. x.jpg\n2. y.jpg\n",
        "-rw-r--r-- 1 me me 512 Nov  1 10:00 x.jpg\n-rw-r--r-- 1 me me 99 Nov  1 10:00 y.jpg\n",
        "d41d8cd98f00b204e9800998ecf8427e  x.jpg\n", "4.0K x.jpg\n8.0K y.jpg\n"}) {
    EXPECT_THAT(refusal(text), HasSubstr("is no list of records: its first line is ")) << text;
  }
  EXPECT_THAT(refusal("x.jpg\0y.jpg\0"s), HasSubstr("NUL bytes between names, as find -print0"));
}

TEST(ListForm, CuresFitTheOption) {
  const auto data = [](const std::string& text) { return refusal(text, "in.x", "--data "); };
  EXPECT_THAT(data("\x1f\x8b\x08"s), HasSubstr("give --data - what gunzip -c prints"));
  for (const std::string& text : {"\xff\xd8\xff\xe0"s,
                                  "\0\0\0\x18"
                                  "ftypisom"s,
                                  "PK\x03\x04"s}) {
    EXPECT_THAT(data(text), AllOf(HasSubstr("write a JSON line a record"), Not(HasSubstr("folder")),
                                  Not(HasSubstr("--image"))));
  }
}

TEST(ListForm, BinaryFilesAreNamed) {
  const std::string rest(400, '\0');
  std::string tar = "a.png" + std::string(252, '\0') + "ustar";
  for (const auto& [text, words] :
       {std::pair("PAR1" + rest, "Parquet"), std::pair("\x1f\x8b\x08"s + rest, "gunzip -c"),
        std::pair("PK\x03\x04"s + rest, "ZIP"), std::pair("\x28\xb5\x2f\xfd"s + rest, "zstd -dc"),
        std::pair("SQLite format 3\0"s + rest, "SQLite"), std::pair(tar, "tar archive"),
        std::pair("\0\0\0\x18"
                  "ftypisom"s +
                      rest,
                  "is a video"),
        std::pair("\xff\xd8\xff\xe0"s + rest, "is an image"),
        std::pair("II*\0"s + rest, "is an image"), std::pair("words"s, "no list of records")}) {
    EXPECT_THAT(refusal(text), HasSubstr(words));
  }
}

}  // namespace
}  // namespace kvlm
