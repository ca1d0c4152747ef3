#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "kernels/base/device.h"
#include "kernels/base/dtype.h"
#include "kernels/packed_format.h"

namespace kvlm {

enum class Rounding : uint8_t { kNearestEven, kFloor, kHalfUp };

/// The scale of ternary codes: mean |x|; mean |x| over codes that are not 0 (twn); or 1.
enum class TernaryScale : uint8_t { kMean, kNonZero, kUnit };

/// The arithmetic of one section of a packed format.
struct PackRule {
  CodeRule rule = CodeRule::kAffine;
  // kAffine: the range of a group is [Q_alpha, Q_{1-alpha}] (alpha 0: minimum and maximum), both
  // ends times kappa; codes are made in it; the stored scale and zero point then move the end
  // levels inwards by eta of the range (docs/formulas.md, "Range" and "Moved end levels").
  float alpha = 0;
  float kappa = 1;
  float eta = 0;
  /// XQuant's Algorithm 2: the zero point moves by eta of a step, not of the range.
  bool eta_of_step = false;
  Rounding rounding = Rounding::kNearestEven;
  /// kAffine at 1 or 2 bits; not 0: each code c is merged with the code s that its destination
  /// holds. Two bits from bit 2 (4 s + c) on are the code that is stored.
  uint32_t merge = 0;
  // kTernary: codes are not 0 beyond gamma * mean |x|.
  float gamma = 0.7f;
  TernaryScale ternary_scale = TernaryScale::kMean;
  /// kNormCodebook: the scale is such that what comes back has the norm of the row.
  bool corrects_norm = true;

  bool operator==(const PackRule&) const = default;
};

/// A block to be packed: `rows` dense rows of format.channels() numbers, and where its codes,
/// scales and zero points go.
struct PackJob {
  const void* x = nullptr;     ///< (rows, channels)
  int rows = 0;                ///< all of them share scales where the axis is not kToken
  std::byte* codes = nullptr;  ///< (rows, row_bytes()); null: only scales and zero points are made
  std::byte* scales = nullptr;
  std::byte* zeros = nullptr;  ///< null if no section stores them
  /// kHead: its range is that of its rows and of the job's before it together.
  bool joins_last = false;
};

/// Packs every job as `format` says, section i by rules[i]. `dtype` (f32 | f16 | bf16) is of the
/// rows of all jobs, which are packed as the floats that they are. NaN has no part in ranges and
/// means; its code is 0, that of ternary codes and codebooks the one for 0. A group whose range is
/// empty gets codes 0, scale 0 and its value as zero point; one of nothing but NaN becomes zeros.
/// Codebooks are chosen from by x / max |x| or by x / |x| in f32. Jobs are independent, but for
/// those that share a range. Ends and quantiles of ranges are the same on every device; means,
/// which signs and ternary codes are scaled by, and norms are added in f64 in another order on
/// CUDA. Asynchronous there. Throws Error{kInvalidArgument} for rules that the format cannot
/// express, kUnsupported on CUDA for rows of more than 2048 channels with scales of their own and
/// for quantiles of some channels beside signs or ternary codes of others.
void pack(const PackedFormat& format, const std::array<PackRule, 2>& rules,
          std::span<const PackJob> jobs, Stream& stream, DType dtype = DType::kF32);

}  // namespace kvlm
