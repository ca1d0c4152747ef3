// gemm_bench [--threads N] [--repetitions N] [--only decode|products] [--dtype bf16] [--clock cpu]
//
// How fast linear() is. Decode: one pass over all weights of a 1.1B LLaMA (22 layers, 2048 wide,
// 5632 inside, 256 kv channels, 32 000 tokens; 2.1 GB of bf16), against a plain loop that reads the
// same bytes on the same threads. Prefill and vision: GFLOP/s, against the library's product of
// large f32 matrices, one per thread. Everything is interleaved within a repetition, so that both
// sides of a ratio see the same machine; printed are the median and the 10th and 90th percentile.
// `--clock cpu` counts processor time per thread instead of time on the wall: on a machine that
// others use too, their turns do not count then.

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <functional>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/base/thread_pool.h"
#include "kernels/cpu/matmul.h"
#include "kernels/elementwise.h"
#include "kernels/gemm.h"

namespace kvlm {
namespace {

/// Seconds since some start, on the wall or of this process's processor time per thread.
class Clock {
 public:
  Clock(bool cpu, int threads) : cpu_(cpu), threads_(threads) {}

  double seconds_of(const std::function<void()>& action) const {
    const double start = now();
    action();
    return now() - start;
  }

 private:
  double now() const {
    timespec time{};
    clock_gettime(cpu_ ? CLOCK_PROCESS_CPUTIME_ID : CLOCK_MONOTONIC, &time);
    const double seconds =
        static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
    return cpu_ ? seconds / threads_ : seconds;
  }

  bool cpu_;
  int threads_;
};

std::string summary(std::vector<double> values, int width, int digits) {
  std::sort(values.begin(), values.end());
  const auto at = [&](double share) {
    return values[static_cast<size_t>(share * static_cast<double>(values.size() - 1) + 0.5)];
  };
  return fmt::format("{:{}.{}f}  [{:.{}f}, {:.{}f}]", at(0.5), width, digits, at(0.1), digits,
                     at(0.9), digits);
}

Tensor random_tensor(DType dtype, const Shape& shape, Stream& stream) {
  Tensor values(DType::kF32, shape);
  std::minstd_rand generator(7);
  for (int64_t i = 0; i < shape.elements(); ++i) {
    values.as<float>()[i] = static_cast<float>(generator()) * 0x1p-31f - 0.5f;
  }
  if (dtype == DType::kF32) return values;
  Tensor tensor(dtype, shape);
  convert(tensor, values, stream);
  return tensor;
}

/// Reads every byte once; the sum keeps the compiler from leaving that out.
uint64_t read_all(ConstTensorView view, ThreadPool& pool, std::vector<uint64_t>& sums) {
  constexpr size_t kBlock = size_t{1} << 20;
  const size_t blocks = (view.bytes() + kBlock - 1) / kBlock;
  pool.parallel_for(blocks, [&](size_t task, int worker) {
    const auto* words = reinterpret_cast<const uint64_t*>(view.data() + task * kBlock);
    const size_t count = std::min(kBlock, view.bytes() - task * kBlock) / sizeof(uint64_t);
    uint64_t sum = 0;
    for (size_t i = 0; i < count; ++i) sum += words[i];
    sums[static_cast<size_t>(worker) * 8] += sum;
  });
  return sums[0];
}

void bench_decode(DType dtype, ThreadPool& pool, Stream& stream, const Clock& clock,
                  int repetitions) {
  constexpr int64_t kWidth = 2048, kInner = 5632, kKv = 256, kVocabulary = 32000, kLayers = 22;
  std::vector<Tensor> weights;
  const Tensor square = random_tensor(dtype, {kWidth, kWidth}, stream);
  const Tensor wide = random_tensor(dtype, {kInner, kWidth}, stream);
  const auto add_copy = [&](const Tensor& like, int64_t out, int64_t in) {
    Tensor& copy = weights.emplace_back(dtype, Shape{out, in});
    for (size_t at = 0; at < copy.bytes(); at += like.bytes()) {
      std::memcpy(copy.view().data() + at, like.view().data(),
                  std::min(like.bytes(), copy.bytes() - at));
    }
  };
  for (int64_t layer = 0; layer < kLayers; ++layer) {
    add_copy(square, kWidth, kWidth);
    add_copy(square, kKv, kWidth);
    add_copy(square, kKv, kWidth);
    add_copy(square, kWidth, kWidth);
    add_copy(wide, kInner, kWidth);
    add_copy(wide, kInner, kWidth);
    add_copy(wide, kWidth, kInner);
  }
  add_copy(wide, kVocabulary, kWidth);
  double bytes = 0;
  for (const Tensor& w : weights) bytes += static_cast<double>(w.bytes());

  const int64_t batches[] = {1, 2, 4, 8, 16};
  const Tensor x = random_tensor(DType::kF32, {16, kInner}, stream);
  Tensor y(DType::kF32, {16, kVocabulary});
  std::vector<uint64_t> sums(static_cast<size_t>(pool.threads()) * 8);
  std::vector<double> reading;
  std::vector<double> rates[std::size(batches)], ratios[std::size(batches)];
  for (int repetition = 0; repetition < repetitions; ++repetition) {
    for (size_t b = 0; b < std::size(batches); ++b) {
      const int64_t rows = batches[b];
      const double read = clock.seconds_of([&] {
        for (const Tensor& w : weights) read_all(w, pool, sums);
      });
      const double computed = clock.seconds_of([&] {
        for (const Tensor& w : weights) {
          const int64_t out = w.shape()[0], in = w.shape()[1];
          linear(y.view().reshape({16 * kVocabulary}).slice(0, rows * out).reshape({rows, out}),
                 x.view().reshape({16 * kInner}).slice(0, rows * in).reshape({rows, in}), w, {},
                 false, stream);
        }
      });
      reading.push_back(bytes / read / 1e9);
      rates[b].push_back(bytes / computed / 1e9);
      ratios[b].push_back(100 * read / computed);
    }
  }
  fmt::print("decode, {} weights, {:.2f} GB, {} threads, {} repetitions\n", dtype_name(dtype),
             bytes / 1e9, pool.threads(), repetitions);
  fmt::print("  plain read       GB/s {}\n", summary(reading, 6, 1));
  for (size_t b = 0; b < std::size(batches); ++b) {
    fmt::print("  rows {:2}          GB/s {}   % of the read {}\n", batches[b],
               summary(rates[b], 6, 1), summary(ratios[b], 5, 1));
  }
}

void bench_products(DType dtype, ThreadPool& pool, Stream& stream, const Clock& clock,
                    int repetitions) {
  struct Case {
    int64_t rows, in, out;
  };
  constexpr Case kCases[] = {{640, 2048, 2048}, {640, 2048, 5632}, {640, 5632, 2048},
                             {640, 2048, 256},  {577, 1024, 1024}, {577, 1024, 4096},
                             {577, 4096, 1024}, {64, 2048, 2048},  {17, 2048, 2048}};
  constexpr size_t kLarge = 1536;
  const auto threads = static_cast<size_t>(pool.threads());
  const Shape large{static_cast<int64_t>(kLarge), static_cast<int64_t>(kLarge)};
  std::vector<Tensor> a, b, c;
  for (size_t i = 0; i < threads; ++i) {
    a.push_back(random_tensor(DType::kF32, large, stream));
    b.push_back(random_tensor(DType::kF32, large, stream));
    c.emplace_back(DType::kF32, large);
  }
  std::vector<double> library;
  std::vector<double> rates[std::size(kCases)], ratios[std::size(kCases)];
  for (size_t k = 0; k < std::size(kCases); ++k) {
    const auto [rows, in, out] = kCases[k];
    const Tensor x = random_tensor(DType::kF32, {rows, in}, stream);
    const Tensor w = random_tensor(dtype, {out, in}, stream);
    Tensor y(DType::kF32, {rows, out});
    linear(y, x, w, {}, false, stream);
    for (int repetition = 0; repetition < repetitions; ++repetition) {
      const double reference = clock.seconds_of([&] {
        pool.parallel_for(threads, [&](size_t i, int) {
          cpu::multiply({c[i].as<float>(), kLarge}, {a[i].as<float>(), kLarge},
                        {b[i].as<float>(), kLarge}, kLarge, kLarge, kLarge, false);
        });
      });
      const double flop = 2.0 * static_cast<double>(rows * in * out);
      const int calls = std::max(1, static_cast<int>(5e9 / flop));
      const double computed = clock.seconds_of([&] {
        for (int call = 0; call < calls; ++call) linear(y, x, w, {}, false, stream);
      });
      const double best = 2.0 * kLarge * kLarge * kLarge * static_cast<double>(threads) / reference;
      const double rate = flop * calls / computed;
      library.push_back(best / 1e9);
      rates[k].push_back(rate / 1e9);
      ratios[k].push_back(100 * rate / best);
    }
  }
  fmt::print("products, {} weights, {} threads, {} repetitions\n", dtype_name(dtype),
             pool.threads(), repetitions);
  fmt::print("  library, {0} x {0} x {0} each    GFLOP/s {1}\n", kLarge, summary(library, 6, 0));
  for (size_t k = 0; k < std::size(kCases); ++k) {
    fmt::print("  rows {:3}, {:4} to {:4}          GFLOP/s {}   % of the library {}\n",
               kCases[k].rows, kCases[k].in, kCases[k].out, summary(rates[k], 6, 0),
               summary(ratios[k], 5, 1));
  }
}

int run(int argc, char** argv) {
  int threads = 0;
  int repetitions = 9;
  std::string_view only = "all";
  DType dtype = DType::kBF16;
  bool cpu = false;
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string_view name = argv[i];
    if (name == "--threads") threads = std::atoi(argv[i + 1]);
    if (name == "--repetitions") repetitions = std::atoi(argv[i + 1]);
    if (name == "--only") only = argv[i + 1];
    if (name == "--clock") cpu = std::string_view(argv[i + 1]) == "cpu";
    if (name == "--dtype") dtype = parse_float_dtype(argv[i + 1]).value_or(dtype);
  }
  ThreadPool pool(threads);
  Stream stream(pool);
  const Clock clock(cpu, pool.threads());
  if (only == "all" || only == "decode") bench_decode(dtype, pool, stream, clock, repetitions);
  if (only == "all" || only == "products") bench_products(dtype, pool, stream, clock, repetitions);
  return 0;
}

}  // namespace
}  // namespace kvlm

int main(int argc, char** argv) { return kvlm::run(argc, argv); }
