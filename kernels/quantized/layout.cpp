#include "kernels/quantized/layout.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "kernels/base/dtype.h"
#include "kernels/weight.h"

// Where every code, scale and zero point of a quantized matrix lies on each kind of device, and the
// way there from rows of codes and back. The place of a code is a sum of one term of its output and
// one of its input.
namespace kvlm {

namespace {

int64_t rounded_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

/// Where codes and what belongs to groups lie on one kind of device.
class Places {
 public:
  Places(const QuantizedFormat& format, DeviceKind device)
      : layout_(layout_of(format, device)),
        groups_(format.groups()),
        half_bytes_(format.code == WeightCode::kU4),
        on_gpu_(device == DeviceKind::kCuda) {
    for (int64_t i = 0; i < format.in; ++i) inputs_.push_back(on_gpu_ ? in_tile(i) : in_strip(i));
  }

  const QuantizedLayout& layout() const noexcept { return layout_; }
  /// The byte of the code of an output's first input.
  size_t output(int64_t o) const noexcept {
    if (!on_gpu_) {
      const int64_t codes = o / kStripOutputs * layout_.in * kStripOutputs;
      return bytes_of(codes) + static_cast<size_t>(o % kStripOutputs * 4);
    }
    const int64_t codes = o / kTileOutputs * layout_.in * kTileOutputs;
    const int64_t eight = o % kTileOutputs / 8;
    const int64_t in_lanes = half_bytes_ ? eight * 4 : eight / 2 * 512 + eight % 2 * 8;
    return bytes_of(codes) + static_cast<size_t>(o % 8 * 64 + in_lanes);
  }
  /// How many bytes after that the code of input i is.
  size_t input(int64_t i) const noexcept { return inputs_[static_cast<size_t>(i)] / 2; }
  /// Whether it is the upper half of its byte.
  bool is_upper(int64_t i) const noexcept { return inputs_[static_cast<size_t>(i)] % 2 != 0; }

  /// Index of a group's scale, and zero point.
  size_t entry(int64_t o, int64_t group) const noexcept {
    const int64_t strip = on_gpu_ ? kTileOutputs : kStripOutputs;
    // On a GPU the outputs of a lane, n of each eight, lie together.
    const int64_t within = on_gpu_ ? o % 8 * 4 + o % strip / 8 : o % strip;
    return static_cast<size_t>((o / strip * groups_ + group) * strip + within);
  }

 private:
  size_t bytes_of(int64_t codes) const noexcept {
    return static_cast<size_t>(half_bytes_ ? codes / 2 : codes);
  }
  static size_t place(int64_t byte, bool upper) noexcept {
    return static_cast<size_t>(byte) * 2 + (upper ? 1 : 0);
  }
  size_t in_strip(int64_t i) const noexcept {
    if (!half_bytes_) return place(i / 4 * 64 + i % 4, false);
    return place(i / 32 * 256 + i % 16 / 4 * 64 + i % 4, i % 32 >= 16);
  }
  size_t in_tile(int64_t i) const noexcept {
    const int64_t tile = i / kInputBlock * kInputBlock * kTileOutputs;
    const int64_t lane = i % kInputBlock / 8 * 16;
    const int64_t k = i % 8;
    if (!half_bytes_) return place(tile + lane + k, false);
    // Inputs 2 j and 2 j + 1 are 16 bits apart in a word, so that a mask leaves a pair of halves.
    const int64_t nibble = k / 2 + k % 2 * 4;
    return place(tile / 2 + lane + nibble / 2, nibble % 2 != 0);
  }

  QuantizedLayout layout_;
  int64_t groups_;
  bool half_bytes_;
  bool on_gpu_;
  std::vector<size_t> inputs_;  // 2 * byte + upper half
};

void put_scale(std::byte* scales, DType dtype, size_t at, float scale) {
  switch (dtype) {
    case DType::kF16:
      reinterpret_cast<f16*>(scales)[at] = to_f16(scale);
      break;
    case DType::kBF16:
      reinterpret_cast<bf16*>(scales)[at] = to_bf16(scale);
      break;
    default:
      reinterpret_cast<float*>(scales)[at] = scale;
  }
}

float scale_at(const std::byte* scales, DType dtype, size_t at) {
  switch (dtype) {
    case DType::kF16:
      return to_float(reinterpret_cast<const f16*>(scales)[at]);
    case DType::kBF16:
      return to_float(reinterpret_cast<const bf16*>(scales)[at]);
    default:
      return reinterpret_cast<const float*>(scales)[at];
  }
}

/// Puts `count` rows, from row `first` of the matrix on.
void put_rows(const QuantizedRows& rows, int64_t first, int64_t count,
              const QuantizedFormat& format, const Places& places, std::byte* to) {
  const bool half_bytes = format.code == WeightCode::kU4;
  const int64_t groups = format.groups();
  for (int64_t row = 0; row < count; ++row) {
    const int64_t o = first + row;
    const uint8_t* codes = rows.codes.data() + row * format.in;
    std::byte* output = to + places.output(o);
    for (int64_t i = 0; i < format.in; ++i) {
      const auto code = static_cast<std::byte>(codes[i]);
      std::byte& byte = output[places.input(i)];
      byte = half_bytes ? byte | (places.is_upper(i) ? code << 4 : code) : code;
    }
    for (int64_t group = 0; group < groups; ++group) {
      const auto at = static_cast<size_t>(row * groups + group);
      put_scale(to + places.layout().scales, format.scale, places.entry(o, group), rows.scales[at]);
      if (!format.has_zeros) continue;
      to[places.layout().zeros + places.entry(o, group)] = static_cast<std::byte>(rows.zeros[at]);
    }
  }
}

}  // namespace

size_t Weight::bytes() const noexcept {
  if (!is_quantized()) return plain_.bytes();
  return layout_of(quantized_.format, quantized_.device.kind).bytes;
}

std::string Weight::format_name() const {
  if (!is_quantized()) return std::string(dtype_name(plain_.dtype()));
  const QuantizedFormat& format = quantized_.format;
  if (format.groups() == 1) return fmt::format("{} per output", code_name(format.code));
  return fmt::format("{} in groups of {}", code_name(format.code), format.group);
}

QuantizedLayout layout_of(const QuantizedFormat& format, DeviceKind device) noexcept {
  QuantizedLayout layout;
  layout.out = rounded_up(format.out, device == DeviceKind::kCuda ? kTileOutputs : kStripOutputs);
  layout.in = rounded_up(format.in, kInputBlock);
  layout.scales = static_cast<size_t>(layout.out * layout.in * code_bits(format.code) / 8);
  const auto entries = static_cast<size_t>(layout.out * format.groups());
  layout.zeros = layout.scales + entries * dtype_bytes(format.scale);
  layout.bytes = layout.zeros + (format.has_zeros ? entries : 0);
  return layout;
}

void QuantizedRows::resize(const QuantizedFormat& format, int64_t rows) {
  codes.resize(static_cast<size_t>(rows * format.in));
  scales.resize(static_cast<size_t>(rows * format.groups()));
  zeros.resize(format.has_zeros ? scales.size() : 0);
}

void QuantizedRows::widen(const QuantizedFormat& format, int64_t row, float* to) const {
  for (int64_t i = 0; i < format.in; ++i) {
    const auto group = static_cast<size_t>(row * format.groups() + i / format.group);
    const uint8_t code = codes[static_cast<size_t>(row * format.in + i)];
    const int zero = format.has_zeros ? zeros[group] : format.zero();
    const float value =
        format.code == WeightCode::kE4M3 ? e4m3_value(code) : static_cast<float>(int{code} - zero);
    to[i] = scales[group] * value;
  }
}

void lay_out(const QuantizedSource& source, DeviceKind device, std::byte* to, ThreadPool& pool) {
  // Whole strips and tiles, so that no two threads write to one byte.
  constexpr int64_t kRows = 64;
  static_assert(kRows % kStripOutputs == 0 && kRows % kTileOutputs == 0);
  const QuantizedFormat& format = source.format();
  const Places places(format, device);
  const auto tasks = static_cast<size_t>((format.out + kRows - 1) / kRows);
  const size_t bytes = places.layout().bytes;
  pool.parallel_for(tasks, [&](size_t task, int) {
    const size_t begin = bytes * task / tasks;
    std::memset(to + begin, 0, bytes * (task + 1) / tasks - begin);
  });
  std::vector<QuantizedRows> rows(static_cast<size_t>(pool.threads()));
  pool.parallel_for(tasks, [&](size_t task, int worker) {
    const int64_t first = static_cast<int64_t>(task) * kRows;
    const int64_t count = std::min(kRows, format.out - first);
    QuantizedRows& block = rows[static_cast<size_t>(worker)];
    block.resize(format, count);
    source.read(first, count, block);
    put_rows(block, first, count, format, places, to);
  });
}

void read_rows(const QuantizedMatrix& matrix, int64_t first, int64_t count, QuantizedRows& to) {
  const QuantizedFormat& format = matrix.format;
  const Places places(format, matrix.device.kind);
  const int64_t groups = format.groups();
  for (int64_t row = 0; row < count; ++row) {
    const int64_t o = first + row;
    for (int64_t i = 0; i < format.in; ++i) {
      auto byte = static_cast<unsigned>(matrix.data[places.output(o) + places.input(i)]);
      if (format.code == WeightCode::kU4) byte = places.is_upper(i) ? byte >> 4 : byte & 15;
      to.codes[static_cast<size_t>(row * format.in + i)] = static_cast<uint8_t>(byte);
    }
    for (int64_t group = 0; group < groups; ++group) {
      const auto at = static_cast<size_t>(row * groups + group);
      to.scales[at] =
          scale_at(matrix.data + places.layout().scales, format.scale, places.entry(o, group));
      if (!format.has_zeros) continue;
      to.zeros[at] =
          static_cast<uint8_t>(matrix.data[places.layout().zeros + places.entry(o, group)]);
    }
  }
}

}  // namespace kvlm
