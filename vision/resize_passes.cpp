#include "vision/resize_passes.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstring>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "vision/resize_passes.cpp"
#include "hwy/foreach_target.h"
// After foreach_target.h:
#include "hwy/highway.h"

// Once, although this file is compiled for every target.
#ifndef KVLM_RESIZE_PASSES_INL_H_
#define KVLM_RESIZE_PASSES_INL_H_
namespace kvlm {

/// The weights of an axis for sums of products of 16-bit integers, two taps at a time (the earlier
/// in the lower half): a weight is high * 2^kLowBits + low.
struct PairedWeights {
  static constexpr int kLowBits = 11;
  size_t pairs = 0;           // of one output; an odd last tap is paired with a weight of 0
  std::vector<int32_t> low;   // (outputs, pairs)
  std::vector<int32_t> high;  // the same; empty if the low part holds every weight
  int32_t half = 0;
  int shift = 0;
};

/// Rows taken through a pass side by side, so that the sums of one do not wait for each other.
constexpr size_t kTogether = 4;
using InRows = std::array<const uint8_t*, kTogether>;
using OutRows = std::array<uint8_t*, kTogether>;
/// Bytes that are read at once, of which some lie behind a row's end.
constexpr size_t kReadBytes = 16;

}  // namespace kvlm
#endif  // KVLM_RESIZE_PASSES_INL_H_

HWY_BEFORE_NAMESPACE();
namespace kvlm::HWY_NAMESPACE {

#if HWY_TARGET == HWY_SCALAR  // has no vectors of 16 bytes

int32_t weight_of(const PairedWeights& weights, size_t pair, int half) {
  const auto part = [&](const std::vector<int32_t>& parts) {
    return static_cast<int32_t>(static_cast<int16_t>(parts[pair] >> (16 * half)));
  };
  const int32_t high = weights.high.empty() ? 0 : part(weights.high);
  return part(weights.low) + high * (1 << PairedWeights::kLowBits);
}

void rows_pass(const InRows& in, const std::vector<int>& first, const PairedWeights& weights,
               const OutRows& out) {
  for (size_t row = 0; row < kTogether; ++row) {
    for (size_t x = 0; x < first.size(); ++x) {
      const uint8_t* pixel = in[row] + static_cast<size_t>(first[x]) * 3;
      for (size_t channel = 0; channel < 3; ++channel) {
        int32_t sum = weights.half;
        for (size_t tap = 0; tap < 2 * weights.pairs; ++tap) {
          sum += pixel[3 * tap + channel] *
                 weight_of(weights, x * weights.pairs + tap / 2, static_cast<int>(tap % 2));
        }
        out[row][3 * x + channel] = static_cast<uint8_t>(std::clamp(sum >> weights.shift, 0, 255));
      }
    }
  }
}

size_t column_runs(const uint8_t*, size_t, size_t, const PairedWeights&, size_t, uint8_t*) {
  return 0;
}

#else

namespace hn = hwy::HWY_NAMESPACE;

// 16 bytes wide on every processor: wider ones have no products of pairs in order, and little to
// do.
using Bytes = hn::FixedTag<uint8_t, 16>;
using Samples = hn::FixedTag<int16_t, 8>;
using Sums = hn::FixedTag<int32_t, 4>;

/// Four sums of products of pairs.
class PairSum {
 public:
  // Spelled out: what the compiler writes is not compiled for the target.
  HWY_INLINE PairSum() : even_(hn::Zero(Sums())), odd_(hn::Zero(Sums())) {}
  HWY_INLINE void add(hn::Vec<Samples> samples, int32_t pair) {
    const auto weights = hn::BitCast(Samples(), hn::Set(Sums(), pair));
    even_ = hn::ReorderWidenMulAccumulate(Sums(), samples, weights, even_, odd_);
  }
  HWY_INLINE hn::Vec<Sums> total() const { return hn::RearrangeToOddPlusEven(even_, odd_); }

 private:
  hn::Vec<Sums> even_;
  hn::Vec<Sums> odd_;
};

/// Four output bytes from the sums of low and high parts.
template <bool kHigh>
HWY_INLINE hn::Vec<hn::FixedTag<uint8_t, 4> > rounded(const PairSum& low, const PairSum& high,
                                                      const PairedWeights& weights) {
  auto sum = hn::Add(low.total(), hn::Set(Sums(), weights.half));
  if constexpr (kHigh) {
    sum = hn::Add(sum, hn::ShiftLeft<PairedWeights::kLowBits>(high.total()));
  }
  return hn::DemoteTo(hn::FixedTag<uint8_t, 4>(), hn::ShiftRightSame(sum, weights.shift));
}

/// Output pixel `x` of rows whose taps begin at `in`. Writes a byte more than the pixel.
template <bool kHigh>
HWY_INLINE void make_pixel(const InRows& in, const PairedWeights& weights, size_t x,
                           const OutRows& out) {
  constexpr uint8_t kNone = 0x80;  // becomes a zero byte
  alignas(16) static constexpr uint8_t kSpread[16] = {
      0, kNone, 3, kNone, 1, kNone, 4, kNone, 2, kNone, 5, kNone, kNone, kNone, kNone, kNone};
  const Bytes bytes;
  const auto spread = hn::Load(bytes, kSpread);
  PairSum low[kTogether];
  PairSum high[kTogether];
  for (size_t pair = 0; pair < weights.pairs; ++pair) {
    for (size_t row = 0; row < kTogether; ++row) {
      const auto pixels = hn::LoadU(bytes, in[row] + 6 * pair);
      const auto samples = hn::BitCast(Samples(), hn::TableLookupBytesOr0(pixels, spread));
      low[row].add(samples, weights.low[x * weights.pairs + pair]);
      if constexpr (kHigh) high[row].add(samples, weights.high[x * weights.pairs + pair]);
    }
  }
  for (size_t row = 0; row < kTogether; ++row) {
    hn::StoreU(rounded<kHigh>(low[row], high[row], weights), hn::FixedTag<uint8_t, 4>(), out[row]);
  }
}

template <bool kHigh>
HWY_INLINE void make_rows(const InRows& in, const std::vector<int>& first,
                          const PairedWeights& weights, const OutRows& out) {
  const auto at = [&](size_t x) {
    InRows taps = in;
    for (const uint8_t*& row : taps) row += static_cast<size_t>(first[x]) * 3;
    return taps;
  };
  const size_t last = first.size() - 1;
  OutRows to = out;
  for (size_t x = 0; x < last; ++x) {
    make_pixel<kHigh>(at(x), weights, x, to);
    for (uint8_t*& row : to) row += 3;
  }
  // The byte behind the last pixel belongs to the next row.
  uint8_t pixels[kTogether][4];
  make_pixel<kHigh>(at(last), weights, last, {pixels[0], pixels[1], pixels[2], pixels[3]});
  for (size_t row = 0; row < kTogether; ++row) std::memcpy(to[row], pixels[row], 3);
}

void rows_pass(const InRows& in, const std::vector<int>& first, const PairedWeights& weights,
               const OutRows& out) {
  if (weights.high.empty()) return make_rows<false>(in, first, weights, out);
  make_rows<true>(in, first, weights, out);
}

/// Whole runs of kReadBytes of output row `y` from `taps` rows; returns how many bytes that was,
/// which leaves the caller the rest.
template <bool kHigh>
HWY_INLINE size_t make_runs(const uint8_t* in, size_t row_bytes, size_t taps,
                            const PairedWeights& weights, size_t y, uint8_t* out) {
  const Bytes bytes;
  const auto zero = hn::Zero(bytes);
  size_t i = 0;
  for (; i + kReadBytes <= row_bytes; i += kReadBytes) {
    PairSum low[4];
    PairSum high[4];
    for (size_t pair = 0; 2 * pair < taps; ++pair) {
      const uint8_t* above = in + 2 * pair * row_bytes + i;
      const uint8_t* below = 2 * pair + 1 < taps ? above + row_bytes : above;  // weighs nothing
      const auto a = hn::LoadU(bytes, above);
      const auto b = hn::LoadU(bytes, below);
      const auto first = hn::InterleaveLower(bytes, a, b);
      const auto second = hn::InterleaveUpper(bytes, a, b);
      const hn::Vec<Bytes> wide[4] = {
          hn::InterleaveLower(bytes, first, zero), hn::InterleaveUpper(bytes, first, zero),
          hn::InterleaveLower(bytes, second, zero), hn::InterleaveUpper(bytes, second, zero)};
      for (size_t part = 0; part < 4; ++part) {
        const auto samples = hn::BitCast(Samples(), wide[part]);
        low[part].add(samples, weights.low[y * weights.pairs + pair]);
        if constexpr (kHigh) high[part].add(samples, weights.high[y * weights.pairs + pair]);
      }
    }
    for (size_t part = 0; part < 4; ++part) {
      hn::StoreU(rounded<kHigh>(low[part], high[part], weights), hn::FixedTag<uint8_t, 4>(),
                 out + i + 4 * part);
    }
  }
  return i;
}

size_t column_runs(const uint8_t* in, size_t row_bytes, size_t taps, const PairedWeights& weights,
                   size_t y, uint8_t* out) {
  return weights.high.empty() ? make_runs<false>(in, row_bytes, taps, weights, y, out)
                              : make_runs<true>(in, row_bytes, taps, weights, y, out);
}

#endif  // HWY_TARGET == HWY_SCALAR

}  // namespace kvlm::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kvlm {

HWY_EXPORT(rows_pass);
HWY_EXPORT(column_runs);

namespace {

Image blank(int height, int width) {
  Image image;
  image.height = height;
  image.width = width;
  image.rgb.resize(static_cast<size_t>(height) * static_cast<size_t>(width) * 3);
  return image;
}

/// Two numbers of 16 bits in one of 32.
int32_t pair_of(int32_t lower, int32_t upper) {
  return static_cast<int32_t>((static_cast<uint32_t>(upper) << 16) |
                              (static_cast<uint32_t>(lower) & 0xffffu));
}

PairedWeights pair_weights(const ResizeAxis& axis) {
  PairedWeights paired;
  paired.half = 1 << (axis.shift - 1);
  paired.shift = axis.shift;
  const auto taps = static_cast<size_t>(axis.max_taps);
  paired.pairs = (taps + 1) / 2;
  // A large reduction spreads the weight over so many taps that one part is enough, and its sums
  // stay within 32 bits; with two parts, there are fewer than 2^12 taps.
  const bool needs_high = std::ranges::any_of(
      axis.weights, [](int32_t weight) { return weight != static_cast<int16_t>(weight); });
  const auto high_part = [&](int32_t weight) {
    return needs_high ? weight >> PairedWeights::kLowBits : 0;
  };
  const auto low_part = [&](int32_t weight) {
    return weight - high_part(weight) * (1 << PairedWeights::kLowBits);
  };
  for (size_t output = 0; output < axis.first.size(); ++output) {
    for (size_t tap = 0; tap < taps; tap += 2) {
      const int32_t a = axis.weights[output * taps + tap];
      const int32_t b = tap + 1 < taps ? axis.weights[output * taps + tap + 1] : 0;
      paired.low.push_back(pair_of(low_part(a), low_part(b)));
      if (needs_high) paired.high.push_back(pair_of(high_part(a), high_part(b)));
    }
  }
  return paired;
}

}  // namespace

Image resize_rows(const Image& in, const ResizeAxis& axis) {
  const PairedWeights weights = pair_weights(axis);
  const auto width = static_cast<int>(axis.first.size());
  Image out = blank(in.height, width);
  const size_t in_bytes = static_cast<size_t>(in.width) * 3;
  const size_t out_bytes = static_cast<size_t>(width) * 3;
  // Copies of the rows at hand, behind which there is what the taps of the last pixels also read:
  // as many as the longest output has, from where the last one begins.
  const size_t stride = in_bytes + 6 * weights.pairs + kReadBytes;
  std::vector<uint8_t> rows(kTogether * stride);
  const auto height = static_cast<size_t>(in.height);
  for (size_t y = 0; y < height; y += kTogether) {
    InRows from;
    OutRows to;
    for (size_t row = 0; row < kTogether; ++row) {
      const size_t here = std::min(y + row, height - 1);  // the last row again and again
      uint8_t* copy = rows.data() + row * stride;
      std::memcpy(copy, in.rgb.data() + here * in_bytes, in_bytes);
      from[row] = copy;
      to[row] = out.rgb.data() + here * out_bytes;
    }
    HWY_DYNAMIC_DISPATCH(rows_pass)(from, axis.first, weights, to);
  }
  return out;
}

Image resize_columns(const Image& in, const ResizeAxis& axis) {
  const PairedWeights weights = pair_weights(axis);
  Image out = blank(static_cast<int>(axis.first.size()), in.width);
  const size_t row_bytes = static_cast<size_t>(in.width) * 3;
  for (size_t y = 0; y < axis.first.size(); ++y) {
    const auto taps = static_cast<size_t>(axis.taps[y]);
    const uint8_t* from = in.rgb.data() + static_cast<size_t>(axis.first[y]) * row_bytes;
    uint8_t* to = out.rgb.data() + y * row_bytes;
    size_t i = HWY_DYNAMIC_DISPATCH(column_runs)(from, row_bytes, taps, weights, y, to);
    const int32_t* tap_weights = axis.weights.data() + y * static_cast<size_t>(axis.max_taps);
    for (; i < row_bytes; ++i) {
      int32_t sum = weights.half;
      for (size_t tap = 0; tap < taps; ++tap) sum += from[tap * row_bytes + i] * tap_weights[tap];
      to[i] = static_cast<uint8_t>(std::clamp(sum >> axis.shift, 0, 255));
    }
  }
  return out;
}

}  // namespace kvlm
#endif  // HWY_ONCE
