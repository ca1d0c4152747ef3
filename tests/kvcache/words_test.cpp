#include "kvcache/spec/words.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace kvlm {
namespace {

using testing::ElementsAre;

TEST(Words, SplitsAndTrims) {
  EXPECT_THAT(split_words(" a ,\tb c,,", ','), ElementsAre("a", "b c", "", ""));
  EXPECT_THAT(split_words("", ','), ElementsAre(""));
}

TEST(Words, LayerRangesJoinWhatTouches) {
  EXPECT_EQ(parse_layer_ranges("0-1/30"), (LayerRanges{{0, 1}, {30, 30}}));
  EXPECT_EQ(parse_layer_ranges("5/3-4/0"), (LayerRanges{{0, 0}, {3, 5}}));
  EXPECT_EQ(parse_layer_ranges("0 - 1, 30", ','), std::nullopt) << "no blanks inside a range";
  EXPECT_EQ(parse_layer_ranges("0-1, 30", ','), (LayerRanges{{0, 1}, {30, 30}}));
  EXPECT_EQ(parse_layer_ranges("0-1023"), (LayerRanges{{0, 1023}}));
  for (const char* text : {"", "a", "1-", "-1", "2-1", "1/1", "0-3/3", "1024", "1/", "+1", "1.0"}) {
    EXPECT_EQ(parse_layer_ranges(text), std::nullopt) << text;
  }
}

TEST(Words, LayerRangesPrintWhatTheyParse) {
  for (const char* text : {"0", "0-1/30", "7/9/11", "0-1023"}) {
    EXPECT_EQ(layer_ranges_text(*parse_layer_ranges(text)), text);
  }
  EXPECT_TRUE(contains(*parse_layer_ranges("0-1/30"), 30));
  EXPECT_FALSE(contains(*parse_layer_ranges("0-1/30"), 2));
  EXPECT_FALSE(contains({}, 0));
}

TEST(NearestSpelling, TakesTheSmallestEditDistance) {
  const std::vector<std::string_view> names = {"kivi", "snapkv", "prefixkv", "f16"};
  EXPECT_EQ(nearest_spelling("snapvk", names), "snapkv");
  EXPECT_EQ(nearest_spelling("prefix", names), "prefixkv");
  EXPECT_EQ(nearest_spelling("kiwi", names), "kivi");
  EXPECT_EQ(nearest_spelling("f16", names), "f16");
  EXPECT_EQ(nearest_spelling("", names), "");
  EXPECT_EQ(nearest_spelling("x", {}), "");
  EXPECT_EQ(nearest_spelling("kivi" + std::string(100000, 'x'), names), "")
      << "only the first letters of a hostile word are looked at";
}

TEST(NearestSpelling, TakesNothingThatIsFar) {
  const std::vector<std::string_view> keys = {"id", "image", "images", "video", "prompt"};
  for (const char* word : {"question", "meta", "caption", "sku", "x", "i", "body", "filename"}) {
    EXPECT_EQ(nearest_spelling(word, keys), "") << word;
  }
  EXPECT_EQ(nearest_spelling("promt", keys), "prompt");
  EXPECT_EQ(nearest_spelling("vidoe", keys), "video");
  EXPECT_EQ(nearest_spelling("imags", keys), "image");
  EXPECT_EQ(nearest_spelling("ids", keys), "id");
  EXPECT_EQ(nearest_spelling("image_file", keys), "image") << "it begins so";
  EXPECT_EQ(nearest_spelling("video_duration", keys), "") << "most of it is another word";
  const std::vector<std::string_view> policies = {"f16", "xquant", "knorm", "pyramidkv"};
  for (const char* word : {"fastv", "kvquant2", "gear", "quarot"}) {
    EXPECT_EQ(nearest_spelling(word, policies), "") << word;
  }
  EXPECT_EQ(nearest_spelling("pyramid", policies), "pyramidkv");
  EXPECT_EQ(nearest_spelling("f61", policies), "f16") << "a swap is one mistake";
  EXPECT_EQ(nearest_spelling("f12", policies), "f16");
}

}  // namespace
}  // namespace kvlm
