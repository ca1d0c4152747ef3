#include "runtime/loading/quantization.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>
#include <string_view>

#include "kernels/base/error.h"
#include "kernels/base/printable.h"

// quantization_config of config.json, in the words of compressed-tensors, AWQ, GPTQ and
// fine-grained FP8. What is not read is refused by its name, with what to use instead.
namespace kvlm {

namespace {

using nlohmann::json;
using Method = QuantizationConfig::Method;

constexpr std::string_view kInstead = "use the 16-bit checkpoint with --weights int4";

/// Reads one configuration, whose place `where` begins every message.
class Reader {
 public:
  Reader(std::string where, const json& config) : where_(std::move(where)), config_(config) {}

  /// `what` is a clause: "format is nvfp4-pack-quantized".
  [[noreturn]] void refuse(const std::string& what, std::string_view cure = kInstead) const {
    throw Error(ErrorCode::kUnsupported,
                fmt::format("{}: {}, which is not read; {}", where_, printable(what), cure));
  }

  QuantizationConfig read(std::string_view fallback) const {
    if (!config_.is_object()) refuse("is not an object");
    QuantizationConfig found;
    found.where = where_;
    const bool bitsandbytes =
        member(config_, "load_in_4bit") != nullptr || member(config_, "load_in_8bit") != nullptr;
    const std::string method =
        text_of(config_, "quant_method", bitsandbytes ? "bitsandbytes" : fallback);
    if (method == "compressed-tensors") {
      read_compressed_tensors(found);
    } else if (method == "awq") {
      read_awq(found);
    } else if (method == "gptq") {
      read_gptq(found);
    } else if (method == "fp8") {
      read_fp8(found);
    } else if (method == "bitsandbytes") {
      refuse(flag(config_, "load_in_8bit") ? "quant_method is bitsandbytes (int8)"
                                           : "quant_method is bitsandbytes (NF4)");
    } else {
      refuse(fmt::format("quant_method is {}", method));
    }
    return found;
  }

 private:
  static const json* member(const json& object, const char* key) {
    if (!object.is_object()) return nullptr;
    const auto found = object.find(key);
    return found == object.end() || found->is_null() ? nullptr : &*found;
  }
  static std::string text_of(const json& object, const char* key, std::string_view otherwise) {
    const json* found = member(object, key);
    if (found == nullptr) return std::string(otherwise);
    return found->is_string() ? found->get<std::string>() : found->dump();
  }
  static bool flag(const json& object, const char* key, bool otherwise = false) {
    const json* found = member(object, key);
    return found != nullptr && found->is_boolean() ? found->get<bool>() : otherwise;
  }
  int64_t number(const json& object, std::initializer_list<const char*> keys,
                 int64_t otherwise) const {
    for (const char* key : keys) {
      const json* found = member(object, key);
      if (found == nullptr) continue;
      if (!found->is_number_integer()) refuse(fmt::format("{} is {}", key, found->dump()));
      return found->get<int64_t>();
    }
    return otherwise;
  }
  /// A group size of 32, 64 or 128, or 0 for all inputs, which files write as -1.
  int64_t group_of(int64_t size) const {
    if (size == -1) return 0;
    if (size != 32 && size != 64 && size != 128) {
      refuse(fmt::format("group_size is {}; 32, 64, 128 and -1 are", size));
    }
    return size;
  }

  void read_compressed_tensors(QuantizationConfig& found) const;
  void read_group(const std::string& name, const json& group, QuantizationConfig& found) const;
  void read_awq(QuantizationConfig& found) const;
  void read_gptq(QuantizationConfig& found) const;
  void read_fp8(QuantizationConfig& found) const;

  std::string where_;
  const json& config_;
};

void Reader::read_compressed_tensors(QuantizationConfig& found) const {
  for (const char* key : {"sparsity_config", "transform_config"}) {
    const json* other = member(config_, key);
    if (other != nullptr && !other->empty()) refuse(fmt::format("{} is not empty", key));
  }
  if (member(config_, "kv_cache_scheme") != nullptr) {
    found.warnings.push_back(fmt::format(
        "{}: kv_cache_scheme, the file's scheme for the cache, is not used; --kv decides", where_));
  }
  const json* groups = member(config_, "config_groups");
  if (groups == nullptr || !groups->is_object() || groups->empty()) {
    refuse("has no config_groups");
  }
  bool first = true;
  for (const auto& [name, group] : groups->items()) {
    const std::string format = text_of(group, "format", text_of(config_, "format", "absent"));
    Method method = Method::kPacked;
    if (format == "int-quantized") {
      method = Method::kInt;
    } else if (format == "float-quantized" || format == "naive-quantized") {
      method = Method::kFloat;
    } else if (format != "pack-quantized") {
      refuse(fmt::format("the format of {} is {}", name, format));
    }
    if (!first && method != found.method) {
      refuse(fmt::format("{} is of another format than the groups before it", name));
    }
    found.method = method;
    first = false;
    read_group(name, group, found);
  }
}

void Reader::read_group(const std::string& name, const json& group,
                        QuantizationConfig& found) const {
  const json* weights = member(group, "weights");
  if (weights == nullptr) refuse(fmt::format("{} has no weights", name));
  const auto fail = [&](const char* key, const std::string& value, const char* expected) {
    refuse(fmt::format("{}: weights.{} is {}; {}", name, key, value, expected));
  };
  const bool floats = text_of(*weights, "type", "int") == "float";
  const int64_t bits = number(*weights, {"num_bits"}, 8);
  if (floats != (found.method == Method::kFloat)) {
    fail("type", text_of(*weights, "type", "int"), "float goes with float-quantized");
  }
  if (floats || found.method == Method::kInt ? bits != 8 : bits != 4 && bits != 8) {
    fail("num_bits", std::to_string(bits), floats ? "8 is" : "4 and 8 are");
  }
  const json* dynamic = member(*weights, "dynamic");
  if (dynamic != nullptr && *dynamic != false) fail("dynamic", dynamic->dump(), "false is");
  const std::string order = text_of(*weights, "actorder", "static");
  if (order != "static" && order != "weight" && order != "false") {
    refuse(fmt::format("{}: weights.actorder is {}: columns are reordered (g_idx)", name, order),
           "quantize with actorder static, or use the 16-bit checkpoint with --weights int4");
  }
  if (member(group, "output_activations") != nullptr) {
    refuse(fmt::format("{} has output_activations", name));
  }
  QuantizationScheme scheme;
  scheme.bits = static_cast<int>(bits);
  scheme.zeros = !flag(*weights, "symmetric", true);
  if (scheme.zeros && found.method != Method::kPacked) fail("symmetric", "false", "true is");
  const int64_t size = number(*weights, {"group_size"}, -1);
  const std::string strategy = text_of(*weights, "strategy", size > 0 ? "group" : "channel");
  if (strategy == "group") {
    scheme.group = group_of(size);
  } else if (strategy == "block") {
    const json* block = member(*weights, "block_structure");
    if (block == nullptr || *block != json::array({128, 128})) {
      fail("block_structure", block == nullptr ? "absent" : block->dump(), "[128, 128] is");
    }
    scheme.group = 128;
  } else if (strategy != "channel" && strategy != "tensor") {
    fail("strategy", strategy, "group, channel, tensor and block are");
  }
  found.schemes.push_back(scheme);
}

void Reader::read_awq(QuantizationConfig& found) const {
  found.method = Method::kAwq;
  const int64_t bits = number(config_, {"bits", "w_bit"}, 4);
  if (bits != 4) refuse(fmt::format("bits is {}; AWQ of 4 bits is", bits));
  std::string version = text_of(config_, "version", text_of(config_, "format", "gemm"));
  std::ranges::transform(version, version.begin(),
                         [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  if (version != "gemm") refuse(fmt::format("version is {}; AWQ in the order gemm is", version));
  if (!flag(config_, "zero_point", true)) refuse("zero_point is false");
  found.schemes.push_back(
      {4, group_of(number(config_, {"group_size", "q_group_size"}, 128)), true});
}

void Reader::read_gptq(QuantizationConfig& found) const {
  found.method = Method::kGptq;
  const int64_t bits = number(config_, {"bits"}, 4);
  if (bits != 4 && bits != 8) refuse(fmt::format("bits is {}; GPTQ of 4 and 8 bits is", bits));
  const std::string format = text_of(config_, "checkpoint_format", "gptq");
  if (format != "gptq" && format != "gptq_v2") {
    refuse(fmt::format("checkpoint_format is {}", format));
  }
  found.stored_zeros_are_one_less = format == "gptq";
  found.schemes.push_back({static_cast<int>(bits), group_of(number(config_, {"group_size"}, 128)),
                           !flag(config_, "sym", true)});
}

void Reader::read_fp8(QuantizationConfig& found) const {
  found.method = Method::kFloat;
  const std::string format = text_of(config_, "fmt", "e4m3");
  if (format != "e4m3" && format != "float8_e4m3fn") refuse(fmt::format("fmt is {}", format));
  if (const json* scales = member(config_, "scale_fmt"); scales != nullptr) {
    refuse(fmt::format("scale_fmt is {}", scales->dump()));
  }
  const json* block = member(config_, "weight_block_size");
  if (block != nullptr && *block != json::array({128, 128})) {
    refuse(fmt::format("weight_block_size is {}; [128,128] is", block->dump()));
  }
  found.schemes.push_back({8, block == nullptr ? 0 : 128, false});
}

/// Whether the tensors are ordinary all the same.
bool is_dense(const json& config) {
  if (!config.is_object()) return false;
  const auto text = [&](const char* key) {
    const auto found = config.find(key);
    return found != config.end() && found->is_string() ? found->get<std::string>() : std::string();
  };
  if (text("quant_method") != "compressed-tensors") return false;
  return text("format") == "dense" ||
         (!text("quantization_status").empty() && text("quantization_status") != "compressed");
}

}  // namespace

std::optional<QuantizationConfig> read_quantization(
    const std::filesystem::path& folder, const nlohmann::json& config,
    const std::function<nlohmann::json(const std::string& file)>& read) {
  constexpr auto kParts =
      std::to_array<std::string_view>({"", "text_config", "llm_config", "vision_config"});
  const json* found = nullptr;
  std::string where;
  for (const std::string_view part : kParts) {
    const auto inner = config.find(part);
    if (!part.empty() && (inner == config.end() || !inner->is_object())) continue;
    const json& object = part.empty() ? config : *inner;
    for (const char* key : {"quantization_config", "compression_config"}) {
      const auto place = object.find(key);
      if (place == object.end() || place->is_null()) continue;
      const std::string here =
          fmt::format("config.json: {}{}{}", part, part.empty() ? "" : ".", key);
      if (found != nullptr && *found != *place) {
        throw Error(ErrorCode::kCorruptFile,
                    fmt::format("{}: {} and {} differ; the files do not belong together, download "
                                "them again",
                                printable(folder.string()), where, here));
      }
      found = &*place;
      where = here;
    }
  }
  const auto at = [&](const std::string& place) {
    return fmt::format("{}: {}", printable(folder.string()), place);
  };
  if (found != nullptr) {
    if (is_dense(*found)) return std::nullopt;
    return Reader(at(where), *found).read("absent");
  }
  for (const auto& [file, method] :
       {std::pair{"quantize_config.json", "gptq"}, std::pair{"quant_config.json", "awq"},
        std::pair{"hf_quant_config.json", "modelopt"}}) {
    if (const json quantization = read(file); !quantization.is_null()) {
      return Reader(at(file), quantization).read(method);
    }
  }
  return std::nullopt;
}

}  // namespace kvlm
