// The library of spectra is opened by name. Needs the CUDA toolkit, but no GPU.
#include "kernels/cuda/pack/cufft.h"

#include <gmock/gmock.h>

#include "kernels/base/error.h"
#include "kernels/cuda/device/toolkit_library.h"

namespace kvlm::cuda {
namespace {

using ::testing::HasSubstr;

TEST(CufftLibrary, IsOpenedOnceAndItsFunctionsAnswer) {
  const Cufft& fft = cufft();
  EXPECT_EQ(&fft, &cufft());
  EXPECT_EQ(fft.set_auto_allocation(-1, 0), CUFFT_INVALID_PLAN);
}

TEST(CufftLibrary, SaysWhatItAnswered) {
  EXPECT_NO_THROW(check_fft(CUFFT_SUCCESS, "cufftCreate"));
  try {
    check_fft(CUFFT_INVALID_SIZE, "cufftMakePlanMany");
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kDevice);
    EXPECT_THAT(error.what(), HasSubstr("cufftMakePlanMany: cuFFT failed with error 8"));
  }
}

TEST(ToolkitLibrary, SaysWhatIsMissing) {
  const auto why = [](const auto& call) -> std::string {
    try {
      call();
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kUnsupported);
      return error.what();
    }
    return "";
  };
  EXPECT_EQ(
      why([] { ToolkitLibrary("libnone.so.1", "cuNone 1.0", "none=on", "none=off"); }),
      "none=on needs libnone.so.1, which is not installed; install cuNone 1.0, name its folder "
      "in LD_LIBRARY_PATH, or use none=off");
  const ToolkitLibrary libc("libc.so.6", "libc 6", "all", "nothing");
  void (*function)() = nullptr;
  EXPECT_THAT(why([&] { libc.find(function, "no_such_function"); }),
              HasSubstr("libc.so.6 has no no_such_function; install libc 6 or newer"));
}

}  // namespace
}  // namespace kvlm::cuda
