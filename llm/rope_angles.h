#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kernels/base/tensor.h"

namespace kvlm {

/// How a decoder turns positions into angles (models.md 3.5, 3.6).
struct RopeConfig {
  enum class Type : uint8_t { kDefault, kLinear, kDynamic, kLlama3, kYarn };
  Type type = Type::kDefault;
  double theta = 1e4;
  int rotary_dim = 128;            ///< channels that rotate, even
  int max_positions = 4096;        ///< max_position_embeddings
  double factor = 1;               ///< linear, dynamic, llama3, yarn
  double low_freq_factor = 1;      ///< llama3
  double high_freq_factor = 4;     ///< llama3
  int original_max_positions = 0;  ///< llama3, yarn
  double beta_fast = 32;           ///< yarn
  double beta_slow = 1;            ///< yarn
  bool truncate = true;            ///< yarn: the ramp starts and ends at whole channels
  double attention_factor = 0;     ///< yarn; 0 means 0.1 ln(factor) + 1
};

/// The angles of RoPE, as cos and sin per row.
class RopeAngles {
 public:
  explicit RopeAngles(const RopeConfig& config);

  /// Fills cos and sin (rows, rotary_dim / 2) f32 for the rows' positions. sequence_length is the
  /// largest position of the sequence plus one: the dynamic type scales theta by it. Allocates
  /// nothing.
  void fill(std::span<const int32_t> positions, int64_t sequence_length, TensorView cos,
            TensorView sin) const;

  /// Inverse frequencies for a sequence of this length, (rotary_dim / 2,).
  std::vector<float> inverse_frequencies(int64_t sequence_length) const;

 private:
  float inverse_frequency(int index, int64_t sequence_length) const;

  RopeConfig config_;
  std::vector<float> base_;  // inverse frequencies up to max_positions
  float magnitude_ = 1;      // multiplies cos and sin (yarn)
};

}  // namespace kvlm
