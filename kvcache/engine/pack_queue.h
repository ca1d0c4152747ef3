#pragma once

#include <algorithm>
#include <cassert>
#include <cstddef>
#include <vector>

#include "kernels/pack.h"
#include "kvcache/buffer/kv_buffer.h"

namespace kvlm {

/// Contiguous tokens of a KV head: (rows, head_dim) of `dtype`, on the cache's device.
struct DenseRows {
  const void* data = nullptr;
  DType dtype = DType::kF32;

  /// The tokens from `first` on; `dim` is head_dim.
  DenseRows from(size_t first, size_t dim) const noexcept {
    return {static_cast<const std::byte*>(data) + first * dim * dtype_bytes(dtype), dtype};
  }
  const float* floats() const noexcept {
    assert(dtype == DType::kF32);
    return static_cast<const float*>(data);
  }
};

/// Splits `rows` rows x of `row_bytes` into new blocks of `buffer`, and calls body(job) for each.
template <class Body>
void for_pack_jobs(KvBuffer& buffer, const void* x, size_t row_bytes, int rows, const Body& body) {
  const int block = buffer.layout().once ? rows : buffer.layout().block_rows();
  const auto* from = static_cast<const std::byte*>(x);
  while (rows > 0) {
    PackJob job = buffer.blocks.push(std::min(rows, block));
    job.x = from;
    body(job);
    from += static_cast<size_t>(job.rows) * row_bytes;
    rows -= job.rows;
  }
}

/// A queue of tokens to pack. Those with the same packing are packed in one call.
class PackQueue {
 public:
  /// Reserves memory for jobs of one packing.
  void reserve(size_t jobs) {
    if (batches_.empty()) batches_.emplace_back();
    batches_[0].jobs.reserve(jobs);
  }
  /// Queues `rows` rows x for new blocks of `buffer`; `packing` must live until run(). With
  /// `joins_last` they share a range with the previous job.
  void add(const Packing& packing, KvBuffer& buffer, const DenseRows& x, int rows,
           bool joins_last = false) {
    if (rows == 0) return;
    Batch& batch = batch_of(packing, x.dtype);
    const size_t row_bytes = static_cast<size_t>(buffer.layout().head_dim) * dtype_bytes(x.dtype);
    for_pack_jobs(buffer, x.data, row_bytes, rows, [&](const PackJob& job) {
      batch.jobs.push_back(job);
      batch.jobs.back().joins_last = joins_last;
    });
  }
  /// Packs and clears the queue, which is cleared even if packing throws. Packings are in the order
  /// of their first rows: a layer's codes are there before a later layer merges its own with them.
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
  /// Clears the queue after a failed step.
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
