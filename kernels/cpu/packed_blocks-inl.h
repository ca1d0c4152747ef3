// Reads packed blocks of K and V: codes to bytes, bytes to floats, tile by tile. This is the
// portable path; vnni/ multiplies the codes as integers. Included once per instruction set by a
// file that has set up Highway's foreach_target; everything is in kvlm::cpu::HWY_NAMESPACE.

#if defined(KVLM_KERNELS_CPU_PACKED_BLOCKS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef KVLM_KERNELS_CPU_PACKED_BLOCKS_INL_H_
#undef KVLM_KERNELS_CPU_PACKED_BLOCKS_INL_H_
#else
#define KVLM_KERNELS_CPU_PACKED_BLOCKS_INL_H_
#endif

#include <array>

#include "hwy/highway.h"
#include "kernels/cpu/attention-inl.h"
#include "kernels/cpu/packed_slots.h"

HWY_BEFORE_NAMESPACE();
namespace kvlm::cpu::HWY_NAMESPACE {

// ------------------------------------------------------------------------------------------ codes

/// For codes whose unit is a byte: the integers of every byte value, one per byte, the first
/// lowest.
template <class Code>
constexpr std::array<uint64_t, 256> kOfByte = [] {
  static_assert(Code::kUnitCodes <= 8);
  std::array<uint64_t, 256> table{};
  for (size_t value = 0; value < 256; ++value) {
    const auto byte = static_cast<uint8_t>(value);
    for (int i = 0; i < Code::kUnitCodes; ++i) {
      table[value] |= static_cast<uint64_t>(Code::at(&byte, i)) << (8 * i);
    }
  }
  return table;
}();

/// Bytes that unpack_row may write after the last code.
constexpr size_t kRowSlack = 8;

/// Widens eight codes of kBits bits to a byte each, by moving halves apart three times.
template <size_t kBits>
uint64_t spread(uint64_t codes) {
  constexpr uint64_t kFour = (uint64_t{1} << (4 * kBits)) - 1;
  constexpr uint64_t kTwo = ((uint64_t{1} << (2 * kBits)) - 1) * 0x0000'0001'0000'0001;
  constexpr uint64_t kOne = ((uint64_t{1} << kBits) - 1) * 0x0001'0001'0001'0001;
  codes = (codes & kFour) | ((codes >> (4 * kBits)) & kFour) << 32;
  codes = (codes & kTwo) | ((codes >> (2 * kBits)) & kTwo) << 16;
  return (codes & kOne) | ((codes >> kBits) & kOne) << 8;
}

template <size_t kBits>
void unpack_bits(const uint8_t* row, size_t count, uint8_t* out) {
  size_t bytes = (count * kBits + 7) / 8;
  for (; bytes > 0; out += 8) {
    uint64_t word = 0;
    if (bytes >= sizeof word) {
      std::memcpy(&word, row, sizeof word);  // a load, whatever kBits is
    } else {
      std::memcpy(&word, row, std::min(bytes, kBits));
    }
    const uint64_t codes = spread<kBits>(word);
    std::memcpy(out, &codes, sizeof codes);
    row += kBits;
    bytes -= std::min(bytes, kBits);
  }
}

/// The integers of the `count` codes of a row, one per byte.
template <class Code>
void unpack_row(const uint8_t* row, size_t count, uint8_t* out) {
  if constexpr (Code::kBits == 8) {
    std::memcpy(out, row, count);
  } else if constexpr (Code::kBits > 0 && !codecs::Codebook<Code>) {
    unpack_bits<Code::kBits>(row, count, out);
  } else if constexpr (codecs::Codebook<Code> && Code::kUnitBytes > 1) {
    unpack_bits<Code::kBits>(row, count, out);
    for (size_t i = 0; i < count; ++i) out[i] = Code::kIntegers[out[i]];
  } else if constexpr (Code::kUnitBytes == 1) {
    for (size_t i = 0; i * Code::kUnitCodes < count; ++i) {
      std::memcpy(out + i * Code::kUnitCodes, &kOfByte<Code>[row[i]], 8);
    }
  } else {
    for (size_t i = 0; i < count; ++i) {
      out[i] = static_cast<uint8_t>(Code::at(row, static_cast<int>(i)));
    }
  }
}
using UnpackRow = void (*)(const uint8_t* row, size_t count, uint8_t* out);

HWY_INLINE FloatVec load_codes(const uint8_t* codes) {
  const Floats d;
  const hn::Rebind<int32_t, Floats> d32;
  const hn::Rebind<uint8_t, Floats> d8;
  return hn::ConvertTo(d, hn::PromoteTo(d32, hn::LoadU(d8, codes)));
}

/// out[i] = codes[i].
inline void widen_codes(const uint8_t* codes, size_t count, float* out) {
  const Floats d;
  size_t i = 0;
  for (; i + kLanes <= count; i += kLanes) hn::StoreU(load_codes(codes + i), d, out + i);
  for (; i < count; ++i) out[i] = static_cast<float>(codes[i]);
}

/// out[i] = scale * codes[i] + zero.
inline void dequantize(const uint8_t* codes, size_t count, float scale, float zero, float* out) {
  const Floats d;
  const FloatVec scales = hn::Set(d, scale);
  const FloatVec zeros = hn::Set(d, zero);
  size_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    hn::StoreU(hn::MulAdd(load_codes(codes + i), scales, zeros), d, out + i);
  }
  for (; i < count; ++i) out[i] = std::fma(static_cast<float>(codes[i]), scale, zero);
}

/// `count` scales or zero points as floats; any alignment.
inline void load_meta(const std::byte* from, DType dtype, size_t count, float* out) {
  if (dtype == DType::kF32) {
    std::memcpy(out, from, count * sizeof(float));
    return;
  }
  const Floats d;
  size_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    hn::StoreU(load_wide(d, reinterpret_cast<const f16*>(from + i * sizeof(f16))), d, out + i);
  }
  for (; i < count; ++i) {
    f16 x;
    std::memcpy(&x, from + i * sizeof(f16), sizeof x);
    out[i] = to_float(x);
  }
}

// ------------------------------------------------------------------------------------- workspaces

/// Scratch of one KV head. Arrays over channels are as wide as the widest format and head_dim, with
/// kRowSlack to spare.
struct Scratch {
  Scratch(std::byte* memory, size_t width, size_t queries) {
    auto* next = reinterpret_cast<float*>(memory);
    const auto take = [&next](size_t floats) {
      float* taken = next;
      next += hwy::RoundUpTo(floats, 16);
      return taken;
    };
    tile = take(kTileRows * width);
    slopes = take(width);
    offsets = take(width);
    query = take(queries * width);
    bias = take(queries);
    sums = take(queries * width);
    total = take(queries);
    codes = reinterpret_cast<uint8_t*>(take((width + kRowSlack + 3) / 4));
  }

  static size_t bytes(size_t width, size_t queries) {
    return (kTileRows * width + 2 * width + 2 * queries * width + 2 * queries + width + kRowSlack +
            size_t{8} * 16) *
           sizeof(float);
  }

  float* tile;     // (kTileRows, channels): codes, or x if per token
  float* slopes;   // (channels,): slope * s of a block, or of a row if per token
  float* offsets;  // (channels,): z of the same
  float* query;    // (queries, channels): the folded query
  float* bias;     // (queries,)
  float* sums;     // (queries, channels): sum of weight * code of a block
  float* total;    // (queries,): sum of the weights of a block
  uint8_t* codes;  // (channels + kRowSlack,)
};

/// Reads packed blocks tile by tile: codes with the factors of the whole block (kChannel, kHead),
/// or dequantized x (kToken).
class BlockReader {
 public:
  BlockReader(const PackedFormat& format, const Scratch& scratch)
      : format_(format),
        scratch_(scratch),
        channels_(static_cast<size_t>(format.channels())),
        row_bytes_(format.row_bytes()) {
    for (size_t i = 0; i < static_cast<size_t>(format.sections); ++i) {
      unpack_row_[i] = with_code(format.section[i].code,
                                 [](auto code) -> UnpackRow { return unpack_row<decltype(code)>; });
    }
  }

  bool per_token() const { return format_.axis == ScaleAxis::kToken; }
  size_t channels() const { return channels_; }

  /// kChannel, kHead: fills slopes and offsets.
  void read_factors(const PackedBlock& block) const {
    float* s = scratch_.slopes;
    float* z = scratch_.offsets;
    if (format_.axis == ScaleAxis::kHead) {
      load_meta(block.scales, format_.meta, 1, s);
      std::fill(s + 1, s + channels_, s[0]);
    } else {
      load_meta(block.scales, format_.meta, channels_, s);
    }
    const std::byte* zeros = block.zeros;
    size_t first = 0;
    for (int i = 0; i < format_.sections; ++i) {
      const PackedSection& section = format_.section[static_cast<size_t>(i)];
      const auto count = static_cast<size_t>(section.channels);
      if (!section.zero_stored) {
        for (size_t c = 0; c < count; ++c) {
          z[first + c] = section.offset_of(static_cast<int>(c)) * s[first + c];
        }
      } else if (format_.axis == ScaleAxis::kHead) {
        load_meta(zeros, format_.meta, 1, z);
        std::fill(z + 1, z + count, z[0]);
      } else {
        load_meta(zeros, format_.meta, count, z + first);
        zeros += count * dtype_bytes(format_.meta);
      }
      for (size_t c = 0; c < count; ++c) s[first + c] *= section.slope;
      first += count;
    }
  }

  /// Writes row `row` of the block: codes, or x of kToken.
  void read_row(const PackedBlock& block, size_t row, float* out) const {
    unpack(block, row);
    if (!per_token()) return widen_codes(scratch_.codes, channels_, out);
    read_token(block, row, out);
  }

  /// Writes x of row `row`; kChannel and kHead after read_factors.
  void read_values(const PackedBlock& block, size_t row, float* out) const {
    unpack(block, row);
    if (per_token()) return read_token(block, row, out);
    const Floats d;
    size_t c = 0;
    for (; c + kLanes <= channels_; c += kLanes) {
      hn::StoreU(hn::MulAdd(load_codes(scratch_.codes + c), hn::LoadU(d, scratch_.slopes + c),
                            hn::LoadU(d, scratch_.offsets + c)),
                 d, out + c);
    }
    for (; c < channels_; ++c) {
      out[c] =
          std::fma(static_cast<float>(scratch_.codes[c]), scratch_.slopes[c], scratch_.offsets[c]);
    }
  }

 private:
  void unpack(const PackedBlock& block, size_t row) const {
    const auto* codes = reinterpret_cast<const uint8_t*>(block.codes) + row * row_bytes_;
    uint8_t* out = scratch_.codes;
    for (size_t i = 0; i < static_cast<size_t>(format_.sections); ++i) {
      const PackedSection& section = format_.section[i];
      unpack_row_[i](codes, static_cast<size_t>(section.channels), out);
      codes += section.row_bytes();
      out += section.channels;
    }
  }

  void read_token(const PackedBlock& block, size_t row, float* out) const {
    const auto groups = static_cast<size_t>(format_.groups());
    const auto size = static_cast<size_t>(format_.group_size);
    const size_t at = row * groups * dtype_bytes(format_.meta);
    const PackedSection& section = format_.section[0];
    load_meta(block.scales + at, format_.meta, groups, scratch_.slopes);
    if (section.zero_stored) {
      load_meta(block.zeros + at, format_.meta, groups, scratch_.offsets);
    }
    for (size_t g = 0; g < groups; ++g) {
      const size_t first = g * size;
      const size_t count = std::min(size, channels_ - first);
      const float s = scratch_.slopes[g];
      if (section.zero_stored) {
        dequantize(scratch_.codes + first, count, section.slope * s, scratch_.offsets[g],
                   out + first);
        continue;
      }
      // A group may contain the section's split.
      const size_t split = std::min(static_cast<size_t>(std::max(section.split, 0)), channels_);
      const size_t before = split <= first ? 0 : std::min(count, split - first);
      dequantize(scratch_.codes + first, before, section.slope * s, section.offset * s,
                 out + first);
      dequantize(scratch_.codes + first + before, count - before, section.slope * s,
                 section.offset_after * s, out + first + before);
    }
  }

  const PackedFormat& format_;
  const Scratch& scratch_;
  size_t channels_;
  size_t row_bytes_;
  std::array<UnpackRow, 2> unpack_row_{};  // of a section
};

}  // namespace kvlm::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
