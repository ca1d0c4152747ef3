#include "kernels/cpu/matmul.h"

#include <algorithm>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/matmul.cpp"
#include "hwy/foreach_target.h"
// After foreach_target.h:
#include "hwy/highway.h"
#include "kernels/cpu/widen-inl.h"

// Weights of some outputs, two vectors of them, and 256 inputs are transposed to floats in a panel
// that stays in the first-level cache. A block of y, several rows by these outputs, is summed in
// registers: each input takes two vectors of the panel and one x for each row.

HWY_BEFORE_NAMESPACE();
namespace kvlm::cpu::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

#if HWY_TARGET == HWY_AVX2 || HWY_TARGET == HWY_SSE4 || HWY_TARGET == HWY_SSSE3
constexpr size_t kRows = 6;  // of a block: 12 sums in 16 registers
#else
constexpr size_t kRows = 12;  // 24 in 32
#endif
constexpr size_t kDepth = 256;

using D = hn::ScalableTag<float>;
constexpr size_t kColumns = 2 * hn::MaxLanes(D());

/// A panel: (inputs, kColumns).
struct Panel {
  HWY_ALIGN float weights[kDepth * kColumns];
};

/// Transposes `count` inputs of one output to column `o`.
template <class T>
void pack_output(const T* w, size_t count, size_t o, Panel& panel) {
  for (size_t i = 0; i < count; ++i) panel.weights[i * kColumns + o] = to_float(w[i]);
}

#if HWY_TARGET != HWY_SCALAR
/// Transposes four inputs of four outputs, `stride` apart.
template <class T>
HWY_INLINE void pack_fours(const T* w, size_t stride, float* to) {
  const hn::Full128<float> d;
  const hn::RepartitionToWide<decltype(d)> wide;
  const auto a = load_wide(d, w);
  const auto b = load_wide(d, w + stride);
  const auto c = load_wide(d, w + 2 * stride);
  const auto e = load_wide(d, w + 3 * stride);
  const auto ac = hn::BitCast(wide, hn::InterleaveLower(d, a, c));
  const auto be = hn::BitCast(wide, hn::InterleaveLower(d, b, e));
  const auto upper_ac = hn::BitCast(wide, hn::InterleaveUpper(d, a, c));
  const auto upper_be = hn::BitCast(wide, hn::InterleaveUpper(d, b, e));
  const auto interleave = [&](auto x, auto y, float* lower, float* upper) HWY_ATTR {
    const auto first = hn::BitCast(d, x);
    const auto second = hn::BitCast(d, y);
    hn::StoreU(hn::InterleaveLower(d, first, second), d, lower);
    hn::StoreU(hn::InterleaveUpper(d, first, second), d, upper);
  };
  interleave(ac, be, to, to + kColumns);
  interleave(upper_ac, upper_be, to + 2 * kColumns, to + 3 * kColumns);
}
#endif

/// Weights of `outs` outputs, at most kColumns, and `depth` inputs; other columns are zero.
template <class T>
void pack(const T* w, size_t stride, size_t outs, size_t depth, Panel& panel) {
  if (outs < kColumns) std::fill_n(panel.weights, depth * kColumns, 0.0f);
  size_t o = 0;
#if HWY_TARGET != HWY_SCALAR
  const size_t fours = depth / 4 * 4;
  for (; o + 4 <= outs; o += 4) {
    for (size_t i = 0; i < fours; i += 4) {
      pack_fours(w + o * stride + i, stride, panel.weights + i * kColumns + o);
    }
    for (size_t i = fours; i < depth; ++i) {
      for (size_t j = o; j < o + 4; ++j) {
        panel.weights[i * kColumns + j] = to_float(w[j * stride + i]);
      }
    }
  }
#endif
  for (; o < outs; ++o) pack_output(w + o * stride, depth, o, panel);
}

/// Where a block of y goes.
struct BlockTarget {
  float* y;
  size_t stride;
  size_t outs;  // at most kColumns
  bool add;
};

/// A block of kX rows.
template <size_t kX>
HWY_NOINLINE void multiply_block(const float* HWY_RESTRICT x, size_t x_stride, const Panel& panel,
                                 size_t depth, const BlockTarget& to) {
  const D d;
  const size_t lanes = hn::Lanes(d);
  hn::Vec<D> sums[kX][2];
  for (auto& row : sums) row[0] = row[1] = hn::Zero(d);
  const float* HWY_RESTRICT weights = panel.weights;
  for (size_t i = 0; i < depth; ++i, weights += kColumns) {
    const auto low = hn::Load(d, weights);
    const auto high = hn::Load(d, weights + kColumns / 2);
    for (size_t r = 0; r < kX; ++r) {
      const auto value = hn::Set(d, x[r * x_stride + i]);
      sums[r][0] = hn::MulAdd(value, low, sums[r][0]);
      sums[r][1] = hn::MulAdd(value, high, sums[r][1]);
    }
  }
  for (size_t r = 0; r < kX; ++r) {
    float* y = to.y + r * to.stride;
    if (to.outs == kColumns) {
      for (size_t half = 0; half < 2; ++half) {
        float* at = y + half * lanes;
        const auto sum = sums[r][half];
        hn::StoreU(to.add ? hn::Add(hn::LoadU(d, at), sum) : sum, d, at);
      }
      continue;
    }
    HWY_ALIGN float row[kColumns];
    hn::Store(sums[r][0], d, row);
    hn::Store(sums[r][1], d, row + kColumns / 2);
    for (size_t o = 0; o < to.outs; ++o) y[o] = to.add ? y[o] + row[o] : row[o];
  }
}

/// multiply_block() of `rows` rows, at most kX.
template <size_t kX>
void multiply_rows(const float* x, size_t x_stride, const Panel& panel, size_t depth,
                   const BlockTarget& to, size_t rows) {
  if constexpr (kX > 1) {
    if (rows < kX) return multiply_rows<kX - 1>(x, x_stride, panel, depth, to, rows);
  }
  multiply_block<kX>(x, x_stride, panel, depth, to);
}

template <class T>
void multiply_weights(Matrix<float> y, Matrix<const float> x, const WeightRows& weights,
                      size_t rows, size_t out, size_t in, bool add) {
  const auto* w = reinterpret_cast<const T*>(weights.data);
  const size_t blocks = (rows + kRows - 1) / kRows;
  Panel panel;
  for (size_t i = 0; i < in; i += kDepth) {
    const size_t depth = HWY_MIN(kDepth, in - i);
    for (size_t o = 0; o < out; o += kColumns) {
      const size_t outs = HWY_MIN(kColumns, out - o);
      pack(w + o * weights.stride + i, weights.stride, outs, depth, panel);
      for (size_t block = 0; block < blocks; ++block) {
        const size_t row = rows * block / blocks;
        const BlockTarget to{y.data + row * y.stride + o, y.stride, outs, add || i > 0};
        multiply_rows<kRows>(x.data + row * x.stride + i, x.stride, panel, depth, to,
                             rows * (block + 1) / blocks - row);
      }
    }
  }
}

void multiply_any(Matrix<float> y, Matrix<const float> x, const WeightRows& w, size_t rows,
                  size_t out, size_t in, bool add) {
  switch (w.dtype) {
    case DType::kF16:
      return multiply_weights<f16>(y, x, w, rows, out, in, add);
    case DType::kBF16:
      return multiply_weights<bf16>(y, x, w, rows, out, in, add);
    default:
      return multiply_weights<float>(y, x, w, rows, out, in, add);
  }
}

}  // namespace kvlm::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kvlm::cpu {

HWY_EXPORT(multiply_any);

void multiply(Matrix<float> y, Matrix<const float> x, const WeightRows& w, size_t rows, size_t out,
              size_t in, bool add) {
  if (in == 0 && !add) {
    for (size_t r = 0; r < rows; ++r) std::fill_n(y.data + r * y.stride, out, 0.0f);
  }
  HWY_DYNAMIC_DISPATCH(multiply_any)(y, x, w, rows, out, in, add);
}

}  // namespace kvlm::cpu
#endif  // HWY_ONCE
