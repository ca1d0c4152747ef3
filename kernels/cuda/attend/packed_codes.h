#pragma once

#include "kernels/cuda/attend/attend_args.cuh"

// Decode attention on the tensor cores: rows of 128 channels of 1, 2, 4 or 8-bit codes, or of f16.
namespace kvlm::cuda::packed {

/// The kernels of this file, by what they read.
enum CodeKernel : int {
  kCodes1,
  kCodes2,
  kCodes4,
  kCodes8,
  kHalfRows,
  // Keys of 64 channels of 2 bits, then 64 of 1 bit (VidKV).
  kCodes21,
  // Values of ternary digits, five to a byte.
  kTrits,
  // Values with one scale for all channels of a token.
  kToken1,
  kToken2,
  kToken4,
  kToken8,
  // Values with scales for each 32 channels of a token.
  kGrouped1,
  kGrouped2,
  kGrouped4,
  kGrouped8,
  // Values of long blocks that have scales in common, or none.
  kLong1,
  kLong2,
  kLong4,
  kLong8,
  kLongRows,
  kCodeKernels
};

/// Which kernel serves the run as keys or as values, -1 for none. Of blocks that lie evenly only
/// the first and the last are looked at.
///   in_order  weights lie in the order of the lane's runs of values (DeviceLane::in_run_order)
int code_kernel(const SlotRun& run, bool keys, bool in_order, int head_dim);

/// The runs that one launch serves, and the number of splits of the longest of them.
struct Splits {
  unsigned runs = 0;
  unsigned most = 0;
};

/// Scores of the keys of the runs in args.served, or partial sums of their values.
void score_codes(CodeKernel kernel, const AttendArgs& args, Splits splits, Stream& stream);
void add_codes(CodeKernel kernel, const AttendArgs& args, Splits splits, Stream& stream);
/// add_codes() of kLong1 to kLongRows.
void add_long_blocks(CodeKernel kernel, const AttendArgs& args, Splits splits, Stream& stream);

}  // namespace kvlm::cuda::packed
