#pragma once

#include <CLI/CLI.hpp>
#include <string>

#include "kernels/weight_map.h"
#include "tools/common/session.h"

namespace kvlm {

/// --weights and --activations: in how many bits matrices are kept, and what they are multiplied
/// with.
void add_weight_options(CLI::App& app, SessionOptions& options);

/// --lora: an adapter to merge.
void add_lora_option(CLI::App& app, SessionOptions& options);

/// "16", "int8" or "int4", for the decoder.
/// Throws Error{kInvalidArgument} for anything else.
WeightRounding parse_weights(const std::string& text);

/// 8 or 16. Throws Error{kInvalidArgument} for anything else.
int parse_activations(const std::string& text);

}  // namespace kvlm
