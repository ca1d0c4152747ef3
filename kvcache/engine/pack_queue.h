#pragma once

#include <algorithm>
#include <cassert>
#include <cstddef>
#include <vector>

#include "kernels/pack.h"
#include "kvcache/plane/plane.h"

namespace kvlm {

/// Rows of a KV head that lie side by side: (rows, head_dim) of `dtype`, on the cache's device.
struct DenseRows {
  const void* data = nullptr;
  DType dtype = DType::kF32;

  /// Those from row `first` on, of `dim` numbers each.
  DenseRows from(size_t first, size_t dim) const noexcept {
    return {static_cast<const std::byte*>(data) + first * dim * dtype_bytes(dtype), dtype};
  }
  const float* floats() const noexcept {
    assert(dtype == DType::kF32);
    return static_cast<const float*>(data);
  }
};

/// Calls body(job) for the jobs that pack `rows` rows x of `row_bytes` into new blocks of `plane`.
template <class Body>
void for_pack_jobs(Plane& plane, const void* x, size_t row_bytes, int rows, const Body& body) {
  const int block = plane.layout().once ? rows : plane.layout().block_rows();
  const auto* from = static_cast<const std::byte*>(x);
  while (rows > 0) {
    PackJob job = plane.blocks.push(std::min(rows, block));
    job.x = from;
    body(job);
    from += static_cast<size_t>(job.rows) * row_bytes;
    rows -= job.rows;
  }
}

/// Rows that wait to be packed, those that are packed alike in one call.
class PackQueue {
 public:
  /// Makes room for jobs of one packing.
  void reserve(size_t jobs) {
    if (batches_.empty()) batches_.emplace_back();
    batches_[0].jobs.reserve(jobs);
  }
  /// Adds `rows` rows x, which go to new blocks of `plane` as `packing` says, which must live until
  /// run(). With `joins_last` they share a range with those that were added before.
  void add(const Packing& packing, Plane& plane, const DenseRows& x, int rows,
           bool joins_last = false) {
    if (rows == 0) return;
    Batch& batch = batch_of(packing, x.dtype);
    const size_t row_bytes = static_cast<size_t>(plane.layout().head_dim) * dtype_bytes(x.dtype);
    for_pack_jobs(plane, x.data, row_bytes, rows, [&](const PackJob& job) {
      batch.jobs.push_back(job);
      batch.jobs.back().joins_last = joins_last;
    });
  }
  /// Packs what was added, and forgets it, also if that fails.
  void run(Stream& stream) {
    try {
      for (const Batch& batch : batches_) {
        if (batch.jobs.empty()) continue;
        pack(batch.packing->format, batch.packing->rules, batch.jobs, stream, batch.dtype);
      }
    } catch (...) {
      clear();
      throw;
    }
    clear();
  }
  /// Forgets what a step that has failed has left.
  void clear() noexcept {
    for (Batch& batch : batches_) batch.jobs.clear();
  }

 private:
  struct Batch {
    const Packing* packing = nullptr;
    DType dtype = DType::kF32;
    std::vector<PackJob> jobs;
  };

  Batch& batch_of(const Packing& packing, DType dtype) {
    const auto takes = [&](const Batch& batch) {
      return batch.jobs.empty() || (batch.dtype == dtype && batch.packing->rules == packing.rules &&
                                    batch.packing->format == packing.format);
    };
    auto found = std::find_if(batches_.begin(), batches_.end(), takes);
    if (found == batches_.end()) found = batches_.emplace(found);
    if (found->jobs.empty()) found->packing = &packing, found->dtype = dtype;
    return *found;
  }

  std::vector<Batch> batches_;
};

}  // namespace kvlm
