#include "tools/run/records.h"

#include <fmt/format.h>
#include <gmock/gmock.h>

#include <filesystem>
#include <fstream>

namespace kvlm {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::StartsWith;

TEST(Records, PicturesAreRelativeToTheirFolder) {
  const std::vector<Record> records = parse_records(
      "{\"id\": \"a\", \"image\": \"x.png\", \"images\": [\"/y.png\", \"file:///z%20%.png\"]}\n"
      "\n \t\n{\"id\": 2, \"prompt\": \"@what?\"}",
      "in");
  ASSERT_EQ(records.size(), 2u);
  EXPECT_EQ(records[0].error, "");
  EXPECT_THAT(records[0].images, ElementsAre("in/x.png", "/y.png", "/z %.png"));
  EXPECT_EQ(records[1].line, 4u);
  EXPECT_EQ(records[1].prompt, "@what?") << "only the command line reads files of questions";
}

TEST(Records, VideosStandBesidePictures) {
  const std::vector<Record> records = parse_records(
      R"({"id": 1, "video": "a.mp4", "videos": ["/frames", "-"], "image": "x.png"}
{"id": 2, "video": "http://a.org/b.mp4"}
{"id": 3, "videos": "a.mp4"}
{"id": 4, "vidoe": "a.mp4"})",
      "in");
  ASSERT_EQ(records.size(), 4u);
  EXPECT_EQ(records[0].error, "");
  EXPECT_THAT(records[0].videos, ElementsAre("in/a.mp4", "/frames", "in/./-"));
  EXPECT_THAT(records[0].images, ElementsAre("in/x.png"));
  EXPECT_THAT(records[1].error, HasSubstr("video http://a.org/b.mp4 is a URL"));
  EXPECT_THAT(records[2].error, HasSubstr("a list of file names"));
  EXPECT_THAT(records[3].error, HasSubstr("did you mean \"video\"?"));
}

std::string error_of(const std::string& line, RecordUse use = RecordUse::kAnswer) {
  return parse_records(line, "", use).at(0).error;
}

TEST(Records, KeysOfOtherProgramsAreNamed) {
  for (const auto& [rest, words] :
       {std::pair(R"("question": "a")", R"(unknown key "question", which is "prompt" here)"),
        std::pair(R"("Query": "a")", R"(unknown key "Query", which is "prompt" here)"),
        std::pair(R"("file_name": "a")", R"(which is "image" here)"),
        std::pair(R"("img": "a")", R"(which is "image" here)"),
        std::pair(R"("custom_id": "a")", R"(which is "id" here)"),
        std::pair(R"("caption": "a")", R"(which only vlm-kv --data reads, as "text")"),
        std::pair(R"("text": "a")", R"(which only vlm-kv --data reads)"),
        std::pair(R"("Image": "a")", R"(did you mean "image"?)"),
        std::pair(R"("promt": "a")", R"(did you mean "prompt"?)"),
        std::pair(R"("sku": "a")", R"(has the unknown key "sku"; the keys)"),
        std::pair(R"("body": {}, "custom_id": 1)", "request of OpenAI's batch API")}) {
    const std::string error = error_of(fmt::format(R"({{"id": 1, {}}})", rest));
    EXPECT_THAT(error, HasSubstr(words));
    EXPECT_THAT(error, StartsWith("line 1: "));
  }
  EXPECT_THAT(error_of(R"({"id": 1, "image": "a", "caption": "b"})", RecordUse::kForce),
              HasSubstr(R"(which is "text" here)"));
  EXPECT_THAT(error_of(R"({"id": 1, "image": "a", "txet": "b"})", RecordUse::kForce),
              HasSubstr(R"(did you mean "text"?)"));
}

TEST(Records, ValuesOfTheWrongShapeAreNamed) {
  for (const auto& [rest, words] :
       {std::pair(R"("image": ["a"])", "expected a file name; a list goes under images"),
        std::pair(R"("images": ["a", null])", "images[1] is null; expected a list of file names"),
        std::pair(R"("images": "a")", "expected a list of file names; one name goes under image"),
        std::pair(R"("videos": "a")", "one name goes under video"),
        std::pair(R"("video": ["a"])", "a list goes under videos"),
        std::pair(R"("images": [1])", "a list of file names"),
        std::pair(R"("image": {"bytes": "a"})", "image is an object"),
        std::pair(R"("prompt": 5)", "prompt is 5"),
        std::pair(R"("prompt": ["a"])", "prompt is a list"),
        std::pair(R"("image": "a\\b.png")", "has backslashes"),
        std::pair(R"("image": "a\b.png")", "has a control character")}) {
    EXPECT_THAT(error_of(fmt::format(R"({{"id": 1, {}}})", rest)), HasSubstr(words)) << rest;
  }
  EXPECT_THAT(error_of(R"({"id": 1.0, "prompt": "a"})"), HasSubstr("a string or an integer"));
  EXPECT_THAT(error_of(R"({"prompt": "a"})"), HasSubstr("id is missing"));
  EXPECT_EQ(error_of(R"({"prompt": "a"})", RecordUse::kForce), "");
}

TEST(Records, MetaIsAnyValue) {
  for (const char* value : {R"({"n":[1,2.5],"sku":"77"})", "7", R"("a")", "[]", "null"}) {
    const Record record =
        parse_records(fmt::format(R"({{"id": 1, "prompt": "a", "meta": {}}})", value), "").at(0);
    EXPECT_EQ(record.error, "");
    EXPECT_EQ(record.meta.dump(), value);
  }
}

TEST(Records, AnArrayIsAList) {
  const std::vector<Record> records = parse_list(
      R"([
 {"id": 1, "image": "a.png"}, "b.png", "c.mp4",
 {"id": 1, "prompt": "x"}, "b.png", 5
])",
      "in.json", "in");
  ASSERT_EQ(records.size(), 6u);
  EXPECT_THAT(records[0].images, ElementsAre("in/a.png"));
  EXPECT_EQ(records[1].id, "b.png");
  EXPECT_THAT(records[2].videos, ElementsAre("in/c.mp4"));
  EXPECT_EQ(records[3].error,
            "record 4: id 1 is also the id of record 1; give each record its own");
  EXPECT_EQ(records[4].id, "b.png#2") << "asked again, answered again";
  EXPECT_THAT(records[5].error, HasSubstr("element 6: is 5; write it like {"));
  for (const auto& [element, found] :
       {std::pair("null", "is null;"), {"[\"a.png\"]", "is a list;"}, {"true", "is true;"}}) {
    EXPECT_THAT(parse_list(fmt::format("[{}]", element), "in.json", "in")[0].error,
                StartsWith(fmt::format("element 1: {}", found)));
  }
}

TEST(Records, MayHaveMarksBeforeThem) {
  const std::string record = R"({"id": 1, "prompt": "x"})";
  for (const std::string& text : {"\xef\xbb\xbf\xef\xbb\xbf" + record, "\x1e" + record + "\n",
                                  "\x1e[" + record + "]", "\n\xef\xbb\xbf \x1e" + record}) {
    const std::vector<Record> records = parse_list(text, "in", "");
    ASSERT_EQ(records.size(), 1u) << text;
    EXPECT_EQ(records[0].error, "") << text;
  }
}

TEST(Records, NamesAreAList) {
  const std::vector<Record> records =
      parse_list("a.png\r\n\r\nv/b.mp4\r\nhttp://a.org/c.png\r\na.png\r\n", "in.txt", "in");
  ASSERT_EQ(records.size(), 4u);
  EXPECT_EQ(records[0].id, "a.png");
  EXPECT_THAT(records[0].images, ElementsAre("in/a.png"));
  EXPECT_THAT(records[1].videos, ElementsAre("in/v/b.mp4"));
  EXPECT_THAT(records[2].error, HasSubstr("is a URL"));
  EXPECT_EQ(records[3].id, "a.png#2");
}

TEST(Records, AnIdIsUsedOnce) {
  const std::vector<Record> records = parse_records(
      R"({"id": 1, "prompt": "a"}
{"id": 1, "prompt": "b"}
{"id": "1", "prompt": "c"})",
      "");
  ASSERT_EQ(records.size(), 3u);
  EXPECT_EQ(records[0].error, "");
  EXPECT_THAT(records[1].error, HasSubstr("id 1 is also the id of line 1"));
  EXPECT_TRUE(records[1].id.is_null());
  EXPECT_EQ(records[2].error, "");
}

TEST(Records, ALineTooLongIsOneRecordsError) {
  const std::string text = R"({"id": 1, "prompt": "a"})" + std::string("\n") +
                           std::string((size_t{1} << 26) + 1, 'x') + "\n" +
                           R"({"id": 2, "prompt": "b"})";
  const std::vector<Record> records = parse_records(text, "");
  ASSERT_EQ(records.size(), 3u);
  EXPECT_EQ(records[0].error, "");
  EXPECT_EQ(records[1].error, "line 2: has 67108865 bytes; a record has at most 67108864");
  EXPECT_EQ(records[2].error, "");
}

TEST(Records, AListOfPicturesIsNamedBelowItsFolder) {
  const std::vector<Record> records =
      picture_records({"in/a.png", "in/deep/b.png", "in/c\xff.png"}, "in/");
  ASSERT_EQ(records.size(), 3u);
  EXPECT_EQ(records[0].id, "a.png");
  EXPECT_EQ(records[1].id, "deep/b.png");
  EXPECT_THAT(records[1].images, ElementsAre("in/deep/b.png"));
  EXPECT_THAT(records[2].error, HasSubstr("not UTF-8"));
}

std::optional<std::string> difference(const char* earlier, const char* now,
                                      const char* folder = "in") {
  return difference_of_asked(asked_of(parse_records(earlier, "in").at(0)),
                             asked_of(parse_records(now, folder).at(0)));
}

TEST(Records, WhatIsAskedIsTheSameHoweverItIsSpelt) {
  const char* record = R"({"id": 1, "image": "a.png", "prompt": "b"})";
  const nlohmann::ordered_json asked = asked_of(parse_records(record, "/in").at(0));
  EXPECT_EQ(asked, (nlohmann::ordered_json{{"images", {"/in/a.png"}}, {"prompt", "b"}}));
  EXPECT_FALSE(difference(record, R"({"id": 1, "images": ["a.png"], "prompt": "b"})"));
  EXPECT_FALSE(difference(record, record, "./x/../in/"));
  EXPECT_FALSE(difference(record, record, std::filesystem::absolute("in").c_str()));
  EXPECT_FALSE(difference_of_asked(nlohmann::ordered_json::object(), asked)) << "nothing is known";
}

TEST(Records, VideosAreAskedAbout) {
  const char* record = R"({"id": 1, "video": "/a.mp4", "prompt": "b"})";
  EXPECT_EQ(asked_of(parse_records(record, "").at(0)),
            (nlohmann::ordered_json{{"videos", {"/a.mp4"}}, {"prompt", "b"}}));
  EXPECT_FALSE(difference(record, R"({"id": 1, "videos": ["/a.mp4"], "prompt": "b"})"));
  EXPECT_EQ(difference(record, R"({"id": 1, "video": "/b.mp4", "prompt": "b"})"),
            "about /a.mp4, but this run asks about /b.mp4");
  EXPECT_EQ(difference(record, R"({"id": 1, "prompt": "b"})"),
            "about /a.mp4, but this run asks about 0 videos");
  EXPECT_EQ(difference(record, R"({"id": 1, "image": "/a.mp4", "prompt": "b"})"),
            "about 0 images, but this run asks about /a.mp4");
}

TEST(Records, FilesThatMovedAreTheSameIfTheirContentIs) {
  namespace fs = std::filesystem;
  std::string pattern = (fs::temp_directory_path() / "kvlm-records-XXXXXX").string();
  const fs::path folder = mkdtemp(pattern.data());
  const auto write = [&](const char* name, const std::string& text) {
    fs::create_directories((folder / name).parent_path());
    std::ofstream(folder / name, std::ios::binary) << text;
  };
  const std::string large(300'000, 'x');
  write("one/a.png", "a");
  write("one/b.png", large + "b");
  const char* record = R"({"id": 1, "images": ["a.png", "b.png"], "video": "v"})";
  write("one/v/1.png", "frame");
  const auto asked = asked_of(parse_records(record, folder / "one").at(0));
  EXPECT_EQ(asked["content"].size(), 3u);
  fs::rename(folder / "one", folder / "two");
  const auto now = [&] {
    return difference_of_asked(asked, asked_of(parse_records(record, folder / "two").at(0), false));
  };
  EXPECT_FALSE(now());
  write("two/v/2.png", "frame");
  EXPECT_THAT(now().value_or(""), HasSubstr("two/v"));
  write("two/b.png", large + "c");
  EXPECT_THAT(now().value_or(""), HasSubstr("two/b.png"));
  write("two/a.png", "b");
  EXPECT_THAT(now().value_or(""), HasSubstr("one/a.png, but this run asks about"));
  fs::remove_all(folder);
}

TEST(Records, WhatIsAskedOtherwiseIsNamed) {
  const char* record = R"({"id": 1, "image": "/a.png", "prompt": "b"})";
  EXPECT_EQ(difference(record, R"({"id": 1, "image": "/b.png", "prompt": "b"})"),
            "about /a.png, but this run asks about /b.png");
  EXPECT_EQ(difference(record, R"({"id": 1, "images": ["/a.png", "/b.png"], "prompt": "b"})"),
            "about 1 image, but this run asks about /b.png");
  EXPECT_EQ(difference(record, R"({"id": 1, "prompt": "b"})"),
            "about /a.png, but this run asks about 0 images");
  EXPECT_EQ(difference(record, R"({"id": 1, "image": "/a.png", "prompt": "c"})"),
            "with the prompt \"b\", but this run has the prompt \"c\"");
  EXPECT_EQ(difference(record, R"({"id": 1, "image": "/a.png"})"),
            "with the prompt \"b\", but this run has no prompt of its own");
}

}  // namespace
}  // namespace kvlm
