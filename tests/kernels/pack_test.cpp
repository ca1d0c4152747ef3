#include "kernels/pack.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>
#include <random>
#include <vector>

#include "kernels/attend_packed.h"
#include "kernels/base/error.h"
#include "kernels/quantize.h"
#include "tests/kernels/values.h"

namespace kvlm {
namespace {

using ::testing::ElementsAre;
using ::testing::FloatNear;
using ::testing::Pointwise;

/// The integers that codes of codebooks are read as (docs/formulas.md, "Codebooks").
constexpr int kNf4[16] = {0, 39, 60, 77, 91, 104, 115, 127, 137, 147, 158, 170, 183, 198, 219, 254};
constexpr int kLloydMax3[8] = {0, 48, 82, 113, 141, 172, 206, 254};
constexpr int kLloydMax4[16] = {0,   31,  52,  69,  83,  96,  109, 121,
                                133, 145, 158, 171, 185, 202, 223, 254};
int integer_of(CodeFormat format, int code) {
  if (format == CodeFormat::kNf4) return kNf4[code];
  if (format == CodeFormat::kLloydMax3) return kLloydMax3[code];
  return format == CodeFormat::kLloydMax4 ? kLloydMax4[code] : code;
}

/// A block in memory of its own.
struct Block {
  PackedFormat format;
  int rows = 0;
  std::vector<std::byte> codes, scales, zeros;

  PackedBlock view() const {
    return {codes.data(), scales.data(), zeros.empty() ? nullptr : zeros.data(),
            rows,         rows,          nullptr};
  }
  /// Codes row by row.
  std::vector<int> integers() const {
    std::vector<int> all;
    for (int row = 0; row < rows; ++row) {
      const auto* at = reinterpret_cast<const uint8_t*>(codes.data()) +
                       static_cast<size_t>(row) * format.row_bytes();
      for (int s = 0; s < format.sections; ++s) {
        const PackedSection& section = format.section[static_cast<size_t>(s)];
        for (int i = 0; i < section.channels; ++i) all.push_back(code_at(at, section.code, i));
        at += section.row_bytes();
      }
    }
    return all;
  }
  std::vector<float> scale() const { return meta(scales); }
  std::vector<float> zero() const { return meta(zeros); }
  std::vector<float> unpacked() const {
    ThreadPool pool(1);
    Stream stream(pool);
    std::vector<float> out(static_cast<size_t>(rows * format.channels()));
    const PackedBlock block = view();
    unpack_blocks(format, {&block, 1}, out.data(), stream);
    return out;
  }

 private:
  std::vector<float> meta(const std::vector<std::byte>& bytes) const {
    std::vector<float> all;
    for (size_t i = 0; i < bytes.size() / dtype_bytes(format.meta); ++i) {
      all.push_back(quantize::load_meta(bytes.data(), format.meta, i));
    }
    return all;
  }
};

Block packed(const PackedFormat& format, const std::array<PackRule, 2>& rules, const void* x,
             int count, int threads, DType dtype) {
  ThreadPool pool(threads);
  Stream stream(pool);
  Block block;
  block.format = format;
  block.rows = count;
  const auto rows = static_cast<size_t>(block.rows);
  block.codes.resize(rows * format.row_bytes());
  block.scales.resize(format.scales(block.rows) * dtype_bytes(format.meta));
  block.zeros.resize(format.zeros(block.rows) * dtype_bytes(format.meta));
  const PackJob job{x, block.rows, block.codes.data(), block.scales.data(),
                    block.zeros.empty() ? nullptr : block.zeros.data()};
  pack(format, rules, {&job, 1}, stream, dtype);
  return block;
}

Block packed(const PackedFormat& format, const std::array<PackRule, 2>& rules,
             const std::vector<float>& x, int threads = 1) {
  return packed(format, rules, x.data(), static_cast<int>(x.size()) / format.channels(), threads,
                DType::kF32);
}

/// One group: all of x in one row with one scale, f32 metadata.
PackedFormat one_group(int bits, size_t n, DType meta = DType::kF32) {
  PackedFormat format;
  format.axis = ScaleAxis::kToken;
  format.group_size = static_cast<int>(n);
  format.meta = meta;
  format.section[0] = {.code = static_cast<CodeFormat>(bits), .channels = static_cast<int>(n)};
  return format;
}

PackedFormat channels(int bits, int n, DType meta = DType::kF32) {
  PackedFormat format;
  format.axis = ScaleAxis::kChannel;
  format.meta = meta;
  format.section[0] = {.code = static_cast<CodeFormat>(bits), .channels = n};
  return format;
}

PackRule rule(Rounding rounding = Rounding::kNearestEven, float alpha = 0, float eta = 0,
              float kappa = 1) {
  PackRule made;
  made.rounding = rounding;
  made.alpha = alpha;
  made.eta = eta;
  made.kappa = kappa;
  return made;
}

double mse(const std::vector<float>& x, const std::vector<float>& y) {
  double sum = 0;
  for (size_t i = 0; i < x.size(); ++i) {
    sum += std::pow(static_cast<double>(x[i]) - static_cast<double>(y[i]), 2);
  }
  return sum / static_cast<double>(x.size());
}

std::vector<float> normal(size_t n, unsigned seed = 1) {
  std::mt19937 rng(seed);
  std::normal_distribution<float> distribution;
  std::vector<float> x(n);
  for (float& value : x) value = distribution(rng);
  return x;
}

/// Rows that are no floats are packed as the floats that they are, by every rule and axis.
TEST(Pack, HalvesArePackedAsFloats) {
  std::vector<std::pair<PackedFormat, PackRule>> packings = {
      {channels(2, 20), rule()},
      {channels(3, 20), rule(Rounding::kFloor, 0.1f)},
      {one_group(4, 20), rule()},
      {one_group(2, 20), rule(Rounding::kNearestEven, 0.2f)}};
  packings.push_back({one_group(1, 20), rule()});
  packings.back().first.axis = ScaleAxis::kHead;
  packings.push_back({channels(1, 20), rule()});
  packings.back().first.section[0] = {.code = CodeFormat::kTrit5, .channels = 20};
  packings.back().second.rule = CodeRule::kTernary;
  packings.push_back(packings.back());
  packings.back().first.axis = ScaleAxis::kToken;
  packings.back().first.group_size = 6;
  for (const DType dtype : {DType::kF16, DType::kBF16}) {
    for (const int rows : {1, 5, 33}) {
      const Tensor halves = testing::normal_tensor(dtype, {rows, 20}, 9, 2.0f);
      std::vector<float> floats(static_cast<size_t>(rows) * 20);
      for (size_t i = 0; i < floats.size(); ++i) {
        floats[i] =
            dtype == DType::kF16 ? to_float(halves.as<f16>()[i]) : to_float(halves.as<bf16>()[i]);
      }
      for (auto [format, of_section] : packings) {
        format.section[0].zero_stored = of_section.rule == CodeRule::kAffine;
        const std::array<PackRule, 2> rules = {of_section, {}};
        const Block wanted = packed(format, rules, floats);
        const Block found = packed(format, rules, halves.view().data(), rows, 1, dtype);
        EXPECT_EQ(found.codes, wanted.codes);
        EXPECT_EQ(found.scales, wanted.scales);
        EXPECT_EQ(found.zeros, wanted.zeros);
      }
    }
  }
}

TEST(Pack, RoundsToNearestEvenOrDown) {  // docs/formulas.md, "Worked examples"
  const std::vector<float> x{0, 0.5f, 1.5f, 2.5f, 3};
  EXPECT_THAT(packed(one_group(2, 5), {rule()}, x).integers(), ElementsAre(0, 0, 2, 2, 3));
  EXPECT_THAT(packed(one_group(2, 5), {rule(Rounding::kFloor)}, x).integers(),
              ElementsAre(0, 0, 1, 2, 3));
  const std::vector<float> y{0, 0.25f, 0.5f, 0.75f, 1};
  EXPECT_THAT(packed(one_group(1, 5), {rule()}, y).integers(), ElementsAre(0, 0, 0, 1, 1));
  EXPECT_THAT(packed(one_group(1, 5), {rule(Rounding::kFloor)}, y).integers(),
              ElementsAre(0, 0, 0, 0, 1));
}

TEST(Pack, KiviGroupOfTheWorkedExamples) {  // docs/formulas.md, "Worked examples"
  const std::vector<float> x{-1, -0.2f, 0.3f, 2};
  const Block nearest = packed(one_group(2, 4), {rule()}, x);
  EXPECT_THAT(nearest.integers(), ElementsAre(0, 1, 1, 3));
  EXPECT_THAT(nearest.scale(), ElementsAre(1));
  EXPECT_THAT(nearest.unpacked(), ElementsAre(-1, 0, 0, 2));
  const Block floor = packed(one_group(2, 4), {rule(Rounding::kFloor)}, x);
  EXPECT_THAT(floor.integers(), ElementsAre(0, 0, 1, 3));
  EXPECT_THAT(floor.unpacked(), ElementsAre(-1, -1, 0, 2));
}

TEST(Pack, HeadQuantilesOfTheWorkedExamples) {  // docs/formulas.md, "Worked examples"
  std::vector<float> x(11);
  std::iota(x.begin(), x.end(), 0.0f);
  PackedFormat format = one_group(1, 11);
  format.axis = ScaleAxis::kHead;
  struct Case {
    float alpha;
    Rounding rounding;
    int ones;
    double error;
  };
  for (const Case& c :
       {Case{0.1f, Rounding::kNearestEven, 5, 4.181818}, Case{0.1f, Rounding::kFloor, 2, 12.909091},
        Case{0.25f, Rounding::kNearestEven, 5, 2.613636},
        Case{0.25f, Rounding::kFloor, 3, 5.340909}, Case{0, Rounding::kNearestEven, 5, 7.727273},
        Case{0, Rounding::kFloor, 1, 25.909091}}) {
    SCOPED_TRACE(c.alpha);
    const Block block = packed(format, {rule(c.rounding, c.alpha)}, x);
    const std::vector<int> codes = block.integers();
    EXPECT_EQ(std::accumulate(codes.begin(), codes.end(), 0), c.ones);
    EXPECT_NEAR(mse(x, block.unpacked()), c.error, 1e-5);
  }
  const Block block = packed(format, {rule(Rounding::kNearestEven, 0.1f)}, x);
  EXPECT_THAT(block.zero(), ElementsAre(FloatNear(1, 1e-6f)));
  EXPECT_THAT(block.scale(), ElementsAre(FloatNear(8, 1e-5f)));
}

TEST(Pack, GaussianErrorsOfHeadQuantiles) {  // docs/formulas.md, "Worked examples"
  const std::vector<float> x = normal(1 << 20);
  PackedFormat format = one_group(1, 1024);
  format.axis = ScaleAxis::kHead;
  const double nearest[] = {2.6996, 1.0807, 0.5973, 0.4203, 0.3653, 0.3786};
  const double floor[] = {6.1639, 3.0270, 1.7427, 1.1076, 0.7658, 0.5976};
  const float alphas[] = {0.01f, 0.05f, 0.1f, 0.15f, 0.2f, 0.25f};
  for (size_t i = 0; i < 6; ++i) {
    SCOPED_TRACE(alphas[i]);
    EXPECT_NEAR(mse(x, packed(format, {rule(Rounding::kNearestEven, alphas[i])}, x).unpacked()),
                nearest[i], 0.01 * nearest[i]);
    EXPECT_NEAR(mse(x, packed(format, {rule(Rounding::kFloor, alphas[i])}, x).unpacked()), floor[i],
                0.01 * floor[i]);
  }
}

TEST(Pack, CalibQuantKeysOfTheWorkedExamples) {  // docs/formulas.md, "Worked examples"
  const std::vector<float> keys{2, 0.2f, 1, -1, -2, 1, 3, 1, 0.5f, 0, 2.2f, 0.1f};
  const Block block = packed(channels(1, 4), {rule()}, keys);
  EXPECT_THAT(block.integers(), ElementsAre(1, 0, 0, 0, 0, 1, 1, 1, 1, 0, 1, 1));
  EXPECT_THAT(block.scale(), ElementsAre(4, 1, 2, 2));
  EXPECT_THAT(block.zero(), ElementsAre(-2, 0, 1, -1));
  const Block kappa = packed(channels(1, 4), {rule(Rounding::kNearestEven, 0, 0, 0.5f)}, keys);
  EXPECT_EQ(kappa.integers(), block.integers());
  EXPECT_THAT(kappa.scale(), ElementsAre(2, 0.5f, 1, 1));
  EXPECT_THAT(kappa.zero(), ElementsAre(-1, 0, 0.5f, -0.5f));
}

TEST(Pack, MovesEndLevelsInwards) {  // docs/formulas.md, "Worked examples"
  const float sixth = 1.0f / 6;
  const Block one =
      packed(one_group(1, 4), {rule(Rounding::kNearestEven, 0, sixth)}, {0, 0.2f, 0.9f, 1});
  EXPECT_THAT(one.integers(), ElementsAre(0, 0, 1, 1));
  EXPECT_THAT(one.unpacked(), Pointwise(FloatNear(1e-6f), {sixth, sixth, 5 * sixth, 5 * sixth}));
  const std::vector<float> x{0, 0.4f, 1.2f, 3};
  const Block two = packed(one_group(2, 4), {rule(Rounding::kNearestEven, 0, 0.045f)}, x);
  EXPECT_THAT(two.integers(), ElementsAre(0, 0, 1, 3));
  EXPECT_THAT(two.unpacked(), Pointwise(FloatNear(1e-6f), {0.135f, 0.135f, 1.045f, 2.865f}));
  EXPECT_NEAR(mse(x, two.unpacked()), 0.032675, 1e-6);
  EXPECT_NEAR(mse(x, packed(one_group(2, 4), {rule()}, x).unpacked()), 0.05, 1e-6);
  PackRule alg2 = rule(Rounding::kNearestEven, 0, 0.045f);
  alg2.eta_of_step = true;
  EXPECT_THAT(packed(one_group(2, 4), {alg2}, {0, 1, 2, 3}).unpacked(),
              Pointwise(FloatNear(1e-6f), {0.045f, 0.955f, 1.865f, 2.775f}));
}

/// docs/formulas.md, "Worked examples": 1/12 - eta/2 + Q eta^2, in steps.
TEST(Pack, UniformErrorOfCalibratedLevels) {
  const int n = 1 << 18;
  const double q[] = {0, 1, 11.0 / 3, 17};
  for (const int bits : {1, 2, 3}) {
    const double levels = (1 << bits) - 1;
    std::vector<float> x(n);
    for (int i = 0; i < n; ++i)
      x[static_cast<size_t>(i)] = static_cast<float>(levels * i / (n - 1));
    for (const double eta : {0.0, 0.045, 0.09, 1.0 / 6, 1.0 / (4 * q[bits])}) {
      const Block block =
          packed(one_group(bits, n), {rule(Rounding::kNearestEven, 0, static_cast<float>(eta))}, x);
      EXPECT_NEAR(mse(x, block.unpacked()), 1.0 / 12 - eta / 2 + q[bits] * eta * eta, 2e-5)
          << bits << " bits, eta " << eta;
    }
  }
}

/// One row of x in NF4, with one scale.
Block packed_nf4(const std::vector<float>& x) {
  PackedFormat format = one_group(4, x.size(), DType::kF16);
  format.section[0] = section_of(CodeFormat::kNf4, static_cast<int>(x.size()));
  return packed(format, {PackRule{.rule = CodeRule::kCodebook}}, x);
}

TEST(Pack, CodebookGroupsOfTheWorkedExamples) {  // docs/formulas.md, "Worked examples"
  struct Case {
    std::vector<float> x;
    float scale;
    std::vector<int> bytes;
    std::vector<float> back;
  };
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const float infinity = std::numeric_limits<float>::infinity();
  for (const Case& c :
       {Case{{0.1f, -0.3f, 0.02f, 1.5f, -1.5f, 0.7f, -0.05f, 0},
             1.5f,
             {88, 247, 192, 119},
             {0.118110f, -0.271654f, 0, 1.5f, -1.5f, 0.661417f, 0, 0}},
        Case{{-2, 2, 0.0795f, 1}, 2, {240, 199}, {-2, 2, 0, 0.881890f}},  // below a midpoint
        Case{{0, 0, 0, 0}, 0, {119, 119}, {0, 0, 0, 0}},
        Case{{nan, nan, nan}, 0, {119, 7}, {0, 0, 0}}, Case{{nan, 1}, 1, {247}, {0, 1}},
        Case{{-infinity, 1}, 0, {119}, {0, 0}}}) {
    const Block block = packed_nf4(c.x);
    EXPECT_THAT(block.scale(), ElementsAre(c.scale));
    std::vector<int> bytes;
    for (const std::byte b : block.codes) bytes.push_back(static_cast<int>(b));
    EXPECT_EQ(bytes, c.bytes);
    EXPECT_THAT(block.unpacked(), Pointwise(FloatNear(1e-6f), c.back));
  }
}

/// A number in the middle of two of the codebook, in f32, is the lower one.
TEST(Pack, CodebookTiesGoDown) {
  constexpr auto kValues = codecs::Code<CodeFormat::kNf4>::kValues;
  for (size_t i = 0; i < 15; ++i) {
    const float middle = (kValues[i] + kValues[i + 1]) / 2;
    const Block block = packed_nf4({1, middle, std::nextafter(middle, 2.0f)});
    EXPECT_EQ(block.integers()[1], kNf4[i]) << i;
    EXPECT_EQ(block.integers()[2], kNf4[i + 1]) << i;
  }
}

/// The mean squared error of normal numbers in groups of 64, by the integers that stand for the
/// codebook.
TEST(Pack, CodebookErrorOfNormalNumbers) {
  PackedFormat format = one_group(4, 64);
  format.section[0] = section_of(CodeFormat::kNf4, 64);
  const std::vector<float> x = normal(64 * 20000);
  const std::vector<float> y =
      packed(format, {PackRule{.rule = CodeRule::kCodebook}}, x).unpacked();
  EXPECT_NEAR(mse(x, y), 0.00849, 5e-5);
}

/// One rotated key in a codebook of TurboQuant.
Block packed_by_norm(const std::vector<float>& x, CodeFormat code, bool corrects_norm = true) {
  PackedFormat format = one_group(4, x.size(), DType::kF16);
  format.section[0] = section_of(code, static_cast<int>(x.size()));
  return packed(format, {PackRule{.rule = CodeRule::kNormCodebook, .corrects_norm = corrects_norm}},
                x);
}

/// Keys of the worked examples of docs/formulas.md after their rotation.
TEST(Pack, RowsByTheirNormOfTheWorkedExamples) {
  struct Case {
    std::vector<float> x;
    CodeFormat code;
    float scale, norm;
    std::vector<int> bytes;
    std::vector<float> back;
  };
  constexpr CodeFormat k3 = CodeFormat::kLloydMax3;
  constexpr CodeFormat k4 = CodeFormat::kLloydMax4;
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const float infinity = std::numeric_limits<float>::infinity();
  const std::vector<float> key{2.5f, -2.5f, 0.5f, 1.5f};  // 1 2 -1 3
  for (const Case& c :
       {Case{key,
             k3,
             3.76953125f,
             3.873046875f,
             {14, 11},
             {2.522970f, -2.522970f, 0.447109f, 1.437135f}},
        Case{key,
             k4,
             4.09765625f,
             3.873046875f,
             {60, 168},
             {2.556844f, -2.556844f, 0.264501f, 1.366589f}},
        Case{{1, 0, 0, 0},
             k3,
             0.9130859375f,
             1,
             {39, 9},
             {0.982456f, 0.108302f, 0.108302f, 0.108302f}},
        Case{{0, 0, 0, 0}, k4, 0, 0, {136, 136}, {0, 0, 0, 0}},
        Case{{nan, nan}, k4, 0, 0, {136}, {0, 0}}, Case{{infinity, 1}, k4, 0, 0, {136}, {0, 0}}}) {
    const Block block = packed_by_norm(c.x, c.code);
    EXPECT_THAT(block.scale(), ElementsAre(c.scale));
    EXPECT_THAT(packed_by_norm(c.x, c.code, false).scale(), ElementsAre(c.norm));
    std::vector<int> bytes;
    for (const std::byte b : block.codes) bytes.push_back(static_cast<int>(b));
    EXPECT_EQ(bytes, c.bytes);
    EXPECT_THAT(block.unpacked(), Pointwise(FloatNear(2e-6f), c.back));
  }
}

/// The mean squared error of rows of 128 normal numbers with their norm kept.
TEST(Pack, RowsByTheirNormErrorOfNormalNumbers) {
  const std::vector<float> x = normal(128 * 20000);
  for (const auto& [code, error] :
       {std::pair(CodeFormat::kLloydMax3, 0.03369), std::pair(CodeFormat::kLloydMax4, 0.00919)}) {
    PackedFormat format = one_group(4, 128, DType::kF32);
    format.section[0] = section_of(code, 128);
    const std::vector<float> y =
        packed(format, {PackRule{.rule = CodeRule::kNormCodebook}}, x).unpacked();
    EXPECT_NEAR(mse(x, y), error, 1e-4);
  }
}

/// Values of TurboQuant's published code: 0 1.5 2.5 7 in 3 bits, whose step is 1.
TEST(Pack, CodesInTheMiddleOfTwo) {
  const std::vector<float> x{0, 1.5f, 2.5f, 7};
  EXPECT_THAT(packed(one_group(3, 4), {rule(Rounding::kNearestEven)}, x).integers(),
              ElementsAre(0, 2, 2, 7));
  EXPECT_THAT(packed(one_group(3, 4), {rule(Rounding::kHalfUp)}, x).integers(),
              ElementsAre(0, 2, 3, 7));
}

PackedFormat trits(int n, CodeFormat code = CodeFormat::kTrit5) {
  PackedFormat format;
  format.axis = ScaleAxis::kChannel;
  format.meta = DType::kF32;
  format.section[0] = {.code = code, .channels = n, .zero_stored = false, .slope = 1, .offset = -1};
  return format;
}

TEST(Pack, TernaryGroupOfTheWorkedExamples) {  // docs/formulas.md, "Worked examples"
  const std::vector<float> v{0.1f, -0.9f, 0.5f, -0.3f, 1.2f, 0, -0.6f, 0.4f};
  struct Case {
    float gamma;
    TernaryScale scale;
    double error;
    float value;
  };
  for (const Case& c :
       {Case{0.7f, TernaryScale::kUnit, 0.115, 1}, Case{0.7f, TernaryScale::kMean, 0.09625, 0.5f},
        Case{0.7f, TernaryScale::kNonZero, 0.066, 0.72f}, Case{0.5f, TernaryScale::kUnit, 0.165, 1},
        Case{0.5f, TernaryScale::kMean, 0.09, 0.5f},
        Case{0.5f, TernaryScale::kNonZero, 0.073125, 0.65f}}) {
    PackRule ternary;
    ternary.rule = CodeRule::kTernary;
    ternary.gamma = c.gamma;
    ternary.ternary_scale = c.scale;
    for (const CodeFormat code : {CodeFormat::kTrit5, CodeFormat::kTrit2b}) {
      const Block block = packed(trits(1, code), {ternary}, v);
      EXPECT_THAT(block.integers(), ElementsAre(1, 0, 2, c.gamma > 0.6f ? 1 : 0, 2, 1, 0, 2));
      EXPECT_NEAR(mse(v, block.unpacked()), c.error, 1e-6);
      EXPECT_THAT(block.scale(), ElementsAre(FloatNear(c.value, 1e-6f)));
    }
  }
}

/// Mean magnitudes 0.45 and 0.55, thresholds 0.315 and 0.385 (gamma 0.7).
TEST(Pack, TernaryGroupsOfARow) {
  const std::vector<float> v{0.1f, -0.9f, 0.5f, -0.3f, 1.2f, 0, -0.6f, 0.4f};
  PackRule ternary;
  ternary.rule = CodeRule::kTernary;
  for (const CodeFormat code : {CodeFormat::kTrit5, CodeFormat::kTrit2b}) {
    PackedFormat format = trits(8, code);
    format.axis = ScaleAxis::kToken;
    format.group_size = 4;
    const Block block = packed(format, {ternary}, v);
    EXPECT_THAT(block.integers(), ElementsAre(1, 0, 2, 1, 2, 1, 0, 2));
    EXPECT_THAT(block.scale(), ElementsAre(FloatNear(0.45f, 1e-6f), FloatNear(0.55f, 1e-6f)));
    EXPECT_THAT(block.unpacked(), Pointwise(FloatNear(1e-6f), {0.0f, -0.45f, 0.45f, 0.0f, 0.55f,
                                                               0.0f, -0.55f, 0.55f}));
  }
}

TEST(Pack, TernaryEdges) {  // exactly at the threshold is 0; nothing but zeros has scale 0
  PackRule ternary;
  ternary.rule = CodeRule::kTernary;
  ternary.gamma = 1;
  const Block edge = packed(trits(1), {ternary}, {1, -1, 1, -1});
  EXPECT_THAT(edge.unpacked(), ElementsAre(0, 0, 0, 0));
  ternary.ternary_scale = TernaryScale::kNonZero;
  const Block zeros = packed(trits(2), {ternary}, std::vector<float>(8, 0.0f));
  EXPECT_THAT(zeros.unpacked(), ::testing::Each(0));
  EXPECT_THAT(zeros.scale(), ElementsAre(0, 0));
}

TEST(Pack, TernaryOfGaussians) {  // docs/formulas.md, "Worked examples"
  const std::vector<float> x = normal(1 << 20);
  PackRule ternary;
  ternary.rule = CodeRule::kTernary;
  const Block mean = packed(trits(1), {ternary}, x);
  const std::vector<int> digits = mean.integers();
  const auto zeros = std::count(digits.begin(), digits.end(), 1);
  EXPECT_NEAR(1 - static_cast<double>(zeros) / static_cast<double>(x.size()), 0.5765, 0.002);
  EXPECT_NEAR(mse(x, mean.unpacked()), 0.278, 0.002);
  ternary.ternary_scale = TernaryScale::kNonZero;
  const Block twn = packed(trits(1), {ternary}, x);
  EXPECT_NEAR(static_cast<double>(twn.scale()[0]), 1.1842, 0.003);
  EXPECT_NEAR(mse(x, twn.unpacked()), 0.192, 0.002);
}

TEST(Pack, SignsOfTheWorkedExamples) {  // docs/formulas.md, "Worked examples"
  PackedFormat format;
  format.axis = ScaleAxis::kChannel;
  format.meta = DType::kF32;
  format.section[0] = {
      .code = CodeFormat::kBits1, .channels = 4, .zero_stored = false, .slope = 2, .offset = -1};
  PackRule sign;
  sign.rule = CodeRule::kSign;
  const std::vector<float> spectra{10, -2, -2, 2, 1.5f * 1 - 1, 1.5f, 8.5f - 2, -2};
  // (2, -1, .5, -3): Re_0 -1.5, Re_1 1.5, Re_2 6.5, Im_1 -2.
  const Block block = packed(format, {sign}, {10, -2, -2, 2, -1.5f, 1.5f, 6.5f, -2});
  EXPECT_THAT(block.integers(), ElementsAre(1, 0, 0, 1, 0, 1, 1, 0));
  EXPECT_THAT(block.scale(), ElementsAre(5.75f, 1.75f, 4.25f, 2));
  EXPECT_THAT(block.unpacked(), ElementsAre(5.75f, -1.75f, -4.25f, 2, -5.75f, 1.75f, 4.25f, -2));
  format.section[0] = {.code = CodeFormat::kBits1,
                       .channels = 4,
                       .zero_stored = false,
                       .slope = 1,
                       .offset = 0,
                       .split = 3,
                       .offset_after = -0.5f};
  EXPECT_THAT(packed(format, {sign}, {10, -2, -2, 2, -1.5f, 1.5f, 6.5f, -2}).unpacked(),
              ElementsAre(5.75f, 0, 0, 1, 0, 1.75f, 4.25f, -1));
}

/// Of the element's own group (docs/formulas.md, "Range"): s/2, and what f16 scales and zero
/// points lose.
TEST(Pack, ErrorsAreAtMostHalfAStep) {
  constexpr size_t kRows = 33;
  constexpr size_t kGroup = 32;
  for (const DType meta : {DType::kF16, DType::kF32}) {
    for (int bits = 1; bits <= 8; ++bits) {
      for (const size_t width : {size_t{1}, size_t{7}, size_t{32}, size_t{80}}) {
        std::vector<float> x = normal(kRows * width, 7);
        // Groups differ in size a thousandfold, so that no group passes by another's step.
        for (size_t i = 0; i < x.size(); ++i) {
          x[i] *= std::pow(
              10.0f, static_cast<float>(i / width % 4) - static_cast<float>(i % width / kGroup));
        }
        for (const ScaleAxis axis : {ScaleAxis::kHead, ScaleAxis::kChannel, ScaleAxis::kToken}) {
          PackedFormat format = channels(bits, static_cast<int>(width), meta);
          format.axis = axis;
          format.group_size = kGroup;
          const std::vector<float> y = packed(format, {rule()}, x).unpacked();
          const auto group_of = [&](size_t i) {
            const size_t row = i / width;
            const size_t channel = i % width;
            if (axis == ScaleAxis::kHead) return size_t{0};
            return axis == ScaleAxis::kChannel ? channel : row * 100 + channel / kGroup;
          };
          std::map<size_t, std::pair<double, double>> ends;
          for (size_t i = 0; i < x.size(); ++i) {
            const auto value = static_cast<double>(x[i]);
            const auto [at, added] = ends.try_emplace(group_of(i), value, value);
            at->second.first = std::min(at->second.first, value);
            at->second.second = std::max(at->second.second, value);
          }
          for (size_t i = 0; i < x.size(); ++i) {
            const auto [low, high] = ends.at(group_of(i));
            const double step = (high - low) / ((1 << bits) - 1);
            const double lost =
                (meta == DType::kF16 ? 0x1p-11 : 0x1p-22) * (high - low + std::abs(low));
            ASSERT_NEAR(static_cast<double>(x[i]), static_cast<double>(y[i]),
                        step / 2 + 1.001 * lost + 0x1p-24)
                << bits << " bits, element " << i;
          }
        }
      }
    }
  }
}

/// Codes come from the range as it is, not as f16 gives its ends back (docs/formulas.md,
/// "Range").
TEST(Pack, CodesAreMadeInTheExactRange) {
  // 1.0003 is 1 in f16. 0.5001 lies below the middle of 0 and 1.0003, and above that of 0 and 1.
  const Block step = packed(one_group(1, 3, DType::kF16), {rule()}, {0, 1.0003f, 0.5001f});
  EXPECT_THAT(step.integers(), ElementsAre(0, 1, 0));
  EXPECT_THAT(step.unpacked(), ElementsAre(0, 1, 0));
  // Next to 1000 f16 has halves: 1000.3 is 1000.5, and 1000.9 would be nearer to it than to 1001.5.
  const Block start = packed(one_group(1, 3, DType::kF16), {rule()}, {1000.3f, 1001.3f, 1000.9f});
  EXPECT_THAT(start.integers(), ElementsAre(0, 1, 1));
  EXPECT_THAT(start.zero(), ElementsAre(1000.5f));
}

TEST(Pack, EmptyRangesAndNan) {
  const float nan = std::nanf("");
  const Block constant = packed(one_group(2, 3), {rule()}, {0.3f, 0.3f, 0.3f});
  EXPECT_THAT(constant.integers(), ElementsAre(0, 0, 0));
  EXPECT_THAT(constant.unpacked(), ElementsAre(0.3f, 0.3f, 0.3f));
  const Block some = packed(one_group(2, 3), {rule()}, {nan, 1, 4});
  EXPECT_THAT(some.integers(), ElementsAre(0, 0, 3));
  EXPECT_THAT(packed(one_group(2, 2), {rule()}, {nan, nan}).unpacked(), ElementsAre(0, 0));
  EXPECT_THAT(packed(one_group(2, 2), {rule(Rounding::kNearestEven, 0.1f)}, {nan, nan}).unpacked(),
              ElementsAre(0, 0));
  // A range too small for its steps.
  const float tiny = std::numeric_limits<float>::denorm_min();
  EXPECT_THAT(packed(one_group(8, 2), {rule()}, {0, tiny}).integers(), ElementsAre(0, 0));
}

TEST(Pack, BitsLieLowestFirst) {  // docs/formulas.md, "Layout of codes"
  uint8_t row[4];
  const uint8_t two[] = {3, 0, 1, 2};
  pack_row(row, CodeFormat::kBits2, two, 4);
  EXPECT_EQ(row[0], 0x93);
  const uint8_t one[] = {1, 0, 1, 1, 0, 0, 0, 1};
  pack_row(row, CodeFormat::kBits1, one, 8);
  EXPECT_EQ(row[0], 0x8D);
  const uint8_t digits[] = {1, 0, 2, 1, 2, 1, 0, 2};
  pack_row(row, CodeFormat::kTrit5, digits, 8);
  EXPECT_EQ(row[0], 208);
  EXPECT_EQ(row[1], 127);
  pack_row(row, CodeFormat::kTrit2b, digits, 8);
  EXPECT_EQ(row[0] | row[1] << 8, 34401);
}

TEST(Pack, EveryWidthComesBack) {
  std::mt19937 rng(3);
  for (int format = 1; format < static_cast<int>(CodeFormat::kEnd); ++format) {
    const auto code = static_cast<CodeFormat>(format);
    for (const int n : {1, 2, 5, 8, 9, 31, 80, 129}) {
      std::vector<uint8_t> codes(static_cast<size_t>(n));
      for (uint8_t& c : codes) {
        c = static_cast<uint8_t>(rng() % static_cast<unsigned>(max_code(code) + 1));
      }
      std::vector<uint8_t> row(code_row_bytes(code, n) + 1, 0xee);
      pack_row(row.data(), code, codes.data(), n);
      for (int i = 0; i < n; ++i) {
        const int stored = codes[static_cast<size_t>(i)];
        ASSERT_EQ(code_at(row.data(), code, i), integer_of(code, stored)) << format << " " << i;
      }
      EXPECT_EQ(row.back(), 0xee);
    }
  }
}

TEST(Pack, OrderWithinAHeadDoesNotMatter) {
  std::vector<float> x = normal(16 * 32, 5);
  PackedFormat format = channels(1, 32);
  format.axis = ScaleAxis::kHead;
  const PackRule quantiles = rule(Rounding::kNearestEven, 0.2f);
  const Block before = packed(format, {quantiles}, x);
  std::shuffle(x.begin(), x.end(), std::mt19937(2));
  const Block after = packed(format, {quantiles}, x);
  EXPECT_EQ(before.scale(), after.scale());
  EXPECT_EQ(before.zero(), after.zero());
  x[3] = 1e6f;  // one huge value hardly moves a quantile
  EXPECT_NEAR(packed(format, {quantiles}, x).scale()[0], before.scale()[0], 0.05f);
  EXPECT_GT(packed(format, {rule()}, x).scale()[0], 1e5f);
}

/// Two jobs of four numbers and one of two; the second joins the first.
class SharedRange {
 public:
  explicit SharedRange(const PackRule& rule, int threads = 1) : rule_(rule), pool_(threads) {
    format_.axis = ScaleAxis::kHead;
    format_.meta = DType::kF32;
    format_.section[0] = {.code = CodeFormat::kBits2, .channels = 2};
  }

  void pack_jobs(const std::vector<bool>& joins) {
    Stream stream(pool_);
    std::vector<PackJob> jobs;
    for (size_t i = 0; i < rows_.size(); ++i) {
      Block& block = blocks_[i];
      block.format = format_;
      block.rows = static_cast<int>(rows_[i].size()) / 2;
      block.codes.resize(static_cast<size_t>(block.rows) * format_.row_bytes());
      block.scales.resize(4);
      block.zeros.resize(4);
      jobs.push_back({rows_[i].data(), block.rows, block.codes.data(), block.scales.data(),
                      block.zeros.data(), joins[i]});
    }
    pack(format_, {rule_}, jobs, stream);
  }
  const Block& block(size_t i) const { return blocks_[i]; }

 private:
  PackRule rule_;
  PackedFormat format_;
  ThreadPool pool_;
  std::vector<std::vector<float>> rows_{{0, 1, 2, 3}, {3, 4, 5, 6}, {8, 2}};
  std::array<Block, 3> blocks_;
};

TEST(Pack, JobsThatJoinShareTheirRange) {
  for (const int threads : {1, 3}) {
    SharedRange shared(rule(), threads);
    shared.pack_jobs({false, true, false});
    // 0 to 6 in three steps of 2; ties to even.
    EXPECT_THAT(shared.block(0).integers(), ElementsAre(0, 0, 1, 2));
    EXPECT_THAT(shared.block(1).integers(), ElementsAre(2, 2, 2, 3));
    EXPECT_THAT(shared.block(2).integers(), ElementsAre(3, 0));
    EXPECT_THAT(shared.block(0).scale(), ElementsAre(2));
    EXPECT_THAT(shared.block(1).scale(), ElementsAre(2));
    EXPECT_THAT(shared.block(1).zero(), ElementsAre(0));
    EXPECT_THAT(shared.block(2).scale(), ElementsAre(2));
    EXPECT_THAT(shared.block(2).zero(), ElementsAre(2));
  }
}

/// The quantile 1/7 of 0 1 2 3 3 4 5 6 lies at place 1, that of 6/7 at place 6: 1 to 5.
TEST(Pack, QuantilesOfJobsThatJoin) {
  SharedRange shared(rule(Rounding::kNearestEven, 1.0f / 7));
  shared.pack_jobs({false, true, true});
  // With 8 and 2 there are ten numbers: places 9/7 and 54/7 of 0 1 2 2 3 3 4 5 6 8.
  EXPECT_THAT(shared.block(1).zero(), ElementsAre(FloatNear(9.0f / 7, 1e-5f)));
  EXPECT_THAT(shared.block(2).scale(),
              ElementsAre(FloatNear((5 + 5.0f / 7 - 9.0f / 7) / 3, 1e-5f)));
  shared.pack_jobs({false, true, false});
  EXPECT_THAT(shared.block(0).zero(), ElementsAre(FloatNear(1, 1e-5f)));
  EXPECT_THAT(shared.block(1).scale(), ElementsAre(FloatNear(4.0f / 3, 1e-5f)));
}

/// Stored codes 0 to 3 by row and new ones by column become 3 minus the new one, but for (1, 2),
/// which becomes 0, and (3, 3), which becomes 3.
TEST(Pack, MergesCodesWithThoseStored) {
  PackRule merging = rule();
  for (uint32_t stored = 0; stored < 4; ++stored) {
    for (uint32_t made = 0; made < 4; ++made) {
      const uint32_t merged = stored == 1 && made == 2 ? 0 : stored + made == 6 ? 3 : 3 - made;
      merging.merge |= merged << 2 * (4 * stored + made);
    }
  }
  ThreadPool pool(2);
  Stream stream(pool);
  const auto merge = [&](Block& block, const std::vector<float>& x) {
    const PackJob job{x.data(), block.rows, block.codes.data(), block.scales.data(),
                      block.zeros.data()};
    pack(block.format, {merging}, {&job, 1}, stream);
    return block.integers();
  };
  // Ten channels fill a unit of eight codes and a part of the next.
  const std::vector<float> x{0, 1, 2, 3, 0, 1, 2, 3, 3, 0};
  const std::vector<float> y{20, 20, 24, 26, 24, 22, 26, 26, 20, 22};  // codes 0 0 2 3 2 1 3 3 0 1
  Block token = packed(one_group(2, 10), {rule()}, x);
  EXPECT_THAT(merge(token, y), ElementsAre(3, 3, 1, 3, 1, 2, 0, 3, 3, 2));
  EXPECT_THAT(token.scale(), ElementsAre(2));
  EXPECT_THAT(token.zero(), ElementsAre(20));
  Block channel = packed(channels(2, 1), {rule()}, x);  // each code in a byte of its own
  EXPECT_THAT(merge(channel, y), ElementsAre(3, 3, 1, 3, 1, 2, 0, 3, 3, 2));
  const std::vector<float> bits{0, 0, 1, 1, 0, 1, 0, 0, 1, 0};
  Block one = packed(one_group(1, 10), {rule()}, bits);
  merging.merge = 3u << 30 | 1u << 2 * (4 * 1 + 0);  // 1 and 0 become 1, all others 0
  EXPECT_THAT(merge(one, {5, 6, 5, 6, 5, 5, 6, 6, 5, 5}),
              ElementsAre(0, 0, 1, 0, 0, 1, 0, 0, 1, 0));
}

TEST(Pack, RefusesWhatAFormatCannotSay) {
  EXPECT_THROW(SharedRange(rule()).pack_jobs({true, true, false}), Error);
  PackRule merging = rule();
  merging.merge = 3u << 30;
  EXPECT_THROW(packed(one_group(3, 8), {merging}, std::vector<float>(8, 1.0f)), Error);

  const std::vector<float> x(8, 1.0f);
  PackRule ternary;
  ternary.rule = CodeRule::kTernary;
  EXPECT_THROW(packed(channels(2, 4), {ternary}, x), Error);
  EXPECT_THROW(packed(trits(4), {rule()}, x), Error);
  PackedFormat of_head = trits(4);
  of_head.axis = ScaleAxis::kHead;
  EXPECT_THROW(packed(of_head, {ternary}, x), Error);
  PackedFormat two = channels(2, 4);
  two.sections = 2;
  two.section[1] = two.section[0];
  two.axis = ScaleAxis::kToken;
  two.group_size = 4;
  EXPECT_THROW(packed(two, {rule(), rule()}, x), Error);
}

}  // namespace
}  // namespace kvlm
