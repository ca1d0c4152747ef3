#pragma once

#include <filesystem>
#include <functional>
#include <nlohmann/json_fwd.hpp>
#include <string>

namespace kvlm {

/// Throws Error{kUnsupported} with method and bits if a checkpoint says that its weights are
/// quantized: in config.json, at the top or for the decoder alone, or in the file that a quantizer
/// writes next to it (AutoGPTQ, AutoAWQ, ModelOpt). `read` gives a file of the folder, null if it
/// has none of that name; `folder` is for the message.
void refuse_quantized(const std::filesystem::path& folder, const nlohmann::json& config,
                      const std::function<nlohmann::json(const std::string& file)>& read);

}  // namespace kvlm
