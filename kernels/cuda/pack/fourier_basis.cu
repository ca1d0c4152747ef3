// Spectra of VidKV's keys by cuFFT, which its published code uses through torch.fft; key_basis.cu
// multiplies by a matrix instead. Rows are gathered densely, transformed in batches of one size,
// and scattered in Hermitian packing.
#include <map>
#include <tuple>

#include "kernels/cuda/device/launch.cuh"
#include "kernels/cuda/pack/cufft.h"
#include "kernels/cuda/pack/fourier_basis.h"

namespace kvlm::cuda {

namespace {

constexpr int kBatch = 8192;  // rows of a transform: one plan serves any number of rows
constexpr int kRowsOfBlock = 8;
constexpr int kThreads = 256;

/// cuFFT plan of a batch of rows, in one direction.
class Plan {
 public:
  Plan(int n, bool back) : back_(back) {
    const Cufft& fft = cufft();
    check_fft(fft.create(&handle_), "cufftCreate");
    check_fft(fft.set_auto_allocation(handle_, 0), "cufftSetAutoAllocation");
    const int spectrum = n / 2 + 1;
    check_fft(fft.make_plan_many(handle_, 1, &n, nullptr, 1, back ? spectrum : n, nullptr, 1,
                                 back ? n : spectrum, back ? CUFFT_C2R : CUFFT_R2C, kBatch, &work_),
              "cufftMakePlanMany");
  }
  Plan(const Plan&) = delete;
  Plan& operator=(const Plan&) = delete;
  ~Plan() { cufft().destroy(handle_); }

  /// Transforms a batch. The work area is the queue's, so that several queues can use a plan.
  void run(float* reals, cufftComplex* spectrum, Stream& stream) const {
    const Cufft& fft = cufft();
    check_fft(fft.set_stream(handle_, native(stream)), "cufftSetStream");
    check_fft(fft.set_work_area(handle_, stream.queue().scratch(kFourierWork, work_)),
              "cufftSetWorkArea");
    if (back_) return check_fft(fft.exec_c2r(handle_, spectrum, reals), "cufftExecC2R");
    check_fft(fft.exec_r2c(handle_, reals, spectrum), "cufftExecR2C");
  }

 private:
  bool back_;
  cufftHandle handle_ = 0;
  size_t work_ = 0;
};

/// Per thread, so that no two threads use a plan at once.
const Plan& plan(int n, bool back) {
  static thread_local std::map<std::tuple<int, int, bool>, Plan> plans;
  int device = 0;
  check(cudaGetDevice(&device), "change_basis");
  return plans.try_emplace({device, n, back}, n, back).first->second;
}

/// Rows before and after a transform.
struct Gathered {
  BasisLaunch jobs;
  float* reals;            // (rows, n)
  cufftComplex* spectrum;  // (rows, n / 2 + 1)
};

/// Whether the job has row `i` of this thread block.
__device__ bool has_row(const BasisRows& job, int i) {
  return static_cast<int>(blockIdx.y) * kRowsOfBlock + i < job.rows;
}

/// Block (job, rows): gathers the transform's input, and outputs channels before `first`.
__global__ void __launch_bounds__(kThreads) gather_rows(Gathered g) {
  const BasisRows job = g.jobs.jobs[blockIdx.x];
  const int dim = g.jobs.dim;
  const int first = g.jobs.first;
  const int n = dim - first;
  const int real = n / 2 + 1;
  const uint16_t* channels = g.jobs.lists + int64_t{job.channels} * dim;
  for (auto i = static_cast<int>(threadIdx.x); i < kRowsOfBlock * dim; i += kThreads) {
    if (!has_row(job, i / dim)) return;
    const int64_t row = int64_t{blockIdx.y} * kRowsOfBlock + i / dim;
    const int channel = i % dim;
    const float* from = job.from + row * dim;
    const int64_t at = job.before + row;
    if (channel < first) {
      const int other = channels[channel];
      job.to[row * dim + (g.jobs.back ? other : channel)] = from[g.jobs.back ? channel : other];
    } else if (!g.jobs.back) {
      g.reals[at * n + channel - first] = from[channels[channel]];
    } else if (channel - first < real) {
      const int k = channel - first;
      const int imaginary = k == 0 || 2 * k == n ? -1 : first + real + k - 1;
      g.spectrum[at * real + k] = {from[channel], imaginary < 0 ? 0 : from[imaginary]};
    }
  }
}

/// Block (job, rows): scatters the transform's output.
__global__ void __launch_bounds__(kThreads) scatter_rows(Gathered g) {
  const BasisRows job = g.jobs.jobs[blockIdx.x];
  const int dim = g.jobs.dim;
  const int first = g.jobs.first;
  const int n = dim - first;
  const int real = n / 2 + 1;
  const uint16_t* channels = g.jobs.lists + int64_t{job.channels} * dim;
  for (auto i = static_cast<int>(threadIdx.x); i < kRowsOfBlock * n; i += kThreads) {
    if (!has_row(job, i / n)) return;
    const int64_t row = int64_t{blockIdx.y} * kRowsOfBlock + i / n;
    const int j = i % n;
    const int64_t at = job.before + row;
    float* to = job.to + row * dim;
    if (g.jobs.back) {
      to[channels[first + j]] = g.reals[at * n + j] / static_cast<float>(n);
    } else {
      const cufftComplex* of_row = g.spectrum + at * real;
      to[first + j] = j < real ? of_row[j].x : of_row[j - real + 1].y;
    }
  }
}

}  // namespace

void prepare_cufft(int n, int index) {
  cufft();
  if (n < 2) return;
  check(cudaSetDevice(index), "prepare_basis");
  for (const bool back : {false, true}) plan(n, back);
}

void change_by_cufft(const BasisLaunch& jobs, Stream& stream) {
  if (jobs.most == 0) return;
  const int n = jobs.dim - jobs.first;
  const auto batches = static_cast<size_t>(ceil_div(jobs.rows, kBatch));
  const size_t rows = batches * kBatch;
  const size_t real = static_cast<size_t>(n / 2 + 1);
  Queue& queue = stream.queue();
  Gathered g{jobs, nullptr, nullptr};
  g.reals = reinterpret_cast<float*>(
      queue.scratch(kFourierReals, rows * static_cast<size_t>(n) * sizeof(float)));
  g.spectrum = reinterpret_cast<cufftComplex*>(
      queue.scratch(kFourierSpectrum, rows * real * sizeof(cufftComplex)));
  const dim3 grid(jobs.count, static_cast<unsigned>(ceil_div(jobs.most, kRowsOfBlock)));
  gather_rows<<<grid, kThreads, 0, native(stream)>>>(g);
  check_launch("change_basis");
  const Plan& of_size = plan(n, jobs.back);
  for (size_t batch = 0; batch < batches; ++batch) {
    of_size.run(g.reals + batch * kBatch * static_cast<size_t>(n),
                g.spectrum + batch * kBatch * real, stream);
  }
  scatter_rows<<<grid, kThreads, 0, native(stream)>>>(g);
  check_launch("change_basis");
}

}  // namespace kvlm::cuda
