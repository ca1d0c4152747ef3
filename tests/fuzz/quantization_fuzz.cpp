// quantization_config and the tensors of quantized matrices, of any types and sizes: a matrix that
// can be laid out and read comes out, or one readable sentence.
//
// The input is a JSON object: "quantization_config" as in config.json, "tensors" from names to
// [element type, dimensions...], "shape" of every matrix, and "fill", from names to the elements
// that a tensor repeats. Others have finite numbers.

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "kernels/weight_map.h"
#include "runtime/loading/quantization.h"
#include "runtime/loading/quantized_tensors.h"
#include "tests/fuzz/readable_errors.h"

namespace {

using nlohmann::json;

using kvlm::fuzz::require;
using kvlm::fuzz::succeeds;

/// Bytes of an element of a safetensors type; 0 if there is none of that name.
size_t element_bytes(const std::string& dtype) {
  static const std::map<std::string, size_t> kBytes = {
      {"U8", 1},  {"I8", 1},  {"F8_E4M3", 1}, {"F16", 2}, {"BF16", 2},
      {"I16", 2}, {"I32", 4}, {"F32", 4},     {"I64", 8}, {"F64", 8}};
  const auto found = kBytes.find(dtype);
  return found == kBytes.end() ? 0 : found->second;
}

/// A tensor of a file of at most 256 KiB, as the reader of safetensors hands it on.
std::optional<kvlm::StoredTensor> tensor_of(const json& described, const json& fill,
                                            uint32_t seed) {
  if (!described.is_array() || described.empty() || !described[0].is_string()) return {};
  kvlm::StoredTensor tensor{described[0].get<std::string>(), {}, nullptr, 0, nullptr};
  size_t bytes = element_bytes(tensor.dtype);
  if (bytes == 0) return {};
  for (size_t i = 1; i < described.size(); ++i) {
    if (!described[i].is_number_integer()) return {};
    const auto size = described[i].get<int64_t>();
    constexpr size_t kMost = size_t{256} << 10;
    if (size < 0 || size > static_cast<int64_t>(kMost)) return {};
    bytes *= static_cast<size_t>(size);
    if (bytes > kMost) return {};
    tensor.shape.push_back(size);
  }
  auto data = std::make_shared<std::vector<std::byte>>(bytes);
  const size_t each = element_bytes(tensor.dtype);
  const bool is_float = tensor.dtype[0] == 'F' || tensor.dtype[0] == 'B';
  for (size_t i = 0; i < bytes; ++i) {
    seed = seed * 1664525u + 1013904223u;
    auto byte = static_cast<std::byte>(seed >> 24);
    if (is_float && i % each == each - 1) byte &= std::byte{0xbf};  // finite
    if (fill.is_array() && !fill.empty() && fill[i / each % fill.size()].is_number_integer()) {
      const auto element = fill[i / each % fill.size()].get<uint64_t>();
      byte = static_cast<std::byte>(element >> (8 * (i % each)) & 255);
    }
    (*data)[i] = byte;
  }
  tensor.data = data->data();
  tensor.bytes = bytes;
  tensor.owner = data;
  return tensor;
}

kvlm::Shape shape_of(const json& input) {
  int64_t sizes[2] = {64, 64};
  const json shape = input.value("shape", json());
  for (size_t i = 0; i < 2 && shape.is_array() && i < shape.size(); ++i) {
    if (shape[i].is_number_integer()) sizes[i] = shape[i].get<int64_t>();
    if (sizes[i] < 1 || sizes[i] > 1024) sizes[i] = 64;
  }
  return {sizes[0], sizes[1]};
}

/// Takes every matrix that was made, and reads it.
void take_matrices(kvlm::WeightMap& weights, const kvlm::Shape& shape) {
  for (const std::string& name : weights.remaining()) {
    kvlm::Weight weight;
    const bool taken =
        succeeds([&] { weight = weights.take_matrix(name, shape, kvlm::MatrixUse::kDecoder); });
    if (!taken || !weight.is_quantized()) continue;
    const kvlm::QuantizedFormat& format = weight.quantized().format;
    require(format.shape() == shape && format.group > 0);
    kvlm::QuantizedRows rows;
    rows.resize(format, format.out);
    kvlm::read_rows(weight.quantized(), 0, format.out, rows);
    std::vector<float> row(static_cast<size_t>(format.in));
    for (int64_t o = 0; o < format.out; ++o) rows.widen(format, o, row.data());
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const json input = json::parse(data, data + size, nullptr, /*allow_exceptions=*/false);
  if (!input.is_object()) return 0;
  std::optional<kvlm::QuantizationConfig> config;
  const auto no_file = [](const std::string&) { return json(); };
  if (!succeeds([&] { config = kvlm::read_quantization("folder", input, no_file); })) return 0;

  std::map<std::string, kvlm::StoredTensor> tensors;
  const json described = input.value("tensors", json::object());
  if (!described.is_object()) return 0;
  const json fill = input.value("fill", json::object());
  const json fills = fill.is_object() ? fill : json::object();
  auto seed = static_cast<uint32_t>(size);
  size_t bytes = 0;
  for (const auto& [name, value] : described.items()) {
    auto tensor = tensor_of(value, fills.value(name, json()), ++seed);
    if (!tensor || bytes + tensor->bytes > size_t{1} << 20) continue;
    bytes += tensor->bytes;
    tensors[name] = *tensor;
  }
  kvlm::WeightMap weights;
  if (!succeeds([&] { kvlm::take_quantized(tensors, config, kvlm::DType::kBF16, weights); })) {
    return 0;
  }
  take_matrices(weights, shape_of(input));
  return 0;
}
