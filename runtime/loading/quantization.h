#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

namespace kvlm {

/// How the matrices of a checkpoint may be quantized; one of several groups of compressed-tensors.
struct QuantizationScheme {
  int bits = 0;
  /// Inputs that share a scale; 0: all of them.
  int64_t group = 0;
  bool zeros = false;  ///< asymmetric
};

/// What config.json says of its weights (quantization_config).
struct QuantizationConfig {
  enum class Method {
    kPacked,  ///< compressed-tensors pack-quantized: weight_packed, weight_scale, weight_zero_point
    kInt,     ///< compressed-tensors int-quantized: weight in I8, weight_scale
    kFloat,   ///< float-quantized, or fine-grained FP8: weight in F8_E4M3, weight_scale(_inv)
    kAwq,     ///< AWQ in GEMM order: qweight, qzeros, scales
    kGptq,    ///< GPTQ: qweight, qzeros, scales, g_idx
  };
  Method method = Method::kPacked;
  std::string where;  ///< "config.json: text_config.quantization_config", for messages
  std::vector<QuantizationScheme> schemes;
  bool stored_zeros_are_one_less = false;  ///< GPTQ before v2
  std::vector<std::string> warnings;
};

/// Reads the quantization of a checkpoint: in config.json, at the top or for the decoder alone, or
/// in the file that a quantizer writes next to it (AutoGPTQ, AutoAWQ). Nothing if its weights are
/// ordinary. `read` gives a file of the folder, null if it has none of that name.
/// Throws Error{kUnsupported} naming what is not read and what to use instead, Error{kCorruptFile}
/// where two places disagree.
std::optional<QuantizationConfig> read_quantization(
    const std::filesystem::path& folder, const nlohmann::json& config,
    const std::function<nlohmann::json(const std::string& file)>& read);

}  // namespace kvlm
