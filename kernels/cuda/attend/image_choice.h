#pragma once

#include "kernels/attend_packed.h"

// Which kernel of image_block.cu reads a KV head's image, if any.
namespace kvlm::cuda::packed {

/// Image kernels are numbered from kFirstImage on, in DeviceHead::fused and HeadKernels::fused.
constexpr int kFirstImage = 20;
constexpr uint32_t kImageKernels = ~uint32_t{0} << kFirstImage;
VLM_HD constexpr bool is_image(int fused) { return fused >= kFirstImage; }

/// DeviceSegment::kernel of segments that image kernel `number` reads.
VLM_HD constexpr int image_segment(int number) { return 32 + number; }
VLM_HD constexpr bool is_image_segment(int kernel) { return kernel >= 32; }

/// Limits of a GPU for image kernels.
struct ImageLimits {
  int shared_bytes;  ///< most of a block
  bool clusters;     ///< several blocks may share a KV head
};
/// Of the GPU that is current at the first call.
ImageLimits image_limits();

/// The image kernel that reads the first segments of a KV head, else 0. Needs: keys and values of
/// one block each, with as many tokens; scores that fit; no attention weights wanted.
int image_kernel(const PackedHead& head, int head_dim, const ImageLimits& limits);
/// Whether all other segments are f16 tokens, so that the image kernel writes the output
/// (DeviceHead::fused).
bool has_rows_behind(const PackedHead& head);

}  // namespace kvlm::cuda::packed
