#pragma once

#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <string_view>

namespace kvlm {

/// Reads a variable of the process's environment; injected so that only tools/ touches the real
/// one.
using Environment = std::function<std::optional<std::string>(std::string_view)>;

/// Finds the folder that `-m NAME` means, without any network:
///   an existing folder        itself
///   org/name[@revision]       the snapshot in the Hugging Face cache (HF_HUB_CACHE, then
///   HF_HOME/hub,
///                             then $XDG_CACHE_HOME/huggingface/hub, then ~/.cache/huggingface/hub;
///                             refs/main by default)
///   pocket, pocket-llava, ... the bundled model under `bundled`
/// Throws Error{kCorruptFile} naming every place that was looked at and what to do next.
std::filesystem::path find_model(const std::string& name, const std::filesystem::path& bundled,
                                 const Environment& environment);

}  // namespace kvlm
