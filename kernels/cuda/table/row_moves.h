#pragma once

#include "kernels/row_moves.h"

// CUDA implementation of kernels/row_moves.h.
namespace kvlm::cuda {

/// On checked arguments.
void widen_rows(std::span<const std::byte* const> rows, DType dtype, int dim, float* out,
                Stream& stream);
void gather_listed(std::span<const ListedRows> lists, DType dtype, int dim, DType to,
                   Stream& stream);
void copy_ranges(std::span<const ByteRange> ranges, Stream& stream);
void narrow_rows(std::span<std::byte* const> rows, DType dtype, int dim, const float* x,
                 Stream& stream);
void close_gaps(std::span<const RowGap> gaps, Stream& stream);
/// `waves` are the cosines, then the sines of the angles.
void turn_rows(std::span<const TurnedRow> rows, DType dtype, std::span<const double> waves,
               Stream& stream);

}  // namespace kvlm::cuda
