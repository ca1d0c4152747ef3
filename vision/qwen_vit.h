#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "kernels/activation.h"
#include "kernels/weight_map.h"
#include "vision/encoder.h"

namespace kvlm {

/// The shape of a Qwen vision tower with its mergers: any size of picture, patches in merge-block
/// order, angles of two axes, cells of merge x merge patches taken to the decoder's width.
struct QwenVitConfig {
  int hidden = 1280;
  int intermediate = 5120;
  int layers = 32;
  int heads = 16;
  int patch_size = 14;
  int merge = 2;
  int depth = 2;   ///< frames a patch is deep
  int out = 3584;  ///< the decoder's width
  Activation activation = Activation::kQuickGelu;
  bool rms_norm = false;   ///< Qwen2.5-VL; else layer norms
  bool gated_mlp = false;  ///< Qwen2.5-VL
  bool patch_bias = false;
  int window = 0;                   ///< merged cells along a window's side; 0: no windows
  std::vector<int> full_attention;  ///< layers without windows
  int position_side = 0;            ///< side of a learned table of positions (Qwen3-VL); 0: none
  std::vector<int> deepstack;       ///< layers after which a merger of its own takes the features
  bool linear_names = false;        ///< linear_fc1 and norm (Qwen3-VL), not fc1, ln_q and mlp.N
};

/// What pictures become.
struct QwenFeatures {
  Tensor rows;  ///< (cells of all pictures, out) f32, a cell row-major after another
  std::vector<Tensor> deepstack;  ///< the same shape, for the first decoder layers
};

/// A Qwen tower from canonical names (those of transformers 5): `prefix` +
/// "patch_embed.proj.weight", "blocks.N...", "merger...". One thread at a time.
/// Source: Wang et al. 2024, "Qwen2-VL"; Bai et al. 2025, "Qwen2.5-VL" and "Qwen3-VL".
class QwenVit {
 public:
  /// `workspace_bytes`, see tower_workspace_bytes(). Throws Error{kCorruptFile} for sizes that do
  /// not go together.
  QwenVit(const QwenVitConfig& config, WeightMap& weights, const std::string& prefix,
          size_t workspace_bytes);
  ~QwenVit();

  size_t weight_bytes() const noexcept;
  /// Encodes pictures, together where workspace_bytes allows it; a picture sees only itself, a clip
  /// one slice at a time. Taps are those of every piece, layers in the order of windows. Throws
  /// Error{kInvalidArgument} for patches that the tower does not take, Error{kCancelled} if the
  /// stream's watch wants no more.
  QwenFeatures encode(std::span<const VisualPatches* const> pictures, Stream& stream,
                      const VisionTap& tap);

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace kvlm
