#include "kernels/cuda/pack/cufft.h"

#include <fmt/format.h>

#include "kernels/base/error.h"
#include "kernels/cuda/device/toolkit_library.h"

namespace kvlm::cuda {

namespace {

/// Loads the major version that we were compiled for: its function types are stable.
Cufft load() {
  const ToolkitLibrary library(fmt::format("libcufft.so.{}", CUFFT_VER_MAJOR),
                               fmt::format("cuFFT {}.{}", CUFFT_VER_MAJOR, CUFFT_VER_MINOR),
                               "fft=cufft", "fft=on");
  Cufft fft{};
  library.find(fft.create, "cufftCreate");
  library.find(fft.destroy, "cufftDestroy");
  library.find(fft.set_auto_allocation, "cufftSetAutoAllocation");
  library.find(fft.make_plan_many, "cufftMakePlanMany");
  library.find(fft.set_work_area, "cufftSetWorkArea");
  library.find(fft.set_stream, "cufftSetStream");
  library.find(fft.exec_r2c, "cufftExecR2C");
  library.find(fft.exec_c2r, "cufftExecC2R");
  return fft;
}

}  // namespace

const Cufft& cufft() {
  static const Cufft fft = load();  // retried if it throws
  return fft;
}

void check_fft(cufftResult answer, const char* what) {
  if (answer == CUFFT_SUCCESS) return;
  const bool full = answer == CUFFT_ALLOC_FAILED;
  throw Error(full ? ErrorCode::kOutOfMemory : ErrorCode::kDevice,
              fmt::format("{}: cuFFT failed with error {}, {}; {}, or use fft=on", what,
                          static_cast<int>(answer), full ? "no memory" : "execution failed",
                          full ? "use a smaller batch or model" : "see the driver's log"));
}

}  // namespace kvlm::cuda
