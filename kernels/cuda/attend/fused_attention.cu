#include <algorithm>
#include <array>
#include <bit>
#include <cmath>

#include "kernels/cuda/attend/fused_attention.h"
#include "kernels/cuda/attend/fused_join.cuh"
#include "kernels/cuda/attend/fused_lane.cuh"
#include "kernels/cuda/attend/fused_table.h"
#include "kernels/cuda/attend/picture_choice.h"

// Which lanes the fused decode attention serves, its launches, and the kernel that merges splits.
namespace kvlm::cuda::packed {

namespace {

constexpr int kMostSources = 3;
constexpr int kJoinThreads = 32;
constexpr int kJoinAhead = 16;  // all splits of a lane of 4096 slots

/// A kernel, and which formats it reads; null: there is none for the head_dim.
struct FusedPair {
  bool (*reads_keys)(const PackedFormat& format) = nullptr;
  bool (*reads_values)(const PackedFormat& format) = nullptr;
  void (*launch)(const AttendArgs& args, const FusedArgs& fused, Stream& stream) = nullptr;
  int (*shared_bytes)(int sources, int groups) = nullptr;
  bool may_lose_rows = false;
};

template <class C, Scaled kScaled>
bool is_read_by(const PackedFormat& format) {
  const bool grouped = format.axis == ScaleAxis::kToken && format.group_size == kChannelGroup;
  if ((format.axis == ScaleAxis::kChannel) != (kScaled == Scaled::kChannel) ||
      grouped != (kScaled == Scaled::kToken32)) {
    return false;
  }
  if (format.sections != static_cast<int>(C::kSections.size())) return false;
  for (size_t i = 0; i < C::kSections.size(); ++i) {
    if (format.section[i].code != C::kSections[i].code ||
        format.section[i].channels != C::kSections[i].channels) {
      return false;
    }
  }
  return true;
}

template <int kDim, template <int> class K, Scaled kKeys, template <int> class V, Scaled kValues,
          int... kServed>
constexpr FusedPair pair_at() {
  FusedPair pair;
  if constexpr (((kDim == kServed) || ...)) {
    using Kernel = FusedKernel<K<kDim>, kKeys, V<kDim>, kValues>;
    pair = {is_read_by<K<kDim>, kKeys>, is_read_by<V<kDim>, kValues>, Kernel::launch,
            Kernel::shared_bytes, Kernel::kMayLoseRows};
  }
  return pair;
}

#define KVLM_PAIR(K, KEYS, V, VALUES, ...) \
  pair_at<kDim, codecs::K, Scaled::KEYS, codecs::V, Scaled::VALUES, __VA_ARGS__>(),
template <int kDim>
constexpr std::array kPairs{KVLM_FUSED_PAIRS(KVLM_PAIR)};
#undef KVLM_PAIR
static_assert(kPairs<128>.size() < kFirstPicture);  // numbers from there on are picture_lanes.cu's

std::span<const FusedPair> pairs_at(int head_dim) {
  switch (head_dim) {
    case 64:
      return kPairs<64>;
    case 80:
      return kPairs<80>;
    case 96:
      return kPairs<96>;
    case 128:
      return kPairs<128>;
    case 256:
      return kPairs<256>;
    default:
      return {};
  }
}

bool is_power_of_two_or_zero(float x) {
  int exponent = 0;
  return x == 0 || std::frexp(std::abs(x), &exponent) == 0.5f;
}

/// Whether scales and zero points are such as the kernels take.
bool is_scaled_simply(const PackedFormat& format, int head_dim) {
  const bool by_token = format.axis == ScaleAxis::kToken;
  if (format.meta != DType::kF16 || format.channels() != head_dim ||
      (by_token && format.group_size != head_dim && format.group_size != kChannelGroup)) {
    return false;
  }
  bool stored = true;
  for (int i = 0; i < format.sections; ++i) {
    const PackedSection& section = format.section[static_cast<size_t>(i)];
    if (section.zero_stored && !stored) return false;  // zero points lie as channels do
    stored = stored && section.zero_stored;
    if (section.zero_stored && section.slope == 1) continue;
    if (by_token && is_ternary(section.code) && format.group_size == kChannelGroup &&
        section.slope == 1 && section.offset == -1) {
      continue;
    }
    if (section.zero_stored || format.axis != ScaleAxis::kChannel ||
        !is_power_of_two_or_zero(section.slope) || !is_power_of_two_or_zero(section.offset) ||
        !is_power_of_two_or_zero(section.offset_after)) {
      return false;
    }
  }
  return true;
}

/// What scales and zero points are aligned to: the copies that bring them take as much.
size_t meta_alignment(const PackedFormat& format) {
  if (format.axis == ScaleAxis::kChannel) return 16;
  if (format.axis == ScaleAxis::kHead) return 2;
  const auto row_bytes = 2 * static_cast<size_t>(format.groups());
  return std::has_single_bit(row_bytes) ? row_bytes : 8;
}

bool is_placed_well(const SlotRun& run) {
  if (!is_aligned(run.q, 16) || run.selection != nullptr) return false;
  if (run.format == nullptr) return run.dtype == DType::kF16 && is_aligned(run.rows, 16);
  const size_t meta = meta_alignment(*run.format);
  if (run.code_stride % 16 != 0 || run.scale_stride % static_cast<std::ptrdiff_t>(meta) != 0) {
    return false;
  }
  for (const PackedBlock& block : run.blocks) {
    if (block.live != nullptr || !is_aligned(block.codes, 16) || !is_aligned(block.scales, meta) ||
        !is_aligned(block.zeros, meta)) {
      return false;
    }
    if (run.code_stride != 0) break;  // they lie evenly: all are alike
  }
  return true;
}

/// The pairs that read all packed runs, as bits.
uint32_t pairs_of(std::span<const SlotRun> runs, bool keys, int head_dim) {
  const std::span<const FusedPair> all = pairs_at(head_dim);
  uint32_t pairs = 0;
  for (size_t i = 0; i < all.size(); ++i) pairs |= (all[i].launch != nullptr ? 1u : 0u) << i;
  for (const SlotRun& run : runs) {
    if (!is_placed_well(run)) return 0;
    if (run.format == nullptr) continue;
    if (!is_scaled_simply(*run.format, head_dim)) return 0;
    for (size_t i = 0; i < all.size(); ++i) {
      if ((pairs >> i & 1) == 0) continue;
      const bool reads = keys ? all[i].reads_keys(*run.format) : all[i].reads_values(*run.format);
      if (!reads) pairs &= ~(1u << i);
    }
  }
  return pairs;
}

/// Joins the splits of lanes that several blocks have taken.
__global__ void __launch_bounds__(kJoinThreads) join_splits(AttendArgs args, FusedArgs fused) {
  const auto index = static_cast<int>(blockIdx.x);
  // Lanes have been counted before this kernel could start (count_step()).
  const DeviceLane lane = lane_of(args, lane_at(args, index));
  const bool is_joined = lane.fused == 0 || is_picture(lane.fused) ||
                         has_all_splits(fused, fused_splits_of(lane.slots));  // by a block
  wait_for_earlier();
  let_next_start();
  if (is_joined) return;
  const auto query = static_cast<int>(blockIdx.y);
  join_queries<kJoinAhead>(args, fused, lane, args.head_dim, index, query, query + 1);
}

}  // namespace

int fused_pairs() { return static_cast<int>(kPairs<128>.size()); }

int most_shared_bytes() {
  static const int most =
      device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, "DecodeTable::attend");
  return most;
}

FusedLane fused_lane(const PackedLane& lane, int head_dim, int most_shared, bool loses_rows) {
  FusedLane made;
  if (lane.weights_wanted || !lane.remaps.empty() || lane.slots == 0 ||
      lane.keys.size() + lane.values.size() > kMostFusedRuns || !is_aligned(lane.q, 16) ||
      !is_aligned(lane.out, 16)) {
    return made;
  }
  const uint32_t pairs =
      pairs_of(lane.keys, true, head_dim) & pairs_of(lane.values, false, head_dim);
  if (pairs == 0) return made;
  struct Query {
    const float* q;
    bool grouped;
  };
  std::array<Query, kMostSources> known{};
  for (const bool packed : {true, false}) {  // f16 rows take what packed ones have
    for (size_t i = 0; i < lane.keys.size(); ++i) {
      const SlotRun& run = lane.keys[i];
      if ((run.format != nullptr) != packed) continue;
      const bool grouped = packed && run.format->axis == ScaleAxis::kToken &&
                           run.format->group_size == kChannelGroup;
      const auto end = known.begin() + made.sources;
      const auto at = std::find_if(known.begin(), end, [&](const Query& query) {
        return query.q == run.q && (!packed || query.grouped == grouped);
      });
      if (at == known.end()) return {};
      if (at == end) known[static_cast<size_t>(made.sources++)] = {run.q, grouped};
      made.source[i] = static_cast<int8_t>(at - known.begin());
    }
  }
  const int pair = std::countr_zero(pairs);
  const FusedPair& kernel = pairs_at(head_dim)[static_cast<size_t>(pair)];
  if (loses_rows && !kernel.may_lose_rows) return {};
  if (kernel.shared_bytes(made.sources, most_groups(head_dim)) > most_shared) return {};
  made.pair = pair + 1;
  return made;
}

int fused_resident_blocks(const AttendArgs& args, int pair, int sources, Stream& stream) {
  // Of the first GPU that asks, as are most_shared_bytes(); no result depends on it.
  static const int shared =
      device_attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor, "DecodeTable::attend");
  static const int reserved =
      device_attribute(cudaDevAttrReservedSharedMemoryPerBlock, "DecodeTable::attend");
  const int groups = fused_groups(args.head_dim, args.q_per_kv);
  const FusedPair& kernel = pairs_at(args.head_dim)[static_cast<size_t>(pair - 1)];
  const int fit = shared / (kernel.shared_bytes(sources, groups) + reserved);
  return stream.queue().multiprocessors() * std::clamp(fit, 1, least_blocks(args.head_dim, groups));
}

void attend_fused(const AttendArgs& args, const FusedArgs& fused, Stream& stream) {
  pairs_at(args.head_dim)[static_cast<size_t>(fused.pair - 1)].launch(args, fused, stream);
}

void join_fused(const AttendArgs& args, const FusedArgs& fused, Stream& stream) {
  if (has_all_splits(fused, fused.splits)) return;
  launch_early("DecodeTable::attend", join_splits,
               dim3(static_cast<unsigned>(fused.lanes), static_cast<unsigned>(args.q_per_kv)),
               kJoinThreads, stream, args, fused);
}

}  // namespace kvlm::cuda::packed
