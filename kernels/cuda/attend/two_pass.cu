#include <attend_instances.h>

#include <algorithm>
#include <array>
#include <span>

#include "kernels/cuda/attend/any_format.h"
#include "kernels/cuda/attend/format_choice.h"
#include "kernels/cuda/attend/fused_splits.h"
#include "kernels/cuda/attend/two_pass.h"

// The tables of two_pass.cuh's kernels, the choice among them, and their launches.
namespace kvlm::cuda::packed {

namespace {

/// A kernel of one pass, and which formats it reads; null: none for this head_dim.
struct PassKernel {
  bool (*reads)(const PackedFormat& format) = nullptr;
  void (*launch)(const AttendArgs& args, const FusedArgs& fused, const PassArgs& pass, dim3 grid,
                 int groups, Stream& stream) = nullptr;
  int (*shared_bytes)(int sources, int groups) = nullptr;
};

template <int kDim, template <class, Scaled> class Kernel, template <int> class C, Scaled kScaled,
          int... kServed>
constexpr PassKernel kernel_at() {
  PassKernel made;
  if constexpr (((kDim == kServed) || ...)) {
    using Of = Kernel<C<kDim>, kScaled>;
    made = {is_read_by<C<kDim>, kScaled>, Of::launch, Of::shared_bytes};
  }
  return made;
}

#define KVLM_KEYS(C, SCALED, ...) \
  kernel_at<kDim, KeyKernel, codecs::C, Scaled::SCALED, __VA_ARGS__>(),
#define KVLM_VALUES(C, SCALED, ...) \
  kernel_at<kDim, ValueKernel, codecs::C, Scaled::SCALED, __VA_ARGS__>(),
template <int kDim>
constexpr std::array kKeyKernels{KVLM_KeyKernel(KVLM_KEYS)};
template <int kDim>
constexpr std::array kValueKernels{KVLM_ValueKernel(KVLM_VALUES)};
#undef KVLM_KEYS
#undef KVLM_VALUES
static_assert(kKeyKernels<128>.size() <= kAnyKernel && kValueKernels<128>.size() <= kAnyKernel);

template <int kDim>
std::span<const PassKernel> kernels_of(bool keys) {
  if (keys) return kKeyKernels<kDim>;
  return kValueKernels<kDim>;
}

std::span<const PassKernel> kernels_at(bool keys, int head_dim) {
  switch (head_dim) {
    case 64:
      return kernels_of<64>(keys);
    case 80:
      return kernels_of<80>(keys);
    case 96:
      return kernels_of<96>(keys);
    case 128:
      return kernels_of<128>(keys);
    case 256:
      return kernels_of<256>(keys);
    default:
      return {};
  }
}

int blocks_of_head(const PassKernel& kernel, const AttendArgs& args, const FusedArgs& fused,
                   const PassArgs& pass, int groups, Stream& stream) {
  const int bytes = kernel.shared_bytes(pass.sources, groups);
  const int resident = resident_blocks(bytes, args.head_dim, groups, stream);
  const int64_t heads = int64_t{fused.heads} * fused_query_blocks(args.head_dim, args.q_per_kv);
  return fused_blocks_of_head(heads, fused.head_splits, resident);
}

}  // namespace

int pass_kernel(const SlotSegment& segment, bool keys, int head_dim, int sources, int most_shared) {
  if (!is_placed_well(segment) || !is_scaled_simply(*segment.format, head_dim)) return kAnyKernel;
  const std::span<const PassKernel> all = kernels_at(keys, head_dim);
  for (size_t i = 0; i < all.size(); ++i) {
    if (all[i].launch == nullptr || !all[i].reads(*segment.format)) continue;
    if (all[i].shared_bytes(sources, most_groups(head_dim)) > most_shared) continue;
    return static_cast<int>(i);
  }
  return kAnyKernel;
}

int row_kernel(bool keys, int head_dim) {
  const std::span<const PassKernel> all = kernels_at(keys, head_dim);
  const auto at =
      std::ranges::find_if(all, [](const PassKernel& kernel) { return kernel.launch != nullptr; });
  return at == all.end() ? kAnyKernel : static_cast<int>(at - all.begin());
}

void launch_pass(bool keys, const AttendArgs& args, const FusedArgs& fused, PassArgs pass,
                 Stream& stream) {
  if (pass.kernel == kAnyKernel) return launch_any_pass(keys, args, fused, pass.channels, stream);
  const auto at = static_cast<size_t>(pass.kernel);
  const PassKernel& kernel = kernels_at(keys, args.head_dim)[at];
  const int groups = fused_groups(args.head_dim, args.q_per_kv);
  pass.blocks = blocks_of_head(kernel, args, fused, pass, groups, stream);
  const dim3 grid(static_cast<unsigned>(fused.heads), static_cast<unsigned>(pass.blocks),
                  static_cast<unsigned>(fused_query_blocks(args.head_dim, args.q_per_kv)));
  kernel.launch(args, fused, pass, grid, groups, stream);
}

}  // namespace kvlm::cuda::packed
