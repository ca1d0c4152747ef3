// packed_bench [--threads N] [--repetitions N] [--rows N] [--only NAME] [--queries N] [--clock cpu]
//
// How fast decode attention reads packed keys and values: one step of eight kv_heads of head_dim
// 128, walking through more layers than the caches of the CPU hold. The same step over f16 rows is
// timed in between, so that both meet the same machine. Printed per format and q_per_kv: median,
// minimum and maximum of the nanoseconds per cached row (keys and values of one kv_head), gigabytes
// per second of stored bytes, scales included, and how often faster than f16 rows it is (ratio of
// medians, and of minima in case other programs ran). `--clock cpu` counts processor time per
// thread, for a machine that others use too.

#include <fmt/format.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <functional>
#include <string_view>
#include <vector>

#include "kernels/attend_packed.h"
#include "kernels/attention.h"
#include "kernels/base/tensor.h"
#include "tools/bench/statistics.h"

namespace kvlm {
namespace {

struct Options {
  int threads = 1;
  int repetitions = 11;
  int rows = 4096;
  std::string_view only;
  int queries = 0;  // 0: several
  bool cpu_clock = false;
};

constexpr int kHeads = 8;
constexpr int kHeadDim = 128;
constexpr float kScale = 0.088f;

double now(const Options& options) {
  timespec time{};
  clock_gettime(options.cpu_clock ? CLOCK_PROCESS_CPUTIME_ID : CLOCK_MONOTONIC, &time);
  const double seconds =
      static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
  return options.cpu_clock ? seconds / options.threads : seconds;
}

uint32_t random_bits() {
  static uint32_t state = 1;
  state = state * 1664525u + 1013904223u;
  return state >> 8;
}

std::vector<float> random_floats(size_t count) {
  std::vector<float> values(count);
  for (float& x : values) x = static_cast<float>(random_bits()) * 0x1p-23f - 1;
  return values;
}

/// How keys or values are packed, and in blocks of how many rows (0: all in one).
struct Packing {
  PackedFormat format;
  int block_rows = 32;
};

Packing packing(CodeFormat code, ScaleAxis axis, int block_rows) {
  Packing result;
  result.block_rows = block_rows;
  result.format.axis = axis;
  result.format.group_size = axis == ScaleAxis::kToken ? 32 : 0;
  result.format.section[0].code = code;
  result.format.section[0].channels = kHeadDim;
  if (code == CodeFormat::kTrit5) {
    result.format.section[0].zero_stored = false;
    result.format.section[0].offset = -1;
  }
  return result;
}

/// Two bits for half of the channels, a sign for the others.
Packing mixed_packing(int block_rows) {
  Packing result = packing(CodeFormat::kBits2, ScaleAxis::kChannel, block_rows);
  result.format.sections = 2;
  result.format.section[0].channels = kHeadDim / 2;
  result.format.section[1] = {CodeFormat::kBits1, kHeadDim / 2, false, 2, -1, 1 << 30, 0};
  return result;
}

/// The packed keys or values of every layer and kv_head; a block's codes, scales and zero points
/// lie side by side.
class Store {
 public:
  Store(const Packing& packing, int layers, int rows) : format_(packing.format) {
    const int block_rows = packing.block_rows == 0 ? rows : packing.block_rows;
    const size_t code_bytes = static_cast<size_t>(block_rows) * format_.row_bytes();
    const size_t scale_bytes = format_.scales(block_rows) * sizeof(f16);
    const size_t zero_bytes = format_.zeros(block_rows) * sizeof(f16);
    const size_t block_bytes = (code_bytes + scale_bytes + zero_bytes + 63) / 64 * 64;
    per_head_ = static_cast<size_t>(rows / block_rows);
    const size_t count = static_cast<size_t>(layers * kHeads) * per_head_;
    bytes_ = count * (code_bytes + scale_bytes + zero_bytes);
    memory_ = Tensor(DType::kU8, {static_cast<int64_t>(count * block_bytes)});
    for (size_t i = 0; i < count; ++i) {
      std::byte* p = memory_.view().data() + i * block_bytes;
      for (size_t b = 0; b < code_bytes; ++b) p[b] = static_cast<std::byte>(random_bits() % 243);
      for (size_t b = 0; b < scale_bytes + zero_bytes; b += sizeof(f16)) {
        const f16 x = to_f16(static_cast<float>(random_bits() % 1000) * 1e-3f);
        std::memcpy(p + code_bytes + b, &x, sizeof x);
      }
      blocks_.push_back({p, p + code_bytes,
                         zero_bytes == 0 ? nullptr : p + code_bytes + scale_bytes, block_rows,
                         block_rows, nullptr});
    }
  }

  SlotRun run(int layer, int head, int rows) const {
    SlotRun run;
    run.slots = rows;
    run.format = &format_;
    run.blocks = {&blocks_[static_cast<size_t>(layer * kHeads + head) * per_head_], per_head_};
    return run;
  }
  size_t bytes() const { return bytes_; }

 private:
  PackedFormat format_;
  Tensor memory_;
  std::vector<PackedBlock> blocks_;
  size_t per_head_ = 0;
  size_t bytes_ = 0;
};

/// One decode step over f16 rows of all layers.
class FullStep {
 public:
  FullStep(int layers, int rows) : layers_(layers), rows_(rows) {
    const auto elements =
        static_cast<size_t>(2 * layers * kHeads) * kHeadDim * static_cast<size_t>(rows);
    cache_ = Tensor(DType::kF16, {static_cast<int64_t>(elements)});
    for (size_t i = 0; i < elements; ++i) {
      cache_.as<f16>()[i] = to_f16(static_cast<float>(random_bits()) * 0x1p-23f - 1);
    }
  }

  size_t bytes() const { return cache_.view().bytes(); }

  void operator()(int q_per_kv, Stream& stream) {
    const auto queries = static_cast<size_t>(q_per_kv);
    const std::vector<float> q = random_floats(kHeads * queries * kHeadDim);
    std::vector<float> out(q.size());
    std::vector<float> max(kHeads * queries);
    std::vector<float> sum(max.size());
    const auto run_bytes = static_cast<size_t>(rows_) * kHeadDim * sizeof(f16);
    std::vector<DecodePiece> pieces(kHeads);
    for (int layer = 0; layer < layers_; ++layer) {
      for (size_t head = 0; head < kHeads; ++head) {
        const std::byte* p =
            cache_.view().data() + (static_cast<size_t>(layer) * kHeads + head) * 2 * run_bytes;
        const size_t first = head * queries;
        pieces[head] = {&q[first * kHeadDim],
                        {p, p + run_bytes, DType::kF16, rows_},
                        {&max[first], &sum[first], &out[first * kHeadDim]}};
      }
      attend_rows(pieces, q_per_kv, kHeadDim, kScale, stream);
    }
  }

 private:
  int layers_;
  int rows_;
  Tensor cache_;
};

/// One decode step over packed rows of all layers.
class PackedStep {
 public:
  PackedStep(const Packing& keys, const Packing& values, int layers, int rows)
      : layers_(layers), rows_(rows), keys_(keys, layers, rows), values_(values, layers, rows) {}

  size_t bytes() const { return keys_.bytes() + values_.bytes(); }

  void operator()(int q_per_kv, Stream& stream) {
    const auto queries = static_cast<size_t>(q_per_kv);
    const auto rows = static_cast<size_t>(rows_);
    const std::vector<float> q = random_floats(kHeads * queries * kHeadDim);
    std::vector<float> out(q.size());
    weights_.resize(kHeads * queries * rows);
    std::vector<PackedLane> lanes(kHeads);
    std::vector<SlotRun> runs(2 * kHeads);
    for (int layer = 0; layer < layers_; ++layer) {
      for (size_t head = 0; head < kHeads; ++head) {
        runs[2 * head] = keys_.run(layer, static_cast<int>(head), rows_);
        runs[2 * head + 1] = values_.run(layer, static_cast<int>(head), rows_);
        PackedLane& lane = lanes[head];
        lane.q = lane.q_packed = &q[head * queries * kHeadDim];
        lane.keys = {&runs[2 * head], 1};
        lane.values = {&runs[2 * head + 1], 1};
        lane.slots = rows_;
        lane.weights = &weights_[head * queries * rows];
        lane.out = &out[head * queries * kHeadDim];
      }
      attend_packed(lanes, q_per_kv, kHeadDim, kScale, stream);
    }
  }

 private:
  int layers_;
  int rows_;
  Store keys_;
  Store values_;
  std::vector<float> weights_;
};

struct Case {
  std::string_view name;
  Packing keys, values;
};

std::vector<Case> cases() {
  using enum CodeFormat;
  using enum ScaleAxis;
  return {{"kivi 1 bit", packing(kBits1, kChannel, 32), packing(kBits1, kToken, 32)},
          {"kivi 2 bits", packing(kBits2, kChannel, 32), packing(kBits2, kToken, 32)},
          {"kivi 3 bits", packing(kBits3, kChannel, 32), packing(kBits3, kToken, 32)},
          {"kivi 4 bits", packing(kBits4, kChannel, 32), packing(kBits4, kToken, 32)},
          {"calibquant 1 bit", packing(kBits1, kChannel, 0), packing(kBits1, kChannel, 0)},
          {"calibquant 2 bits", packing(kBits2, kChannel, 0), packing(kBits2, kChannel, 0)},
          {"calibquant 8 bits", packing(kBits8, kChannel, 0), packing(kBits8, kChannel, 0)},
          {"per head 1 bit", packing(kBits1, kHead, 0), packing(kBits1, kHead, 0)},
          {"per token 2 bits", packing(kBits2, kToken, 32), packing(kBits2, kToken, 32)},
          {"trit5", packing(kTrit5, kChannel, 32), packing(kTrit5, kChannel, 32)},
          {"vidkv 2+1 bits, trit5", mixed_packing(32), packing(kTrit5, kChannel, 32)}};
}

int run(const Options& options) {
  ThreadPool pool(options.threads);
  Stream stream(pool);
  constexpr int kLayers = 12;
  const double row_count = static_cast<double>(kLayers * kHeads) * options.rows;
  FullStep full(kLayers, options.rows);
  fmt::print("{} rows, {} threads; ns per row: median [min, max]\n", options.rows, options.threads);
  for (const Case& c : cases()) {
    if (c.name.find(options.only) == std::string_view::npos) continue;
    // As many layers as fill the cache of the CPU with the smallest format, too.
    constexpr int kPackedLayers = 4 * kLayers;
    PackedStep packed(c.keys, c.values, kPackedLayers, options.rows);
    for (const int q_per_kv : {1, 4, 7}) {
      if (options.queries != 0 && q_per_kv != options.queries) continue;
      std::vector<double> full_ns;
      std::vector<double> packed_ns;
      for (int repetition = -1; repetition < options.repetitions; ++repetition) {
        const double start = now(options);
        full(q_per_kv, stream);
        const double middle = now(options);
        packed(q_per_kv, stream);
        const double end = now(options);
        if (repetition < 0) continue;
        full_ns.push_back(1e9 * (middle - start) / row_count);
        packed_ns.push_back(1e9 * (end - middle) / (row_count * 4));
      }
      const Spread f = spread_of(full_ns);
      const Spread p = spread_of(packed_ns);
      const double bytes = static_cast<double>(packed.bytes()) / (row_count * 4);
      fmt::print(
          "{:22} q_per_kv {}: {:6.2f} [{:.2f}, {:.2f}]  {:5.2f} GB/s   f16 {:6.2f} [{:.2f}, "
          "{:.2f}]   {:4.2f} x ({:4.2f} x of minima)\n",
          c.name, q_per_kv, p.median, p.min, p.max, bytes / p.median, f.median, f.min, f.max,
          f.median / p.median, f.min / p.min);
    }
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
    if (name == "--rows") options.rows = std::atoi(argv[i + 1]);
    if (name == "--queries") options.queries = std::atoi(argv[i + 1]);
    if (name == "--clock") options.cpu_clock = std::string_view(argv[i + 1]) == "cpu";
    if (name == "--only") options.only = argv[i + 1];
  }
  return kvlm::run(options);
}
