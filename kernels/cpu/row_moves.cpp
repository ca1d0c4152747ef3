#include "kernels/cpu/row_moves.h"

#include <array>
#include <cstring>

#include "kernels/cpu/blocks.h"
#include "kernels/cpu/elementwise.h"

namespace kvlm::cpu {

void widen_rows(std::span<const std::byte* const> rows, DType dtype, int dim, float* out,
                Stream& stream) {
  const auto width = static_cast<size_t>(dim);
  for_blocks(stream, rows.size(), width, [&](size_t begin, size_t end) {
    for (size_t i = begin; i < end; ++i) {
      convert_elements(reinterpret_cast<std::byte*>(out + i * width), DType::kF32, rows[i], dtype,
                       width);
    }
  });
}

void gather_listed(std::span<const ListedRows> lists, DType dtype, int dim, DType to,
                   Stream& stream) {
  const auto width = static_cast<size_t>(dim);
  size_t rows = 0;
  for (const ListedRows& list : lists) rows += list.numbers.size();
  for_blocks(stream, lists.size(), rows / lists.size() * width, [&](size_t begin, size_t end) {
    for (const ListedRows& list : lists.subspan(begin, end - begin)) {
      const std::span<const int32_t> numbers = list.numbers;
      std::byte* out = list.to;
      for (size_t first = 0, next = 0; first < numbers.size(); first = next) {
        for (next = first + 1; next < numbers.size() && numbers[next] == numbers[next - 1] + 1;) {
          ++next;
        }
        const auto number = static_cast<size_t>(numbers[first]);
        convert_elements(out, to, list.from + number * width * dtype_bytes(dtype), dtype,
                         (next - first) * width);
        out += (next - first) * width * dtype_bytes(to);
      }
    }
  });
}

void copy_ranges(std::span<const ByteRange> ranges, Stream& stream) {
  size_t bytes = 0;
  for (const ByteRange& range : ranges) bytes += range.bytes;
  for_blocks(stream, ranges.size(), bytes / ranges.size() / sizeof(float),
             [&](size_t begin, size_t end) {
               for (size_t i = begin; i < end; ++i) {
                 if (ranges[i].bytes == 0) continue;
                 std::memcpy(ranges[i].to, ranges[i].from, ranges[i].bytes);
               }
             });
}

void narrow_rows(std::span<std::byte* const> rows, DType dtype, int dim, const float* x,
                 Stream& stream) {
  const auto width = static_cast<size_t>(dim);
  for_blocks(stream, rows.size(), width, [&](size_t begin, size_t end) {
    for (size_t i = begin; i < end; ++i) {
      convert_elements(rows[i], dtype, reinterpret_cast<const std::byte*>(x + i * width),
                       DType::kF32, width);
    }
  });
}

void close_gaps(std::span<const RowGap> gaps, Stream& stream) {
  size_t most = 0;
  for (const RowGap& gap : gaps) {
    most = std::max(most, static_cast<size_t>(gap.rows) * gap.row_bytes / sizeof(float));
  }
  for_blocks(stream, gaps.size(), most, [&](size_t begin, size_t end) {
    for (size_t i = begin; i < end; ++i) {
      const RowGap& gap = gaps[i];
      const auto place = [&](int row) {
        return gap.ring + static_cast<size_t>((gap.first + row) % gap.ring_rows) * gap.row_bytes;
      };
      if (gap.from_front) {
        for (int row = gap.gap; row > 0; --row) {
          std::memcpy(place(row), place(row - 1), gap.row_bytes);
        }
      } else {
        for (int row = gap.gap; row + 1 < gap.rows; ++row) {
          std::memcpy(place(row), place(row + 1), gap.row_bytes);
        }
      }
    }
  });
}

void turn_rows(std::span<const TurnedRow> rows, DType dtype, std::span<const double> waves,
               Stream& stream) {
  const size_t half = waves.size() / 2;
  for_blocks(stream, rows.size(), 2 * half, [&](size_t begin, size_t end) {
    for (size_t row = begin; row < end; ++row) {
      const auto turn = [&](size_t i) -> std::array<float, 2> {
        const auto a = static_cast<double>(rows[row].from[i]);
        const auto b = static_cast<double>(rows[row].from[i + half]);
        const double c = waves[i];
        const double s = waves[i + half];
        return {static_cast<float>(a * c - b * s), static_cast<float>(b * c + a * s)};
      };
      for (size_t i = 0; i < half; ++i) {
        const std::array<float, 2> turned = turn(i);
        for (const size_t at : {size_t{0}, size_t{1}}) {
          convert_elements(rows[row].to + (i + at * half) * dtype_bytes(dtype), dtype,
                           reinterpret_cast<const std::byte*>(&turned[at]), DType::kF32, 1);
        }
      }
    }
  });
}

}  // namespace kvlm::cpu
