#include <algorithm>
#include <array>

#include "kvcache/retention/window.h"
#include "kvcache/spec/policies.h"

namespace kvlm::retention {

namespace {

constexpr std::array kOptions = {kKeep, kWindow, kKernel, kHeadShared, kEvictIfAsked, kDistance};

/// Keeps, per kv_head, the tokens that the last `window` tokens of the prompt attend to, and those
/// tokens themselves: floor(r N), raised to the window [S: the reference truncates it]. Prompts no
/// longer than the window stay whole. Decode evicts only with evict=.
///
/// Source: Li et al. 2024, "SnapKV" [G], as in NVIDIA/kvpress [K]; docs/formulas.md, "SnapKV".
class SnapKv final : public WindowRule {
 public:
  using WindowRule::WindowRule;

  int64_t peak_rows_total(int layers, int prompt_rows, int max_rows) const noexcept override {
    return int64_t{layers} * peak_rows(kept(prompt_rows), 1 - keep(), prompt_rows, max_rows);
  }

 private:
  LayerBudget budget(std::span<const int>, int, int n) const override {
    return {kept(n), 1 - keep()};
  }
  int kept(int n) const noexcept {
    return std::min(n, std::max(floored_rows(keep(), n), settings().window));
  }
};

std::unique_ptr<Retention> make_rule(const OptionValues& options, const PolicyContext& context) {
  return std::make_unique<SnapKv>(WindowRule::Settings::from(options),
                                  PlaceEviction::from(options, context));
}

}  // namespace

const RetentionEntry snapkv{
    {.name = "snapkv",
     .kind = PartKind::kRetention,
     .source = "SnapKV, as in kvpress",
     .stores = "per KV head, the last tokens of the prompt and those that they attend to most",
     .composes = "any quantizer; share=codes and xquant only with head_shared=on",
     .options = kOptions,
     .example = "snapkv,keep=0.3,window=32",
     .arxiv = "2404.14469"},
    make_rule};

}  // namespace kvlm::retention
