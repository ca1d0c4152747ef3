#include "kernels/pack.h"

#include <fmt/format.h>

#include "kernels/base/error.h"
#include "kernels/cpu/pack.h"
#include "kernels/cuda/pack.h"

namespace kvlm {

void pack(const PackedFormat& format, const std::array<PackRule, 2>& rules,
          std::span<const PackJob> jobs, Stream& stream) {
  const auto refuse = [](const std::string& why) {
    throw Error(ErrorCode::kInvalidArgument, "pack: " + why);
  };
  if (format.sections < 1 || format.sections > 2 ||
      (format.sections == 2 && format.axis != ScaleAxis::kChannel)) {
    refuse("a format has one section, or two with a scale per channel");
  }
  if (format.meta != DType::kF16 && format.meta != DType::kF32) {
    refuse(fmt::format("scales are f16 or f32, not {}", dtype_name(format.meta)));
  }
  if (format.axis == ScaleAxis::kToken && format.group_size < 1) {
    refuse("scales per token need a group size of at least 1");
  }
  for (int i = 0; i < format.sections; ++i) {
    const PackedSection& section = format.section[static_cast<size_t>(i)];
    const PackRule& rule = rules[static_cast<size_t>(i)];
    const bool trits = section.code == CodeFormat::kTrit5 || section.code == CodeFormat::kTrit2b;
    if (section.channels < 1) refuse("a section without channels");
    if ((rule.rule == CodeRule::kTernary) != trits) {
      refuse("ternary codes and the ternary rule go together");
    }
    if ((rule.rule == CodeRule::kAffine) != section.zero_stored) {
      refuse("zero points are stored for affine codes, and only for them");
    }
    if (rule.rule == CodeRule::kSign && section.code != CodeFormat::kBits1) {
      refuse("signs take one bit");
    }
    if (rule.rule != CodeRule::kAffine && format.axis != ScaleAxis::kChannel) {
      refuse("signs and ternary codes have a scale per channel");
    }
  }
  for (const PackJob& job : jobs) {
    if (job.rows < 1 || job.x == nullptr || job.scales == nullptr ||
        (job.zeros == nullptr && format.zeros(1) > 0)) {
      refuse(fmt::format("a job of {} rows lacks its rows or a place to go", job.rows));
    }
  }
  if (stream.device().kind == DeviceKind::kCuda) return cuda::pack(format, rules, jobs, stream);
  cpu::pack(format, rules, jobs, stream);
}

}  // namespace kvlm
