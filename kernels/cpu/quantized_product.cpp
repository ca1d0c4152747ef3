#include "kernels/cpu/quantized_product.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "kernels/cpu/vnni/attend.h"
#include "kernels/quantized/layout.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/quantized_product.cpp"
#include "hwy/foreach_target.h"
// After foreach_target.h:
#include "hwy/highway.h"
#include "kernels/cpu/widen-inl.h"

#ifndef KVLM_KERNELS_CPU_QUANTIZED_PRODUCT_CPP_ONCE_
#define KVLM_KERNELS_CPU_QUANTIZED_PRODUCT_CPP_ONCE_
namespace kvlm::cpu {

/// Inputs of activations that share a scale, and outputs of a strip.
constexpr size_t kBlock = kInputBlock;
constexpr size_t kStrip = kStripOutputs;

/// Activations rounded to int8 per row and block, or as they are.
struct RoundedRows {
  size_t rows, in;      // in: padded to whole blocks
  const int8_t* codes;  // (rows, in)
  const float* scales;  // (rows, blocks)
  const int32_t* sums;  // (rows, blocks) of the codes
  const float* plain;   // (rows, in), if the product is exact
  size_t blocks() const { return in / kBlock; }
};

/// One product.
struct QuantizedArgs {
  float* y;           // (rows, out)
  const float* bias;  // (out,) or null
  bool add;
  size_t out, in;       // in: padded
  size_t group_blocks;  // blocks that share a scale of weights
  size_t groups;
  WeightCode code;
  DType scale_dtype;
  int32_t zero;  // of groups without zeros
  const uint8_t* codes;
  const std::byte* scales;  // (strips, groups, 16)
  const uint8_t* zeros;     // (strips, groups, 16) or null
  size_t strip_bytes() const { return in * kStrip / (code == WeightCode::kU4 ? 2 : 1); }
};

}  // namespace kvlm::cpu
#endif

HWY_BEFORE_NAMESPACE();
namespace kvlm::cpu::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

// ------------------------------------------------------------------------------- rounding of x

/// Rounds a block of activations, of which `count` are there and the others count as zero.
void round_block(const float* x, size_t count, int8_t* codes, float* scale, int32_t* sum) {
  const hn::CappedTag<float, kBlock> d;
  const hn::RebindToSigned<decltype(d)> d32;
  HWY_ALIGN float block[kBlock] = {};
  std::copy_n(x, count, block);
  auto most = hn::Zero(d);
  auto zero = hn::Zero(d);  // or not a number, where an activation is not finite
  for (size_t i = 0; i < kBlock; i += hn::Lanes(d)) {
    const auto values = hn::Load(d, block + i);
    most = hn::Max(most, hn::Abs(values));
    zero = hn::MulAdd(values, hn::Zero(d), zero);
  }
  *scale = hn::GetLane(hn::MaxOfLanes(d, most)) / 127 + hn::GetLane(hn::SumOfLanes(d, zero));
  HWY_ALIGN int32_t rounded[kBlock] = {};
  auto total = hn::Zero(d32);
  if (*scale > 0) {
    for (size_t i = 0; i < kBlock; i += hn::Lanes(d)) {
      const auto code = hn::NearestInt(hn::Div(hn::Load(d, block + i), hn::Set(d, *scale)));
      total = hn::Add(total, code);
      hn::Store(code, d32, rounded + i);
    }
  }
  *sum = hn::GetLane(hn::SumOfLanes(d32, total));
  for (size_t i = 0; i < kBlock; ++i) codes[i] = static_cast<int8_t>(rounded[i]);
}

/// Rounds a row of `in` activations, `blocks` of them.
void round_activations(const float* x, size_t in, size_t blocks, int8_t* codes, float* scales,
                       int32_t* sums) {
  for (size_t b = 0; b < blocks; ++b) {
    const size_t count = HWY_MIN(kBlock, in - b * kBlock);
    round_block(x + b * kBlock, count, codes + b * kBlock, scales + b, sums + b);
  }
}

// ---------------------------------------------------------------------------- integer products

#undef KVLM_INTEGER_DOTS
// What a processor multiplies: kLanes outputs of a strip in a vector of 32-bit sums.
#if HWY_TARGET == HWY_AVX3  // with VNNI, see multiply_strips_of()
#define KVLM_INTEGER_DOTS 1
constexpr size_t kLanes = 16;
constexpr size_t kStripsAlong = 4;     // strips that one row reads side by side
constexpr size_t kStripsTogether = 4;  // and several rows
#elif HWY_TARGET == HWY_AVX2
#define KVLM_INTEGER_DOTS 1
constexpr size_t kLanes = 8;
constexpr size_t kStripsAlong = 2;
constexpr size_t kStripsTogether = 1;
#else
#define KVLM_INTEGER_DOTS 0
constexpr size_t kLanes = HWY_TARGET == HWY_SCALAR ? 1 : 4;
constexpr size_t kStripsAlong = 1;
constexpr size_t kStripsTogether = 1;
#endif

using Sums = hn::CappedTag<float, kLanes>;
using IntegerSums = hn::RebindToSigned<Sums>;

/// Rows of x that one pass over a strip serves.
constexpr size_t kMostRows = 4;
/// Vectors of a strip's outputs.
constexpr size_t kParts = kStrip / kLanes;

/// Sums of products over one block, for kRows rows and the parts of kStrips strips.
template <size_t kRows, size_t kStrips>
using BlockSums = hn::Vec<IntegerSums>[kRows][kStrips * kParts];

#if KVLM_INTEGER_DOTS
HWY_INLINE int32_t load_word(const int8_t* from) {
  int32_t word;
  std::memcpy(&word, from, sizeof(word));
  return word;
}
#endif

#if HWY_TARGET == HWY_AVX3

/// Adds to every lane the products of its four unsigned bytes of `codes` and signed `bytes`. VNNI
/// is no target of Highway's here, and for the intrinsic GCC 12 copies the sum before and stores it
/// after every call.
HWY_INLINE __m512i add_products(__m512i sum, __m512i codes, __m512i bytes) {
  asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(codes), "v"(bytes));
  return sum;
}

template <size_t kRows, size_t kStrips>
HWY_INLINE void dot_4_bits(const uint8_t* const (&codes)[kStrips], const int8_t* x, size_t stride,
                           BlockSums<kRows, kStrips>& sums) {
  const __m512i mask = _mm512_set1_epi8(15);
  for (size_t line = 0; line < 4; ++line) {
    for (size_t s = 0; s < kStrips; ++s) {
      const __m512i bytes = _mm512_loadu_si512(codes[s] + 64 * line);
      const __m512i low = _mm512_and_si512(bytes, mask);
      const __m512i high = _mm512_and_si512(_mm512_srli_epi16(bytes, 4), mask);
      for (size_t r = 0; r < kRows; ++r) {
        const int8_t* row = x + r * stride + 4 * line;
        auto& sum = sums[r][s].raw;
        sum = add_products(sum, low, _mm512_set1_epi32(load_word(row)));
        sum = add_products(sum, high, _mm512_set1_epi32(load_word(row + 16)));
      }
    }
  }
}

template <size_t kRows, size_t kStrips>
HWY_INLINE void dot_8_bits(const uint8_t* const (&codes)[kStrips], const int8_t* x, size_t stride,
                           BlockSums<kRows, kStrips>& sums) {
  for (size_t line = 0; line < 8; ++line) {
    for (size_t s = 0; s < kStrips; ++s) {
      const __m512i bytes = _mm512_loadu_si512(codes[s] + 64 * line);
      for (size_t r = 0; r < kRows; ++r) {
        const __m512i word = _mm512_set1_epi32(load_word(x + r * stride + 4 * line));
        sums[r][s].raw = add_products(sums[r][s].raw, bytes, word);
      }
    }
  }
}

#elif KVLM_INTEGER_DOTS

/// Pairs of products are added in 16 bits: 16 of them are at most 16 * 15 * 127 = 30,480.
template <size_t kRows, size_t kStrips>
HWY_INLINE void dot_4_bits(const uint8_t* const (&codes)[kStrips], const int8_t* x, size_t stride,
                           BlockSums<kRows, kStrips>& sums) {
  const __m256i mask = _mm256_set1_epi8(15);
  __m256i pairs[kRows][kStrips * kParts];
  for (auto& row : pairs) {
    for (__m256i& pair : row) pair = _mm256_setzero_si256();
  }
  for (size_t line = 0; line < 4; ++line) {
    for (size_t part = 0; part < kStrips * kParts; ++part) {
      const uint8_t* from = codes[part / kParts] + 64 * line + 32 * (part % kParts);
      const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
      const __m256i low = _mm256_and_si256(bytes, mask);
      const __m256i high = _mm256_and_si256(_mm256_srli_epi16(bytes, 4), mask);
      for (size_t r = 0; r < kRows; ++r) {
        const int8_t* row = x + r * stride + 4 * line;
        const __m256i first = _mm256_set1_epi32(load_word(row));
        const __m256i second = _mm256_set1_epi32(load_word(row + 16));
        pairs[r][part] = _mm256_add_epi16(
            pairs[r][part],
            _mm256_add_epi16(_mm256_maddubs_epi16(low, first), _mm256_maddubs_epi16(high, second)));
      }
    }
  }
  const __m256i ones = _mm256_set1_epi16(1);
  for (size_t r = 0; r < kRows; ++r) {
    for (size_t part = 0; part < kStrips * kParts; ++part) {
      sums[r][part].raw = _mm256_madd_epi16(pairs[r][part], ones);
    }
  }
}

/// Codes and activations are widened to 16 bits: a sum of two products of bytes would not fit.
template <size_t kRows, size_t kStrips>
HWY_INLINE void dot_8_bits(const uint8_t* const (&codes)[kStrips], const int8_t* x, size_t stride,
                           BlockSums<kRows, kStrips>& sums) {
  for (size_t part = 0; part < kStrips * kParts; ++part) {
    const uint8_t* from = codes[part / kParts] + 32 * (part % kParts);
    // Sums of inputs 0 and 1, and 2 and 3, of outputs 0 to 3 and 4 to 7.
    __m256i halves[kRows][2];
    for (auto& half : halves) half[0] = half[1] = _mm256_setzero_si256();
    for (size_t line = 0; line < 8; ++line, from += 64) {
      const __m256i first =
          _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
      const __m256i second =
          _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + 16)));
      for (size_t r = 0; r < kRows; ++r) {
        const __m128i word = _mm_cvtsi32_si128(load_word(x + r * stride + 4 * line));
        const __m256i row = _mm256_broadcastq_epi64(_mm_cvtepi8_epi16(word));
        halves[r][0] = _mm256_add_epi32(halves[r][0], _mm256_madd_epi16(first, row));
        halves[r][1] = _mm256_add_epi32(halves[r][1], _mm256_madd_epi16(second, row));
      }
    }
    for (size_t r = 0; r < kRows; ++r) {
      const __m256i mixed = _mm256_hadd_epi32(halves[r][0], halves[r][1]);
      sums[r][part].raw = _mm256_permute4x64_epi64(mixed, 0xd8);
    }
  }
}

#else

/// Sums of the products of one block, output by output.
template <size_t kRows, size_t kStrips, int kBits>
void dot_bytes(const uint8_t* const (&codes)[kStrips], const int8_t* x, size_t stride,
               BlockSums<kRows, kStrips>& sums) {
  const IntegerSums d;
  for (size_t r = 0; r < kRows; ++r) {
    for (size_t s = 0; s < kStrips; ++s) {
      int32_t of[kStrip] = {};
      for (size_t i = 0; i < kBlock; ++i) {
        for (size_t o = 0; o < kStrip; ++o) {
          const size_t line = (kBits == 4 ? i % 16 : i) / 4;
          const int32_t byte = codes[s][64 * line + 4 * o + i % 4];
          const int32_t code = kBits == 8 ? byte : i < 16 ? byte & 15 : byte >> 4;
          of[o] += code * x[r * stride + i];
        }
      }
      for (size_t part = 0; part < kParts; ++part) {
        sums[r][s * kParts + part] = hn::LoadU(d, of + part * hn::Lanes(d));
      }
    }
  }
}

template <size_t kRows, size_t kStrips>
void dot_4_bits(const uint8_t* const (&codes)[kStrips], const int8_t* x, size_t stride,
                BlockSums<kRows, kStrips>& sums) {
  dot_bytes<kRows, kStrips, 4>(codes, x, stride, sums);
}
template <size_t kRows, size_t kStrips>
void dot_8_bits(const uint8_t* const (&codes)[kStrips], const int8_t* x, size_t stride,
                BlockSums<kRows, kStrips>& sums) {
  dot_bytes<kRows, kStrips, 8>(codes, x, stride, sums);
}

#endif

/// a * b + c, rounded once.
HWY_INLINE hn::Vec<Sums> fused(Sums d, hn::Vec<Sums> a, hn::Vec<Sums> b, hn::Vec<Sums> c) {
#if KVLM_INTEGER_DOTS
  (void)d;
  return hn::MulAdd(a, b, c);
#else
  HWY_ALIGN float x[kLanes], y[kLanes], z[kLanes];
  hn::Store(a, d, x);
  hn::Store(b, d, y);
  hn::Store(c, d, z);
  for (size_t i = 0; i < hn::Lanes(d); ++i) z[i] = std::fma(x[i], y[i], z[i]);
  return hn::Load(d, z);
#endif
}

/// Scales of kLanes outputs.
HWY_INLINE hn::Vec<Sums> load_scales(const std::byte* scales, DType dtype, size_t at) {
  const Sums d;
  switch (dtype) {
    case DType::kF16:
      return load_wide(d, reinterpret_cast<const f16*>(scales) + at);
    case DType::kBF16:
      return load_wide(d, reinterpret_cast<const bf16*>(scales) + at);
    default:
      return load_wide(d, reinterpret_cast<const float*>(scales) + at);
  }
}

/// Writes the sums of a strip's outputs, of which there may be fewer than 16, with bias.
HWY_INLINE void store_strip(const QuantizedArgs& args, size_t row, size_t strip,
                            const hn::Vec<Sums>* sums) {
  const Sums d;
  HWY_ALIGN float values[kStrip] = {};
  for (size_t part = 0; part < kParts; ++part) hn::Store(sums[part], d, values + part * kLanes);
  const size_t first = strip * kStrip;
  float* y = args.y + row * args.out + first;
  const size_t count = HWY_MIN(kStrip, args.out - first);
  for (size_t o = 0; o < count; ++o) {
    const float value = args.bias != nullptr ? values[o] + args.bias[first + o] : values[o];
    y[o] = args.add ? y[o] + value : value;
  }
}

/// kRows rows of x by kStrips strips. Asks for codes some lines ahead, into the second-level cache.
template <size_t kRows, size_t kStrips, int kBits>
HWY_NOINLINE void multiply_strips(const QuantizedArgs& args, const RoundedRows& x, size_t row,
                                  size_t strip) {
  constexpr size_t kBlockBytes = kBlock * kStrip * kBits / 8;
  constexpr size_t kAhead = 2048;
  const Sums d;
  const IntegerSums d32;
  const size_t blocks = x.blocks();
  const uint8_t* codes[kStrips];
  for (size_t s = 0; s < kStrips; ++s) codes[s] = args.codes + (strip + s) * args.strip_bytes();
  const int8_t* activations = x.codes + row * x.in;
  hn::Vec<Sums> y[kRows][kStrips * kParts];
  for (auto& of_row : y) {
    for (auto& sum : of_row) sum = hn::Zero(d);
  }
  size_t group = 0;
  for (size_t b = 0, left = args.group_blocks; b < blocks; ++b, --left) {
    if (left == 0) {
      ++group;
      left = args.group_blocks;
    }
    if constexpr (kRows == 1) {
      for (size_t s = 0; s < kStrips; ++s) {
        for (size_t line = 0; line < kBlockBytes; line += 64) {
          __builtin_prefetch(codes[s] + kAhead + line, 0, 2);
        }
      }
    }
    BlockSums<kRows, kStrips> sums;
    for (auto& of_row : sums) {
      for (auto& sum : of_row) sum = hn::Zero(d32);
    }
    if constexpr (kBits == 4) {
      dot_4_bits<kRows, kStrips>(codes, activations + b * kBlock, x.in, sums);
    } else {
      dot_8_bits<kRows, kStrips>(codes, activations + b * kBlock, x.in, sums);
    }
    for (size_t s = 0; s < kStrips; ++s) codes[s] += kBlockBytes;
    for (size_t part = 0; part < kStrips * kParts; ++part) {
      const size_t at =
          ((strip + part / kParts) * args.groups + group) * kStrip + part % kParts * kLanes;
      const auto scales = load_scales(args.scales, args.scale_dtype, at);
      auto zeros = hn::Set(d32, args.zero);
      if (args.zeros != nullptr) {
        zeros = hn::PromoteTo(d32, hn::LoadU(hn::Rebind<uint8_t, IntegerSums>(), args.zeros + at));
      }
      for (size_t r = 0; r < kRows; ++r) {
        const size_t of_block = (row + r) * blocks + b;
        const auto centred = hn::Sub(sums[r][part], hn::Mul(zeros, hn::Set(d32, x.sums[of_block])));
        const auto scale = hn::Mul(hn::Set(d, x.scales[of_block]), scales);
        y[r][part] = fused(d, scale, hn::ConvertTo(d, centred), y[r][part]);
      }
    }
  }
  for (size_t r = 0; r < kRows; ++r) {
    for (size_t s = 0; s < kStrips; ++s) store_strip(args, row + r, strip + s, y[r] + s * kParts);
  }
}

// ------------------------------------------------------------------------------ exact products

/// The weights without scale and zero point of one input of kLanes outputs: byte `t` of each word.
template <class V>
HWY_INLINE hn::Vec<Sums> weights_of(V words, size_t t, WeightCode code) {
  const Sums d;
  const hn::RebindToUnsigned<Sums> d32;
  const auto bytes =
      hn::And(hn::ShiftRightSame(words, static_cast<int>(8 * t)), hn::Set(d32, 255u));
  if (code != WeightCode::kE4M3) return hn::ConvertTo(d, hn::BitCast(IntegerSums(), bytes));
  const auto sign = hn::ShiftLeft<24>(hn::And(bytes, hn::Set(d32, 0x80u)));
  const auto magnitude = hn::ShiftLeft<20>(hn::And(bytes, hn::Set(d32, 0x7fu)));
  return hn::Mul(hn::BitCast(d, hn::Or(sign, magnitude)), hn::Set(d, 0x1p120f));
}

/// kRows rows of f32 activations by a strip: y += scale * sum(x * (code - zero)) group by group.
template <size_t kRows>
HWY_NOINLINE void multiply_exactly(const QuantizedArgs& args, const RoundedRows& x, size_t row,
                                   size_t strip) {
  const Sums d;
  const hn::RebindToUnsigned<Sums> d32;
  const bool half_bytes = args.code == WeightCode::kU4;
  const uint8_t* codes = args.codes + strip * args.strip_bytes();
  hn::Vec<Sums> y[kRows][kParts];
  for (auto& of_row : y) {
    for (auto& sum : of_row) sum = hn::Zero(d);
  }
  for (size_t group = 0; group < args.groups; ++group) {
    const size_t first = group * args.group_blocks * kBlock;
    const size_t last = HWY_MIN(first + args.group_blocks * kBlock, x.in);
    for (size_t part = 0; part < kParts; ++part) {
      const size_t at = (strip * args.groups + group) * kStrip + part * kLanes;
      auto zeros = hn::Set(d, static_cast<float>(args.zero));
      if (args.zeros != nullptr) {
        const auto bytes = hn::LoadU(hn::Rebind<uint8_t, Sums>(), args.zeros + at);
        zeros = hn::ConvertTo(d, hn::PromoteTo(IntegerSums(), bytes));
      }
      hn::Vec<Sums> sums[kRows];
      for (auto& sum : sums) sum = hn::Zero(d);
      const auto add_line = [&](auto words, size_t input) HWY_ATTR {
        for (size_t t = 0; t < 4; ++t) {
          const auto weights = hn::Sub(weights_of(words, t, args.code), zeros);
          for (size_t r = 0; r < kRows; ++r) {
            const auto value = hn::Set(d, x.plain[(row + r) * x.in + input + t]);
            sums[r] = hn::MulAdd(weights, value, sums[r]);
          }
        }
      };
      const auto words_at = [&](size_t byte) HWY_ATTR {
        return hn::LoadU(d32, reinterpret_cast<const uint32_t*>(codes + byte + 4 * part * kLanes));
      };
      for (size_t i = first; i < last; i += kBlock) {
        for (size_t line = 0; !half_bytes && line < 8; ++line) {
          add_line(words_at(i * kStrip + 64 * line), i + 4 * line);
        }
        for (size_t line = 0; half_bytes && line < 4; ++line) {
          const auto words = words_at(i * kStrip / 2 + 64 * line);
          const auto mask = hn::Set(d32, 0x0f0f0f0fu);
          add_line(hn::And(words, mask), i + 4 * line);
          add_line(hn::And(hn::ShiftRight<4>(words), mask), i + 16 + 4 * line);
        }
      }
      const auto scales = load_scales(args.scales, args.scale_dtype, at);
      for (size_t r = 0; r < kRows; ++r) y[r][part] = hn::MulAdd(scales, sums[r], y[r][part]);
    }
  }
  for (size_t r = 0; r < kRows; ++r) store_strip(args, row + r, strip, y[r]);
}

// ------------------------------------------------------------------------------------ dispatch

/// `rows` rows, at most kRows, of one or several strips.
template <size_t kRows>
void multiply_rows(const QuantizedArgs& args, const RoundedRows& x, size_t row, size_t rows,
                   size_t begin, size_t end) {
  if constexpr (kRows > 1) {
    if (rows < kRows) return multiply_rows<kRows - 1>(args, x, row, rows, begin, end);
  }
  constexpr size_t kTogether = kRows == 1 ? kStripsAlong : kStripsTogether;
  size_t strip = begin;
  if (x.plain != nullptr) {
    for (; strip < end; ++strip) multiply_exactly<kRows>(args, x, row, strip);
  } else if (args.code == WeightCode::kU4) {
    for (; strip + kTogether <= end; strip += kTogether) {
      multiply_strips<kRows, kTogether, 4>(args, x, row, strip);
    }
    for (; strip < end; ++strip) multiply_strips<kRows, 1, 4>(args, x, row, strip);
  } else {
    for (; strip + kTogether <= end; strip += kTogether) {
      multiply_strips<kRows, kTogether, 8>(args, x, row, strip);
    }
    for (; strip < end; ++strip) multiply_strips<kRows, 1, 8>(args, x, row, strip);
  }
}

/// Strips [begin, end) of all rows.
void multiply_quantized(const QuantizedArgs& args, const RoundedRows& x, size_t begin, size_t end) {
  const size_t passes = (x.rows + kMostRows - 1) / kMostRows;
  for (size_t pass = 0; pass < passes; ++pass) {
    const size_t row = x.rows * pass / passes;
    const size_t rows = x.rows * (pass + 1) / passes - row;
    multiply_rows<kMostRows>(args, x, row, rows, begin, end);
  }
}

}  // namespace kvlm::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kvlm::cpu {

HWY_EXPORT(round_activations);
HWY_EXPORT(multiply_quantized);

namespace {

size_t divide_up(size_t a, size_t b) { return (a + b - 1) / b; }

/// The parts of scratch memory for activations.
struct ActivationSpace {
  int8_t* codes;
  float* scales;
  int32_t* sums;
};

/// Rounds x to int8.
RoundedRows rounded(ConstTensorView x, Stream& stream) {
  const auto rows = static_cast<size_t>(x.shape()[0]);
  const auto in = static_cast<size_t>(x.shape()[1]);
  const size_t blocks = divide_up(in, kBlock);
  // The tasks use no scratch of their own.
  std::byte* space = stream.scratch(0, rows * blocks * (kBlock + sizeof(float) + sizeof(int32_t)));
  auto* scales = reinterpret_cast<float*>(space);
  auto* sums = reinterpret_cast<int32_t*>(scales + rows * blocks);
  auto* codes = reinterpret_cast<int8_t*>(sums + rows * blocks);
  const auto round = [&](size_t row) {
    HWY_DYNAMIC_DISPATCH(round_activations)
    (x.as<float>() + row * in, in, blocks, codes + row * blocks * kBlock, scales + row * blocks,
     sums + row * blocks);
  };
  if (rows < 8) {
    for (size_t row = 0; row < rows; ++row) round(row);
  } else {
    stream.pool().parallel_for(rows, [&](size_t row, int) { round(row); });
  }
  return {rows, blocks * kBlock, codes, scales, sums, nullptr};
}

/// x in f32, its rows padded to whole blocks.
RoundedRows plain(ConstTensorView x, Stream& stream) {
  const auto rows = static_cast<size_t>(x.shape()[0]);
  const auto in = static_cast<size_t>(x.shape()[1]);
  const size_t padded = divide_up(in, kBlock) * kBlock;
  if (padded == in) return {rows, in, nullptr, nullptr, nullptr, x.as<float>()};
  auto* to = reinterpret_cast<float*>(stream.scratch(0, rows * padded * sizeof(float)));
  for (size_t row = 0; row < rows; ++row) {
    std::copy_n(x.as<float>() + row * in, in, to + row * padded);
    std::fill_n(to + row * padded + in, padded - in, 0.0f);
  }
  return {rows, padded, nullptr, nullptr, nullptr, to};
}

QuantizedArgs args_of(const Projection& projection, bool add) {
  const QuantizedMatrix& w = projection.w.quantized();
  const QuantizedFormat& format = w.format;
  const QuantizedLayout layout = layout_of(format, DeviceKind::kCpu);
  QuantizedArgs args{};
  args.y = projection.y.as<float>();
  args.bias = projection.bias.empty() ? nullptr : projection.bias.as<float>();
  args.add = add;
  args.out = static_cast<size_t>(format.out);
  args.in = static_cast<size_t>(layout.in);
  args.group_blocks = divide_up(static_cast<size_t>(format.group), kBlock);
  args.groups = static_cast<size_t>(format.groups());
  args.code = format.code;
  args.scale_dtype = format.scale;
  args.zero = format.zero();
  args.codes = reinterpret_cast<const uint8_t*>(w.data);
  args.scales = w.data + layout.scales;
  args.zeros = format.has_zeros ? reinterpret_cast<const uint8_t*>(w.data + layout.zeros) : nullptr;
  return args;
}

/// Strips [begin, end) of all rows. The code for AVX-512 has VNNI's instructions.
void multiply_strips_of(const QuantizedArgs& args, const RoundedRows& x, size_t begin, size_t end) {
#if (HWY_TARGETS & HWY_AVX3) && (HWY_TARGETS & HWY_AVX2)
  static const bool kLacksVnni = (hwy::SupportedTargets() & HWY_AVX3) != 0 && !vnni::available();
  if (kLacksVnni) return N_AVX2::multiply_quantized(args, x, begin, end);
#endif
  HWY_DYNAMIC_DISPATCH(multiply_quantized)(args, x, begin, end);
}

bool is_exact(const QuantizedMatrix& matrix) {
  return matrix.exact || matrix.format.code == WeightCode::kE4M3;
}

void multiply(const QuantizedArgs& args, const RoundedRows& x, Stream& stream) {
  // Long enough to read ahead, and enough of them for many threads.
  constexpr size_t kMinTaskBytes = size_t{64} << 10;
  constexpr size_t kWantedTasks = 64;
  constexpr size_t kStripsOfTask = 4;
  const size_t strips = divide_up(args.out, kStrip);
  const size_t least = divide_up(kMinTaskBytes, args.strip_bytes());
  const size_t wanted = std::max(least, strips / kWantedTasks);
  const size_t each = divide_up(wanted, kStripsOfTask) * kStripsOfTask;
  stream.pool().parallel_for(divide_up(strips, each), [&](size_t task, int) {
    // A few strips stay in the second-level cache for the passes over the rows of x.
    const size_t end = std::min(strips, (task + 1) * each);
    const size_t step = x.rows > 4 ? kStripsOfTask : each;
    for (size_t strip = task * each; strip < end; strip += step) {
      multiply_strips_of(args, x, strip, std::min(end, strip + step));
    }
  });
}

}  // namespace

void quantized_linears(std::span<const Projection> projections, ConstTensorView x, bool add,
                       Stream& stream) {
  RoundedRows activations{};
  for (const Projection& projection : projections) {
    const bool exact = is_exact(projection.w.quantized());
    const bool ready = activations.rows != 0 && (activations.plain != nullptr) == exact;
    if (!ready) activations = exact ? plain(x, stream) : rounded(x, stream);
    if (projection.y.elements() > 0) multiply(args_of(projection, add), activations, stream);
  }
}

void gather_rows(TensorView y, const QuantizedMatrix& table, std::span<const int32_t> ids,
                 Stream& stream) {
  const QuantizedFormat& format = table.format;
  stream.pool().parallel_for(ids.size(), [&](size_t i, int) {
    QuantizedRows row;
    row.resize(format, 1);
    read_rows(table, ids[i], 1, row);
    row.widen(format, 0, y.as<float>() + static_cast<int64_t>(i) * format.in);
  });
}

}  // namespace kvlm::cpu
#endif  // HWY_ONCE
