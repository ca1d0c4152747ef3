#include <algorithm>
#include <vector>

#include "kernels/cuda/close_gap.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/row_moves.h"

// Rows on their way: widened and narrowed one by one, widened and copied in ranges, moved towards a
// gap in a ring, rotated. Who goes where is a list that the host uploads.
namespace kvlm::cuda {

namespace {

constexpr int kThreads = 128;

/// A block a row.
template <class T>
__global__ void widen(const std::byte* const* rows, int dim, float* out) {
  const T* row = reinterpret_cast<const T*>(rows[blockIdx.x]);
  float* to = out + static_cast<int64_t>(blockIdx.x) * dim;
  for (int i = static_cast<int>(threadIdx.x); i < dim; i += kThreads) to[i] = load_float(row[i]);
}

/// Rows that lie side by side, and which rows of the floats they become.
struct DeviceRange {
  const std::byte* from;
  int rows;
  int first;
};

constexpr int kRangeRows = 16;  // of a block

/// Block (range, rows).
template <class T>
__global__ void widen_range(const DeviceRange* ranges, int dim, float* out) {
  const DeviceRange range = ranges[blockIdx.x];
  const int first = static_cast<int>(blockIdx.y) * kRangeRows;
  const int count = min(kRangeRows, range.rows - first) * dim;
  const T* from = reinterpret_cast<const T*>(range.from) + static_cast<int64_t>(first) * dim;
  float* to = out + static_cast<int64_t>(range.first + first) * dim;
  constexpr int kTogether = sizeof(int4) / sizeof(T);
  const auto both = reinterpret_cast<uintptr_t>(from) | reinterpret_cast<uintptr_t>(out);
  const bool whole = dim % kTogether == 0 && both % sizeof(int4) == 0;
  if (!whole) {
    for (int i = static_cast<int>(threadIdx.x); i < count; i += kThreads) {
      to[i] = load_float(from[i]);
    }
    return;
  }
  for (int i = static_cast<int>(threadIdx.x) * kTogether; i < count; i += kThreads * kTogether) {
    alignas(int4) T x[kTogether];
    *reinterpret_cast<int4*>(x) = *reinterpret_cast<const int4*>(from + i);
#pragma unroll
    for (int j = 0; j < kTogether; j += 4) {
      *reinterpret_cast<float4*>(to + i + j) = {load_float(x[j]), load_float(x[j + 1]),
                                                load_float(x[j + 2]), load_float(x[j + 3])};
    }
  }
}

constexpr int kCopied = 16 * 1024;  // bytes of a block

template <class Unit>
__device__ void copy_units(const std::byte* from, std::byte* to, int bytes) {
  for (int i = static_cast<int>(threadIdx.x); i < bytes / static_cast<int>(sizeof(Unit));
       i += kThreads) {
    reinterpret_cast<Unit*>(to)[i] = reinterpret_cast<const Unit*>(from)[i];
  }
}

/// Block (range, bytes).
__global__ void copy_range(const ByteRange* ranges) {
  const ByteRange range = ranges[blockIdx.x];
  const size_t first = static_cast<size_t>(blockIdx.y) * kCopied;
  if (first >= range.bytes) return;
  const std::byte* from = range.from + first;
  std::byte* to = range.to + first;
  const auto bytes = static_cast<int>(min(range.bytes - first, static_cast<size_t>(kCopied)));
  const auto all = reinterpret_cast<uintptr_t>(from) | reinterpret_cast<uintptr_t>(to) |
                   static_cast<uintptr_t>(bytes);
  if (all % sizeof(int4) == 0) {
    copy_units<int4>(from, to, bytes);
  } else if (all % sizeof(short) == 0) {
    copy_units<short>(from, to, bytes);
  } else {
    copy_units<char>(from, to, bytes);
  }
}

template <class T>
__global__ void narrow(std::byte* const* rows, int dim, const float* x) {
  T* row = reinterpret_cast<T*>(rows[blockIdx.x]);
  const float* from = x + static_cast<int64_t>(blockIdx.x) * dim;
  for (int i = static_cast<int>(threadIdx.x); i < dim; i += kThreads) {
    row[i] = store_float<T>(from[i]);
  }
}

constexpr int kGapThreads = 256;

/// RowGap, as close_gap() wants it.
struct Ring {
  int first, full, ring_rows;
  __device__ int place(int i) const { return (first + i) % ring_rows; }
};

/// A block a gap.
template <class Unit>
__global__ void __launch_bounds__(kGapThreads) close(const RowGap* gaps) {
  const RowGap gap = gaps[blockIdx.x];
  packed::close_gap<kGapThreads>(
      Ring{gap.first, gap.rows, gap.ring_rows}, reinterpret_cast<Unit*>(gap.ring),
      static_cast<int>(gap.row_bytes / sizeof(Unit)), gap.gap, gap.from_front);
}

/// A block a row.
template <class T>
__global__ void turn(const TurnedRow* rows, const double* waves, int half) {
  const TurnedRow row = rows[blockIdx.x];
  T* to = reinterpret_cast<T*>(row.to);
  for (int i = static_cast<int>(threadIdx.x); i < half; i += kThreads) {
    const auto a = static_cast<double>(row.from[i]);
    const auto b = static_cast<double>(row.from[i + half]);
    const double c = waves[i];
    const double s = waves[i + half];
    to[i] = store_float<T>(static_cast<float>(a * c - b * s));
    to[i + half] = store_float<T>(static_cast<float>(b * c + a * s));
  }
}

}  // namespace

void widen_rows(std::span<const std::byte* const> rows, DType dtype, int dim, float* out,
                Stream& stream) {
  const auto* on_device = reinterpret_cast<const std::byte* const*>(
      stream.queue().upload(rows.data(), rows.size_bytes()));
  with_type(dtype, [&]<class T>(T*) {
    widen<T>
        <<<static_cast<unsigned>(rows.size()), kThreads, 0, native(stream)>>>(on_device, dim, out);
  });
  check_launch("widen_rows");
}

void widen_ranges(std::span<const RowRange> ranges, DType dtype, int dim, float* out,
                  Stream& stream) {
  static thread_local std::vector<DeviceRange> made;
  made.clear();
  int rows = 0;
  int most = 0;
  for (const RowRange& range : ranges) {
    made.push_back({range.from, range.rows, rows});
    rows += range.rows;
    most = std::max(most, range.rows);
  }
  if (most == 0) return;
  const auto* on_device = reinterpret_cast<const DeviceRange*>(
      stream.queue().upload(made.data(), made.size() * sizeof(DeviceRange)));
  const dim3 grid(static_cast<unsigned>(made.size()),
                  static_cast<unsigned>(ceil_div(most, kRangeRows)));
  with_type(dtype, [&]<class T>(T*) {
    widen_range<T><<<grid, kThreads, 0, native(stream)>>>(on_device, dim, out);
  });
  check_launch("widen_ranges");
}

void copy_ranges(std::span<const ByteRange> ranges, Stream& stream) {
  size_t most = 0;
  for (const ByteRange& range : ranges) most = std::max(most, range.bytes);
  if (most == 0) return;
  const auto* on_device =
      reinterpret_cast<const ByteRange*>(stream.queue().upload(ranges.data(), ranges.size_bytes()));
  const dim3 grid(static_cast<unsigned>(ranges.size()),
                  static_cast<unsigned>(ceil_div(static_cast<int64_t>(most), kCopied)));
  copy_range<<<grid, kThreads, 0, native(stream)>>>(on_device);
  check_launch("copy_ranges");
}

void narrow_rows(std::span<std::byte* const> rows, DType dtype, int dim, const float* x,
                 Stream& stream) {
  const auto* on_device =
      reinterpret_cast<std::byte* const*>(stream.queue().upload(rows.data(), rows.size_bytes()));
  with_type(dtype, [&]<class T>(T*) {
    narrow<T>
        <<<static_cast<unsigned>(rows.size()), kThreads, 0, native(stream)>>>(on_device, dim, x);
  });
  check_launch("narrow_rows");
}

void close_gaps(std::span<const RowGap> gaps, Stream& stream) {
  size_t unit = sizeof(int4);
  for (const RowGap& gap : gaps) {
    while (gap.row_bytes % unit != 0 || reinterpret_cast<uintptr_t>(gap.ring) % unit != 0) {
      unit /= 2;
    }
  }
  const auto* on_device =
      reinterpret_cast<const RowGap*>(stream.queue().upload(gaps.data(), gaps.size_bytes()));
  const auto blocks = static_cast<unsigned>(gaps.size());
  if (unit == sizeof(int4)) {
    close<int4><<<blocks, kGapThreads, 0, native(stream)>>>(on_device);
  } else if (unit >= sizeof(int)) {
    close<int><<<blocks, kGapThreads, 0, native(stream)>>>(on_device);
  } else {
    close<short><<<blocks, kGapThreads, 0, native(stream)>>>(on_device);
  }
  check_launch("close_gaps");
}

void turn_rows(std::span<const TurnedRow> rows, DType dtype, std::span<const double> waves,
               Stream& stream) {
  const auto* angles =
      reinterpret_cast<const double*>(stream.queue().upload(waves.data(), waves.size_bytes()));
  const auto* on_device =
      reinterpret_cast<const TurnedRow*>(stream.queue().upload(rows.data(), rows.size_bytes()));
  with_type(dtype, [&]<class T>(T*) {
    turn<T><<<static_cast<unsigned>(rows.size()), kThreads, 0, native(stream)>>>(
        on_device, angles, static_cast<int>(waves.size() / 2));
  });
  check_launch("turn_rows");
}

}  // namespace kvlm::cuda
