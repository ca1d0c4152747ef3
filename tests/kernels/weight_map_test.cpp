#include "kernels/weight_map.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/kernels/values.h"

namespace kvlm {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::make_tensor;
using testing::message_of;
using testing::normal_tensor;
using testing::same_bits;
using testing::values_of;

void add_tensor(WeightMap& map, const char* name, DType dtype, const Shape& shape) {
  const bool floating = dtype != DType::kI32 && dtype != DType::kU8;
  auto tensor =
      std::make_shared<Tensor>(floating ? normal_tensor(dtype, shape, 1) : Tensor(dtype, shape));
  map.add(name, std::as_const(*tensor).view(), tensor);
}

TEST(WeightMap, GivesEachTensorOnce) {
  WeightMap map;
  add_tensor(map, "b", DType::kBF16, {2, 3});
  add_tensor(map, "a", DType::kF32, {4});
  EXPECT_TRUE(map.contains("a"));
  EXPECT_THAT(map.remaining(), ElementsAre("a", "b"));
  EXPECT_EQ(map.take("b", {2, 3}).dtype(), DType::kBF16);
  EXPECT_THAT(map.remaining(), ElementsAre("a"));
  EXPECT_THAT(message_of(ErrorCode::kCorruptFile,
                         [&] {
                           map.take("b", {2, 3});
                         }),
              HasSubstr("no tensor b, expected with shape (2, 3)"));
  EXPECT_EQ(map.take("a", {4}).dtype(), DType::kF32);
  EXPECT_EQ(map.owners().size(), 2u);
}

TEST(WeightMap, RefusesTheWrongShapeTypeAndADoubleName) {
  WeightMap map;
  add_tensor(map, "a", DType::kF32, {4});
  add_tensor(map, "ids", DType::kI32, {4});
  EXPECT_THAT(message_of(ErrorCode::kCorruptFile, [&] { map.take("a", {5}); }),
              HasSubstr("has shape (4), but config.json implies (5)"));
  EXPECT_TRUE(map.contains("a"));
  EXPECT_THAT(message_of(ErrorCode::kUnsupported, [&] { map.take("ids", {4}); }),
              HasSubstr("ids holds i32"));
  EXPECT_THAT(message_of(ErrorCode::kCorruptFile, [&] { add_tensor(map, "a", DType::kF32, {4}); }),
              HasSubstr("a is there twice"));
}

/// Numbers that tell rows apart, in (rows, 2).
void add_rows(WeightMap& map, const char* name, int64_t rows) {
  auto tensor = std::make_shared<Tensor>(DType::kF32, Shape{rows, 2});
  for (int64_t i = 0; i < 2 * rows; ++i) tensor->as<float>()[i] = static_cast<float>(i);
  map.add(name, std::as_const(*tensor).view(), tensor);
}

TEST(WeightMap, SplitsRowsIntoViews) {
  WeightMap map;
  add_rows(map, "qkv", 4);
  const WeightMap::Slice slices[] = {{"q", 2}, {"k", 1}, {"v", 1}};
  map.split("qkv", 1, slices);
  EXPECT_THAT(map.remaining(), ElementsAre("k", "q", "v"));
  const ConstTensorView q = map.take("q", {2, 2});
  EXPECT_THAT(values_of(q), ElementsAre(0, 1, 2, 3));
  EXPECT_THAT(values_of(map.take("k", {1, 2})), ElementsAre(4, 5));
  EXPECT_EQ(map.take("v", {1, 2}).data(), q.data() + 6 * sizeof(float));
  EXPECT_EQ(map.owners().size(), 1u);  // nothing was copied
  map.split("absent", 1, slices);
  EXPECT_TRUE(map.remaining().empty());
}

TEST(WeightMap, PutsTheRowsOfGroupsTogether) {
  const WeightMap::Slice slices[] = {{"q", 2}, {"k", 1}};
  for (const bool convert : {false, true}) {
    WeightMap map;
    add_rows(map, "qk", 6);
    map.split("qk", 2, slices);
    if (convert) map.convert(DType::kBF16);
    const ConstTensorView q = map.take("q", {4, 2});
    const ConstTensorView k = map.take("k", {2, 2});
    EXPECT_EQ(q.dtype(), convert ? DType::kBF16 : DType::kF32);
    EXPECT_THAT(values_of(q), ElementsAre(0, 1, 2, 3, 6, 7, 8, 9));
    EXPECT_THAT(values_of(k), ElementsAre(4, 5, 10, 11));
  }
}

TEST(WeightMap, RefusesToSplitWhatHasOtherRows) {
  const WeightMap::Slice slices[] = {{"q", 2}, {"k", 1}};
  WeightMap map;
  add_rows(map, "qk", 6);
  EXPECT_THAT(message_of(ErrorCode::kCorruptFile, [&] { map.split("qk", 3, slices); }),
              HasSubstr("tensor qk has shape (6, 2), but config.json implies 9 rows"));
  add_rows(map, "a", 6);
  add_rows(map, "k", 1);
  EXPECT_THAT(message_of(ErrorCode::kCorruptFile, [&] { map.split("a", 2, slices); }),
              HasSubstr("k is there twice"));
  map.add_unreadable("packed", "I32");
  map.split("packed", 1, std::vector<WeightMap::Slice>{{"u", 2}, {"w", 1}});
  EXPECT_THAT(message_of(ErrorCode::kUnsupported,
                         [&] {
                           map.take("u", {2, 2});
                         }),
              HasSubstr("tensor u holds I32"));
  add_rows(map, "b", 6);
  map.split("b", 2, std::vector<WeightMap::Slice>{{"x", 2}, {"y", 1}});
  EXPECT_THAT(message_of(ErrorCode::kCorruptFile,
                         [&] {
                           map.take("x", {5, 2});
                         }),
              HasSubstr("tensor x has shape (4, 2), but config.json implies (5, 2)"));
}

/// Numbers that tell elements apart, exact in every dtype.
void add_counted(WeightMap& map, const char* name, DType dtype, const Shape& shape, float from) {
  std::vector<float> values(static_cast<size_t>(shape.elements()));
  for (size_t i = 0; i < values.size(); ++i) values[i] = from + static_cast<float>(i);
  auto tensor = std::make_shared<Tensor>(make_tensor(dtype, shape, values));
  map.add(name, std::as_const(*tensor).view(), tensor);
}

TEST(WeightMap, TakesMatricesIntoALargerOne) {
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
    for (const int64_t rows : {1, 3}) {
      for (const int64_t columns : {1, 5}) {
        for (const int64_t padding : {0, 3}) {
          WeightMap map;
          add_counted(map, "q", dtype, {rows, columns}, 1);
          add_counted(map, "k", dtype, {rows, columns}, 101);
          const WeightMap::SubTensor parts[] = {{"q", {rows, columns}},
                                                {"k", {rows, columns}, rows + 1}};
          const Shape shape{2 * rows + 2, columns + padding};  // a row between and one behind
          const ConstTensorView joined = map.take_together(shape, parts);
          EXPECT_EQ(joined.dtype(), dtype);
          EXPECT_EQ(joined.shape(), shape);
          const std::vector<double> got = values_of(joined);
          for (int64_t row = 0; row < shape[0]; ++row) {
            for (int64_t i = 0; i < shape[1]; ++i) {
              const bool in_q = row < rows;
              const bool in_k = row > rows && row <= 2 * rows;
              const int64_t own = in_q ? row : row - rows - 1;
              const int64_t want =
                  (in_q || in_k) && i < columns ? (in_q ? 1 : 101) + own * columns + i : 0;
              ASSERT_EQ(got[static_cast<size_t>(row * shape[1] + i)], static_cast<double>(want))
                  << rows << " x " << columns << " + " << padding << " at " << row << ", " << i;
            }
          }
          EXPECT_TRUE(map.remaining().empty());
        }
      }
    }
  }
}

TEST(WeightMap, TakesRowsInSteps) {
  WeightMap map;
  add_counted(map, "gate", DType::kBF16, {3, 2}, 1);
  add_counted(map, "up", DType::kBF16, {3, 2}, 11);
  const WeightMap::SubTensor parts[] = {{"gate", {3, 2}, 0, 2}, {"up", {3, 2}, 1, 2}};
  EXPECT_THAT(values_of(map.take_together({8, 2}, parts)),
              ElementsAre(1, 2, 11, 12, 3, 4, 13, 14, 5, 6, 15, 16, 0, 0, 0, 0));
}

/// A convolution's kernel is a matrix of one row an output, however many dimensions it has.
TEST(WeightMap, PadsTheRowsOfAConvolution) {
  WeightMap map;
  add_counted(map, "patches", DType::kF32, {2, 3, 1, 1}, 1);
  const WeightMap::SubTensor part{"patches", {2, 3, 1, 1}};
  EXPECT_THAT(values_of(map.take_together({2, 4}, {&part, 1})),
              ElementsAre(1, 2, 3, 0, 4, 5, 6, 0));
}

TEST(WeightMap, TakesVectorsTogetherInF32) {
  WeightMap map;
  add_counted(map, "q", DType::kF16, {3}, 1);
  add_counted(map, "k", DType::kF16, {2}, 11);
  const WeightMap::SubTensor parts[] = {{"q", {3}, 0, 2}, {"k", {2}, 1, 2}};
  const ConstTensorView bias = map.take_together_f32({7}, parts);
  EXPECT_EQ(bias.dtype(), DType::kF32);
  EXPECT_THAT(values_of(bias), ElementsAre(1, 11, 2, 12, 3, 0, 0));
}

TEST(WeightMap, TakesUnlikeMatricesTogetherInF32) {
  WeightMap map;
  add_counted(map, "a", DType::kF16, {1, 2}, 1);
  add_counted(map, "b", DType::kBF16, {1, 2}, 3);
  const WeightMap::SubTensor parts[] = {{"a", {1, 2}}, {"b", {1, 2}, 1}};
  const ConstTensorView joined = map.take_together({2, 2}, parts);
  EXPECT_EQ(joined.dtype(), DType::kF32);
  EXPECT_THAT(values_of(joined), ElementsAre(1, 2, 3, 4));
}

TEST(WeightMap, KeepsNothingOfWhatItConvertedToTakeItTogether) {
  WeightMap map;
  add_counted(map, "a", DType::kF32, {1, 2}, 1);
  add_counted(map, "b", DType::kF32, {1, 2}, 3);
  map.convert(DType::kF16);
  const size_t before = map.owners().size();
  const WeightMap::SubTensor parts[] = {{"a", {1, 2}}, {"b", {1, 2}, 1}};
  const ConstTensorView joined = map.take_together({2, 2}, parts);
  EXPECT_EQ(joined.dtype(), DType::kF16);
  EXPECT_THAT(values_of(joined), ElementsAre(1, 2, 3, 4));
  EXPECT_EQ(map.owners().size(), before + 1);
}

TEST(WeightMap, RefusesToTakeTogetherWhatDoesNotFit) {
  const auto refused = [](ErrorCode code, const Shape& shape, const WeightMap::SubTensor& part) {
    WeightMap map;
    add_counted(map, "a", DType::kF32, {3, 2}, 1);
    return message_of(code, [&] { map.take_together(shape, {&part, 1}); });
  };
  const auto corrupt = ErrorCode::kCorruptFile;
  EXPECT_THAT(refused(corrupt, {3, 2}, {"a", {3, 1}}),
              HasSubstr("tensor a has shape (3, 2), but config.json implies (3, 1)"));
  EXPECT_THAT(refused(corrupt, {3, 2}, {"b", {3, 2}}), HasSubstr("no tensor b"));
  const auto invalid = ErrorCode::kInvalidArgument;
  EXPECT_THAT(refused(invalid, {3, 1}, {"a", {3, 2}}),
              HasSubstr("a of shape (3, 2) does not fit into (3, 1)"));
  EXPECT_THAT(refused(invalid, {3, 2}, {"a", {3, 2}, 1}), HasSubstr("from row 1 in steps of 1"));
  EXPECT_THAT(refused(invalid, {4, 2}, {"a", {3, 2}, 0, 2}), HasSubstr("from row 0 in steps of 2"));
  EXPECT_THAT(refused(invalid, {9, 2}, {"a", {3, 2}, -1}), HasSubstr("from row -1"));
  EXPECT_THAT(refused(invalid, {9, 2}, {"a", {3, 2}, 0, 0}), HasSubstr("in steps of 0"));
}

TEST(WeightMap, WidensSmallVectors) {
  WeightMap map;
  add_tensor(map, "norm", DType::kF16, {33});
  const Tensor same = normal_tensor(DType::kF16, {33}, 1);
  const ConstTensorView wide = map.take_f32("norm", {33});
  EXPECT_EQ(wide.dtype(), DType::kF32);
  EXPECT_EQ(values_of(wide), values_of(same));
}

TEST(WeightMap, RenamesDropsAndRefusesACollision) {
  WeightMap map;
  add_tensor(map, "model.a", DType::kF32, {1});
  add_tensor(map, "model.b", DType::kF32, {1});
  add_tensor(map, "drop", DType::kF32, {1});
  map.rename([](std::string_view name) {
    return name == "drop" ? std::string() : std::string(name.substr(6));
  });
  EXPECT_THAT(map.remaining(), ElementsAre("a", "b"));
  EXPECT_THAT(message_of(ErrorCode::kCorruptFile,
                         [&] { map.rename([](std::string_view) { return std::string("x"); }); }),
              HasSubstr("another name of x"));
  EXPECT_THAT(map.remaining(), ElementsAre("a", "b"));
}

TEST(WeightMap, ConvertsWhatIsLeft) {
  WeightMap map;
  add_tensor(map, "a", DType::kF32, {40});
  add_tensor(map, "b", DType::kBF16, {3});
  add_tensor(map, "ids", DType::kI32, {3});
  map.convert(DType::kBF16);
  const ConstTensorView a = map.take("a", {40});
  EXPECT_TRUE(same_bits(a, normal_tensor(DType::kBF16, {40}, 1)));
  EXPECT_EQ(map.take("b", {3}).dtype(), DType::kBF16);
  EXPECT_THAT(map.remaining(), ElementsAre("ids"));
}

/// Cancels after `patience` questions.
class Follower final : public Watch {
 public:
  explicit Follower(int patience) : patience_(patience) {}
  void progress(std::string_view phase, size_t done, size_t total) override {
    EXPECT_EQ(phase, "loading");
    EXPECT_EQ(total, 166u);
    told.push_back(done);
  }
  bool cancelled() const noexcept override { return patience_-- <= 0; }

  std::vector<size_t> told;

 private:
  mutable int patience_;
};

TEST(WeightMap, TellsWhatIsLoadedInTheTypeThatItLoads) {
  WeightMap map;
  add_tensor(map, "a", DType::kF32, {40});
  add_tensor(map, "b", DType::kBF16, {3});
  Follower follower(100);
  map.convert(DType::kBF16);
  map.follow(&follower, 166);
  map.take("a", {40});
  map.take_f32("b", {3});
  EXPECT_THAT(follower.told, ElementsAre(0, 80, 92));
}

TEST(WeightMap, TheEndOfThePhaseIsLeftToWhoeverLoads) {
  WeightMap map;
  add_tensor(map, "a", DType::kF32, {40});
  add_tensor(map, "b", DType::kF32, {40});
  Follower follower(100);
  map.follow(&follower, 166);
  map.take("a", {40});
  map.take("b", {40});
  EXPECT_THAT(follower.told, ElementsAre(0, 160, 165));
}

TEST(WeightMap, GivesUpWhereTheFollowerWantsNoMore) {
  for (const int patience : {0, 1, 2}) {  // at the start, while converting, after a tensor
    WeightMap map;
    add_tensor(map, "a", DType::kF32, {40});
    Follower follower(patience);
    map.convert(DType::kBF16);
    try {
      map.follow(&follower, 166);
      map.take("a", {40});
      ADD_FAILURE() << "nothing was thrown";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kCancelled);
    }
  }
}

}  // namespace
}  // namespace kvlm
