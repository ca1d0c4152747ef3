#include "runtime/loading/safetensors.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <string_view>
#include <tuple>
#include <utility>

#include "kernels/base/error.h"
#include "kernels/base/printable.h"
#include "runtime/loading/config.h"

// The header of a safetensors file, read as hostile: every size is checked before it is used, and
// tensors have to tile the data exactly.
namespace kvlm {

namespace {

using nlohmann::json;

constexpr size_t kLengthBytes = 8;
constexpr uint64_t kMaxHeaderBytes = 100'000'000;

struct DTypeBits {
  std::string_view name;
  uint64_t bits;
};

constexpr std::array kDTypes = {
    DTypeBits{"BOOL", 8},        DTypeBits{"U8", 8},          DTypeBits{"I8", 8},
    DTypeBits{"F8_E4M3", 8},     DTypeBits{"F8_E5M2", 8},     DTypeBits{"F8_E8M0", 8},
    DTypeBits{"F8_E4M3FNUZ", 8}, DTypeBits{"F8_E5M2FNUZ", 8}, DTypeBits{"I16", 16},
    DTypeBits{"U16", 16},        DTypeBits{"F16", 16},        DTypeBits{"BF16", 16},
    DTypeBits{"I32", 32},        DTypeBits{"U32", 32},        DTypeBits{"F32", 32},
    DTypeBits{"I64", 64},        DTypeBits{"U64", 64},        DTypeBits{"F64", 64},
    DTypeBits{"C64", 64},        DTypeBits{"F4", 4},          DTypeBits{"F6_E2M3", 6},
    DTypeBits{"F6_E3M2", 6},
};

[[noreturn]] void fail(const std::string& name, const std::string& defect) {
  throw Error(ErrorCode::kCorruptFile,
              fmt::format("{}: {}; the file is damaged, download it again", name, defect));
}

/// One tensor of the header, with what its messages need.
class EntryReader {
 public:
  EntryReader(const std::string& file, const std::string& tensor) : file_(file), tensor_(tensor) {}

  SafetensorsEntry read(const json& value, size_t data_bytes) const {
    if (!value.is_object()) reject("is not an object with dtype, shape and data_offsets");
    for (const auto& [key, unused] : value.items()) {
      if (key != "dtype" && key != "shape" && key != "data_offsets") {
        reject(fmt::format("has an unknown field \"{}\"", printable(key)));
      }
    }
    SafetensorsEntry entry;
    entry.name = tensor_;
    const json& dtype = field(value, "dtype");
    if (!dtype.is_string()) reject("has a dtype that is not a string");
    entry.dtype = dtype.get<std::string>();
    entry.shape = read_shape(field(value, "shape"));
    const uint64_t bytes = byte_size(entry.dtype, entry.shape);
    const auto [begin, end] = read_offsets(field(value, "data_offsets"));
    if (begin > end) reject(fmt::format("begins at {} after its end {}", begin, end));
    if (end > data_bytes) {
      reject(fmt::format("ends at {} of a data buffer of {} bytes", end, data_bytes));
    }
    if (end - begin != bytes) {
      reject(fmt::format("spans {} bytes, but its dtype and shape need {}", end - begin, bytes));
    }
    entry.begin = static_cast<size_t>(begin);  // both at most data_bytes, a size_t
    entry.end = static_cast<size_t>(end);
    return entry;
  }

 private:
  [[noreturn]] void reject(const std::string& defect) const {
    fail(file_, fmt::format("tensor {} {}", printable(tensor_), defect));
  }

  const json& field(const json& value, const char* key) const {
    const auto place = value.find(key);
    if (place == value.end()) reject(fmt::format("has no field \"{}\"", key));
    return *place;
  }

  std::vector<int64_t> read_shape(const json& dims) const {
    if (!dims.is_array()) reject("has a shape that is not a list");
    std::vector<int64_t> shape;
    for (const json& dim : dims) {
      // Negative numbers, floats and integers beyond 64 bits are not "unsigned" to the parser.
      if (!dim.is_number_unsigned() || !std::in_range<int64_t>(dim.get<uint64_t>())) {
        reject("has a dimension that is not an integer from 0 to 2^63 - 1");
      }
      shape.push_back(static_cast<int64_t>(dim.get<uint64_t>()));
    }
    return shape;
  }

  std::pair<uint64_t, uint64_t> read_offsets(const json& offsets) const {
    if (!offsets.is_array() || offsets.size() != 2 || !offsets[0].is_number_unsigned() ||
        !offsets[1].is_number_unsigned()) {
      reject("has data_offsets that are not two non-negative integers");
    }
    return {offsets[0].get<uint64_t>(), offsets[1].get<uint64_t>()};
  }

  uint64_t byte_size(std::string_view dtype, const std::vector<int64_t>& shape) const {
    const auto known = std::ranges::find(kDTypes, dtype, &DTypeBits::name);
    if (known == kDTypes.end()) {
      reject(fmt::format("has the unknown dtype \"{}\"", printable(dtype)));
    }
    // A zero counts as one until the end: strides, products of some of the dimensions, must fit
    // as well.
    constexpr uint64_t kMaxBits = std::numeric_limits<int64_t>::max();
    uint64_t bits = known->bits;
    bool is_empty = false;
    for (const int64_t dim : shape) {
      is_empty = is_empty || dim == 0;
      const auto factor = static_cast<uint64_t>(std::max<int64_t>(dim, 1));
      if (bits > kMaxBits / factor) reject("has a shape whose size overflows 64 bits");
      bits *= factor;
    }
    if (is_empty) return 0;
    if (bits % 8 != 0) {
      reject(fmt::format("holds {} bits of {}, which is not a whole number of bytes", bits, dtype));
    }
    return bits / 8;
  }

  const std::string& file_;
  const std::string& tensor_;
};

void check_metadata(const json& metadata, const std::string& name) {
  if (!metadata.is_object()) fail(name, "__metadata__ is not an object");
  for (const auto& [key, value] : metadata.items()) {
    if (!value.is_string()) {
      fail(name, fmt::format("__metadata__ value of \"{}\" is not a string", printable(key)));
    }
  }
}

/// Sorts by offset and requires that the tensors tile [0, data_bytes) exactly. Empty tensors sort
/// before the one that begins where they are.
void check_tiling(std::vector<SafetensorsEntry>& entries, size_t data_bytes,
                  const std::string& name) {
  std::ranges::sort(entries, {}, [](const SafetensorsEntry& entry) {
    return std::tuple<size_t, size_t, const std::string&>(entry.begin, entry.end, entry.name);
  });
  size_t covered = 0;
  for (const SafetensorsEntry& entry : entries) {
    if (entry.begin != covered) {
      fail(name, fmt::format("tensor {} begins at {}, expected {}: {}", printable(entry.name),
                             entry.begin, covered,
                             entry.begin > covered ? "a hole in the data" : "tensors overlap"));
    }
    covered = entry.end;
  }
  if (covered != data_bytes) {
    fail(name, fmt::format("{} bytes trail the last tensor", data_bytes - covered));
  }
}

}  // namespace

SafetensorsHeader parse_safetensors(std::span<const std::byte> file, const std::string& name) {
  if (file.size() < kLengthBytes) {
    fail(name, fmt::format("{} bytes long, shorter than the {} of a safetensors header length",
                           file.size(), kLengthBytes));
  }
  uint64_t header_bytes = 0;
  for (size_t i = 0; i < kLengthBytes; ++i) {
    header_bytes |= std::to_integer<uint64_t>(file[i]) << (8 * i);
  }
  if (header_bytes > kMaxHeaderBytes) {
    fail(name, fmt::format("claims a header of {} bytes; at most {} are allowed", header_bytes,
                           kMaxHeaderBytes));
  }
  if (header_bytes > file.size() - kLengthBytes) {
    fail(name, fmt::format("claims a header of {} bytes, but only {} follow: the file is cut short",
                           header_bytes, file.size() - kLengthBytes));
  }
  SafetensorsHeader header;
  header.data_offset = kLengthBytes + static_cast<size_t>(header_bytes);
  const size_t data_bytes = file.size() - header.data_offset;

  const std::string_view text(reinterpret_cast<const char*>(file.data()) + kLengthBytes,
                              static_cast<size_t>(header_bytes));
  if (!text.starts_with('{')) fail(name, "the header does not start with '{'");
  const json root = parse_json(text, name + ": header");  // starts with '{', so it is an object

  for (const auto& [tensor, value] : root.items()) {
    if (tensor == "__metadata__") {
      check_metadata(value, name);
      continue;
    }
    if (tensor.find('\0') != std::string::npos) {
      fail(name, fmt::format("the tensor name {} holds a NUL", printable(tensor)));
    }
    header.entries.push_back(EntryReader(name, tensor).read(value, data_bytes));
  }
  check_tiling(header.entries, data_bytes, name);
  return header;
}

}  // namespace kvlm
