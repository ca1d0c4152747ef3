#pragma once

#include <array>
#include <cstdint>

#include "kernels/cuda/attend/attend_args.cuh"
#include "kernels/cuda/attend/fused_attention.h"
#include "kernels/cuda/attend/row_splits.cuh"

// Decode attention of one layer over packed and unpacked tokens. Grids are upper bounds that the
// host knows, so that steps can be recorded; a block without work ends.
namespace kvlm::cuda::packed {

/// The kernels that the KV heads of a layer need, and the largest sizes among them.
struct HeadKernels {
  uint32_t fused = 0;             ///< one-pass and image kernels, as bits (DeviceHead::fused)
  std::array<int, 32> sources{};  ///< FusedArgs::sources of each
  bool lose_rows = false;         ///< FusedArgs::lose_rows
  int image_slots = 0;            ///< most packed tokens of a KV head for image_block.cu
  bool image_rows = false;        ///< some KV heads have an image and unpacked tokens alone
  uint32_t keys = 0;              ///< kernels of the first of two passes, as bits
  uint32_t values = 0;            ///< and of the second
  int pass_sources = 0;           ///< PassArgs::sources
  int passes = 0;                 ///< largest DeviceHead::passes

  bool operator==(const HeadKernels&) const = default;
};

/// Upper bounds for the launches of a layer.
struct LayerLaunch {
  HeadKernels kinds;
  unsigned heads = 0;
  RowSplitLaunch rows{};      ///< unpacked tokens for row_splits.cu; `count` 0: none
  DType dtype = DType::kF16;  ///< of unpacked tokens
  bool rows_alone = false;    ///< only row_splits.cu attends; the merge follows
  int most_slots = 0;         ///< of a KV head
  int channels = 0;           ///< of a packed token
};

/// Launches attention up to the softmax states of the splits, and returns where these are. If
/// needs_join(), the caller merges them with join_fused() or join_and_weigh_rows().
FusedArgs attend_splits(const LayerLaunch& layer, const AttendArgs& args, Stream& stream);
/// Whether some KV heads have states to merge: no single block has processed all their splits.
bool needs_join(const LayerLaunch& layer, const FusedArgs& fused);

}  // namespace kvlm::cuda::packed
