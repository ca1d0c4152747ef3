#include "runtime/loading/lora.h"

#include <fmt/format.h>

#include <cmath>
#include <cstring>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>

#include "kernels/base/error.h"
#include "kernels/base/printable.h"
#include "runtime/loading/config.h"
#include "runtime/loading/mapped_file.h"
#include "runtime/loading/safetensors.h"

// An adapter's folder: what its configuration asks for beyond W + scale * B A is refused, and its
// tensors are paired by the matrix that they name.
namespace kvlm {

namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;

/// One of the two matrices as f32.
std::shared_ptr<const Tensor> read_matrix(const SafetensorsEntry& entry, const std::byte* data,
                                          const std::string& file) {
  const bool known = entry.dtype == "F32" || entry.dtype == "F16" || entry.dtype == "BF16";
  if (!known || entry.shape.size() != 2) {
    throw Error(ErrorCode::kUnsupported,
                fmt::format("{}: tensor {} holds {} of {} dimensions; expected a matrix of F32, "
                            "F16 or BF16",
                            file, printable(entry.name), entry.dtype, entry.shape.size()));
  }
  auto matrix = std::make_shared<Tensor>(DType::kF32, Shape{entry.shape[0], entry.shape[1]});
  auto* to = matrix->as<float>();
  for (int64_t i = 0; i < matrix->shape().elements(); ++i) {
    if (entry.dtype == "F32") {
      std::memcpy(to + i, data + 4 * i, sizeof(float));
    } else {
      uint16_t bits;
      std::memcpy(&bits, data + 2 * i, sizeof(bits));
      to[i] = entry.dtype == "F16" ? to_float(f16{bits}) : to_float(bf16{bits});
    }
    if (!std::isfinite(to[i])) {
      throw Error(ErrorCode::kCorruptFile,
                  fmt::format("{}: number {} of tensor {} is {}; download the adapter again", file,
                              i, printable(entry.name), to[i]));
    }
  }
  return matrix;
}

/// adapter_config.json.
class AdapterConfig {
 public:
  explicit AdapterConfig(const fs::path& folder)
      : path_((folder / "adapter_config.json").string()) {
    const MappedFile file(folder / "adapter_config.json", path_);
    const auto bytes = file.bytes();
    json_ = parse_json({reinterpret_cast<const char*>(bytes.data()), bytes.size()}, path_);
    if (!json_.is_object()) fail("is no object");
    const std::string type = json_.value("peft_type", "LORA");
    if (type != "LORA") fail(fmt::format("peft_type is {}; LORA is built in", printable(type)));
    for (const char* key : {"use_dora", "fan_in_fan_out", "lora_bias"}) {
      if (flag(key)) fail(fmt::format("{} is true, which is not built in", key));
    }
    if (json_.contains("bias") && json_["bias"] != "none") {
      fail("bias is not none; adapters that train biases are not read");
    }
    for (const char* key : {"rank_pattern", "alpha_pattern"}) {
      if (json_.contains(key) && !json_[key].empty()) {
        fail(fmt::format("{} is not empty, which is not built in", key));
      }
    }
    alpha_ = json_.value("lora_alpha", Json()).is_number() ? json_["lora_alpha"].get<double>() : 0;
    if (alpha_ == 0) fail("lora_alpha is no number; expected one other than 0");
  }

  float scale(int64_t rank) const {
    const auto r = static_cast<double>(rank);
    return static_cast<float>(alpha_ / (flag("use_rslora") ? std::sqrt(r) : r));
  }

 private:
  bool flag(const char* key) const { return json_.contains(key) && json_[key] == true; }
  [[noreturn]] void fail(const std::string& what) const {
    throw Error(ErrorCode::kUnsupported,
                fmt::format("{}: {}; merge the adapter into its model with PEFT", path_, what));
  }

  std::string path_;
  Json json_;
  double alpha_ = 0;
};

/// The matrix of the checkpoint that a tensor of the adapter belongs to, and which of the two it
/// is.
struct AdapterName {
  std::string matrix;
  bool is_a;
};

std::optional<AdapterName> parse_name(std::string_view name) {
  constexpr std::string_view kRoot = "base_model.model.";
  if (!name.starts_with(kRoot)) return std::nullopt;
  name.remove_prefix(kRoot.size());
  for (const bool is_a : {true, false}) {
    const std::string_view part = is_a ? ".lora_A." : ".lora_B.";
    const size_t at = name.find(part);
    const std::string_view rest =
        at == std::string_view::npos ? std::string_view() : name.substr(at + part.size());
    if (rest != "weight" && rest != "default.weight") continue;
    return AdapterName{std::string(name.substr(0, at)) + ".weight", is_a};
  }
  return std::nullopt;
}

}  // namespace

void add_lora(WeightMap& weights, const fs::path& folder) {
  const AdapterConfig config(folder);
  const std::string path = (folder / "adapter_model.safetensors").string();
  const MappedFile file(folder / "adapter_model.safetensors", path);
  const SafetensorsHeader header = parse_safetensors(file.bytes(), path);
  std::map<std::string, WeightMap::LowRankUpdate> updates;
  for (const SafetensorsEntry& entry : header.entries) {
    const std::optional<AdapterName> name = parse_name(entry.name);
    if (!name) {
      throw Error(
          ErrorCode::kUnsupported,
          fmt::format("{}: tensor {} is not lora_A or lora_B of a matrix; merge the adapter "
                      "into its model with PEFT",
                      path, printable(entry.name)));
    }
    auto matrix = read_matrix(entry, file.bytes().data() + header.data_offset + entry.begin, path);
    WeightMap::LowRankUpdate& update = updates[name->matrix];
    (name->is_a ? update.a : update.b) = std::move(matrix);
  }
  for (auto& [name, update] : updates) {
    const bool whole = update.a && update.b && update.a->shape()[0] > 0 &&
                       update.a->shape()[0] == update.b->shape()[1];
    if (!whole) {
      throw Error(ErrorCode::kCorruptFile,
                  fmt::format("{}: lora_A and lora_B of {} are not a pair of one rank; download "
                              "the adapter again",
                              path, printable(name)));
    }
    update.scale = config.scale(update.a->shape()[0]);
    weights.add_update(name, std::move(update));
  }
}

}  // namespace kvlm
