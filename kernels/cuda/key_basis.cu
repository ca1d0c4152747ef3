#include <algorithm>
#include <array>
#include <vector>

#include "kernels/cuda/kept_lanes.cuh"
#include "kernels/cuda/key_basis.h"
#include "kernels/cuda/launch.cuh"

namespace kvlm::cuda {

namespace {

constexpr int kThreads = 128;
constexpr int kRowsPerBlock = 8;

struct DeviceJob {
  const float* from;
  float* to;
  int rows;
  int channels;  // which list
};

/// Eight sums side by side, added as on the CPU.
__device__ float product(const float* matrix, const float* x, int n) {
  float sum[8] = {};
  int j = 0;
  for (; j + 8 <= n; j += 8) {
#pragma unroll
    for (int i = 0; i < 8; ++i) sum[i] += matrix[j + i] * x[j + i];
  }
  float rest = 0;
  for (; j < n; ++j) rest += matrix[j] * x[j];
  return ((sum[0] + sum[4]) + (sum[1] + sum[5])) + ((sum[2] + sum[6]) + (sum[3] + sum[7])) + rest;
}

/// A block takes some rows of a job; a thread makes a channel of them.
__global__ void __launch_bounds__(kThreads)
    change_rows(const DeviceJob* jobs, const uint16_t* lists, const float* matrix, int dim,
                int first, bool back, int64_t moved) {
  extern __shared__ float row[];  // (dim,) in the order of the basis
  const DeviceJob job = jobs[blockIdx.x];
  const uint16_t* channels = lists + static_cast<int64_t>(job.channels) * dim;
  const int begin = static_cast<int>(blockIdx.y) * kRowsPerBlock;
  const int n = dim - first;
  for (int r = begin; r < min(begin + kRowsPerBlock, job.rows); ++r) {
    const float* from = job.from + moved + static_cast<int64_t>(r) * dim;
    float* to = job.to + static_cast<int64_t>(r) * dim;
    __syncthreads();
    for (int i = static_cast<int>(threadIdx.x); i < dim; i += kThreads) {
      row[i] = from[back ? i : channels[i]];
    }
    __syncthreads();
    for (int i = static_cast<int>(threadIdx.x); i < dim; i += kThreads) {
      const float made =
          i < first || matrix == nullptr
              ? row[i]
              : product(matrix + static_cast<int64_t>(i - first) * n, row + first, n);
      to[back ? channels[i] : i] = made;
    }
  }
}

/// A block has 32 channels of an array; a warp every eighth row.
__global__ void __launch_bounds__(256)
    find_ends(const float* const* arrays, int rows, int dim, float* low, float* high) {
  __shared__ float least[8][32];
  __shared__ float most[8][32];
  const float* x = arrays[blockIdx.x];
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int channel = static_cast<int>(blockIdx.y) * 32 + lane;
  float small = INFINITY;
  float large = -INFINITY;
  for (int row = warp; channel < dim && row < rows; row += 8) {
    const float value = x[static_cast<int64_t>(row) * dim + channel];
    small = fminf(small, value);
    large = fmaxf(large, value);
  }
  least[warp][lane] = small;
  most[warp][lane] = large;
  __syncthreads();
  if (warp != 0 || channel >= dim) return;
  for (int i = 1; i < 8; ++i) {
    small = fminf(small, least[i][lane]);
    large = fmaxf(large, most[i][lane]);
  }
  low[static_cast<int64_t>(blockIdx.x) * dim + channel] = small;
  high[static_cast<int64_t>(blockIdx.x) * dim + channel] = large;
}

/// Jobs as the GPU finds them.
struct BasisLaunch {
  const DeviceJob* jobs = nullptr;
  const uint16_t* lists = nullptr;
  const float* matrix = nullptr;
  unsigned count = 0;
  int most = 0;  // rows of a job
  int dim = 0;
  int first = 0;
  bool back = false;
};

/// Uploads jobs, their orders of channels and the matrix; what is `kept` stays.
BasisLaunch describe_jobs(const KeyBasis& basis, BasisChange change, std::span<const BasisJob> jobs,
                          KeptBytes* kept, Stream& stream) {
  static thread_local std::vector<DeviceJob> described;
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
    // Heads of a layer often have one order in common.
    if (lists.empty() || !std::equal(job.channels, job.channels + dim,
                                     lists.begin() + static_cast<std::ptrdiff_t>(last))) {
      lists.insert(lists.end(), job.channels, job.channels + dim);
    }
    described.push_back({job.from, job.to, job.rows, static_cast<int>(lists.size() / dim) - 1});
    made.most = std::max(made.most, job.rows);
  }
  if (made.most == 0) return made;
  const std::vector<float>& matrix = basis.matrix[static_cast<size_t>(change)];
  std::array<UploadPart, 3> parts{
      UploadPart{described.data(), described.size() * sizeof(DeviceJob), 0},
      UploadPart{matrix.data(), matrix.size() * sizeof(float), 0},
      UploadPart{lists.data(), lists.size() * sizeof(uint16_t), 0}};
  size_t bytes = 0;
  for (UploadPart& part : parts) {
    part.at = bytes;
    bytes += (part.bytes + 15) / 16 * 16;
  }
  const std::byte* base = stream.queue().upload(parts, bytes);
  if (kept != nullptr) base = kept->place(base, bytes, stream);
  made.jobs = reinterpret_cast<const DeviceJob*>(base);
  if (!matrix.empty()) made.matrix = reinterpret_cast<const float*>(base + parts[1].at);
  made.lists = reinterpret_cast<const uint16_t*>(base + parts[2].at);
  return made;
}

void launch(const BasisLaunch& l, int64_t moved, Stream& stream) {
  if (l.most == 0) return;
  const dim3 grid(l.count, static_cast<unsigned>(ceil_div(l.most, kRowsPerBlock)));
  const size_t shared = static_cast<size_t>(l.dim) * sizeof(float);
  change_rows<<<grid, kThreads, shared, native(stream)>>>(l.jobs, l.lists, l.matrix, l.dim, l.first,
                                                          l.back, moved);
  check_launch("change_basis");
}

}  // namespace

struct BasisTable::State {
  explicit State(Device device) : kept(device) {}
  KeptBytes kept;
  BasisLaunch launch;
  const float* from = nullptr;
};

BasisTable::BasisTable(Device device) : state_(std::make_unique<State>(device)) {}
BasisTable::~BasisTable() = default;

void BasisTable::describe(const KeyBasis& basis, BasisChange change, std::span<const BasisJob> jobs,
                          const float* from, Stream& stream) {
  state_->launch = describe_jobs(basis, change, jobs, &state_->kept, stream);
  state_->from = from;
}

void BasisTable::run(const float* from, Stream& stream) {
  launch(state_->launch, from - state_->from, stream);
}

void change_basis(const KeyBasis& basis, BasisChange change, std::span<const BasisJob> jobs,
                  Stream& stream) {
  launch(describe_jobs(basis, change, jobs, nullptr, stream), 0, stream);
}

void channel_ends(std::span<const float* const> x, int rows, int dim, std::span<float> low,
                  std::span<float> high, Stream& stream) {
  Queue& queue = stream.queue();
  const auto* arrays =
      reinterpret_cast<const float* const*>(queue.upload(x.data(), x.size_bytes()));
  auto* ends = reinterpret_cast<float*>(queue.scratch(kChannelEnds, 2 * low.size_bytes()));
  const dim3 grid(static_cast<unsigned>(x.size()), static_cast<unsigned>(ceil_div(dim, 32)));
  find_ends<<<grid, 256, 0, native(stream)>>>(arrays, rows, dim, ends, ends + low.size());
  check_launch("channel_ends");
  queue.copy(low.data(), false, ends, true, low.size_bytes());
  queue.copy(high.data(), false, ends + low.size(), true, high.size_bytes());
}

}  // namespace kvlm::cuda
