#include "kvcache/quantizers/common.h"

namespace kvlm::quantizers {

namespace {

/// TurboQuant as vLLM ships it: keys are rotated by a Hadamard matrix, after which their channels
/// are nearly normal, and coded by the Lloyd-Max codebook of a normal distribution times the norm
/// of the key; values are 3 or 4 bits min-max per token, not rotated. The paper rotates by a random
/// matrix and adds a 1-bit sketch of the error, which vLLM and llama.cpp leave out.
class TurboQuant final : public PlannedQuantizer {
 public:
  TurboQuant(const OptionValues& options, const PolicyContext& context)
      : rotated_(options.text("values") == "table" ? Rotated::kKeysAndValues
                 : options.text("key_bits") == "8" ? Rotated::kNothing
                                                   : Rotated::kKeys) {
    const auto packing = [&](std::string_view bits, bool table) {
      const int dim = context.shape->head_dim;
      const int width = options.integer(bits);
      Packing made = packing_of(ScaleAxis::kToken, width, dim, dim, meta_of(options));
      if (table) {
        made.format.section[0] =
            section_of(width == 3 ? CodeFormat::kLloydMax3 : CodeFormat::kLloydMax4, dim);
        made.rules[0].rule = CodeRule::kNormCodebook;
        made.rules[0].corrects_norm = options.text("norm") == "corrected";
      } else if (options.text("round") == "half_up") {
        made.rules[0].rounding = Rounding::kHalfUp;
      }
      made.flush.hold = tail_keep_of(options, context);
      made.flush.trigger = made.flush.hold + 1;
      return made;
    };
    const bool tables = options.text("values") == "table";
    refuse_idle(options, "norm", !tables && options.text("key_bits") == "8",
                "nothing is coded from a table with key_bits=8");
    refuse_idle(options, "round", tables && options.text("key_bits") != "8",
                "nothing is coded min-max with values=table");
    keys_ = {packing("key_bits", options.text("key_bits") != "8")};
    values_ = {packing("value_bits", options.text("values") == "table")};
  }

  Rotated rotated() const noexcept override { return rotated_; }

 private:
  Rotated rotated_;
};

constexpr std::array kOptions{
    OptionInfo{.key = "key_bits",
               .choices = "3|4|8",
               .standard = "4",
               .help = "bits of a channel of a key; 8: min-max per token"},
    OptionInfo{.key = "value_bits",
               .choices = "3|4",
               .standard = "4",
               .help = "bits of a channel of a value"},
    OptionInfo{.key = "norm",
               .choices = "corrected|plain",
               .standard = "corrected",
               .help = "corrected: what is read back has the norm of the key; plain: the norm is "
                       "stored as it is"},
    OptionInfo{.key = "values",
               .choices = "minmax|table",
               .standard = "minmax",
               .help = "table: values are rotated and coded as keys are, as in forks of llama.cpp"},
    OptionInfo{.key = "round",
               .choices = "nearest|half_up",
               .standard = "nearest",
               .official = "half_up",
               .help = "min-max codes in the middle of two: nearest: the even one; half_up: the "
                       "upper one"},
    OptionInfo{.key = "rotate",
               .choices = "auto|keys|hadamard|off",
               .standard = "auto",
               .help = "keys, or with hadamard also values, are stored rotated by a Hadamard "
                       "matrix; auto: what a table codes, and keys with values"},
    kMeta,
    kTailKeep};

}  // namespace

const QuantizerEntry turboquant{
    {.name = "turboquant",
     .kind = PartKind::kQuantizer,
     .source = "TurboQuant, as in vLLM",
     .stores = "every token: rotated keys at 4 bits of a codebook for normal numbers times their "
               "norm, values at 4 bits min-max",
     .composes = "any retention rule but expected_attention; share=codes; a quantizer with "
                 "scope=visual",
     .options = kOptions,
     .example = "turboquant,key_bits=3",
     .arxiv = "2504.19874"},
    make<TurboQuant>};

}  // namespace kvlm::quantizers
