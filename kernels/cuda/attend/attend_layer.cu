#include <algorithm>
#include <bit>
#include <limits>

#include "kernels/cuda/attend/attend_layer.h"
#include "kernels/cuda/attend/fused_attention.h"
#include "kernels/cuda/attend/fused_choice.h"
#include "kernels/cuda/attend/fused_join.cuh"
#include "kernels/cuda/attend/fused_splits.h"
#include "kernels/cuda/attend/image_block.h"
#include "kernels/cuda/attend/two_pass.h"

// Decode attention of one layer. Each KV head of the batch has one of four kernel families:
//
// - unpacked tokens alone: row_splits.cu;
// - an image packed as one block: image_block.cu, with row_splits.cu for the tokens after it;
// - keys and values in the same slots, in a listed pair of codecs, without remaps: one pass
//   (fused_kernel.cuh). If tokens are weighed or evicted in place, both must be scaled by token;
// - all others: two passes (two_pass.cuh), which store the scores between them.
//
// All write softmax states of the same form (FusedArgs); fused_join.cuh or image_block.cuh merges.
namespace kvlm::cuda::packed {

namespace {

/// Calls with(number) for every bit that is 1.
template <class With>
void each_bit(uint32_t bits, const With& with) {
  for (; bits != 0; bits &= bits - 1) with(std::countr_zero(bits));
}

uint32_t pairs_of(const HeadKernels& kinds) { return kinds.fused & ~kImageKernels; }

/// Blocks that share the splits of a KV head in one pass.
int blocks_of_head(const LayerLaunch& layer, const AttendArgs& args, int splits, Stream& stream) {
  int resident = std::numeric_limits<int>::max();
  each_bit(pairs_of(layer.kinds), [&](int pair) {
    const int sources = layer.kinds.sources[static_cast<size_t>(pair)];
    resident = std::min(resident, fused_resident_blocks(args, pair, sources, stream));
  });
  const int query_blocks = fused_query_blocks(args.head_dim, args.q_per_kv);
  return fused_blocks_of_head(int64_t{layer.heads} * query_blocks, splits, resident);
}

/// Scratch memory for the softmax states of a layer's splits.
FusedArgs place_states(const LayerLaunch& layer, const AttendArgs& args, Stream& stream) {
  FusedArgs fused{};
  fused.heads = static_cast<int>(layer.heads);
  fused.lose_rows = layer.kinds.lose_rows;
  if (layer.rows.count > 0) fused.splits = static_cast<int>(layer.rows.parts);
  if (pairs_of(layer.kinds) != 0 || layer.kinds.keys != 0) {
    fused.head_splits = most_fused_splits(layer.most_slots);
    fused.splits = std::max(fused.splits, fused.head_splits * std::max(1, layer.kinds.passes));
  }
  const size_t states = static_cast<size_t>(layer.heads) * static_cast<size_t>(fused.splits) *
                        static_cast<size_t>(args.q_per_kv);
  const size_t ends = (states * sizeof(float2) + 255) / 256 * 256;
  const size_t outs = states * static_cast<size_t>(args.head_dim) * sizeof(float);
  std::byte* base = stream.queue().scratch(kSplitStates, ends + outs);
  fused.ends = reinterpret_cast<float2*>(base);
  fused.outs = reinterpret_cast<float*>(base + ends);
  return fused;
}

}  // namespace

FusedArgs attend_splits(const LayerLaunch& layer, const AttendArgs& args, Stream& stream) {
  const HeadKernels& kinds = layer.kinds;
  FusedArgs fused = place_states(layer, args, stream);
  if (layer.rows.count > 0) {
    RowSplitLaunch rows = layer.rows;
    rows.ends = fused.ends;
    rows.outs = fused.outs;
    rows.splits = fused.splits;
    attend_row_splits(rows, layer.dtype, stream);
  }
  if ((kinds.fused & kImageKernels) != 0) {
    attend_images(kinds.fused & kImageKernels, args, fused, kinds.image_slots, stream);
  }
  const PassArgs pass{0, 0, kinds.pass_sources, layer.channels};
  for (const bool keys : {true, false}) {
    each_bit(keys ? kinds.keys : kinds.values, [&](int kernel) {
      PassArgs of = pass;
      of.kernel = kernel;
      launch_pass(keys, args, fused, of, stream);
    });
  }
  if (pairs_of(kinds) != 0) fused.blocks = blocks_of_head(layer, args, fused.head_splits, stream);
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
         (in_one_pass && !has_all_splits(fused, fused.head_splits));
}

}  // namespace kvlm::cuda::packed
