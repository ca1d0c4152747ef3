#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string_view>

#include "kernels/base/tensor.h"
#include "vision/patches.h"

namespace kvlm {

/// Called with a name ("vision.layer.3") and an activation; see llm/decoder.h. Empty in production.
using VisionTap = std::function<void(std::string_view, ConstTensorView)>;

/// What the workspaces of a tower may take on a device. Pictures for which that is not enough are
/// encoded in pieces, down to one tile (or one picture, where pictures are not tiled), which always
/// has room. On the CPU a piece is one tile: more gain nothing there, and the bits of a long
/// product depend on how many rows it has (kernels/gemm.h).
constexpr size_t tower_workspace_bytes(Device device) noexcept {
  return device.kind == DeviceKind::kCpu ? 0 : size_t{256} << 20;
}

/// A vision tower: patches to features. Owns its weights and workspaces. One thread at a time.
class VisionEncoder {
 public:
  virtual ~VisionEncoder() = default;

  /// Feature rows of a tile or picture, and their width.
  virtual int64_t tokens(const PatchGrid& grid) const noexcept = 0;
  virtual int width() const noexcept = 0;
  virtual size_t weight_bytes() const noexcept = 0;

  /// Features of all pictures, one after the other and tile by tile: (rows, width) f32 on the
  /// stream's device. On the CPU, and in half precision, what a picture becomes does not depend on
  /// the others, bit for bit. Tells stream.watch() of every layer, as phase "vision". Throws
  /// Error{kInvalidArgument} for patches that the tower does not take, Error{kCancelled} if the
  /// watch wants no more. `space`, what an earlier call returned and nothing reads any more,
  /// becomes the features if it has their shape: a GPU waits where its memory is given back.
  virtual Tensor encode(std::span<const VisualPatches* const> pictures, Stream& stream,
                        const VisionTap& tap, Tensor space) = 0;
  Tensor encode(std::span<const VisualPatches* const> pictures, Stream& stream,
                const VisionTap& tap) {
    return encode(pictures, stream, tap, {});
  }
};

}  // namespace kvlm
