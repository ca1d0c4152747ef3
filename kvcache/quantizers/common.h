#pragma once

#include <fmt/format.h>

#include <array>
#include <memory>
#include <string_view>

#include "kernels/base/error.h"
#include "kvcache/quantizer.h"
#include "kvcache/spec/policies.h"

namespace kvlm::quantizers {

/// Options of several quantizers.
inline constexpr OptionInfo kMeta{.key = "meta",
                                  .choices = "f16|f32",
                                  .standard = "f16",
                                  .help = "type of scales and zero points"};
inline constexpr OptionInfo kGroup{
    .key = "group",
    .type = OptionInfo::Type::kInteger,
    .low = 1,
    .high = 1024,
    .standard = "32",
    .help = "tokens (of a channel) or channels (of a token) that share a scale"};
inline constexpr OptionInfo kResidual{
    .key = "residual",
    .type = OptionInfo::Type::kInteger,
    .low = 1,
    .high = 65536,
    .standard = "128",
    .help = "size of the residual window: the newest tokens, which stay unquantized"};
/// Option of quantizers that pack visual tokens only.
inline constexpr OptionInfo kVisualScope{
    .key = "scope",
    .choices = "visual",
    .standard = "visual",
    .help = "visual: only tokens of images and videos are packed; other tokens stay unquantized"};
inline constexpr OptionInfo kTailKeep{.key = "tail_keep",
                                      .type = OptionInfo::Type::kChannels,
                                      .low = 0,
                                      .high = 65536,
                                      .standard = "auto",
                                      .help =
                                          "newest tokens that are never packed, so that decode can "
                                          "evict them; auto: 32 with a retention rule, else 0"};

inline DType meta_of(const OptionValues& options) {
  return options.text("meta") == "f32" ? DType::kF32 : DType::kF16;
}

inline int tail_keep_of(const OptionValues& options, const PolicyContext& context) {
  if (options.text("tail_keep") == "auto") return context.with_retention ? 32 : 0;
  return options.integer("tail_keep");
}

/// Throws unless the residual window is a multiple of the group size.
inline void check_residual(const OptionValues& options) {
  const int group = options.integer("group");
  const int residual = options.integer("residual");
  if (residual % group != 0) {
    throw Error(
        ErrorCode::kInvalidArgument,
        fmt::format("--kv {} packs residual={} tokens at a time, which is not a multiple of "
                    "group={}; use residual={}",
                    options.info().name, residual, group, (residual + group - 1) / group * group));
  }
}

/// A packing with one section over the whole head.
inline Packing packing_of(ScaleAxis axis, int bits, int group, int head_dim, DType meta) {
  Packing packing;
  packing.format.axis = axis;
  packing.format.meta = meta;
  (axis == ScaleAxis::kToken ? packing.format.group_size : packing.format.block_rows) = group;
  packing.format.section[0] = section_of(static_cast<CodeFormat>(bits), head_dim);
  packing.nominal_bits = bits;
  return packing;
}

/// For tokens that stay unpacked.
inline Packing unpacked() {
  Packing packing;
  packing.nominal_bits = 16;
  return packing;
}

/// Bits of the keys or values of a quantizer of visual tokens; 16: unpacked.
inline int visual_bits(const OptionValues& options, std::string_view key) {
  return options.integer(options.text(key) == "auto" ? "bits" : key);
}

/// Throws if `bits` is given although both widths are, or if nothing is packed.
inline void check_visual_bits(const OptionValues& options) {
  refuse_idle(options, "bits",
              options.text("key_bits") != "auto" && options.text("value_bits") != "auto",
              "key_bits and value_bits set both bit widths");
  if (visual_bits(options, "key_bits") < 16 || visual_bits(options, "value_bits") < 16) return;
  throw Error(
      ErrorCode::kInvalidArgument,
      fmt::format(
          "--kv {} packs neither keys nor values with key_bits=16 and value_bits=16; use --kv f16",
          options.info().name));
}

/// KIVI's schedule (docs/formulas.md, "Windows"): keys leave a window of R tokens R at a time,
/// values one by one.
inline FlushRule kivi_key_flush(int residual, int tail_keep) {
  return {.prompt_unit = residual,
          .hold = tail_keep,
          .trigger = residual + tail_keep,
          .rows = residual};
}
inline FlushRule kivi_value_flush(int residual, int tail_keep) {
  const int hold = residual > tail_keep ? residual : tail_keep;
  return {.prompt_unit = 1, .hold = hold, .trigger = hold + 1, .rows = 1};
}

/// Factory of a quantizer of type Q, for the registry.
template <class Q>
std::unique_ptr<Quantizer> make(const OptionValues& options, const PolicyContext& context) {
  return std::make_unique<Q>(options, context);
}

/// Packings are the same in all layers, or one per layer.
class PlannedQuantizer : public Quantizer {
 public:
  const Packing& packing(KvSide side, int layer) const noexcept override {
    const auto& packings = side == KvSide::kKeys ? keys_ : values_;
    return packings[packings.size() == 1 ? 0 : static_cast<size_t>(layer)];
  }

 protected:
  std::vector<Packing> keys_;    ///< (1,) or (layers,)
  std::vector<Packing> values_;  ///< (1,) or (layers,)
};

}  // namespace kvlm::quantizers
