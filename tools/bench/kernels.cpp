#include "tools/bench/kernels.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <ctime>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "kernels/attend_packed.h"
#include "kernels/attention.h"
#include "kernels/base/error.h"
#include "kernels/base/queue.h"
#include "kernels/base/tensor.h"
#include "kernels/decode_table.h"
#include "kernels/elementwise.h"
#include "kernels/roofline.h"
#include "kernels/row_batch.h"
#include "tools/bench/statistics.h"
#include "tools/common/program.h"

// `vlm-bench kernels`: the time of decode attention alone over packed rows of every kind, with the
// same step over f16 rows in between, so that both meet the same machine. The cache holds more
// layers than the processor's own caches, and the rate of a plain copy stands beside it.
namespace kvlm {
namespace {

constexpr int kHeadsPerSequence = 8;
constexpr float kScale = 0.088f;

double now() {
  timespec time{};
  clock_gettime(CLOCK_MONOTONIC, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

/// A plain generator, the same numbers in every run.
class Random {
 public:
  uint32_t bits() {
    state_ = state_ * 1664525u + 1013904223u;
    return state_ >> 8;
  }
  float number() { return static_cast<float>(bits()) * 0x1p-23f - 1; }
  std::vector<float> numbers(size_t count) {
    std::vector<float> values(count);
    for (float& x : values) x = number();
    return values;
  }

 private:
  uint32_t state_ = 1;
};

/// How keys or values are packed, and in blocks of how many rows (0: all in one).
struct Packing {
  PackedFormat format;
  int block_rows = 32;
};

Packing packing(CodeFormat code, ScaleAxis axis, int head_dim, int block_rows) {
  Packing result;
  result.block_rows = block_rows;
  result.format.axis = axis;
  result.format.group_size = axis == ScaleAxis::kToken ? 32 : 0;
  result.format.section[0] = section_of(code, head_dim);
  return result;
}

/// Two bits for half of the channels, a sign for the others.
Packing mixed_packing(int head_dim, int block_rows) {
  Packing result = packing(CodeFormat::kBits2, ScaleAxis::kChannel, head_dim, block_rows);
  result.format.sections = 2;
  result.format.section[0].channels = head_dim / 2;
  result.format.section[1] = {
      CodeFormat::kBits1, head_dim - head_dim / 2, false, 2, -1, 1 << 30, 0};
  return result;
}

/// The packed keys or values of every layer and kv_head; a block's codes, scales and zero points
/// lie side by side.
class Store {
 public:
  Store(const Packing& packing, int layers, int heads, int rows, Stream& stream)
      : format_(packing.format), heads_(heads) {
    Random random;
    const int block_rows = packing.block_rows == 0 ? rows : packing.block_rows;
    const size_t code_bytes = static_cast<size_t>(block_rows) * format_.row_bytes();
    const size_t scale_bytes = format_.scales(block_rows) * sizeof(f16);
    const size_t zero_bytes = format_.zeros(block_rows) * sizeof(f16);
    const size_t block_bytes = (code_bytes + scale_bytes + zero_bytes + 63) / 64 * 64;
    block_bytes_ = static_cast<std::ptrdiff_t>(block_bytes);
    per_head_ = static_cast<size_t>(rows / block_rows);
    const size_t count = static_cast<size_t>(layers * heads) * per_head_;
    bytes_ = count * (code_bytes + scale_bytes + zero_bytes);
    memory_ = Tensor(DType::kU8, {static_cast<int64_t>(count * block_bytes)}, stream.device());
    // Numbers of one head on the host, the same in every head.
    Tensor numbers(DType::kU8, {static_cast<int64_t>(per_head_ * block_bytes)});
    for (size_t i = 0; i < per_head_; ++i) {
      std::byte* p = numbers.view().data() + i * block_bytes;
      for (size_t b = 0; b < code_bytes; ++b) p[b] = static_cast<std::byte>(random.bits() % 243);
      for (size_t b = 0; b < scale_bytes + zero_bytes; b += sizeof(f16)) {
        const f16 x = to_f16(static_cast<float>(random.bits() % 1000) * 1e-3f);
        std::memcpy(p + code_bytes + b, &x, sizeof x);
      }
    }
    for (size_t i = 0; i < count; ++i) {
      const std::byte* p = memory_.view().data() + i * block_bytes;
      if (i % per_head_ == 0) {
        const auto bytes = static_cast<int64_t>(per_head_ * block_bytes);
        copy(memory_.view().slice(static_cast<int64_t>(i * block_bytes), bytes), numbers, stream);
      }
      blocks_.push_back({p, p + code_bytes,
                         zero_bytes == 0 ? nullptr : p + code_bytes + scale_bytes, block_rows,
                         block_rows, nullptr});
    }
  }

  SlotSegment run(int layer, int head, int rows) const {
    SlotSegment segment;
    segment.slots = rows;
    segment.format = &format_;
    segment.code_stride = segment.scale_stride = per_head_ > 1 ? block_bytes_ : 0;
    segment.blocks = {&blocks_[static_cast<size_t>(layer * heads_ + head) * per_head_], per_head_};
    return segment;
  }
  size_t bytes() const { return bytes_; }

 private:
  PackedFormat format_;
  int heads_;
  Tensor memory_;
  std::vector<PackedBlock> blocks_;
  size_t per_head_ = 0;
  std::ptrdiff_t block_bytes_ = 0;
  size_t bytes_ = 0;
};

/// Queries and outputs of all heads, on the stream's device.
struct Heads {
  Heads(int heads, int q_per_kv, int head_dim, Stream& stream)
      : q(DType::kF32, {heads, q_per_kv, head_dim}, stream.device()),
        out(DType::kF32, q.shape(), stream.device()) {
    std::vector<float> numbers = Random().numbers(static_cast<size_t>(q.shape().elements()));
    copy(q, ConstTensorView(numbers.data(), DType::kF32, q.shape()), stream);
  }
  float* q_of(size_t head) { return q.view().slice(static_cast<int64_t>(head), 1).as<float>(); }
  float* out_of(size_t head) { return out.view().slice(static_cast<int64_t>(head), 1).as<float>(); }

  Tensor q, out;
};

/// One layer after the other of a DecodeTable, as a cache on a GPU attends: the sequences are laid
/// once, a step has been counted, and its rows are stored in front of each layer's attention.
class TableStep {
 public:
  ///   fixed_segments  of a KV head's keys, or values
  TableStep(const TableShape& shape, int fixed_segments, int sequences, int rows, Device device)
      : layers_(shape.layers),
        windows_(static_cast<size_t>(shape.layers)),
        newest_(DType::kF32, {2, sequences, shape.kv_heads, shape.head_dim}, device) {
    table_ = std::make_unique<DecodeTable>(shape, windows_, device);
    TableLoad load;
    load.slots = sequences;
    load.longest = rows + 1;
    load.fixed_segments = fixed_segments;
    table_->reserve(load);
    for (int i = 0; i < sequences; ++i) step_.push_back({i, i});
  }

  /// heads_of(slot, layer) are the KV heads of a sequence.
  template <class HeadsOf>
  void lay(const HeadsOf& heads_of, Stream& stream) {
    for (const TableRow& row : step_) {
      for (int layer = 0; layer < layers_; ++layer) {
        table_->set(row.slot, layer, heads_of(row.slot, layer), stream);
      }
    }
    Tensor numbers(DType::kF32, newest_.shape());
    const std::vector<float> values =
        Random().numbers(static_cast<size_t>(numbers.shape().elements()));
    std::copy(values.begin(), values.end(), numbers.as<float>());
    copy(newest_, numbers, stream);
    table_->start(step_, stream);
    stream.synchronize();
  }

  void operator()(Heads& heads, Stream& stream) {
    const float* k = newest_.as<float>();
    const float* v = newest_.view().slice(1, 1).as<float>();
    for (int layer = 0; layer < layers_; ++layer) {
      table_->store(layer, k, v, stream);
      table_->attend(layer, heads.q_of(0), heads.out_of(0), kScale, stream);
    }
    stream.synchronize();
  }

 private:
  int layers_;
  std::vector<std::array<RowWindow, 2>> windows_;  // of none: nothing is packed
  std::vector<TableRow> step_;
  Tensor newest_;  // keys of the step, then values
  std::unique_ptr<DecodeTable> table_;
};

/// One decode step over f16 rows of all layers.
class FullStep {
 public:
  FullStep(int layers, int heads, int rows, int head_dim, Stream& stream)
      : layers_(layers),
        heads_(static_cast<size_t>(heads)),
        rows_(rows),
        head_dim_(head_dim),
        cache_(DType::kF16, {int64_t{layers} * heads, 2, rows, head_dim}, stream.device()) {
    Tensor numbers(DType::kF16, {1, 2, rows, head_dim});
    Random random;
    for (int64_t i = 0; i < numbers.shape().elements(); ++i) {
      numbers.as<f16>()[i] = to_f16(random.number());
    }
    for (int i = 0; i < layers * heads; ++i) copy(cache_.view().slice(i, 1), numbers, stream);
  }

  /// Lays the rows for a GPU, the last of each KV head as that of the step.
  void lay(int q_per_kv, Stream& stream) {
    if (stream.device().kind != DeviceKind::kCuda || tables_.contains(q_per_kv)) return;
    TableShape shape;
    shape.layers = layers_;
    shape.kv_heads = kHeadsPerSequence;
    shape.q_per_kv = q_per_kv;
    shape.head_dim = head_dim_;
    TableStep& table =
        tables_
            .try_emplace(q_per_kv, shape, 0, static_cast<int>(heads_) / kHeadsPerSequence, rows_,
                         stream.device())
            .first->second;
    std::vector<TableHead> described(kHeadsPerSequence);
    const auto heads_of = [&](int slot, int layer) {
      for (size_t h = 0; h < described.size(); ++h) {
        std::byte* rows = of(static_cast<size_t>(layer) * heads_ +
                             static_cast<size_t>(slot) * described.size() + h);
        described[h].keys_gained = ring(rows);
        described[h].values_gained = ring(rows + half());
      }
      return std::span<const TableHead>(described);
    };
    table.lay(heads_of, stream);
  }

  void operator()(Heads& heads, int q_per_kv, Stream& stream) {
    if (!tables_.empty()) return tables_.at(q_per_kv)(heads, stream);
    for (size_t layer = 0; layer < static_cast<size_t>(layers_); ++layer) {
      batch_.start(q_per_kv, head_dim_);
      for (size_t head = 0; head < heads_; ++head) {
        const std::byte* p = of(layer * heads_ + head);
        const KeyValueRows held{p, p + half(), DType::kF16, rows_};
        batch_.add(heads.q_of(head), {&held, 1}, heads.out_of(head));
      }
      batch_.attend(kScale, stream);
    }
  }

 private:
  size_t half() const {
    return static_cast<size_t>(rows_) * static_cast<size_t>(head_dim_) * sizeof(f16);
  }
  std::byte* of(size_t index) { return cache_.view().slice(static_cast<int64_t>(index), 1).data(); }
  GrowingRows ring(std::byte* rows) const {
    GrowingRows gained;
    gained.ring = rows;
    gained.ring_rows = rows_;
    gained.full = rows_ - 1;
    return gained;
  }

  int layers_;
  size_t heads_;
  int rows_;
  int head_dim_;
  Tensor cache_;
  RowBatch batch_;                   // on the CPU
  std::map<int, TableStep> tables_;  // on a GPU, by q_per_kv
};

/// One decode step over packed rows of all layers; on a GPU the last of them are full, as those
/// that wait to be packed.
class PackedStep {
 public:
  static constexpr int kFullRows = 32;

  PackedStep(const Packing& keys, const Packing& values, int layers, int heads, int rows,
             Stream& stream)
      : layers_(layers),
        heads_(static_cast<size_t>(heads)),
        full_rows_(stream.device().kind == DeviceKind::kCuda ? kFullRows : 0),
        rows_(rows - full_rows_),
        keys_(keys, layers, heads, rows_, stream),
        values_(values, layers, heads, rows_, stream) {}

  size_t bytes() const {
    return keys_.bytes() + values_.bytes() +
           static_cast<size_t>(rings_.shape().elements()) * sizeof(f16);
  }

  /// Describes the KV heads of every layer.
  void lay(Heads& heads, int q_per_kv, bool remapped, Stream& stream) {
    // CalibQuant's remap: of all packed slots, from its calibrated ends.
    remap_ = {0, rows_, 0, 3, true};
    remaps_ = {&remap_, remapped ? size_t{1} : size_t{0}};
    segments_.clear();
    for (int layer = 0; layer < layers_; ++layer) {
      for (size_t head = 0; head < heads_; ++head) {
        segments_.push_back(keys_.run(layer, static_cast<int>(head), rows_));
        segments_.push_back(values_.run(layer, static_cast<int>(head), rows_));
      }
    }
    if (stream.device().kind == DeviceKind::kCuda) {
      lay_table(q_per_kv, static_cast<int>(heads.q.shape()[2]), stream);
    } else {
      describe(heads, q_per_kv, stream);
    }
  }

  void operator()(Heads& heads, Stream& stream) {
    if (table_) return (*table_)(heads, stream);
    const auto q_per_kv = static_cast<int>(heads.q.shape()[1]);
    const auto head_dim = static_cast<int>(heads.q.shape()[2]);
    for (size_t i = 0; i < packed_.size(); i += heads_) {
      attend_packed(std::span(packed_).subspan(i, heads_), q_per_kv, head_dim, kScale, stream);
    }
  }

 private:
  void describe(Heads& heads, int q_per_kv, Stream& stream) {
    const Shape shape{static_cast<int64_t>(heads_), q_per_kv, rows_};
    weights_ = Tensor(DType::kF32, shape, stream.device());
    packed_.assign(static_cast<size_t>(layers_) * heads_, {});
    for (size_t i = 0; i < packed_.size(); ++i) {
      PackedHead& packed = packed_[i];
      packed.q = heads.q_of(i % heads_);
      packed.keys = {&segments_[2 * i], 1};
      packed.values = {&segments_[2 * i + 1], 1};
      packed.remaps = remaps_;
      packed.slots = rows_;
      packed.weights = weights_.view().slice(static_cast<int64_t>(i % heads_), 1).as<float>();
      packed.weights_wanted = false;
      packed.out = heads.out_of(i % heads_);
    }
  }

  void lay_table(int q_per_kv, int head_dim, Stream& stream) {
    const int64_t count = int64_t{layers_} * static_cast<int64_t>(heads_);
    rings_ = Tensor(DType::kF16, {count, 2, full_rows_, head_dim}, stream.device());
    Tensor zeros(DType::kF16, {1, 2, full_rows_, head_dim});
    std::memset(zeros.view().data(), 0, zeros.view().bytes());
    for (int64_t i = 0; i < count; ++i) copy(rings_.view().slice(i, 1), zeros, stream);
    TableShape shape;
    shape.layers = layers_;
    shape.kv_heads = kHeadsPerSequence;
    shape.q_per_kv = q_per_kv;
    shape.head_dim = head_dim;
    shape.remaps = static_cast<int>(remaps_.size());
    table_.emplace(shape, 1, static_cast<int>(heads_) / kHeadsPerSequence, rows_ + full_rows_,
                   stream.device());
    std::vector<TableHead> described(kHeadsPerSequence);
    const auto heads_of = [&](int slot, int layer) {
      for (size_t h = 0; h < described.size(); ++h) {
        const size_t i =
            static_cast<size_t>(layer) * heads_ + static_cast<size_t>(slot) * described.size() + h;
        const TensorView rings = rings_.view().slice(static_cast<int64_t>(i), 1);
        described[h].keys = {&segments_[2 * i], 1};
        described[h].values = {&segments_[2 * i + 1], 1};
        described[h].remaps = remaps_;
        GrowingRows& keys_gained = described[h].keys_gained;
        keys_gained.ring = rings.data();
        keys_gained.ring_rows = full_rows_;
        keys_gained.full = full_rows_ - 1;  // without that of the step
        described[h].values_gained = keys_gained;
        described[h].values_gained.ring += rings.bytes() / 2;
      }
      return std::span<const TableHead>(described);
    };
    table_->lay(heads_of, stream);
  }

  int layers_;
  size_t heads_;
  int full_rows_;
  int rows_;  // packed ones
  Store keys_;
  Store values_;
  std::vector<SlotSegment> segments_;  // keys and values of each KV head
  ScoreRemap remap_;
  std::span<const ScoreRemap> remaps_;
  Tensor weights_;  // on the CPU
  std::vector<PackedHead> packed_;
  Tensor rings_;  // on a GPU
  std::optional<TableStep> table_;
};

struct Case {
  std::string_view name;
  Packing keys, values;
  bool remapped = false;
};

std::vector<Case> cases(int head_dim) {
  using enum CodeFormat;
  using enum ScaleAxis;
  const auto pack = [&](CodeFormat code, ScaleAxis axis, int block_rows) {
    return packing(code, axis, head_dim, block_rows);
  };
  const auto by_row = [&](CodeFormat code) {  // int4
    Packing result = pack(code, kToken, 32);
    result.format.group_size = head_dim;
    return result;
  };
  return {{"kivi 1 bit", pack(kBits1, kChannel, 32), pack(kBits1, kToken, 32)},
          {"kivi 2 bits", pack(kBits2, kChannel, 32), pack(kBits2, kToken, 32)},
          {"kivi 3 bits", pack(kBits3, kChannel, 32), pack(kBits3, kToken, 32)},
          {"kivi 4 bits", pack(kBits4, kChannel, 32), pack(kBits4, kToken, 32)},
          {"calibquant 1 bit", pack(kBits1, kChannel, 0), pack(kBits1, kChannel, 0), true},
          {"calibquant 2 bits", pack(kBits2, kChannel, 0), pack(kBits2, kChannel, 0), true},
          {"calibquant 8 bits", pack(kBits8, kChannel, 0), pack(kBits8, kChannel, 0)},
          {"per head 1 bit", pack(kBits1, kHead, 0), pack(kBits1, kHead, 0)},
          {"per token 2 bits", pack(kBits2, kToken, 32), pack(kBits2, kToken, 32)},
          {"one scale a row 4 bits", by_row(kBits4), by_row(kBits4)},
          {"trit5", pack(kTrit5, kChannel, 32), pack(kTrit5, kChannel, 32)},
          {"vidkv 2+1 bits, trit5", mixed_packing(head_dim, 32), pack(kTrit5, kChannel, 32)}};
}

/// Those whose name holds `text`. Throws Error{kInvalidArgument} if none does.
std::vector<Case> cases_named(std::string_view text, int head_dim) {
  std::vector<Case> named;
  std::string known;
  for (const Case& c : cases(head_dim)) {
    if (c.name.find(text) != std::string_view::npos) named.push_back(c);
    known += fmt::format("{}\"{}\"", known.empty() ? "" : ", ", c.name);
  }
  if (named.empty()) {
    throw Error(
        ErrorCode::kInvalidArgument,
        fmt::format("--only \"{}\" matches no format's name; the formats are {}", text, known));
  }
  return named;
}

}  // namespace

int run_kernels(const KernelsOptions& options) {
  ThreadPool pool(options.threads);
  const Device device = parse_device(options.device);
  Stream stream(pool, device);
  if (device.kind == DeviceKind::kCuda && options.rows <= PackedStep::kFullRows) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("--rows {0} leaves nothing packed on a GPU, where the last {0} tokens "
                            "of a KV head are unquantized; use {1} or more",
                            options.rows, 2 * PackedStep::kFullRows));
  }
  const std::vector<Case> wanted_cases = cases_named(options.only, options.head_dim);
  const int heads_count = kHeadsPerSequence * options.batch;
  // f16 rows of so many layers are past every cache, and packed ones of four times as many too.
  constexpr double kElements = 12.0 * kHeadsPerSequence * 4096;
  const double rows_of_layer = static_cast<double>(heads_count) * options.rows;
  // On CUDA up to twelve of 16 GiB or a quarter of what is free, so that the launches of one layer
  // are queued while another runs, as in a model.
  double wanted = kElements;
  if (device.kind == DeviceKind::kCuda) {
    const auto free = static_cast<double>(cuda::device_facts(device.index).free_bytes);
    wanted = std::min(16.0 * (1 << 30), free / 4) / (4.0 * options.head_dim);
  }
  const int layers = static_cast<int>(std::clamp(wanted / rows_of_layer, 4.0, 12.0));
  const int packed_layers = device.kind == DeviceKind::kCuda ? layers : 4 * layers;
  const double row_count = layers * rows_of_layer;
  FullStep full(layers, heads_count, options.rows, options.head_dim, stream);
  double roof = 0;
  if (device.kind == DeviceKind::kCuda) {
    Buffer probe(device, size_t{2} << 30);
    for (int i = 0; i < 5; ++i) {
      roof = std::max(roof, measure_memory_rate({probe.data(), probe.bytes()}, stream));
    }
  }
  if (!options.json) {
    fmt::print(
        "{}: {} sequences of {} tokens, {} KV heads of {} channels, {} threads, {} repetitions\n",
        device_name(device), options.batch, options.rows, kHeadsPerSequence, options.head_dim,
        pool.threads(), options.repeats);
    if (roof > 0) fmt::print("memory copy: {:.0f} GB/s\n", 1e-9 * roof);
    fmt::print("{:<22} {:>8} {:>28} {:>8} {:>28} {:>8}\n", "format", "q_per_kv",
               "packed, ns a token (min, max)", "GB/s", "f16, ns a token (min, max)", "faster");
  }
  for (const Case& c : wanted_cases) {
    PackedStep packed(c.keys, c.values, packed_layers, heads_count, options.rows, stream);
    for (const int q_per_kv : {1, 4}) {
      Heads heads(heads_count, q_per_kv, options.head_dim, stream);
      full.lay(q_per_kv, stream);
      packed.lay(heads, q_per_kv, c.remapped, stream);
      std::vector<double> full_ns;
      std::vector<double> packed_ns;
      std::vector<double> ratios;
      for (int repeat = -1; repeat < options.repeats && !interrupted(); ++repeat) {
        const double start = now();
        full(heads, q_per_kv, stream);
        const double middle = now();
        packed(heads, stream);
        const double end = now();
        if (repeat < 0) continue;  // warms caches and workspaces
        full_ns.push_back(1e9 * (middle - start) / row_count);
        packed_ns.push_back(1e9 * (end - middle) / (row_count * packed_layers / layers));
        ratios.push_back(full_ns.back() / packed_ns.back());
      }
      if (interrupted()) return kExitInterrupted;
      const Spread f = spread_of(full_ns);
      const Spread p = spread_of(packed_ns);
      const Spread ratio = spread_of(ratios);
      const double bytes =
          static_cast<double>(packed.bytes()) / (row_count * packed_layers / layers);
      if (options.json) {
        const auto spread = [](const Spread& x) {
          return nlohmann::ordered_json{{"median", x.median}, {"min", x.min}, {"max", x.max}};
        };
        fmt::print("{}\n", nlohmann::ordered_json{{"format", c.name},
                                                  {"rows", options.rows},
                                                  {"head_dim", options.head_dim},
                                                  {"q_per_kv", q_per_kv},
                                                  {"threads", pool.threads()},
                                                  {"device", device_name(device)},
                                                  {"batch", options.batch},
                                                  {"copy_bytes_per_s", roof},
                                                  {"bytes_per_row", bytes},
                                                  {"packed_ns_per_row", spread(p)},
                                                  {"f16_ns_per_row", spread(f)},
                                                  {"faster", spread(ratio)},
                                                  {"version", version_line()}}
                               .dump());
      } else {
        fmt::print(
            "{:<22} {:>8} {:>10.2f} ({:>6.2f}, {:>6.2f}) {:>10.2f} {:>12.2f} ({:>6.2f}, "
            "{:>6.2f}) {:>6.2f} x ({:.2f} to {:.2f})\n",
            c.name, q_per_kv, p.median, p.min, p.max, bytes / p.median, f.median, f.min, f.max,
            ratio.median, ratio.min, ratio.max);
      }
    }
  }
  return 0;
}

}  // namespace kvlm
