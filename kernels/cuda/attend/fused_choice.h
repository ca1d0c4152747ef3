#pragma once

#include <array>
#include <cstdint>

#include "kernels/attend_packed.h"

// Which one-pass kernel (fused_table.h) processes a KV head, and the query bases of its keys.
namespace kvlm::cuda::packed {

/// Number of listed pairs of codecs.
int fused_pairs();
constexpr int kMostFusedSegments = 14;  // of a KV head, keys and values
constexpr int kMostSideSegments = 8;
struct FusedHead {
  int pair = 0;  // kernel: 1..fused_pairs(), or one of image_choice.h; 0: none
  std::array<int8_t, kMostFusedSegments> source{};  // DeviceSegment::source, by segment of keys
  int sources = 0;
};
/// Chooses among kernels whose blocks take up to `most_shared` bytes of shared memory.
///   loses_rows  packed tokens are evicted in place: some slots are empty
FusedHead fused_head(const PackedHead& head, int head_dim, int most_shared,
                     bool loses_rows = false);
/// Sets the query bases of the keys in `made`. False if there are too many.
bool find_sources(std::span<const SlotSegment> keys, FusedHead& made);
/// Most shared memory of a block, on the GPU that is current at the first call.
int most_shared_bytes();

}  // namespace kvlm::cuda::packed
