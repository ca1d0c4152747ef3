#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/attend_packed.h"
#include "kernels/cpu/vnni/layout.h"
#include "kernels/cpu/vnni/target.h"

KVLM_BEFORE_VNNI()
namespace kvlm::cpu::vnni {

/// Queries multiplied by the scales of keys. A key is slope * s * code + z per channel, so q . key
/// = (q * slope * s) . code + q . z. The first factor is split into bytes and multiplied with
/// codes; the second term is one number per block. Scales per token cannot be folded: then the
/// bytes are of the queries alone, and z is applied per row.
class FoldedQuery {
 public:
  ///   q       (queries, channels)
  ///   memory  must outlive this
  FoldedQuery(const PackedFormat& format, const PaddedFormat& padded, const float* q,
              size_t queries, float scale, BumpAllocator& memory);

  /// Folds the scales and zero points of a block, unless they are per token.
  void read(const PackedBlock& block);

  /// (queries, kByteStride): four dwords per quad: low, middle and high bytes, and one unused.
  const int32_t* bytes() const { return bytes_; }
  /// (queries,): value of one level.
  const float* step() const { return block_step_; }
  /// (queries,): q . z of the block; 0 if zero points are per token.
  const float* bias() const { return block_bias_; }
  /// Per token, (groups, queries): score of a zero point of 1 in the group.
  const float* offsets() const { return offsets_; }

 private:
  void set_query(const float* q, float scale);
  void set_offsets();
  void keep_for_block();
  void read_channels(const PackedBlock& block);
  void derive_zeros(const PaddedSection& section);
  void read_padded(const PaddedSection& section, const std::byte* from, float* to);
  void fold();
  template <size_t kQueries>
  void fold(size_t first);

  const PackedFormat& format_;
  const PaddedFormat& padded_;
  size_t queries_;
  size_t groups_;        // of scales per token; else 0
  float* scales_;        // (width,)
  float* zeros_;         // (width,)
  float* by_channel_;    // (width,): factors before they are padded
  uint16_t* padded_of_;  // (channels,)
  float* query_;         // (queries, width): scale * q
  float* folded_;        // (kMostQueries, width)
  int32_t* bytes_;
  float* bias_;  // (queries,), of the last fold()
  float* step_;  // (queries,)
  float* block_bias_;
  float* block_step_;
  float* offsets_;
};

}  // namespace kvlm::cpu::vnni
KVLM_AFTER_VNNI()
