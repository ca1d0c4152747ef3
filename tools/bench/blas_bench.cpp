// blas_bench [--threads N] LIBRARY.so...: which library multiplies fastest on our threads.
//
// Loads each library at run time (cblas_sgemm of OpenBLAS and BLIS, dnnl_sgemm of oneDNN) and calls
// it from every thread of our pool at once, each call on one thread. Prints GFLOP/s per thread of
// processor time (so that other programs' turns do not count), median and 10th and 90th percentile,
// libraries interleaved. oneDNN wants OMP_NUM_THREADS=1.

#include <dlfcn.h>
#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/base/thread_pool.h"

namespace kvlm {
namespace {

using CblasSgemm = void (*)(int, int, int, int, int, int, float, const float*, int, const float*,
                            int, float, float*, int);
using DnnlSgemm = int (*)(char, char, int64_t, int64_t, int64_t, float, const float*, int64_t,
                          const float*, int64_t, float, float*, int64_t);

struct Library {
  std::string path;
  CblasSgemm cblas = nullptr;
  DnnlSgemm dnnl = nullptr;

  /// y (rows, out) = x (rows, in) * w (out, in)^T.
  void multiply(float* y, const float* x, const float* w, int rows, int out, int in) const {
    constexpr int kRowMajor = 101, kPlain = 111, kTransposed = 112;
    if (cblas != nullptr) {
      cblas(kRowMajor, kPlain, kTransposed, rows, out, in, 1.0f, x, in, w, in, 0.0f, y, out);
    } else {
      dnnl('N', 'T', rows, out, in, 1.0f, x, in, w, in, 0.0f, y, out);
    }
  }
};

Library load(const char* path) {
  Library library{path};
  void* handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    fmt::print(stderr, "blas_bench: {}\n", dlerror());
    std::exit(1);
  }
  library.cblas = reinterpret_cast<CblasSgemm>(dlsym(handle, "cblas_sgemm"));
  library.dnnl = reinterpret_cast<DnnlSgemm>(dlsym(handle, "dnnl_sgemm"));
  if (auto* set = reinterpret_cast<void (*)(int)>(dlsym(handle, "openblas_set_num_threads"))) {
    set(1);
  }
  if (library.cblas == nullptr && library.dnnl == nullptr) {
    fmt::print(stderr, "blas_bench: {} has neither cblas_sgemm nor dnnl_sgemm\n", path);
    std::exit(1);
  }
  return library;
}

double thread_seconds() {
  timespec time{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

int run(int argc, char** argv) {
  int threads = 0;
  std::vector<Library> libraries;
  for (int i = 1; i < argc; ++i) {
    if (std::string_view(argv[i]) == "--threads" && i + 1 < argc) {
      threads = std::atoi(argv[++i]);
    } else {
      libraries.push_back(load(argv[i]));
    }
  }
  ThreadPool pool(threads);
  struct Case {
    int rows, in, out;
  };
  constexpr Case kCases[] = {{1536, 1536, 1536}, {640, 2048, 2048}, {640, 2048, 5632},
                             {640, 5632, 2048},  {577, 1024, 1024}, {577, 1024, 4096},
                             {64, 2048, 2048},   {17, 2048, 2048}};
  fmt::print("GFLOP/s per thread, {} threads at once\n", pool.threads());
  for (const auto& [rows, in, out] : kCases) {
    const auto size = [](int a, int b) { return static_cast<size_t>(a) * static_cast<size_t>(b); };
    std::minstd_rand generator(7);
    std::vector<float> x(size(rows, in)), w(size(out, in));
    for (float& value : x) value = static_cast<float>(generator()) * 0x1p-31f - 0.5f;
    for (float& value : w) value = static_cast<float>(generator()) * 0x1p-31f - 0.5f;
    const auto workers = static_cast<size_t>(pool.threads());
    std::vector<std::vector<float>> y(workers, std::vector<float>(size(rows, out)));
    const double flop = 2.0 * rows * in * out;
    const int calls = std::max(1, static_cast<int>(5e9 / flop));
    std::vector<std::vector<double>> rates(libraries.size());
    for (int repetition = 0; repetition < 8; ++repetition) {
      for (size_t l = 0; l < libraries.size(); ++l) {
        std::vector<double> seconds(workers);
        pool.parallel_for(workers, [&](size_t task, int) {
          const double start = thread_seconds();
          for (int call = 0; call < calls; ++call) {
            libraries[l].multiply(y[task].data(), x.data(), w.data(), rows, out, in);
          }
          seconds[task] = thread_seconds() - start;
        });
        if (repetition == 0) continue;  // the first call allocates and chooses kernels
        for (const double s : seconds) rates[l].push_back(flop * calls / s / 1e9);
      }
    }
    for (size_t l = 0; l < libraries.size(); ++l) {
      std::vector<double>& sorted = rates[l];
      std::sort(sorted.begin(), sorted.end());
      const auto at = [&](size_t percent) { return sorted[(sorted.size() - 1) * percent / 100]; };
      fmt::print("rows {:4}, {:4} to {:4}  {:5.0f}  [{:.0f}, {:.0f}]  {}\n", rows, in, out, at(50),
                 at(10), at(90), libraries[l].path);
    }
  }
  return 0;
}

}  // namespace
}  // namespace kvlm

int main(int argc, char** argv) { return kvlm::run(argc, argv); }
