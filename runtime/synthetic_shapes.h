#pragma once

#include <span>
#include <string_view>

namespace kvlm {

/// A released model without its weights: what its files say, as far as its shape depends on them.
struct SyntheticShape {
  std::string_view name;
  std::string_view config;        ///< config.json without its vision_config
  std::string_view vision;        ///< vision_config
  std::string_view preprocessor;  ///< preprocessor_config.json
  /// The special tokens that the prompt needs, beside <unk>, <s> and </s>: [[id, text], ...].
  std::string_view tokens;
  std::string_view chat_template;  ///< empty: the family's own
};

/// Source: config.json of the released checkpoints.
std::span<const SyntheticShape> synthetic_shapes();

}  // namespace kvlm
