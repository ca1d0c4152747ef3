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

/// Finds the folder that `-m NAME` means, without any network. The first that applies:
///   pocket, pocket-llava, pocket-internvl, pocket-qwen
///                         the bundled model under `bundled` (pocket is pocket-llava); a folder of
///                         the same name is written ./pocket
///   an existing folder    itself; of a folder models--ORG--NAME of the Hugging Face cache, the
///                         snapshot that its refs/main names, or the only one
///   org/name[@revision]   the snapshot in the Hugging Face cache: HF_HUB_CACHE, then HF_HOME/hub,
///                         then XDG_CACHE_HOME/huggingface/hub, then HOME/.cache/huggingface/hub,
///                         the first of these that has the model. The revision is a branch, a tag
///                         or a commit; by default main, or the only snapshot there is. The page
///                         of the hub, a slash at the end and models--org--name mean the same.
/// Throws Error{kInvalidArgument} for a name that cannot be any of these, Error{kCorruptFile}
/// naming every place that was looked at and what to do next.
std::filesystem::path find_model(const std::string& name, const std::filesystem::path& bundled,
                                 const Environment& environment);

}  // namespace kvlm
