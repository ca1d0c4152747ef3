#include "kvcache/spec/spec.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <string>
#include <vector>

#include "kernels/base/error.h"
#include "kvcache/spec/registry.h"
#include "kvcache/spec/words.h"

namespace kvlm {
namespace {

using testing::HasSubstr;
using testing::Not;

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
    return fmt::format("--kv has no policy \"{}\"; did you mean {}? (policies: {})", name, nearest,
                       names());
  };
  EXPECT_EQ(refusal("f61"), unknown("f61", "f16"));
  EXPECT_EQ(refusal("F16"), unknown("F16", "f16"));
  EXPECT_EQ(refusal("fp16"), unknown("fp16", "f16"));
  EXPECT_EQ(refusal("bfloat16"), unknown("bfloat16", "bf16"));
  EXPECT_EQ(refusal("float32"), unknown("float32", "f32"));
  for (const char* name : {"minicache", "MiniCache,keep=0.5", "kivi + minicache"}) {
    EXPECT_EQ(
        refusal(name),
        "--kv minicache is not built: merged layers would need their own length for every KV entry "
        "in every format; share codes between layers with share=codes");
  }
  EXPECT_THAT(refusal("slerp"), HasSubstr("slerp is not built: merged layers would need"));
  EXPECT_EQ(refusal("f16\n"), unknown("f16\\x0a", "f16"));
  EXPECT_EQ(refusal("f16 \x1b[31m"),
            "--kv \"f16 \\x1b[31m\" has \"\\x1b[31m\" after a space; join parts by '+', as in f16 "
            "+ \\x1b[31m");
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

TEST(RefusedSpec, BlanksWhereCommasAreDue) {
  EXPECT_EQ(refusal("kivi bits=2"),
            "--kv \"kivi bits=2\" has options after a space; did you mean kivi,bits=2?");
  EXPECT_EQ(refusal("kivi,group=16 bits=2 residual=64"),
            "--kv \"kivi,group=16 bits=2 residual=64\" has options after a space; did you mean "
            "kivi,group=16,bits=2,residual=64?");
  EXPECT_THAT(refusal("prefixkv,keep=0.5 + kivi bits=2"), HasSubstr("did you mean kivi,bits=2?"));
  EXPECT_THAT(refusal("kivi vidkv"), HasSubstr("join parts by '+', as in kivi + vidkv"));
  EXPECT_THAT(refusal("kivi text=vidkv"), HasSubstr("join parts by '+', as in kivi + text=vidkv"));
}

TEST(RefusedSpec, NamesOfOtherPrograms) {
  for (const auto& [name, meant] :
       {std::pair("KIVI", "kivi"), std::pair("PrefixKV", "prefixkv"), std::pair("F16", "f16"),
        std::pair("q8_0", "int8"), std::pair("Q4_0", "int4"), std::pair("fp8", "int8"),
        std::pair("fp8_e4m3", "int8"), std::pair("fp4", "nf4"), std::pair("fp16", "f16"),
        std::pair("bfloat16", "bf16"), std::pair("float32", "f32"),
        std::pair("QuaRot", "int4,rotate=hadamard"), std::pair("int2", "kivi,bits=2"),
        std::pair("INT3", "kivi,bits=3"), std::pair("turboquant_4bit_nc", "turboquant"),
        std::pair("turboquant_k3v4_nc", "turboquant,key_bits=3")}) {
    EXPECT_THAT(refusal(name), HasSubstr(fmt::format("did you mean {}? ", meant))) << name;
  }
  for (const char* name : {"FastV", "kvquant", "sparsevlm", "gear", "quest"}) {
    EXPECT_THAT(refusal(name), HasSubstr(" is not built: it ")) << name;
  }
  for (const char* name : {"zstd", "cat", "attentive"}) {
    EXPECT_THAT(refusal(name), Not(HasSubstr("did you mean"))) << name;
  }
}

TEST(RefusedSpec, ChoicesThatAreFarGetNoHint) {
  EXPECT_THAT(refusal("int4,rotate=yes"), HasSubstr("did you mean rotate=hadamard?"));
  EXPECT_THAT(refusal("int4,rotate=hadamar"), HasSubstr("did you mean rotate=hadamard?"));
  EXPECT_THAT(refusal("int4,rotate=quarter"), HasSubstr("has no rotate=quarter (legal: off, had"));
  EXPECT_THAT(refusal("calibquant,bits=5"), HasSubstr("did you mean bits=4?"));
  EXPECT_THAT(refusal("f16,scope=pictures"), HasSubstr("has no scope=pictures (legal: all,"));
}

TEST(RefusedSpec, SharesThatWereMeantAsPercent) {
  EXPECT_THAT(refusal("prefixkv,keep=50"), HasSubstr("did you mean keep=0.5?"));
  EXPECT_THAT(refusal("prefixkv,keep=5"), HasSubstr("did you mean keep=0.05?"));
  EXPECT_THAT(refusal("prefixkv,keep=3"), HasSubstr("did you mean keep=1?"));
  EXPECT_THAT(refusal("prefixkv,keep=20%"), HasSubstr("did you mean keep=0.2?"));
  EXPECT_THAT(refusal("prefixkv,keep=0.01%"), HasSubstr("did you mean keep=0.5?"));
  EXPECT_THAT(refusal("prefixkv,keep=1000"), HasSubstr("did you mean keep=1?"));
  EXPECT_THAT(refusal("prefixkv,keep=-1"), HasSubstr("did you mean keep=0.001?"));
}

TEST(RefusedSpec, WordsInTheWrongPlace) {
  EXPECT_EQ(refusal("f16 f32"),
            "--kv \"f16 f32\" has \"f32\" after a space; join parts by '+', as in f16 + f32");
  EXPECT_EQ(refusal("visual=f16 f32"),
            "--kv \"visual=f16 f32\" has \"f32\" after a space; join parts by '+', as in "
            "visual=f16 + f32");
  EXPECT_EQ(
      refusal("bits=2,f16"),
      "--kv \"bits=2,f16\" begins with \"bits=2\" where a name is expected; write NAME,KEY=VALUE");
  EXPECT_EQ(refusal("=f16"),
            "--kv \"=f16\" begins with \"=f16\" where a name is expected; write NAME,KEY=VALUE");
  EXPECT_EQ(
      refusal("visual="),
      "--kv \"visual=\" begins with \"visual=\" where a name is expected; write NAME,KEY=VALUE");
  EXPECT_EQ(refusal("share"), "--kv share needs a value; write share=codes");
  EXPECT_EQ(refusal("share,from=0:0"), "--kv share needs a value; write share=codes");
  EXPECT_EQ(
      refusal("share="),
      "--kv \"share=\" begins with \"share=\" where a name is expected; write NAME,KEY=VALUE");
}

TEST(RefusedSpec, KeysAndValues) {
  EXPECT_EQ(refusal("f16,bits=2"), "--kv f16 has no option bits (its options are scope, layers)");
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
                          "from 0 to 1023, and ranges of them, joined by '/')",
                          layers));
  }
  EXPECT_EQ(refusal("share=keys"),
            "--kv share has no what=keys; did you mean what=codes? (legal: codes)");
  EXPECT_EQ(refusal("share=codes,from=3"),
            "--kv share has no from=3; did you mean from=0:0? (legal: KEYS:VALUES, each off or a "
            "layer from 0 to 1023)");
  EXPECT_EQ(refusal("share=codes,pair=tied"),
            "--kv share has no option pair (its options are what, from)");
}

TEST(RefusedSpec, PlainFormatsThatMeet) {
  EXPECT_EQ(refusal("f16 + f32"),
            "--kv \"f16 + f32\" has two formats for the same tokens, f16 and f32; keep one");
  EXPECT_EQ(refusal("f16+f16"),
            "--kv \"f16 + f16\" has two formats for the same tokens, f16 and f16; keep one");
  EXPECT_EQ(refusal("visual=f16 text=f32"),
            "--kv \"f16,scope=visual + f32,scope=text\" has two formats for unquantized tokens, "
            "f16 and f32; keep one");
  EXPECT_EQ(refusal("f16,layers=0-3 + f16,layers=3/9"),
            "--kv \"f16,layers=0-3 + f16,layers=3/9\" has two formats for layer 3, f16,layers=0-3 "
            "and f16,layers=3/9; keep one");
  EXPECT_EQ(refusal("f16 + text=f16"),
            "--kv \"f16 + f16,scope=text\" has f16 for all tokens and f16 for text tokens; did you "
            "mean f16,scope=text + f16,scope=visual?");
  EXPECT_EQ(refusal("f16 + share=codes"),
            "--kv \"f16 + share=codes\" shares codes, but no quantizer makes any; add a quantizer, "
            "for example kivi + share=codes");
  EXPECT_EQ(refusal("share=codes"),
            "--kv \"share=codes\" shares codes, but no quantizer makes any; add a quantizer, for "
            "example kivi + share=codes");
  EXPECT_EQ(refusal("share=codes + share=codes"),
            "--kv \"share=codes + share=codes\" has two sharing parts; keep one share=codes");
}

TEST(RefusedSpec, TextsTooLong) {
  EXPECT_EQ(refusal("f16" + std::string(5000, ' ')),
            "--kv is 5003 characters long; a spec has at most 4096");
}

TEST(RefusedSpec, QuantizersThatMeet) {
  EXPECT_EQ(refusal("kivi + int8"),
            "--kv \"int8 + kivi\" has two quantizers for the same tokens, int8 and kivi; keep one");
  EXPECT_EQ(refusal("kivi + f16"),
            "--kv \"f16 + kivi\" has two quantizers for the same tokens, f16 and kivi; keep one");
  EXPECT_EQ(refusal("kivi + calibquant"),
            "--kv \"calibquant + kivi\" has kivi for all tokens and calibquant for visual tokens; "
            "did you mean calibquant + kivi,scope=text?");
  EXPECT_EQ(refusal("f32 + text=kivi"),
            "--kv \"f32 + kivi,scope=text\" has f32 for all tokens and kivi for text tokens; did "
            "you mean kivi,scope=text + f32,scope=visual?");
  EXPECT_EQ(refusal("head_quantile + visual=calibquant"),
            "--kv \"calibquant + head_quantile\" has two quantizers for the same tokens, "
            "calibquant and head_quantile; keep one");
  EXPECT_EQ(refusal("text=calibquant"),
            "--kv calibquant has no scope=text; did you mean scope=visual? (legal: visual)");
  EXPECT_EQ(refusal("kivi,layers=0-3 + kivi,bits=4,layers=3-5"),
            "--kv \"kivi,layers=0-3 + kivi,bits=4,layers=3-5\" has two quantizers for layer 3, "
            "kivi,layers=0-3 and kivi,bits=4,layers=3-5; keep one");
  EXPECT_EQ(refusal("visual=kivi + calibquant,layers=0"),
            "--kv \"kivi,scope=visual + calibquant,layers=0\" has kivi in some layers and "
            "calibquant in others, but calibquant packs once, at the end of the prompt, and kivi "
            "packs tokens as they age; keep one of them");
}

TEST(RefusedSpec, SharingThatCannotBe) {
  EXPECT_EQ(refusal("xquant + share=codes"),
            "--kv \"xquant + share=codes\" has share=codes and xquant, which shares codes itself; "
            "did you mean xquant?");
  EXPECT_EQ(
      refusal("xquant,bits=2"),
      "--kv xquant has no option bits (its options are calib, dominant, "
      "eta1, eta2, gamma, group, km, kq, layer_group, merge, meta, residual, round, tail_keep, "
      "vm, vq, scope, layers, rotate, profile)");
  EXPECT_EQ(refusal("xquant,layers=0-3"),
            "--kv \"xquant,layers=0-3\" has xquant,layers=0-3, but xquant pairs layers itself; "
            "drop layers=0-3");
  EXPECT_EQ(refusal("text=xquant visual=calibquant"),
            "--kv \"calibquant + xquant,scope=text\" has another quantizer next to xquant, whose "
            "codes are shared between layers; keep xquant alone");
  EXPECT_EQ(refusal("vidkv + share=codes"),
            "--kv \"vidkv + share=codes\" shares key codes of vidkv, whose 2-bit channels differ "
            "by layer; did you mean vidkv + share=codes,from=off:0?");
  EXPECT_EQ(
      refusal("vidkv,flush=requant_all + share=codes,from=off:0"),
      "--kv \"vidkv,flush=requant_all + share=codes,from=off:0\" shares codes of "
      "vidkv,flush=requant_all, which packs old tokens again; did you mean vidkv,flush=append?");
  EXPECT_EQ(
      refusal("kivi,bits=4,layers=0-2 + kivi + share=codes"),
      "--kv \"kivi + kivi,bits=4,layers=0-2 + share=codes\" shares codes of keys between layers 2 "
      "and 3, which are packed differently; give both layers of each pair the same options");
  EXPECT_EQ(
      refusal("kivi,bits=4,layers=98 + kivi + share=codes"),
      "--kv \"kivi + kivi,bits=4,layers=98 + share=codes\" shares codes of keys between layers 98 "
      "and 99, which are packed differently; give both layers of each pair the same options");
  EXPECT_EQ(refusal("kivi + share=codes + share=codes,from=off:0"),
            "--kv \"kivi + share=codes,from=off:0 + share=codes\" has two sharing parts; keep one "
            "share=codes");
}

TEST(RefusedSpec, ValuesOfPolicies) {
  EXPECT_EQ(refusal("kiwi"),
            fmt::format("--kv has no policy \"kiwi\"; did you mean kivi? (policies: {})", names()));
  EXPECT_EQ(refusal("kivi,bits=9"),
            "--kv kivi has no bits=9; did you mean bits=8? (legal: an integer from 1 to 8)");
  EXPECT_EQ(
      refusal("kivi,bit=2"),
      "--kv kivi has no option bit; did you mean bits? (its options are bits, group, key_bits, "
      "meta, residual, tail_keep, value_bits, scope, layers, rotate, profile)");
  EXPECT_EQ(refusal("calibquant,bits=3"),
            "--kv calibquant has no bits=3; did you mean bits=2? (legal: 1, 2, 4, 8)");
  EXPECT_EQ(refusal("calibquant,tau=3"),
            "--kv calibquant has no tau=3; did you mean tau=0:3? (legal: two numbers A:B, each "
            "from 0 to 1000)");
  EXPECT_EQ(
      refusal("head_quantile,alpha=0.5"),
      "--kv head_quantile has no alpha=0.5; did you mean alpha=0.2? (legal: a number from 0 to "
      "below 0.5)");
  EXPECT_EQ(refusal("vidkv,profile=offical"),
            "--kv vidkv has no profile=offical; did you mean profile=official? (legal: default, "
            "official, paper)");
  EXPECT_EQ(refusal("f16,profile=paper"),
            "--kv f16 has no option profile (its options are scope, layers)");
}

TEST(RefusedSpec, RetentionThatCannotBe) {
  EXPECT_EQ(refusal("prefixkv + h2o"),
            "--kv \"h2o + prefixkv\" has two retention rules, h2o and prefixkv; keep one");
  EXPECT_EQ(
      refusal("h2o + xquant"),
      "--kv \"h2o + xquant\" has xquant and h2o, which keeps different tokens in each KV head; "
      "layers that share codes must keep the same tokens: did you mean h2o,head_shared=on?");
  EXPECT_EQ(refusal("snapkv,keep=0.3 + kivi + share=codes"),
            "--kv \"snapkv,keep=0.3 + kivi + share=codes\" has share=codes and snapkv,keep=0.3, "
            "which keeps different tokens in each KV head; layers that share codes must keep the "
            "same tokens: did you mean snapkv,head_shared=on,keep=0.3?");
  EXPECT_EQ(refusal("streaming,rerotate=on + kivi"),
            "--kv \"streaming,rerotate=on + kivi\" has a quantizer and streaming,rerotate=on, "
            "which rotates kept keys again; packed keys cannot be rotated: did you mean "
            "streaming,rerotate=off?");
  EXPECT_EQ(
      refusal("prefixkv,keep=0"),
      "--kv prefixkv has no keep=0; did you mean keep=0.001? (legal: a number from 0.001 to 1)");
  EXPECT_EQ(
      refusal("prefixkv,keep=50%"),
      "--kv prefixkv has no keep=50%; did you mean keep=0.5? (legal: a number from 0.001 to 1)");
  EXPECT_EQ(refusal("uniform,layers=0-3"),
            "--kv uniform has no option layers; only quantizers have scope= and layers= (its "
            "options are keep, score, sinks, last, evict, distance, profile)");
  EXPECT_EQ(refusal("text=uniform"),
            "--kv uniform has no option scope; only quantizers have scope= and layers= (its "
            "options are keep, score, sinks, last, evict, distance, profile)");
  EXPECT_EQ(refusal("snapkv,kernel=4"),
            "--kv snapkv has kernel=4, expected an odd number; use kernel=5");
}

TEST(CacheSpec, RetentionStandsBesideAnything) {
  for (const char* text :
       {"prefixkv,keep=0.5 + f16", "h2o,head_shared=on + xquant", "h2o,keep=1 + xquant",
        "streaming + xquant", "elastic + xquant", "prefixkv,merge=position + kivi",
        "prefixkv + kivi + share=codes", "streaming,rerotate=on + f32", "snapkv + vidkv",
        "vlcache + calibquant + kivi,scope=text", "pyramidkv"}) {
    EXPECT_EQ(canonical(parse_spec(text)), text);
  }
  EXPECT_EQ(canonical(parse_spec("f16 + prefixkv,keep=0.50")), "prefixkv,keep=0.5 + f16");
}

TEST(CacheSpec, PartsComeInTheOrderOfThePipeline) {
  EXPECT_EQ(canonical(parse_spec("share=codes,from=2:016 + kivi,group=32,bits=02")),
            "kivi,bits=2,group=32 + share=codes,from=2:16");
  EXPECT_EQ(canonical(parse_spec("text=kivi visual=calibquant,bits=2")),
            "calibquant,bits=2 + kivi,scope=text");
  EXPECT_EQ(parse_spec("visual=calibquant text=kivi"),
            parse_spec("kivi,scope=text + calibquant,scope=visual"));
  EXPECT_EQ(canonical(parse_spec("kivi,bits=4,layers=30/0-1 + kivi")),
            "kivi + kivi,bits=4,layers=0-1/30");
  EXPECT_EQ(canonical(parse_spec("kivi,profile=default,scope=all")), "kivi");
  EXPECT_EQ(canonical(parse_spec("xquant,eta1=1/6")), "xquant,eta1=0.16666666666666666");
}

TEST(CacheSpec, PlainLayersTakeTheScopesOfTheOthers) {
  EXPECT_EQ(canonical(parse_spec("f16,layers=0-1 + kivi")), "kivi + f16,layers=0-1");
  EXPECT_EQ(canonical(parse_spec("calibquant + f16,layers=0-1")),
            "calibquant + f16,layers=0-1,scope=visual");
  EXPECT_EQ(canonical(parse_spec("visual=calibquant text=kivi + f16,layers=0-1")),
            "calibquant + f16,layers=0-1,scope=visual + kivi,scope=text + "
            "f16,layers=0-1,scope=text");
}

/// A legal value of an option, most of the time.
std::string random_value(const OptionInfo& option, std::mt19937& random) {
  const auto number = [&](double low, double high) {
    return std::uniform_real_distribution<double>(low, high)(random);
  };
  const auto integer = [&] {
    return fmt::format("{}", static_cast<int64_t>(number(option.low - 0.4, option.high + 0.4)));
  };
  switch (option.type) {
    case OptionInfo::Type::kChoice: {
      const std::vector<std::string_view> choices = split_words(option.choices, '|');
      return std::string(choices[random() % choices.size()]);
    }
    case OptionInfo::Type::kInteger:
      return integer();
    case OptionInfo::Type::kReal:
      return fmt::format("{:.{}f}", number(option.low, option.high), random() % 18);
    case OptionInfo::Type::kRealPair:
      return fmt::format("{}:{:.3f}", number(option.low, option.high),
                         number(option.low, option.high));
    case OptionInfo::Type::kChannels:
      return random() % 2 == 0 ? "auto" : integer();
    case OptionInfo::Type::kStartLayers:
      return fmt::format("{}:{}", random() % 3 == 0 ? "off" : integer(),
                         random() % 3 == 0 ? "off" : integer());
    case OptionInfo::Type::kLayers:
      return fmt::format("{}/{}-{}", random() % 8, 8 + random() % 8, 16 + random() % 16);
  }
  return {};
}

std::string random_text(std::mt19937& random) {
  const std::vector<const PolicyInfo*> infos = policies();
  std::string text;
  for (size_t parts = 1 + random() % 3; parts > 0; --parts) {
    const PolicyInfo& info = *infos[random() % infos.size()];
    if (!text.empty()) text += random() % 2 == 0 ? "+" : " +\t";
    text += info.kind == PartKind::kSharing ? "share=codes" : std::string(info.name);
    const std::vector<const OptionInfo*> options = options_of(info);
    for (const OptionInfo* option : options) {
      if (option->key == "what" || random() % 4 != 0) continue;
      text += fmt::format(",{}{}={}", random() % 9 == 0 ? " " : "", option->key,
                          random_value(*option, random));
    }
  }
  return text;
}

TEST(CacheSpec, RandomTextsPrintWhatTheyParse) {
  std::mt19937 random(1);
  int accepted = 0;
  for (int i = 0; i < 20000; ++i) {
    std::string text = random_text(random);
    if (random() % 4 == 0) text[random() % text.size()] = static_cast<char>(random() % 128);
    SCOPED_TRACE(text);
    try {
      const CacheSpec spec = parse_spec(text);
      ++accepted;
      const std::string printed = canonical(spec);
      const CacheSpec again = parse_spec(printed);
      ASSERT_EQ(again, spec) << printed;
      ASSERT_EQ(canonical(again), printed);
    } catch (const Error& error) {
      const std::string_view message = error.what();
      ASSERT_EQ(error.code(), ErrorCode::kInvalidArgument);
      ASSERT_TRUE(message.starts_with("--kv ")) << message;
      ASSERT_LT(message.size(), 1000u) << message;
      ASSERT_TRUE(std::ranges::all_of(message, [](char c) { return c >= 0x20 && c < 0x7f; }))
          << message;
    }
  }
  EXPECT_GT(accepted, 2000) << "the texts are too wild to say much";
}

TEST(LayeredSpec, IsTheSentenceThatItSpellsOut) {
  EXPECT_EQ(canonical(layered_spec("kivi,bits=2", {{"0-1,30", "kivi,bits=4"}, {"2", "f16"}})),
            "kivi,bits=2 + kivi,bits=4,layers=0-1/30 + f16,layers=2");
  EXPECT_EQ(layered_spec("f16", {}), parse_spec("f16"));
  EXPECT_EQ(canonical(layered_spec("visual=calibquant text=kivi",
                                   {{"0-1", "f16"}, {"2", "visual=calibquant,bits=2 text=int8"}})),
            "calibquant + f16,layers=0-1,scope=visual + calibquant,bits=2,layers=2 + "
            "kivi,scope=text + f16,layers=0-1,scope=text + int8,layers=2,scope=text");
  EXPECT_EQ(canonical(layered_spec("kivi + share=codes", {{"0/1", "kivi,bits=4"}})),
            "kivi + kivi,bits=4,layers=0-1 + share=codes");
}

TEST(LayeredSpec, RefusesWhatTheSentenceRefusesAndSaysWhere) {
  const auto refused = [](std::string_view every,
                          const std::vector<std::pair<std::string, std::string>>& layers) {
    try {
      return "accepted: " + canonical(layered_spec(every, layers));
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
      return std::string(error.what());
    }
  };
  EXPECT_EQ(
      refused("kivi,bits=9", {}),
      "default: --kv kivi has no bits=9; did you mean bits=8? (legal: an integer from 1 to 8)");
  EXPECT_EQ(refused("kivi", {{"0", "kivi,bits=9"}}),
            "layers \"0\": --kv kivi has no bits=9; did you mean bits=8? (legal: an integer from 1 "
            "to 8)");
  EXPECT_EQ(refused("kivi", {{"0", "kivi,layers=3"}}),
            "layers \"0\": --kv kivi,layers=3 names its own layers; drop layers=");
  EXPECT_EQ(refused("kivi", {{"0", "kivi + share=codes"}}),
            "layers \"0\": --kv share=codes is not a quantizer, and only quantizers can differ by "
            "layer; move it to \"default\"");
  EXPECT_EQ(refused("kivi", {{"0", "calibquant"}}),
            "layers \"0\": --kv calibquant packs visual tokens where \"default\" packs all; name a "
            "quantizer (or f16) for each");
  EXPECT_EQ(refused("visual=calibquant text=kivi", {{"0", "text=int8"}}),
            "layers \"0\": --kv int8,scope=text packs text tokens where \"default\" packs text and "
            "visual; name a quantizer (or f16) for each");
  for (const char* numbers : {"", "x", "0-1,1", "3-1", "0-1/30,31", "-1", "1024", "0\n"}) {
    EXPECT_THAT(refused("kivi", {{numbers, "int8"}}),
                HasSubstr("not a list of layers from 0 to 1023, each once"));
  }
  EXPECT_EQ(refused("kivi", {{"0-3", "int8"}, {"3", "int4"}}),
            "--kv \"kivi + int8,layers=0-3 + int4,layers=3\" has two quantizers for layer 3, "
            "int8,layers=0-3 and int4,layers=3; keep one");
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
