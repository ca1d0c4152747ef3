#include "runtime/loading/quantized_tensors.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string_view>
#include <utility>

#include "kernels/base/error.h"
#include "kernels/base/printable.h"

// Quantized matrices as files have them. Each format is a QuantizedSource that unpacks rows of
// codes on demand; what belongs together is found by its name, and its shapes say all that the
// configuration says again.
namespace kvlm {

namespace {

using Method = QuantizationConfig::Method;

[[noreturn]] void fail(const std::string& name, const std::string& what) {
  throw Error(ErrorCode::kCorruptFile,
              fmt::format("tensor {}: {}; the weights are damaged or not of this config.json, "
                          "download them again",
                          printable(name), what));
}

int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

/// Element `i` of a tensor of 32-bit words, of any alignment.
uint32_t word_at(const StoredTensor& tensor, int64_t i) {
  uint32_t word;
  std::memcpy(&word, tensor.data + i * 4, sizeof(word));
  return word;
}

uint8_t byte_at(const StoredTensor& tensor, int64_t i) {
  return static_cast<uint8_t>(tensor.data[i]);
}

DType scale_dtype(const std::string& name, const StoredTensor& tensor) {
  if (tensor.dtype == "F16") return DType::kF16;
  if (tensor.dtype == "BF16") return DType::kBF16;
  if (tensor.dtype == "F32") return DType::kF32;
  fail(name, fmt::format("scales are {}; expected F16, BF16 or F32", tensor.dtype));
}

float scale_at(const StoredTensor& tensor, int64_t i) {
  if (tensor.dtype == "F32") return std::bit_cast<float>(word_at(tensor, i));
  uint16_t bits;
  std::memcpy(&bits, tensor.data + i * 2, sizeof(bits));
  return tensor.dtype == "F16" ? to_float(f16{bits}) : to_float(bf16{bits});
}

void require_shape(const std::string& name, const StoredTensor& tensor,
                   const std::vector<int64_t>& shape) {
  if (tensor.shape == shape) return;
  fail(name, fmt::format("has shape [{}], expected [{}]", fmt::join(tensor.shape, ", "),
                         fmt::join(shape, ", ")));
}

void require_dtype(const std::string& name, const StoredTensor& tensor, std::string_view dtype) {
  if (tensor.dtype == dtype) return;
  fail(name, fmt::format("holds {}, expected {}", tensor.dtype, dtype));
}

/// A tensor of two dimensions, neither of them zero.
void require_matrix(const std::string& name, const StoredTensor& tensor) {
  if (tensor.shape.size() == 2 && tensor.shape[0] > 0 && tensor.shape[1] > 0) return;
  fail(name, fmt::format("has shape [{}], expected a matrix", fmt::join(tensor.shape, ", ")));
}

/// Where row `row`, group `group` has its scale: (out, groups), or (groups, out).
struct ScaleGrid {
  int64_t row_step;
  int64_t group_step;
  int64_t rows_alike = 1;  // rows that share scales
};

/// What all formats have: scales, and whose matrix it is.
class StoredMatrix : public QuantizedSource {
 public:
  StoredMatrix(std::string name, const QuantizedFormat& format, StoredTensor scales,
               const ScaleGrid& grid)
      : QuantizedSource(format), name_(std::move(name)), scales_(std::move(scales)), grid_(grid) {}

  void read(int64_t first, int64_t count, QuantizedRows& to) const final {
    const int64_t groups = format_.groups();
    for (int64_t row = 0; row < count; ++row) {
      const int64_t o = first + row;
      for (int64_t group = 0; group < groups; ++group) {
        const int64_t at = o / grid_.rows_alike * grid_.row_step + group * grid_.group_step;
        const float scale = scale_at(scales_, at);
        if (!std::isfinite(scale)) {
          fail(name_, fmt::format("the scale of row {}, group {} is {}", o, group, scale));
        }
        to.scales[static_cast<size_t>(row * groups + group)] = scale;
        if (format_.has_zeros) {
          to.zeros[static_cast<size_t>(row * groups + group)] = zero_at(o, group);
        }
      }
    }
    read_codes(first, count, to.codes.data());
  }

 protected:
  virtual uint8_t zero_at(int64_t, int64_t) const { return 0; }
  /// Codes of rows [first, first + count), (count, in).
  virtual void read_codes(int64_t first, int64_t count, uint8_t* to) const = 0;

  std::string name_;

 private:
  StoredTensor scales_;
  ScaleGrid grid_;
};

/// Field `i` of a dense stream of `bits` bits in 32-bit words that begins at word `first`.
uint8_t field_at(const StoredTensor& words, int64_t first, int64_t step, int64_t i, int bits) {
  const int64_t each = 32 / bits;
  const uint32_t word = word_at(words, first + i / each * step);
  return static_cast<uint8_t>(word >> (i % each * bits) & ((1u << bits) - 1));
}

/// compressed-tensors pack-quantized: a row's codes in order, zero points in order down the rows.
/// Signed numbers are stored with 2^(bits - 1) added, as ours.
class PackedMatrix final : public StoredMatrix {
 public:
  PackedMatrix(std::string name, const QuantizedFormat& format, StoredTensor codes,
               StoredTensor scales, std::optional<StoredTensor> zeros)
      : StoredMatrix(std::move(name), format, std::move(scales), {format.groups(), 1}),
        codes_(std::move(codes)),
        zeros_(std::move(zeros)),
        bits_(static_cast<int>(code_bits(format.code))) {}

 private:
  uint8_t zero_at(int64_t row, int64_t group) const override {
    return field_at(*zeros_, group, format_.groups(), row, bits_);
  }
  void read_codes(int64_t first, int64_t count, uint8_t* to) const override {
    for (int64_t row = 0; row < count; ++row) {
      const int64_t begin = (first + row) * codes_.shape[1];
      for (int64_t i = 0; i < format_.in; ++i) *to++ = field_at(codes_, begin, 1, i, bits_);
    }
  }

  StoredTensor codes_;
  std::optional<StoredTensor> zeros_;
  int bits_;
};

/// A byte an element: int8, or e4m3.
class ByteMatrix final : public StoredMatrix {
 public:
  ByteMatrix(std::string name, const QuantizedFormat& format, StoredTensor codes,
             StoredTensor scales, const ScaleGrid& grid)
      : StoredMatrix(std::move(name), format, std::move(scales), grid), codes_(std::move(codes)) {}

 private:
  void read_codes(int64_t first, int64_t count, uint8_t* to) const override {
    const bool floats = format_.code == WeightCode::kE4M3;
    for (int64_t i = 0; i < count * format_.in; ++i) {
      const uint8_t byte = byte_at(codes_, first * format_.in + i);
      if (floats && (byte & 0x7f) == 0x7f) {
        fail(name_, fmt::format("the number in row {}, column {} is not a number",
                                first + i / format_.in, i % format_.in));
      }
      to[i] = floats ? byte : static_cast<uint8_t>(byte ^ 0x80);  // signed, with 128 added
    }
  }

  StoredTensor codes_;
};

/// AWQ in GEMM order, and GPTQ: codes (in, out) in words along `out` or along `in`.
class TransposedMatrix final : public StoredMatrix {
 public:
  TransposedMatrix(std::string name, const QuantizedFormat& format, StoredTensor codes,
                   StoredTensor scales, StoredTensor zeros, Method method, bool zeros_one_less)
      : StoredMatrix(std::move(name), format, std::move(scales), {1, format.out}),
        codes_(std::move(codes)),
        zeros_(std::move(zeros)),
        bits_(static_cast<int>(code_bits(format.code))),
        awq_(method == Method::kAwq),
        // One in each field of a word.
        one_less_(!zeros_one_less ? 0
                  : bits_ == 4    ? 0x11111111u
                                  : 0x01010101u) {}

 private:
  /// The place within a word of field `i` of it.
  int shift_of(int64_t i) const {
    // AWQ keeps outputs in the order 0 2 4 6 1 3 5 7.
    return bits_ * static_cast<int>(awq_ ? i / 2 + i % 2 * 4 : i);
  }
  uint8_t field_of(uint32_t word, int64_t i) const {
    return static_cast<uint8_t>(word >> shift_of(i) & ((1u << bits_) - 1));
  }
  uint8_t zero_at(int64_t row, int64_t group) const override {
    const int64_t each = 32 / bits_;
    const uint32_t word = word_at(zeros_, group * (format_.out / each) + row / each) + one_less_;
    return field_of(word, row % each);
  }
  void read_codes(int64_t first, int64_t count, uint8_t* to) const override {
    const int64_t each = 32 / bits_;
    for (int64_t i = 0; i < format_.in; ++i) {
      for (int64_t row = 0; row < count; ++row) {
        const int64_t o = first + row;
        to[row * format_.in + i] =
            awq_ ? field_of(word_at(codes_, i * (format_.out / each) + o / each), o % each)
                 : field_of(word_at(codes_, i / each * format_.out + o), i % each);
      }
    }
  }

  StoredTensor codes_;
  StoredTensor zeros_;
  int bits_;
  bool awq_;
  uint32_t one_less_;
};

/// Takes the tensors of one checkpoint apart.
class Taker {
 public:
  Taker(std::map<std::string, StoredTensor>& tensors, const QuantizationConfig& config,
        DType activations, WeightMap& weights)
      : tensors_(tensors), config_(config), activations_(activations), weights_(weights) {}

  void run();

 private:
  /// Takes P + `suffix` out, which must be there.
  StoredTensor take(const std::string& prefix, std::string_view suffix);
  std::optional<StoredTensor> take_if_there(const std::string& prefix, std::string_view suffix);
  std::unique_ptr<QuantizedSource> packed(const std::string& prefix);
  std::unique_ptr<QuantizedSource> bytes(const std::string& prefix, std::string_view scale);
  std::unique_ptr<QuantizedSource> transposed(const std::string& prefix);
  QuantizedFormat format_of(WeightCode code, int64_t out, int64_t in, int64_t groups,
                            const std::string& name) const;
  /// What the configuration says must be what the tensors are.
  void check(const std::string& name, const QuantizedFormat& format) const;
  /// The inputs must be in the order of the groups.
  void check_order(const std::string& prefix, const QuantizedFormat& format,
                   std::string_view suffix);

  std::map<std::string, StoredTensor>& tensors_;
  const QuantizationConfig& config_;
  DType activations_;
  WeightMap& weights_;
};

StoredTensor Taker::take(const std::string& prefix, std::string_view suffix) {
  std::optional<StoredTensor> found = take_if_there(prefix, suffix);
  if (!found) fail(prefix + std::string(suffix), "is missing next to a quantized matrix");
  return std::move(*found);
}

std::optional<StoredTensor> Taker::take_if_there(const std::string& prefix,
                                                 std::string_view suffix) {
  const auto place = tensors_.find(prefix + std::string(suffix));
  if (place == tensors_.end()) return std::nullopt;
  StoredTensor found = std::move(place->second);
  tensors_.erase(place);
  return found;
}

QuantizedFormat Taker::format_of(WeightCode code, int64_t out, int64_t in, int64_t groups,
                                 const std::string& name) const {
  QuantizedFormat format;
  format.code = code;
  format.out = out;
  format.in = in;
  format.group = groups > 0 ? divide_up(in, groups) : 0;
  format.activations = activations_;
  // Short last groups are of blocks; otherwise groups divide the inputs.
  const bool divides = code == WeightCode::kE4M3 || in % std::max<int64_t>(1, groups) == 0;
  if (groups < 1 || format.groups() != groups || !divides) {
    fail(name, fmt::format("{} scales for {} inputs, which are not as many groups of one size",
                           groups, in));
  }
  return format;
}

void Taker::check(const std::string& name, const QuantizedFormat& format) const {
  const auto fits = [&](const QuantizationScheme& scheme) {
    const bool one_group = format.groups() == 1;
    const bool group = scheme.group == 0 ? one_group
                                         : scheme.group == format.group ||
                                               (one_group && format.in <= scheme.group);
    return scheme.bits == code_bits(format.code) && group &&
           (scheme.zeros == format.has_zeros || config_.method == Method::kGptq);
  };
  if (std::ranges::any_of(config_.schemes, fits)) return;
  fail(name, fmt::format("has {} bits and {} inputs a scale{}, which {} does not say",
                         code_bits(format.code), format.group,
                         format.has_zeros ? " with zero points" : "", config_.where));
}

void Taker::check_order(const std::string& prefix, const QuantizedFormat& format,
                        std::string_view suffix) {
  const std::optional<StoredTensor> order = take_if_there(prefix, suffix);
  if (!order) return;
  const std::string name = prefix + std::string(suffix);
  require_dtype(name, *order, "I32");
  require_shape(name, *order, {format.in});
  for (int64_t i = 0; i < format.in; ++i) {
    if (word_at(*order, i) == static_cast<uint32_t>(i / format.group)) continue;
    throw Error(ErrorCode::kUnsupported,
                fmt::format("tensor {}: reorders columns (desc_act or actorder), which is not "
                            "read; use a checkpoint with desc_act false, or the 16-bit checkpoint "
                            "with --weights int4",
                            printable(name)));
  }
}

std::unique_ptr<QuantizedSource> Taker::packed(const std::string& prefix) {
  const std::string name = prefix + ".weight_packed";
  StoredTensor codes = take(prefix, ".weight_packed");
  StoredTensor scales = take(prefix, ".weight_scale");
  const StoredTensor shape = take(prefix, ".weight_shape");
  std::optional<StoredTensor> zeros = take_if_there(prefix, ".weight_zero_point");
  require_matrix(name, codes);
  require_dtype(name, codes, "I32");
  require_matrix(prefix + ".weight_scale", scales);
  require_shape(prefix + ".weight_shape", shape, {2});
  if (shape.dtype != "I64" && shape.dtype != "I32") {
    fail(prefix + ".weight_shape", fmt::format("holds {}, expected I64", shape.dtype));
  }
  const auto dim = [&](int64_t i) {
    if (shape.dtype == "I32") return static_cast<int64_t>(static_cast<int32_t>(word_at(shape, i)));
    return static_cast<int64_t>(uint64_t{word_at(shape, 2 * i)} |
                                uint64_t{word_at(shape, 2 * i + 1)} << 32);
  };
  const int64_t out = dim(0);
  const int64_t in = dim(1);
  const int64_t words = codes.shape[1];
  const bool four = in > 0 && in <= words * 8 && words == divide_up(in, 8);
  const bool eight = in > 0 && in <= words * 4 && words == divide_up(in, 4);
  if (out != codes.shape[0] || (!four && !eight)) {
    fail(name, fmt::format("has shape [{}], which is no matrix of {} x {} in 4 or 8 bits",
                           fmt::join(codes.shape, ", "), out, in));
  }
  // A matrix of up to four inputs is one word either way.
  const bool is_four = four && (!eight || config_.schemes.front().bits == 4);
  QuantizedFormat format = format_of(is_four ? WeightCode::kU4 : WeightCode::kU8, out, in,
                                     scales.shape[1], prefix + ".weight_scale");
  format.scale = scale_dtype(prefix + ".weight_scale", scales);
  format.has_zeros = zeros.has_value();
  require_shape(prefix + ".weight_scale", scales, {out, format.groups()});
  if (zeros) {
    const std::string zero_name = prefix + ".weight_zero_point";
    require_dtype(zero_name, *zeros, "I32");
    require_shape(zero_name, *zeros, {divide_up(out, is_four ? 8 : 4), format.groups()});
  }
  check(name, format);
  check_order(prefix, format, ".weight_g_idx");
  return std::make_unique<PackedMatrix>(name, format, std::move(codes), std::move(scales),
                                        std::move(zeros));
}

std::unique_ptr<QuantizedSource> Taker::bytes(const std::string& prefix, std::string_view scale) {
  constexpr int64_t kBlock = 128;
  const std::string name = prefix + ".weight";
  const std::string scale_name = prefix + std::string(scale);
  StoredTensor codes = take(prefix, ".weight");
  StoredTensor scales = take(prefix, scale);
  take_if_there(prefix, ".input_scale");  // of static activations, which are not rounded so
  take_if_there(prefix, ".weight_zero_point");
  require_matrix(name, codes);
  const int64_t out = codes.shape[0];
  const int64_t in = codes.shape[1];
  const bool floats = config_.method == Method::kFloat;
  int64_t elements = 1;
  for (const int64_t length : scales.shape) elements *= length;
  ScaleGrid grid{1, 1};
  int64_t groups = 1;
  if (elements == 1 && floats) {  // of the whole tensor
    grid.row_step = 0;
  } else if (scales.shape.size() == 2 && scales.shape[1] == 1 && scales.shape[0] == out) {
    grid.row_step = 1;
  } else if (floats) {
    require_shape(scale_name, scales, {divide_up(out, kBlock), divide_up(in, kBlock)});
    groups = scales.shape[1];
    grid = {groups, 1, kBlock};
  } else {
    require_shape(scale_name, scales, {out, 1});
  }
  QuantizedFormat format =
      format_of(floats ? WeightCode::kE4M3 : WeightCode::kU8, out, in, groups, scale_name);
  if (groups > 1) format.group = kBlock;
  format.scale = scale_dtype(scale_name, scales);
  return std::make_unique<ByteMatrix>(name, format, std::move(codes), std::move(scales), grid);
}

std::unique_ptr<QuantizedSource> Taker::transposed(const std::string& prefix) {
  const std::string name = prefix + ".qweight";
  StoredTensor codes = take(prefix, ".qweight");
  StoredTensor zeros = take(prefix, ".qzeros");
  StoredTensor scales = take(prefix, ".scales");
  require_matrix(name, codes);
  require_matrix(prefix + ".scales", scales);
  require_dtype(name, codes, "I32");
  require_dtype(prefix + ".qzeros", zeros, "I32");
  const bool awq = config_.method == Method::kAwq;
  const int bits = config_.schemes.front().bits;
  const int64_t each = 32 / bits;
  const int64_t out = scales.shape[1];
  const int64_t groups = scales.shape[0];
  const int64_t in = awq ? codes.shape[0] : codes.shape[0] * each;
  if (out % each != 0) fail(prefix + ".scales", fmt::format("{} outputs fill no words", out));
  require_shape(name, codes, awq ? std::vector{in, out / each} : std::vector{in / each, out});
  require_shape(prefix + ".qzeros", zeros, {groups, out / each});
  QuantizedFormat format =
      format_of(bits == 4 ? WeightCode::kU4 : WeightCode::kU8, out, in, groups, prefix + ".scales");
  format.scale = scale_dtype(prefix + ".scales", scales);
  format.has_zeros = awq || config_.schemes.front().zeros;
  if (!format.has_zeros) {  // symmetric GPTQ: every zero point is 2^(bits - 1)
    const uint32_t middle = bits == 4 ? 0x88888888u : 0x80808080u;
    const uint32_t one = bits == 4 ? 0x11111111u : 0x01010101u;
    const uint32_t expected = config_.stored_zeros_are_one_less ? middle - one : middle;
    for (int64_t i = 0; i < groups * (out / each); ++i) {
      if (word_at(zeros, i) == expected) continue;
      fail(prefix + ".qzeros",
           fmt::format("the stored zeros do not fit format {}: word {} is {:#010x}, expected "
                       "{:#010x}",
                       config_.stored_zeros_are_one_less ? "gptq" : "gptq_v2", i, word_at(zeros, i),
                       expected));
    }
  }
  check(name, format);
  check_order(prefix, format, ".g_idx");
  return std::make_unique<TransposedMatrix>(name, format, std::move(codes), std::move(scales),
                                            std::move(zeros), config_.method,
                                            config_.stored_zeros_are_one_less);
}

/// The end of a name that makes a tensor the codes of a quantized matrix.
std::string_view code_suffix(Method method) {
  switch (method) {
    case Method::kPacked:
      return ".weight_packed";
    case Method::kAwq:
    case Method::kGptq:
      return ".qweight";
    default:
      return ".weight";
  }
}

void Taker::run() {
  const std::string_view suffix = code_suffix(config_.method);
  std::vector<std::string> prefixes;
  for (const auto& [name, tensor] : tensors_) {
    const bool bytes = tensor.dtype == "I8" || tensor.dtype == "F8_E4M3";
    if (name.ends_with(suffix) && (suffix != ".weight" || bytes)) {
      prefixes.push_back(name.substr(0, name.size() - suffix.size()));
    }
  }
  if (prefixes.empty()) {
    throw Error(ErrorCode::kCorruptFile,
                fmt::format("{} says that the weights are quantized, but there is no tensor *{}; "
                            "the files do not belong together, download them again",
                            config_.where, suffix));
  }
  for (const std::string& prefix : prefixes) {
    if (suffix != ".weight" && tensors_.contains(prefix + ".weight")) {
      fail(prefix + ".weight", fmt::format("is there together with {}{}", prefix, suffix));
    }
    std::unique_ptr<QuantizedSource> source;
    if (config_.method == Method::kPacked) {
      source = packed(prefix);
    } else if (suffix == ".qweight") {
      source = transposed(prefix);
    } else {
      const bool inverse = tensors_.contains(prefix + ".weight_scale_inv");
      require_dtype(prefix + ".weight", tensors_.at(prefix + ".weight"),
                    config_.method == Method::kInt ? "I8" : "F8_E4M3");
      source = bytes(prefix, inverse ? ".weight_scale_inv" : ".weight_scale");
    }
    weights_.add_quantized(prefix + ".weight", std::move(source));
  }
}

}  // namespace

void take_quantized(std::map<std::string, StoredTensor>& tensors,
                    const std::optional<QuantizationConfig>& config, DType activations,
                    WeightMap& weights) {
  if (config) return Taker(tensors, *config, activations, weights).run();
  for (const auto& [name, tensor] : tensors) {
    if (name.ends_with(".weight_packed") || name.ends_with(".qweight")) {
      fail(name, "is quantized, but config.json has no quantization_config");
    }
  }
}

}  // namespace kvlm
