#pragma once

#include <type_traits>

#include "kernels/codecs/list.h"
#include "kernels/cuda/attend/fused_attention.h"

// The kernels of two passes, and which segments each reads. instances.cmake lists them;
// fused_table.h has those of one pass. any_format.cu reads the segments that no listed kernel does.
namespace kvlm::cuda::packed {

/// DeviceSegment::kernel of segments that any_format.cu reads.
constexpr int kAnyKernel = 31;

/// Arguments of the launch of one kernel, besides AttendArgs and FusedArgs.
struct PassArgs {
  int kernel;    // DeviceSegment::kernel
  int blocks;    // that share the splits of a KV head
  int sources;   // most query bases of a KV head
  int channels;  // most of a packed token
};

/// Calls with(groups) for a block's groups of queries as a constant: 1, or most_groups().
template <int kDim, class With>
auto with_groups_of(int groups, const With& with) {
  if (groups == 1) return with(std::integral_constant<int, 1>{});
  return with(std::integral_constant<int, most_groups(kDim)>{});
}

/// Listed kernels; two_pass.cuh has their functions.
template <class K, Scaled kKeys>
struct KeyKernel {
  static void launch(const AttendArgs& args, const FusedArgs& fused, const PassArgs& pass,
                     dim3 grid, int groups, Stream& stream);
  static int shared_bytes(int sources, int groups);
};
template <class V, Scaled kValues>
struct ValueKernel {
  static void launch(const AttendArgs& args, const FusedArgs& fused, const PassArgs& pass,
                     dim3 grid, int groups, Stream& stream);
  static int shared_bytes(int sources, int groups);
};

/// The kernel that reads a segment of keys, or of values, and f16 tokens before or after it.
/// kAnyKernel: no listed kernel does.
///   sources  query bases of the KV head
int pass_kernel(const SlotSegment& segment, bool keys, int head_dim, int sources, int most_shared);
/// A kernel that reads f16 tokens.
int row_kernel(bool keys, int head_dim);

/// Launches kernel `pass.kernel`: stores the scores of its keys, or adds its values.
void launch_pass(bool keys, const AttendArgs& args, const FusedArgs& fused, PassArgs pass,
                 Stream& stream);

}  // namespace kvlm::cuda::packed
