#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <random>

#include "kernels/attend_packed.h"
#include "kernels/base/error.h"
#include "tests/kvcache/quantizers/basis.h"
#include "tests/kvcache/quantizers/make.h"

namespace kvlm {
namespace {

using test::quantizer;
using test::shape_of;
using testing::ElementsAre;
using testing::FloatNear;
using testing::Pointwise;

std::vector<float> normal(size_t n, unsigned seed) {
  std::mt19937 rng(seed);
  std::normal_distribution<float> distribution;
  std::vector<float> x(n);
  for (float& value : x) value = distribution(rng);
  return x;
}

HeadFacts in_order(int head_dim) {
  HeadFacts facts;
  for (int i = 0; i < head_dim; ++i) facts.key_channels.push_back(static_cast<uint16_t>(i));
  return facts;
}

TEST(VidKvKeys, WidthsAreExactFractions) {  // docs/formulas.md, "Mixed channels"
  const auto anomalous = [](const char* bits, int head_dim) {
    const auto made = quantizer(fmt::format("vidkv,key_bits={}", bits), shape_of(1, 1, head_dim));
    const PackedFormat& format = made->packing(KvSide::kKeys, 0).format;
    return format.section[0].code == CodeFormat::kBits2 ? format.section[0].channels : 0;
  };
  EXPECT_EQ(anomalous("1.5", 128), 64);
  EXPECT_EQ(anomalous("1.25", 128), 32);
  EXPECT_EQ(anomalous("1.2", 128), 25);
  EXPECT_EQ(anomalous("1", 128), 0);
  EXPECT_EQ(anomalous("2", 128), 128);
  EXPECT_EQ(anomalous("1.005", 128), 32);  // would be none
  EXPECT_EQ(anomalous("1.01", 16), 16);
}

TEST(VidKvKeys, TheWidestChannelsComeFirst) {  // docs/formulas.md, "Worked examples"
  const auto made = quantizer("vidkv", shape_of(1, 1, 8));
  // Channels start at different places: neither the largest numbers nor the largest magnitudes are
  // in the widest channels.
  const float ranges[] = {1, 9, 2, 9, 3, 0, 5, 4};
  const float starts[] = {20, -10, 7, -30, 12, 40, -6, -5};
  std::vector<float> keys(16);
  for (size_t d = 0; d < 8; ++d) {
    keys[d] = starts[d];
    keys[8 + d] = starts[d] + ranges[d];
  }
  const float* heads[] = {keys.data()};
  std::vector<HeadFacts> facts(1);
  test::learn_keys(*made, heads, 2, facts);
  EXPECT_THAT(facts[0].key_channels, ElementsAre(1, 3, 6, 7, 0, 2, 4, 5));
  // Ranges are pooled over heads unless each has its own mask: from the least of both, here 0 or
  // the start, to the greatest of both they are 21, 10, 9, 30, 15, 100, 6, 5.
  std::vector<float> other(16);
  other[13] = 100;
  const float* both[] = {keys.data(), other.data()};
  facts.assign(2, {});
  test::learn_keys(*made, both, 2, facts);
  EXPECT_THAT(facts[0].key_channels, ElementsAre(0, 3, 4, 5, 1, 2, 6, 7));
  EXPECT_EQ(facts[0].key_channels, facts[1].key_channels);
  const auto apart = quantizer("vidkv,mask_scope=head", shape_of(1, 2, 8));
  test::learn_keys(*apart, both, 2, facts);
  EXPECT_THAT(facts[0].key_channels, ElementsAre(1, 3, 6, 7, 0, 2, 4, 5));
  EXPECT_THAT(facts[1].key_channels, ElementsAre(0, 1, 2, 5, 3, 4, 6, 7));
  EXPECT_EQ(made->facts_bytes(2), 1u);
  EXPECT_EQ(apart->facts_bytes(2), 2u);
}

/// Four rows of four channels. Ranges 8, 7.5, 4 and 0.5; variances 11, 14.0625, 3 and 0.046875;
/// mean magnitudes 3, 3.75, 21 and 0.125, of which only 0.5 is more than three times.
TEST(VidKvKeys, TheCriterionDecides) {  // VidKV, section 4.2 and table 1
  const std::vector<float> keys{0, -3.75f, 20, 0, 4, 3.75f, 20, 0,
                                0, -3.75f, 20, 0, 8, 3.75f, 24, 0.5f};
  const float* heads[] = {keys.data()};
  const auto order = [&](const char* criterion) {
    const auto made =
        quantizer(fmt::format("vidkv,key_bits=1.25,criterion={}", criterion), shape_of(1, 1, 4));
    std::vector<HeadFacts> facts(1);
    test::learn_keys(*made, heads, 4, facts);
    return facts[0].key_channels;
  };
  EXPECT_THAT(order("range"), ElementsAre(0, 1, 2, 3));
  EXPECT_THAT(order("variance"), ElementsAre(1, 0, 2, 3));
  EXPECT_THAT(order("outliers"), ElementsAre(3, 0, 1, 2));
}

/// The second head has 100 in channel 2: of eight numbers there the mean magnitude is 23, and 100
/// is more than 69; so is 0.5 beside 0.0625 in channel 3, and ties go to the smaller channel.
TEST(VidKvKeys, CriteriaPoolHeadsUnlessEachHasItsMask) {
  const std::vector<float> first{0, -3.75f, 20, 0, 4, 3.75f, 20, 0,
                                 0, -3.75f, 20, 0, 8, 3.75f, 24, 0.5f};
  const std::vector<float> second{3, 0, 0, 0, 3, 0, 0, 0, 3, 0, 0, 0, 3, 0, 100, 0};
  const float* heads[] = {first.data(), second.data()};
  std::vector<HeadFacts> facts(2);
  const auto pooled = quantizer("vidkv,key_bits=1.25,criterion=outliers", shape_of(1, 2, 4));
  test::learn_keys(*pooled, heads, 4, facts);
  EXPECT_THAT(facts[0].key_channels, ElementsAre(2, 0, 1, 3));
  EXPECT_EQ(facts[1].key_channels, facts[0].key_channels);
  const auto apart =
      quantizer("vidkv,key_bits=1.25,criterion=outliers,mask_scope=head", shape_of(1, 2, 4));
  test::learn_keys(*apart, heads, 4, facts);
  EXPECT_THAT(facts[0].key_channels, ElementsAre(3, 0, 1, 2));
  EXPECT_THAT(facts[1].key_channels, ElementsAre(2, 0, 1, 3));
}

/// VidKV, algorithm 3: a spectrum where half or three quarters of the channels have 2 bits.
TEST(VidKvKeys, SpectraWhereAlgorithm3HasThem) {
  const auto has_spectrum = [](const char* spec) {
    return !quantizer(spec, shape_of(1, 1, 64))->key_basis()->matrix[0].empty();
  };
  EXPECT_TRUE(has_spectrum("vidkv,profile=paper"));
  EXPECT_TRUE(has_spectrum("vidkv,key_bits=1.75,profile=paper"));
  EXPECT_FALSE(has_spectrum("vidkv,key_bits=1.25,profile=paper"));
  EXPECT_FALSE(has_spectrum("vidkv,key_bits=1.6,fft=alg3"));
  EXPECT_TRUE(has_spectrum("vidkv,key_bits=1.25"));
}

TEST(VidKvKeys, SpectrumOfTheWorkedExample) {  // docs/formulas.md, "Worked examples"
  const auto made = quantizer("vidkv,key_bits=1", shape_of(1, 1, 4));
  const std::vector<float> x{1, 2, 3, 4};
  std::vector<float> spectrum(4);
  test::change_rows(*made, BasisChange::kKey, in_order(4), x.data(), 1, spectrum.data());
  EXPECT_THAT(spectrum, Pointwise(FloatNear(1e-6f), {10.0f, -2.0f, -2.0f, 2.0f}));
}

TEST(VidKvKeys, SpectraComeBackAndKeepProducts) {
  for (const int n : {1, 2, 3, 4, 5, 16, 25, 64, 103}) {
    const auto made = quantizer("vidkv,key_bits=1", shape_of(1, 1, n));
    const std::vector<float> k = normal(static_cast<size_t>(n), 1);
    const std::vector<float> q = normal(static_cast<size_t>(n), 2);
    std::vector<float> spectrum(k.size());
    std::vector<float> back(k.size());
    std::vector<float> query(k.size());
    test::change_rows(*made, BasisChange::kKey, in_order(n), k.data(), 1, spectrum.data());
    test::change_rows(*made, BasisChange::kBack, in_order(n), spectrum.data(), 1, back.data());
    test::change_rows(*made, BasisChange::kQuery, in_order(n), q.data(), 1, query.data());
    double direct = 0;
    double turned = 0;
    float top = 0;
    for (size_t i = 0; i < k.size(); ++i) {
      EXPECT_NEAR(back[i], k[i], 1e-5) << n;
      direct += static_cast<double>(q[i]) * static_cast<double>(k[i]);
      turned += static_cast<double>(query[i]) * static_cast<double>(spectrum[i]);
      top = std::max(top, std::abs(k[i]));
    }
    EXPECT_NEAR(direct, turned, 2e-5 * n) << n;
  }
}

/// Packs rows with a quantizer's key plan and gives back what attention sees, in channels.
std::vector<float> through(const Quantizer& made, const std::vector<float>& rows, int n) {
  ThreadPool pool(1);
  Stream stream(pool);
  const Packing& packing = made.packing(KvSide::kKeys, 0);
  const int count = static_cast<int>(rows.size()) / n;
  std::vector<float> turned(rows.size());
  test::change_rows(made, BasisChange::kKey, in_order(n), rows.data(), count, turned.data());
  std::vector<std::byte> codes(static_cast<size_t>(count) * packing.format.row_bytes());
  std::vector<std::byte> scales(packing.format.scales(count) * dtype_bytes(packing.format.meta));
  std::vector<std::byte> zeros(packing.format.zeros(count) * dtype_bytes(packing.format.meta) + 1);
  const PackJob job{turned.data(), count, codes.data(), scales.data(), zeros.data()};
  pack(packing.format, packing.rules, {&job, 1}, stream);
  const PackedBlock block{codes.data(), scales.data(), zeros.data(), count, count, nullptr};
  unpack_blocks(packing.format, {&block, 1}, turned.data(), stream);
  std::vector<float> out(rows.size());
  test::change_rows(made, BasisChange::kBack, in_order(n), turned.data(), count, out.data());
  return out;
}

TEST(VidKvKeys, SignsOfTheWorkedExample) {  // docs/formulas.md, "Worked examples"
  const CacheShape shape = shape_of(1, 1, 4);
  const std::vector<float> rows{1, 2, 3, 4, 2, -1, 0.5f, -3};
  const auto sym = quantizer("vidkv,key_bits=1,group=2,residual=2", shape);
  EXPECT_THAT(through(*sym, rows, 4),
              Pointwise(FloatNear(1e-5f), {-0.5f, 1.5f, 1.25f, 3.5f, 0.5f, -1.5f, -1.25f, -3.5f}));
  const auto zero_mean = quantizer("vidkv,key_bits=1,group=2,residual=2,onebit=zero_mean", shape);
  EXPECT_THAT(through(*zero_mean, rows, 4),
              Pointwise(FloatNear(1e-5f), {1.4375f, 0.9375f, 1.4375f, 1.9375f, 1.9375f, -0.5625f,
                                           0.1875f, -1.5625f}));
}

/// docs/formulas.md, "Flush": sym is idempotent, zero_mean is not.
TEST(VidKvKeys, PackingSignsAgainChangesNothing) {
  const CacheShape shape = shape_of(1, 1, 16);
  const std::vector<float> rows = normal(32 * 16, 3);
  const auto sym = quantizer("vidkv,key_bits=1,meta=f32", shape);
  const std::vector<float> once = through(*sym, rows, 16);
  EXPECT_THAT(through(*sym, once, 16), Pointwise(FloatNear(1e-4f), once));
  const auto zero_mean = quantizer("vidkv,key_bits=1,meta=f32,onebit=zero_mean", shape);
  const std::vector<float> first = through(*zero_mean, rows, 16);
  double change = 0;
  const std::vector<float> second = through(*zero_mean, first, 16);
  for (size_t i = 0; i < first.size(); ++i) {
    change += std::pow(static_cast<double>(first[i] - second[i]), 2);
  }
  EXPECT_GT(change / static_cast<double>(first.size()), 0.01);
}

/// docs/formulas.md, "Spectrum": onebit=zero_mean is half of sym, plus a constant of the group.
TEST(VidKvKeys, HalfTheSignsAndAConstant) {
  const CacheShape shape = shape_of(1, 1, 25);
  const std::vector<float> rows = normal(32 * 25, 4);
  const auto a = through(*quantizer("vidkv,key_bits=1,meta=f32", shape), rows, 25);
  const auto b = through(*quantizer("vidkv,key_bits=1,meta=f32,onebit=zero_mean", shape), rows, 25);
  for (size_t i = 25; i < rows.size(); ++i) {
    EXPECT_NEAR(b[i] - a[i] / 2, b[i % 25] - a[i % 25] / 2, 1e-4);
  }
}

TEST(VidKvFlush, OfTheWorkedExample) {  // docs/formulas.md, "Worked examples"
  const auto made = quantizer("vidkv", shape_of(1, 1, 64));
  for (const KvSide side : {KvSide::kKeys, KvSide::kValues}) {
    const FlushRule& rule = made->packing(side, 0).flush;
    EXPECT_EQ(rule.packed_after_prompt(100), 96);
    EXPECT_EQ(rule.trigger - 4, 124);
    EXPECT_EQ(rule.rows, 128);
  }
  EXPECT_FALSE(made->repacks(KvSide::kKeys));
  EXPECT_TRUE(quantizer("vidkv,flush=requant_key", shape_of(1, 1, 64))->repacks(KvSide::kKeys));
  EXPECT_FALSE(quantizer("vidkv,flush=requant_key", shape_of(1, 1, 64))->repacks(KvSide::kValues));
  EXPECT_TRUE(quantizer("vidkv,profile=official", shape_of(1, 1, 64))->repacks(KvSide::kValues));
}

TEST(VidKvProtection, CountsOfTheWorkedExamples) {  // docs/formulas.md, "Worked examples"
  const auto count = [](const char* spec, size_t visual) {
    const auto made = quantizer(spec, shape_of(1, 1, 64));
    std::vector<int16_t> modality(visual + 20, kTextRow);
    std::fill_n(modality.begin() + 5, visual, int16_t{0});
    const std::vector<float> scores = normal(modality.size(), 5);
    return made->protect(scores, modality).size();
  };
  EXPECT_EQ(count("vidkv,protect=0.2,stp=official", 6272), 1216u);
  EXPECT_EQ(count("vidkv,protect=0.2,stp=official", 729), 96u);
  EXPECT_EQ(count("vidkv,protect=0.2,stp=official", 200), 0u);
  EXPECT_EQ(count("vidkv,protect=0.2,stp=official", 100), 0u);
  EXPECT_EQ(count("vidkv,protect=0.2", 729), 146u);
  EXPECT_EQ(count("vidkv,protect=1", 50), 50u);
}

TEST(VidKvProtection, ScoresComparePicturesWithTheTextAfterThem) {
  const auto made = quantizer("vidkv,protect=0.5", shape_of(1, 1, 64));
  // Text before the pictures does not count; two rows after them do, on average.
  const std::vector<float> rows{100, 100, 1, 0, 0, 1, 1, 1, 2, 0, 4, 2};
  const std::vector<int16_t> modality{kTextRow, 0, 0, 0, kTextRow, kTextRow};
  const std::vector<float> scores =
      made->protection_scores(ConstTensorView(rows.data(), DType::kF32, {6, 2}), modality);
  EXPECT_THAT(scores, ElementsAre(0, 3, 1, 4, 0, 0));
  EXPECT_THAT(made->protect(scores, modality), ElementsAre(1, 3));
  EXPECT_NEAR(made->packing(KvSide::kValues, 0).nominal_bits, 1.58 + 0.42 * 0.5, 1e-9);
}

/// splitmix64(splitmix64(seed) ^ row) / 2^64 by Python, of rows 1 to 5:
/// seed 0 .034, .843, .781, .118, .245
/// seed 5 .881, .142, .406, .894, .877
TEST(VidKvProtection, ByChanceIsTheSeeds) {
  const std::vector<float> rows(14);
  const std::vector<int16_t> modality{kTextRow, 0, 0, 0, 1, 1, kTextRow};
  const auto chosen = [&](const char* spec) {
    const auto made = quantizer(spec, shape_of(1, 1, 64));
    const std::vector<float> scores =
        made->protection_scores(ConstTensorView(rows.data(), DType::kF32, {7, 2}), modality);
    return made->protect(scores, modality);
  };
  EXPECT_THAT(chosen("vidkv,protect=0.4,protect_by=random"), ElementsAre(2, 3));
  EXPECT_THAT(chosen("vidkv,protect=0.4,protect_by=random,seed=5"), ElementsAre(1, 4));
}

TEST(VidKvValues, OfOneBitHaveTheEndsOfTheirRange) {  // VidKV, appendix F, table 6
  const auto made = quantizer("vidkv,value_bits=1,protect=0.25", shape_of(1, 1, 40));
  const Packing& packing = made->packing(KvSide::kValues, 0);
  EXPECT_EQ(packing.format.row_bytes(), 5u);
  EXPECT_EQ(packing.format.meta_bytes(32), 4u * 40);  // a scale and a zero point a channel
  EXPECT_NEAR(packing.nominal_bits, 1.25, 1e-9);
  EXPECT_EQ(packing.rules[0], PackRule());
}

TEST(VidKv, OptionsWithoutEffectAreRefused) {
  for (const char* spec :
       {"vidkv,protect_by=random", "vidkv,stp=official", "vidkv,protect=0.2,seed=1",
        "vidkv,value_bits=2,gamma=1", "vidkv,value_bits=1,trits=trit2b",
        "vidkv,value_bits=2,scale=unit", "vidkv,key_bits=1,criterion=variance",
        "vidkv,key_bits=2,criterion=range", "vidkv,value_bits=2,protect=0.1"}) {
    EXPECT_THROW(quantizer(spec, shape_of(1, 1, 64)), Error) << spec;
  }
}

}  // namespace
}  // namespace kvlm
