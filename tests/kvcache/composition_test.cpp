#include "kvcache/composition.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "kernels/base/error.h"
#include "kvcache/registry.h"

namespace kvlm {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

CacheShape shape_of(int layers) { return {layers, 4, 2, 64, std::vector<float>(32, 1.0f)}; }

ComposedParts parts_of(const std::string& text, const CacheShape& shape) {
  const CacheSpec spec = parse_spec(text);
  return make_parts(compose(spec), shape, nullptr);
}

TEST(Composition, FindsWhatPacksEachScopeOfEachLayer) {
  const CacheSpec spec =
      parse_spec("prefixkv + visual=calibquant text=kivi + f32,layers=1 + share=codes,from=2:2");
  const Composition c = compose(spec);
  EXPECT_EQ(c.retention->name, "prefixkv");
  EXPECT_EQ(c.sharing->name, "share");
  EXPECT_TRUE(c.split);
  EXPECT_TRUE(c.packs());
  EXPECT_EQ(c.rows, DType::kF32);
  ASSERT_EQ(c.packers.size(), 4u);
  const auto name = [&](Scope scope, int layer) -> std::string {
    const int packer = c.packer(scope, layer);
    return packer < 0 ? "rows" : c.packers[static_cast<size_t>(packer)].part->name;
  };
  EXPECT_EQ(name(Scope::kVisual, 0), "calibquant");
  EXPECT_EQ(name(Scope::kText, 0), "kivi");
  EXPECT_EQ(name(Scope::kVisual, 1), "rows");
  EXPECT_EQ(name(Scope::kText, 1), "rows");
  EXPECT_EQ(name(Scope::kText, 2), "kivi");
}

TEST(Composition, PlainPartsAloneDoNotSplit) {
  const CacheSpec spec = parse_spec("uniform + bf16,scope=text");
  const Composition c = compose(spec);
  EXPECT_FALSE(c.split);
  EXPECT_FALSE(c.packs());
  EXPECT_EQ(c.packer(Scope::kAll, 0), -1);
  EXPECT_EQ(c.rows, DType::kBF16);
}

TEST(ComposedParts, SharePairsFromWhereTheyStart) {
  const ComposedParts parts = parts_of("kivi + share=codes,from=2:off", shape_of(5));
  EXPECT_THAT(parts.share.key_owner, ElementsAre(0, 1, 2, 2, 4));
  EXPECT_THAT(parts.share.value_owner, ElementsAre(0, 1, 2, 3, 4));
  EXPECT_TRUE(parts.pairs.empty()) << "nothing is dropped";
  EXPECT_THROW(parts_of("kivi + share=codes,from=off:off", shape_of(4)), Error) << "an idle part";
  EXPECT_THROW(parts_of("kivi + share=codes", shape_of(1)), Error);
}

TEST(ComposedParts, PairsKeepTheSameSlots) {
  EXPECT_THAT(parts_of("uniform + kivi + share=codes,from=2:off", shape_of(5)).pairs,
              ElementsAre(0, 1, 2, 2, 4));
  EXPECT_TRUE(parts_of("streaming + kivi + share=codes", shape_of(4)).pairs.empty())
      << "it keeps the same slots anyway";
}

/// To the bit: a quantizer beside it must not hold rows back for eviction to find.
TEST(ComposedParts, KeepingEveryRowIsNoRetention) {
  const ComposedParts all = parts_of("uniform,keep=1 + kivi", shape_of(2));
  const ComposedParts alone = parts_of("kivi", shape_of(2));
  const ComposedParts half = parts_of("uniform,keep=0.5 + kivi", shape_of(2));
  EXPECT_EQ(all.retention, nullptr);
  const auto hold = [](const ComposedParts& parts) {
    return parts.quantizers[0]->plan(Part::kKeys, 0).flush.hold;
  };
  EXPECT_EQ(hold(all), hold(alone));
  EXPECT_EQ(hold(half), 32) << "specs 10.3";
}

TEST(Unsupported, KnowsTheDecodersShape) {
  const auto reason = [](const char* text, const CacheShape& shape) {
    return unsupported(parse_spec(text), shape).value_or("");
  };
  EXPECT_EQ(reason("kivi", shape_of(4)), "");
  EXPECT_THAT(reason("xquant,kq=3,km=2", shape_of(8)), HasSubstr("use an even kq"));
  EXPECT_EQ(
      reason("asymkv,key_layers=39 + share=codes", shape_of(40)),
      "--kv \"asymkv,key_layers=39 + share=codes\" shares codes of keys between layers 38 and "
      "39, which pack them differently; let each pair of layers be packed alike");
  EXPECT_EQ(reason("asymkv,key_layers=39 + share=codes", shape_of(38)), "");
  EXPECT_EQ(reason("kivi + f16,layers=0-1/30", shape_of(8)),
            "--kv f16,layers=0-1/30 names layer 30, and this decoder has layers 0 to 7; name those "
            "alone");
  EXPECT_EQ(reason("kivi + f16,layers=7", shape_of(8)), "");
  CacheShape without_one_position = shape_of(4);
  without_one_position.rope_frequencies.clear();
  EXPECT_THAT(reason("streaming,rerotate=on", without_one_position), HasSubstr("rerotate"));
  EXPECT_EQ(reason("streaming", without_one_position), "");
  EXPECT_EQ(reason("xquant,kq=1024,km=0", shape_of(5)), "") << "all keys at 2 bits";
}

TEST(Conflicts, WhatCannotWorkTogetherIsRefused) {
  const auto reason = [](const char* text) {
    try {
      return unsupported(parse_spec(text), shape_of(4)).value_or("");
    } catch (const Error& error) {
      return std::string(error.what());
    }
  };
  EXPECT_THAT(reason("vidkv,protect=0.2,scope=visual"), HasSubstr("for all rows?"));
  EXPECT_THAT(reason("snapkv,keep=0.5 + vidkv,scope=text"), HasSubstr("its mask is learned"));
  EXPECT_THAT(reason("h2o,keep=0.5 + vidkv,scope=text"), HasSubstr("head_shared=on"));
  EXPECT_EQ(reason("h2o,keep=0.5,head_shared=on + vidkv,scope=text"), "");
  EXPECT_EQ(reason("h2o,keep=0.5 + vidkv"), "");
}

TEST(Conflicts, AnOptionThatWouldDoNothingIsRefused) {
  const auto reason = [](const char* text) {
    try {
      make_parts(compose(parse_spec(text)), shape_of(4), nullptr);
      return std::string();
    } catch (const Error& error) {
      return std::string(error.what());
    }
  };
  for (const char* text :
       {"calibquant,kappa_k=0.9", "calibquant,shrink=kappa,eta_v=0.1", "calibquant,bits=4,tau=0:2",
        "kivi,bits=3,key_bits=4,value_bits=2", "vidkv,value_bits=2,protect=0.2"}) {
    EXPECT_THAT(reason(text), HasSubstr("has no effect")) << text;
  }
  EXPECT_THAT(reason("vidkv,key_bits=1.00001"), HasSubstr("four decimals"));
  EXPECT_EQ(reason("calibquant,shrink=kappa,kappa_k=0.9"), "");
  EXPECT_EQ(reason("calibquant,bits=4,calib_bits=4,tau=0:2"), "");
}

}  // namespace
}  // namespace kvlm
