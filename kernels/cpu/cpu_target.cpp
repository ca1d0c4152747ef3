#include "kernels/cpu_target.h"

#include <hwy/targets.h>

namespace kvlm {

std::string cpu_target() {
  const uint32_t targets = static_cast<uint32_t>(hwy::SupportedTargets() & HWY_TARGETS);
  return hwy::TargetName(targets & (~targets + 1u));  // the lowest bit is the best target
}

}  // namespace kvlm
