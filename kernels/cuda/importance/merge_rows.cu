#include <cstddef>
#include <vector>

#include "kernels/cpu/merge_rows.h"
#include "kernels/cuda/device/launch.cuh"
#include "kernels/cuda/importance/merge_rows.h"

namespace kvlm::cuda {

namespace {

constexpr int kThreads = 128;

/// In the order of the channels, as on the CPU.
__device__ double dot(const float* a, const float* b, int n) {
  double sum = 0;
  for (int i = 0; i < n; ++i) sum += static_cast<double>(a[i]) * static_cast<double>(b[i]);
  return sum;
}

__global__ void find_norms(const float* keys, const int32_t* kept, int count, int dim,
                           double* norms) {
  const int i = static_cast<int>(blockIdx.x) * kThreads + static_cast<int>(threadIdx.x);
  if (i >= count) return;
  const float* key = keys + static_cast<int64_t>(kept[i]) * dim;
  norms[i] = fmax(sqrt(dot(key, key, dim)), 1e-30);
}

/// A block finds the kept row with the largest cosine for a dropped one.
__global__ void __launch_bounds__(kThreads)
    find_nearest(const float* keys, const int32_t* kept, const double* norms, int count, int dim,
                 int32_t* groups) {
  __shared__ double cosines[kThreads];
  __shared__ int32_t places[kThreads];
  extern __shared__ float own[];
  const int64_t row = blockIdx.x;
  if (groups[row] >= 0) return;
  for (int i = static_cast<int>(threadIdx.x); i < dim; i += kThreads) own[i] = keys[row * dim + i];
  __syncthreads();
  double best = -2;
  int32_t place = 0;
  for (int i = static_cast<int>(threadIdx.x); i < count; i += kThreads) {
    const double cosine = dot(keys + static_cast<int64_t>(kept[i]) * dim, own, dim) / norms[i];
    if (cosine > best) {
      best = cosine;
      place = i;
    }
  }
  cosines[threadIdx.x] = best;
  places[threadIdx.x] = place;
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int i = 1; i < kThreads; ++i) {
    if (cosines[i] > best || (cosines[i] == best && places[i] < place)) {
      best = cosines[i];
      place = places[i];
    }
  }
  groups[row] = place;
}

/// A block sums the rows of a group, a thread a channel. Groups of rows [first_anchor, last_anchor]
/// of `kept` lie between the kept rows before and behind theirs, but for both ends.
__global__ void mean_of_groups(const int32_t* groups, const int32_t* kept, int first_anchor,
                               int last_anchor, int rows, int dim, const float* x, float* out) {
  const auto group = static_cast<int32_t>(blockIdx.x);
  const bool first = group <= first_anchor;
  const bool last = group >= last_anchor;
  const int begin = first ? 0 : kept[group - 1] + 1;
  const int end = last ? rows : kept[group + 1];
  for (int i = static_cast<int>(threadIdx.x); i < dim; i += kThreads) {
    double sum = 0;
    double members = 0;
    for (int row = begin; row < end; ++row) {
      if (groups[row] != group) continue;
      members += 1;
      sum += static_cast<double>(x[static_cast<int64_t>(row) * dim + i]);
    }
    out[static_cast<int64_t>(group) * dim + i] = static_cast<float>(sum / members);
  }
}

/// Groups rows by their keys: `groups` of kept rows are known. `norms` is workspace.
void group_by_keys(const RowMerge& merge, const int32_t* kept, double* norms, int32_t* groups,
                   Stream& stream) {
  const auto count = static_cast<int>(merge.kept.size());
  find_norms<<<static_cast<unsigned>(ceil_div(count, kThreads)), kThreads, 0, native(stream)>>>(
      merge.keys, kept, count, merge.dim, norms);
  find_nearest<<<static_cast<unsigned>(merge.rows), kThreads,
                 static_cast<size_t>(merge.dim) * sizeof(float), native(stream)>>>(
      merge.keys, kept, norms, count, merge.dim, groups);
}

}  // namespace

void merge_rows(MergeRule rule, const RowMerge& merge, Stream& stream) {
  Queue& queue = stream.queue();
  const std::vector<int32_t> placed = cpu::groups_by_position(rule, merge);
  const size_t bytes = placed.size() * sizeof(int32_t);
  const size_t norms_at = (bytes + alignof(double) - 1) / alignof(double) * alignof(double);
  std::byte* scratch = queue.scratch(kMergeGroups, norms_at + merge.kept.size() * sizeof(double));
  auto* groups = reinterpret_cast<int32_t*>(scratch);
  queue.copy(groups, true, placed.data(), false, bytes);
  const auto count = static_cast<int>(merge.kept.size());
  const auto* kept =
      reinterpret_cast<const int32_t*>(queue.upload(merge.kept.data(), merge.kept.size_bytes()));
  if (rule == MergeRule::kFeature) {
    group_by_keys(merge, kept, reinterpret_cast<double*>(scratch + norms_at), groups, stream);
  }
  const bool by_position = rule == MergeRule::kPosition;
  const int first_anchor = by_position ? merge.lone_first : count;
  const int last_anchor = by_position ? count - 1 - merge.lone_last : -1;
  for (const bool keys : {true, false}) {
    mean_of_groups<<<static_cast<unsigned>(count), kThreads, 0, native(stream)>>>(
        groups, kept, first_anchor, last_anchor, merge.rows, merge.dim,
        keys ? merge.keys : merge.values, keys ? merge.merged_keys : merge.merged_values);
  }
  check_launch("merge_rows");
}

}  // namespace kvlm::cuda
