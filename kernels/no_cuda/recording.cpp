#include "kernels/base/recording.h"

#include "kernels/no_cuda/refuse.h"

namespace kvlm {

struct Recording::State {};

Recording::Recording() = default;
Recording::~Recording() = default;
Recording::Recording(Recording&&) noexcept = default;
Recording& Recording::operator=(Recording&&) noexcept = default;

bool Recording::make(Stream&, const std::function<void()>&) { cuda::refuse("Recording"); }
bool Recording::fits(Stream&) const noexcept { return false; }
void Recording::run(Stream&) { cuda::refuse("Recording"); }
void Recording::clear() noexcept {}

}  // namespace kvlm
