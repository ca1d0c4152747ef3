// attention_bench [--threads N] [--repetitions N] [--clock cpu]
//
// How fast attention is. Decode: one step of eight kv_heads over f16 rows of head_dim 128, walking
// through more layers than the caches of the CPU hold, against a plain loop that reads the same
// bytes on the same threads. Prefill and vision: GFLOP/s of the products, masked ones not counted,
// against the library's two products of every head without a softmax. Both sides are interleaved
// within a repetition; printed are median, minimum and maximum. `--clock cpu` counts processor time
// per thread, for a machine that others use too.

#include <fmt/format.h>

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <functional>
#include <string_view>
#include <vector>

#include "kernels/attention.h"
#include "kernels/cpu/matmul.h"
#include "tools/bench/statistics.h"

namespace kvlm {
namespace {

struct Options {
  int threads = 1;
  int repetitions = 11;
  bool cpu_clock = false;
};

double now(const Options& options) {
  timespec time{};
  clock_gettime(options.cpu_clock ? CLOCK_PROCESS_CPUTIME_ID : CLOCK_MONOTONIC, &time);
  const double seconds =
      static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
  return options.cpu_clock ? seconds / options.threads : seconds;
}

/// amount * 1e-9 / seconds of every action, interleaved; one round first to warm up.
std::vector<Spread> rates(const Options& options, double amount,
                          const std::vector<std::function<void()>>& actions) {
  std::vector<std::vector<double>> values(actions.size());
  for (int repetition = -1; repetition < options.repetitions; ++repetition) {
    for (size_t i = 0; i < actions.size(); ++i) {
      const double start = now(options);
      actions[i]();
      if (repetition >= 0) values[i].push_back(amount * 1e-9 / (now(options) - start));
    }
  }
  std::vector<Spread> spreads;
  for (std::vector<double>& list : values) spreads.push_back(spread_of(std::move(list)));
  return spreads;
}

void print(std::string_view what, const Spread& spread, std::string_view unit, double roof) {
  fmt::print("{:44} {:7.1f} [{:.1f}, {:.1f}] {}  {:3.0f} %\n", what, spread.median, spread.min,
             spread.max, unit, 100 * spread.median / roof);
}

Tensor numbers(DType dtype, const Shape& shape) {
  Tensor tensor(dtype, shape);
  uint32_t state = 1;
  for (int64_t i = 0; i < shape.elements(); ++i) {
    state = state * 1664525u + 1013904223u;
    const float value = static_cast<float>(state >> 8) * 0x1p-23f - 1;
    if (dtype == DType::kF16) {
      tensor.as<f16>()[i] = to_f16(value);
    } else {
      tensor.as<float>()[i] = value;
    }
  }
  return tensor;
}

void decode(const Options& options, Stream& stream) {
  constexpr int64_t kHeads = 8;
  constexpr int64_t kHeadDim = 128;
  constexpr int64_t kElements = 128 << 20;  // 256 MiB
  const Tensor cache = numbers(DType::kF16, {kElements});
  for (const int64_t rows : {4096, 8192}) {
    const int64_t layers = kElements / (2 * kHeads * rows * kHeadDim);
    const auto segment_bytes = static_cast<size_t>(rows * kHeadDim) * sizeof(f16);
    const auto segment = [&](int64_t layer, int64_t index) {
      return cache.view().data() + static_cast<size_t>(layer * 2 * kHeads + index) * segment_bytes;
    };
    std::vector<uint64_t> sums(kHeads);
    std::vector<std::function<void()>> actions = {[&] {
      for (int64_t layer = 0; layer < layers; ++layer) {
        stream.pool().parallel_for(kHeads, [&](size_t head, int) {
          uint64_t sum[8] = {};
          const std::byte* p = run(layer, 2 * static_cast<int64_t>(head));
          for (size_t i = 0; i < 2 * segment_bytes; i += sizeof sum) {
            uint64_t x[8];
            std::memcpy(x, p + i, sizeof x);
            for (int head = 0; head < 8; ++head) sum[head] += x[head];
          }
          for (const uint64_t head : sum) sums[head] += head;
        });
      }
    }};
    const std::vector<int> queries = {1, 2, 4, 7, 8};
    for (const int q_per_kv : queries) {
      actions.emplace_back([&, q_per_kv] {
        const Tensor q = numbers(DType::kF32, {kHeads, q_per_kv, kHeadDim});
        Tensor out(DType::kF32, q.shape());
        std::vector<float> max(static_cast<size_t>(kHeads * q_per_kv));
        std::vector<float> sum(max.size());
        std::vector<DecodeSplit> pieces;
        for (int64_t layer = 0; layer < layers; ++layer) {
          pieces.clear();
          for (int64_t head = 0; head < kHeads; ++head) {
            const int64_t first = head * q_per_kv;
            pieces.push_back({q.as<float>() + first * kHeadDim,
                              {run(layer, 2 * head), run(layer, 2 * head + 1), DType::kF16, rows},
                              {&max[static_cast<size_t>(first)], &sum[static_cast<size_t>(first)],
                               out.as<float>() + first * kHeadDim}});
          }
          attend_rows(pieces, q_per_kv, kHeadDim, 0.088f, stream);
        }
      });
    }
    const double bytes =
        static_cast<double>(layers * 2 * kHeads) * static_cast<double>(segment_bytes);
    const std::vector<Spread> found = rates(options, bytes, actions);
    const double roof = found[0].median;
    print(fmt::format("read {} rows", rows), found[0], "GB/s", roof);
    for (size_t i = 0; i < queries.size(); ++i) {
      print(fmt::format("attend {} rows, q_per_kv {}", rows, queries[i]), found[i + 1], "GB/s",
            roof);
    }
    if (sums[0] == 1) fmt::print("\n");  // used, so that the loop cannot be left out
  }
}

struct Prefill {
  std::string_view name;
  int64_t n, q_heads, kv_heads, head_dim;
  bool causal;
};

void prefill(const Options& options, Stream& stream, const Prefill& s) {
  const Shape q_shape{s.n, s.q_heads, s.head_dim};
  const Shape k_shape{s.n, s.kv_heads, s.head_dim};
  const Tensor q = numbers(DType::kF32, q_shape);
  const Tensor k = numbers(DType::kF32, k_shape);
  const Tensor v_transposed = numbers(DType::kF32, {s.kv_heads, s.head_dim, s.n});
  Tensor out(DType::kF32, q_shape);
  const auto threads = static_cast<int64_t>(stream.pool().threads());
  Tensor scores(DType::kF32, {threads, s.n, s.n});
  const auto n = static_cast<size_t>(s.n);
  const auto dim = static_cast<size_t>(s.head_dim);
  const auto q_heads = static_cast<size_t>(s.q_heads);
  const auto kv_heads = static_cast<size_t>(s.kv_heads);
  const float scale = 1 / std::sqrt(static_cast<float>(dim));
  const double every = 4 * static_cast<double>(s.n * s.n * s.q_heads * s.head_dim);
  const double seen =
      s.causal ? every * static_cast<double>(s.n + 1) / static_cast<double>(2 * s.n) : every;
  const std::vector<Spread> found =
      rates(options, seen,
            {[&] { attention(out, q, k, k, {}, s.causal, scale, DType::kF32, stream); },
             [&] {
               stream.pool().parallel_for(q_heads, [&](size_t head, int worker) {
                 const size_t kv_head = head / (q_heads / kv_heads);
                 float* p = scores.as<float>() + static_cast<size_t>(worker) * n * n;
                 cpu::multiply({p, n}, {q.as<float>() + head * dim, q_heads * dim},
                               {k.as<float>() + kv_head * dim, kv_heads * dim}, n, n, dim, false);
                 cpu::multiply({out.as<float>() + head * dim, q_heads * dim}, {p, n},
                               {v_transposed.as<float>() + kv_head * dim * n, n}, n, dim, n, false);
               });
             }});
  const double library = found[1].median * every / seen;
  print(s.name, found[0], "GFLOP/s", library);
  fmt::print("{:44} {:7.1f} GFLOP/s, masked products counted\n", "  the library's two products",
             library);
}

int run(const Options& options) {
  ThreadPool pool(options.threads);
  Stream stream(pool);
  decode(options, stream);
  for (const Prefill& shape :
       {Prefill{"CLIP ViT-L/14 at 336 pixels", 577, 16, 16, 64, false},
        Prefill{"LLaMA 7B, 640 rows", 640, 32, 32, 128, true},
        Prefill{"32 heads of 64, 640 rows", 640, 32, 32, 64, true},
        Prefill{"8B with 8 kv_heads, 640 rows", 640, 32, 8, 128, true},
        Prefill{"7B with 28 and 4 heads, 1100 rows", 1100, 28, 4, 128, true},
        Prefill{"Qwen2.5-VL tower, 1024 patches", 1024, 16, 16, 80, false}}) {
    prefill(options, stream, shape);
  }
  return 0;
}

}  // namespace
}  // namespace kvlm

int main(int argc, char** argv) {
  kvlm::Options options;
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string_view name = argv[i];
    if (name == "--threads") options.threads = std::atoi(argv[i + 1]);
    if (name == "--repetitions") options.repetitions = std::atoi(argv[i + 1]);
    if (name == "--clock") options.cpu_clock = std::string_view(argv[i + 1]) == "cpu";
  }
  return kvlm::run(options);
}
