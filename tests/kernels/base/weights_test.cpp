#include "kernels/base/weights.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/kernels/values.h"

namespace kvlm {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
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
              HasSubstr("a second spelling of x"));
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
