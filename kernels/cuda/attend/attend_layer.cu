#include <algorithm>
#include <bit>
#include <limits>

#include "kernels/cuda/attend/attend_layer.h"
#include "kernels/cuda/attend/fused_attention.h"
#include "kernels/cuda/attend/fused_choice.h"
#include "kernels/cuda/attend/fused_join.cuh"
#include "kernels/cuda/attend/fused_splits.h"
#include "kernels/cuda/attend/picture_lanes.h"
#include "kernels/cuda/attend/two_pass.h"

// Decode attention of one layer. A lane, one KV head of one sequence, is served by row_pieces.cu
// (unpacked tokens), by picture_lanes.cu, by a kernel of one pass (fused_kernel.cuh), or in two
// (two_pass.cuh): the scores of its keys, and once all of them are known its values by weight. Each
// leaves softmax states of the same form, which one function merges (fused_join.cuh).
namespace kvlm::cuda::packed {

namespace {

/// Calls with(number) for every bit that is 1.
template <class With>
void each_bit(uint32_t bits, const With& with) {
  for (; bits != 0; bits &= bits - 1) with(std::countr_zero(bits));
}

uint32_t pairs_of(const LaneKinds& kinds) { return kinds.fused & ~kPictureKernels; }

/// Blocks that share the splits of a lane that a kernel serves in one pass.
int blocks_of_lane(const LayerLaunch& layer, const AttendArgs& args, int splits, Stream& stream) {
  int resident = std::numeric_limits<int>::max();
  each_bit(pairs_of(layer.kinds), [&](int pair) {
    const int sources = layer.kinds.sources[static_cast<size_t>(pair)];
    resident = std::min(resident, fused_resident_blocks(args, pair, sources, stream));
  });
  const int query_blocks = fused_query_blocks(args.head_dim, args.q_per_kv);
  return fused_blocks_of_lane(int64_t{layer.lanes} * query_blocks, splits, resident);
}

/// What kernels of a layer tell each other: the states of splits.
FusedArgs place_states(const LayerLaunch& layer, const AttendArgs& args, Stream& stream) {
  FusedArgs fused{};
  fused.lanes = static_cast<int>(layer.lanes);
  fused.lose_rows = layer.kinds.lose_rows;
  if (layer.rows.count > 0) fused.splits = static_cast<int>(layer.rows.parts);
  if (pairs_of(layer.kinds) != 0 || layer.kinds.keys != 0) {
    fused.lane_splits = most_fused_splits(layer.most_slots);
    fused.splits = std::max(fused.splits, fused.lane_splits * std::max(1, layer.kinds.passes));
  }
  const size_t states = static_cast<size_t>(layer.lanes) * static_cast<size_t>(fused.splits) *
                        static_cast<size_t>(args.q_per_kv);
  const size_t ends = (states * sizeof(float2) + 255) / 256 * 256;
  const size_t outs = states * static_cast<size_t>(args.head_dim) * sizeof(float);
  std::byte* base = stream.queue().scratch(kLaneParts, ends + outs);
  fused.ends = reinterpret_cast<float2*>(base);
  fused.outs = reinterpret_cast<float*>(base + ends);
  return fused;
}

}  // namespace

FusedArgs attend_splits(const LayerLaunch& layer, const AttendArgs& args, Stream& stream) {
  const LaneKinds& kinds = layer.kinds;
  FusedArgs fused = place_states(layer, args, stream);
  if (layer.rows.count > 0) {
    PieceLaunch rows = layer.rows;
    rows.ends = fused.ends;
    rows.outs = fused.outs;
    rows.splits = fused.splits;
    attend_pieces(rows, layer.dtype, stream);
  }
  if ((kinds.fused & kPictureKernels) != 0) {
    attend_pictures(kinds.fused & kPictureKernels, args, fused, kinds.picture_slots, stream);
  }
  const PassArgs pass{0, 0, kinds.pass_sources, layer.channels};
  for (const bool keys : {true, false}) {
    each_bit(keys ? kinds.keys : kinds.values, [&](int kernel) {
      PassArgs of = pass;
      of.kernel = kernel;
      launch_pass(keys, args, fused, of, stream);
    });
  }
  if (pairs_of(kinds) != 0) fused.blocks = blocks_of_lane(layer, args, fused.lane_splits, stream);
  each_bit(pairs_of(kinds), [&](int pair) {
    fused.pair = pair;
    fused.sources = kinds.sources[static_cast<size_t>(pair)];
    attend_fused(args, fused, stream);
  });
  return fused;
}

bool needs_join(const LayerLaunch& layer, const FusedArgs& fused) {
  const bool in_one_pass = pairs_of(layer.kinds) != 0;
  return layer.rows_alone || layer.kinds.keys != 0 ||
         (in_one_pass && !has_all_splits(fused, fused.lane_splits));
}

}  // namespace kvlm::cuda::packed
