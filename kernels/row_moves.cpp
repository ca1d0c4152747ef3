#include "kernels/row_moves.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "kernels/check.h"
#include "kernels/cpu/row_moves.h"
#include "kernels/cuda/table/row_moves.h"

namespace kvlm {

namespace {

void check_rows(const char* op, DType dtype, int dim, bool has_memory) {
  if (!check::is_floating(dtype) || dim < 1 || !has_memory) {
    check::refuse("{}: rows of {} numbers of {}; expected f32, f16 or bf16, and a destination", op,
                  dim, dtype_name(dtype));
  }
}

}  // namespace

void widen_rows(std::span<const std::byte* const> rows, DType dtype, int dim, float* out,
                Stream& stream) {
  if (rows.empty()) return;
  check_rows("widen_rows", dtype, dim, out != nullptr);
  if (check::on_gpu(stream)) return cuda::widen_rows(rows, dtype, dim, out, stream);
  cpu::widen_rows(rows, dtype, dim, out, stream);
}

void gather_listed(std::span<const ListedRows> lists, DType dtype, int dim, DType to,
                   Stream& stream) {
  if (lists.empty()) return;
  const bool placed = std::all_of(lists.begin(), lists.end(), [](const ListedRows& list) {
    return list.numbers.empty() || (list.from != nullptr && list.to != nullptr);
  });
  check_rows("gather_listed", dtype, dim, placed);
  if (to != dtype && to != DType::kF32) {
    check::refuse("gather_listed: rows of {} cannot be gathered as {}; expected {} or f32",
                  dtype_name(dtype), dtype_name(to), dtype_name(dtype));
  }
  if (check::on_gpu(stream)) return cuda::gather_listed(lists, dtype, dim, to, stream);
  cpu::gather_listed(lists, dtype, dim, to, stream);
}

void copy_ranges(std::span<const ByteRange> ranges, Stream& stream) {
  if (ranges.empty()) return;
  for (const ByteRange& range : ranges) {
    if (range.bytes > 0 && (range.from == nullptr || range.to == nullptr)) {
      check::refuse("copy_ranges: a range of {} bytes has no source or no destination",
                    range.bytes);
    }
  }
  if (check::on_gpu(stream)) return cuda::copy_ranges(ranges, stream);
  cpu::copy_ranges(ranges, stream);
}

void narrow_rows(std::span<std::byte* const> rows, DType dtype, int dim, const float* x,
                 Stream& stream) {
  if (rows.empty()) return;
  check_rows("narrow_rows", dtype, dim, x != nullptr);
  if (check::on_gpu(stream)) return cuda::narrow_rows(rows, dtype, dim, x, stream);
  cpu::narrow_rows(rows, dtype, dim, x, stream);
}

void close_gaps(std::span<const RowGap> gaps, Stream& stream) {
  if (gaps.empty()) return;
  for (const RowGap& gap : gaps) {
    if (gap.ring == nullptr || gap.rows < 1 || gap.rows > gap.ring_rows || gap.gap < 0 ||
        gap.gap >= gap.rows || gap.first < 0 || gap.first >= gap.ring_rows ||
        gap.row_bytes % 2 != 0) {
      check::refuse(
          "close_gaps: row {} of {} in a ring of {} from slot {}, rows of {} bytes; expected a row "
          "of the ring and an even size",
          gap.gap, gap.rows, gap.ring_rows, gap.first, gap.row_bytes);
    }
  }
  if (check::on_gpu(stream)) return cuda::close_gaps(gaps, stream);
  cpu::close_gaps(gaps, stream);
}

void find_waves(std::span<const float> frequencies, double by, std::span<double> waves) {
  for (size_t i = 0; i < frequencies.size(); ++i) {
    const double angle = by * static_cast<double>(frequencies[i]);
    waves[i] = std::cos(angle);
    waves[i + frequencies.size()] = std::sin(angle);
  }
}

void turn_rows(std::span<const TurnedRow> rows, DType dtype, std::span<const float> frequencies,
               double by, Stream& stream) {
  if (rows.empty()) return;
  check_rows("turn_rows", dtype, static_cast<int>(2 * frequencies.size()), rows[0].from != nullptr);
  static thread_local std::vector<double> waves;
  waves.resize(2 * frequencies.size());
  find_waves(frequencies, by, waves);
  if (check::on_gpu(stream)) return cuda::turn_rows(rows, dtype, waves, stream);
  cpu::turn_rows(rows, dtype, waves, stream);
}

}  // namespace kvlm
