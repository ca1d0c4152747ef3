#pragma once

#include <array>
#include <nlohmann/json.hpp>
#include <string>

#include "tools/kv/estimate.h"

namespace kvlm {

/// A component of what a cache stores.
struct PartColumn {
  const char* key;   ///< in JSON
  const char* name;  ///< in tables
  size_t PartBytes::*bytes;
};

inline constexpr std::array kPartColumns = {
    PartColumn{"key_codes", "key codes", &PartBytes::key_codes},
    PartColumn{"key_scales", "key scales", &PartBytes::key_scales},
    PartColumn{"value_codes", "value codes", &PartBytes::value_codes},
    PartColumn{"value_scales", "value scales", &PartBytes::value_scales},
    PartColumn{"full_rows", "unquantized", &PartBytes::full_rows},
    PartColumn{"masks", "masks", &PartBytes::masks},
    PartColumn{"weights", "weight sums", &PartBytes::weights},
};

/// The object that `vlm-kv explain --json` prints.
nlohmann::ordered_json estimate_json(const std::string& spec, const std::string& model,
                                     const CacheShape& shape, const PromptSize& prompt,
                                     const Estimate& made);

/// The array of policies that `vlm-kv list --json` prints: those of listed(name).
nlohmann::ordered_json policies_json(const std::string& name);

}  // namespace kvlm
