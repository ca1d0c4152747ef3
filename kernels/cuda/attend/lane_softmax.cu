#include <algorithm>

#include "kernels/cuda/attend/lane_softmax.h"
#include "kernels/cuda/attend/remap_scores.cuh"
#include "kernels/cuda/device/block_reduce.cuh"
#include "kernels/cuda/device/launch.cuh"

// The softmax of lanes over their scores, remap included: a block a query head that makes weights
// of scores in their place, or, where the softmax is deferred, a warp that finds from the ends of
// splits how kernels of values are to weigh scores.
namespace kvlm::cuda::packed {

namespace {

constexpr int kNormaliseThreads = 512;

/// Where the weights of a lane go that lie in the order of its runs of values: behind each other
/// those of the slots that the first run of a selection holds, and then the others of the
/// selection.
class RunOrder {
 public:
  /// By all threads of a block.
  __device__ void find(const AttendArgs& args, const DeviceLane& lane) {
    __shared__ int counts[kMostWords];
    __shared__ int sums[kMostWords];
    int first = lane.last_keys + 1;
    while (args.runs[first].selection == nullptr) ++first;
    run_ = &args.runs[first];
    before_ = sums;
    const int words = (run_->selected_of + 63) / 64;
    const auto thread = static_cast<int>(threadIdx.x);
    for (int i = thread; i < words; i += static_cast<int>(blockDim.x)) {
      counts[i] = __popcll(word(i));
    }
    __syncthreads();
    for (int i = thread; i < words; i += static_cast<int>(blockDim.x)) {
      int sum = 0;
      for (int j = 0; j < i; ++j) sum += counts[j];
      sums[i] = sum;
    }
    __syncthreads();
  }
  __device__ int place(int slot) const {
    const int i = slot - run_->first_slot;
    if (i < 0 || i >= run_->selected_of) return slot;
    const uint64_t bits = word(i / 64);
    const int held = before_[i / 64] + __popcll(bits & ((uint64_t{1} << i % 64) - 1));
    return run_->first_slot + ((bits >> i % 64 & 1) != 0 ? held : run_->slots + i - held);
  }

  static constexpr int kMostWords = kMostOrdered / 64;

 private:
  /// Bit i: the first run holds slot i of the word.
  __device__ uint64_t word(int i) const {
    return run_->selected_bit ? run_->selection[i] : ~run_->selection[i];
  }

  const DeviceRun* run_ = nullptr;
  const int* before_ = nullptr;  // slots that the run holds before each word
};

/// Remaps and normalises the scores of one query head of one lane of at most kHeld *
/// kNormaliseThreads slots, in place. With `ordered` those of lanes in_run_order alone.
template <int kHeld>
__global__ void __launch_bounds__(kNormaliseThreads) normalise(AttendArgs args, bool ordered) {
  __shared__ float parts[kNormaliseThreads / 32];
  wait_for_earlier();
  let_next_start();
  const DeviceLane lane = lane_of(args, lane_at(args, static_cast<int>(blockIdx.x)));
  if (lane.deferred || lane.fused != 0 || lane.placed || (ordered && !lane.in_run_order)) return;
  float* scores = lane.weights + static_cast<int64_t>(blockIdx.y) * lane.slots;
  const auto first = static_cast<int>(threadIdx.x);
  float held[kHeld];
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    const int slot = first + i * kNormaliseThreads;
    held[i] = slot < lane.slots ? scores[slot] : -INFINITY;
  }
  for (int r = 0; r < lane.remaps; ++r) {
    remap_live<kNormaliseThreads>(args, args.remaps[lane.first_remap + r], held, parts);
  }
  const float inverse = make_exponentials<kNormaliseThreads>(held, parts);
  RunOrder order;
  if (lane.in_run_order) order.find(args, lane);  // all have read their scores
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    const int slot = first + i * kNormaliseThreads;
    if (slot >= lane.slots) continue;
    scores[lane.in_run_order ? order.place(slot) : slot] = held[i] * inverse;
  }
}

/// The same of any number of slots.
__global__ void __launch_bounds__(kNormaliseThreads) normalise_long(AttendArgs args) {
  __shared__ float parts[kNormaliseThreads / 32];
  wait_for_earlier();
  let_next_start();
  const DeviceLane lane = lane_of(args, lane_at(args, static_cast<int>(blockIdx.x)));
  if (lane.deferred || lane.fused != 0 || lane.placed || lane.in_run_order) return;
  float* scores = lane.weights + static_cast<int64_t>(blockIdx.y) * lane.slots;
  const auto first = static_cast<int>(threadIdx.x);
  const auto step = static_cast<int>(blockDim.x);
  for (int r = 0; r < lane.remaps; ++r) {
    const ScoreRemap remap = args.remaps[lane.first_remap + r];
    if (remap.slots == 0) continue;
    float low = INFINITY;
    float high = -INFINITY;
    for (int i = first; i < remap.slots; i += step) {
      low = fminf(low, scores[remap.first + i]);
      high = fmaxf(high, scores[remap.first + i]);
    }
    low = -block_reduce<kNormaliseThreads>(-low, true, parts);
    high = block_reduce<kNormaliseThreads>(high, true, parts);
    const float slope = remap_slope(args, remap, low, high, threadIdx.x == 0);
    for (int i = first; i < remap.slots; i += step) {
      float& score = scores[remap.first + i];
      score = slope * (score - low) + low - remap.tau_low;
    }
    __syncthreads();
  }
  float maximum = -INFINITY;
  for (int i = first; i < lane.slots; i += step) maximum = fmaxf(maximum, scores[i]);
  maximum = block_reduce<kNormaliseThreads>(maximum, true, parts);
  float sum = 0;
  for (int i = first; i < lane.slots; i += step) {
    const float weight = __expf(scores[i] - maximum);
    scores[i] = weight;
    sum += weight;
  }
  const float inverse = 1.0f / block_reduce<kNormaliseThreads>(sum, false, parts);
  for (int i = first; i < lane.slots; i += step) scores[i] *= inverse;
}

/// How the scores of a deferred lane are weighed, from the ends of its splits: a warp a query head.
/// Its greatest weight is 1.
__global__ void weigh_lanes(AttendArgs args) {
  const int index = lane_at(args, static_cast<int>(blockIdx.x));
  const DeviceLane lane = args.lanes[index];
  wait_for_earlier();
  let_next_start();  // whose codes have been written before the scores
  if (!lane.deferred) return;
  constexpr float kLog2e = 1.4426950408889634f;
  const int thread = static_cast<int>(threadIdx.x % 32);
  for (int query = static_cast<int>(threadIdx.x / 32); query < args.q_per_kv;
       query += static_cast<int>(blockDim.x) / 32) {
    float most = -INFINITY;
    for (int range = 0; range <= lane.remaps; ++range) {
      float low = INFINITY;
      float high = -INFINITY;
      for (int r = lane.first_keys; r <= lane.last_keys; ++r) {
        const DeviceRun& run = args.runs[r];
        if (run.range != range) continue;
        for (int split = thread; split < run.splits; split += 32) {
          const float2 ends =
              args.ends[static_cast<int64_t>(run.first_part + split) * args.q_per_kv + query];
          low = fminf(low, ends.x);
          high = fmaxf(high, ends.y);
        }
      }
      low = -warp_max(-low);
      high = warp_max(high);
      ScoreWeighting made{kLog2e, high, high * kLog2e};
      if (range > 0 && high >= low) {
        const ScoreRemap remap = args.remaps[lane.first_remap + range - 1];
        const float slope = remap_slope(args, remap, low, high, thread == 0);
        // The largest remapped score is that of the greatest, of the least if the slope falls.
        const float top = slope >= 0 ? high : low;
        made = {slope * kLog2e, top, (slope * (top - low) + low - remap.tau_low) * kLog2e};
      }
      if (high >= low) most = fmaxf(most, made.level);
      if (thread == 0) weightings_of(args, index, range)[query] = made;
    }
    __syncwarp();
    for (int range = thread; range <= lane.remaps; range += 32) {
      weightings_of(args, index, range)[query].level -= most;
    }
  }
}

}  // namespace

void normalise_lanes(const AttendArgs& args, const LayerLaunch& layer, Stream& stream) {
  const dim3 heads(layer.lanes, static_cast<unsigned>(args.q_per_kv));
  const int most = layer.most_slots;
  const auto hold = [&](auto kernel, bool ordered) {
    launch_early("DecodeTable::attend", kernel, heads, kNormaliseThreads, stream, args, ordered);
  };
  constexpr int kMost = kMostOrdered / kNormaliseThreads;
  if (most <= 2 * kNormaliseThreads) return hold(normalise<2>, false);
  if (most <= 8 * kNormaliseThreads) return hold(normalise<8>, false);
  if (most <= kMostOrdered) return hold(normalise<kMost>, false);
  launch_early("DecodeTable::attend", normalise_long, heads, kNormaliseThreads, stream, args);
  if (layer.kinds.ordered) hold(normalise<kMost>, true);
}

void weigh_deferred(const AttendArgs& args, const LayerLaunch& layer, Stream& stream) {
  const int warps = std::min(args.q_per_kv, 8);
  launch_early("DecodeTable::attend", weigh_lanes, layer.lanes, 32 * warps, stream, args);
}

}  // namespace kvlm::cuda::packed
