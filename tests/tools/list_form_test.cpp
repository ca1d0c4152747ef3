#include "tools/run/list_form.h"

#include <fmt/format.h>
#include <gmock/gmock.h>

#include "kernels/base/error.h"

namespace kvlm {
namespace {

using namespace std::string_literals;
using testing::AllOf;
using testing::HasSubstr;
using testing::StartsWith;

std::string refusal(std::string_view text, const std::string& name = "in.x") {
  try {
    require_text(text, "--batch " + name, name);
    return fmt::format("form {}", static_cast<int>(form_of_list(text, "--batch " + name, name)));
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
