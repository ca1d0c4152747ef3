#include "kernels/cuda/row_moves.h"

#include "kernels/no_cuda/refuse.h"

namespace kvlm::cuda {

void widen_rows(std::span<const std::byte* const>, DType, int, float*, Stream&) {
  refuse("widen_rows");
}

void widen_ranges(std::span<const RowRange>, DType, int, float*, Stream&) {
  refuse("widen_ranges");
}

void copy_ranges(std::span<const ByteRange>, Stream&) { refuse("copy_ranges"); }

void narrow_rows(std::span<std::byte* const>, DType, int, const float*, Stream&) {
  refuse("narrow_rows");
}

void close_gaps(std::span<const RowGap>, Stream&) { refuse("close_gaps"); }

void turn_rows(std::span<const TurnedRow>, DType, std::span<const double>, Stream&) {
  refuse("turn_rows");
}

}  // namespace kvlm::cuda
