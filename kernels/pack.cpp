#include "kernels/pack.h"

#include <fmt/format.h>

#include <string_view>
#include <vector>

#include "kernels/base/error.h"
#include "kernels/cpu/pack.h"
#include "kernels/cuda/pack.h"
#include "kernels/row_moves.h"

// Checks packing jobs against their format and hands them to the CPU's or the GPU's implementation.
// RingPacker packs one row of many rings a step.
namespace kvlm {

namespace {

[[noreturn]] void refuse(std::string_view op, std::string_view why) {
  throw Error(ErrorCode::kInvalidArgument, fmt::format("{}: {}", op, why));
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
  for (int i = 0; i < format.sections; ++i) {
    const PackedSection& section = format.section[static_cast<size_t>(i)];
    const PackRule& rule = rules[static_cast<size_t>(i)];
    const bool trits = section.code == CodeFormat::kTrit5 || section.code == CodeFormat::kTrit2b;
    if (section.channels < 1) refuse(op, "a section without channels");
    if ((rule.rule == CodeRule::kTernary) != trits) {
      refuse(op, "ternary codes and the ternary rule go together");
    }
    if ((rule.rule == CodeRule::kAffine) != section.zero_stored) {
      refuse(op, "zero points are stored for affine codes, and only for them");
    }
    if (rule.rule == CodeRule::kSign && section.code != CodeFormat::kBits1) {
      refuse(op, "signs take one bit");
    }
    if (rule.rule != CodeRule::kAffine && format.axis != ScaleAxis::kChannel) {
      refuse(op, "signs and ternary codes have a scale per channel");
    }
  }
}

/// What the kernels of a GPU do not serve.
void check_served(const PackedFormat& format, const std::array<PackRule, 2>& rules) {
  constexpr int kWidest = 2048;
  if (format.axis == ScaleAxis::kToken && format.channels() > kWidest) {
    throw Error(ErrorCode::kUnsupported,
                fmt::format("pack: rows of {} channels with scales of their own are not served on "
                            "CUDA, which takes up to {}; use --device cpu",
                            format.channels(), kWidest));
  }
  const auto affine = [&](size_t i) { return rules[i].rule == CodeRule::kAffine; };
  const bool quantiles = (affine(0) && rules[0].alpha != 0) || (affine(1) && rules[1].alpha != 0);
  if (format.sections == 2 && quantiles && !(affine(0) && affine(1))) {
    throw Error(ErrorCode::kUnsupported,
                "pack: quantiles of some channels beside signs or ternary codes of others are not "
                "served on CUDA; use --device cpu");
  }
}

}  // namespace

void pack(const PackedFormat& format, const std::array<PackRule, 2>& rules,
          std::span<const PackJob> jobs, Stream& stream) {
  check_rules("pack", format, rules);
  for (const PackJob& job : jobs) {
    if (job.rows < 1 || job.x == nullptr || job.scales == nullptr ||
        (job.zeros == nullptr && format.zeros(1) > 0)) {
      refuse("pack", fmt::format("a job of {} rows lacks its rows or a place to go", job.rows));
    }
  }
  if (stream.device().kind == DeviceKind::kCuda) {
    check_served(format, rules);
    return cuda::pack(format, rules, jobs, stream);
  }
  cpu::pack(format, rules, jobs, stream);
}

struct RingPacker::State {
  explicit State(Device at) {
    if (at.kind == DeviceKind::kCuda) table = std::make_unique<cuda::RingTable>(at);
  }
  std::unique_ptr<cuda::RingTable> table;  // on CUDA; else what follows
  PackedFormat format;
  std::array<PackRule, 2> rules;
  DType dtype = DType::kF16;
  std::vector<PackedRing> rings;
  std::vector<const std::byte*> oldest;
  std::vector<float> floats;
  std::vector<PackJob> jobs;

  void run(Stream& stream);
};

void RingPacker::State::run(Stream& stream) {
  const auto channels = static_cast<size_t>(format.channels());
  floats.resize(rings.size() * channels);
  oldest.clear();
  jobs.clear();
  for (PackedRing& ring : rings) {
    oldest.push_back(ring.rows + static_cast<size_t>(ring.oldest) * channels * dtype_bytes(dtype));
    const std::ptrdiff_t block = ring.packed / ring.block_rows;
    const auto row = static_cast<size_t>(ring.packed % ring.block_rows);
    const size_t meta = row * static_cast<size_t>(format.groups()) * dtype_bytes(format.meta);
    const auto scales = block * ring.scale_stride + static_cast<std::ptrdiff_t>(meta);
    PackJob job;
    job.x = floats.data() + jobs.size() * channels;
    job.rows = 1;
    if (ring.codes != nullptr) {
      job.codes = ring.codes + block * ring.code_stride + row * format.row_bytes();
    }
    job.scales = ring.scales + scales;
    if (ring.zeros != nullptr) job.zeros = ring.zeros + scales;
    jobs.push_back(job);
    ring.oldest = (ring.oldest + 1) % ring.places;
    ++ring.packed;
  }
  widen_rows(oldest, dtype, format.channels(), floats.data(), stream);
  pack(format, rules, jobs, stream);
}

RingPacker::RingPacker(Device device) : state_(std::make_unique<State>(device)) {}
RingPacker::~RingPacker() = default;
RingPacker::RingPacker(RingPacker&&) noexcept = default;
RingPacker& RingPacker::operator=(RingPacker&&) noexcept = default;

void RingPacker::describe(const PackedFormat& format, const std::array<PackRule, 2>& rules,
                          DType dtype, std::span<const PackedRing> rings, Stream& stream) {
  constexpr std::string_view kOp = "RingPacker";
  check_rules(kOp, format, rules);
  if (dtype != DType::kF32 && dtype != DType::kF16 && dtype != DType::kBF16) {
    refuse(kOp, fmt::format("rows hold {}, expected f32, f16 or bf16", dtype_name(dtype)));
  }
  if (format.axis != ScaleAxis::kToken) {
    refuse(kOp, "rows that are packed one by one have scales of their own (kToken)");
  }
  for (const PackedRing& ring : rings) {
    if (ring.rows == nullptr || ring.places < 1 || ring.oldest < 0 || ring.oldest >= ring.places ||
        ring.scales == nullptr || ring.block_rows < 1 || ring.packed < 0 ||
        (ring.zeros == nullptr && format.zeros(1) > 0)) {
      refuse(kOp, fmt::format("a ring of {} places lacks its rows or a place to go", ring.places));
    }
  }
  if (state_->table != nullptr) return state_->table->describe(format, rules, dtype, rings, stream);
  state_->format = format;
  state_->rules = rules;
  state_->dtype = dtype;
  state_->rings.assign(rings.begin(), rings.end());
}

void RingPacker::run(Stream& stream) {
  if (state_->table != nullptr) return state_->table->run(stream);
  if (!state_->rings.empty()) state_->run(stream);
}

}  // namespace kvlm
