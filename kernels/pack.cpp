#include "kernels/pack.h"

#include <fmt/format.h>

#include <string_view>

#include "kernels/base/error.h"
#include "kernels/check.h"
#include "kernels/cpu/pack.h"
#include "kernels/cuda/pack/pack.h"

// Checks packing jobs against their format and hands them to the CPU's or the GPU's implementation.
namespace kvlm {

namespace {

[[noreturn]] void refuse(std::string_view op, std::string_view why) {
  check::refuse("{}: {}", op, why);
}

/// A section of a format with scales along `axis` is packed by a rule that makes such codes.
void check_rule(std::string_view op, const PackedSection& section, const PackRule& rule,
                ScaleAxis axis) {
  if (section.channels < 1) refuse(op, "a section without channels");
  const CodeRule own = rule_of(section.code);
  if (rule.rule != own && (rule.rule != CodeRule::kSign || section.code != CodeFormat::kBits1)) {
    refuse(op, "codes are made by their own rule; those of one bit may be signs");
  }
  if ((rule.rule == CodeRule::kAffine) != section.zero_stored) {
    refuse(op, "zero points are stored for affine codes, and only for them");
  }
  if (rule.rule == CodeRule::kSign && axis != ScaleAxis::kChannel) {
    refuse(op, "signs have a scale per channel");
  }
  const bool of_norm = rule.rule == CodeRule::kNormCodebook;
  if ((rule.rule == CodeRule::kCodebook || of_norm) && axis != ScaleAxis::kToken) {
    refuse(op, "codes of a codebook have a scale per token");
  }
  if (rule.merge != 0 && (rule.rule != CodeRule::kAffine || code_bits(section.code) > 2)) {
    refuse(op, "codes are merged if they are affine and have 1 or 2 bits");
  }
  if (rule.rule == CodeRule::kTernary && axis == ScaleAxis::kHead) {
    refuse(op, "ternary codes have a scale per channel or per token");
  }
}

void check_rules(std::string_view op, const PackedFormat& format,
                 const std::array<PackRule, 2>& rules) {
  if (format.sections < 1 || format.sections > 2 ||
      (format.sections == 2 && format.axis != ScaleAxis::kChannel)) {
    refuse(op, "a format has one section, or two with a scale per channel");
  }
  if (format.meta != DType::kF16 && format.meta != DType::kF32) {
    refuse(op, fmt::format("scales are f16 or f32, not {}", dtype_name(format.meta)));
  }
  if (format.axis == ScaleAxis::kToken && format.group_size < 1) {
    refuse(op, "scales per token need a group size of at least 1");
  }
  for (size_t i = 0; i < static_cast<size_t>(format.sections); ++i) {
    check_rule(op, format.section[i], rules[i], format.axis);
    if (rules[i].rule == CodeRule::kNormCodebook && format.groups() != 1) {
      refuse(op, "codes that are scaled by the norm of a row have one scale per row");
    }
  }
}

/// What the kernels of a GPU do not serve.
void check_served(const PackedFormat& format, const std::array<PackRule, 2>& rules) {
  constexpr int kWidest = 2048;
  if (format.axis == ScaleAxis::kToken && format.channels() > kWidest) {
    throw Error(ErrorCode::kUnsupported,
                fmt::format("pack: rows of {} channels with one scale each are not supported on "
                            "CUDA, which takes up to {}; use --device cpu",
                            format.channels(), kWidest));
  }
  const auto affine = [&](size_t i) { return rules[i].rule == CodeRule::kAffine; };
  const bool quantiles = (affine(0) && rules[0].alpha != 0) || (affine(1) && rules[1].alpha != 0);
  if (format.sections == 2 && quantiles && !(affine(0) && affine(1))) {
    throw Error(ErrorCode::kUnsupported,
                "pack: quantiles for some channels and signs or ternary codes for others are not "
                "supported on CUDA; use --device cpu");
  }
}

}  // namespace

void pack(const PackedFormat& format, const std::array<PackRule, 2>& rules,
          std::span<const PackJob> jobs, Stream& stream, DType dtype) {
  check_rules("pack", format, rules);
  if (!check::is_floating(dtype)) {
    refuse("pack", fmt::format("rows are f32, f16 or bf16, not {}", dtype_name(dtype)));
  }
  for (const PackJob& job : jobs) {
    if (job.rows < 1 || job.x == nullptr || job.scales == nullptr ||
        (job.zeros == nullptr && format.zeros(1) > 0)) {
      refuse("pack", fmt::format("a job of {} rows has no input or no destination", job.rows));
    }
    if (job.joins_last && (format.axis != ScaleAxis::kHead || &job == jobs.data())) {
      refuse("pack",
             "a job that shares a range follows another one, in a format with one scale per job");
    }
  }
  if (check::on_gpu(stream)) {
    check_served(format, rules);
    return cuda::pack(format, rules, jobs, dtype, stream);
  }
  cpu::pack(format, rules, jobs, dtype, stream);
}

}  // namespace kvlm
