#include "kernels/base/tensor.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <utility>

#include "kernels/base/error.h"

namespace kvlm {
namespace {

TEST(Shape, CountsComparesAndPrints) {
  const Shape shape{577, 16, 64};
  EXPECT_EQ(shape.rank(), 3);
  EXPECT_EQ(shape.elements(), 577 * 16 * 64);
  EXPECT_EQ(shape.back(), 64);
  EXPECT_EQ(shape.str(), "(577, 16, 64)");
  EXPECT_EQ(Shape{}.str(), "()");
  EXPECT_EQ(Shape{}.elements(), 1);
  EXPECT_NE(shape, (Shape{577, 16}));
  EXPECT_NE((Shape{1, 2}), (Shape{2, 1}));
  EXPECT_EQ((Shape{70'000, 70'000}).elements(), 4'900'000'000);  // past 2^32
}

TEST(Tensor, ViewsSliceAndReshapeTheSameBytes) {
  Tensor tensor(DType::kF32, {4, 3});
  for (int i = 0; i < 12; ++i) tensor.as<float>()[i] = static_cast<float>(i);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(tensor.view().data()) % 64, 0u);
  EXPECT_EQ(tensor.bytes(), 48u);

  const TensorView middle = tensor.view().slice(1, 2);
  EXPECT_EQ(middle.shape(), (Shape{2, 3}));
  EXPECT_EQ(middle.as<float>()[0], 3.0f);
  middle.as<float>()[0] = -1.0f;
  EXPECT_EQ(tensor.as<float>()[3], -1.0f);

  const ConstTensorView flat = std::as_const(tensor).view().reshape({2, 6});
  EXPECT_EQ(flat.slice(1, 1).as<float>()[0], 6.0f);
  EXPECT_EQ(flat.slice(1, 1).bytes(), 24u);
}

TEST(Tensor, MovesItsBytes) {
  Tensor tensor(DType::kBF16, {5});
  const std::byte* data = tensor.view().data();
  Tensor other = std::move(tensor);
  EXPECT_EQ(other.view().data(), data);
  other = Tensor(DType::kU8, {2});
  EXPECT_EQ(other.bytes(), 2u);
}

TEST(ConstTensorView, WithoutMemoryIsEmpty) {
  EXPECT_TRUE(ConstTensorView().empty());
  EXPECT_EQ(ConstTensorView().elements(), 0);
  EXPECT_EQ(ConstTensorView().bytes(), 0u);
}

TEST(Buffer, RefusesWhatCannotBeHad) {
  try {
    const Buffer buffer({}, SIZE_MAX - 70);
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kOutOfMemory);
  }
  try {
    const Buffer buffer({}, SIZE_MAX - 10);  // rounding up to the alignment would wrap
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kOutOfMemory);
  }
}

}  // namespace
}  // namespace kvlm
