#include "kvcache/plan/planner.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "kernels/base/error.h"
#include "tests/kvcache/plans.h"

namespace kvlm {
namespace {

using test::plan_of;
using test::unsupported;
using testing::ElementsAre;
using testing::HasSubstr;

CacheShape shape_of(int layers) { return {layers, 4, 2, 64, std::vector<float>(32, 1.0f)}; }

TEST(CachePlan, FindsWhatPacksEachScopeOfEachLayer) {
  // The pairs (2, 3) and (4, 5) are packed alike.
  const auto plan = plan_of(
      "prefixkv + visual=calibquant text=kivi + f32,layers=1 + share=codes,from=2:2", shape_of(6));
  EXPECT_EQ(plan->retention_part->name, "prefixkv");
  EXPECT_EQ(plan->sharing_part->name, "share");
  EXPECT_TRUE(plan->split);
  EXPECT_TRUE(plan->packs());
  EXPECT_FALSE(plan->plain());
  EXPECT_EQ(plan->rows, DType::kF32);
  ASSERT_EQ(plan->packers.size(), 4u);
  const auto name = [&](Scope scope, int layer) -> std::string {
    const CachePlan::Packer* packer = plan->packer(scope, layer);
    const StoreIndex store = scope == Scope::kVisual ? kVisual : kRest;
    EXPECT_EQ(plan->quantizers[store][static_cast<size_t>(layer)],
              packer == nullptr ? nullptr : packer->quantizer.get());
    return packer == nullptr ? "rows" : packer->part.name;
  };
  EXPECT_EQ(name(Scope::kVisual, 0), "calibquant");
  EXPECT_EQ(name(Scope::kText, 0), "kivi");
  EXPECT_EQ(name(Scope::kVisual, 1), "rows");
  EXPECT_EQ(name(Scope::kText, 1), "rows");
  EXPECT_EQ(name(Scope::kText, 2), "kivi");
}

TEST(CachePlan, PlainPartsAloneDoNotSplit) {
  const auto plan = plan_of("uniform + bf16,scope=text", shape_of(1));
  EXPECT_FALSE(plan->split);
  EXPECT_FALSE(plan->packs());
  EXPECT_FALSE(plan->plain()) << "rows are dropped";
  EXPECT_EQ(plan->packer(Scope::kAll, 0), nullptr);
  EXPECT_EQ(plan->rows, DType::kBF16);
  EXPECT_TRUE(plan_of("bf16,scope=text", shape_of(1))->plain());
}

TEST(CachePlan, SharePairsFromWhereTheyStart) {
  const auto plan = plan_of("kivi + share=codes,from=2:off", shape_of(5));
  EXPECT_THAT(plan->share.key_owner, ElementsAre(0, 1, 2, 2, 4));
  EXPECT_THAT(plan->share.value_owner, ElementsAre(0, 1, 2, 3, 4));
  EXPECT_TRUE(plan->pairs.empty()) << "nothing is dropped";
  EXPECT_THROW(plan_of("kivi + share=codes,from=off:off", shape_of(4)), Error) << "an idle part";
  EXPECT_THROW(plan_of("kivi + share=codes", shape_of(1)), Error);
}

TEST(CachePlan, PairsKeepTheSameSlots) {
  EXPECT_THAT(plan_of("uniform + kivi + share=codes,from=2:off", shape_of(5))->pairs,
              ElementsAre(0, 1, 2, 2, 4));
  EXPECT_TRUE(plan_of("streaming + kivi + share=codes", shape_of(4))->pairs.empty())
      << "it keeps the same slots anyway";
}

/// To the bit: a quantizer beside it must not hold rows back for eviction to find.
TEST(CachePlan, KeepingEveryRowIsNoRetention) {
  const auto all = plan_of("uniform,keep=1 + kivi", shape_of(2));
  const auto alone = plan_of("kivi", shape_of(2));
  const auto half = plan_of("uniform,keep=0.5 + kivi", shape_of(2));
  EXPECT_EQ(all->retention, nullptr);
  const auto hold = [](const std::shared_ptr<const CachePlan>& plan) {
    return plan->packers[0].quantizer->packing(KvSide::kKeys, 0).flush.hold;
  };
  EXPECT_EQ(hold(all), hold(alone));
  EXPECT_EQ(hold(half), 32) << "tail_keep beside a rule that drops rows";
}

TEST(Unsupported, KnowsTheDecodersShape) {
  const auto reason = [](const char* text, const CacheShape& shape) {
    return unsupported(parse_spec(text), shape).value_or("");
  };
  EXPECT_EQ(reason("kivi", shape_of(4)), "");
  EXPECT_THAT(reason("xquant,kq=3,km=2", shape_of(8)), HasSubstr("use a multiple of 2 for kq"));
  EXPECT_EQ(reason("asymkv,key_layers=39 + share=codes", shape_of(40)),
            "--kv \"asymkv,key_layers=39 + share=codes\" shares codes of keys between layers 38 "
            "and 39, which are packed differently; give both layers of each pair the same options");
  EXPECT_EQ(reason("asymkv,key_layers=39 + share=codes", shape_of(38)), "");
  EXPECT_EQ(
      reason("kivi + f16,layers=0-1/30", shape_of(8)),
      "--kv f16,layers=0-1/30 names layer 30, but this decoder has layers 0 to 7; name only those");
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
  EXPECT_THAT(reason("vidkv,protect=0.2,scope=visual"), HasSubstr("for all tokens?"));
  EXPECT_THAT(reason("snapkv,keep=0.5 + vidkv,scope=text"), HasSubstr("the channel mask of vidkv"));
  EXPECT_THAT(reason("h2o,keep=0.5 + vidkv,scope=text"), HasSubstr("head_shared=on"));
  EXPECT_EQ(reason("h2o,keep=0.5,head_shared=on + vidkv,scope=text"), "");
  EXPECT_EQ(reason("h2o,keep=0.5 + vidkv"), "");
}

TEST(Conflicts, AnOptionThatWouldDoNothingIsRefused) {
  const auto reason = [](const char* text) {
    try {
      plan_of(text, shape_of(4));
      return std::string();
    } catch (const Error& error) {
      return std::string(error.what());
    }
  };
  for (const char* text :
       {"calibquant,kappa_k=0.9", "calibquant,shrink=kappa,eta_v=0.1", "calibquant,bits=4,tau=0:2",
        "kivi,bits=3,key_bits=4,value_bits=2", "vidkv,value_bits=2,protect=0.2",
        "vidkv,key_bits=2,onebit=minmax", "calibquant,bits=4,guard=none",
        "vidkv,key_bits=2,fft=off", "snapkv,keep=0.5,distance=9",
        "prefixkv,keep=0.5,evict=none,distance=3"}) {
    EXPECT_THAT(reason(text), HasSubstr("has no effect")) << text;
  }
  EXPECT_THAT(reason("vidkv,key_bits=1.00001"), HasSubstr("four decimals"));
  EXPECT_EQ(reason("calibquant,shrink=kappa,kappa_k=0.9"), "");
  EXPECT_EQ(reason("calibquant,bits=4,calib_bits=4,tau=0:2"), "");
  EXPECT_EQ(reason("vidkv,key_bits=1.5,onebit=minmax,fft=off"), "");
  EXPECT_EQ(reason("snapkv,keep=0.5,evict=window,distance=9"), "");
}

}  // namespace
}  // namespace kvlm
