#pragma once

#include <type_traits>

#include "kernels/codecs/list.h"
#include "kernels/cuda/attend/fused_attention.h"

// The kernels that serve lanes in two passes, and which of them reads what. instances.cmake lists
// them.
namespace kvlm::cuda::packed {

/// DeviceRun::kernel of runs that any_format.cu reads.
constexpr int kAnyKernel = 31;

/// What a launch of one pass is told beside what it shares with the layer's others.
struct PassArgs {
  int kernel;    // DeviceRun::kernel
  int blocks;    // that share the splits of a lane
  int sources;   // of queries, the most of a lane
  int channels;  // of a packed row, at most
};

/// How many groups of queries a block serves, as a constant: 1, or most_groups().
template <int kDim, class With>
auto with_groups_of(int groups, const With& with) {
  if (groups == 1) return with(std::integral_constant<int, 1>{});
  return with(std::integral_constant<int, most_groups(kDim)>{});
}

/// Kernels of the tables; two_pass.cuh has their functions.
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

/// The kernel that reads a run of keys, or of values, and f16 rows in front of or behind it;
/// kAnyKernel if none of the tables does.
///   sources  of queries that the lane has
int pass_kernel(const SlotRun& run, bool keys, int head_dim, int sources, int most_shared);
/// One that reads f16 rows.
int row_kernel(bool keys, int head_dim);

/// Stores the scores of the runs of keys that kernel `pass.kernel` reads, or adds those of values.
void launch_pass(bool keys, const AttendArgs& args, const FusedArgs& fused, PassArgs pass,
                 Stream& stream);

}  // namespace kvlm::cuda::packed
