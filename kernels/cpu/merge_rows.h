#pragma once

#include <vector>

#include "kernels/merge_rows.h"

// The CPU's implementation of kernels/merge_rows.h, which has checked the arguments.
namespace kvlm::cpu {

void merge_rows(MergeRule rule, const RowMerge& merge);

/// (rows,) which kept row each row joins if nearness of position decides, itself if it is kept; -1
/// for a dropped row that joins none or under kNone, and under kFeature where keys decide.
std::vector<int32_t> groups_by_position(MergeRule rule, const RowMerge& merge);

}  // namespace kvlm::cpu
