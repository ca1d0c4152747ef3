// A build with CUDA on a machine without cuFFT's header.
#include "kernels/cuda/pack/fourier_basis.h"

#include "kernels/base/error.h"

namespace kvlm::cuda {

void prepare_cufft(int, int) {
  throw Error(ErrorCode::kUnsupported,
              "fft=cufft needs cuFFT, but this build has none; install its header (cufft.h, in the "
              "CUDA toolkit) and build again, or use fft=on");
}

void change_by_cufft(const BasisLaunch&, Stream&) { prepare_cufft(0, 0); }

}  // namespace kvlm::cuda
