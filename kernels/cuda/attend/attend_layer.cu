#include <algorithm>
#include <limits>

#include "kernels/cuda/attend/any_format.h"
#include "kernels/cuda/attend/attend_layer.h"
#include "kernels/cuda/attend/fused_attention.h"
#include "kernels/cuda/attend/fused_splits.h"
#include "kernels/cuda/attend/lane_softmax.h"
#include "kernels/cuda/attend/packed_codes.h"
#include "kernels/cuda/device/launch.cuh"
#include "kernels/cuda/table/placed_rows.h"

// Decode attention of one layer, in four steps, for the lanes that neither fused_attention.cu
// nor picture_lanes.cu serves in one pass. A lane is one KV head of one sequence; a run is
// consecutive slots of it that are stored alike; a split is the part of a run that one block of
// threads takes.
//
// 1. Scores: q . k of every slot, written as they are.
// 2. Weights: the softmax over a lane's scores, remap included. Where a lane's softmax is deferred
//    (`deferred`), only the constants are found from which step 3 makes weights out of scores.
//    Where values lie in two codes, weights go to the order in which values lie (`in_run_order`).
// 3. Values: every split gives a partial output.
// 4. Sum: the partial outputs of a lane are added.
//
// A split of keys has up to 2048 slots, of values 256 to 1024. Splits of values depend on the
// length of their lane alone, because they decide the order of its sums. A score depends on its own
// slot only, so splits of keys are cut such that every multiprocessor has work.
//
// lane_layout.cu says who serves a lane, packed_codes.cu and packed_values.cu have steps 1 and 3 on
// tensor cores, any_format.cu for any format, lane_softmax.cu has step 2.
namespace kvlm::cuda::packed {

namespace {

__global__ void sum_parts(AttendArgs args) {
  const DeviceLane lane = lane_of(args, lane_at(args, static_cast<int>(blockIdx.x)));
  const int elements = args.q_per_kv * args.head_dim;
  wait_for_earlier();
  if (lane.fused != 0) return;
  for (int i = static_cast<int>(threadIdx.x); i < elements; i += static_cast<int>(blockDim.x)) {
    float sum = 0;
    float mass = 0;
    for (int part = 0; part < lane.parts; ++part) {
      const int64_t at = lane.first_part + part;
      sum += args.parts[at * elements + i];
      if (lane.deferred) mass += args.masses[at * args.q_per_kv + i / args.head_dim];
    }
    lane.out[i] = lane.deferred ? sum / mass : sum;
  }
}

/// Calls with(pair) for the kernels of one pass that a layer launches.
template <class With>
void each_pair(const LaneKinds& kinds, const With& with) {
  for (int pair = 1; pair <= fused_pairs(); ++pair) {
    if ((kinds.fused >> pair & 1) != 0) with(pair);
  }
}

int blocks_of_lane(const LayerLaunch& layer, const AttendArgs& args, int splits, Stream& stream) {
  int resident = std::numeric_limits<int>::max();
  each_pair(layer.kinds, [&](int pair) {
    const int sources = layer.kinds.sources[static_cast<size_t>(pair)];
    resident = std::min(resident, fused_resident_blocks(args, pair, sources, stream));
  });
  const int query_blocks = fused_query_blocks(args.head_dim, args.q_per_kv);
  return fused_blocks_of_lane(int64_t{layer.lanes} * query_blocks, splits, resident);
}

/// What kernels of a layer tell each other.
FusedArgs place_workspace(const LayerLaunch& layer, AttendArgs& args, Stream& stream) {
  const auto queries = static_cast<size_t>(args.q_per_kv);
  const size_t parts = static_cast<size_t>(layer.value_parts) + 1;
  size_t bytes = 0;
  const auto room = [&](size_t size) {
    const size_t at = bytes;
    bytes += (size + 255) / 256 * 256;
    return at;
  };
  const size_t sums = room(parts * queries * static_cast<size_t>(args.head_dim) * sizeof(float));
  const size_t masses = room(parts * queries * sizeof(float));
  const size_t ends = room(static_cast<size_t>(layer.key_parts) * queries * sizeof(float2));
  const size_t weightings =
      room(static_cast<size_t>(layer.weightings) * queries * sizeof(ScoreWeighting));
  FusedArgs fused{};
  fused.lanes = static_cast<int>(layer.lanes);
  fused.splits =
      (layer.kinds.fused & ~kPictureKernels) == 0 ? 0 : most_fused_splits(layer.most_slots);
  fused.blocks = blocks_of_lane(layer, args, fused.splits, stream);
  const size_t splits = layer.lanes * static_cast<size_t>(fused.splits) * queries;
  const size_t fused_ends = room(splits * sizeof(float2));
  const size_t fused_outs = room(splits * static_cast<size_t>(args.head_dim) * sizeof(float));
  std::byte* base = stream.queue().scratch(kLaneParts, bytes);
  fused.ends = reinterpret_cast<float2*>(base + fused_ends);
  fused.outs = reinterpret_cast<float*>(base + fused_outs);
  args.parts = reinterpret_cast<float*>(base + sums);
  args.masses = reinterpret_cast<float*>(base + masses);
  args.ends = reinterpret_cast<float2*>(base + ends);
  args.weightings = reinterpret_cast<ScoreWeighting*>(base + weightings);
  return fused;
}

/// Serves the lanes that are done in one pass.
void launch_fused(const LayerLaunch& layer, const AttendArgs& args, FusedArgs fused,
                  Stream& stream) {
  if ((layer.kinds.fused & kPictureKernels) != 0) {
    attend_pictures(layer.kinds.fused & kPictureKernels, args, layer.pictures, layer.lanes, stream);
  }
  if ((layer.kinds.fused & ~kPictureKernels) == 0) return;
  each_pair(layer.kinds, [&](int pair) {
    fused.pair = pair;
    fused.sources = layer.kinds.sources[static_cast<size_t>(pair)];
    fused.lose_rows = layer.kinds.lose_rows;
    attend_fused(args, fused, stream);
  });
  join_fused(args, fused, stream);
}

/// `args` of the launch of one kernel.
AttendArgs serving(const AttendArgs& args, const ServedRuns& served, int kernel) {
  AttendArgs some = args;
  some.kernel = kernel;
  some.positions = served.positions;
  some.position_count = served.position_count;
  return some;
}

/// Scores, or the sums of values, of the runs of every kernel.
void launch_scores(const LayerLaunch& layer, const AttendArgs& args, Stream& stream) {
  for (int i = 0; i < kCodeKernels; ++i) {
    const ServedRuns& served = layer.keys[static_cast<size_t>(i)];
    if (served.splits.runs == 0) continue;
    score_codes(static_cast<CodeKernel>(i), serving(args, served, i), served.splits, stream);
  }
  const ServedRuns& any = layer.keys[kCodeKernels];
  if (any.splits.runs == 0) return;
  score_any(serving(args, any, kCodeKernels), any.splits, layer.channels, stream);
}

void launch_values(const LayerLaunch& layer, const AttendArgs& args, Stream& stream) {
  for (int i = 0; i < kCodeKernels; ++i) {
    const ServedRuns& served = layer.values[static_cast<size_t>(i)];
    if (served.splits.runs == 0) continue;
    add_codes(static_cast<CodeKernel>(i), serving(args, served, i), served.splits, stream);
  }
  const ServedRuns& any = layer.values[kCodeKernels];
  if (any.splits.runs == 0) return;
  add_any(serving(args, any, kCodeKernels), any.splits, stream);
}

}  // namespace

void launch_layer(const LayerLaunch& layer, AttendArgs args, Stream& stream) {
  const FusedArgs fused = place_workspace(layer, args, stream);
  if (!layer.kinds.unfused) return launch_fused(layer, args, fused, stream);
  launch_scores(layer, args, stream);
  if (layer.deferred > 0) weigh_deferred(args, layer, stream);
  if (layer.kinds.plain) normalise_lanes(args, layer, stream);
  if (layer.kinds.placed) weigh_places(*layer.table, args, stream);
  launch_values(layer, args, stream);
  launch_early("DecodeTable::attend", sum_parts, layer.lanes, 256, stream, args);
  check_launch("DecodeTable::attend");
  launch_fused(layer, args, fused, stream);
}

}  // namespace kvlm::cuda::packed
