// Eviction by attention weights (H2O, TOVA) where the weights are: nothing is told to the host, for
// which a lane that gains a row and drops one stays as it is. No row moves: the next one takes the
// place of the one that went, so that only numbers say in which order rows came. Of lanes that are
// placed, and where the host drops rows, weights are added here alone. They follow from the scores
// that attention has stored and from the states of its splits, which the same launch merges.
#include "kernels/cuda/attend/fused_join.cuh"
#include "kernels/cuda/attend/score_places.cuh"
#include "kernels/cuda/table/least_row.cuh"
#include "kernels/cuda/table/weigh_rows.h"

namespace kvlm::cuda::packed {

namespace {

constexpr int kDropThreads = 256;
constexpr int kJoinThreads = 128;

/// The weight of a row, a mean over query heads.
///   slot      of its key
///   score     where attention has left its scores (AttendArgs::score_stride)
///   log_sums  of the lane, by query
__device__ float weight_of(const AttendArgs& args, const DeviceLane& lane, int number, int slot,
                           int score, const float* log_sums) {
  const int remap = RemapSlots(args, lane, slot).remap;
  float sum = 0;
  for (int query = 0; query < args.q_per_kv; ++query) {
    const RemappedScores remapped(args, lane, number, remap, query, false);
    const float x = remapped(lane.weights[query * args.score_stride + score]);
    sum += exp2f(x - log_sums[query]);
  }
  return sum / static_cast<float>(args.q_per_kv);
}

/// Slots that a block weighs.
constexpr int join_slots(bool few) { return few ? kJoinThreads : 8 * kJoinThreads; }

/// Block (lane, queries or slots): the first `query_blocks` merge the lane's states, and write the
/// outputs of its queries; the others add the weights of some slots each.
///   kFew      the GPU has room for all blocks: many loads of a thread at once are worth more than
///             many threads
///   in_order  scores lie in the order of rows, which row_pieces.cu has stored
template <bool kFew>
__global__ void __launch_bounds__(kJoinThreads, kFew ? 4 : 8)
    join_and_weigh(TableArgs table, AttendArgs args, FusedArgs fused, bool summed, bool in_order,
                   int query_blocks) {
  constexpr int kAhead = kFew ? kJoinAhead : 4;
  constexpr int kSlots = join_slots(kFew);
  extern __shared__ float log_sums[];  // (q_per_kv,)
  if (in_order) let_next_start();
  const auto number = static_cast<int>(blockIdx.x);
  const auto block = static_cast<int>(blockIdx.y);
  const int at = table.lane_at(args.layer, number);
  const DeviceLane lane = lane_of(args, at);
  const auto thread = static_cast<int>(threadIdx.x);
  const SplitPlaces places(args, fused, number);
  if (block < query_blocks) {
    const int queries = (args.q_per_kv + query_blocks - 1) / query_blocks;
    const int first = block * queries;
    const int end = min(first + queries, args.q_per_kv);
    wait_for_earlier();
    if (!in_order) let_next_start();
    join_any_queries<kAhead>(args, fused, places, lane.out, number, first, end);
    if (first + thread < end) count_clamped(args, lane, number, first + thread);
    return;
  }
  const DeviceTail& keys = table.tails[at * 2];
  const int slots = keys.packed_slots() + keys.full;
  wait_for_earlier();
  if (!in_order) let_next_start();
  const bool apart = lane.placed && !in_order;
  const int first_slot = (block - query_blocks) * kSlots;
  // The place of the row in slot first_slot + i, -1 for none, and that of its scores.
  const auto find = [&](int i) {
    const int slot = first_slot + i;
    if (i >= kSlots || slot / 32 * 32 >= slots) return int2{-1, 0};
    // All threads of a warp find the slots of a selection together.
    const int selected = lane.selects ? selected_slot(args, lane, slot / 32 * 32) : slot;
    if (slot >= slots) return int2{-1, 0};
    if (!lane.placed) return int2{slot, selected};
    const int place = keys.place_of_slot(slot);
    const int score = apart ? table.other_of(at, 0)[place] : selected;
    const bool is_empty = table.came_of(at)[place] == WeighedRows::kNoRow;
    return int2{is_empty ? -1 : place, score};
  };
  int2 found = find(thread);
  for (int query = thread / 32; query < args.q_per_kv; query += kJoinThreads / 32) {
    const float sum = log_sum_of(args, fused, places, number, query);
    if (thread % 32 == 0) log_sums[query] = sum;
  }
  __syncthreads();
  for (int i = thread; i < kSlots; found = find(i += kJoinThreads)) {
    if (found.x < 0) continue;
    const int slot = first_slot + i;
    const float made = weight_of(args, lane, number, slot, found.y, log_sums);
    float& weight = table.weighed[at].weights[found.x];
    const bool known = summed && slot != keys.packed_slots() + keys.newest;
    weight = (known ? weight : 0.0f) + made;
  }
}

/// Block (sequence and group of `heads` lanes that drop alike, layer).
__global__ void __launch_bounds__(kDropThreads) drop_least(TableArgs table, int heads) {
  const int lane =
      table.lane_at(static_cast<int>(blockIdx.y), static_cast<int>(blockIdx.x) * heads);
  const DeviceWeighed& of = table.weighed[lane];
  if (of.by_slots) return;
  const int* came = table.came_of(lane);
  Candidate least{INFINITY, -1, -1};
  for (int place = static_cast<int>(threadIdx.x); place < table.tails[lane * 2].full;
       place += kDropThreads) {
    if (!of.least.may_drop(came[place], of.next)) continue;
    const Candidate candidate{mean_weight(table, lane, heads, place), came[place], place};
    if (goes_first(candidate, least)) least = candidate;
  }
  least = first_of_block<kDropThreads>(least);
  if (threadIdx.x != 0 || least.came < 0) return;
  for (int head = 0; head < heads; ++head) {
    for (const int side : {0, 1}) {
      DeviceTail& tail = table.tails[(lane + head) * 2 + side];
      tail.vacated = least.place;
      --tail.full;
    }
    table.came_of(lane + head)[least.place] = WeighedRows::kNoRow;
  }
}

}  // namespace

void join_and_weigh_rows(const TableArgs& table, const AttendArgs& args, const FusedArgs& fused,
                         bool summed, bool in_order, Stream& stream) {
  const auto query_blocks =
      static_cast<unsigned>(ceil_div(args.q_per_kv * args.head_dim, 4 * kJoinThreads));
  const bool few = fused.lanes <= stream.queue().multiprocessors();
  const auto slot_blocks = static_cast<unsigned>(ceil_div(table.weighed_slots, join_slots(few)));
  const dim3 grid(static_cast<unsigned>(fused.lanes), query_blocks + slot_blocks);
  const auto kernel = few ? join_and_weigh<true> : join_and_weigh<false>;
  launch_early("DecodeTable::attend", kernel, grid, kJoinThreads,
               static_cast<size_t>(args.q_per_kv) * sizeof(float), stream, table, args, fused,
               summed, in_order, static_cast<int>(query_blocks));
}

void drop_least_weighed(const TableArgs& table, bool alike, Stream& stream) {
  const int heads = alike ? table.heads : 1;
  const dim3 grid(static_cast<unsigned>(table.rows * table.heads / heads),
                  static_cast<unsigned>(table.layers));
  drop_least<<<grid, kDropThreads, 0, native(stream)>>>(table, heads);
  check_launch("DecodeTable::drop_least");
}

}  // namespace kvlm::cuda::packed
