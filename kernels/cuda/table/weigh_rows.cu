// Attention weights, and eviction of unpacked tokens by them (H2O, TOVA), on the GPU alone.
//
// join_and_weigh runs in every layer: it merges the states of splits, and adds the weights that
// follow from the stored scores. It also does so for placed KV heads, which placed_drops.cu evicts,
// and for those that the host evicts. drop_least evicts without moves: the next token takes the
// place, and arrival numbers keep the order.
#include "kernels/cuda/attend/fused_join.cuh"
#include "kernels/cuda/attend/score_places.cuh"
#include "kernels/cuda/table/least_row.cuh"
#include "kernels/cuda/table/weigh_rows.h"

namespace kvlm::cuda::packed {

namespace {

constexpr int kDropThreads = 256;
constexpr int kJoinThreads = 128;

/// The weight of a token, a mean over query heads.
///   slot      of its key
///   score     column of its scores in head.weights; if placed, the value's place
///   log_sums  (q_per_kv,) of the KV head
__device__ float weight_of(const AttendArgs& args, const DeviceHead& head, int number, int slot,
                           int score, const float* log_sums) {
  const int remap = RemapSlots(args, head, slot).remap;
  float sum = 0;
  for (int query = 0; query < args.q_per_kv; ++query) {
    const RemappedScores remapped(args, head, number, remap, query, false);
    const float x = remapped(head.weights[query * args.score_stride + score]);
    sum += exp2f(x - log_sums[query]);
  }
  return sum / static_cast<float>(args.q_per_kv);
}

/// Slots that a block weighs.
constexpr int join_slots(bool few) { return few ? kJoinThreads : 8 * kJoinThreads; }

/// Block (KV head, queries or slots): the first `query_blocks` merge the KV head's states and write
/// outputs; the others each weigh join_slots() slots.
///   kFew      few KV heads: more loads in flight per thread instead of more threads
///   in_order  row_splits.cu stored the scores, in slot order
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
  const int at = table.head_at(args.layer, number);
  const DeviceHead head = head_of(args, at);
  const auto thread = static_cast<int>(threadIdx.x);
  const SplitPlaces places(args, fused, number);
  if (block < query_blocks) {
    const int queries = (args.q_per_kv + query_blocks - 1) / query_blocks;
    const int first = block * queries;
    const int end = min(first + queries, args.q_per_kv);
    wait_for_earlier();
    if (!in_order) let_next_start();
    join_any_queries<kAhead>(args, fused, places, head.out, number, first, end);
    if (first + thread < end) count_clamped(args, head, number, first + thread);
    return;
  }
  const DeviceTail& keys = table.tails[at * 2];
  const int slots = keys.packed_slots() + keys.full;
  wait_for_earlier();
  if (!in_order) let_next_start();
  const bool apart = head.placed && !in_order;
  const int first_slot = (block - query_blocks) * kSlots;
  // Storage index of the token in slot first_slot + i (-1: none), and index of its scores.
  const auto find = [&](int i) {
    const int slot = first_slot + i;
    if (i >= kSlots || slot / 32 * 32 >= slots) return int2{-1, 0};
    // All threads of a warp find the slots of a selection together.
    const int selected = head.selects ? selected_slot(args, head, slot / 32 * 32) : slot;
    if (slot >= slots) return int2{-1, 0};
    if (!head.placed) return int2{slot, selected};
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
    const float made = weight_of(args, head, number, slot, found.y, log_sums);
    float& weight = table.weighed[at].weights[found.x];
    const bool known = summed && slot != keys.packed_slots() + keys.newest;
    weight = (known ? weight : 0.0f) + made;
  }
}

/// Block (sequence and group of `kv_heads` KV heads that evict the same token, layer).
__global__ void __launch_bounds__(kDropThreads) drop_least(TableArgs table, int kv_heads) {
  const int head =
      table.head_at(static_cast<int>(blockIdx.y), static_cast<int>(blockIdx.x) * kv_heads);
  const DeviceWeighed& of = table.weighed[head];
  if (of.by_slots) return;
  const int* came = table.came_of(head);
  Candidate least{INFINITY, -1, -1};
  for (int place = static_cast<int>(threadIdx.x); place < table.tails[head * 2].full;
       place += kDropThreads) {
    if (!of.least.may_drop(came[place], of.next)) continue;
    const Candidate candidate{mean_weight(table, head, kv_heads, place), came[place], place};
    if (goes_first(candidate, least)) least = candidate;
  }
  least = first_of_block<kDropThreads>(least);
  if (threadIdx.x != 0 || least.came < 0) return;
  for (int kv_head = 0; kv_head < kv_heads; ++kv_head) {
    for (const int side : {0, 1}) {
      DeviceTail& tail = table.tails[(head + kv_head) * 2 + side];
      tail.vacated = least.place;
      --tail.full;
    }
    table.came_of(head + kv_head)[least.place] = WeighedRows::kNoRow;
  }
}

}  // namespace

void join_and_weigh_rows(const TableArgs& table, const AttendArgs& args, const FusedArgs& fused,
                         bool summed, bool in_order, Stream& stream) {
  const auto query_blocks =
      static_cast<unsigned>(ceil_div(args.q_per_kv * args.head_dim, 4 * kJoinThreads));
  const bool few = fused.heads <= stream.queue().multiprocessors();
  const auto slot_blocks = static_cast<unsigned>(ceil_div(table.weighed_slots, join_slots(few)));
  const dim3 grid(static_cast<unsigned>(fused.heads), query_blocks + slot_blocks);
  const auto kernel = few ? join_and_weigh<true> : join_and_weigh<false>;
  launch_early("DecodeTable::attend", kernel, grid, kJoinThreads,
               static_cast<size_t>(args.q_per_kv) * sizeof(float), stream, table, args, fused,
               summed, in_order, static_cast<int>(query_blocks));
}

void drop_least_weighed(const TableArgs& table, bool alike, Stream& stream) {
  const int kv_heads = alike ? table.kv_heads : 1;
  const dim3 grid(static_cast<unsigned>(table.rows * table.kv_heads / kv_heads),
                  static_cast<unsigned>(table.layers));
  drop_least<<<grid, kDropThreads, 0, native(stream)>>>(table, kv_heads);
  check_launch("DecodeTable::drop_least");
}

}  // namespace kvlm::cuda::packed
