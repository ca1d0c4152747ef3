#pragma once

#include <string_view>

namespace kvlm {

/// What to write instead of an option of llama.cpp, vLLM, Ollama or transformers that vlm-run has
/// not; empty for one that none of them has. Aliases (--max-new-tokens) are in options.cpp.
std::string_view advice_on_foreign_option(std::string_view name);

/// Such an option that CLI11 would read as a short option with its value: -ngl as -n gl.
bool hides_a_short_option(std::string_view name) noexcept;

/// What to write instead of a subcommand of those tools, or of vlm-kv and vlm-bench; empty for
/// another word.
std::string_view advice_on_command(std::string_view word) noexcept;

}  // namespace kvlm
