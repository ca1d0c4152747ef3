#include <algorithm>
#include <array>
#include <type_traits>
#include <vector>

#include "kernels/cuda/device/launch.cuh"
#include "kernels/cuda/table/close_gap.cuh"
#include "kernels/cuda/table/row_moves.h"

// Moves of keys and values by a list that the host uploads: widen, narrow, gather by index, copy
// ranges, close a gap in a ring, rotate. In decode drop_rows.cu does the last two without the host.
namespace kvlm::cuda {

namespace {

constexpr int kThreads = 128;

/// One block per row.
template <class T>
__global__ void widen(const std::byte* const* rows, int dim, float* out) {
  const T* row = reinterpret_cast<const T*>(rows[blockIdx.x]);
  float* to = out + static_cast<int64_t>(blockIdx.x) * dim;
  for (int i = static_cast<int>(threadIdx.x); i < dim; i += kThreads) to[i] = load_float(row[i]);
}

/// ListedRows, with `rows` row numbers from index `first` on in the array of all lists.
struct DeviceList {
  const std::byte* from;
  std::byte* to;
  int first;
  int rows;
};

constexpr int kListedRows = 32;  // of a block

/// Moves kTogether adjacent elements: 16 bytes of input, or one element.
template <int kTogether, class T, class Out>
__device__ void move_group(const T* from, Out* to) {
  if constexpr (kTogether == 1) {
    to[0] = store_float<Out>(load_float(from[0]));
  } else if constexpr (std::is_same_v<T, Out>) {
    *reinterpret_cast<int4*>(to) = *reinterpret_cast<const int4*>(from);
  } else {
#pragma unroll
    for (int i = 0; i < kTogether; i += 4) {
      float x[4];
      load_group<4>(from + i, x);
      store_group<4>(to + i, x);
    }
  }
}

/// Block (list, rows).
template <int kTogether, class T, class Out>
__global__ void __launch_bounds__(kThreads)
    gather_list(const DeviceList* lists, const int32_t* numbers, int dim) {
  __shared__ int32_t read[kListedRows];
  const DeviceList list = lists[blockIdx.x];
  const int begin = static_cast<int>(blockIdx.y) * kListedRows;
  const int rows = min(kListedRows, list.rows - begin);
  const auto thread = static_cast<int>(threadIdx.x);
  if (thread < rows) read[thread] = numbers[list.first + begin + thread];
  __syncthreads();
  const T* from = reinterpret_cast<const T*>(list.from);
  Out* to = reinterpret_cast<Out*>(list.to) + static_cast<int64_t>(begin) * dim;
  const int groups = dim / kTogether;
  for (int i = thread; i < rows * groups; i += kThreads) {
    const int row = i / groups;
    const int channel = i % groups * kTogether;
    move_group<kTogether>(from + static_cast<int64_t>(read[row]) * dim + channel,
                          to + static_cast<int64_t>(row) * dim + channel);
  }
}

/// Lists to be uploaded; the same row numbers in adjacent lists are uploaded once.
struct SentLists {
  std::vector<DeviceList> lists;
  std::vector<int32_t> numbers;
  size_t most = 0;      // rows of one
  bool aligned = true;  // to 16 bytes, all memory

  void add(const ListedRows& list) {
    const bool same = last.data() == list.numbers.data() && last.size() == list.numbers.size();
    last = list.numbers;
    if (!same) numbers.insert(numbers.end(), last.begin(), last.end());
    lists.push_back({list.from, list.to, static_cast<int>(numbers.size() - last.size()),
                     static_cast<int>(last.size())});
    most = std::max(most, last.size());
    const auto all = reinterpret_cast<uintptr_t>(list.from) | reinterpret_cast<uintptr_t>(list.to);
    aligned = aligned && all % sizeof(int4) == 0;
  }

 private:
  std::span<const int32_t> last;
};

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

/// RowGap in the form that close_gap() reads.
struct Ring {
  int first, full, ring_rows;
  __device__ int place(int i) const { return (first + i) % ring_rows; }
};

/// One block per gap.
template <class Unit>
__global__ void __launch_bounds__(kGapThreads) close(const RowGap* gaps) {
  const RowGap gap = gaps[blockIdx.x];
  packed::close_gap<kGapThreads>(
      Ring{gap.first, gap.rows, gap.ring_rows}, reinterpret_cast<Unit*>(gap.ring),
      static_cast<int>(gap.row_bytes / sizeof(Unit)), gap.gap, gap.from_front);
}

/// One block per row. In double, as on the CPU.
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

void gather_listed(std::span<const ListedRows> lists, DType dtype, int dim, DType to,
                   Stream& stream) {
  SentLists sent;
  sent.lists.reserve(lists.size());
  for (const ListedRows& list : lists) sent.add(list);
  if (sent.most == 0) return;
  const size_t bytes = sent.lists.size() * sizeof(DeviceList);
  const std::array<UploadRange, 2> ranges{
      UploadRange{sent.lists.data(), bytes, 0},
      UploadRange{sent.numbers.data(), sent.numbers.size() * sizeof(int32_t), bytes}};
  const std::byte* base = stream.queue().upload_ranges(ranges, bytes + ranges[1].bytes);
  const dim3 grid(static_cast<unsigned>(lists.size()),
                  static_cast<unsigned>(ceil_div(static_cast<int64_t>(sent.most), kListedRows)));
  with_type(dtype, [&]<class T>(T*) {
    constexpr int kTogether = sizeof(int4) / sizeof(T);
    const auto launch = [&](auto one, auto together) {
      const auto kernel = sent.aligned && dim % kTogether == 0 ? together : one;
      kernel<<<grid, kThreads, 0, native(stream)>>>(reinterpret_cast<const DeviceList*>(base),
                                                    reinterpret_cast<const int32_t*>(base + bytes),
                                                    dim);
    };
    if (to == dtype) {
      launch(gather_list<1, T, T>, gather_list<kTogether, T, T>);
    } else {
      launch(gather_list<1, T, float>, gather_list<kTogether, T, float>);
    }
  });
  check_launch("gather_listed");
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
