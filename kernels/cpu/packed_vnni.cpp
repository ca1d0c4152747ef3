#include "kernels/cpu/packed_vnni.h"

#include <hwy/base.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <utility>

#if HWY_ARCH_X86_64

#include <immintrin.h>

HWY_PUSH_ATTRIBUTES(
    "avx2,fma,f16c,bmi,bmi2,avx512f,avx512bw,avx512cd,avx512dq,avx512vl,avx512vbmi,avx512vnni,gfni")
namespace kvlm::cpu::vnni {

namespace {

using Bytes64 = std::array<uint8_t, 64>;

constexpr size_t kKeyRows = 32;    // rows of a tile of keys: two vectors of scores per query
constexpr size_t kValueRows = 64;  // rows of a tile of values
constexpr size_t kMostQueries = 4;
constexpr size_t kMostPlaces = 512;  // of channels of keys
/// Dwords from the bytes of one query to the next: a constant leaves registers to pointers, and an
/// odd number of cache lines keeps four queries apart in the first cache.
constexpr size_t kByteStride = kMostPlaces + 16;
/// A folded number is a whole multiple of 1 / kSteps of the largest one: with the bias of the three
/// bytes it stays within the mantissa's 2^22 to either side.
constexpr float kSteps = 4161000;
/// 1.5 * 2^23 + 0x8080: added to a whole number below 2^22, it leaves the number in the low bits of
/// the float, its two lower bytes biased by 128 and the upper one by 64.
constexpr float kMagic = 12582912.0f + 0x8080;
constexpr int kMagicBytes = 0x4b408080;
/// Below this the largest number counts as zero, and 1 / it would overflow.
constexpr float kTiny = 1e-30f;

size_t round_up(size_t n, size_t to) { return (n + to - 1) / to * to; }

// ---------------------------------------------------------------------------------------- indices

/// What brings the bytes (b0, b1, b2, -) of 16 numbers, a dword each, into one dword per byte and
/// four channels: dword 4 i + l holds byte l of the channels of quad i. A dword of a packed row has
/// `steps` quads: every steps-th code of each of its bytes. With eight, channels 16..31 are those
/// of a second vector and there is a second half of the quads.
template <size_t kSteps>
constexpr std::array<Bytes64, 2> quad_bytes() {
  std::array<Bytes64, 2> index{};
  for (size_t half = 0; half < 2; ++half) {
    for (size_t i = 0; i < 4; ++i) {
      for (size_t l = 0; l < 4; ++l) {
        for (size_t b = 0; b < 4; ++b) {
          size_t lane = 4 * i + b;
          if (kSteps == 2) lane = 8 * (i / 2) + 2 * b + i % 2;
          if (kSteps == 4) lane = 4 * b + i;
          if (kSteps == 8) lane = 16 * (b / 2) + 8 * (b % 2) + 4 * half + i;
          index[half][16 * i + 4 * l + b] = static_cast<uint8_t>(4 * lane + l);
        }
      }
    }
  }
  return index;
}

/// Matrix with which GF2P8AFFINEQB shifts a byte right and keeps `bits` bits.
constexpr uint64_t extract_matrix(size_t shift, size_t bits) {
  uint64_t matrix = 0;
  for (size_t i = 0; i < bits; ++i) matrix |= uint64_t{1} << (8 * (7 - i) + i + shift);
  return matrix;
}

/// Channels of values that 16 bytes of a row hold, in whole vectors of 16.
constexpr size_t slice_channels(size_t bits) { return 128 / bits / 16 * 16; }

/// From 16 bytes each of four rows to the codes of 16 channels, a dword each, byte r of row r:
/// first two bytes of every row side by side per two channels, then eight bits from each code on.
struct Interleave {
  Bytes64 bytes;
  Bytes64 shifts;
};
template <size_t kBits>
constexpr std::array<Interleave, 8> interleaves() {
  std::array<Interleave, 8> table{};
  for (size_t vector = 0; vector < slice_channels(kBits) / 16; ++vector) {
    for (size_t pair = 0; pair < 8; ++pair) {
      const size_t bit = kBits * (16 * vector + 2 * pair);
      for (size_t row = 0; row < 4; ++row) {
        for (size_t i = 0; i < 2; ++i) {
          // Past the row's 16 bytes nothing is needed.
          const size_t byte = std::min<size_t>(bit / 8 + i, 15);
          table[vector].bytes[8 * pair + 2 * row + i] = static_cast<uint8_t>(16 * row + byte);
          table[vector].shifts[8 * pair + 4 * i + row] =
              static_cast<uint8_t>(16 * row + bit % 8 + kBits * i);
        }
      }
    }
  }
  return table;
}

template <size_t kBits>
constexpr std::array<Interleave, 8> kInterleaves = interleaves<kBits>();

/// As Interleave, of bytes: one index.
constexpr Bytes64 kByteInterleave = [] {
  Bytes64 index{};
  for (size_t i = 0; i < 64; ++i) index[i] = static_cast<uint8_t>(16 * (i % 4) + i / 4);
  return index;
}();

/// 64 codes of a row to a byte each: eight of them lie in kBits bytes.
template <size_t kBits>
constexpr Interleave spread() {
  Interleave table{};
  for (size_t i = 0; i < 64; ++i) {
    table.bytes[i] = static_cast<uint8_t>(std::min<size_t>(i / 8 * kBits + i % 8, 63));
    table.shifts[i] = static_cast<uint8_t>(kBits * (i % 8));
  }
  return table;
}

template <size_t kBits>
constexpr Interleave kSpread = spread<kBits>();

/// The digits of a kTrit5 byte: the first four as 2-bit codes, and the fifth.
constexpr std::array<std::array<uint8_t, 256>, 2> kTritCodes = [] {
  std::array<std::array<uint8_t, 256>, 2> table{};
  for (size_t byte = 0; byte < 256; ++byte) {
    for (size_t digit = 0, rest = byte; digit < 5; ++digit, rest /= 3) {
      auto& to = table[digit / 4][byte];
      to = static_cast<uint8_t>(to | (rest % 3) << (2 * (digit % 4)));
    }
  }
  return table;
}();

/// 64 digits of five vectors' worth, from both vectors of kTritCodes: in order, or so that four
/// digits of each of four rows become, by interleaving their bytes within 16, 16 channels in order.
template <bool kInOrder>
constexpr std::array<Interleave, 5> trit_spread() {
  std::array<Interleave, 5> table{};
  for (size_t vector = 0; vector < 5; ++vector) {
    for (size_t i = 0; i < 64; ++i) {
      const size_t digit = 64 * vector + (kInOrder ? i : i % 16 / 4 * 16 + i / 16 * 4 + i % 4);
      const bool fifth = digit % 5 == 4;
      table[vector].bytes[i] = static_cast<uint8_t>(digit / 5 + (fifth ? 64 : 0));
      table[vector].shifts[i] = static_cast<uint8_t>(8 * (i % 8) + (fifth ? 0 : 2 * (digit % 5)));
    }
  }
  return table;
}
constexpr std::array<Interleave, 5> kTritSpread = trit_spread<true>();
constexpr std::array<Interleave, 5> kTritLanes = trit_spread<false>();

/// body(0), body(1), ... with constants: arrays of vectors then stay in registers, which GCC does
/// not always manage from an unrolled loop.
template <size_t kCount, class Body>
HWY_INLINE void repeat(const Body& body) {
  [&]<size_t... kIndex>(std::index_sequence<kIndex...>) __attribute__((always_inline)) {
    (body(std::integral_constant<size_t, kIndex>()), ...);
  }
  (std::make_index_sequence<kCount>());
}

HWY_INLINE __m512i load(const void* p) { return _mm512_loadu_si512(p); }

HWY_INLINE __mmask64 first_bytes(size_t n) {
  return n >= 64 ? ~__mmask64{0} : (__mmask64{1} << n) - 1;
}
HWY_INLINE __mmask16 first_lanes(size_t n) {
  return static_cast<__mmask16>(n >= 16 ? 0xffff : (1u << n) - 1);
}

HWY_INLINE void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0); }

/// Inlined for more than speed: GCC takes a function that only prefetches for one without effect,
/// and leaves out its calls.
HWY_INLINE void prefetch_lines(const std::byte* from, size_t bytes) {
  for (size_t at = 0; at < bytes; at += 64) {
    prefetch(from + at);
  }
}

HWY_INLINE __m512i side_by_side(__m128i a, __m128i b, __m128i c, __m128i d) {
  const __m256i low = _mm256_inserti128_si256(_mm256_castsi128_si256(a), b, 1);
  const __m256i high = _mm256_inserti128_si256(_mm256_castsi128_si256(c), d, 1);
  return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
}

HWY_INLINE __m128i load16(const uint8_t* p) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
}

/// 16 bytes of each of four rows, or those of them that the mask has.
HWY_INLINE __m512i load_rows(const uint8_t* const* rows, size_t step, size_t at) {
  return side_by_side(load16(rows[0] + at), load16(rows[step] + at), load16(rows[2 * step] + at),
                      load16(rows[3 * step] + at));
}
HWY_INLINE __m512i load_rows(__mmask16 mask, const uint8_t* const* rows, size_t step, size_t at) {
  return side_by_side(_mm_maskz_loadu_epi8(mask, rows[0] + at),
                      _mm_maskz_loadu_epi8(mask, rows[step] + at),
                      _mm_maskz_loadu_epi8(mask, rows[2 * step] + at),
                      _mm_maskz_loadu_epi8(mask, rows[3 * step] + at));
}

// ----------------------------------------------------------------------------------------- numbers

/// `count` stored scales or zero points at any address.
void widen(const std::byte* from, DType dtype, size_t count, float* out) {
  for (size_t i = 0; i < count; i += 16) {
    const __mmask16 mask = first_lanes(count - i);
    const __m512 x = dtype == DType::kF32
                         ? _mm512_maskz_loadu_ps(mask, from + i * sizeof(float))
                         : _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask, from + i * sizeof(f16)));
    _mm512_mask_storeu_ps(out + i, mask, x);
  }
}

float stored_number(const std::byte* from, DType dtype) {
  if (dtype == DType::kF32) {
    float x;
    std::memcpy(&x, from, sizeof x);
    return x;
  }
  f16 x;
  std::memcpy(&x, from, sizeof x);
  return to_float(x);
}

/// The larger magnitude.
HWY_INLINE __m512 larger(__m512 a, __m512 b) { return _mm512_range_ps(a, b, 0b1011); }

/// factor * x as three signed bytes each: x rounded, in bytes 0 to 2 of every dword.
HWY_INLINE __m512i to_bytes(__m512 x, __m512 factor) {
  const __m512 rounded = _mm512_fmadd_ps(x, factor, _mm512_set1_ps(kMagic));
  return _mm512_sub_epi8(_mm512_castps_si512(rounded), _mm512_set1_epi32(kMagicBytes));
}

/// Adds to every lane the products of its four unsigned bytes of `codes` and signed of `bytes`. As
/// an intrinsic, GCC 12 copies the sum before and stores it after every call.
HWY_INLINE __m512i add_products(__m512i sum, __m512i codes, __m512i bytes) {
  asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(codes), "v"(bytes));
  return sum;
}

/// The number of steps that three sums of byte products stand for.
HWY_INLINE __m512 from_bytes(__m512i low, __m512i middle, __m512i high) {
  const __m512 sum =
      _mm512_fmadd_ps(_mm512_cvtepi32_ps(middle), _mm512_set1_ps(256), _mm512_cvtepi32_ps(low));
  return _mm512_fmadd_ps(_mm512_cvtepi32_ps(high), _mm512_set1_ps(65536), sum);
}

/// The largest lane of each of four vectors.
HWY_INLINE __m128 largest_lanes(__m512 a, __m512 b, __m512 c, __m512 d) {
  const __m512 ab = _mm512_max_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
  const __m512 cd = _mm512_max_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
  const __m512 all =
      _mm512_max_ps(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xee));
  const __m256 half = _mm256_max_ps(_mm512_castps512_ps256(all), _mm512_extractf32x8_ps(all, 1));
  return _mm_max_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
}

/// The sum of the lanes of each of four vectors.
HWY_INLINE __m128 sums_of_lanes(__m512 a, __m512 b, __m512 c, __m512 d) {
  const __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
  const __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
  const __m512 all =
      _mm512_add_ps(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xee));
  const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(all), _mm512_extractf32x8_ps(all, 1));
  return _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
}

/// What a step is worth if the largest of each of four sets of numbers is `most`, and how many of
/// them a unit is.
HWY_INLINE void set_steps(__m128 most, float* inverse, float* factor) {
  const __m128 steps = _mm_set1_ps(kSteps);
  _mm_storeu_ps(inverse, _mm_div_ps(most, steps));
  const __mmask8 counts = _mm_cmp_ps_mask(most, _mm_set1_ps(kTiny), _CMP_GT_OQ);
  _mm_storeu_ps(factor, _mm_maskz_div_ps(counts, steps, most));
}

// ------------------------------------------------------------------------------------------- codes

template <size_t kBits>
void spread_rows(const uint8_t* const* rows, size_t count, size_t offset, size_t bytes,
                 size_t channels, uint8_t* out, size_t stride) {
  const __m512i index = load(kSpread<kBits>.bytes.data());
  const __m512i shifts = load(kSpread<kBits>.shifts.data());
  const __m512i mask = _mm512_set1_epi8(static_cast<char>((1 << kBits) - 1));
  for (size_t c = 0; c < channels; c += 64) {
    const size_t at = c / 8 * kBits;
    const __mmask64 some = first_bytes(std::min(bytes - at, 8 * kBits));
    for (size_t r = 0; r < count; ++r) {
      const __m512i x = _mm512_maskz_loadu_epi8(some, rows[r] + offset + at);
      const __m512i words = _mm512_permutexvar_epi8(index, x);
      const __m512i codes = _mm512_multishift_epi64_epi8(shifts, words);
      _mm512_storeu_si512(out + r * stride + c, _mm512_and_si512(codes, mask));
    }
  }
}

HWY_INLINE __m512i look_up(const std::array<uint8_t, 256>& table, __m512i x) {
  const __m512i low = _mm512_permutex2var_epi8(load(table.data()), x, load(table.data() + 64));
  const __m512i high =
      _mm512_permutex2var_epi8(load(table.data() + 128), x, load(table.data() + 192));
  return _mm512_mask_blend_epi8(_mm512_movepi8_mask(x), low, high);
}

void spread_trits(const uint8_t* const* rows, size_t count, size_t offset, size_t bytes,
                  size_t channels, uint8_t* out, size_t stride) {
  const __m512i mask = _mm512_set1_epi8(3);
  for (size_t r = 0; r < count; ++r) {
    for (size_t at = 0; at < bytes; at += 64) {
      const __m512i x = _mm512_maskz_loadu_epi8(first_bytes(bytes - at), rows[r] + offset + at);
      const __m512i four = look_up(kTritCodes[0], x);
      const __m512i fifth = look_up(kTritCodes[1], x);
      for (size_t vector = 0; vector < 5 && 5 * at + 64 * vector < channels; ++vector) {
        const Interleave& index = kTritSpread[vector];
        const __m512i words = _mm512_permutex2var_epi8(four, load(index.bytes.data()), fifth);
        const __m512i codes = _mm512_multishift_epi64_epi8(load(index.shifts.data()), words);
        _mm512_storeu_si512(out + r * stride + 5 * at + 64 * vector, _mm512_and_si512(codes, mask));
      }
    }
  }
}

/// The codes of a section of rows, a byte each, rows `stride` apart; up to 63 bytes beyond a row's
/// codes are written.
HWY_NOINLINE void to_codes(const uint8_t* const* rows, size_t count, size_t offset,
                           const PackedSection& section, uint8_t* out, size_t stride) {
  const auto channels = static_cast<size_t>(section.channels);
  const size_t bytes = section.row_bytes();
  switch (section.code) {
    case CodeFormat::kBits1:
      return spread_rows<1>(rows, count, offset, bytes, channels, out, stride);
    case CodeFormat::kBits2:
    case CodeFormat::kTrit2b:
      return spread_rows<2>(rows, count, offset, bytes, channels, out, stride);
    case CodeFormat::kBits3:
      return spread_rows<3>(rows, count, offset, bytes, channels, out, stride);
    case CodeFormat::kBits4:
      return spread_rows<4>(rows, count, offset, bytes, channels, out, stride);
    case CodeFormat::kBits5:
      return spread_rows<5>(rows, count, offset, bytes, channels, out, stride);
    case CodeFormat::kBits6:
      return spread_rows<6>(rows, count, offset, bytes, channels, out, stride);
    case CodeFormat::kBits7:
      return spread_rows<7>(rows, count, offset, bytes, channels, out, stride);
    case CodeFormat::kBits8:
      for (size_t r = 0; r < count; ++r) std::memcpy(out + r * stride, rows[r] + offset, bytes);
      return;
    case CodeFormat::kTrit5:
      return spread_trits(rows, count, offset, bytes, channels, out, stride);
  }
}

// -------------------------------------------------------------------------------------------- rows

/// Live rows that are worked on together.
template <size_t kMost>
struct RowBatch {
  std::array<const uint8_t*, kMost> codes;  // filled up with the last row
  std::array<const std::byte*, kMost> scales;
  std::array<const std::byte*, kMost> zeros;
  /// kToken: the scales (and zero points) of rows 16 i to 16 i + 15 lie side by side.
  std::array<bool, kMost / 16> dense;
  const PackedBlock* block = nullptr;  // of the first row
  size_t count = 0;
};

/// Hands out the live rows of a run.
class RowReader {
 public:
  explicit RowReader(const SlotRun& run)
      : blocks_(run.blocks),
        row_bytes_(run.format->row_bytes()),
        meta_bytes_(run.format->axis == ScaleAxis::kToken
                        ? static_cast<size_t>(run.format->groups()) * dtype_bytes(run.format->meta)
                        : 0) {}

  /// Fills the batch with the next rows, of one block if its scales are of the block; none at the
  /// end.
  template <size_t kMost>
  HWY_NOINLINE void read(RowBatch<kMost>& batch) {
    batch.count = 0;
    batch.dense.fill(true);
    while (batch.count < kMost) {
      while (block_ < blocks_.size() && taken_ == static_cast<size_t>(blocks_[block_].live_rows)) {
        ++block_;
        taken_ = row_ = 0;
      }
      if (block_ == blocks_.size()) break;
      if (batch.count == 0) batch.block = &blocks_[block_];
      append(blocks_[block_], batch);
      if (meta_bytes_ == 0) break;
    }
    const uint8_t* last = batch.count == 0 ? nullptr : batch.codes[batch.count - 1];
    for (size_t r = batch.count; r < kMost; ++r) batch.codes[r] = last;
    if (batch.count % 16 != 0) batch.dense[batch.count / 16] = false;
  }

 private:
  template <size_t kMost>
  void append(const PackedBlock& from, RowBatch<kMost>& batch) {
    const auto* codes = reinterpret_cast<const uint8_t*>(from.codes);
    const std::byte* zeros = from.zeros == nullptr ? from.scales : from.zeros;
    size_t r = batch.count;
    if (r % 16 != 0) batch.dense[r / 16] = false;
    if (from.live == nullptr) {
      const size_t end = std::min(kMost, r + static_cast<size_t>(from.rows) - row_);
      batch.count = end;
      taken_ += end - r;
      for (; r < end; ++r, ++row_) {
        batch.codes[r] = codes + row_ * row_bytes_;
        batch.scales[r] = from.scales + row_ * meta_bytes_;
        batch.zeros[r] = zeros + row_ * meta_bytes_;
      }
      return;
    }
    const auto live = static_cast<size_t>(from.live_rows);
    for (size_t last = row_; r < kMost && taken_ < live; ++row_) {
      if (!is_live(from, row_)) continue;
      if (r % 16 != 0 && row_ != last + 1) batch.dense[r / 16] = false;
      last = row_;
      batch.codes[r] = codes + row_ * row_bytes_;
      batch.scales[r] = from.scales + row_ * meta_bytes_;
      batch.zeros[r++] = zeros + row_ * meta_bytes_;
      ++taken_;
    }
    batch.count = r;
  }

  std::span<const PackedBlock> blocks_;
  size_t row_bytes_;
  size_t meta_bytes_;  // of a row of kToken
  size_t block_ = 0;
  size_t row_ = 0;
  size_t taken_ = 0;
};

/// Scales of kToken by group: out[g * stride + r] of row r.
class TokenMeta {
 public:
  explicit TokenMeta(const PackedFormat& format)
      : groups_(format.axis == ScaleAxis::kToken ? static_cast<size_t>(format.groups()) : 1),
        dtype_(format.meta) {
    for (size_t half = 0; half < 2; ++half) {
      for (size_t i = 0; i < 32; ++i) {
        const size_t group = 2 * half + i / 16;
        index_[half][i] = static_cast<uint16_t>(group < groups_ ? i % 16 * groups_ + group : 0);
      }
    }
  }

  /// Rows [16 i, 16 i + 16) of the batch; rows that are not there give 0. Fetches those of the next
  /// batch.
  template <size_t kMost>
  HWY_NOINLINE void read(const RowBatch<kMost>& batch,
                         const std::array<const std::byte*, kMost>& rows,
                         const RowBatch<kMost>& next,
                         const std::array<const std::byte*, kMost>& next_rows, size_t i, float* out,
                         size_t stride) const {
    if (16 * i < next.count) prefetch_lines(next_rows[16 * i], 16 * groups_ * dtype_bytes(dtype_));
    out += 16 * i;
    if (batch.dense[i] && groups_ <= 4 && dtype_ == DType::kF16) {
      const std::byte* from = rows[16 * i];
      const size_t halves = 16 * groups_;
      const __m512i x0 = _mm512_maskz_loadu_epi16(mask_of(halves), from);
      const __m512i x1 =
          _mm512_maskz_loadu_epi16(mask_of(halves - std::min<size_t>(halves, 32)), from + 64);
      for (size_t g = 0; g < groups_; g += 2) {
        const __m512i two = _mm512_permutex2var_epi16(x0, load(index_[g / 2].data()), x1);
        _mm512_storeu_ps(out + g * stride, _mm512_cvtph_ps(_mm512_castsi512_si256(two)));
        if (g + 1 == groups_) break;
        _mm512_storeu_ps(out + (g + 1) * stride,
                         _mm512_cvtph_ps(_mm512_extracti64x4_epi64(two, 1)));
      }
      return;
    }
    const size_t count = std::min<size_t>(16, batch.count - 16 * i);
    for (size_t g = 0; g < groups_; ++g) {
      for (size_t r = 0; r < 16; ++r) {
        out[g * stride + r] =
            r < count ? stored_number(rows[16 * i + r] + g * dtype_bytes(dtype_), dtype_) : 0;
      }
    }
  }

 private:
  static __mmask32 mask_of(size_t n) { return n >= 32 ? ~__mmask32{0} : (__mmask32{1} << n) - 1; }

  size_t groups_;
  DType dtype_;
  alignas(64) std::array<std::array<uint16_t, 32>, 2> index_;
};

// ------------------------------------------------------------------------------------------ layout

/// One section as a kernel sees it. Its channels have places in arrays of numbers, rounded up so
/// that sections begin with a vector.
struct Part {
  const PackedSection* section = nullptr;
  size_t row_offset = 0;     // bytes of a row before it
  size_t first_channel = 0;  // of the format
  size_t first = 0;          // place of the first channel
  size_t places = 0;
  /// Keys: quads of channels in a dword of a row, or 1 if codes are unpacked to bytes first.
  size_t steps = 1;
  bool unpack = true;
  size_t columns = 0;  // dwords of a row
};

struct Layout {
  std::array<Part, 2> part;
  size_t parts = 0;
  size_t places = 0;
};

/// Quads in a dword of keys; 0 if they cannot be had from it directly.
size_t steps_of(const PackedFormat& format, CodeFormat code) {
  size_t steps = 0;
  if (code == CodeFormat::kBits1) steps = 8;
  if (code == CodeFormat::kBits2 || code == CodeFormat::kTrit2b) steps = 4;
  if (code == CodeFormat::kBits4) steps = 2;
  if (code == CodeFormat::kBits8) steps = 1;
  if (code == CodeFormat::kTrit5 && format.axis != ScaleAxis::kToken) steps = 5;
  if (format.axis == ScaleAxis::kToken && steps != 0 &&
      static_cast<size_t>(format.group_size) % (4 * steps) != 0 &&
      format.group_size < format.channels()) {
    steps = 0;
  }
  return steps;
}

Layout layout_of(const PackedFormat& format) {
  Layout layout;
  size_t row_offset = 0;
  size_t channel = 0;
  for (int i = 0; i < format.sections; ++i) {
    const PackedSection& section = format.section[static_cast<size_t>(i)];
    Part& part = layout.part[layout.parts++];
    part.section = &section;
    part.row_offset = row_offset;
    part.first_channel = channel;
    part.first = layout.places;
    const auto channels = static_cast<size_t>(section.channels);
    part.steps = steps_of(format, section.code);
    part.unpack = part.steps == 0;
    if (part.unpack) part.steps = 1;
    part.columns = ((part.unpack ? channels : section.row_bytes()) + 3) / 4;
    part.places = round_up(std::max(channels, part.columns * 4 * part.steps), 32);
    layout.places += part.places;
    row_offset += section.row_bytes();
    channel += channels;
  }
  return layout;
}

/// The place of channel c of a part of keys. Quads of trits have every fifth channel of 20.
size_t key_place(const Part& part, size_t c) {
  if (part.steps != 5) return part.first + c;
  return part.first + c / 20 * 20 + c % 5 * 4 + c % 20 / 5;
}

/// Takes arrays from scratch memory.
class Arena {
 public:
  explicit Arena(std::byte* memory) : next_(memory) {}
  template <class T>
  T* take(size_t count) {
    T* taken = reinterpret_cast<T*>(next_);
    next_ += round_up(count * sizeof(T), 64);
    return taken;
  }

 private:
  std::byte* next_;
};

// -------------------------------------------------------------------------------------------- keys

/// Stores dword i of 16 rows as `out[i * kKeyRows]`, eight dwords. Row r and row r + 4 are the
/// halves of x[r % 4 + r / 8 * 4].
HWY_INLINE void store_eight_columns(const __m512i (&x)[8], uint32_t* out) {
  __m512i y[2][4];  // of rows 0 to 7 and 8 to 15: dwords i of four rows, and i + 4
  HWY_UNROLL(2)
  for (size_t i = 0; i < 2; ++i) {
    const __m512i a = _mm512_unpacklo_epi32(x[4 * i], x[4 * i + 1]);
    const __m512i b = _mm512_unpacklo_epi32(x[4 * i + 2], x[4 * i + 3]);
    const __m512i c = _mm512_unpackhi_epi32(x[4 * i], x[4 * i + 1]);
    const __m512i d = _mm512_unpackhi_epi32(x[4 * i + 2], x[4 * i + 3]);
    y[i][0] = _mm512_unpacklo_epi64(a, b);
    y[i][1] = _mm512_unpackhi_epi64(a, b);
    y[i][2] = _mm512_unpacklo_epi64(c, d);
    y[i][3] = _mm512_unpackhi_epi64(c, d);
  }
  HWY_UNROLL(4)
  for (size_t i = 0; i < 4; ++i) {
    _mm512_store_si512(out + i * kKeyRows, _mm512_shuffle_i32x4(y[0][i], y[1][i], 0x88));
    _mm512_store_si512(out + (i + 4) * kKeyRows, _mm512_shuffle_i32x4(y[0][i], y[1][i], 0xdd));
  }
}

HWY_INLINE __m256i load32(const uint8_t* p) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
}

/// Places dwords of 32 rows so that lanes are rows: columns[c * 32 + r] = dword c of row r.
/// kReadable: whole dwords may be read beyond a row.
template <bool kReadable>
void load_columns(const uint8_t* const* rows, size_t offset, size_t bytes, uint32_t* columns) {
  for (size_t half = 0; half < 2; ++half, rows += 16, columns += 16) {
    uint32_t* out = columns;
    size_t at = 0;
    for (; at + 32 <= bytes; at += 32, out += 8 * kKeyRows) {
      __m512i x[8];
      HWY_UNROLL(8)
      for (size_t i = 0; i < 8; ++i) {
        const size_t r = i % 4 + i / 4 * 8;
        x[i] = _mm512_inserti64x4(_mm512_castsi256_si512(load32(rows[r] + offset + at)),
                                  load32(rows[r + 4] + offset + at), 1);
      }
      store_eight_columns(x, out);
    }
    for (; at < bytes; at += 16, out += 4 * kKeyRows) {
      __m512i x[4];
      const size_t n = bytes - at;
      if (kReadable || n >= 16) {
        HWY_UNROLL(4)
        for (size_t i = 0; i < 4; ++i) x[i] = load_rows(rows + i, 4, offset + at);
      } else {
        const auto mask = static_cast<__mmask16>((1u << n) - 1);
        HWY_UNROLL(4)
        for (size_t i = 0; i < 4; ++i) x[i] = load_rows(mask, rows + i, 4, offset + at);
      }
      const __m512i a = _mm512_unpacklo_epi32(x[0], x[1]);
      const __m512i b = _mm512_unpacklo_epi32(x[2], x[3]);
      _mm512_store_si512(out, _mm512_unpacklo_epi64(a, b));
      if (n <= 4) break;
      _mm512_store_si512(out + kKeyRows, _mm512_unpackhi_epi64(a, b));
      if (n <= 8) break;
      const __m512i c = _mm512_unpackhi_epi32(x[0], x[1]);
      const __m512i d = _mm512_unpackhi_epi32(x[2], x[3]);
      _mm512_store_si512(out + 2 * kKeyRows, _mm512_unpacklo_epi64(c, d));
      if (n <= 12) break;
      _mm512_store_si512(out + 3 * kKeyRows, _mm512_unpackhi_epi64(c, d));
    }
  }
}

/// Some columns of a tile against some queries.
struct DotTask {
  const uint32_t* columns = nullptr;  // steps 5: first the first four digits, then the fifth
  size_t count = 0;
  const int32_t* bytes = nullptr;  // of the folded query: four dwords per quad
  const float* inverse = nullptr;  // (queries,): what a step is worth
  const uint8_t* ahead = nullptr;  // two lines per column to fetch
  // Per token:
  const float* scales = nullptr;   // (32,)
  const float* zeros = nullptr;    // (32,)
  const float* offsets = nullptr;  // (queries,) sum of the group's folded query
  float* sums = nullptr;           // (queries, 32), added to
};

template <size_t kQueries, size_t kSteps, bool kToken>
HWY_NOINLINE void dot(const DotTask& task) {
  constexpr size_t kBits = kSteps == 5 ? 2 : 8 / kSteps;
  __m512i sum[kQueries][2][3];
  repeat<kQueries>([&](auto q) __attribute__((always_inline)) {
    repeat<3>([&](auto l) __attribute__((always_inline)) {
      sum[q][0][l] = sum[q][1][l] = _mm512_setzero_si512();
    });
  });
  const uint32_t* x = task.columns;
  const int32_t* w = task.bytes;
  const uint8_t* ahead = task.ahead;
  size_t count = task.count;
  do {
    prefetch(ahead);
    prefetch(ahead + 64);
    ahead += 128;
    repeat<kSteps>([&](auto k) __attribute__((always_inline)) {
      constexpr size_t kAt = k < 4 || kSteps == 8 ? 0 : kKeyRows;
      __m512i low = _mm512_load_si512(x + kAt);
      __m512i high = _mm512_load_si512(x + kAt + 16);
      if constexpr (kSteps > 1 && kAt == 0) {
        const __m512i matrix =
            _mm512_set1_epi64(static_cast<int64_t>(extract_matrix(kBits * k, kBits)));
        low = _mm512_gf2p8affine_epi64_epi8(low, matrix, 0);
        high = _mm512_gf2p8affine_epi64_epi8(high, matrix, 0);
      }
      repeat<kQueries>([&](auto q) __attribute__((always_inline)) {
        repeat<3>([&](auto l) __attribute__((always_inline)) {
          const __m512i b = _mm512_set1_epi32(w[q * kByteStride + 4 * k + l]);
          sum[q][0][l] = add_products(sum[q][0][l], low, b);
          sum[q][1][l] = add_products(sum[q][1][l], high, b);
        });
      });
    });
    x += kSteps == 5 ? 2 * kKeyRows : kKeyRows;
    w += 4 * kSteps;
  } while (--count > 0);
  repeat<kQueries>([&](auto q) __attribute__((always_inline)) {
    repeat<2>([&](auto half) __attribute__((always_inline)) {
      float* to = task.sums + q * kKeyRows + 16 * half;
      __m512 factor = _mm512_set1_ps(task.inverse[q]);
      __m512 so_far = _mm512_load_ps(to);
      if constexpr (kToken) {
        factor = _mm512_mul_ps(factor, _mm512_load_ps(task.scales + 16 * half));
        so_far = _mm512_fmadd_ps(_mm512_load_ps(task.zeros + 16 * half),
                                 _mm512_set1_ps(task.offsets[q]), so_far);
      }
      const __m512i(&s)[3] = sum[q][half];
      _mm512_store_ps(to, _mm512_fmadd_ps(from_bytes(s[0], s[1], s[2]), factor, so_far));
    });
  });
}

template <size_t kSteps, bool kToken>
void dot_queries(const DotTask& task, size_t queries) {
  switch (queries) {
    case 1:
      return dot<1, kSteps, kToken>(task);
    case 2:
      return dot<2, kSteps, kToken>(task);
    case 3:
      return dot<3, kSteps, kToken>(task);
    default:
      return dot<4, kSteps, kToken>(task);
  }
}

template <bool kToken>
void dot_any(const DotTask& task, size_t queries, size_t steps) {
  switch (steps) {
    case 1:
      return dot_queries<1, kToken>(task, queries);
    case 2:
      return dot_queries<2, kToken>(task, queries);
    case 4:
      return dot_queries<4, kToken>(task, queries);
    case 8:
      return dot_queries<8, kToken>(task, queries);
    default:
      if constexpr (!kToken) return dot_queries<5, false>(task, queries);
  }
}

/// Four dwords of bytes per quad from numbers in place order.
template <size_t kSteps>
void split_query(const float* numbers, size_t count, float factor, int32_t* out) {
  static constexpr std::array<Bytes64, 2> kIndex = quad_bytes<kSteps>();
  const __m512i index = load(kIndex[0].data());
  const __m512i other = load(kIndex[1].data());
  const __m512 factors = _mm512_set1_ps(factor);
  for (size_t i = 0; i < count; i += 32, out += 32) {
    const __m512i a = to_bytes(_mm512_load_ps(numbers + i), factors);
    const __m512i b = to_bytes(_mm512_load_ps(numbers + i + 16), factors);
    if constexpr (kSteps == 8) {
      _mm512_store_si512(out, _mm512_permutex2var_epi8(a, index, b));
      _mm512_store_si512(out + 16, _mm512_permutex2var_epi8(a, other, b));
    } else {
      _mm512_store_si512(out, _mm512_permutexvar_epi8(index, a));
      _mm512_store_si512(out + 16, _mm512_permutexvar_epi8(index, b));
    }
  }
}

void split_query(const Part& part, const float* numbers, float factor, int32_t* out) {
  numbers += part.first;
  out += part.first;
  switch (part.steps) {
    case 2:
      return split_query<2>(numbers, part.places, factor, out);
    case 4:
      return split_query<4>(numbers, part.places, factor, out);
    case 8:
      return split_query<8>(numbers, part.places, factor, out);
    default:
      return split_query<1>(numbers, part.places, factor, out);
  }
}

/// Scores of one run of packed keys.
class KeyScorer {
 public:
  KeyScorer(const SlotRun& run, const float* q, size_t queries, float scale, std::byte* scratch)
      : run_(run),
        format_(*run.format),
        layout_(layout_of(format_)),
        queries_(queries),
        groups_(format_.axis == ScaleAxis::kToken ? static_cast<size_t>(format_.groups()) : 0) {
    Arena arena(scratch);
    const size_t places = layout_.places;
    scales_ = arena.take<float>(places);
    zeros_ = arena.take<float>(places);
    loose_ = arena.take<float>(places);
    places_ = arena.take<uint16_t>(static_cast<size_t>(format_.channels()));
    query_ = arena.take<float>(queries * places);
    folded_ = arena.take<float>(kMostQueries * places);
    bytes_ = arena.take<int32_t>(queries * kByteStride);
    columns_ = arena.take<uint32_t>(places / 4 * kKeyRows);
    codes_ = arena.take<uint8_t>(places * kKeyRows + 64 * kKeyRows);
    sums_ = arena.take<float>(queries * kKeyRows);
    bias_ = arena.take<float>(queries + kMostQueries);  // four are written at a time
    inverse_ = arena.take<float>(queries + kMostQueries);
    block_bias_ = arena.take<float>(queries);
    block_inverse_ = arena.take<float>(queries);
    token_scales_ = arena.take<float>(groups_ * kKeyRows);
    token_zeros_ = arena.take<float>(groups_ * kKeyRows);
    offsets_ = arena.take<float>(groups_ * queries);
    std::fill(query_, query_ + queries * places, 0.0f);
    std::fill(scales_, scales_ + places, 0.0f);
    std::fill(zeros_, zeros_ + places, 0.0f);
    const auto channels = static_cast<size_t>(format_.channels());
    for (size_t p = 0; p < layout_.parts; ++p) {
      const Part& part = layout_.part[p];
      for (size_t c = 0; c < static_cast<size_t>(part.section->channels); ++c) {
        const size_t place = key_place(part, c);
        places_[part.first_channel + c] = static_cast<uint16_t>(place);
        for (size_t i = 0; i < queries; ++i) {
          query_[i * places + place] = q[i * channels + part.first_channel + c] * scale;
        }
        // Used as they are where a scale is shared by more than a channel.
        scales_[place] = part.section->slope;
        zeros_[place] =
            part.section->zero_stored ? 1.0f : part.section->offset_of(static_cast<int>(c));
      }
    }
    if (format_.axis == ScaleAxis::kChannel) return;
    fold();
    for (size_t i = 0; i < queries && groups_ > 0; ++i) {
      bias_[i] = 0;
      for (size_t g = 0; g < groups_; ++g) offsets_[g * queries + i] = 0;
      for (size_t c = 0; c < channels; ++c) {
        const size_t place = places_[c];
        offsets_[c / static_cast<size_t>(format_.group_size) * queries + i] +=
            query_[i * places + place] * zeros_[place];
      }
    }
  }

  void run(float* scores, size_t stride) {
    RowReader reader(run_);
    // Two batches, so that the rows of the next are known and can be fetched ahead.
    std::array<RowBatch<kKeyRows>, 2> batches;
    const PackedBlock* folded = nullptr;
    const TokenMeta token_meta(format_);
    reader.read(batches[0]);
    for (size_t turn = 0; batches[turn].count > 0; turn ^= 1) {
      const RowBatch<kKeyRows>& batch = batches[turn];
      RowBatch<kKeyRows>& next = batches[turn ^ 1];
      reader.read(next);
      if (groups_ > 0) {
        for (size_t i = 0; 16 * i < batch.count; ++i) {
          token_meta.read(batch, batch.scales, next, next.scales, i, token_scales_, kKeyRows);
          token_meta.read(batch, batch.zeros, next, next.zeros, i, token_zeros_, kKeyRows);
        }
      } else if (batch.block != folded) {
        folded = batch.block;
        if (next.count > 0 && next.block != folded) {
          prefetch_lines(next.block->scales, format_.scales(1) * dtype_bytes(format_.meta));
          if (next.block->zeros != nullptr) {
            prefetch_lines(next.block->zeros, format_.zeros(1) * dtype_bytes(format_.meta));
          }
        }
        read_factors(*folded);
      }
      score(batch, next.count > 0 ? next : batch, scores, stride);
      scores += batch.count;
    }
  }

 private:
  /// Scales and zero points of a block, folded into the query.
  void read_factors(const PackedBlock& block) {
    if (format_.axis == ScaleAxis::kHead) {
      const float s = stored_number(block.scales, format_.meta);
      const float z = format_.section[0].zero_stored ? stored_number(block.zeros, format_.meta) : s;
      for (size_t i = 0; i < queries_; ++i) {
        block_inverse_[i] = inverse_[i] * s;
        block_bias_[i] = bias_[i] * z;
      }
      return;
    }
    const std::byte* zeros = block.zeros;
    for (size_t p = 0; p < layout_.parts; ++p) {
      const Part& part = layout_.part[p];
      const PackedSection& section = *part.section;
      const auto channels = static_cast<size_t>(section.channels);
      const uint16_t* of_channel = places_ + part.first_channel;
      float* s = part.steps == 5 ? loose_ : scales_ + part.first;
      widen(block.scales + part.first_channel * dtype_bytes(format_.meta), format_.meta, channels,
            s);
      if (part.steps == 5) {
        for (size_t c = 0; c < channels; ++c) scales_[of_channel[c]] = loose_[c];
      }
      if (section.zero_stored) {
        float* z = part.steps == 5 ? loose_ : zeros_ + part.first;
        widen(zeros, format_.meta, channels, z);
        zeros += channels * dtype_bytes(format_.meta);
        if (part.steps == 5) {
          for (size_t c = 0; c < channels; ++c) zeros_[of_channel[c]] = loose_[c];
        }
      } else if (section.split >= section.channels) {
        for (size_t c = 0; c < part.places; ++c) {
          zeros_[part.first + c] = scales_[part.first + c] * section.offset;
        }
      } else {
        for (size_t c = 0; c < channels; ++c) {
          const size_t place = of_channel[c];
          zeros_[place] = scales_[place] * section.offset_of(static_cast<int>(c));
        }
      }
      if (section.slope != 1) {
        for (size_t c = 0; c < part.places; ++c) scales_[part.first + c] *= section.slope;
      }
    }
    fold();
    std::copy(inverse_, inverse_ + queries_, block_inverse_);
    std::copy(bias_, bias_ + queries_, block_bias_);
  }

  /// bytes = query * scales in steps of inverse; bias = query . zeros.
  void fold() {
    for (size_t i = 0; i < queries_; i += kMostQueries) {
      switch (std::min(kMostQueries, queries_ - i)) {
        case 1:
          fold<1>(i);
          break;
        case 2:
          fold<2>(i);
          break;
        case 3:
          fold<3>(i);
          break;
        default:
          fold<4>(i);
      }
    }
  }

  template <size_t kQueries>
  HWY_NOINLINE void fold(size_t first) {
    const size_t places = layout_.places;
    const float* query = query_ + first * places;
    __m512 most[4];
    __m512 bias[4];
    repeat<4>([&](auto q)
                  __attribute__((always_inline)) { most[q] = bias[q] = _mm512_setzero_ps(); });
    for (size_t c = 0; c < places; c += 16) {
      const __m512 s = _mm512_load_ps(scales_ + c);
      const __m512 z = _mm512_load_ps(zeros_ + c);
      repeat<kQueries>([&](auto q) __attribute__((always_inline)) {
        const __m512 u = _mm512_load_ps(query + q * places + c);
        const __m512 product = _mm512_mul_ps(u, s);
        bias[q] = _mm512_fmadd_ps(u, z, bias[q]);
        most[q] = larger(most[q], product);
        _mm512_store_ps(folded_ + q * places + c, product);
      });
    }
    float factor[4];
    set_steps(largest_lanes(most[0], most[1], most[2], most[3]), inverse_ + first, factor);
    _mm_storeu_ps(bias_ + first, sums_of_lanes(bias[0], bias[1], bias[2], bias[3]));
    for (size_t q = 0; q < kQueries; ++q) {
      for (size_t p = 0; p < layout_.parts; ++p) {
        split_query(layout_.part[p], folded_ + q * places, factor[q],
                    bytes_ + (first + q) * kByteStride);
      }
    }
  }

  void score(const RowBatch<kKeyRows>& batch, const RowBatch<kKeyRows>& next, float* scores,
             size_t stride) {
    for (size_t i = 0; i < queries_; ++i) {
      const __m512 bias = groups_ > 0 ? _mm512_setzero_ps() : _mm512_set1_ps(block_bias_[i]);
      _mm512_store_ps(sums_ + i * kKeyRows, bias);
      _mm512_store_ps(sums_ + i * kKeyRows + 16, bias);
    }
    for (size_t p = 0; p < layout_.parts; ++p) score_part(layout_.part[p], batch, next);
    for (size_t i = 0; i < queries_; ++i) {
      const float* from = sums_ + i * kKeyRows;
      float* to = scores + i * stride;
      // The usual count is a constant that the compiler turns into two moves.
      if (batch.count == kKeyRows) {
        std::memcpy(to, from, kKeyRows * sizeof(float));
      } else {
        std::memcpy(to, from, batch.count * sizeof(float));
      }
    }
  }

  void score_part(const Part& part, const RowBatch<kKeyRows>& batch,
                  const RowBatch<kKeyRows>& next) {
    // Dense rows are fetched in order, a column's share at a time; others, by and large.
    const uint8_t* ahead =
        part.unpack ? batch.codes[0] : next.codes[0] + part.row_offset * kKeyRows;
    if (part.unpack) {
      std::array<const uint8_t*, kKeyRows> rows;
      const size_t row_bytes = part.places + 64;
      for (size_t r = 0; r < kKeyRows; ++r) {
        rows[r] = codes_ + std::min(r, batch.count - 1) * row_bytes;
        prefetch(next.codes[r] + part.row_offset);
      }
      to_codes(batch.codes.data(), batch.count, part.row_offset, *part.section, codes_, row_bytes);
      load_columns<true>(rows.data(), 0, 4 * part.columns, columns_);
    } else {
      load_columns<false>(batch.codes.data(), part.row_offset, part.section->row_bytes(), columns_);
    }
    if (part.steps == 5) {
      // From the last on, as both vectors of a column go where two columns were.
      for (size_t c = part.columns; c-- > 0;) {
        for (size_t half = 2; half-- > 0;) {
          const __m512i x = _mm512_load_si512(columns_ + c * kKeyRows + 16 * half);
          uint32_t* to = columns_ + c * 2 * kKeyRows + 16 * half;
          // With c = 0 the second half goes over nothing that is still needed.
          _mm512_store_si512(to + kKeyRows, look_up(kTritCodes[1], x));
          _mm512_store_si512(to, look_up(kTritCodes[0], x));
        }
      }
    }
    for (size_t i = 0; i < queries_; i += kMostQueries) {
      const size_t some = std::min(kMostQueries, queries_ - i);
      DotTask task;
      task.columns = columns_;
      task.count = part.columns;
      task.bytes = bytes_ + i * kByteStride + part.first;
      task.sums = sums_ + i * kKeyRows;
      task.ahead = i == 0 ? ahead : batch.codes[0];
      if (groups_ == 0) {
        task.inverse = block_inverse_ + i;
        dot_any<false>(task, some, part.steps);
        continue;
      }
      task.inverse = inverse_ + i;
      const size_t group = static_cast<size_t>(format_.group_size) / (4 * part.steps);
      for (size_t g = 0; g < groups_; ++g) {
        task.columns = columns_ + g * group * kKeyRows;
        task.bytes = bytes_ + i * kByteStride + g * group * part.steps * 4;
        task.count = groups_ == 1 ? part.columns : std::min(group, part.columns - g * group);
        task.ahead = (i == 0 ? ahead : batch.codes[0]) + g * group * 4 * kKeyRows;
        task.scales = token_scales_ + g * kKeyRows;
        task.zeros = token_zeros_ + g * kKeyRows;
        task.offsets = offsets_ + g * queries_ + i;
        dot_any<true>(task, some, part.steps);
      }
    }
  }

  const SlotRun& run_;
  const PackedFormat& format_;
  Layout layout_;
  size_t queries_;
  size_t groups_;     // kToken
  float* scales_;     // (places,)
  float* zeros_;      // (places,)
  float* loose_;      // (places,): factors in the order of channels
  uint16_t* places_;  // (channels,)
  float* query_;      // (queries, places): scale * q
  float* folded_;     // (places,)
  int32_t* bytes_;    // (queries, kByteStride): four dwords per quad
  uint32_t* columns_;
  uint8_t* codes_;  // (kKeyRows, places + 64)
  float* sums_;     // (queries, kKeyRows)
  float* bias_;
  float* inverse_;
  float* block_bias_;
  float* block_inverse_;
  float* token_scales_;  // (groups, kKeyRows)
  float* token_zeros_;
  float* offsets_;  // (groups, queries)
};

// ------------------------------------------------------------------------------------------ values

/// The tile of values: vector v of 16 channels and four rows at v * kValueRows * 16 + quad * 64.
constexpr size_t kTileStride = kValueRows * 16;

/// Four rows at a time from packed codes of kBits to the tile.
template <size_t kBits>
HWY_NOINLINE void load_tile(const uint8_t* const* rows, size_t quads, size_t offset, size_t bytes,
                            size_t channels, const uint8_t* ahead, uint8_t* tile) {
  constexpr size_t kSlice = slice_channels(kBits);
  constexpr size_t kSliceBytes = kSlice * kBits / 8;
  const __m512i mask = _mm512_set1_epi8(static_cast<char>((1 << kBits) - 1));
  const size_t vectors = (channels + 15) / 16;
  for (size_t first = 0; first < vectors; first += kSlice / 16) {
    const size_t at = offset + first / (kSlice / 16) * kSliceBytes;
    const size_t n = offset + bytes - at;
    const auto some = static_cast<__mmask16>(n >= 16 ? 0xffff : (1u << n) - 1);
    const size_t count = std::min(kSlice / 16, vectors - first);
    uint8_t* out = tile + first * kTileStride;
    for (size_t quad = 0; quad < quads; ++quad, out += 64) {
      prefetch(ahead);
      ahead += 64;
      const __m512i x = load_rows(some, rows + 4 * quad, 1, at);
      HWY_UNROLL(8)
      for (size_t v = 0; v < kSlice / 16; ++v) {
        if (v >= count) break;
        __m512i codes;
        if constexpr (kBits == 8) {
          codes = _mm512_permutexvar_epi8(load(kByteInterleave.data()), x);
        } else {
          codes = _mm512_permutexvar_epi8(load(kInterleaves<kBits>[v].bytes.data()), x);
          codes = _mm512_multishift_epi64_epi8(load(kInterleaves<kBits>[v].shifts.data()), codes);
          codes = _mm512_and_si512(codes, mask);
        }
        _mm512_store_si512(out + v * kTileStride, codes);
      }
    }
  }
}

/// As load_tile, of rows of at most 64 bytes of kTrit5.
HWY_NOINLINE void load_tile_of_trits(const uint8_t* const* rows, size_t quads, size_t offset,
                                     size_t bytes, size_t channels, const uint8_t* ahead,
                                     uint8_t* tile) {
  const __m512i mask = _mm512_set1_epi8(3);
  const __mmask64 some = first_bytes(bytes);
  for (size_t quad = 0; quad < quads; ++quad, tile += 64) {
    prefetch(ahead + quad * 4 * bytes);
    prefetch(ahead + quad * 4 * bytes + 64);
    __m512i four[4];
    __m512i fifth[4];
    HWY_UNROLL(4)
    for (size_t r = 0; r < 4; ++r) {
      const __m512i x = _mm512_maskz_loadu_epi8(some, rows[4 * quad + r] + offset);
      four[r] = look_up(kTritCodes[0], x);
      fifth[r] = look_up(kTritCodes[1], x);
    }
    for (size_t c = 0; c < channels; c += 64) {
      const Interleave& index = kTritLanes[c / 64];
      const __m512i places = load(index.bytes.data());
      const __m512i shifts = load(index.shifts.data());
      __m512i x[4];
      HWY_UNROLL(4)
      for (size_t r = 0; r < 4; ++r) {
        x[r] = _mm512_permutex2var_epi8(four[r], places, fifth[r]);
        x[r] = _mm512_and_si512(_mm512_multishift_epi64_epi8(shifts, x[r]), mask);
      }
      uint8_t* out = tile + c / 16 * kTileStride;
      const __m512i a = _mm512_unpacklo_epi8(x[0], x[1]);
      const __m512i b = _mm512_unpacklo_epi8(x[2], x[3]);
      _mm512_store_si512(out, _mm512_unpacklo_epi16(a, b));
      if (c + 16 >= channels) break;
      _mm512_store_si512(out + kTileStride, _mm512_unpackhi_epi16(a, b));
      if (c + 32 >= channels) break;
      const __m512i d = _mm512_unpackhi_epi8(x[0], x[1]);
      const __m512i e = _mm512_unpackhi_epi8(x[2], x[3]);
      _mm512_store_si512(out + 2 * kTileStride, _mm512_unpacklo_epi16(d, e));
      if (c + 48 >= channels) break;
      _mm512_store_si512(out + 3 * kTileStride, _mm512_unpackhi_epi16(d, e));
    }
  }
}

/// Sums of kVectors vectors of channels over the rows of a tile.
template <size_t kQueries, size_t kVectors>
HWY_NOINLINE void multiply(const uint8_t* tile, size_t quads, const int32_t* bytes,
                           const float* inverse, float* sums, size_t stride) {
  __m512i sum[kQueries][kVectors][3];
  repeat<kQueries>([&](auto q) __attribute__((always_inline)) {
    repeat<kVectors>([&](auto v) __attribute__((always_inline)) {
      sum[q][v][0] = sum[q][v][1] = sum[q][v][2] = _mm512_setzero_si512();
    });
  });
  do {
    __m512i code[kVectors];
    repeat<kVectors>([&](auto v) __attribute__((always_inline)) {
      code[v] = _mm512_load_si512(tile + v * kTileStride);
    });
    repeat<kQueries>([&](auto q) __attribute__((always_inline)) {
      repeat<3>([&](auto l) __attribute__((always_inline)) {
        const __m512i b = _mm512_set1_epi32(bytes[q * kValueRows + l]);
        repeat<kVectors>([&](auto v) __attribute__((always_inline)) {
          sum[q][v][l] = add_products(sum[q][v][l], code[v], b);
        });
      });
    });
    tile += 64;
    bytes += 4;
  } while (--quads > 0);
  repeat<kQueries>([&](auto q) __attribute__((always_inline)) {
    repeat<kVectors>([&](auto v) __attribute__((always_inline)) {
      float* to = sums + q * stride + 16 * v;
      const __m512 steps = from_bytes(sum[q][v][0], sum[q][v][1], sum[q][v][2]);
      _mm512_store_ps(to, _mm512_fmadd_ps(steps, _mm512_set1_ps(inverse[q]), _mm512_load_ps(to)));
    });
  });
}

template <size_t kVectors>
void multiply_queries(size_t queries, const uint8_t* tile, size_t quads, const int32_t* bytes,
                      const float* inverse, float* sums, size_t stride) {
  switch (queries) {
    case 1:
      return multiply<1, kVectors>(tile, quads, bytes, inverse, sums, stride);
    case 2:
      return multiply<2, kVectors>(tile, quads, bytes, inverse, sums, stride);
    case 3:
      return multiply<3, kVectors>(tile, quads, bytes, inverse, sums, stride);
    default:
      return multiply<4, kVectors>(tile, quads, bytes, inverse, sums, stride);
  }
}

/// Values of one query: from packed codes to sums of four vectors of channels without a tile, which
/// would cost more than the products. As few vectors as leave registers for their indices.
constexpr size_t kRowVectors = 4;

struct RowsTask {
  const uint8_t* const* rows = nullptr;
  const uint8_t* ahead = nullptr;  // kBits / 2 lines per quad to fetch
  size_t quads = 0;
  size_t offset = 0;                        // bytes of a row before
  size_t bytes = 0;                         // bytes of a row from there
  std::array<const int32_t*, 2> weights{};  // of every second vector
  std::array<float, 2> inverse{};           // of every second vector
  float* sums = nullptr;
};

/// kFirst: vectors of the first 16 bytes that come before.
template <size_t kBits, size_t kFirst>
HWY_NOINLINE void multiply_rows(const RowsTask& task) {
  constexpr size_t kSliceVectors = std::min(kRowVectors, slice_channels(kBits) / 16);
  constexpr size_t kSliceBytes = slice_channels(kBits) * kBits / 8;
  constexpr size_t kSlices = kRowVectors / kSliceVectors;
  const __m512i mask = _mm512_set1_epi8(static_cast<char>((1 << kBits) - 1));
  __m512i bytes[kSliceVectors];
  __m512i shifts[kSliceVectors];
  repeat<kSliceVectors>([&](auto i) __attribute__((always_inline)) {
    bytes[i] = kBits == 8 ? load(kByteInterleave.data())
                          : load(kInterleaves<kBits>[kFirst + i].bytes.data());
    shifts[i] = load(kInterleaves<kBits>[kFirst + i].shifts.data());
  });
  __mmask16 some[kSlices];
  for (size_t i = 0; i < kSlices; ++i) some[i] = first_lanes(task.bytes - i * kSliceBytes);
  const uint8_t* const* rows = task.rows;
  const uint8_t* ahead = task.ahead;
  const int32_t* weights[2] = {task.weights[0], task.weights[1]};
  const size_t offset = task.offset;
  size_t quads = task.quads;
  __m512i sum[kRowVectors][3];
  repeat<kRowVectors>([&](auto v) __attribute__((always_inline)) {
    sum[v][0] = sum[v][1] = sum[v][2] = _mm512_setzero_si512();
  });
  do {
    repeat<kSlices>([&](auto slice) __attribute__((always_inline)) {
      const __m512i x = load_rows(some[slice], rows, 1, offset + slice * kSliceBytes);
      repeat<kSliceVectors>([&](auto i) __attribute__((always_inline)) {
        constexpr size_t kVector = slice * kSliceVectors + i;
        __m512i codes = _mm512_permutexvar_epi8(bytes[i], x);
        if constexpr (kBits != 8) {
          codes = _mm512_multishift_epi64_epi8(shifts[i], codes);
          codes = _mm512_and_si512(codes, mask);
        }
        repeat<3>([&](auto l) __attribute__((always_inline)) {
          const __m512i b = _mm512_set1_epi32(weights[kVector / 2][l]);
          sum[kVector][l] = add_products(sum[kVector][l], codes, b);
        });
      });
    });
    for (size_t line = 0; 2 * line < kBits; ++line) prefetch(ahead + 64 * line);
    ahead += 32 * kBits;
    rows += 4;
    weights[0] += 4;
    weights[1] += 4;
  } while (--quads > 0);
  repeat<kRowVectors>([&](auto v) __attribute__((always_inline)) {
    float* to = task.sums + 16 * v;
    const __m512 steps = from_bytes(sum[v][0], sum[v][1], sum[v][2]);
    _mm512_store_ps(
        to, _mm512_fmadd_ps(steps, _mm512_set1_ps(task.inverse[v / 2]), _mm512_load_ps(to)));
  });
}

void multiply_rows(const RowsTask& task, size_t bits, bool second_half) {
  switch (bits) {
    case 1:
      return second_half ? multiply_rows<1, 4>(task) : multiply_rows<1, 0>(task);
    case 2:
      return multiply_rows<2, 0>(task);
    case 3:
      return multiply_rows<3, 0>(task);
    case 4:
      return multiply_rows<4, 0>(task);
    default:
      return multiply_rows<8, 0>(task);
  }
}

/// Adds one run of packed values to the output.
class ValueAdder {
 public:
  ValueAdder(const SlotRun& run, const SlotWeights& weights, std::byte* scratch, float* out)
      : run_(run),
        format_(*run.format),
        layout_(layout_of(format_)),
        weights_(weights),
        per_token_(format_.axis == ScaleAxis::kToken),
        groups_(per_token_ ? static_cast<size_t>(format_.groups()) : 1),
        out_(out) {
    Arena arena(scratch);
    const size_t queries = weights.queries;
    scales_ = arena.take<float>(layout_.places);
    zeros_ = arena.take<float>(layout_.places);
    sums_ = arena.take<float>(queries * layout_.places);
    totals_ = arena.take<float>(queries * groups_ * 16);
    tile_ = arena.take<uint8_t>(layout_.places / 16 * kTileStride);
    codes_ = arena.take<uint8_t>((layout_.places + 64) * kValueRows);
    tile_weights_ = arena.take<float>(queries * kValueRows);
    bytes_ = arena.take<int32_t>(groups_ * kMostQueries * kValueRows);
    inverse_ = arena.take<float>(groups_ * kMostQueries);
    token_scales_ = arena.take<float>(groups_ * kValueRows);
    token_zeros_ = arena.take<float>(groups_ * kValueRows);
    clear();
    by_rows_ = rows_suffice();
  }

  void run(SlotWalk walk) {
    RowReader reader(run_);
    std::array<RowBatch<kValueRows>, 2> batches;
    const TokenMeta token_meta(format_);
    const PackedBlock* summed = nullptr;
    reader.read(batches[0]);
    for (size_t turn = 0; batches[turn].count > 0; turn ^= 1) {
      const RowBatch<kValueRows>& batch = batches[turn];
      RowBatch<kValueRows>& next = batches[turn ^ 1];
      reader.read(next);
      if (!per_token_ && summed != nullptr && batch.block != summed) {
        add_block(*summed);
        clear();
      }
      summed = batch.block;
      gather(walk, batch.count);
      if (!by_rows_) load_tile(batch, next.count > 0 ? next : batch);
      const size_t sixteens = (batch.count + 15) / 16;
      if (per_token_) {
        for (size_t i = 0; i < sixteens; ++i) {
          token_meta.read(batch, batch.scales, next, next.scales, i, token_scales_, kValueRows);
          token_meta.read(batch, batch.zeros, next, next.zeros, i, token_zeros_, kValueRows);
        }
        const float slope = format_.section[0].slope;
        if (slope != 1) {
          for (size_t i = 0; i < groups_ * kValueRows; ++i) token_scales_[i] *= slope;
        }
      }
      for (size_t i = 0; i < weights_.queries; i += kMostQueries) {
        const size_t some = std::min(kMostQueries, weights_.queries - i);
        for (size_t g = 0; g < groups_; ++g) {
          per_token_ ? split_weights<true>(i, some, g, sixteens)
                     : split_weights<false>(i, some, g, sixteens);
        }
        const size_t quads = (batch.count + 3) / 4;
        by_rows_ ? multiply_rows(batch, next.count > 0 ? next : batch, quads)
                 : multiply(i, some, quads);
      }
    }
    if (per_token_) {
      add_tokens();
    } else if (summed != nullptr) {
      add_block(*summed);
    }
  }

 private:
  void clear() {
    std::fill(sums_, sums_ + weights_.queries * layout_.places, 0.0f);
    std::fill(totals_, totals_ + weights_.queries * groups_ * 16, 0.0f);
  }

  /// The weights of the tile's rows, with zeros up to the next 16.
  HWY_NOINLINE void gather(SlotWalk& walk, size_t count) {
    const size_t end = round_up(count, 16);
    if (walk.dense()) {
      const size_t slot = walk.next();
      walk.skip(count - 1);
      for (size_t i = 0; i < weights_.queries; ++i) {
        float* to = tile_weights_ + i * kValueRows;
        std::memcpy(to, weights_.of + i * weights_.stride + slot, count * sizeof(float));
        std::fill(to + count, to + end, 0.0f);
      }
      return;
    }
    for (size_t r = 0; r < count; ++r) {
      const size_t slot = walk.next();
      for (size_t i = 0; i < weights_.queries; ++i) {
        tile_weights_[i * kValueRows + r] = weights_.of[i * weights_.stride + slot];
      }
    }
    for (size_t i = 0; i < weights_.queries; ++i) {
      std::fill(tile_weights_ + i * kValueRows + count, tile_weights_ + i * kValueRows + end, 0.0f);
    }
  }

  void load_tile(const RowBatch<kValueRows>& batch, const RowBatch<kValueRows>& next) {
    const size_t quads = (batch.count + 3) / 4;
    for (size_t p = 0; p < layout_.parts; ++p) {
      const Part& part = layout_.part[p];
      const PackedSection& section = *part.section;
      const size_t bytes = section.row_bytes();
      const auto channels = static_cast<size_t>(section.channels);
      uint8_t* tile = tile_ + part.first / 16 * kTileStride;
      const uint8_t* const* rows = batch.codes.data();
      const uint8_t* ahead = next.codes[0] + part.row_offset * 4 * quads;
      switch (section.code) {
        case CodeFormat::kBits1:
          vnni::load_tile<1>(rows, quads, part.row_offset, bytes, channels, ahead, tile);
          break;
        case CodeFormat::kBits2:
        case CodeFormat::kTrit2b:
          vnni::load_tile<2>(rows, quads, part.row_offset, bytes, channels, ahead, tile);
          break;
        case CodeFormat::kBits3:
          vnni::load_tile<3>(rows, quads, part.row_offset, bytes, channels, ahead, tile);
          break;
        case CodeFormat::kBits4:
          vnni::load_tile<4>(rows, quads, part.row_offset, bytes, channels, ahead, tile);
          break;
        case CodeFormat::kBits5:
          vnni::load_tile<5>(rows, quads, part.row_offset, bytes, channels, ahead, tile);
          break;
        case CodeFormat::kBits6:
          vnni::load_tile<6>(rows, quads, part.row_offset, bytes, channels, ahead, tile);
          break;
        case CodeFormat::kBits8:
          vnni::load_tile<8>(rows, quads, part.row_offset, bytes, channels, ahead, tile);
          break;
        case CodeFormat::kTrit5:
          if (bytes <= 64) {
            load_tile_of_trits(rows, quads, part.row_offset, bytes, channels, ahead, tile);
            break;
          }
          [[fallthrough]];
        case CodeFormat::kBits7: {
          std::array<const uint8_t*, kValueRows> spread;
          const size_t row_bytes = part.places + 64;
          for (size_t r = 0; r < 4 * quads; ++r) {
            spread[r] = codes_ + std::min(r, batch.count - 1) * row_bytes;
            prefetch(next.codes[r] + part.row_offset);
          }
          to_codes(rows, batch.count, part.row_offset, section, codes_, row_bytes);
          vnni::load_tile<8>(spread.data(), quads, 0, round_up(channels, 16), channels, spread[0],
                             tile);
          break;
        }
      }
    }
  }

  /// Weights times scales of group g as bytes, of queries from `first` on; adds weights times zero
  /// points (or plain weights) to the totals.
  template <size_t kQueries, bool kToken>
  HWY_NOINLINE void split_weights(size_t first, size_t g, size_t sixteens) {
    static constexpr std::array<Bytes64, 2> kIndex = quad_bytes<1>();
    const float* weights = tile_weights_ + first * kValueRows;
    const float* scales = token_scales_ + g * kValueRows;
    const float* zeros = token_zeros_ + g * kValueRows;
    float* totals = totals_ + (first * groups_ + g) * 16;
    __m512 most[4];
    __m512 sum[kQueries];
    repeat<4>([&](auto q) __attribute__((always_inline)) { most[q] = _mm512_setzero_ps(); });
    repeat<kQueries>([&](auto q) __attribute__((always_inline)) {
      sum[q] = _mm512_load_ps(totals + q * groups_ * 16);
    });
    for (size_t i = 0; i < 16 * sixteens; i += 16) {
      const __m512 s = kToken ? _mm512_load_ps(scales + i) : _mm512_setzero_ps();
      const __m512 z = kToken ? _mm512_load_ps(zeros + i) : _mm512_setzero_ps();
      repeat<kQueries>([&](auto q) __attribute__((always_inline)) {
        const __m512 w = _mm512_load_ps(weights + q * kValueRows + i);
        sum[q] = kToken ? _mm512_fmadd_ps(w, z, sum[q]) : _mm512_add_ps(w, sum[q]);
        most[q] = larger(most[q], kToken ? _mm512_mul_ps(w, s) : w);
      });
    }
    repeat<kQueries>([&](auto q) __attribute__((always_inline)) {
      _mm512_store_ps(totals + q * groups_ * 16, sum[q]);
    });
    float factor[4];
    set_steps(largest_lanes(most[0], most[1], most[2], most[3]), inverse_ + g * kMostQueries,
              factor);
    const __m512i index = load(kIndex[0].data());
    int32_t* out = bytes_ + g * kMostQueries * kValueRows;
    for (size_t i = 0; i < 16 * sixteens; i += 16) {
      const __m512 s = kToken ? _mm512_load_ps(scales + i) : _mm512_setzero_ps();
      repeat<kQueries>([&](auto q) __attribute__((always_inline)) {
        __m512 w = _mm512_load_ps(weights + q * kValueRows + i);
        if constexpr (kToken) w = _mm512_mul_ps(w, s);
        const __m512i bytes = to_bytes(w, _mm512_set1_ps(factor[q]));
        _mm512_store_si512(out + q * kValueRows + i, _mm512_permutexvar_epi8(index, bytes));
      });
    }
  }

  template <bool kToken>
  void split_weights(size_t first, size_t some, size_t g, size_t sixteens) {
    switch (some) {
      case 1:
        return split_weights<1, kToken>(first, g, sixteens);
      case 2:
        return split_weights<2, kToken>(first, g, sixteens);
      case 3:
        return split_weights<3, kToken>(first, g, sixteens);
      default:
        return split_weights<4, kToken>(first, g, sixteens);
    }
  }

  /// The group of vector v of channels.
  size_t group_of(size_t v) const {
    return groups_ == 1 ? 0
                        : std::min(16 * v / static_cast<size_t>(format_.group_size), groups_ - 1);
  }

  void multiply(size_t first, size_t some, size_t quads) {
    const size_t vectors = layout_.places / 16;
    for (size_t v = 0; v < vectors; v += 2) {
      const size_t g = group_of(v);
      const uint8_t* tile = tile_ + v * kTileStride;
      const int32_t* bytes = bytes_ + g * kMostQueries * kValueRows;
      float* sums = sums_ + first * layout_.places + 16 * v;
      if (group_of(v + 1) == g) {  // places are in pairs of vectors
        multiply_queries<2>(some, tile, quads, bytes, inverse_ + g * kMostQueries, sums,
                            layout_.places);
        continue;
      }
      for (size_t i = 0; i < 2; ++i) {
        const size_t at = group_of(v + i);
        multiply_queries<1>(some, tile + i * kTileStride, quads,
                            bytes_ + at * kMostQueries * kValueRows, inverse_ + at * kMostQueries,
                            sums + 16 * i, layout_.places);
      }
    }
  }

  /// Whether one query's values need no tile: whole vectors of codes that are no more than shifted.
  bool rows_suffice() const {
    if (weights_.queries != 1 || layout_.parts != 1) return false;
    const PackedSection& section = format_.section[0];
    const int bits = code_bits(section.code);
    const size_t vectors = (static_cast<size_t>(section.channels) + 15) / 16;
    return vectors % kRowVectors == 0 && (bits == 8 || (bits >= 1 && bits <= 4)) &&
           (!per_token_ || groups_ == 1 || format_.group_size % 32 == 0);
  }

  void multiply_rows(const RowBatch<kValueRows>& batch, const RowBatch<kValueRows>& next,
                     size_t quads) {
    const PackedSection& section = format_.section[0];
    const auto bits = static_cast<size_t>(code_bits(section.code));
    const size_t vectors = (static_cast<size_t>(section.channels) + 15) / 16;
    RowsTask task;
    task.rows = batch.codes.data();
    task.quads = quads;
    for (size_t v = 0; v < vectors; v += kRowVectors) {
      const bool odd = v / kRowVectors % 2 != 0;
      task.ahead = next.codes[0] + v / kRowVectors * quads * 32 * bits;
      // 16 bytes hold 8 vectors of bits.
      task.offset = 2 * bits * (bits == 1 ? v / 8 * 8 : v);
      task.bytes = section.row_bytes() - task.offset;
      for (size_t i = 0; i < 2; ++i) {
        const size_t g = group_of(v + 2 * i);
        task.weights[i] = bytes_ + g * kMostQueries * kValueRows;
        task.inverse[i] = inverse_[g * kMostQueries];
      }
      task.sums = sums_ + 16 * v;
      vnni::multiply_rows(task, bits, odd);
    }
  }

  /// Weighs the sums of a block by its scales.
  HWY_NOINLINE void add_block(const PackedBlock& block) {
    const auto channels = static_cast<size_t>(format_.channels());
    const std::byte* zeros = block.zeros;
    for (size_t p = 0; p < layout_.parts; ++p) {
      const Part& part = layout_.part[p];
      const PackedSection& section = *part.section;
      const auto count = static_cast<size_t>(section.channels);
      float* s = scales_;
      float* z = zeros_;
      if (format_.axis == ScaleAxis::kHead) {
        std::fill(s, s + count, stored_number(block.scales, format_.meta));
        if (section.zero_stored) std::fill(z, z + count, stored_number(zeros, format_.meta));
      } else {
        widen(block.scales + part.first_channel * dtype_bytes(format_.meta), format_.meta, count,
              s);
        if (section.zero_stored) {
          widen(zeros, format_.meta, count, z);
          zeros += count * dtype_bytes(format_.meta);
        }
      }
      if (!section.zero_stored) {
        for (size_t c = 0; c < count; ++c) z[c] = s[c] * section.offset_of(static_cast<int>(c));
      }
      const __m512 slope = _mm512_set1_ps(section.slope);
      for (size_t i = 0; i < weights_.queries; ++i) {
        const float* sums = sums_ + i * layout_.places + part.first;
        float* out = out_ + i * channels + part.first_channel;
        const __m512 total = _mm512_set1_ps(_mm512_reduce_add_ps(_mm512_load_ps(totals_ + i * 16)));
        for (size_t c = 0; c < count; c += 16) {
          const __mmask16 mask = first_lanes(count - c);
          __m512 x = _mm512_maskz_loadu_ps(mask, out + c);
          x = _mm512_fmadd_ps(total, _mm512_maskz_load_ps(mask, z + c), x);
          const __m512 scaled = _mm512_mul_ps(slope, _mm512_maskz_load_ps(mask, s + c));
          x = _mm512_fmadd_ps(_mm512_load_ps(sums + c), scaled, x);
          _mm512_mask_storeu_ps(out + c, mask, x);
        }
      }
    }
  }

  /// kToken: what all rows of the run come to.
  void add_tokens() {
    const PackedSection& section = format_.section[0];
    const auto channels = static_cast<size_t>(format_.channels());
    for (size_t i = 0; i < weights_.queries; ++i) {
      for (size_t g = 0; g < groups_; ++g) {
        const float total = _mm512_reduce_add_ps(_mm512_load_ps(totals_ + (i * groups_ + g) * 16));
        const size_t first = g * static_cast<size_t>(format_.group_size);
        const size_t last = std::min(channels, first + static_cast<size_t>(format_.group_size));
        for (size_t c = first; c < last; ++c) {
          const float offset = section.zero_stored ? 1 : section.offset_of(static_cast<int>(c));
          out_[i * channels + c] += sums_[i * layout_.places + c] + total * offset;
        }
      }
    }
  }

  const SlotRun& run_;
  const PackedFormat& format_;
  Layout layout_;
  const SlotWeights& weights_;
  bool per_token_;
  size_t groups_;  // 1 unless per token
  bool by_rows_;
  float* out_;           // (queries, channels)
  float* scales_;        // (places,)
  float* zeros_;         // (places,)
  float* sums_;          // (queries, places)
  float* totals_;        // (queries, groups, 16)
  uint8_t* tile_;        // (places / 16, kValueRows / 4, 16, 4)
  uint8_t* codes_;       // (kValueRows, places + 64)
  float* tile_weights_;  // (queries, kValueRows)
  int32_t* bytes_;       // (groups, kMostQueries, kValueRows / 4, 4)
  float* inverse_;       // (groups, kMostQueries)
  float* token_scales_;  // (groups, kValueRows)
  float* token_zeros_;
};

}  // namespace

bool available() noexcept {
  static const bool kAll =
      __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512vnni") &&
      __builtin_cpu_supports("gfni") && __builtin_cpu_supports("bmi2");
  return kAll;
}

bool scores(const PackedFormat& format) noexcept {
  if (layout_of(format).places > kMostPlaces) return false;
  return format.axis != ScaleAxis::kToken || format.group_size % 4 == 0 ||
         format.group_size >= format.channels();
}

bool adds(const PackedFormat& format) noexcept {
  return format.axis != ScaleAxis::kToken || format.group_size % 16 == 0 ||
         format.group_size >= format.channels();
}

size_t scratch_bytes(const PackedFormat& format, size_t queries) noexcept {
  const Layout layout = layout_of(format);
  const size_t groups = format.axis == ScaleAxis::kToken ? static_cast<size_t>(format.groups()) : 1;
  const size_t places = layout.places;
  return places * (8 * sizeof(float) + 4 * kValueRows) + 64 * kValueRows +
         queries * (2 * places + kByteStride + 64 + kValueRows + 17 * groups) * sizeof(float) +
         groups * (2 + kMostQueries + 1) * kValueRows * sizeof(float) + size_t{40} * 64;
}

void score_blocks(const SlotRun& run, const float* q, size_t queries, float scale,
                  std::byte* scratch, float* scores, size_t stride) noexcept {
  KeyScorer(run, q, queries, scale, scratch).run(scores, stride);
}

void add_blocks(const SlotRun& run, SlotWalk walk, const SlotWeights& weights, std::byte* scratch,
                float* out) noexcept {
  ValueAdder(run, weights, scratch, out).run(walk);
}

}  // namespace kvlm::cpu::vnni
HWY_POP_ATTRIBUTES

#else

namespace kvlm::cpu::vnni {

bool available() noexcept { return false; }
bool scores(const PackedFormat&) noexcept { return false; }
bool adds(const PackedFormat&) noexcept { return false; }
size_t scratch_bytes(const PackedFormat&, size_t) noexcept { return 0; }
void score_blocks(const SlotRun&, const float*, size_t, float, std::byte*, float*,
                  size_t) noexcept {}
void add_blocks(const SlotRun&, SlotWalk, const SlotWeights&, std::byte*, float*) noexcept {}

}  // namespace kvlm::cpu::vnni

#endif
