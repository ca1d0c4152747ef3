#include "kernels/cpu/stream_copy.h"

#include <hwy/cache_control.h>

#include <cstdint>
#include <cstring>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/stream_copy.cpp"
#include "hwy/foreach_target.h"
// After foreach_target.h:
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace kvlm::cpu::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

/// Whole vectors; returns how many bytes they were.
size_t stream_vectors(uint8_t* to, const uint8_t* from, size_t bytes) {
  const hn::ScalableTag<uint8_t> d;
  size_t i = 0;
  for (; i + hn::Lanes(d) <= bytes; i += hn::Lanes(d))
    hn::Stream(hn::LoadU(d, from + i), d, to + i);
  return i;
}

}  // namespace kvlm::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kvlm::cpu {

HWY_EXPORT(stream_vectors);

void stream_copy(std::byte* to, const std::byte* from, size_t bytes) {
  if (bytes == 0) return;
  const size_t done = HWY_DYNAMIC_DISPATCH(stream_vectors)(
      reinterpret_cast<uint8_t*>(to), reinterpret_cast<const uint8_t*>(from), bytes);
  std::memcpy(to + done, from + done, bytes - done);
  hwy::FlushStream();  // before another thread says that they are there
}

}  // namespace kvlm::cpu
#endif
