#pragma once

#include <cstddef>
#include <functional>
#include <string_view>

#include "kernels/base/tensor.h"

namespace kvlm {

/// Called with a name ("vision.layer.3") and an activation; see llm/decoder.h. Empty in production.
using VisionTap = std::function<void(std::string_view, ConstTensorView)>;

/// A vision tower: one picture (or tile) to patch features. Owns its weights and workspaces. One
/// thread at a time.
class VisionEncoder {
 public:
  virtual ~VisionEncoder() = default;

  /// Feature rows of one picture, and their width.
  virtual int tokens() const noexcept = 0;
  virtual int width() const noexcept = 0;
  virtual size_t weight_bytes() const noexcept = 0;

  /// (3, height, width) f32 pixel values to (tokens, width) f32 features, valid until the next
  /// call. Tells stream.watch() of every layer, as phase "vision". Throws Error{kInvalidArgument}
  /// if the picture has another size than the tower's, Error{kCancelled} if the watch wants no
  /// more.
  virtual ConstTensorView encode(ConstTensorView pixels, Stream& stream, const VisionTap& tap) = 0;
};

}  // namespace kvlm
