// Eviction by attention weights (H2O, TOVA) where the weights are: nothing is told to the host, for
// which a lane that gains a row and drops one stays as it is. No row moves: the next one takes the
// place of the one that went, so that only numbers say in which order rows came. Of lanes that are
// placed, and where the host drops rows, weights are added here alone.
#include "kernels/cuda/table/least_row.cuh"
#include "kernels/cuda/table/weigh_rows.h"

namespace kvlm::cuda::packed {

namespace {

constexpr int kThreads = 256;

/// Block (lane, slots).
__global__ void __launch_bounds__(kThreads)
    add_weights(TableArgs table, int layer, bool summed, const float* log_sums) {
  const auto number = static_cast<int>(blockIdx.x);
  const int at = table.lane_at(layer, number);
  const DeviceLane& lane = table.lanes[at];
  const DeviceTail& keys = table.tails[at * 2];
  const int slot = static_cast<int>(blockIdx.y) * kThreads + static_cast<int>(threadIdx.x);
  if (slot >= keys.packed_slots() + keys.full) return;
  int place = slot;
  int value = slot;
  if (lane.placed) {
    place = keys.place_of_slot(slot);
    if (table.came_of(at)[place] == WeighedRows::kNoRow) return;
    value = table.tails[at * 2 + 1].slot_of_place(table.other_of(at, 0)[place]);
  }
  float sum = 0;
  for (int head = 0; head < table.q_per_kv; ++head) {
    sum += log_sums == nullptr
               ? lane.weights[static_cast<int64_t>(head) * lane.slots + value]
               : __expf(lane.weights[static_cast<int64_t>(head) * table.longest + slot] -
                        log_sums[number * table.q_per_kv + head]);
  }
  float& weight = table.weighed[at].weights[place];
  const bool known = summed && slot != keys.packed_slots() + keys.newest;
  weight = (known ? weight : 0.0f) + sum / static_cast<float>(table.q_per_kv);
}

/// Block (sequence and group of `heads` lanes that drop alike, layer).
__global__ void __launch_bounds__(kThreads) drop_least(TableArgs table, int heads) {
  const int lane =
      table.lane_at(static_cast<int>(blockIdx.y), static_cast<int>(blockIdx.x) * heads);
  const DeviceWeighed& of = table.weighed[lane];
  if (of.by_slots) return;
  const int* came = table.came_of(lane);
  Candidate least{INFINITY, -1, -1};
  for (int place = static_cast<int>(threadIdx.x); place < table.tails[lane * 2].full;
       place += kThreads) {
    if (!of.least.may_drop(came[place], of.next)) continue;
    const Candidate candidate{mean_weight(table, lane, heads, place), came[place], place};
    if (goes_first(candidate, least)) least = candidate;
  }
  least = first_of_block<kThreads>(least);
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

void add_row_weights(const TableArgs& table, int layer, bool summed, const float* log_sums,
                     Stream& stream) {
  if (table.weighed_slots == 0) return;
  const dim3 grid(static_cast<unsigned>(table.rows * table.heads),
                  static_cast<unsigned>(ceil_div(table.weighed_slots, kThreads)));
  add_weights<<<grid, kThreads, 0, native(stream)>>>(table, layer, summed, log_sums);
  check_launch("DecodeTable::attend");
}

void drop_least_weighed(const TableArgs& table, bool alike, Stream& stream) {
  const int heads = alike ? table.heads : 1;
  const dim3 grid(static_cast<unsigned>(table.rows * table.heads / heads),
                  static_cast<unsigned>(table.layers));
  drop_least<<<grid, kThreads, 0, native(stream)>>>(table, heads);
  check_launch("DecodeTable::drop_least");
}

}  // namespace kvlm::cuda::packed
