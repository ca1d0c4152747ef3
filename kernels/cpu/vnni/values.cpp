#include <hwy/base.h>

#include "kernels/cpu/vnni/attend.h"

#if HWY_ARCH_X86_64

#include <algorithm>
#include <array>

#include "kernels/cpu/vnni/layout.h"
#include "kernels/cpu/vnni/rows-inl.h"
#include "kernels/cpu/vnni/value_products-inl.h"
#include "kernels/cpu/vnni/value_tile.h"
#include "kernels/cpu/vnni/weights.h"

// Weighted sums of packed values, a tile of 64 live rows at a time. If rows of a block share
// scales, weights are multiplied with codes alone and the sums are scaled once per block. Scales
// per token are multiplied into the weights, and sums run over the whole segment.

KVLM_BEFORE_VNNI()
namespace kvlm::cpu::vnni {

namespace {

/// Adds one segment of packed values to the output.
class ValueAdder {
 public:
  ValueAdder(const SlotSegment& segment, const SlotWeights& weights, std::byte* scratch, float* out)
      : segment_(segment),
        format_(*segment.format),
        padded_(pad(format_)),
        queries_(weights.queries),
        per_token_(format_.axis == ScaleAxis::kToken),
        groups_(per_token_ ? static_cast<size_t>(format_.groups()) : 1),
        by_rows_(rows_suffice()),
        out_(out),
        memory_(scratch),
        scales_(memory_.take<float>(padded_.width)),
        zeros_(memory_.take<float>(padded_.width)),
        sums_(memory_.take<float>(queries_ * padded_.width)),
        tile_(memory_.take<uint8_t>(padded_.width / 16 * kTileStride)),
        codes_(memory_.take<uint8_t>((padded_.width + kRowSlack) * kValueRows)),
        weights_(format_, weights, memory_),
        token_scales_(memory_.take<float>(groups_ * kValueRows)),
        token_zeros_(memory_.take<float>(groups_ * kValueRows)) {
    clear_sums();
  }

  void run(SlotWalk walk) {
    LiveRowReader reader(segment_);
    // Two tiles, so that the rows of the next can be prefetched.
    std::array<LiveRows<kValueRows>, 2> tiles;
    const TokenMeta token_meta(format_);
    const PackedBlock* summed = nullptr;
    reader.read(tiles[0]);
    for (size_t current = 0; tiles[current].count > 0; current ^= 1) {
      const LiveRows<kValueRows>& rows = tiles[current];
      LiveRows<kValueRows>& next = tiles[current ^ 1];
      reader.read(next);
      if (!per_token_ && summed != nullptr && rows.block != summed) {
        add_block(*summed);
        clear_sums();
        weights_.clear();
      }
      summed = rows.block;
      weights_.gather(walk, rows.count);
      if (per_token_) read_token_meta(token_meta, rows, next);
      add_tile(rows, next.count > 0 ? next : rows);
    }
    if (per_token_) {
      add_tokens();
    } else if (summed != nullptr) {
      add_block(*summed);
    }
  }

 private:
  void clear_sums() { std::fill(sums_, sums_ + queries_ * padded_.width, 0.0f); }

  void read_token_meta(const TokenMeta& meta, const LiveRows<kValueRows>& rows,
                       const LiveRows<kValueRows>& next) {
    for (size_t i = 0; 16 * i < rows.count; ++i) {
      meta.read(rows, rows.scales, next, next.scales, i, token_scales_, kValueRows);
      meta.read(rows, rows.zeros, next, next.zeros, i, token_zeros_, kValueRows);
    }
    const float slope = format_.section[0].slope;
    if (slope == 1) return;
    for (size_t i = 0; i < groups_ * kValueRows; ++i) token_scales_[i] *= slope;
  }

  void add_tile(const LiveRows<kValueRows>& rows, const LiveRows<kValueRows>& next) {
    if (!by_rows_) load_tile(rows, next);
    const size_t quads = (rows.count + 3) / 4;
    for (size_t i = 0; i < queries_; i += kMostQueries) {
      weights_.split(i, token_scales_, token_zeros_);
      by_rows_ ? multiply_rows(rows, next, quads) : multiply_tile(i, quads);
    }
  }

  void load_tile(const LiveRows<kValueRows>& rows, const LiveRows<kValueRows>& next) {
    for (size_t p = 0; p < padded_.sections; ++p) {
      const PaddedSection& section = padded_.section[p];
      load_value_tile(section, rows.codes.data(), rows.count, next.codes.data(), codes_,
                      tile_ + section.first / 16 * kTileStride);
    }
  }

  /// The group of vector v of channels.
  size_t group_of(size_t v) const {
    return groups_ == 1 ? 0
                        : std::min(16 * v / static_cast<size_t>(format_.group_size), groups_ - 1);
  }

  void multiply_tile(size_t first, size_t quads) {
    const size_t queries = std::min(kMostQueries, queries_ - first);
    const size_t vectors = padded_.width / 16;
    for (size_t v = 0; v < vectors; v += 2) {
      const size_t g = group_of(v);
      const uint8_t* tile = tile_ + v * kTileStride;
      float* sums = sums_ + first * padded_.width + 16 * v;
      if (group_of(v + 1) == g) {  // a width is in pairs of vectors
        vnni::multiply_tile<2>(queries, tile, quads, weights_.bytes(g), weights_.step(g), sums,
                               padded_.width);
        continue;
      }
      for (size_t i = 0; i < 2; ++i) {
        const size_t at = group_of(v + i);
        vnni::multiply_tile<1>(queries, tile + i * kTileStride, quads, weights_.bytes(at),
                               weights_.step(at), sums + 16 * i, padded_.width);
      }
    }
  }

  /// Whether values need no tile: one query, whole vectors, and codes that are only shifted.
  bool rows_suffice() const {
    if (queries_ != 1 || padded_.sections != 1) return false;
    const PackedSection& stored = format_.section[0];
    const int bits = with_code(
        stored.code, [](auto code) { return codecs::Codebook<decltype(code)> ? 0 : code.kBits; });
    const size_t vectors = (static_cast<size_t>(stored.channels) + 15) / 16;
    return vectors % kRowVectors == 0 && (bits == 8 || (bits >= 1 && bits <= 4)) &&
           (!per_token_ || groups_ == 1 || format_.group_size % 32 == 0);
  }

  void multiply_rows(const LiveRows<kValueRows>& rows, const LiveRows<kValueRows>& next,
                     size_t quads) {
    const PackedSection& stored = format_.section[0];
    const auto bits = static_cast<size_t>(code_bits(stored.code));
    const size_t vectors = (static_cast<size_t>(stored.channels) + 15) / 16;
    RowsTask task;
    task.rows = rows.codes.data();
    task.quads = quads;
    for (size_t v = 0; v < vectors; v += kRowVectors) {
      const bool odd = v / kRowVectors % 2 != 0;
      task.ahead = next.codes[0] + v / kRowVectors * quads * 32 * bits;
      // 16 bytes hold 8 vectors of bits.
      task.offset = 2 * bits * (bits == 1 ? v / 8 * 8 : v);
      task.bytes = stored.row_bytes() - task.offset;
      for (size_t i = 0; i < 2; ++i) {
        const size_t g = group_of(v + 2 * i);
        task.weights[i] = weights_.bytes(g);
        task.step[i] = *weights_.step(g);
      }
      task.sums = sums_ + 16 * v;
      vnni::multiply_rows(task, bits, odd);
    }
  }

  /// Scales the sums of a block and adds them to the output.
  HWY_NOINLINE void add_block(const PackedBlock& block) {
    const std::byte* zeros = block.zeros;
    for (size_t p = 0; p < padded_.sections; ++p) {
      const PaddedSection& section = padded_.section[p];
      read_factors(section, block.scales, zeros);
      if (section.stored->zero_stored) {
        zeros += static_cast<size_t>(section.stored->channels) * dtype_bytes(format_.meta);
      }
      for (size_t i = 0; i < queries_; ++i) add_section(section, i);
    }
  }

  /// Reads scales and zero points of a section; `zeros`: the section's first if stored.
  HWY_INLINE void read_factors(const PaddedSection& section, const std::byte* scales,
                               const std::byte* zeros) {
    const PackedSection& stored = *section.stored;
    const auto count = static_cast<size_t>(stored.channels);
    if (format_.axis == ScaleAxis::kHead) {
      std::fill(scales_, scales_ + count, stored_number(scales, format_.meta));
      if (stored.zero_stored) {
        std::fill(zeros_, zeros_ + count, stored_number(zeros, format_.meta));
      }
    } else {
      widen(scales + section.first_channel * dtype_bytes(format_.meta), format_.meta, count,
            scales_);
      if (stored.zero_stored) widen(zeros, format_.meta, count, zeros_);
    }
    if (stored.zero_stored) return;
    for (size_t c = 0; c < count; ++c) {
      zeros_[c] = scales_[c] * stored.offset_of(static_cast<int>(c));
    }
  }

  HWY_INLINE void add_section(const PaddedSection& section, size_t query) {
    const auto count = static_cast<size_t>(section.stored->channels);
    const float* sums = sums_ + query * padded_.width + section.first;
    float* out = out_ + query * static_cast<size_t>(format_.channels()) + section.first_channel;
    const __m512 slope = _mm512_set1_ps(section.stored->slope);
    const __m512 total =
        _mm512_set1_ps(_mm512_reduce_add_ps(_mm512_load_ps(weights_.total(query, 0))));
    for (size_t c = 0; c < count; c += 16) {
      const __mmask16 mask = first_lanes(count - c);
      __m512 x = _mm512_maskz_loadu_ps(mask, out + c);
      x = _mm512_fmadd_ps(total, _mm512_maskz_load_ps(mask, zeros_ + c), x);
      const __m512 scaled = _mm512_mul_ps(slope, _mm512_maskz_load_ps(mask, scales_ + c));
      x = _mm512_fmadd_ps(_mm512_load_ps(sums + c), scaled, x);
      _mm512_mask_storeu_ps(out + c, mask, x);
    }
  }

  /// Per token: adds the sums of the whole segment to the output.
  void add_tokens() {
    const PackedSection& stored = format_.section[0];
    const auto channels = static_cast<size_t>(format_.channels());
    for (size_t i = 0; i < queries_; ++i) {
      for (size_t g = 0; g < groups_; ++g) {
        const float total = _mm512_reduce_add_ps(_mm512_load_ps(weights_.total(i, g)));
        const size_t first = g * static_cast<size_t>(format_.group_size);
        const size_t last = std::min(channels, first + static_cast<size_t>(format_.group_size));
        for (size_t c = first; c < last; ++c) {
          const float offset = stored.zero_stored ? 1 : stored.offset_of(static_cast<int>(c));
          out_[i * channels + c] += sums_[i * padded_.width + c] + total * offset;
        }
      }
    }
  }

  const SlotSegment& segment_;
  const PackedFormat& format_;
  PaddedFormat padded_;
  size_t queries_;
  bool per_token_;
  size_t groups_;  // 1 unless per token
  bool by_rows_;
  float* out_;  // (queries, channels)
  BumpAllocator memory_;
  float* scales_;   // (width,)
  float* zeros_;    // (width,)
  float* sums_;     // (queries, width)
  uint8_t* tile_;   // (width / 16, kValueRows / 4, 16, 4)
  uint8_t* codes_;  // (kValueRows, width + kRowSlack)
  SplitWeights weights_;
  float* token_scales_;  // (groups, kValueRows)
  float* token_zeros_;
};

}  // namespace

void add_blocks(const SlotSegment& segment, SlotWalk walk, const SlotWeights& weights,
                std::byte* scratch, float* out) noexcept {
  ValueAdder(segment, weights, scratch, out).run(walk);
}

}  // namespace kvlm::cpu::vnni
KVLM_AFTER_VNNI()

#endif
