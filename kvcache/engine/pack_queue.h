#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

#include "kernels/pack.h"
#include "kvcache/plane.h"

namespace kvlm {

/// Calls body(job) for the jobs that pack `rows` rows x into new blocks of `plane`.
template <class Body>
void for_pack_jobs(Plane& plane, const float* x, int rows, const Body& body) {
  const int block = plane.layout().once ? rows : plane.layout().block_rows();
  const auto dim = static_cast<size_t>(plane.layout().head_dim);
  while (rows > 0) {
    PackJob job = plane.push_packed(std::min(rows, block));
    job.x = x;
    body(job);
    x += static_cast<size_t>(job.rows) * dim;
    rows -= job.rows;
  }
}

/// Rows of one packing that wait to be packed in one call.
class PackQueue {
 public:
  void reserve(size_t jobs) { jobs_.reserve(jobs); }
  /// Adds `rows` rows x, which go to new blocks of `plane`.
  void add(Plane& plane, const float* x, int rows) {
    for_pack_jobs(plane, x, rows, [&](const PackJob& job) { jobs_.push_back(job); });
  }
  /// Packs what was added as `plan` says, and forgets it.
  void run(const PartPlan& plan, Stream& stream) {
    if (!jobs_.empty()) pack(plan.format, plan.rules, jobs_, stream);
    jobs_.clear();
  }
  /// Forgets what a step that has failed has left.
  void clear() noexcept { jobs_.clear(); }

 private:
  std::vector<PackJob> jobs_;
};

}  // namespace kvlm
