#include "kvcache/plan/formula.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cctype>
#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "kvcache/make_cache.h"
#include "tests/kvcache/plans.h"

namespace kvlm {
namespace {

CacheShape shape_of(int layers, int q_heads, int kv_heads, int head_dim) {
  CacheShape shape;
  shape.layers = layers;
  shape.q_heads = q_heads;
  shape.kv_heads = kv_heads;
  shape.head_dim = head_dim;
  return shape;
}

/// The two prompts of the table in docs/formulas.md, "Worked examples".
struct Prompt {
  CacheShape shape;
  LayerCounts counts;
};
const Prompt kA{shape_of(32, 32, 32, 128), {624, 576, 1, 0}};
const Prompt kB{shape_of(28, 28, 4, 128), {4200, 4096, 1, 0}};

PartBytes sum(const std::vector<PartBytes>& layers) {
  PartBytes bytes;
  for (const PartBytes& layer : layers) bytes += layer;
  return bytes;
}

std::vector<PartBytes> layers_of(const std::string& text, const CacheShape& shape,
                                 const std::vector<LayerCounts>& counts) {
  return formula(*test::plan_of(text, shape), counts);
}

size_t bytes_of(const std::string& text, const Prompt& prompt) {
  const std::vector<LayerCounts> counts(static_cast<size_t>(prompt.shape.layers), prompt.counts);
  return sum(layers_of(text, prompt.shape, counts)).total();
}

struct Row {
  const char* spec;
  size_t a;
  size_t b;
};

class ReferenceBytes : public testing::TestWithParam<Row> {};

TEST_P(ReferenceBytes, AreThoseOfTheTable) {
  EXPECT_EQ(bytes_of(GetParam().spec, kA), GetParam().a);
  EXPECT_EQ(bytes_of(GetParam().spec, kB), GetParam().b);
}

INSTANTIATE_TEST_SUITE_P(
    Specs11, ReferenceBytes,
    testing::Values(Row{"f16", 327155712, 240844800}, Row{"bf16", 327155712, 240844800},
                    Row{"f32", 2 * 327155712ull, 2 * 240844800ull},
                    Row{"kivi", 112459776, 50563072}, Row{"asymkv", 104333312, 43266048},
                    Row{"head_quantile", 44048384, 20644736}, Row{"calibquant", 45088768, 20758528},
                    Row{"calibquant,bits=2", 63963136, 35438592}, Row{"nf4", 86900736, 63974400},
                    Row{"turboquant", 85622784, 63033600},
                    Row{"turboquant,key_bits=8", 127795200, 94080000},
                    Row{"turboquant,key_bits=3", 75399168, 55507200},
                    Row{"turboquant,key_bits=3,value_bits=3", 65175552, 47980800},
                    Row{"nf4,group=32", 92012544, 67737600},
                    Row{"nf4,group=128", 84344832, 62092800}, Row{"xquant", 102285312, 41438720},
                    Row{"vidkv", 51970560, 33324480}, Row{"vidkv,protect=0.2", 53990272, 34663664}),
    [](const testing::TestParamInfo<Row>& row) {
      std::string name = row.param.spec;
      for (char& c : name) {
        if (std::isalnum(static_cast<unsigned char>(c)) == 0) c = '_';
      }
      return name;
    });

/// Half and a fifth of the slots of every layer, whichever they are.
TEST(ReferenceBytes, OfUniformRetention) {
  const auto kept = [](const Prompt& prompt, double keep) {
    LayerCounts counts;
    counts.rows = static_cast<int>(std::nearbyint(keep * prompt.counts.rows));
    const std::vector<LayerCounts> layers(static_cast<size_t>(prompt.shape.layers), counts);
    return sum(layers_of("f16", prompt.shape, layers)).total();
  };
  EXPECT_EQ(kept(kA, 0.5), 163577856u);
  EXPECT_EQ(kept(kB, 0.5), 120422400u);
  EXPECT_EQ(kept(kA, 0.2), 65536000u);
  EXPECT_EQ(kept(kB, 0.2), 48168960u);
}

TEST(Formula, SaysWhereTheBytesAre) {
  // docs/formulas.md, "KIVI": N=300, R=128: 256 keys packed and 44 full, 172 values packed and
  // 128 full.
  const CacheShape shape = shape_of(1, 4, 2, 64);
  const PartBytes bytes = layers_of("kivi", shape, {{300, 0, 0, 0}})[0];
  EXPECT_EQ(bytes.key_codes, 2u * 256 * 16);
  EXPECT_EQ(bytes.key_scales, 2u * 256 / 32 * 64 * 4);
  EXPECT_EQ(bytes.value_codes, 2u * 172 * 16);
  EXPECT_EQ(bytes.value_scales, 2u * 172 * 2 * 4);
  EXPECT_EQ(bytes.full_rows, 2u * (44 + 128) * 128);
  EXPECT_EQ(bytes.masks + bytes.weights, 0u);
  EXPECT_EQ(bytes.total(), bytes.key_codes + bytes.key_scales + bytes.value_codes +
                               bytes.value_scales + bytes.full_rows);
}

TEST(Formula, FollowsTheFlushesOfDecode) {
  const CacheShape shape = shape_of(1, 1, 1, 64);
  const auto keys_packed = [&](int steps) {
    return layers_of("kivi", shape, {{300, 0, 0, steps}})[0].key_codes / 16;
  };
  const auto values_packed = [&](int steps) {
    return layers_of("kivi", shape, {{300, 0, 0, steps}})[0].value_codes / 16;
  };
  EXPECT_EQ(keys_packed(83), 256u);
  EXPECT_EQ(keys_packed(84), 384u);
  EXPECT_EQ(keys_packed(211), 384u);
  EXPECT_EQ(keys_packed(212), 512u);
  EXPECT_EQ(values_packed(0), 172u);
  EXPECT_EQ(values_packed(84), 256u);
  // docs/formulas.md, "Worked examples": N=100 -> 96 packed, residual 4, first flush at the 124th
  // token.
  const auto vidkv = [&](int steps) {
    return layers_of("vidkv", shape, {{100, 0, 0, steps}})[0].value_codes / 13;
  };
  EXPECT_EQ(vidkv(0), 96u);
  EXPECT_EQ(vidkv(123), 96u);
  EXPECT_EQ(vidkv(124), 224u);
}

TEST(Formula, CountsWhatIsNotPackedYet) {
  const CacheShape shape = shape_of(2, 1, 1, 64);
  for (const char* text : {"kivi", "xquant", "vidkv"}) {
    const PartBytes bytes = sum(layers_of(text, shape, {{1, 0, 0, 0}, {1, 0, 0, 0}}));
    EXPECT_EQ(bytes.total(), 2u * 2 * 128) << text;
  }
  const PartBytes text_only = sum(layers_of("calibquant", shape, {{9, 0, 0, 3}, {9, 0, 0, 3}}));
  EXPECT_EQ(text_only.total(), 2u * 12 * 2 * 128);
}

TEST(Formula, ScopesAndLayersAreServedByTheirParts) {
  const CacheShape shape = shape_of(3, 1, 1, 64);
  const std::vector<LayerCounts> counts(3, {50, 40, 2, 0});
  const auto layers = layers_of("visual=calibquant text=int8 + f16,layers=2", shape, counts);
  EXPECT_EQ(layers[0].key_codes, 40u * 8 + 10 * 64);
  EXPECT_EQ(layers[0].key_scales, 2u * 64 * 2 + 10 * 4);
  EXPECT_EQ(layers[0].full_rows, 0u);
  EXPECT_EQ(layers[2].total(), 50u * 2 * 128);
  const auto images = layers_of("calibquant,span=per_image", shape, counts);
  EXPECT_EQ(images[0].key_scales, 2u * 2 * 64 * 2) << "scales of two pictures";
}

TEST(Formula, CodesOfSharingLayersAreStoredOnce) {
  const CacheShape shape = shape_of(4, 1, 1, 64);
  const std::vector<LayerCounts> counts(4, {256, 0, 0, 0});
  const auto layers = layers_of("kivi + share=codes,from=0:2", shape, counts);
  const auto alone = layers_of("kivi", shape, counts);
  EXPECT_EQ(layers[0].total(), alone[0].total());
  EXPECT_EQ(layers[1].key_codes, 0u);
  EXPECT_EQ(layers[1].key_scales, alone[1].key_scales);
  EXPECT_EQ(layers[1].value_codes, alone[1].value_codes);
  EXPECT_EQ(layers[3].value_codes, 0u);
}

TEST(Formula, PassesThirtyTwoBits) {
  const Prompt big{shape_of(80, 64, 64, 128), {131072, 0, 0, 0}};
  EXPECT_EQ(bytes_of("f32", big), size_t{4} * 2 * 80 * 64 * 128 * 131072);
}

/// Feeds a cache random rows.
class Feeder {
 public:
  Feeder(KvCache& cache, const CacheShape& shape) : cache_(cache), shape_(shape) {}

  void feed(SequenceId id, const std::vector<int16_t>& modality, bool prompt) {
    StepRows step;
    step.sequence = id;
    step.rows = static_cast<int>(modality.size());
    step.prompt = step.ends_prompt = prompt;
    step.modality = modality;
    const auto rows = static_cast<int64_t>(modality.size());
    cache_.begin({&step, 1}, stream_);
    if (cache_.needs().prompt_embeddings && prompt) {
      const Tensor embeddings = random({rows, 16});
      cache_.give_embeddings(embeddings.view(), stream_);
    }
    for (int layer = 0; layer < shape_.layers; ++layer) {
      Tensor q = random({rows, shape_.q_heads, shape_.head_dim});
      const Tensor k = random({rows, shape_.kv_heads, shape_.head_dim});
      const Tensor v = random({rows, shape_.kv_heads, shape_.head_dim});
      cache_.attend(layer, q.view(), k.view(), v.view(), q.view(), 0.2f, stream_);
    }
    cache_.end(stream_);
  }

 private:
  Tensor random(const Shape& shape) {
    Tensor x(DType::kF32, shape);
    std::normal_distribution<float> normal;
    for (int64_t i = 0; i < shape.elements(); ++i) x.as<float>()[i] = normal(random_);
    return x;
  }

  KvCache& cache_;
  CacheShape shape_;
  ThreadPool pool_{1};
  Stream stream_{pool_};
  std::minstd_rand random_{1};
};

struct Held {
  const char* spec;
  LayerCounts counts;  ///< of 300 tokens, 200 of them visual in two pictures
};

class CacheBytes : public testing::TestWithParam<Held> {};

/// The stored bytes equal the formula after the prompt and after each of 300 steps.
TEST_P(CacheBytes, EqualTheFormulaAfterEveryStep) {
  const CacheShape shape = shape_of(4, 4, 2, 40);
  const auto plan = test::plan_of(GetParam().spec, shape);
  std::vector<int16_t> modality(300, kTextRow);
  std::fill_n(modality.begin() + 30, 120, int16_t{0});
  std::fill_n(modality.begin() + 160, 80, int16_t{1});
  const SequenceSize size{300, 200, 600};
  const auto cache = make_cache(plan, reservation(*plan, size).bytes(), {});
  const SequenceId id = cache->open(size, "a sequence");
  Feeder feeder(*cache, shape);
  feeder.feed(id, modality, true);
  LayerCounts counts = GetParam().counts;
  for (counts.steps = 0; counts.steps < 300; ++counts.steps) {
    const std::vector<LayerCounts> layers(4, counts);
    ASSERT_EQ(cache->bytes(), sum(layers_of(GetParam().spec, shape, layers)).total())
        << "after " << counts.steps << " steps";
    feeder.feed(id, {kTextRow}, false);
  }
}

constexpr LayerCounts kAllRows{300, 200, 2, 0};
INSTANTIATE_TEST_SUITE_P(
    , CacheBytes,
    testing::Values(
        Held{"f16", kAllRows}, Held{"f32", kAllRows}, Held{"int8", kAllRows},
        Held{"int4,tail_keep=32,meta=f32", kAllRows}, Held{"kivi", kAllRows},
        Held{"kivi,bits=3,group=8,residual=16", kAllRows}, Held{"asymkv", kAllRows},
        Held{"head_quantile", kAllRows}, Held{"head_quantile,group_axes=token", kAllRows},
        Held{"calibquant", kAllRows}, Held{"calibquant,span=per_image,bits=2", kAllRows},
        Held{"xquant", kAllRows}, Held{"xquant,residual=64,km=0,kq=0", kAllRows},
        Held{"vidkv", kAllRows}, Held{"vidkv,protect=0.2", kAllRows},
        Held{"vidkv,key_bits=2,value_bits=2,mask_scope=head", kAllRows},
        Held{"vidkv,profile=official,protect=0.4", kAllRows},
        Held{"kivi + share=codes,from=2:0", kAllRows},
        Held{"vidkv + share=codes,from=off:0", kAllRows},
        Held{"calibquant + share=codes", kAllRows}, Held{"calibquant + kivi,scope=text", kAllRows},
        Held{"kivi,scope=visual", kAllRows}, Held{"int4,scope=text + bf16,scope=visual", kAllRows},
        Held{"kivi + kivi,bits=4,layers=0 + f16,layers=3", kAllRows},
        Held{"calibquant + f16,layers=0-1,scope=visual", kAllRows},
        Held{"uniform,keep=0.5,evict=none + kivi", {150, 100, 2, 0}},
        Held{"uniform,keep=1 + kivi", kAllRows},
        Held{"uniform,keep=0.5,evict=none + f16", {150, 100, 2, 0}},
        Held{"uniform,keep=0.4,evict=none + xquant", {120, 80, 2, 0}},
        Held{"uniform,keep=0.4,evict=none + vidkv", {120, 80, 2, 0}},
        Held{"snapkv,keep=0.5 + int8", {150, 100, 2, 0}},
        Held{"h2o,keep=0.5,prefill_only=on + kivi", {150, 100, 2, 0}}));

/// Visual rows that are still in the window when the prompt ends are not packed yet, and keep their
/// protection when their time comes: at protect=1 it is known which are protected.
TEST(CacheBytesOfProtectedRows, EqualTheFormulaWhereTheWindowHoldsSome) {
  const CacheShape shape = shape_of(2, 4, 2, 40);
  for (const char* spec :
       {"vidkv,group=8,residual=16,protect=1", "vidkv,group=8,residual=24,protect=1",
        "vidkv,group=8,residual=24,protect=1,flush=requant_all",
        "prefixkv,keep=0.999999999999,evict=none + "
        "vidkv,group=8,residual=8,protect=1,tail_keep=20"}) {
    SCOPED_TRACE(spec);
    const auto plan = test::plan_of(spec, shape);
    std::vector<int16_t> modality(93, kTextRow);
    std::fill_n(modality.begin() + 30, 60, int16_t{0});
    const SequenceSize size{93, 60, 193};
    const auto cache = make_cache(plan, reservation(*plan, size).bytes(), {});
    const SequenceId id = cache->open(size, "a sequence");
    Feeder feeder(*cache, shape);
    feeder.feed(id, modality, true);
    LayerCounts counts{93, 60, 1, 0, false, 3};
    for (; counts.steps < 100; ++counts.steps) {
      const std::vector<LayerCounts> layers(2, counts);
      ASSERT_EQ(cache->bytes(), sum(formula(*plan, layers)).total())
          << "after " << counts.steps << " steps";
      feeder.feed(id, {kTextRow}, false);
    }
  }
}

/// Sinks that are rotated again have their keys beside, once rows between have been dropped.
TEST(Formula, CountsTheUnrotatedKeysOfSinks) {
  const CacheShape shape = [] {
    CacheShape of = shape_of(2, 4, 2, 40);
    of.rope_frequencies.assign(20, 0.1f);
    return of;
  }();
  for (const char* spec : {"streaming,keep=0.5,rerotate=on", "streaming,keep=0.5"}) {
    const auto plan = test::plan_of(spec, shape);
    const SequenceSize size{100, 0, 101};
    const auto cache = make_cache(plan, reservation(*plan, size).bytes(), {});
    Feeder(*cache, shape)
        .feed(cache->open(size, "a sequence"), std::vector<int16_t>(100, kTextRow), true);
    const std::vector<LayerCounts> layers(2, {50, 0, 0, 0, true});
    EXPECT_EQ(cache->bytes(), sum(formula(*plan, layers)).total()) << spec;
    const size_t rows = 2 * 2 * 2 * 50 * 40 * 2;
    EXPECT_EQ(cache->bytes(), rows + (plan->retention->rerotates() ? 2 * 2 * 4 * 40 * 4 : 0));
  }
}

double nominal(const std::string& text, const CacheShape& shape, int visual = 200) {
  const std::vector<LayerCounts> counts(static_cast<size_t>(shape.layers), {250, visual, 1, 0});
  return nominal_bits(*test::plan_of(text, shape), counts);
}

TEST(NominalBits, AreThePapersOwn) {
  EXPECT_DOUBLE_EQ(nominal("f16", kA.shape), 16);
  EXPECT_DOUBLE_EQ(nominal("f32", kA.shape), 32);
  EXPECT_DOUBLE_EQ(nominal("kivi", kA.shape), 2);
  EXPECT_DOUBLE_EQ(nominal("asymkv", kA.shape), 1.5);
  EXPECT_DOUBLE_EQ(nominal("asymkv,value_layers=24", kA.shape), 1.875);
  EXPECT_DOUBLE_EQ(nominal("xquant", kA.shape), 1.375);
  EXPECT_DOUBLE_EQ(nominal("xquant", kB.shape), 1.375);
  EXPECT_DOUBLE_EQ(nominal("xquant,kq=28,vq=0,km=32,vm=28", kA.shape), 1.40625);
  EXPECT_DOUBLE_EQ(nominal("xquant,kq=32,vq=0,km=32,vm=16", kA.shape), 1.375);
  EXPECT_DOUBLE_EQ(nominal("vidkv", kA.shape), 1.54);
  EXPECT_DOUBLE_EQ(nominal("vidkv,protect=0.2", kA.shape), (1.5 + 1.664) / 2);
  EXPECT_DOUBLE_EQ(nominal("calibquant", kA.shape), 1);
  EXPECT_NEAR(nominal("calibquant + kivi,scope=text", kA.shape), 1.2, 1e-12);
  EXPECT_DOUBLE_EQ(nominal("kivi,scope=text", kA.shape), 2);
  EXPECT_DOUBLE_EQ(nominal("kivi + share=codes,from=0:16", kA.shape), (1 + 1.5) / 2);
  EXPECT_DOUBLE_EQ(nominal("kivi + f16,layers=0-7", kA.shape), 5.5);
}

}  // namespace
}  // namespace kvlm
