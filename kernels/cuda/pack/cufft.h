#pragma once

#include <cufft.h>

namespace kvlm::cuda {

/// The functions of cuFFT that are used, under their own names without "cufft".
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

/// The library, opened when it is first asked for (ToolkitLibrary). Throws Error{kUnsupported}
/// saying what was looked for.
const Cufft& cufft();

/// Throws Error{kOutOfMemory} or Error{kDevice} naming `what` and cuFFT's answer, unless it is
/// success.
void check_fft(cufftResult answer, const char* what);

}  // namespace kvlm::cuda
