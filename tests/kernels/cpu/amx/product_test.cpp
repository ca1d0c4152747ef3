// Products on AMX against products in double precision, at sizes that fill no tile. They skip where
// the processor has no AMX.

#include "kernels/cpu/amx/product.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cmath>
#include <limits>

#include "kernels/gemm.h"
#include "tests/kernels/values.h"

namespace kvlm {
namespace {

using cpu::amx::Split;
using testing::make_tensor;
using testing::normal_tensor;
using testing::normalised_error;
using testing::same_bits;
using testing::values_of;

struct Case {
  int64_t rows, in, out;
  DType dtype = DType::kBF16;
  bool bias = false;
  bool add = false;
};

class AmxProduct : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!cpu::amx::available()) GTEST_SKIP() << "this processor has no AMX";
  }
};

/// y before a product.
Tensor y_before(const Case& of) { return normal_tensor(DType::kF32, {of.rows, of.out}, 4); }

/// The other operands.
struct Operands {
  explicit Operands(const Case& of)
      : x(normal_tensor(DType::kF32, {of.rows, of.in}, 1)),
        w(normal_tensor(of.dtype, {of.out, of.in}, 2)),
        bias(normal_tensor(DType::kF32, {of.out}, 3)) {}
  Tensor x, w, bias;
};

Tensor multiplied(const Case& of, const Operands& from, Split split, int threads) {
  ThreadPool pool(threads);
  Stream stream(pool);
  Tensor y = y_before(of);
  if (!of.add) std::memset(y.view().data(), 0xff, y.bytes());  // NaN: not to be read
  const auto packed = cpu::amx::pack_rows(from.x.as<float>(), static_cast<size_t>(of.rows),
                                          static_cast<size_t>(of.in), split, stream);
  EXPECT_TRUE(packed);
  const float* bias = of.bias ? from.bias.as<float>() : nullptr;
  cpu::amx::multiply(
      {y.as<float>(), from.w.view().data(), bias, of.dtype, of.add, static_cast<size_t>(of.out)},
      *packed, stream);
  return y;
}

reference::Values magnitudes(reference::Values values) {
  for (double& value : values) value = std::abs(value);
  return values;
}

/// The error is at most `bound` of the sum of the products' magnitudes, and of all outputs
/// `normalised` of the largest.
void expect_close(const Case& of, Split split, double bound, double normalised) {
  SCOPED_TRACE(::testing::Message()
               << dtype_name(of.dtype) << " rows " << of.rows << " in " << of.in << " out "
               << of.out << " bias " << of.bias << " add " << of.add);
  const Operands from(of);
  const Tensor y = multiplied(of, from, split, 2);
  const auto product = [&](auto&& change) {
    reference::Values made = reference::linear(
        change(values_of(from.x)), change(values_of(from.w)),
        of.bias ? change(values_of(from.bias)) : reference::Values{}, static_cast<size_t>(of.rows),
        static_cast<size_t>(of.in), static_cast<size_t>(of.out));
    const reference::Values before = change(values_of(y_before(of)));
    for (size_t i = 0; of.add && i < made.size(); ++i) made[i] += before[i];
    return made;
  };
  const reference::Values want = product([](reference::Values same) { return same; });
  const reference::Values size = product(magnitudes);
  const reference::Values got = values_of(y);
  EXPECT_LT(normalised_error(got, want), normalised);
  for (size_t i = 0; i < want.size(); ++i) ASSERT_NEAR(got[i], want[i], bound * size[i]) << i;
}

TEST_F(AmxProduct, ThreePartsAreAsExactAsF32) {
  for (const DType dtype : {DType::kBF16, DType::kF16}) {
    for (const int64_t rows : {1, 17, 33, 577}) {
      for (const int64_t in : {1, 24, 40, 100, 545, 2056}) {
        for (const int64_t out : {1, 15, 31, 33, 300}) {
          if (rows * in * out > 20'000'000) continue;
          expect_close({rows, in, out, dtype, rows % 3 == 0, out % 3 == 0}, Split::kExact, 4e-7,
                       1e-6);
        }
      }
    }
    expect_close({577, 2056, 33, dtype, true, true}, Split::kExact, 4e-7, 1e-6);
    expect_close({65, 2056, 300, dtype, false, false}, Split::kExact, 4e-7, 1e-6);
  }
}

TEST_F(AmxProduct, BiasAndAddAreObeyedInEveryCombination) {
  for (const DType dtype : {DType::kBF16, DType::kF16}) {
    for (const bool bias : {false, true}) {
      for (const bool add : {false, true}) {
        expect_close({40, 1100, 300, dtype, bias, add}, Split::kExact, 4e-7, 1e-6);
      }
    }
  }
}

TEST_F(AmxProduct, OnePartRoundsItsOperandsToBf16) {
  constexpr double kRounding = 1.0 / 512;
  expect_close({33, 1100, 77, DType::kBF16, true, true}, Split::kRounded, kRounding, 1e-2);
  expect_close({33, 1100, 77, DType::kF16, true, true}, Split::kRounded, 2.01 * kRounding, 1e-2);
}

TEST_F(AmxProduct, HasTheSameBitsWithAnyNumberOfThreads) {
  for (const DType dtype : {DType::kBF16, DType::kF16}) {
    for (const int64_t rows : {17, 577}) {
      const Case of{rows, 700, 530, dtype, true, false};
      const Operands from(of);
      const Tensor one = multiplied(of, from, Split::kExact, 1);
      for (const int threads : {2, 3}) {
        EXPECT_TRUE(same_bits(multiplied(of, from, Split::kExact, threads), one)) << threads;
      }
    }
  }
}

TEST_F(AmxProduct, ARowHasTheSameBitsInAnyCompany) {
  ThreadPool pool(2);
  Stream stream(pool);
  for (const DType dtype : {DType::kBF16, DType::kF16}) {
    const Tensor x = normal_tensor(DType::kF32, {1100, 300}, 1);  // packed in two groups
    const Tensor w = normal_tensor(dtype, {45, 300}, 2);
    Tensor all(DType::kF32, {1100, 45});
    linear(all, x, w, ConstTensorView(), false, stream);
    for (const int64_t first : {0, 3, 530, 1079}) {
      Tensor some(DType::kF32, {21, 45});
      linear(some, x.view().slice(first, 21), w, ConstTensorView(), false, stream);
      EXPECT_TRUE(same_bits(some, all.view().slice(first, 21))) << first;
    }
  }
}

TEST_F(AmxProduct, ProjectionsTogetherHaveTheBitsOfEachAlone) {
  ThreadPool pool(2);
  Stream stream(pool);
  const Tensor x = normal_tensor(DType::kF32, {50, 1030}, 1);
  const Tensor bias = normal_tensor(DType::kF32, {70}, 2);
  std::vector<Tensor> ws;
  std::vector<Tensor> together;
  std::vector<Projection> projections;
  for (const DType dtype : {DType::kBF16, DType::kF32, DType::kF16}) {
    ws.push_back(normal_tensor(dtype, {70, 1030}, 3));
    together.emplace_back(DType::kF32, Shape{50, 70});
  }
  for (size_t i = 0; i < ws.size(); ++i) projections.push_back({together[i], ws[i], bias});
  linears(projections, x, stream);
  for (size_t i = 0; i < ws.size(); ++i) {
    Tensor alone(DType::kF32, {50, 70});
    linear(alone, x, ws[i], bias, false, stream);
    EXPECT_TRUE(same_bits(alone, together[i])) << i;
  }
}

TEST_F(AmxProduct, ReadsNothingAfterTheWeights) {
  const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  for (const int64_t in : {33, 1000}) {
    const Case of{20, in, 37};
    const Operands from(of);
    const size_t bytes = from.w.bytes();
    const size_t mapped = (bytes + page - 1) / page * page;
    void* memory =
        mmap(nullptr, mapped + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    ASSERT_NE(memory, MAP_FAILED);
    std::byte* end = static_cast<std::byte*>(memory) + mapped;
    ASSERT_EQ(mprotect(end, page, PROT_NONE), 0);
    std::memcpy(end - bytes, from.w.view().data(), bytes);
    ThreadPool pool(1);
    Stream stream(pool);
    Tensor y(DType::kF32, {of.rows, of.out});
    linear(y, from.x, ConstTensorView(end - bytes, of.dtype, from.w.shape()), ConstTensorView(),
           false, stream);
    EXPECT_TRUE(same_bits(y, multiplied(of, from, Split::kExact, 1)));
    munmap(memory, mapped + page);
  }
}

TEST_F(AmxProduct, RowsThatBf16CannotExpressAreNotPacked) {
  ThreadPool pool(2);
  Stream stream(pool);
  using Limits = std::numeric_limits<float>;
  for (const float bad :
       {Limits::infinity(), -Limits::infinity(), Limits::quiet_NaN(), Limits::max()}) {
    Tensor x = normal_tensor(DType::kF32, {40, 83}, 1);
    EXPECT_TRUE(cpu::amx::pack_rows(x.as<float>(), 40, 83, Split::kExact, stream));
    x.as<float>()[39 * 83 + 82] = bad;
    EXPECT_FALSE(cpu::amx::pack_rows(x.as<float>(), 40, 83, Split::kExact, stream)) << bad;
  }
  // Through linear() they are multiplied all the same.
  const Tensor x = make_tensor(DType::kF32, {20, 1}, std::vector<float>(20, Limits::max()));
  const Tensor w = make_tensor(DType::kF16, {1, 1}, {0.5f});
  Tensor y(DType::kF32, {20, 1});
  linear(y, x, w, ConstTensorView(), false, stream);
  EXPECT_EQ(y.as<float>()[19], Limits::max() / 2);
}

}  // namespace
}  // namespace kvlm
