#pragma once

#include <cstdint>
#include <span>

#include "kernels/base/device.h"
#include "kernels/base/host_device.h"
#include "kernels/base/tensor.h"

namespace kvlm {

/// What is chosen from a row of which a logit is NaN.
inline constexpr int32_t kNoToken = -1;

/// How the token of one row of logits is chosen, in the order of the reference: repetition penalty,
/// temperature, top-k, top-p, draw.
struct RowSampling {
  double temperature = 0;  ///< 0 or less is greedy: the first maximum
  /// Keep the k largest, and all that equal the k-th; 0 keeps all, 1 is greedy.
  int top_k = 0;
  double top_p = 1;              ///< keep the smallest set of the largest that reaches this share
  double uniform = 0;            ///< in [0, 1): decides the draw
  float repetition_penalty = 1;  ///< logits of seen ids: divided by it if positive, else multiplied
  /// (ceil(vocab / 32),) on the stream's device: bit id % 32 of word id / 32 tells that id has been
  /// seen. Null: none has, and none is marked.
  uint32_t* seen = nullptr;

  /// Needs a random number.
  VLM_HD bool draws() const noexcept { return temperature > 0 && top_k != 1; }
  VLM_HD bool penalises() const noexcept { return seen != nullptr && repetition_penalty != 1; }
  VLM_HD bool has_seen(int id) const noexcept { return (seen[id / 32] >> (id % 32) & 1u) != 0; }
  VLM_HD void mark(int id) const noexcept { seen[id / 32] |= uint32_t{1} << (id % 32); }
};

/// ids[r] = the token chosen from logits[r,:] as rows[r] says, or kNoToken; it is marked as seen.
///
///   ids     (rows,)        on the host
///   logits  (rows, vocab)  f32; destroyed
///   rows    (rows,)        on the host; no two share `seen`
///
/// A row's token depends neither on the other rows nor on the number of threads. The GPU chooses
/// the CPU's token, except that a draw rounds: the CPU adds probabilities in f64 in falling order,
/// the GPU in whole units of at most 2^-44 of the largest (for up to 2^18 ids; finer for fewer). So
/// the two may part where `uniform` or top_p meets the border between two tokens to within that.
/// Waits for the ids on CUDA, and for nothing else. Allocates nothing when as many rows of as many
/// logits, or up to 1024 on CUDA, have been drawn from before.
/// Throws Error{kInvalidArgument} on a shape, dtype or device mismatch or a number out of range.
/// Source of the penalty: Keskar et al. 2019, "CTRL", sec. 4.1; of top-p: Holtzman et al. 2020.
void sample_rows(std::span<int32_t> ids, TensorView logits, std::span<const RowSampling> rows,
                 Stream& stream);

/// The same of one row on the host, by the calling thread; marks nothing.
///
///   logits     (vocab,) penalised, and if drawn from, overwritten
///   workspace  (vocab,) if row.draws()
int32_t sample_row(std::span<float> logits, const RowSampling& row, std::span<int32_t> workspace);

}  // namespace kvlm
