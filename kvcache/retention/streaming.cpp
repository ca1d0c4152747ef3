#include <algorithm>
#include <array>

#include "kernels/base/error.h"
#include "kvcache/retention/common.h"
#include "kvcache/spec/policies.h"

namespace kvlm::retention {

namespace {

constexpr OptionInfo with_standard(OptionInfo option, std::string_view value) {
  option.standard = value;
  return option;
}

constexpr std::array kOptions = {
    kKeep,
    with_standard(kSinks, "4"),
    OptionInfo{.key = "budget",
               .choices = "window|proportional",
               .standard = "window",
               .help = "tokens kept in decode. window: as many as at the end of the prompt; "
                       "proportional: keep times all tokens so far, as in PrefixKV's comparison"},
    OptionInfo{.key = "rerotate",
               .choices = "off|on",
               .standard = "off",
               .paper = "on",
               .help = "on: kept keys are rotated to their positions within the cache, as "
                       "published; off: they keep their original positions"},
};

enum class Budget : uint8_t { kWindow, kProportional };

/// Keeps the first `sinks` tokens and the newest others: floor(r N) in every layer and, in decode,
/// as many (budget=window) or floor(r (N + t)) (budget=proportional).
///
/// rerotate=on rotates the keys of sinks forward as later tokens are evicted, so that all distances
/// are those of ranks, as published. off, the default, keeps every rotation, as NVIDIA/kvpress does
/// [K]. At least sinks + 1 tokens stay [S]. PrefixKV's comparison ("Local") is
/// sinks=1,budget=proportional [C, inferred].
///
/// Source: Xiao et al. 2023, "Efficient Streaming Language Models with Attention Sinks", 3.2 [G];
/// docs/formulas.md, "StreamingLLM".
class Streaming final : public Retention {
 public:
  Streaming(double keep, int sinks, Budget budget, bool rerotate)
      : keep_(keep), sinks_(sinks), budget_(budget), rerotate_(rerotate) {}

  ImportanceNeeds needs() const noexcept override { return {}; }
  bool same_in_all_layers() const noexcept override { return true; }

  std::vector<LayerSelection> select(const PromptView& prompt,
                                     std::span<const int> /*pairs*/) const override {
    std::vector<LayerSelection> selections = keep_everything(prompt);
    const int n = prompt.rows;
    const int kept = std::min(n, limit(n));
    if (kept == n) return selections;
    std::vector<int32_t> slots = all_rows(kept);
    for (int i = sinks_; i < kept; ++i) slots[static_cast<size_t>(i)] = n - kept + i;
    std::fill(selections.begin(), selections.end(), LayerSelection{{slots}, 1 - keep_});
    return selections;
  }

  bool evicts() const noexcept override { return !identity(); }
  int evict(const DecodeView& view) const noexcept override {
    return !identity() && view.rows > rows_after(view.kept, view.prompt_rows, view.step) ? sinks_
                                                                                         : -1;
  }

  int peak_rows(int kept, double /*forget*/, int prompt_rows,
                int max_rows) const noexcept override {
    const int growing = growing_peak(kept, prompt_rows, max_rows);
    const int steps = max_rows - prompt_rows;
    if (identity() || steps <= 0) return growing;
    return std::min(growing, rows_after(kept, prompt_rows, steps - 1) + 1);
  }
  int64_t peak_rows_total(int layers, int prompt_rows, int max_rows) const noexcept override {
    const int kept = identity() ? prompt_rows : std::min(prompt_rows, limit(prompt_rows));
    return int64_t{layers} * peak_rows(kept, 1 - keep_, prompt_rows, max_rows);
  }

  bool rerotates() const noexcept override { return rerotate_ && !identity(); }
  int most_sinks() const noexcept override { return rerotates() ? sinks_ : 0; }

 private:
  bool identity() const noexcept { return keeps_everything(keep_); }
  int limit(int tokens) const noexcept { return std::max(floored_rows(keep_, tokens), sinks_ + 1); }
  /// Tokens that stay after step t.
  int rows_after(int kept, int prompt_rows, int step) const noexcept {
    return budget_ == Budget::kWindow ? std::max(kept, sinks_ + 1)
                                      : std::max(kept, limit(prompt_rows + step));
  }

  double keep_;
  int sinks_;
  Budget budget_;
  bool rerotate_;
};

std::unique_ptr<Retention> make_rule(const OptionValues& options, const PolicyContext& context) {
  const bool rerotate = options.text("rerotate") == "on";
  if (rerotate && context.with_quantizer) {
    throw Error(ErrorCode::kUnsupported,
                "--kv streaming,rerotate=on rotates kept keys, which is not possible with packed "
                "keys; drop the quantizer or use rerotate=off");
  }
  if (rerotate && context.shape->rope_frequencies.empty()) {
    throw Error(ErrorCode::kUnsupported,
                "--kv streaming,rerotate=on needs positions that are single numbers, and this "
                "model has several per token; use rerotate=off");
  }
  return std::make_unique<Streaming>(
      options.real("keep"), options.integer("sinks"),
      options.text("budget") == "window" ? Budget::kWindow : Budget::kProportional, rerotate);
}

}  // namespace

const RetentionEntry streaming{
    {.name = "streaming",
     .kind = PartKind::kRetention,
     .source = "StreamingLLM, section 3.2",
     .stores = "the first few tokens and the newest ones, the same in every layer",
     .composes = "everything; rerotate=on without a quantizer",
     .options = kOptions,
     .example = "streaming,keep=0.3",
     .arxiv = "2309.17453"},
    make_rule};

}  // namespace kvlm::retention
