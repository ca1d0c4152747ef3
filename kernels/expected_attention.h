#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kernels/base/tensor.h"
#include "kernels/row_scores.h"

namespace kvlm {

/// How the queries that will follow a prompt are guessed from those of its rows.
struct FutureQueries {
  int first_row = 0;       ///< rows before it neither ask nor get: sinks are like no other rows
  int positions = 512;     ///< behind the prompt, over which the queries are averaged
  bool covariance = true;  ///< how queries vary counts, not their mean alone
  float scale = 1;         ///< applied to q . k
  /// (rotary_dim / 2,) inverse frequencies of RoPE, which pairs channel f with f + rotary_dim / 2;
  /// row i stands at position i. Empty: queries are taken as they are, wherever they stand.
  std::span<const float> frequencies = {};
};

/// The attention that each key can expect from a query of the future, were queries normal:
///
///   weights[h, j] = mean over the q_per_kv query heads of softmax_j(scale mu . k_hj
///                   + scale^2 / 2 k_hj^T Sigma k_hj), j in [first_row, n); 0 before
///   mu, Sigma     = R m, R S R^T of a query head: m and S are the mean and the covariance
///                   (divided by the number of rows) of its queries [first_row, n) before RoPE; R
///                   is the mean of the rotations to positions n .. n + positions - 1
///
///   q        (n, q_heads, head_dim)  f32 (CUDA also f16 | bf16), after RoPE
///   keys     (kv_heads,) of n rows each, after RoPE
///   weights  (kv_heads, n) on the host; each head's sum to 1
///
/// Products in f32, sums over rows in f64 by tiles, in an order that depends on the shapes only.
/// Waits for the result on CUDA. Throws Error{kInvalidArgument} on a shape, dtype or device
/// mismatch.
/// Source: Devoto et al. 2025, "Expected Attention". That rotations are averaged before they are
/// applied to the covariance, which leaves out how they scatter it, is published.
void expected_attention(const FutureQueries& future, ConstTensorView q,
                        std::span<const StoredRows> keys, std::span<double> weights,
                        Stream& stream);

/// For the implementations: the mean cosine of each frequency over the positions from
/// `first_position` on, then the mean sines, (2, frequencies).
std::vector<double> mean_rotation(const FutureQueries& future, int64_t first_position);

}  // namespace kvlm
