#include "runtime/loading/config.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>

#include "tests/runtime/loading/safetensors_writer.h"

namespace kvlm {
namespace {

using nlohmann::json;
using test::error_of;
using test::failure;
using testing::AllOf;
using testing::HasSubstr;
using testing::Not;

std::string parse_failure(std::string_view text) {
  std::string message = failure([&] { parse_json(text, "x.json"); });
  EXPECT_THAT(message, testing::StartsWith("x.json: "));
  return message;
}

template <class Read>
std::string read_failure(const json& object, Read&& read) {
  return failure([&] { read(ConfigReader(object, "config.json")); });
}

TEST(ParseJson, BuildsWhatNlohmannBuilds) {
  for (const char* text :
       {"null", "true", " [] ", "{}", "-1", "18446744073709551615", "1.5e3",
        "\"a\\u00e9\\ud83d\\ude00\"",
        R"({"a":{"b":[1,[2,{"c":null}],"x"],"d":{}},"e":[[],[[]]],"f":{"a":1,"b":2}})"}) {
    EXPECT_EQ(parse_json(text, "x.json"), json::parse(text)) << text;
  }
}

TEST(ParseJson, KeepsNamesThatRepeatInDifferentObjects) {
  EXPECT_EQ(parse_json(R"([{"a":1},{"a":2},{"a":{"a":3}}])", "x.json")[2]["a"]["a"], 3);
}

TEST(ParseJson, RefusesDuplicateKeysAndNamesThePlace) {
  EXPECT_THAT(parse_failure(R"({"a":1,"a":1})"), HasSubstr("key \"a\" appears twice"));
  EXPECT_THAT(parse_failure(R"({"t":{"list":[0,{"a":1,"a":2}]}})"),
              HasSubstr("key \"a\" in t.list[1] appears twice"));
  EXPECT_THAT(parse_failure(R"({"a":1,"\u0061":2})"), HasSubstr("appears twice"));
}

/// Every value takes some 20 bytes or more of memory for its two of text.
TEST(ParseJson, BoundsTheNumberOfValues) {
  const auto list = [](size_t values) {
    std::string text = "[";
    for (size_t i = 1; i < values; ++i) text += "0,";
    return text + "0]";
  };
  EXPECT_EQ(parse_json(list(100'000), "x.json").size(), 100'000u);
  EXPECT_THAT(parse_failure(list(5'000'000)), HasSubstr("holds more than 4194304 values"));
}

TEST(ParseJson, BoundsNesting) {
  const auto nested = [](size_t depth) {
    return std::string(depth, '[') + std::string(depth, ']');
  };
  EXPECT_NO_THROW(parse_json(nested(64), "x.json"));
  EXPECT_THAT(parse_failure(nested(65)), HasSubstr("nest deeper than 64"));
  EXPECT_THAT(parse_failure(std::string(1'000'000, '[')), HasSubstr("nest deeper than 64"));
  std::string objects;
  for (int i = 0; i < 65; ++i) objects += "{\"a\":";
  EXPECT_THAT(parse_failure(objects), HasSubstr("nest deeper than 64"));
}

TEST(ParseJson, RefusesEverythingThatIsNotOneValue) {
  EXPECT_THAT(parse_failure(""), HasSubstr("line 1, column 1"));
  EXPECT_THAT(parse_failure("{} x"), HasSubstr("line 1, column 4"));
  EXPECT_THAT(parse_failure("{}{}"), HasSubstr("expected end of input"));
  EXPECT_THAT(parse_failure("{\"a\":1,}"), HasSubstr("line 1, column 8"));
  EXPECT_THAT(parse_failure("{\n  \"a\": nul\n}"), HasSubstr("line 2, column"));
  EXPECT_THAT(parse_failure("// comment\n{}"), HasSubstr("line 1, column 1"));
  EXPECT_THAT(parse_failure("[NaN]"), HasSubstr("line 1, column 2"));
  EXPECT_THAT(parse_failure("[1e999]"), HasSubstr("number overflow"));
}

TEST(ParseJson, RefusesBrokenText) {
  EXPECT_THAT(parse_failure("\xef\xbb\xbf{}"), HasSubstr("byte order mark"));
  EXPECT_THAT(parse_failure("\"\xff\""), HasSubstr("UTF-8"));
  EXPECT_THAT(parse_failure("\"\xc0\xaf\""), HasSubstr("UTF-8"));      // overlong
  EXPECT_THAT(parse_failure("\"\xed\xa0\x80\""), HasSubstr("UTF-8"));  // a surrogate
  EXPECT_THAT(parse_failure("\"\\ud800\""), HasSubstr("surrogate"));
  EXPECT_THAT(parse_failure(std::string_view("{}\0{", 4)), HasSubstr("column 3: a NUL byte"));
}

TEST(ParseJson, KeepsMessagesShortAndPrintable) {
  const std::string message = parse_failure("[\x1b[31m" + std::string(100'000, 'x'));
  EXPECT_LT(message.size(), 1000u);
  EXPECT_EQ(message.find('\x1b'), std::string::npos);
  EXPECT_LT(parse_failure("[\"" + std::string(100'000, 'x')).size(), 1000u);
}

TEST(ConfigReader, AbsentAndNullTakeTheDefault) {
  const json object = {{"null", nullptr}};
  const ConfigReader config(object, "config.json");
  for (const char* key : {"null", "absent"}) {
    EXPECT_FALSE(config.has(key));
    EXPECT_EQ(config.integer(key, 7, 1, 3), 7);  // a default is not held to the range
    EXPECT_EQ(config.number(key, 0.5, 0, 1), 0.5);
    EXPECT_TRUE(config.boolean(key, true));
    EXPECT_EQ(config.string(key, "gelu"), "gelu");
    EXPECT_TRUE(config.raw(key).is_null());
    EXPECT_EQ(config.object(key).integer("x", 3, 0, 9), 3);
  }
}

TEST(ConfigReader, ReadsWhatIsThere) {
  const json object = json::parse(
      R"({"i":-3,"whole":14.0,"n":1e-5,"b":false,"s":"silu","o":{"p":{"x":5}},"zero":0})");
  const ConfigReader config(object, "config.json");
  EXPECT_TRUE(config.has("zero"));
  EXPECT_EQ(config.required_integer("i", -3, -3), -3);
  EXPECT_EQ(config.integer("whole", 0, 0, 100), 14);
  EXPECT_EQ(config.number("n", 0, 0, 1), 1e-5);
  EXPECT_EQ(config.number("i", 0, -10, 10), -3);
  EXPECT_FALSE(config.boolean("b", true));
  EXPECT_EQ(config.required_string("s"), "silu");
  EXPECT_EQ(config.object("o").object("p").required_integer("x", 0, 9), 5);
  EXPECT_EQ(config.object("o").object("p").path(), "config.json: o.p");
}

TEST(ConfigReader, RefusesIntegersOutOfRangeWithoutTruncating) {
  const json object = json::parse(
      R"({"small":-3,"wraps":4294967297,"huge":18446744073709551615,"beyond":1e30,"fraction":1.5,
          "text":"3","truth":true,"text_config":{"hidden_size":-3}})");
  const auto failure = [&](const char* key) {
    return read_failure(object, [&](const ConfigReader& c) { c.integer(key, 1, 1, 1048576); });
  };
  EXPECT_EQ(failure("small"), "config.json: small is -3; expected 1 to 1048576");
  EXPECT_THAT(failure("wraps"), HasSubstr("wraps is 4294967297"));
  EXPECT_THAT(failure("huge"), HasSubstr("huge is 18446744073709551615"));
  EXPECT_THAT(failure("beyond"), HasSubstr("beyond is 1e+30"));
  EXPECT_THAT(failure("fraction"), HasSubstr("fraction is 1.5"));
  EXPECT_THAT(failure("text"), HasSubstr("text is \"3\""));
  EXPECT_THAT(failure("truth"), HasSubstr("truth is true"));
  EXPECT_EQ(read_failure(object,
                         [](const ConfigReader& c) {
                           c.object("text_config").required_integer("hidden_size", 1, 1048576);
                         }),
            "config.json: text_config.hidden_size is -3; expected 1 to 1048576");
  EXPECT_THAT(read_failure(object,
                           [](const ConfigReader& c) {
                             c.required_integer("beyond", 0, std::numeric_limits<int64_t>::max());
                           }),
              HasSubstr("expected an integer from 0"));
}

TEST(ConfigReader, RequiredKeysMustBeThere) {
  const json object = {{"null", nullptr}};
  EXPECT_THAT(read_failure(object, [](const ConfigReader& c) { c.required_integer("a", 1, 2); }),
              HasSubstr("a is missing; expected 1 to 2"));
  EXPECT_THAT(read_failure(object, [](const ConfigReader& c) { c.required_string("null"); }),
              HasSubstr("null is missing; expected a string"));
}

TEST(ConfigReader, TypesAreStrict) {
  const json object = json::parse(R"({"one":1,"yes":"true","list":[1],"o":{},"n":"1e-5","big":2})");
  using C = const ConfigReader&;
  EXPECT_THAT(read_failure(object, [](C c) { c.boolean("one", false); }),
              HasSubstr("one is 1; expected true or false"));
  EXPECT_THAT(read_failure(object, [](C c) { c.boolean("yes", false); }),
              HasSubstr("yes is \"true\""));
  EXPECT_THAT(read_failure(object, [](C c) { c.string("list", ""); }),
              HasSubstr("list is a list; expected a string"));
  EXPECT_THAT(read_failure(object, [](C c) { c.string("o", ""); }), HasSubstr("o is an object"));
  EXPECT_THAT(read_failure(object, [](C c) { c.number("n", 0, 0, 1); }),
              HasSubstr("expected a number from 0 to 1"));
  EXPECT_THAT(read_failure(object, [](C c) { c.number("big", 0, 0, 1); }),
              HasSubstr("big is 2; expected a number from 0 to 1"));
  EXPECT_THAT(read_failure(object, [](C c) { c.object("list"); }), HasSubstr("expected an object"));
  EXPECT_THAT(error_of([] { ConfigReader(json::array(), "config.json"); }).what(),
              HasSubstr("config.json is a list; expected an object"));
}

TEST(ConfigReader, MakesHostileTextPrintable) {
  const json object = {{"act", "\x1b[2J" + std::string(10'000, 'a')}};
  const std::string message =
      read_failure(object, [](const ConfigReader& c) { c.fail("act", "gelu or silu"); });
  EXPECT_THAT(message, AllOf(HasSubstr("\\x1b[2Ja"), HasSubstr("expected gelu or silu"),
                             Not(HasSubstr("\x1b"))));
  EXPECT_LT(message.size(), 300u);
}

}  // namespace
}  // namespace kvlm
