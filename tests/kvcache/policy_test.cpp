#include "kvcache/spec/policy.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <string>
#include <vector>

#include "kernels/base/error.h"

namespace kvlm {
namespace {

using testing::ElementsAre;
using Type = OptionInfo::Type;

constexpr OptionInfo kOptions[] = {
    {.key = "bits", .type = Type::kInteger, .low = 1, .high = 8, .standard = "2", .official = "1"},
    {.key = "alpha",
     .type = Type::kReal,
     .low = 0,
     .high = 0.5,
     .open_high = true,
     .standard = "0.2",
     .paper = "0.05"},
    {.key = "eta", .type = Type::kReal, .low = 0, .high = 1, .standard = "1/6"},
    {.key = "tau",
     .type = Type::kRealPair,
     .low = 0,
     .high = 10,
     .standard = "0:3",
     .official = "0:3",
     .paper = "0:0"},
    {.key = "residual", .type = Type::kChannels, .low = 1, .high = 64, .standard = "auto"},
    {.key = "round", .choices = "nearest|floor", .standard = "nearest", .paper = "floor"},
    {.key = "from", .type = Type::kStartLayers, .low = 0, .high = 99, .standard = "0:off"},
};

constexpr PolicyInfo kInfo{.name = "example", .options = kOptions};

OptionValues values(std::vector<std::pair<std::string, std::string>> options) {
  return OptionValues(kInfo, SpecPart{"example", std::move(options)});
}

TEST(OptionValues, TakeTheDefaultWhereNothingIsWritten) {
  const OptionValues v = values({});
  EXPECT_EQ(v.integer("bits"), 2);
  EXPECT_EQ(v.real("alpha"), 0.2);
  EXPECT_EQ(v.real("eta"), 1.0 / 6);
  EXPECT_EQ(v.real_pair("tau"), std::pair(0.0, 3.0));
  EXPECT_EQ(v.text("residual"), "auto");
  EXPECT_EQ(v.integer("residual"), -1);
  EXPECT_EQ(v.text("round"), "nearest");
  EXPECT_EQ(v.start_layers("from"), std::pair(0, std::numeric_limits<int>::max()));
  EXPECT_EQ(v.text("profile"), "default");
  EXPECT_EQ(v.text("scope"), "all");
  EXPECT_FALSE(v.given("bits"));
}

TEST(OptionValues, PreferWhatIsWrittenThenTheProfileThenTheDefault) {
  const OptionValues paper = values({{"alpha", "0.1"}, {"profile", "paper"}});
  EXPECT_EQ(paper.real("alpha"), 0.1) << "written";
  EXPECT_EQ(paper.text("round"), "floor") << "the profile's";
  EXPECT_EQ(paper.integer("bits"), 2) << "the paper says nothing else";
  EXPECT_EQ(paper.real_pair("tau"), std::pair(0.0, 0.0));
  EXPECT_TRUE(paper.given("alpha"));
  EXPECT_FALSE(paper.given("round"));
  const OptionValues official = values({{"profile", "official"}});
  EXPECT_EQ(official.integer("bits"), 1);
  EXPECT_EQ(official.text("round"), "nearest");
}

/// What checked_value says, or the canonical spelling.
std::string check(std::string_view key, std::string_view value) {
  for (const OptionInfo& option : kOptions) {
    if (option.key != key) continue;
    try {
      return checked_value("example", option, value);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
      return error.what();
    }
  }
  return "no such option";
}

TEST(CheckedValue, SpellsNumbersAsShortAsTheyAreExact) {
  EXPECT_EQ(check("bits", "02"), "2");
  EXPECT_EQ(check("alpha", "0.10"), "0.1");
  EXPECT_EQ(check("alpha", ".25"), "0.25");
  EXPECT_EQ(check("alpha", "1e-1"), "0.1");
  EXPECT_EQ(check("alpha", "-0"), "0");
  EXPECT_EQ(check("alpha", "1e-7"), "1e-07");
  EXPECT_EQ(check("alpha", "1/4"), "0.25");
  EXPECT_EQ(check("eta", "1/6"), "0.16666666666666666");
  EXPECT_EQ(check("eta", "0.16666666666666666"), "0.16666666666666666");
  EXPECT_EQ(check("tau", "0.0:3.00"), "0:3");
  EXPECT_EQ(check("residual", "auto"), "auto");
  EXPECT_EQ(check("residual", "064"), "64");
  EXPECT_EQ(check("from", "02:off"), "2:off");
}

TEST(CheckedValue, RefusesWithTheLegalValuesAndTheNearest) {
  const auto bits = [](const std::string& found, const std::string& nearest) {
    return "--kv example has no bits=" + found + "; did you mean bits=" + nearest +
           "? (legal: an integer from 1 to 8)";
  };
  EXPECT_EQ(check("bits", "9"), bits("9", "8"));
  EXPECT_EQ(check("bits", "0"), bits("0", "1"));
  EXPECT_EQ(check("bits", "-3"), bits("-3", "1"));
  EXPECT_EQ(check("bits", "2.0"), bits("2.0", "2"));
  EXPECT_EQ(check("bits", "1.58"), bits("1.58", "2"));
  EXPECT_EQ(check("bits", "two"), bits("two", "2"));
  EXPECT_EQ(check("bits", "99999999999999999999"), bits("99999999999999999999", "8"));
  EXPECT_EQ(check("bits", "0x2"), bits("0x2", "2"));
  EXPECT_EQ(check("bits", "nan"), bits("nan", "2"));
  const auto alpha = [](const std::string& found, const std::string& nearest) {
    return "--kv example has no alpha=" + found + "; did you mean alpha=" + nearest +
           "? (legal: a number from 0 to below 0.5)";
  };
  EXPECT_EQ(check("alpha", "0.5"), alpha("0.5", "0.2"));
  EXPECT_EQ(check("alpha", "-0.1"), alpha("-0.1", "0"));
  EXPECT_EQ(check("alpha", "inf"), alpha("inf", "0.2"));
  EXPECT_EQ(check("alpha", "nan"), alpha("nan", "0.2"));
  EXPECT_EQ(check("alpha", "1/0"), alpha("1/0", "0.2"));
  EXPECT_EQ(check("alpha", "1e999"), alpha("1e999", "0.2"));
  EXPECT_EQ(check("alpha", "1/2/3"), alpha("1/2/3", "0.2"));
  EXPECT_EQ(check("eta", "1.5"),
            "--kv example has no eta=1.5; did you mean eta=1? (legal: a number from 0 to 1)");
  for (const char* tau : {"3", "0:", ":3", "0:3:1", "0:11", "a:b", ":"}) {
    EXPECT_EQ(check("tau", tau),
              std::string("--kv example has no tau=") + tau +
                  "; did you mean tau=0:3? (legal: two numbers A:B, each from 0 to 10)");
  }
  EXPECT_EQ(check("residual", "65"),
            "--kv example has no residual=65; did you mean residual=64? (legal: auto or an integer "
            "from 1 to 64)");
  EXPECT_EQ(
      check("residual", "automatic"),
      "--kv example has no residual=automatic; did you mean residual=auto? (legal: auto or an "
      "integer from 1 to 64)");
  EXPECT_EQ(check("round", "flor"),
            "--kv example has no round=flor; did you mean round=floor? (legal: nearest, floor)");
  EXPECT_EQ(check("round", "nearest|floor"),
            "--kv example has no round=nearest|floor; did you mean round=nearest? (legal: nearest, "
            "floor)");
  EXPECT_EQ(check("from", "off"),
            "--kv example has no from=off; did you mean from=0:off? (legal: KEYS:VALUES, each off "
            "or a layer from 0 to 99)");
}

TEST(OptionValues, RefuseAKeyThatThePolicyHasNot) {
  try {
    values({{"bit", "2"}});
    FAIL() << "expected an Error";
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(),
                 "--kv example has no option bit; did you mean bits? (its options are bits, alpha, "
                 "eta, tau, residual, round, from, scope, layers, rotate, profile)");
  }
}

TEST(OptionsOf, AddsWhatTheKindTakes) {
  const auto keys = [](const PolicyInfo& info) {
    std::vector<std::string_view> found;
    for (const OptionInfo* option : options_of(info)) found.push_back(option->key);
    return found;
  };
  const std::span<const OptionInfo> one = std::span(kOptions).first(1);
  EXPECT_THAT(keys({.name = "q", .options = one}),
              ElementsAre("bits", "scope", "layers", "rotate", "profile"));
  EXPECT_THAT(keys({.name = "r", .kind = PartKind::kRetention, .options = one}),
              ElementsAre("bits", "profile"));
  EXPECT_THAT(keys({.name = "s", .kind = PartKind::kSharing, .options = one}), ElementsAre("bits"));
  EXPECT_THAT(keys({.name = "f16"}), ElementsAre("scope", "layers"));
  static constexpr OptionInfo kOwnScope[] = {
      {.key = "scope", .choices = "visual", .standard = "visual"}};
  EXPECT_THAT(keys({.name = "v", .options = kOwnScope}),
              ElementsAre("scope", "layers", "rotate", "profile"));
}

}  // namespace
}  // namespace kvlm
