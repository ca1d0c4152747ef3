#include <algorithm>
#include <array>

#include "kernels/base/error.h"
#include "kernels/cuda/attend/image_block.cuh"
#include "kernels/cuda/attend/image_block.h"

// Instances of image_block.cuh by the bits of keys and of values, the choice among them, and the
// number of warps and thread blocks for each KV head.
namespace kvlm::cuda::packed {

namespace {

struct ImageKernel {
  int key_bits;
  int value_bits;
  void (*attend_short)(AttendArgs, FusedArgs, int, int);  // 4 warps
  void (*attend_long)(AttendArgs, FusedArgs, int, int);   // 8 warps
  int stage_bytes;                                        // of a warp
};

template <int kKeyBits, int kValueBits>
constexpr ImageKernel kernel_for() {
  return {kKeyBits, kValueBits, attend_image<kKeyBits, kValueBits, 4>,
          attend_image<kKeyBits, kValueBits, 8>,
          std::max(CodeBytes<kKeyBits>::kStageBytes, CodeBytes<kValueBits>::kStageBytes)};
}

/// By DeviceHead::fused, from kFirstImage on.
constexpr std::array kKernels{kernel_for<1, 1>(), kernel_for<1, 2>(), kernel_for<1, 4>(),
                              kernel_for<1, 8>(), kernel_for<2, 1>(), kernel_for<2, 2>(),
                              kernel_for<2, 4>(), kernel_for<4, 1>(), kernel_for<4, 2>(),
                              kernel_for<4, 4>(), kernel_for<8, 1>(), kernel_for<8, 8>()};
static_assert(kFirstImage + kKernels.size() <= 32);  // bits of HeadKernels::fused

/// Most chunks of a block of 4 warps.
constexpr int kShortChunks = 24;
constexpr int kLongWarps = 8;
constexpr int kChunkScores = kChunkSlots * kGroupQueries * static_cast<int>(sizeof(float));
/// Sums of products of bytes must fit 31 bits.
constexpr int kMostSlots = 16384;
/// Dynamic shared memory of a block if two of 8 warps share a multiprocessor of 227 KB, or if one
/// has it all.
constexpr int kHalfMemory = 100 << 10;
constexpr int kWholeMemory = 210 << 10;

/// Most dynamic shared memory of a block, besides ImageShared.
int most_memory(const ImageLimits& limits) {
  return limits.shared_bytes - static_cast<int>(sizeof(ImageShared<kLongWarps>));
}

/// Chunks whose scores fit in a block; 0 if its stages do not.
int most_chunks(int stage_bytes, const ImageLimits& limits) {
  const int stages = kLongWarps * stage_bytes;
  const int wanted = 2 * stages > kHalfMemory + (32 << 10) ? kWholeMemory : kHalfMemory;
  return std::max(0, std::min(wanted, most_memory(limits)) - stages) / kChunkScores;
}

/// Blocks that share a KV head: enough for its scores, and, if KV heads are few, to fill the GPU.
/// Throws Error{kUnsupported} if several are needed on a GPU without clusters.
int blocks_of_head(int chunks, int most, unsigned heads, Stream& stream) {
  int blocks = 1;
  while (blocks<kMostBlocks&& static_cast<int>(ceil_div(chunks, blocks))> most) blocks *= 2;
  if (!stream.queue().overlaps_kernels()) {  // no clusters
    if (blocks == 1) return blocks;
    throw Error(
        ErrorCode::kUnsupported,
        "attend_packed: this GPU has no thread block clusters, but the first GPU in use does; use "
        "GPUs of one kind in a program");
  }
  const auto multiprocessors = static_cast<unsigned>(stream.queue().multiprocessors());
  while (blocks < kMostBlocks && heads * static_cast<unsigned>(blocks) <= multiprocessors &&
         chunks >= 32 * blocks) {
    blocks *= 2;
  }
  return blocks;
}

void launch_kernel(int number, const AttendArgs& args, const FusedArgs& fused, int slots,
                   Stream& stream) {
  const auto heads = static_cast<unsigned>(fused.heads);
  const ImageKernel& kernel = kKernels[static_cast<size_t>(number - kFirstImage)];
  const int chunks = static_cast<int>(ceil_div(slots, kChunkSlots));
  const unsigned groups = static_cast<unsigned>(ceil_div(args.q_per_kv, kGroupQueries));
  const ImageLimits limits = image_limits();
  const int most = most_chunks(kernel.stage_bytes, limits);
  const int blocks = blocks_of_head(chunks, most, heads * groups, stream);
  const int held = static_cast<int>(ceil_div(chunks, blocks));
  const int warps = held <= kShortChunks ? 4 : kLongWarps;
  const auto attend = warps == 4 ? kernel.attend_short : kernel.attend_long;
  const int bytes = warps * kernel.stage_bytes + held * kChunkScores;
  allow_shared("DecodeTable::attend", attend,
               static_cast<size_t>(std::min(kWholeMemory, most_memory(limits))));
  const auto threads = static_cast<unsigned>(32 * warps);
  const dim3 grid(heads * static_cast<unsigned>(blocks), groups);
  const bool early = stream.queue().overlaps_kernels();
  std::array<cudaLaunchAttribute, 2> attributes = early_clusters(static_cast<unsigned>(blocks));
  cudaLaunchConfig_t config{grid,           threads,           static_cast<size_t>(bytes),
                            native(stream), attributes.data(), !early ? 0u : blocks > 1 ? 2u : 1u};
  check(cudaLaunchKernelEx(&config, attend, args, fused, number, blocks), "DecodeTable::attend");
}

int kernel_of(const PackedFormat& keys, const PackedFormat& values) {
  for (size_t i = 0; i < kKernels.size(); ++i) {
    if (keys.section[0].code == static_cast<CodeFormat>(kKernels[i].key_bits) &&
        values.section[0].code == static_cast<CodeFormat>(kKernels[i].value_bits)) {
      return kFirstImage + static_cast<int>(i);
    }
  }
  return 0;
}

/// One block whose tokens share their scales.
bool is_one_block(const SlotSegment& segment) {
  if (segment.format == nullptr || segment.q != nullptr || segment.selection != nullptr ||
      segment.blocks.size() != 1 || segment.slots == 0 || segment.slots > kMostSlots) {
    return false;
  }
  const PackedFormat& format = *segment.format;
  const PackedBlock& block = segment.blocks[0];
  const PackedSection& section = format.section[0];
  return format.axis != ScaleAxis::kToken && format.meta == DType::kF16 && format.sections == 1 &&
         format.channels() == kDim && section.split >= section.channels && block.live == nullptr &&
         block.rows == segment.slots && is_aligned(block.codes, 16);
}

}  // namespace

ImageLimits image_limits() {
  static const bool clusters =
      device_attribute(cudaDevAttrComputeCapabilityMajor, "DecodeTable::attend") >= 9 &&
      KVLM_EARLY_STARTS != 0;
  return {most_shared_bytes(), clusters};
}

int image_kernel(const PackedHead& head, int head_dim, const ImageLimits& limits) {
  if (head_dim != kDim || head.weights_wanted || head.keys.empty() || head.values.empty() ||
      !is_aligned(head.q, 16)) {
    return 0;
  }
  if (!is_one_block(head.keys[0]) || !is_one_block(head.values[0])) return 0;
  if (head.keys[0].slots != head.values[0].slots) return 0;
  if (head.remaps.size() > 1) return 0;
  for (const ScoreRemap& remap : head.remaps) {
    if (remap.first != 0 || remap.slots != head.keys[0].slots) return 0;
  }
  const int number = kernel_of(*head.keys[0].format, *head.values[0].format);
  if (number == 0) return 0;
  const int stage_bytes = kKernels[static_cast<size_t>(number - kFirstImage)].stage_bytes;
  const int64_t held = most_chunks(stage_bytes, limits);
  const int64_t chunks = ceil_div(head.keys[0].slots, kChunkSlots);
  return chunks <= held * (limits.clusters ? kMostBlocks : 1) ? number : 0;
}

bool has_rows_behind(const PackedHead& head) {
  const auto is_plain = [](const SlotSegment& segment) {
    return segment.format == nullptr && segment.dtype == DType::kF16 &&
           segment.selection == nullptr && is_aligned(segment.rows, 16);
  };
  if (head.keys.size() != head.values.size()) return false;
  for (size_t i = 1; i < head.keys.size(); ++i) {
    if (head.keys[i].slots != head.values[i].slots) return false;
    if (!is_plain(head.keys[i]) || !is_plain(head.values[i])) return false;
  }
  return true;
}

void attend_images(uint32_t kernels, const AttendArgs& args, const FusedArgs& fused, int slots,
                   Stream& stream) {
  for (size_t i = 0; i < kKernels.size(); ++i) {
    const int number = kFirstImage + static_cast<int>(i);
    if ((kernels >> number & 1) == 0) continue;
    launch_kernel(number, args, fused, slots, stream);
  }
}

}  // namespace kvlm::cuda::packed
