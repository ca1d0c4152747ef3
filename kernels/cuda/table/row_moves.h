#pragma once

#include "kernels/row_moves.h"

namespace kvlm::cuda {

/// The operations of kernels/row_moves.h on checked arguments.
void widen_rows(std::span<const std::byte* const> rows, DType dtype, int dim, float* out,
                Stream& stream);
void gather_listed(std::span<const ListedRows> lists, DType dtype, int dim, DType to,
                   Stream& stream);
void copy_ranges(std::span<const ByteRange> ranges, Stream& stream);
void narrow_rows(std::span<std::byte* const> rows, DType dtype, int dim, const float* x,
                 Stream& stream);
void close_gaps(std::span<const RowGap> gaps, Stream& stream);
/// `waves` are the cosines of the angles, then their sines.
void turn_rows(std::span<const TurnedRow> rows, DType dtype, std::span<const double> waves,
               Stream& stream);

}  // namespace kvlm::cuda
