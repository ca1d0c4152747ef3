#include <algorithm>
#include <array>
#include <cassert>
#include <utility>
#include <vector>

#include "kernels/cuda/device/launch.cuh"
#include "kernels/cuda/pack/basis_jobs.cuh"
#include "kernels/cuda/pack/fourier_basis.h"
#include "kernels/cuda/pack/key_basis.h"

namespace kvlm::cuda {

namespace {

// Keys and queries times the matrix of a KeyBasis, with sums in the CPU's order. change_rows
// computes kTile x kTile outputs per thread block, from tiles of kDepth channels in shared memory.
// change_few_rows is for up to kFewRows rows, the queries of a step. Spectra may use cuFFT instead
// (fourier_basis.cu).
constexpr int kTile = 32;
constexpr int kDepth = 64;
constexpr int kPitch = kDepth + 4;  // adjacent rows begin in different banks
constexpr int kColumns = 2;         // channels of a thread
constexpr int kRows = 4;
constexpr int kAcross = kTile / kColumns;
constexpr int kThreads = kAcross * kTile / kRows;
static_assert(kDepth % 8 == 0);

/// Dot products of a thread, each as eight interleaved sums, added as on the CPU.
struct Products {
  float sum[kRows][kColumns][8] = {};
  float rest[kRows][kColumns] = {};

  __device__ float product(int r, int c) const {
    const float(&s)[8] = sum[r][c];
    return ((s[0] + s[4]) + (s[1] + s[5])) + ((s[2] + s[6]) + (s[3] + s[7])) + rest[r][c];
  }
  /// Adds `depth` channels of the thread's first kLive rows, a multiple of 8 except in the last
  /// tile.
  template <int kLive>
  __device__ void add(const float (&rows)[kTile][kPitch], const float (&weights)[kTile][kPitch],
                      int row, int column, int depth) {
    int j = 0;
    for (; j + 8 <= depth; j += 8) {
#pragma unroll
      for (int half = 0; half < 8; half += 4) {
        float x[kLive][4];
        float w[kColumns][4];
#pragma unroll
        for (int r = 0; r < kLive; ++r) {
          load_group<4>(&rows[row + r * (kTile / kRows)][j + half], x[r]);
        }
#pragma unroll
        for (int c = 0; c < kColumns; ++c) {
          load_group<4>(&weights[column + c * kAcross][j + half], w[c]);
        }
#pragma unroll
        for (int r = 0; r < kLive; ++r) {
#pragma unroll
          for (int c = 0; c < kColumns; ++c) {
#pragma unroll
            for (int i = 0; i < 4; ++i) sum[r][c][half + i] += w[c][i] * x[r][i];
          }
        }
      }
    }
    for (; j < depth; ++j) {
#pragma unroll
      for (int r = 0; r < kLive; ++r) {
#pragma unroll
        for (int c = 0; c < kColumns; ++c) {
          rest[r][c] += weights[column + c * kAcross][j] * rows[row + r * (kTile / kRows)][j];
        }
      }
    }
  }
};

/// Block (job, rows, channels from `first` on); channel block 0 also copies those before `first`.
/// Unless `fresh`, jobs and matrix are read before earlier kernels end, since none writes them.
__global__ void __launch_bounds__(kThreads)
    change_rows(const BasisRows* jobs, const uint16_t* lists, const float* matrix, int dim,
                int first, bool back, bool fresh, int64_t moved) {
  __shared__ alignas(16) float rows[kTile][kPitch];
  __shared__ alignas(16) float weights[kTile][kPitch];
  if (fresh) wait_for_earlier();
  const BasisRows job = jobs[blockIdx.x];
  const uint16_t* channels = lists + static_cast<int64_t>(job.channels) * dim;
  const int n = dim - first;
  const int made = static_cast<int>(blockIdx.z) * kTile;
  const auto load_weights = [&](int at) {
    for (auto i = static_cast<int>(threadIdx.x); i < kTile * kDepth; i += kThreads) {
      const int r = i / kDepth;
      const int j = at + i % kDepth;
      const bool present = j < n && made + r < n;
      weights[r][i % kDepth] = present ? matrix[static_cast<int64_t>(made + r) * n + j] : 0;
    }
  };
  load_weights(0);
  // From channel i of the basis to the model's channel, on the reading or the writing side. A
  // thread reads channels that are kDepth apart.
  static_assert(kThreads % kDepth == 0);
  const auto source = [&](int i) { return back ? i : int{channels[i]}; };
  const auto target = [&](int i) { return back ? int{channels[i]} : i; };
  const int read = static_cast<int>(threadIdx.x) % kDepth;
  int next_source = read < n ? source(first + read) : 0;
  wait_for_earlier();
  let_next_start();
  const int64_t begin = static_cast<int64_t>(blockIdx.y) * kTile;
  if (begin >= job.rows) return;
  const int count = static_cast<int>(min(int64_t{kTile}, job.rows - begin));
  const float* from = job.from + moved + begin * dim;
  float* to = job.to + begin * dim;
  const int thread = static_cast<int>(threadIdx.x);
  if (blockIdx.z == 0) {
    for (int i = thread; i < count * first; i += kThreads) {
      const int row = i / first * dim;
      to[row + target(i % first)] = from[row + source(i % first)];
    }
  }

  const int row = thread / kAcross;
  const int column = thread % kAcross;
  Products products;
  for (int at = 0; at < n; at += kDepth) {
    const int depth = min(kDepth, n - at);
    if (at > 0) {
      __syncthreads();
      load_weights(at);
    }
    for (int r = thread / kDepth; r < count; r += kThreads / kDepth) {
      rows[r][read] = read < depth ? from[r * dim + next_source] : 0;
    }
    if (at + kDepth + read < n) next_source = source(first + at + kDepth + read);
    __syncthreads();
    if (row + kTile / kRows < count) {
      products.add<kRows>(rows, weights, row, column, depth);
    } else if (row < count) {
      products.add<1>(rows, weights, row, column, depth);
    }
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const int at = row + r * (kTile / kRows);
      const int channel = made + column + c * kAcross;
      if (at < count && channel < n) {
        to[at * dim + target(first + channel)] = products.product(r, c);
      }
    }
  }
}

// Few rows: eight threads make the eight sums of a dot product. A thread loads its weights before
// it waits for the rows.
constexpr int kFewRows = 4;
constexpr int kSums = 8;
constexpr int kFewChannels = kThreads / kSums;  // of a block
constexpr int kFewSteps = 16;                   // channels in a thread's registers

/// change_rows() with kFewRows rows and kFewChannels channels per thread block.
__global__ void __launch_bounds__(kThreads)
    change_few_rows(const BasisRows* jobs, const uint16_t* lists, const float* matrix, int dim,
                    int first, bool back, bool fresh, int64_t moved) {
  if (fresh) wait_for_earlier();
  const BasisRows job = jobs[blockIdx.x];
  const uint16_t* channels = lists + static_cast<int64_t>(job.channels) * dim;
  const int n = dim - first;
  const int thread = static_cast<int>(threadIdx.x);
  const int part = thread % kSums;
  const int made = static_cast<int>(blockIdx.z) * kFewChannels + thread / kSums;
  const auto source = [&](int i) { return back ? i : int{channels[i]}; };
  const auto target = [&](int i) { return back ? int{channels[i]} : i; };
  float weights[kFewSteps];
  int sources[kFewSteps];
  const auto load_weights = [&](int at) {
#pragma unroll
    for (int i = 0; i < kFewSteps; ++i) {
      const int j = at + i * kSums + part;
      weights[i] = j < n && made < n ? matrix[static_cast<int64_t>(made) * n + j] : 0;
      sources[i] = j < n ? source(first + j) : 0;
    }
  };
  load_weights(0);
  wait_for_earlier();
  let_next_start();
  const int64_t begin = int64_t{blockIdx.y} * kFewRows;
  if (begin >= job.rows) return;
  const int count = static_cast<int>(min(int64_t{kFewRows}, job.rows - begin));
  const float* from = job.from + moved + begin * dim;
  float* to = job.to + begin * dim;
  if (blockIdx.z == 0) {
    for (int i = thread; i < count * first; i += kThreads) {
      const int row = i / first * dim;
      to[row + target(i % first)] = from[row + source(i % first)];
    }
  }

  const int whole = n / kSums * kSums;
  float sum[kFewRows] = {};
  for (int at = 0; at < whole; at += kFewSteps * kSums) {
    if (at > 0) load_weights(at);
    float x[kFewRows][kFewSteps];
#pragma unroll
    for (int r = 0; r < kFewRows; ++r) {
#pragma unroll
      for (int i = 0; i < kFewSteps; ++i) x[r][i] = r < count ? from[r * dim + sources[i]] : 0;
    }
#pragma unroll
    for (int i = 0; i < kFewSteps; ++i) {
      if (at + i * kSums >= whole) break;
#pragma unroll
      for (int r = 0; r < kFewRows; ++r) sum[r] += weights[i] * x[r][i];
    }
  }
#pragma unroll
  for (int r = 0; r < kFewRows; ++r) {
#pragma unroll
    for (const int other : {4, 1, 2}) sum[r] += __shfl_xor_sync(~0u, sum[r], other);
    if (part > 0 || r >= count || made >= n) continue;
    float rest = 0;  // of the channels after the last eight
    for (int j = whole; j < n; ++j) {
      rest += matrix[static_cast<int64_t>(made) * n + j] * from[r * dim + source(first + j)];
    }
    to[r * dim + target(first + made)] = sum[r] + rest;
  }
}

constexpr int kEndWarps = 8;
constexpr int kEndRows = 16;  // of a warp

/// Minimum and maximum of 32 channels over some rows: block (array, channels, rows).
///
///   ends  (parts, 2, arrays, dim)
__global__ void __launch_bounds__(kEndWarps * 32)
    find_ends(const float* const* arrays, int rows, int dim, float* ends) {
  __shared__ float least[kEndWarps][32];
  __shared__ float most[kEndWarps][32];
  const float* x = arrays[blockIdx.x];
  const int warp_lane = static_cast<int>(threadIdx.x % 32);
  const int warp = static_cast<int>(threadIdx.x / 32);
  const int channel = static_cast<int>(blockIdx.y) * 32 + warp_lane;
  const int first = (static_cast<int>(blockIdx.z) * kEndWarps + warp) * kEndRows;
  float small = INFINITY;
  float large = -INFINITY;
#pragma unroll
  for (int i = 0; i < kEndRows; ++i) {
    const int row = first + i;
    const float value =
        row < rows && channel < dim ? x[static_cast<int64_t>(row) * dim + channel] : NAN;
    small = fminf(small, value);
    large = fmaxf(large, value);
  }
  least[warp][warp_lane] = small;
  most[warp][warp_lane] = large;
  __syncthreads();
  if (warp != 0 || channel >= dim) return;
  for (int i = 1; i < kEndWarps; ++i) {
    small = fminf(small, least[i][warp_lane]);
    large = fmaxf(large, most[i][warp_lane]);
  }
  const int64_t size = static_cast<int64_t>(gridDim.x) * dim;
  float* to = ends + int64_t{blockIdx.z} * 2 * size + int64_t{blockIdx.x} * dim + channel;
  to[0] = small;
  to[size] = large;
}

/// Merges all parts into the first: `size` minima, then as many maxima.
__global__ void join_ends(float* ends, int parts, int64_t size) {
  const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i >= 2 * size) return;
  float end = ends[i];
  for (int part = 1; part < parts; ++part) {
    const float other = ends[part * 2 * size + i];
    end = i < size ? fminf(end, other) : fmaxf(end, other);
  }
  ends[i] = end;
}

/// `fresh`: first launch since the upload.
void launch(const BasisLaunch& l, bool fresh, int64_t moved, Stream& stream) {
  if (l.most == 0) return;
  const int first = l.matrix == nullptr ? l.dim : l.first;
  // Many jobs fill the GPU anyway.
  const bool few =
      l.most <= kFewRows && static_cast<int>(l.count) <= stream.queue().multiprocessors();
  const dim3 grid(l.count, static_cast<unsigned>(ceil_div(l.most, few ? kFewRows : kTile)),
                  static_cast<unsigned>(
                      std::max<int64_t>(1, ceil_div(l.dim - first, few ? kFewChannels : kTile))));
  launch_early("change_basis", few ? change_few_rows : change_rows, grid, kThreads, stream, l.jobs,
               l.lists, l.matrix, l.dim, first, l.back, fresh, moved);
}

}  // namespace

BasisLaunch describe_jobs(const KeyBasis& basis, BasisChange change, std::span<const BasisJob> jobs,
                          KeptBytes* kept, Stream& stream) {
  static thread_local std::vector<BasisRows> described;
  static thread_local std::vector<uint16_t> lists;
  described.clear();
  lists.clear();
  const auto dim = static_cast<size_t>(basis.dim);
  BasisLaunch made;
  made.count = static_cast<unsigned>(jobs.size());
  made.dim = basis.dim;
  made.first = basis.first;
  made.back = change == BasisChange::kBack;
  for (const BasisJob& job : jobs) {
    const size_t last = lists.size() - std::min(lists.size(), dim);
    // KV heads of a layer often share an order.
    if (lists.empty() || !std::equal(job.channels, job.channels + dim,
                                     lists.begin() + static_cast<std::ptrdiff_t>(last))) {
      lists.insert(lists.end(), job.channels, job.channels + dim);
    }
    described.push_back(
        {job.from, job.to, job.rows, static_cast<int>(lists.size() / dim) - 1, made.rows});
    made.most = std::max(made.most, job.rows);
    made.rows += job.rows;
  }
  if (made.most == 0) return made;
  const std::vector<float>& matrix = basis.matrix[static_cast<size_t>(change)];
  std::array<UploadRange, 3> ranges{
      UploadRange{described.data(), described.size() * sizeof(BasisRows), 0},
      UploadRange{matrix.data(), matrix.size() * sizeof(float), 0},
      UploadRange{lists.data(), lists.size() * sizeof(uint16_t), 0}};
  size_t bytes = 0;
  for (UploadRange& range : ranges) {
    range.at = bytes;
    bytes += (range.bytes + 15) / 16 * 16;
  }
  const std::byte* base = stream.queue().upload_ranges(ranges, bytes);
  if (kept != nullptr) base = kept->place(base, bytes, stream);
  made.jobs = reinterpret_cast<const BasisRows*>(base);
  if (!matrix.empty()) made.matrix = reinterpret_cast<const float*>(base + ranges[1].at);
  made.lists = reinterpret_cast<const uint16_t*>(base + ranges[2].at);
  return made;
}

void change_basis(const KeyBasis& basis, BasisChange change, std::span<const BasisJob> jobs,
                  Stream& stream) {
  const BasisLaunch described = describe_jobs(basis, change, jobs, nullptr, stream);
  const bool transforms = described.matrix != nullptr && basis.dim - basis.first > 1;
  if (basis.cufft && change != BasisChange::kQuery && transforms) {
    return change_by_cufft(described, stream);
  }
  launch(described, /*fresh=*/true, 0, stream);
}

void prepare_basis(const KeyBasis& basis, int index) {
  if (basis.cufft) prepare_cufft(basis.dim - basis.first, index);
}

void channel_ends(std::span<const float* const> x, int rows, int dim, std::span<float> low,
                  std::span<float> high, Stream& stream) {
  Queue& queue = stream.queue();
  const auto* arrays =
      reinterpret_cast<const float* const*>(queue.upload(x.data(), x.size_bytes()));
  const auto parts = static_cast<unsigned>(ceil_div(rows, kEndWarps * kEndRows));
  auto* ends =
      reinterpret_cast<float*>(queue.scratch(kChannelEnds, size_t{parts} * 2 * low.size_bytes()));
  const dim3 grid(static_cast<unsigned>(x.size()), static_cast<unsigned>(ceil_div(dim, 32)), parts);
  find_ends<<<grid, kEndWarps * 32, 0, native(stream)>>>(arrays, rows, dim, ends);
  const auto size = static_cast<int64_t>(low.size());
  if (parts > 1) {
    join_ends<<<static_cast<unsigned>(ceil_div(2 * size, 256)), 256, 0, native(stream)>>>(
        ends, static_cast<int>(parts), size);
  }
  check_launch("channel_ends");
  queue.copy(low.data(), false, ends, true, low.size_bytes());
  queue.copy(high.data(), false, ends + low.size(), true, high.size_bytes());
}

}  // namespace kvlm::cuda

namespace kvlm {

struct BasisBatch::State {
  explicit State(Device device) : kept(device) {}
  cuda::KeptBytes kept;
  cuda::BasisLaunch launch;
  bool fresh = false;  // not launched since the upload
  const float* from = nullptr;
};

BasisBatch::BasisBatch(Device device) : state_(std::make_unique<State>(device)) {
  assert(device.kind == DeviceKind::kCuda);
}
BasisBatch::~BasisBatch() = default;
BasisBatch::BasisBatch(BasisBatch&&) noexcept = default;

void BasisBatch::describe(const KeyBasis& basis, BasisChange change, std::span<const BasisJob> jobs,
                          const float* from, Stream& stream) {
  check_basis(basis, change);
  state_->launch = cuda::describe_jobs(basis, change, jobs, &state_->kept, stream);
  state_->fresh = true;
  state_->from = from;
}

void BasisBatch::run(const float* from, Stream& stream) {
  cuda::launch(state_->launch, std::exchange(state_->fresh, false), from - state_->from, stream);
}

}  // namespace kvlm
