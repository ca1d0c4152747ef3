#include <hwy/base.h>

#include "kernels/cpu/vnni/attend.h"

#if HWY_ARCH_X86_64

#include <algorithm>
#include <array>
#include <cstring>

#include "kernels/cpu/vnni/codes-inl.h"
#include "kernels/cpu/vnni/key_tile-inl.h"
#include "kernels/cpu/vnni/layout.h"
#include "kernels/cpu/vnni/query.h"
#include "kernels/cpu/vnni/rows-inl.h"

// Scores of packed keys, a tile of 32 live rows at a time: fold the block's scales into the query,
// transpose the tile, multiply it with the query. Meanwhile the rows of the next tile are
// prefetched.

KVLM_BEFORE_VNNI()
namespace kvlm::cpu::vnni {

namespace {

/// Scores of one segment of packed keys.
class KeyScorer {
 public:
  KeyScorer(const SlotSegment& segment, const float* q, size_t queries, float scale,
            std::byte* scratch)
      : segment_(segment),
        format_(*segment.format),
        padded_(pad(format_)),
        queries_(queries),
        groups_(format_.axis == ScaleAxis::kToken ? static_cast<size_t>(format_.groups()) : 0),
        memory_(scratch),
        query_(format_, padded_, q, queries, scale, memory_),
        columns_(memory_.take<uint32_t>(padded_.width / 4 * kKeyRows)),
        codes_(memory_.take<uint8_t>((padded_.width + kRowSlack) * kKeyRows)),
        sums_(memory_.take<float>(queries * kKeyRows)),
        token_scales_(memory_.take<float>(groups_ * kKeyRows)),
        token_zeros_(memory_.take<float>(groups_ * kKeyRows)) {}

  void run(float* scores, size_t stride) {
    LiveRowReader reader(segment_);
    // Two tiles, so that the rows of the next can be prefetched.
    std::array<LiveRows<kKeyRows>, 2> tiles;
    const PackedBlock* folded = nullptr;
    const TokenMeta token_meta(format_);
    reader.read(tiles[0]);
    for (size_t current = 0; tiles[current].count > 0; current ^= 1) {
      const LiveRows<kKeyRows>& rows = tiles[current];
      LiveRows<kKeyRows>& next = tiles[current ^ 1];
      reader.read(next);
      if (groups_ > 0) {
        for (size_t i = 0; 16 * i < rows.count; ++i) {
          token_meta.read(rows, rows.scales, next, next.scales, i, token_scales_, kKeyRows);
          token_meta.read(rows, rows.zeros, next, next.zeros, i, token_zeros_, kKeyRows);
        }
      } else if (rows.block != folded) {
        folded = rows.block;
        if (next.count > 0 && next.block != folded) prefetch_meta(*next.block);
        query_.read(*folded);
      }
      score(rows, next.count > 0 ? next : rows, scores, stride);
      scores += rows.count;
    }
  }

 private:
  HWY_INLINE void prefetch_meta(const PackedBlock& block) const {
    prefetch_lines(block.scales, format_.scales(1) * dtype_bytes(format_.meta));
    if (block.zeros != nullptr) {
      prefetch_lines(block.zeros, format_.zeros(1) * dtype_bytes(format_.meta));
    }
  }

  void score(const LiveRows<kKeyRows>& rows, const LiveRows<kKeyRows>& next, float* scores,
             size_t stride) {
    for (size_t i = 0; i < queries_; ++i) {
      const __m512 bias = _mm512_set1_ps(query_.bias()[i]);
      _mm512_store_ps(sums_ + i * kKeyRows, bias);
      _mm512_store_ps(sums_ + i * kKeyRows + 16, bias);
    }
    for (size_t p = 0; p < padded_.sections; ++p) score_section(padded_.section[p], rows, next);
    for (size_t i = 0; i < queries_; ++i) {
      const float* from = sums_ + i * kKeyRows;
      float* to = scores + i * stride;
      // With the usual count, a constant, the compiler makes two moves.
      if (rows.count == kKeyRows) {
        std::memcpy(to, from, kKeyRows * sizeof(float));
      } else {
        std::memcpy(to, from, rows.count * sizeof(float));
      }
    }
  }

  void score_section(const PaddedSection& section, const LiveRows<kKeyRows>& rows,
                     const LiveRows<kKeyRows>& next) {
    const uint8_t* ahead;
    if (section.unpack) {
      ahead = rows.codes[0];
      load_unpacked(section, rows, next);
    } else {
      // Prefetches exactly if rows are dense, else approximately.
      ahead = next.codes[0] + section.row_offset * kKeyRows;
      load_columns<false>(rows.codes.data(), section.row_offset, section.stored->row_bytes(),
                          columns_);
    }
    if (section.codes_per_byte == 5) split_trits(section.columns, columns_);
    for (size_t i = 0; i < queries_; i += kMostQueries) {
      multiply(section, i, i == 0 ? ahead : rows.codes[0]);
    }
  }

  /// Columns of codes that are unpacked to bytes first.
  void load_unpacked(const PaddedSection& section, const LiveRows<kKeyRows>& rows,
                     const LiveRows<kKeyRows>& next) {
    std::array<const uint8_t*, kKeyRows> unpacked;
    const size_t row_bytes = section.width + kRowSlack;
    for (size_t r = 0; r < kKeyRows; ++r) {
      unpacked[r] = codes_ + std::min(r, rows.count - 1) * row_bytes;
      prefetch(next.codes[r] + section.row_offset);
    }
    unpack_codes(rows.codes.data(), rows.count, section.row_offset, *section.stored, codes_,
                 row_bytes);
    load_columns<true>(unpacked.data(), 0, 4 * section.columns, columns_);
  }

  /// Products of the columns with up to kMostQueries queries from `first` on.
  HWY_INLINE void multiply(const PaddedSection& section, size_t first, const uint8_t* ahead) {
    const size_t queries = std::min(kMostQueries, queries_ - first);
    const int32_t* bytes = query_.bytes() + first * kByteStride;
    DotTask task;
    task.columns = columns_;
    task.count = section.columns;
    task.bytes = bytes + section.first;
    task.sums = sums_ + first * kKeyRows;
    task.ahead = ahead;
    task.step = query_.step() + first;
    if (groups_ == 0) return dot_any<false>(task, queries, section.codes_per_byte);
    const size_t group =
        static_cast<size_t>(format_.group_size) / (4 * section.codes_per_byte);  // columns
    for (size_t g = 0; g < groups_; ++g) {
      task.columns = columns_ + g * group * kKeyRows;
      task.bytes = bytes + g * group * section.codes_per_byte * 4;
      task.count = groups_ == 1 ? section.columns : std::min(group, section.columns - g * group);
      task.ahead = ahead + g * group * 4 * kKeyRows;
      task.scales = token_scales_ + g * kKeyRows;
      task.zeros = token_zeros_ + g * kKeyRows;
      task.offsets = query_.offsets() + g * queries_ + first;
      dot_any<true>(task, queries, section.codes_per_byte);
    }
  }

  const SlotSegment& segment_;
  const PackedFormat& format_;
  PaddedFormat padded_;
  size_t queries_;
  size_t groups_;  // of scales per token; else 0
  BumpAllocator memory_;
  FoldedQuery query_;
  uint32_t* columns_;    // (width / 4, kKeyRows)
  uint8_t* codes_;       // (kKeyRows, width + kRowSlack)
  float* sums_;          // (queries, kKeyRows)
  float* token_scales_;  // (groups, kKeyRows)
  float* token_zeros_;
};

}  // namespace

void score_blocks(const SlotSegment& segment, const float* q, size_t queries, float scale,
                  std::byte* scratch, float* scores, size_t stride) noexcept {
  KeyScorer(segment, q, queries, scale, scratch).run(scores, stride);
}

}  // namespace kvlm::cpu::vnni
KVLM_AFTER_VNNI()

#endif
