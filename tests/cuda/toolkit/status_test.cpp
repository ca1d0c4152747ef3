// What the driver's errors become. Needs the CUDA toolkit, but no GPU.
#include "kernels/cuda/device/status.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <optional>

#include "kernels/base/error.h"

namespace kvlm::cuda {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::StartsWith;

std::optional<Error> error_of(cudaError_t status) {
  try {
    check(status, "the queue");
  } catch (const Error& error) {
    return error;
  }
  return std::nullopt;
}

TEST(Check, SuccessPasses) { EXPECT_FALSE(error_of(cudaSuccess)); }

TEST(Check, ALostDeviceIsOneSentence) {
  for (const cudaError_t status :
       {cudaErrorIllegalAddress, cudaErrorDevicesUnavailable, cudaErrorECCUncorrectable,
        cudaErrorLaunchFailure, cudaErrorHardwareStackError, cudaErrorUnknown}) {
    const auto error = error_of(status);
    ASSERT_TRUE(error);
    EXPECT_EQ(error->code(), ErrorCode::kDevice);
    const std::string message = error->what();
    EXPECT_THAT(message, AllOf(StartsWith("the queue: the GPU reports \""),
                               HasSubstr(cudaGetErrorString(status)), HasSubstr("start again")));
    EXPECT_EQ(std::count(message.begin(), message.end(), '\n'), 0);
  }
}

TEST(Check, TooLittleMemoryIsAnErrorOfItsOwn) {
  const auto error = error_of(cudaErrorMemoryAllocation);
  ASSERT_TRUE(error);
  EXPECT_EQ(error->code(), ErrorCode::kOutOfMemory);
  EXPECT_THAT(error->what(), AllOf(StartsWith("the queue: the GPU has "), HasSubstr("; ")));
}

}  // namespace
}  // namespace kvlm::cuda
