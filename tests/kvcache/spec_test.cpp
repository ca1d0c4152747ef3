#include "kvcache/spec.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "kernels/base/error.h"
#include "kvcache/registry.h"

namespace kvlm {
namespace {

using testing::HasSubstr;

TEST(CacheSpec, CanonicalTextParsesToTheSameSpec) {
  for (const std::string_view name : part_names()) {
    const CacheSpec spec = parse_spec(name);
    EXPECT_EQ(spec.parts, (std::vector<SpecPart>{{std::string(name), {}}}));
    EXPECT_EQ(canonical(spec), name);
    EXPECT_EQ(parse_spec(canonical(spec)), spec);
  }
}

TEST(CacheSpec, CanonicalTextJoinsPartsAndOptions) {
  const CacheSpec spec{
      {{"kivi", {{"bits", "2"}, {"group", "32"}}}, {"prefixkv", {{"keep", "0.5"}}}}};
  EXPECT_EQ(canonical(spec), "kivi,bits=2,group=32 + prefixkv,keep=0.5");
  EXPECT_EQ(canonical({}), "");
}

TEST(CacheSpec, TakesSpacesAroundEveryWord) {
  EXPECT_EQ(parse_spec("  f16\t"), parse_spec("f16"));
  EXPECT_EQ(canonical(parse_spec("\t bf16 ")), "bf16");
}

struct Malformed {
  const char* text;
  std::vector<const char*> words;
};

class MalformedSpec : public testing::TestWithParam<Malformed> {};

TEST_P(MalformedSpec, IsRefusedWithTheWordAndTheCure) {
  try {
    parse_spec(GetParam().text);
    FAIL() << "expected an Error";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    for (const char* word : GetParam().words) EXPECT_THAT(error.what(), HasSubstr(word));
  }
}

INSTANTIATE_TEST_SUITE_P(
    , MalformedSpec,
    testing::Values(Malformed{"", {"empty part", "names: f16, bf16, f32"}},
                    Malformed{"   ", {"empty part"}}, Malformed{"+", {"empty part", "\"+\""}},
                    Malformed{"f16+", {"empty part", "f16+"}}, Malformed{"+f16", {"empty part"}},
                    Malformed{"f16++f32", {"empty part"}}, Malformed{",bits=2", {"empty part"}},
                    Malformed{"f61", {"\"f61\"", "did you mean f16?"}},
                    Malformed{"F16", {"\"F16\"", "did you mean f16?"}},
                    Malformed{"fp16", {"\"fp16\"", "did you mean f16?"}},
                    Malformed{"bfloat16", {"\"bfloat16\"", "did you mean bf16?"}},
                    Malformed{"float32", {"\"float32\"", "did you mean f32?"}},
                    Malformed{"f16 f32", {"\"f16 f32\"", "built are f16, bf16, f32"}},
                    Malformed{"zebra", {"\"zebra\"", "did you mean"}},
                    Malformed{"f16,bits=2", {"f16", "no option bits", "write --kv f16"}},
                    Malformed{"f16, bits = 2", {"no option bits"}},
                    Malformed{"f16,bits", {"\"bits\"", "KEY=VALUE"}},
                    Malformed{"f16,bits=", {"\"bits=\"", "KEY=VALUE"}},
                    Malformed{"f16,=2", {"\"=2\"", "KEY=VALUE"}},
                    Malformed{"f16,", {"the option \"\"", "KEY=VALUE"}},
                    Malformed{"f16,,", {"the option \"\""}}, Malformed{"f16,=", {"KEY=VALUE"}},
                    Malformed{"f16,bits=2,bits=4", {"bits twice", "keep one"}},
                    Malformed{"f16 + f32", {"two formats, f16 and f32", "keep one"}},
                    Malformed{"f16+f16", {"two formats"}},
                    Malformed{"f16\n", {"did you mean f16?"}}));

TEST(NearestSpelling, TakesTheSmallestEditDistance) {
  const std::vector<std::string_view> names = {"kivi", "snapkv", "prefixkv", "f16"};
  EXPECT_EQ(nearest_spelling("snapvk", names), "snapkv");
  EXPECT_EQ(nearest_spelling("prefix", names), "prefixkv");
  EXPECT_EQ(nearest_spelling("kiwi", names), "kivi");
  EXPECT_EQ(nearest_spelling("f16", names), "f16");
  EXPECT_EQ(nearest_spelling("", names), "f16") << "the shortest";
  EXPECT_EQ(nearest_spelling("x", {}), "");
}

}  // namespace
}  // namespace kvlm
