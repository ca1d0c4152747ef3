#include <attend_instances.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>

#include "kernels/cuda/attend/format_choice.h"
#include "kernels/cuda/attend/fused_attention.h"
#include "kernels/cuda/attend/fused_head.cuh"
#include "kernels/cuda/attend/fused_join.cuh"
#include "kernels/cuda/attend/fused_table.h"
#include "kernels/cuda/attend/image_choice.h"
#include "kernels/cuda/attend/score_places.cuh"

// The table of one-pass kernels (fused_kernel.cuh), the choice among them, their launches, and the
// kernel that merges splits.
namespace kvlm::cuda::packed {

namespace {

constexpr int kMostSources = 3;
constexpr int kJoinThreads = 32;

/// A kernel, and which formats it reads; null: none for this head_dim.
struct FusedPair {
  bool (*reads_keys)(const PackedFormat& format) = nullptr;
  bool (*reads_values)(const PackedFormat& format) = nullptr;
  void (*launch)(const AttendArgs& args, const FusedArgs& fused, Stream& stream) = nullptr;
  int (*shared_bytes)(int sources, int groups) = nullptr;
  bool may_lose_rows = false;
};

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
constexpr std::array kPairs{KVLM_FusedKernel(KVLM_PAIR)};
#undef KVLM_PAIR
static_assert(kPairs<128>.size() < kFirstImage);  // image kernels come after

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

/// The pairs that read all packed segments, as bits.
uint32_t pairs_of(std::span<const SlotSegment> segments, bool keys, int head_dim) {
  const std::span<const FusedPair> all = pairs_at(head_dim);
  uint32_t pairs = 0;
  for (size_t i = 0; i < all.size(); ++i) pairs |= (all[i].launch != nullptr ? 1u : 0u) << i;
  for (const SlotSegment& segment : segments) {
    if (segment.selection != nullptr || !is_placed_well(segment)) return 0;
    if (segment.format == nullptr) continue;
    if (!is_scaled_simply(*segment.format, head_dim)) return 0;
    for (size_t i = 0; i < all.size(); ++i) {
      if ((pairs >> i & 1) == 0) continue;
      const bool reads =
          keys ? all[i].reads_keys(*segment.format) : all[i].reads_values(*segment.format);
      if (!reads) pairs &= ~(1u << i);
    }
  }
  return pairs;
}

/// Merges the splits of KV heads that several blocks, or two passes, have processed.
__global__ void __launch_bounds__(kJoinThreads)
    join_splits(AttendArgs args, FusedArgs fused, bool early) {
  if (early) let_next_start();
  const auto index = static_cast<int>(blockIdx.x);
  // count_step() has counted KV heads before this kernel could start.
  const DeviceHead head = head_of(args, head_at(args, index));
  const bool two_passes = head.fused == 0;
  const bool is_joined =
      is_image(head.fused) ||
      (!two_passes && has_all_splits(fused, fused_splits_of(head.slots)));  // by a block
  const SplitPlaces places(args, fused, index);
  wait_for_earlier();
  if (!early) let_next_start();
  if (is_joined) return;
  const auto query = static_cast<int>(blockIdx.y);
  join_any_queries<kJoinAhead>(args, fused, places, head.out, index, query, query + 1);
  if (two_passes && threadIdx.x == 0) count_clamped(args, head, index, query);
}

}  // namespace

int fused_pairs() { return static_cast<int>(kPairs<128>.size()); }

int most_shared_bytes() {
  static const int most =
      device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, "DecodeTable::attend");
  return most;
}

bool find_sources(std::span<const SlotSegment> keys, FusedHead& made) {
  struct Query {
    const float* q;
    bool grouped;
  };
  std::array<Query, kMostSources> known{};
  for (const bool packed : {true, false}) {  // f16 tokens reuse a basis of packed ones
    for (size_t i = 0; i < keys.size(); ++i) {
      const SlotSegment& segment = keys[i];
      if ((segment.format != nullptr) != packed) continue;
      const bool grouped = packed && has_groups(*segment.format);
      const auto end = known.begin() + made.sources;
      const auto at = std::find_if(known.begin(), end, [&](const Query& query) {
        return query.q == segment.q && (!packed || query.grouped == grouped);
      });
      if (at == known.end()) return false;
      if (at == end) known[static_cast<size_t>(made.sources++)] = {segment.q, grouped};
      made.source[i] = static_cast<int8_t>(at - known.begin());
    }
  }
  return true;
}

FusedHead fused_head(const PackedHead& head, int head_dim, int most_shared, bool loses_rows) {
  FusedHead made;
  if (!head.remaps.empty() || head.slots == 0 ||
      head.keys.size() + head.values.size() > kMostFusedSegments || !is_aligned(head.q, 16) ||
      !is_aligned(head.out, 16)) {
    return made;
  }
  const uint32_t pairs =
      pairs_of(head.keys, true, head_dim) & pairs_of(head.values, false, head_dim);
  if (pairs == 0) return made;
  if (!find_sources(head.keys, made)) return {};
  const int pair = std::countr_zero(pairs);
  const FusedPair& kernel = pairs_at(head_dim)[static_cast<size_t>(pair)];
  if ((loses_rows || head.weights_wanted) && !kernel.may_lose_rows) return {};
  if (kernel.shared_bytes(made.sources, most_groups(head_dim)) > most_shared) return {};
  made.pair = pair + 1;
  return made;
}

int resident_blocks(int bytes, int head_dim, int groups, Stream& stream) {
  // Of the GPU of the first call, as most_shared_bytes(); no result depends on it.
  static const int shared =
      device_attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor, "DecodeTable::attend");
  static const int reserved =
      device_attribute(cudaDevAttrReservedSharedMemoryPerBlock, "DecodeTable::attend");
  const int fit = shared / (bytes + reserved);
  return stream.queue().multiprocessors() * std::clamp(fit, 1, least_blocks(head_dim, groups));
}

int fused_resident_blocks(const AttendArgs& args, int pair, int sources, Stream& stream) {
  const int groups = fused_groups(args.head_dim, args.q_per_kv);
  const FusedPair& kernel = pairs_at(args.head_dim)[static_cast<size_t>(pair - 1)];
  return resident_blocks(kernel.shared_bytes(sources, groups), args.head_dim, groups, stream);
}

void attend_fused(const AttendArgs& args, const FusedArgs& fused, Stream& stream) {
  pairs_at(args.head_dim)[static_cast<size_t>(fused.pair - 1)].launch(args, fused, stream);
}

void join_fused(const AttendArgs& args, const FusedArgs& fused, bool early, Stream& stream) {
  launch_early("DecodeTable::attend", join_splits,
               dim3(static_cast<unsigned>(fused.heads), static_cast<unsigned>(args.q_per_kv)),
               kJoinThreads, stream, args, fused, early);
}

}  // namespace kvlm::cuda::packed
