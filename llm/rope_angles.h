#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "kernels/base/tensor.h"
#include "llm/position.h"

namespace kvlm {

/// How a decoder turns positions into angles: pair i of a head is channels i and i + rotary_dim /
/// 2, and is rotated by position * theta^(-2 i / rotary_dim). Source: Su et al. 2021, "RoFormer";
/// transformers 5.23, modeling_rope_utils.py, for the scaled types.
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
  /// M-RoPE: how many frequencies turn by time, by height and by width; their sum is rotary_dim /
  /// 2, or 0 where positions have one axis. In this order (Qwen2-VL), or, interleaved (Qwen3-VL),
  /// frequencies 1, 4, ... below 3 * sections[1] by height, 2, 5, ... below 3 * sections[2] by
  /// width, all others by time.
  std::array<int, 3> sections = {0, 0, 0};
  bool interleaved = false;

  int axes() const noexcept { return sections == std::array{0, 0, 0} ? 1 : 3; }
};

/// Inverse frequencies for a sequence of this length, (rotary_dim / 2,).
std::vector<float> rope_frequencies(const RopeConfig& config, int64_t sequence_length);

/// The angles of RoPE, as cos and sin per row.
class RopeAngles {
 public:
  explicit RopeAngles(const RopeConfig& config);

  /// Fills cos and sin (rows, rotary_dim / 2) f32 for the rows' positions. sequence_length is the
  /// largest position of the sequence plus one: the dynamic type scales theta by it, all others
  /// take rows of several sequences at once. Allocates nothing.
  void fill(std::span<const Position> positions, int64_t sequence_length, TensorView cos,
            TensorView sin) const;

  /// Where fill() looks these positions up in cos_table() and sin_table(), whatever the length of
  /// their sequences: fills `rows` (as many as positions). False if it computes one of them, or if
  /// one stands elsewhere on another axis.
  bool find(std::span<const Position> positions, std::span<int32_t> rows) const noexcept;
  /// (entries, rotary_dim / 2) f32.
  ConstTensorView cos_table() const noexcept { return cos_table_; }
  ConstTensorView sin_table() const noexcept { return sin_table_; }

 private:
  struct Rotation {
    float cos;
    float sin;
  };
  static constexpr int32_t kTabledPositions = 4096;

  Rotation rotation(int32_t position, float inverse) const;
  bool is_tabled(const Position& position) const noexcept;

  RopeConfig config_;
  std::vector<float> base_;                      // inverse frequencies up to max_positions
  std::vector<const int32_t Position::*> axes_;  // what each frequency turns by
  float magnitude_ = 1;                          // multiplies cos and sin (yarn)
  int32_t tabled_ = 0;                           // positions of the tables
  Tensor cos_table_, sin_table_;                 // (tabled_, rotary_dim / 2) of base_
};

}  // namespace kvlm
