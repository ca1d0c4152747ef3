#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "kernels/base/device.h"
#include "kernels/base/dtype.h"

namespace kvlm {

/// out[i,:] = row i, widened.
///
///   rows  each (dim,) of `dtype` = f32 | f16 | bf16
///   out   (rows, dim) f32
///
/// All on the stream's device. Asynchronous on CUDA.
void widen_rows(std::span<const std::byte* const> rows, DType dtype, int dim, float* out,
                Stream& stream);

/// Rows of an array by their numbers, none of which is negative.
struct ListedRows {
  const std::byte* from = nullptr;  ///< (..., dim) the array
  std::byte* to = nullptr;          ///< (numbers, dim)
  std::span<const int32_t> numbers;
};

/// to[i,:] = from[numbers[i],:] of every list. Lists of the same numbers next to each other are
/// sent to a GPU once.
///
///   dtype  of the arrays: f32 | f16 | bf16
///   to     of what they become: the same, or f32
///
/// All on the stream's device. Asynchronous on CUDA. Throws Error{kInvalidArgument} for a list
/// without memory and for other types.
void gather_listed(std::span<const ListedRows> lists, DType dtype, int dim, DType to,
                   Stream& stream);

/// Bytes and where they go.
struct ByteRange {
  const std::byte* from = nullptr;
  std::byte* to = nullptr;
  size_t bytes = 0;
};

/// Copies ranges that do not overlap, on the stream's device. Asynchronous on CUDA. Throws
/// Error{kInvalidArgument} for a range without memory.
void copy_ranges(std::span<const ByteRange> ranges, Stream& stream);

/// Row i = x[i,:], rounded to `dtype`, ties to even: widen_rows() the other way.
void narrow_rows(std::span<std::byte* const> rows, DType dtype, int dim, const float* x,
                 Stream& stream);

/// A row that was taken out of a ring: those on one side of it move a place towards it.
struct RowGap {
  std::byte* ring = nullptr;
  size_t row_bytes = 0;  ///< a multiple of 4 or 2
  int ring_rows = 0;     ///< places of the ring
  int first = 0;         ///< place of row 0
  int rows = 0;          ///< before the row was taken out
  int gap = 0;           ///< which row it was
  /// Rows before it move up, so that row 0 is in the place after `first` then; else rows behind it
  /// move down.
  bool from_front = false;
};

/// Closes the gaps, of which no two may lie in one ring. Asynchronous on CUDA. Throws
/// Error{kInvalidArgument} for a row that is not in its ring.
void close_gaps(std::span<const RowGap> gaps, Stream& stream);

/// A rotated row and where it goes.
struct TurnedRow {
  const float* from = nullptr;  ///< (dim,)
  std::byte* to = nullptr;      ///< (dim,) of a float type
};

/// Cosines, then sines of `by * frequencies[i]` radians: (2 frequencies.size(),). On the host for
/// both devices, since sines differ between libraries.
void find_waves(std::span<const float> frequencies, double by, std::span<double> waves);

/// Rotates pairs (x_i, x_{i + half}) of every row by `by * frequencies[i]` radians, half =
/// frequencies.size(), in double, and rounds to `dtype`; channels behind 2 half stay as they are in
/// `to`. Source: Su et al. 2021 (RoPE), in the halves of Hugging Face's layout.
void turn_rows(std::span<const TurnedRow> rows, DType dtype, std::span<const float> frequencies,
               double by, Stream& stream);

}  // namespace kvlm
