#pragma once

#include <span>
#include <string>

#include "kernels/attention.h"
#include "kernels/base/error.h"
#include "kernels/cuda/device/launch.cuh"

// The columns of prompt attention: cached rows of any format, then the prompt's own in f32.
namespace kvlm::cuda {

struct PromptRows {
  const float* k;            // (n, kv_heads, head_dim)
  const float* v;            // the same, or null where values are not read
  const KeyValueRows* past;  // (kv_heads, runs) on the GPU
  int runs;
  int64_t past_rows;
  int kv_heads;
  int head_dim;
};

/// Describes them to a kernel; the runs are uploaded. `v` may be empty.
inline PromptRows prompt_rows(ConstTensorView k, ConstTensorView v,
                              std::span<const KeyValueRows> past, Stream& stream) {
  PromptRows rows{};
  rows.k = k.as<float>();
  if (!v.empty()) rows.v = v.as<float>();
  rows.kv_heads = static_cast<int>(k.shape()[1]);
  rows.head_dim = static_cast<int>(k.shape()[2]);
  if (past.empty()) return rows;
  rows.runs = static_cast<int>(past.size()) / rows.kv_heads;
  for (const KeyValueRows& run : past.first(static_cast<size_t>(rows.runs))) {
    rows.past_rows += run.rows;
  }
  rows.past =
      reinterpret_cast<const KeyValueRows*>(stream.queue().upload(past.data(), past.size_bytes()));
  return rows;
}

/// Throws Error{kUnsupported} where attention on CUDA has no kernel for the rows' head_dim.
inline void check_head_dim(const char* op, const PromptRows& rows) {
  if (rows.head_dim <= 256) return;
  throw Error(ErrorCode::kUnsupported,
              std::string(op) + ": head_dim " + std::to_string(rows.head_dim) +
                  " is not supported on CUDA, which takes 1 to 256; use --device cpu");
}

/// Where a row lies, and its format.
struct LocatedRow {
  const std::byte* data;
  DType dtype;
};

__device__ inline int size_of(DType dtype) { return dtype == DType::kF32 ? 4 : 2; }

/// Key or value row `column` (past rows, then the prompt's own) of a kv_head.
__device__ inline LocatedRow locate(const PromptRows& rows, int kv_head, int64_t column,
                                    bool values) {
  if (column >= rows.past_rows) {
    const float* own = values ? rows.v : rows.k;
    return {reinterpret_cast<const std::byte*>(
                own + ((column - rows.past_rows) * rows.kv_heads + kv_head) * rows.head_dim),
            DType::kF32};
  }
  const KeyValueRows* run = rows.past + kv_head * rows.runs;
  while (column >= run->rows) column -= (run++)->rows;
  const std::byte* data = values ? run->values : run->keys;
  return {data + column * rows.head_dim * size_of(run->dtype), run->dtype};
}

}  // namespace kvlm::cuda
