#include "kvcache/spec.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
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
  for (const std::string_view name : {"f16", "bf16", "f32"}) {
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

/// What parse_spec says to a text that it refuses.
std::string refusal(std::string_view text) {
  try {
    return "accepted: " + canonical(parse_spec(text));
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    return error.what();
  }
}

std::string names() { return fmt::format("{}", fmt::join(part_names(), ", ")); }

TEST(RefusedSpec, EmptyParts) {
  const auto empty = [](std::string_view text) {
    return fmt::format(
        "--kv \"{}\" has an empty part; write NAME or NAME,KEY=VALUE, joined by '+' "
        "(names: {})",
        text, names());
  };
  for (const char* text : {"", "   ", "+", "f16+", "+f16", "f16++f32", " + ", ",bits=2"}) {
    EXPECT_EQ(refusal(text), empty(text));
  }
}

TEST(RefusedSpec, UnknownNames) {
  const auto unknown = [](std::string_view name, std::string_view nearest) {
    return fmt::format("--kv has no policy \"{}\"; did you mean {}? (built are {})", name, nearest,
                       names());
  };
  EXPECT_EQ(refusal("f61"), unknown("f61", "f16"));
  EXPECT_EQ(refusal("F16"), unknown("F16", "f16"));
  EXPECT_EQ(refusal("fp16"), unknown("fp16", "f16"));
  EXPECT_EQ(refusal("bfloat16"), unknown("bfloat16", "bf16"));
  EXPECT_EQ(refusal("float32"), unknown("float32", "f32"));
  EXPECT_EQ(refusal("f16\n"), unknown("f16\\x0a", "f16"));
  EXPECT_EQ(
      refusal("f16 \x1b[31m"),
      "--kv \"f16 \\x1b[31m\" has \"\\x1b[31m\" after a blank; join parts by '+', as in f16 + "
      "\\x1b[31m");
  EXPECT_THAT(refusal(std::string(500, 'z')), HasSubstr(std::string(120, 'z') + "...\""));
}

TEST(RefusedSpec, OptionsThatAreNotKeyEqualsValue) {
  const auto form = [](std::string_view word) {
    return fmt::format("--kv f16 has the option \"{}\"; write it as KEY=VALUE", word);
  };
  EXPECT_EQ(refusal("f16,bits"), form("bits"));
  EXPECT_EQ(refusal("f16,bits="), form("bits="));
  EXPECT_EQ(refusal("f16,=2"), form("=2"));
  EXPECT_EQ(refusal("f16,"), form(""));
  EXPECT_EQ(refusal("f16,,"), form(""));
  EXPECT_EQ(refusal("f16,="), form("="));
  EXPECT_EQ(refusal("f16,scope = "), form("scope="));
}

TEST(RefusedSpec, WordsInTheWrongPlace) {
  EXPECT_EQ(refusal("f16 f32"),
            "--kv \"f16 f32\" has \"f32\" after a blank; join parts by '+', as in f16 + f32");
  EXPECT_EQ(refusal("visual=f16 f32"),
            "--kv \"visual=f16 f32\" has \"f32\" after a blank; join parts by '+', as in "
            "visual=f16 + f32");
  EXPECT_EQ(refusal("bits=2,f16"),
            "--kv \"bits=2,f16\" begins with \"bits=2\" where a name is due; write NAME,KEY=VALUE");
  EXPECT_EQ(refusal("=f16"),
            "--kv \"=f16\" begins with \"=f16\" where a name is due; write NAME,KEY=VALUE");
  EXPECT_EQ(refusal("visual="),
            "--kv \"visual=\" begins with \"visual=\" where a name is due; write NAME,KEY=VALUE");
  EXPECT_EQ(refusal("share"), "--kv share does not say what; write share=codes");
  EXPECT_EQ(refusal("share,from=0:0"), "--kv share does not say what; write share=codes");
  EXPECT_EQ(refusal("share="),
            "--kv \"share=\" begins with \"share=\" where a name is due; write NAME,KEY=VALUE");
}

TEST(RefusedSpec, KeysAndValues) {
  EXPECT_EQ(refusal("f16,bits=2"),
            "--kv f16 has no option bits; did you mean scope? (its options are scope, layers)");
  EXPECT_EQ(refusal("f16, layer = 2"),
            "--kv f16 has no option layer; did you mean layers? (its options are scope, layers)");
  EXPECT_EQ(refusal("f16,scope=all,scope=text"), "--kv f16 gives scope twice; keep one");
  EXPECT_EQ(refusal("visual=f16,scope=text"), "--kv f16 gives scope twice; keep one");
  EXPECT_EQ(refusal("f16,scope=visuals"),
            "--kv f16 has no scope=visuals; did you mean scope=visual? (legal: all, visual, text)");
  for (const char* layers : {"x", "3-1", "1024", "-1", "1/1", "0-4/2", "0,1", "0//1", "0-", "1-2-3",
                             "99999999999", "0x1", "/"}) {
    const std::string text = fmt::format("f16,layers={}", layers);
    if (std::string_view(layers) == "0,1") {
      EXPECT_EQ(refusal(text), "--kv f16 has the option \"1\"; write it as KEY=VALUE");
      continue;
    }
    EXPECT_EQ(refusal(text),
              fmt::format("--kv f16 has no layers={}; did you mean layers=0-1/30? (legal: layers "
                          "from 0 to 1023 and ranges of them, joined by '/')",
                          layers));
  }
  EXPECT_EQ(refusal("share=keys"),
            "--kv share has no what=keys; did you mean what=codes? (legal: codes)");
  EXPECT_EQ(refusal("share=codes,from=3"),
            "--kv share has no from=3; did you mean from=0:0? (legal: KEYS:VALUES, each off or a "
            "layer from 0 to 1023)");
  EXPECT_EQ(refusal("share=codes,pair=ties"),
            "--kv share has no pair=ties; did you mean pair=tied? (legal: tied, subset_map, off)");
}

TEST(RefusedSpec, PlainFormatsThatMeet) {
  EXPECT_EQ(refusal("f16 + f32"),
            "--kv \"f16 + f32\" names two formats, f16 and f32, for the same slots; keep one");
  EXPECT_EQ(refusal("f16+f16"),
            "--kv \"f16 + f16\" names two formats, f16 and f16, for the same slots; keep one");
  EXPECT_EQ(refusal("visual=f16 text=f32"),
            "--kv \"f16,scope=visual + f32,scope=text\" names two formats, f16 and f32; rows that "
            "nothing packs have one, keep one");
  EXPECT_EQ(refusal("f16,layers=0-3 + f16,layers=3/9"),
            "--kv \"f16,layers=0-3 + f16,layers=3/9\" names two formats, f16,layers=0-3 and "
            "f16,layers=3/9, for layer 3; keep one");
  EXPECT_EQ(
      refusal("f16 + text=f16"),
      "--kv \"f16 + f16,scope=text\" has f16 for all slots beside f16 for text slots; did you "
      "mean f16,scope=text + f16,scope=visual?");
  EXPECT_EQ(refusal("f16 + share=codes"),
            "--kv \"f16 + share=codes\" shares codes, and nothing makes any; add a quantizer, for "
            "example kivi + share=codes");
  EXPECT_EQ(refusal("share=codes"),
            "--kv \"share=codes\" shares codes, and nothing makes any; add a quantizer, for "
            "example kivi + share=codes");
  EXPECT_EQ(refusal("share=codes + share=codes"),
            "--kv \"share=codes + share=codes\" has two sharing parts; keep one share=codes");
}

TEST(RefusedSpec, TextsTooLong) {
  EXPECT_EQ(refusal("f16" + std::string(5000, ' ')),
            "--kv is a text of 5003 characters; a spec has at most 4096");
}

TEST(CacheSpec, SpellsLayersAsFewRanges) {
  EXPECT_EQ(canonical(parse_spec("f16, layers = 30/1/0/2-4")), "f16,layers=0-4/30");
  EXPECT_EQ(canonical(parse_spec("f16,scope=text,layers=007")), "f16,layers=7,scope=text");
}

TEST(CacheSpec, WordsOfScopesAreParts) {
  EXPECT_EQ(canonical(parse_spec("visual=f16\t text =f16")), "f16,scope=visual + f16,scope=text");
  EXPECT_EQ(parse_spec("text=f16,layers=2 visual=f16"),
            parse_spec("f16,scope=visual + f16,layers=2,scope=text"));
  EXPECT_EQ(canonical(parse_spec("text=f32")), "f32,scope=text");
}

}  // namespace
}  // namespace kvlm
