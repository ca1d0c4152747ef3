#pragma once

#include <cuda_runtime_api.h>

#include <string_view>

#include "kernels/base/device.h"
#include "kernels/base/queue.h"

// What the host side of every CUDA file needs.
namespace kvlm::cuda {

/// Throws Error{kOutOfMemory} or Error{kDevice} naming `what` unless `status` is success.
void check(cudaError_t status, std::string_view what);

/// The launch that was just made has been accepted.
inline void check_launch(std::string_view op) { check(cudaGetLastError(), op); }

/// An attribute of the current GPU. Throws Error naming `op` if the driver does not say.
inline int device_attribute(cudaDeviceAttr attribute, std::string_view op) {
  int device = 0;
  int value = 0;
  check(cudaGetDevice(&device), op);
  check(cudaDeviceGetAttribute(&value, attribute, device), op);
  return value;
}

inline cudaStream_t native(Stream& stream) { return static_cast<cudaStream_t>(stream.native()); }

/// Scratch slots of a Queue, so that no two operations that overlap in time share one.
enum ScratchSlot : int {
  kGemmWorkspace,
  kGemmOperand,
  kGemmResult,
  kTailProduct,  // what a product is before its tail; apart from what makes the product
  kGemmBias,
  kWidenedWeights,
  kPaddedInputs,
  kSplitStates,
  kPackParts,
  kPromptRows,
  kColumnParts,
  kColumnRows,
  kChannelEnds,
  kFourierReals,
  kFourierSpectrum,
  kFourierWork,
  kMergeGroups,
  kRowScores,
  kSampleParts,
  kImageBytes,
  kScratchSlots
};

}  // namespace kvlm::cuda
