#include <hwy/base.h>

#if HWY_ARCH_X86_64

#include <algorithm>

#include "kernels/cpu/vnni/bytes-inl.h"
#include "kernels/cpu/vnni/query.h"
#include "kernels/cpu/vnni/rows-inl.h"

// Multiplies queries by a block's scales over all padded channels and finds the largest magnitude,
// then rounds to levels of it and splits into bytes, in the order in which the codes of a dword are
// extracted.

KVLM_BEFORE_VNNI()
namespace kvlm::cpu::vnni {

namespace {

/// Four dwords of bytes per four channels that are multiplied together, from padded channels.
template <size_t kPerByte>
void split_query(const float* numbers, size_t count, float factor, int32_t* out) {
  static constexpr std::array<Bytes64, 2> kIndex = quad_bytes<kPerByte>();
  const __m512i index = load(kIndex[0].data());
  const __m512i other = load(kIndex[1].data());
  const __m512 factors = _mm512_set1_ps(factor);
  for (size_t i = 0; i < count; i += 32, out += 32) {
    const __m512i a = to_bytes(_mm512_load_ps(numbers + i), factors);
    const __m512i b = to_bytes(_mm512_load_ps(numbers + i + 16), factors);
    if constexpr (kPerByte == 8) {
      _mm512_store_si512(out, _mm512_permutex2var_epi8(a, index, b));
      _mm512_store_si512(out + 16, _mm512_permutex2var_epi8(a, other, b));
    } else {
      _mm512_store_si512(out, _mm512_permutexvar_epi8(index, a));
      _mm512_store_si512(out + 16, _mm512_permutexvar_epi8(index, b));
    }
  }
}

void split_query(const PaddedSection& section, const float* numbers, float factor, int32_t* out) {
  numbers += section.first;
  out += section.first;
  switch (section.codes_per_byte) {
    case 2:
      return split_query<2>(numbers, section.width, factor, out);
    case 4:
      return split_query<4>(numbers, section.width, factor, out);
    case 8:
      return split_query<8>(numbers, section.width, factor, out);
    default:
      return split_query<1>(numbers, section.width, factor, out);
  }
}

}  // namespace

FoldedQuery::FoldedQuery(const PackedFormat& format, const PaddedFormat& padded, const float* q,
                         size_t queries, float scale, BumpAllocator& memory)
    : format_(format),
      padded_(padded),
      queries_(queries),
      groups_(format.axis == ScaleAxis::kToken ? static_cast<size_t>(format.groups()) : 0),
      scales_(memory.take<float>(padded.width)),
      zeros_(memory.take<float>(padded.width)),
      by_channel_(memory.take<float>(padded.width)),
      padded_of_(memory.take<uint16_t>(static_cast<size_t>(format.channels()))),
      query_(memory.take<float>(queries * padded.width)),
      folded_(memory.take<float>(kMostQueries * padded.width)),
      bytes_(memory.take<int32_t>(queries * kByteStride)),
      bias_(memory.take<float>(queries + kMostQueries)),  // four are written at a time
      step_(memory.take<float>(queries + kMostQueries)),
      block_bias_(memory.take<float>(queries)),
      block_step_(memory.take<float>(queries)),
      offsets_(memory.take<float>(groups_ * queries)) {
  set_query(q, scale);
  if (format_.axis == ScaleAxis::kChannel) return;
  fold();
  if (format_.axis != ScaleAxis::kToken) return;
  set_offsets();
  keep_for_block();
}

void FoldedQuery::set_query(const float* q, float scale) {
  const size_t width = padded_.width;
  std::fill(query_, query_ + queries_ * width, 0.0f);
  std::fill(scales_, scales_ + width, 0.0f);
  std::fill(zeros_, zeros_ + width, 0.0f);
  const auto channels = static_cast<size_t>(format_.channels());
  for (size_t p = 0; p < padded_.sections; ++p) {
    const PaddedSection& section = padded_.section[p];
    const PackedSection& stored = *section.stored;
    for (size_t c = 0; c < static_cast<size_t>(stored.channels); ++c) {
      const size_t at = padded_channel(section, c);
      padded_of_[section.first_channel + c] = static_cast<uint16_t>(at);
      for (size_t i = 0; i < queries_; ++i) {
        query_[i * width + at] = q[i * channels + section.first_channel + c] * scale;
      }
      // kHead and kToken use these as they are.
      scales_[at] = stored.slope;
      zeros_[at] = stored.zero_stored ? 1.0f : stored.offset_of(static_cast<int>(c));
    }
  }
}

void FoldedQuery::set_offsets() {
  const auto channels = static_cast<size_t>(format_.channels());
  for (size_t i = 0; i < queries_; ++i) {
    bias_[i] = 0;
    for (size_t g = 0; g < groups_; ++g) offsets_[g * queries_ + i] = 0;
    for (size_t c = 0; c < channels; ++c) {
      const size_t at = padded_of_[c];
      offsets_[c / static_cast<size_t>(format_.group_size) * queries_ + i] +=
          query_[i * padded_.width + at] * zeros_[at];
    }
  }
}

void FoldedQuery::keep_for_block() {
  std::copy(step_, step_ + queries_, block_step_);
  std::copy(bias_, bias_ + queries_, block_bias_);
}

void FoldedQuery::read(const PackedBlock& block) {
  if (format_.axis == ScaleAxis::kToken) return;
  if (format_.axis == ScaleAxis::kChannel) return read_channels(block);
  const float s = stored_number(block.scales, format_.meta);
  const float z = format_.section[0].zero_stored ? stored_number(block.zeros, format_.meta) : s;
  for (size_t i = 0; i < queries_; ++i) {
    block_step_[i] = step_[i] * s;
    block_bias_[i] = bias_[i] * z;
  }
}

void FoldedQuery::read_channels(const PackedBlock& block) {
  const size_t meta_bytes = dtype_bytes(format_.meta);
  const std::byte* zeros = block.zeros;
  for (size_t p = 0; p < padded_.sections; ++p) {
    const PaddedSection& section = padded_.section[p];
    read_padded(section, block.scales + section.first_channel * meta_bytes, scales_);
    if (section.stored->zero_stored) {
      read_padded(section, zeros, zeros_);
      zeros += static_cast<size_t>(section.stored->channels) * meta_bytes;
    } else {
      derive_zeros(section);
    }
    const float slope = section.stored->slope;
    if (slope != 1) {
      for (size_t c = 0; c < section.width; ++c) scales_[section.first + c] *= slope;
    }
  }
  fold();
  keep_for_block();
}

/// Reads one stored number per channel of the section to its padded channel.
void FoldedQuery::read_padded(const PaddedSection& section, const std::byte* from, float* to) {
  const auto channels = static_cast<size_t>(section.stored->channels);
  if (section.codes_per_byte != 5) {
    widen(from, format_.meta, channels, to + section.first);
    return;
  }
  const uint16_t* padded_of = padded_of_ + section.first_channel;
  widen(from, format_.meta, channels, by_channel_);
  for (size_t c = 0; c < channels; ++c) to[padded_of[c]] = by_channel_[c];
}

/// Zero points that are a multiple of the scale.
void FoldedQuery::derive_zeros(const PaddedSection& section) {
  const PackedSection& stored = *section.stored;
  if (stored.split >= stored.channels) {
    for (size_t c = 0; c < section.width; ++c) {
      zeros_[section.first + c] = scales_[section.first + c] * stored.offset;
    }
    return;
  }
  for (size_t c = 0; c < static_cast<size_t>(stored.channels); ++c) {
    const size_t at = padded_of_[section.first_channel + c];
    zeros_[at] = scales_[at] * stored.offset_of(static_cast<int>(c));
  }
}

/// bytes = query * scales in levels of step; bias = query . zeros.
void FoldedQuery::fold() {
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
HWY_NOINLINE void FoldedQuery::fold(size_t first) {
  const size_t width = padded_.width;
  const float* query = query_ + first * width;
  __m512 most[4];
  __m512 bias[4];
  repeat<4>([&](auto q)
                __attribute__((always_inline)) { most[q] = bias[q] = _mm512_setzero_ps(); });
  for (size_t c = 0; c < width; c += 16) {
    const __m512 s = _mm512_load_ps(scales_ + c);
    const __m512 z = _mm512_load_ps(zeros_ + c);
    repeat<kQueries>([&](auto q) __attribute__((always_inline)) {
      const __m512 u = _mm512_load_ps(query + q * width + c);
      const __m512 product = _mm512_mul_ps(u, s);
      bias[q] = _mm512_fmadd_ps(u, z, bias[q]);
      most[q] = larger(most[q], product);
      _mm512_store_ps(folded_ + q * width + c, product);
    });
  }
  float factor[4];
  set_step_sizes(largest_lanes(most[0], most[1], most[2], most[3]), step_ + first, factor);
  _mm_storeu_ps(bias_ + first, sums_of_lanes(bias[0], bias[1], bias[2], bias[3]));
  for (size_t q = 0; q < kQueries; ++q) {
    for (size_t p = 0; p < padded_.sections; ++p) {
      split_query(padded_.section[p], folded_ + q * width, factor[q],
                  bytes_ + (first + q) * kByteStride);
    }
  }
}

}  // namespace kvlm::cpu::vnni
KVLM_AFTER_VNNI()

#endif
