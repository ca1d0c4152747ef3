#include "tools/run/records.h"

#include <gmock/gmock.h>

namespace kvlm {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

TEST(Records, PicturesAreRelativeToTheirFolder) {
  const std::vector<Record> records = parse_records(
      "{\"id\": \"a\", \"image\": \"x.png\", \"images\": [\"/y.png\", \"file:///z%20%.png\"]}\r\n"
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
