#pragma once

#include <cufft.h>

namespace kvlm::cuda {

/// The cuFFT functions in use, by name without "cufft".
struct Cufft {
  decltype(&cufftCreate) create;
  decltype(&cufftDestroy) destroy;
  decltype(&cufftSetAutoAllocation) set_auto_allocation;
  decltype(&cufftMakePlanMany) make_plan_many;
  decltype(&cufftSetWorkArea) set_work_area;
  decltype(&cufftSetStream) set_stream;
  decltype(&cufftExecR2C) exec_r2c;
  decltype(&cufftExecC2R) exec_c2r;
};

/// The library, opened by the first call (ToolkitLibrary). Throws Error{kUnsupported} with the file
/// names tried.
const Cufft& cufft();

/// Unless `answer` is success, throws Error{kOutOfMemory} or Error{kDevice} naming it and `what`.
void check_fft(cufftResult answer, const char* what);

}  // namespace kvlm::cuda
