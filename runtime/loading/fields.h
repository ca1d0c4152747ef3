#pragma once

#include <cstdint>
#include <string_view>

#include "kernels/activation.h"
#include "runtime/loading/config.h"

namespace kvlm {

// What a field of a configuration may hold at most: far beyond every model, and small enough that
// sizes made of two of them fit into 64 bits.
inline constexpr int64_t kMaxLayers = 1024;
inline constexpr int64_t kMaxWidth = 1 << 20;
inline constexpr int64_t kMaxVocab = 1 << 24;
inline constexpr int64_t kMaxPositions = 1 << 27;
inline constexpr int64_t kMaxEdge = 16384;

/// A number from 1 to `max`.
inline int field(const ConfigReader& reader, std::string_view key, int64_t fallback, int64_t max) {
  return static_cast<int>(reader.integer(key, fallback, 1, max));
}

/// "quick_gelu", "gelu", "gelu_pytorch_tanh" (also "gelu_new"), "silu" (also "swish").
Activation parse_activation(const ConfigReader& reader, std::string_view key,
                            std::string_view fallback);

/// Refuses a vision_config whose heads do not divide its width, whose patches are larger than its
/// images or whose images have other channels than red, green and blue.
void check_tower(const ConfigReader& vision, int hidden, int heads, int image_size, int patch_size);

}  // namespace kvlm
