#include "kernels/merge_rows.h"

#include <algorithm>
#include <functional>

#include "kernels/check.h"
#include "kernels/cpu/merge_rows.h"
#include "kernels/cuda/importance/merge_rows.h"

namespace kvlm {

void merge_rows(MergeRule rule, const RowMerge& merge, Stream& stream) {
  const bool ascending = std::adjacent_find(merge.kept.begin(), merge.kept.end(),
                                            std::greater_equal<>()) == merge.kept.end();
  if (!ascending || merge.keys == nullptr || merge.values == nullptr ||
      merge.merged_keys == nullptr || merge.merged_values == nullptr || merge.kept.empty() ||
      merge.kept.front() < 0 || merge.kept.back() >= merge.rows || merge.dim < 1) {
    check::refuse(
        "merge_rows: {} of {} rows of {} channels are kept; kept must be a non-empty ascending "
        "list of row indices below the number of rows, and x not null",
        merge.kept.size(), merge.rows, merge.dim);
  }
  if (merge.lone_first < 0 || merge.lone_last < 0 ||
      static_cast<size_t>(merge.lone_first) + static_cast<size_t>(merge.lone_last) >
          merge.kept.size() ||
      (rule == MergeRule::kFeature && merge.lone_first + merge.lone_last > 0)) {
    check::refuse(
        "merge_rows: of {} kept indices the first {} and the last {} take no merged rows; expected "
        "at most as many as there are, and none if keys decide",
        merge.kept.size(), merge.lone_first, merge.lone_last);
  }
  if (check::on_gpu(stream)) return cuda::merge_rows(rule, merge, stream);
  cpu::merge_rows(rule, merge);
}

}  // namespace kvlm
