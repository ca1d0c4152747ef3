#include "llm/rope_angles.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "tests/allocations.h"

namespace kvlm {
namespace {

/// Angles of transformers 5.23.0 (torch 2.15.0, CPU). For each entry:
///
///   config = LlamaConfig(hidden_size=4 * d, num_attention_heads=4, head_dim=d,
///                        max_position_embeddings=max_positions, rope_parameters={...})
///   rope = LlamaRotaryEmbedding(config)
///   cos, sin = rope(torch.zeros(1, 1), torch.tensor([list(range(length))]))
///   print(rope.inv_freq, cos[0, position, : d // 2], sin[0, position, : d // 2])
struct Reference {
  std::string name;
  RopeConfig config;
  int64_t length;
  int32_t position;
  std::vector<float> inverse;
  std::vector<float> cos;
  std::vector<float> sin;
};

std::vector<Reference> references() {
  return {
      Reference{
          "default",
          {.type = RopeConfig::Type::kDefault,
           .theta = 10000,
           .rotary_dim = 12,
           .max_positions = 64},
          64,
          63,
          {1.0f, 0.215443447f, 0.046415884f, 0.00999999978f, 0.00215443433f, 0.000464158948f},
          {0.985896587f, 0.534765244f, -0.976463318f, 0.808027506f, 0.990802884f, 0.999572456f},
          {0.167355701f, 0.845000625f, 0.215683624f, 0.589144766f, 0.135312989f, 0.0292378478f}},
      Reference{"default_theta_1e6",
                {.type = RopeConfig::Type::kDefault,
                 .theta = 1e+06,
                 .rotary_dim = 16,
                 .max_positions = 64},
                64,
                63,
                {1.0f, 0.177827939f, 0.0316227786f, 0.00562341325f, 0.00100000005f, 0.00017782794f,
                 3.16227743e-05f, 5.62341347e-06f},
                {0.985896587f, 0.206098333f, -0.40907374f, 0.937898219f, 0.998016179f, 0.999937236f,
                 0.999998033f, 0.99999994f},
                {0.167355701f, -0.978531301f, 0.912501335f, 0.346910536f, 0.0629583374f,
                 0.0112029258f, 0.00199223333f, 0.000354275049f}},
      Reference{
          "linear",
          {.type = RopeConfig::Type::kLinear,
           .theta = 10000,
           .rotary_dim = 12,
           .max_positions = 64,
           .factor = 2.5},
          64,
          63,
          {0.400000006f, 0.0861773789f, 0.0185663532f, 0.00399999972f, 0.000861773733f,
           0.000185663579f},
          {0.997738898f, 0.656964898f, 0.390446097f, 0.968415678f, 0.998526573f, 0.999931574f},
          {0.067208834f, -0.753921151f, 0.920625806f, 0.249341264f, 0.0542650744f, 0.0116965389f}},
      Reference{
          "dynamic_below",
          {.type = RopeConfig::Type::kDynamic,
           .theta = 10000,
           .rotary_dim = 12,
           .max_positions = 48,
           .factor = 2},
          30,
          29,
          {1.0f, 0.215443447f, 0.046415884f, 0.00999999978f, 0.00215443433f, 0.000464158948f},
          {-0.748057544f, 0.999376118f, 0.222848713f, 0.958243906f, 0.998048842f, 0.999909401f},
          {-0.663633883f, -0.0353180058f, 0.974853039f, 0.28595221f, 0.0624379553f, 0.0134602031f}},
      Reference{
          "dynamic_at_the_limit",
          {.type = RopeConfig::Type::kDynamic,
           .theta = 10000,
           .rotary_dim = 12,
           .max_positions = 48,
           .factor = 2},
          48,
          47,
          {1.0f, 0.215443447f, 0.046415884f, 0.00999999978f, 0.00215443433f, 0.000464158948f},
          {-0.992335439f, -0.764156222f, -0.573482156f, 0.891568303f, 0.994877756f, 0.999762058f},
          {0.123573124f, -0.645031214f, 0.81921804f, 0.452886283f, 0.101085462f, 0.021813741f}},
      Reference{
          "dynamic_one_past",
          {.type = RopeConfig::Type::kDynamic,
           .theta = 10000,
           .rotary_dim = 12,
           .max_positions = 48,
           .factor = 2},
          49,
          48,
          {1.0f, 0.213691667f, 0.0456641205f, 0.0097580431f, 0.00208521215f, 0.000445592566f},
          {-0.640144348f, -0.673086286f, -0.581915021f, 0.892298043f, 0.994995177f, 0.999771297f},
          {-0.768254638f, -0.739563942f, 0.813249588f, 0.451446742f, 0.0999231488f, 0.0213868134f}},
      Reference{
          "dynamic_far_past",
          {.type = RopeConfig::Type::kDynamic,
           .theta = 10000,
           .rotary_dim = 12,
           .max_positions = 48,
           .factor = 2},
          97,
          96,
          {1.0f, 0.172468975f, 0.0297455471f, 0.00513018528f, 0.000884797657f, 0.000152600231f},
          {-0.180430457f, -0.66068995f, -0.959374309f, 0.881154597f, 0.996394694f, 0.999892712f},
          {0.983587742f, -0.750658929f, 0.282136351f, 0.472828299f, 0.0848384723f, 0.0146490978f}},
      Reference{"llama3",
                {.type = RopeConfig::Type::kLlama3,
                 .theta = 10000,
                 .rotary_dim = 16,
                 .max_positions = 512,
                 .factor = 8,
                 .low_freq_factor = 1,
                 .high_freq_factor = 4,
                 .original_max_positions = 64},
                512,
                511,
                {1.0f, 0.244384587f, 0.0130422562f, 0.00395284733f, 0.00124999997f, 0.000395284733f,
                 0.000125000006f, 3.95284733e-05f},
                {-0.471678883f, 0.708671808f, 0.928141654f, -0.434162855f, 0.802841663f,
                 0.979669213f, 0.997960687f, 0.999796033f},
                {0.881770372f, -0.705538332f, 0.372227132f, 0.900834382f, 0.5961923f, 0.200619757f,
                 0.0638315752f, 0.0201976765f}},
      Reference{"yarn",
                {.type = RopeConfig::Type::kYarn,
                 .theta = 10000,
                 .rotary_dim = 16,
                 .max_positions = 256,
                 .factor = 4,
                 .original_max_positions = 64},
                256,
                255,
                {1.0f, 0.237170815f, 0.049999997f, 0.00790569466f, 0.00249999994f, 0.000790569466f,
                 0.000250000012f, 7.90569466e-05f},
                {-0.981844306f, -0.802795172f, 1.11948633f, -0.490292132f, 0.914986968f,
                 1.11557043f, 1.13631654f, 1.13839805f},
                {-0.576592445f, -0.807463288f, 0.207911685f, 1.02766275f, 0.67769897f, 0.227990612f,
                 0.0725384802f, 0.0229526702f}},
      // By the same formulas in f32 (numpy), which give the one above to 1e-7.
      Reference{"yarn_not_truncated",
                {.type = RopeConfig::Type::kYarn,
                 .theta = 10000,
                 .rotary_dim = 16,
                 .max_positions = 256,
                 .factor = 4,
                 .original_max_positions = 64,
                 .truncate = false,
                 .attention_factor = 0.8371949816203595},
                256,
                255,
                {1.0f, 0.198583528f, 0.0255952496f, 0.00790569466f, 0.00249999994f, 0.000790569466f,
                 0.000250000012f, 7.90569466e-05f},
                {-0.721916258f, 0.779530644f, 0.812476933f, -0.360494882f, 0.672758341f,
                 0.820240438f, 0.835494339f, 0.837024868f},
                {-0.423948556f, 0.305331647f, 0.201932445f, 0.755604982f, 0.498288661f,
                 0.167633638f, 0.0533350445f, 0.0168763082f}},
      Reference{"yarn_given_everything",
                {.type = RopeConfig::Type::kYarn,
                 .theta = 1e+06,
                 .rotary_dim = 16,
                 .max_positions = 256,
                 .factor = 4,
                 .original_max_positions = 64,
                 .beta_fast = 8,
                 .beta_slow = 2,
                 .attention_factor = 1.25},
                256,
                255,
                {1.0f, 0.0444569848f, 0.00790569466f, 0.00140585331f, 0.000250000012f,
                 4.44569851e-05f, 7.90569356e-06f, 1.40585337e-06f},
                {-1.07787955f, 0.417985737f, -0.538248122f, 1.17053354f, 1.24746084f, 1.24991965f,
                 1.2499975f, 1.24999988f},
                {-0.632989526f, -1.17804408f, 1.12817955f, 0.438578784f, 0.0796335489f,
                 0.0141703608f, 0.00251993793f, 0.000448115752f}},
      Reference{
          "yarn_of_a_released_shape",
          {.type = RopeConfig::Type::kYarn,
           .theta = 1e+06,
           .rotary_dim = 64,
           .max_positions = 131072,
           .factor = 4,
           .original_max_positions = 32768},
          1000,
          999,
          {1.0f,
           0.649381638f,
           0.421696514f,
           0.273841977f,
           0.177827939f,
           0.115478203f,
           0.0749894157f,
           0.0486967526f,
           0.0316227786f,
           0.0205352511f,
           0.0133352149f,
           0.00865964312f,
           0.00515479548f,
           0.0030431177f,
           0.00177853031f,
           0.00102661771f,
           0.000583333371f,
           0.000324690831f,
           0.000175706868f,
           9.12806499e-05f,
           4.44569851e-05f,
           2.88695483e-05f,
           1.87473561e-05f,
           1.21741887e-05f,
           7.90569356e-06f,
           5.13381246e-06f,
           3.33380353e-06f,
           2.16491094e-06f,
           1.40585337e-06f,
           9.1293532e-07f,
           5.92843435e-07f,
           3.84981632e-07f},
          {1.13823068f,  0.00756522221f, 1.08730376f,   -1.10334909f,  -0.170302182f, -0.728805244f,
           1.00795591f,  -0.0530751683f, 1.12119305f,   -0.107285045f, 0.828834295f,  -0.814420938f,
           0.482154012f, -1.1327672f,    -0.232852563f, 0.590485871f,  0.950701416f,  1.0792532f,
           1.12113321f,  1.13389862f,    1.1375066f,    1.13815594f,   1.13842976f,   1.13854516f,
           1.13859391f,  1.13861442f,    1.13862312f,   1.13862681f,   1.13862836f,   1.13862896f,
           1.1386292f,   1.13862932f},
          {-0.0301289912f,  1.13860428f,    0.338005364f,   -0.281243443f,  1.12582147f,
           0.874825597f,    -0.529624343f,  -1.13739169f,   0.19850193f,    1.13356376f,
           0.780711651f,    0.795735836f,   -1.03150594f,   0.115393013f,   1.11456573f,
           0.973551929f,    0.626613021f,   0.362890393f,   0.198840186f,   0.103687063f,
           0.0505527891f,   0.0328342952f,  0.0213236976f,  0.0138476864f,  0.00899256021f,
           0.00583963934f,  0.00379216415f, 0.00246256427f, 0.00159914466f, 0.0010384554f,
           0.000674353912f, 0.000437913055f}}};
}

class RopeReference : public testing::TestWithParam<Reference> {};

TEST_P(RopeReference, InverseFrequenciesEqualTransformers) {
  const Reference& reference = GetParam();
  const std::vector<float> inverse = rope_frequencies(reference.config, reference.length);
  ASSERT_EQ(inverse.size(), reference.inverse.size());
  for (size_t i = 0; i < inverse.size(); ++i) {
    EXPECT_NEAR(inverse[i], reference.inverse[i], 5e-7f * reference.inverse[i]) << i;
  }
}

TEST_P(RopeReference, CosAndSinEqualTransformers) {
  const Reference& reference = GetParam();
  const RopeAngles angles(reference.config);
  const auto half = static_cast<int64_t>(reference.cos.size());
  // Between other rows, so that a row finds its place.
  const std::vector<Position> positions = {Position::on_every_axis(0),
                                           Position::on_every_axis(reference.position),
                                           Position::on_every_axis(1)};
  Tensor cos(DType::kF32, {3, half});
  Tensor sin(DType::kF32, {3, half});
  angles.fill(positions, reference.length, cos, sin);
  // One unit in the last place of the frequency, times the position.
  const float tolerance = 1e-6f + 1.2e-7f * static_cast<float>(reference.position);
  for (int64_t i = 0; i < half; ++i) {
    EXPECT_NEAR(cos.as<float>()[half + i], reference.cos[static_cast<size_t>(i)], tolerance) << i;
    EXPECT_NEAR(sin.as<float>()[half + i], reference.sin[static_cast<size_t>(i)], tolerance) << i;
    EXPECT_EQ(sin.as<float>()[i], 0.0f) << "position 0 does not rotate";
  }
}

INSTANTIATE_TEST_SUITE_P(, RopeReference, testing::ValuesIn(references()),
                         [](const auto& param) { return param.param.name; });

RopeConfig dynamic() {
  RopeConfig config;
  config.type = RopeConfig::Type::kDynamic;
  config.rotary_dim = 12;
  config.max_positions = 48;
  config.factor = 2;
  return config;
}

/// Generation past max_positions: every step has the frequencies of its own length, and a sequence
/// that is short again has those of the start.
TEST(RopeAngles, DynamicFollowsTheLengthStepByStep) {
  const RopeAngles angles(dynamic());
  RopeConfig plain = dynamic();
  plain.type = RopeConfig::Type::kDefault;
  const std::vector<float> start = rope_frequencies(plain, 1);
  Tensor cos(DType::kF32, {1, 6});
  Tensor sin(DType::kF32, {1, 6});
  std::vector<float> previous = start;
  for (int32_t position = 40; position < 100; ++position) {
    const std::vector<float> inverse = rope_frequencies(dynamic(), position + 1);
    const Position row = Position::on_every_axis(position);
    angles.fill(std::span(&row, 1), position + 1, cos, sin);
    for (size_t i = 0; i < 6; ++i) {
      const float angle = static_cast<float>(position) * inverse[i];
      EXPECT_EQ(cos.as<float>()[i], std::cos(angle)) << position;
      EXPECT_EQ(sin.as<float>()[i], std::sin(angle)) << position;
    }
    if (position < 48) {
      EXPECT_EQ(inverse, start) << position;
    } else {
      EXPECT_LT(inverse[5], previous[5]) << position;
      EXPECT_EQ(inverse[0], 1.0f);
    }
    previous = inverse;
  }
  EXPECT_EQ(rope_frequencies(dynamic(), 48), start);
}

TEST(RopeAngles, RowsOfAPromptShareTheLengthOfTheSequence) {
  const RopeAngles angles(dynamic());
  Tensor cos(DType::kF32, {65, 6});
  Tensor sin(DType::kF32, {65, 6});
  angles.fill(following_positions(0, 65), 65, cos, sin);
  const std::vector<float> inverse = rope_frequencies(dynamic(), 65);
  EXPECT_EQ(sin.as<float>()[7 * 6 + 3], std::sin(7 * inverse[3]));
}

/// Sections in a row (Qwen2-VL), and interleaved (Qwen3-VL).
TEST(RopeAngles, EveryFrequencyTurnsByItsAxis) {
  RopeConfig config;
  config.rotary_dim = 16;
  const std::vector<float> inverse = rope_frequencies(config, 1);
  const Position row{3, 50, 700};
  Tensor cos(DType::kF32, {1, 8});
  Tensor sin(DType::kF32, {1, 8});
  const auto expect_turns = [&](const std::vector<int32_t>& by) {
    RopeAngles(config).fill(std::span(&row, 1), 701, cos, sin);
    for (size_t i = 0; i < 8; ++i) {
      const float angle = static_cast<float>(by[i]) * inverse[i];
      EXPECT_EQ(cos.as<float>()[i], std::cos(angle)) << i;
      EXPECT_EQ(sin.as<float>()[i], std::sin(angle)) << i;
    }
  };
  expect_turns({3, 3, 3, 3, 3, 3, 3, 3});
  config.sections = {2, 3, 3};
  expect_turns({3, 3, 50, 50, 50, 700, 700, 700});
  config.interleaved = true;
  config.sections = {4, 2, 2};
  expect_turns({3, 50, 700, 3, 50, 700, 3, 3});
  config.sections = {2, 3, 3};  // overwritten up to 3 x 3 = 9
  expect_turns({3, 50, 700, 3, 50, 700, 3, 50});
}

TEST(RopeAngles, TextTurnsAlikeOnOneAxisAndOnThree) {
  RopeConfig config;
  config.rotary_dim = 16;
  RopeConfig sections = config;
  sections.sections = {2, 3, 3};
  Tensor one(DType::kF32, {9, 8}), one_sin(DType::kF32, {9, 8});
  Tensor three(DType::kF32, {9, 8}), three_sin(DType::kF32, {9, 8});
  RopeAngles(config).fill(following_positions(5, 9), 14, one, one_sin);
  RopeAngles(sections).fill(following_positions(5, 9), 14, three, three_sin);
  for (int64_t i = 0; i < one.view().elements(); ++i) {
    EXPECT_EQ(one.as<float>()[i], three.as<float>()[i]);
    EXPECT_EQ(one_sin.as<float>()[i], three_sin.as<float>()[i]);
  }
}

/// Those that are computed once, those that are not, and a gap between, row by row.
TEST(RopeAngles, PositionsFarApartRotateByTheFormula) {
  RopeConfig config;
  config.rotary_dim = 16;
  config.max_positions = 32768;
  const RopeAngles angles(config);
  const std::vector<float> inverse = rope_frequencies(config, 1);
  const std::vector<int32_t> places = {0, 1, 4095, 4096, 4097, 30000, 2};
  std::vector<Position> rows;
  for (const int32_t place : places) rows.push_back(Position::on_every_axis(place));
  Tensor cos(DType::kF32, {7, 8});
  Tensor sin(DType::kF32, {7, 8});
  angles.fill(rows, 30001, cos, sin);
  for (size_t i = 0; i < 7 * 8; ++i) {
    const float angle = static_cast<float>(places[i / 8]) * inverse[i % 8];
    EXPECT_EQ(cos.as<float>()[i], std::cos(angle)) << i;
    EXPECT_EQ(sin.as<float>()[i], std::sin(angle)) << i;
  }
}

/// Rows that are found have the angles that fill() gives; where one is computed none are found.
TEST(RopeAngles, FindsWhatItLooksUp) {
  RopeConfig config;
  config.rotary_dim = 16;
  config.max_positions = 32768;
  config.sections = {2, 3, 3};
  const RopeAngles angles(config);
  std::vector<Position> positions;
  for (const int32_t at : {0, 4095, 17, 17}) positions.push_back(Position::on_every_axis(at));
  std::vector<int32_t> rows(4);
  ASSERT_TRUE(angles.find(positions, rows));
  EXPECT_EQ(rows, (std::vector<int32_t>{0, 4095, 17, 17}));
  Tensor cos(DType::kF32, {4, 8});
  Tensor sin(DType::kF32, {4, 8});
  angles.fill(positions, 4096, cos, sin);
  for (size_t i = 0; i < 4 * 8; ++i) {
    const size_t at = static_cast<size_t>(rows[i / 8]) * 8 + i % 8;
    EXPECT_EQ(cos.as<float>()[i], angles.cos_table().as<float>()[at]) << i;
    EXPECT_EQ(sin.as<float>()[i], angles.sin_table().as<float>()[at]) << i;
  }
  for (const Position& other : {Position::on_every_axis(4096), Position::on_every_axis(-1),
                                Position{5, 5, 6}, Position{5, 6, 5}}) {
    positions[2] = other;
    EXPECT_FALSE(angles.find(positions, rows));
  }
  config.sections = {0, 0, 0};
  config.type = RopeConfig::Type::kDynamic;
  EXPECT_FALSE(RopeAngles(config).find(std::span(positions).first(1), rows));
}

TEST(RopeAngles, FillAllocatesNothing) {
  std::vector<RopeConfig> configs = {dynamic()};
  for (const Reference& reference : references()) configs.push_back(reference.config);
  for (const RopeConfig& config : configs) {
    const RopeAngles angles(config);
    Tensor cos(DType::kF32, {1, config.rotary_dim / 2});
    Tensor sin(DType::kF32, {1, config.rotary_dim / 2});
    const TensorView cos_view = cos;
    const TensorView sin_view = sin;
    const size_t before = allocations();
    for (int32_t position = 0; position < 100; ++position) {
      const Position row = Position::on_every_axis(position);
      angles.fill(std::span(&row, 1), position + 1, cos_view, sin_view);
    }
    EXPECT_EQ(allocations(), before);
  }
}

}  // namespace
}  // namespace kvlm
