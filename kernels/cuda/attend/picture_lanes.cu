#include <algorithm>
#include <array>

#include "kernels/base/error.h"
#include "kernels/cuda/attend/image_block.cuh"
#include "kernels/cuda/attend/picture_lanes.h"

// Which instance of image_block.cuh attends, with how many warps and blocks for each KV head.
namespace kvlm::cuda::packed {

namespace {

struct PictureKernel {
  int key_bits;
  int value_bits;
  void (*attend_short)(AttendArgs, FusedArgs, int, int);  // with 4 warps a block
  void (*attend_long)(AttendArgs, FusedArgs, int, int);   // with 8
  int stage_bytes;                                        // of a warp
};

template <int kKeyBits, int kValueBits>
constexpr PictureKernel kernel_for() {
  return {kKeyBits, kValueBits, attend_picture<kKeyBits, kValueBits, 4>,
          attend_picture<kKeyBits, kValueBits, 8>,
          std::max(CodeBytes<kKeyBits>::kStageBytes, CodeBytes<kValueBits>::kStageBytes)};
}

/// By DeviceLane::fused, from kFirstPicture on.
constexpr std::array kKernels{kernel_for<1, 1>(), kernel_for<1, 2>(), kernel_for<1, 4>(),
                              kernel_for<1, 8>(), kernel_for<2, 1>(), kernel_for<2, 2>(),
                              kernel_for<2, 4>(), kernel_for<4, 1>(), kernel_for<4, 2>(),
                              kernel_for<4, 4>(), kernel_for<8, 1>(), kernel_for<8, 8>()};
static_assert(kFirstPicture + kKernels.size() <= 32);  // bits of LayerLaunch::fused

/// Chunks of a block up to which it has 4 warps.
constexpr int kShortChunks = 24;
constexpr int kLongWarps = 8;
constexpr int kChunkScores = kChunkSlots * kGroupQueries * static_cast<int>(sizeof(float));
/// Sums of products of bytes have 31 bits.
constexpr int kMostSlots = 16384;
/// Memory that a block asks for beside PictureShared, where two of 8 warps share a multiprocessor
/// of 227 KB, or only one.
constexpr int kHalfMemory = 100 << 10;
constexpr int kWholeMemory = 210 << 10;

/// What a block may ask for beside PictureShared.
int most_memory(const PictureLimits& limits) {
  return limits.shared_bytes - static_cast<int>(sizeof(PictureShared<kLongWarps>));
}

/// Chunks whose scores a block can hold, 0 if it has no room for its stages.
int most_chunks(int stage_bytes, const PictureLimits& limits) {
  const int stages = kLongWarps * stage_bytes;
  const int wanted = 2 * stages > kHalfMemory + (32 << 10) ? kWholeMemory : kHalfMemory;
  return std::max(0, std::min(wanted, most_memory(limits)) - stages) / kChunkScores;
}

/// How many blocks share a lane: enough to hold its scores, and to give work to a GPU that has few
/// lanes. Throws Error{kUnsupported} where blocks cannot share one and have to.
int blocks_of_lane(int chunks, int most, unsigned lanes, Stream& stream) {
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
  while (blocks < kMostBlocks && lanes * static_cast<unsigned>(blocks) <= multiprocessors &&
         chunks >= 32 * blocks) {
    blocks *= 2;
  }
  return blocks;
}

/// Of launches that start while the one before ends, in clusters of `blocks`.
std::array<cudaLaunchAttribute, 2> early_clusters(unsigned blocks) {
  std::array<cudaLaunchAttribute, 2> attributes{};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim = {blocks, 1, 1};
  return attributes;
}

void launch_kernel(int number, const AttendArgs& args, const FusedArgs& fused, int slots,
                   Stream& stream) {
  const auto lanes = static_cast<unsigned>(fused.lanes);
  const PictureKernel& kernel = kKernels[static_cast<size_t>(number - kFirstPicture)];
  const int chunks = static_cast<int>(ceil_div(slots, kChunkSlots));
  const unsigned groups = static_cast<unsigned>(ceil_div(args.q_per_kv, kGroupQueries));
  const PictureLimits limits = picture_limits();
  const int most = most_chunks(kernel.stage_bytes, limits);
  const int blocks = blocks_of_lane(chunks, most, lanes * groups, stream);
  const int held = static_cast<int>(ceil_div(chunks, blocks));
  const int warps = held <= kShortChunks ? 4 : kLongWarps;
  const auto attend = warps == 4 ? kernel.attend_short : kernel.attend_long;
  const int bytes = warps * kernel.stage_bytes + held * kChunkScores;
  allow_shared("DecodeTable::attend", attend,
               static_cast<size_t>(std::min(kWholeMemory, most_memory(limits))));
  const auto threads = static_cast<unsigned>(32 * warps);
  const dim3 grid(lanes * static_cast<unsigned>(blocks), groups);
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
      return kFirstPicture + static_cast<int>(i);
    }
  }
  return 0;
}

/// One block of rows that share their scales.
bool is_one_block(const SlotRun& run) {
  if (run.format == nullptr || run.q != nullptr || run.selection != nullptr ||
      run.blocks.size() != 1 || run.slots == 0 || run.slots > kMostSlots) {
    return false;
  }
  const PackedFormat& format = *run.format;
  const PackedBlock& block = run.blocks[0];
  const PackedSection& section = format.section[0];
  return format.axis != ScaleAxis::kToken && format.meta == DType::kF16 && format.sections == 1 &&
         format.channels() == kDim && section.split >= section.channels && block.live == nullptr &&
         block.rows == run.slots && is_aligned(block.codes, 16);
}

}  // namespace

PictureLimits picture_limits() {
  static const bool clusters =
      device_attribute(cudaDevAttrComputeCapabilityMajor, "DecodeTable::attend") >= 9 &&
      KVLM_EARLY_STARTS != 0;
  return {most_shared_bytes(), clusters};
}

int picture_kernel(const PackedLane& lane, int head_dim, const PictureLimits& limits) {
  if (head_dim != kDim || lane.weights_wanted || lane.keys.empty() || lane.values.empty() ||
      !is_aligned(lane.q, 16)) {
    return 0;
  }
  if (!is_one_block(lane.keys[0]) || !is_one_block(lane.values[0])) return 0;
  if (lane.keys[0].slots != lane.values[0].slots) return 0;
  if (lane.remaps.size() > 1) return 0;
  for (const ScoreRemap& remap : lane.remaps) {
    if (remap.first != 0 || remap.slots != lane.keys[0].slots) return 0;
  }
  const int number = kernel_of(*lane.keys[0].format, *lane.values[0].format);
  if (number == 0) return 0;
  const int stage_bytes = kKernels[static_cast<size_t>(number - kFirstPicture)].stage_bytes;
  const int64_t held = most_chunks(stage_bytes, limits);
  const int64_t chunks = ceil_div(lane.keys[0].slots, kChunkSlots);
  return chunks <= held * (limits.clusters ? kMostBlocks : 1) ? number : 0;
}

bool has_rows_behind(const PackedLane& lane) {
  const auto is_plain = [](const SlotRun& run) {
    return run.format == nullptr && run.dtype == DType::kF16 && run.selection == nullptr &&
           is_aligned(run.rows, 16);
  };
  if (lane.keys.size() != lane.values.size()) return false;
  for (size_t i = 1; i < lane.keys.size(); ++i) {
    if (lane.keys[i].slots != lane.values[i].slots) return false;
    if (!is_plain(lane.keys[i]) || !is_plain(lane.values[i])) return false;
  }
  return true;
}

void attend_pictures(uint32_t kernels, const AttendArgs& args, const FusedArgs& fused, int slots,
                     Stream& stream) {
  for (size_t i = 0; i < kKernels.size(); ++i) {
    const int number = kFirstPicture + static_cast<int>(i);
    if ((kernels >> number & 1) == 0) continue;
    launch_kernel(number, args, fused, slots, stream);
  }
}

}  // namespace kvlm::cuda::packed
