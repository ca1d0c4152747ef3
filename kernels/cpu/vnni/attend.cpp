#include "kernels/cpu/vnni/attend.h"

#include <hwy/base.h>

#include "kernels/cpu/vnni/layout.h"

// Support queries and stubs for other architectures. keys.cpp scores keys with a query that
// query.cpp multiplied by their scales and split into bytes; values.cpp adds values with weights
// that weights.cpp split into bytes.
namespace kvlm::cpu::vnni {

#if HWY_ARCH_X86_64

bool available() noexcept {
  static const bool kAll =
      __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512vnni") &&
      __builtin_cpu_supports("gfni") && __builtin_cpu_supports("bmi2");
  return kAll;
}

bool scores(const PackedFormat& format) noexcept {
  if (pad(format).width > kMaxKeyWidth) return false;
  return format.axis != ScaleAxis::kToken || format.group_size % 4 == 0 ||
         format.group_size >= format.channels();
}

bool adds(const PackedFormat& format) noexcept {
  return format.axis != ScaleAxis::kToken || format.group_size % 16 == 0 ||
         format.group_size >= format.channels();
}

size_t scratch_bytes(const PackedFormat& format, size_t queries) noexcept {
  const size_t width = pad(format).width;
  const size_t groups = format.axis == ScaleAxis::kToken ? static_cast<size_t>(format.groups()) : 1;
  return width * (8 * sizeof(float) + 4 * kValueRows) + 64 * kValueRows +
         queries * (2 * width + kByteStride + 64 + kValueRows + 17 * groups) * sizeof(float) +
         groups * (2 + kMostQueries + 1) * kValueRows * sizeof(float) + size_t{40} * 64;
}

#else

bool available() noexcept { return false; }
bool scores(const PackedFormat&) noexcept { return false; }
bool adds(const PackedFormat&) noexcept { return false; }
size_t scratch_bytes(const PackedFormat&, size_t) noexcept { return 0; }
void score_blocks(const SlotSegment&, const float*, size_t, float, std::byte*, float*,
                  size_t) noexcept {}
void add_blocks(const SlotSegment&, SlotWalk, const SlotWeights&, std::byte*, float*) noexcept {}

#endif

}  // namespace kvlm::cpu::vnni
