#include "kernels/roofline.h"

#include <chrono>
#include <numeric>
#include <vector>

#include "kernels/base/queue.h"
#include "kernels/base/tensor.h"
#include "kernels/cpu/matmul.h"
#include "kernels/cuda/product/gemm.h"

namespace kvlm {

namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

/// Eight running sums, so that the loads and not the additions are what takes the time.
uint64_t sum(std::span<const std::byte> bytes) {
  const auto* words = reinterpret_cast<const uint64_t*>(bytes.data());
  const size_t count = bytes.size() / sizeof(uint64_t);
  uint64_t sums[8] = {};
  for (size_t i = 0; i + 8 <= count; i += 8) {
    for (size_t head = 0; head < 8; ++head) sums[head] += words[i + head];
  }
  return std::accumulate(std::begin(sums), std::end(sums), uint64_t{0});
}

}  // namespace

double measure_memory_rate(std::span<std::byte> bytes, Stream& stream) {
  if (stream.device().kind == DeviceKind::kCuda) {
    const size_t half = bytes.size() / 2;
    stream.synchronize();
    const Clock::time_point start = Clock::now();
    stream.queue().copy(bytes.data() + half, true, bytes.data(), true, half);
    stream.synchronize();
    return static_cast<double>(2 * half) / seconds_since(start);
  }
  constexpr size_t kBlock = size_t{1} << 20;
  const size_t blocks = bytes.size() / kBlock;
  std::vector<uint64_t> sums(blocks);
  const Clock::time_point start = Clock::now();
  stream.pool().parallel_for(
      blocks, [&](size_t block, int) { sums[block] = sum(bytes.subspan(block * kBlock, kBlock)); });
  const double seconds = seconds_since(start);
  // Used, so that the loop cannot be left out.
  const bool impossible = std::accumulate(sums.begin(), sums.end(), uint64_t{0}) == 1;
  return static_cast<double>(blocks * kBlock) / seconds + (impossible ? 1 : 0);
}

namespace {

/// A matrix of small numbers for each thread.
std::vector<Tensor> matrices(size_t threads, int size) {
  std::vector<Tensor> made;
  for (size_t i = 0; i < threads; ++i) {
    float* values = made.emplace_back(DType::kF32, Shape{size, size}).as<float>();
    const auto n = static_cast<size_t>(size);
    for (size_t j = 0; j < n * n; ++j) values[j] = static_cast<float>(j % 7) - 3.0f;
  }
  return made;
}

}  // namespace

double measure_matrix_rate(int size, DType dtype, Stream& stream) {
  const auto edge = static_cast<double>(size);
  if (stream.device().kind == DeviceKind::kCuda)
    return cuda::measure_matrix_rate(size, dtype, stream);
  const auto threads = static_cast<size_t>(stream.pool().threads());
  const auto n = static_cast<size_t>(size);
  std::vector<Tensor> x = matrices(threads, size);
  std::vector<Tensor> w = matrices(threads, size);
  std::vector<Tensor> y = matrices(threads, size);
  const auto multiply_all = [&] {
    stream.pool().parallel_for(threads, [&](size_t i, int) {
      cpu::multiply({y[i].as<float>(), n}, {x[i].as<float>(), n}, {w[i].as<float>(), n}, n, n, n,
                    /*add=*/false);
    });
  };
  multiply_all();
  const Clock::time_point start = Clock::now();
  multiply_all();
  const double seconds = seconds_since(start);
  return 2 * edge * edge * edge * static_cast<double>(threads) / seconds;
}

}  // namespace kvlm
