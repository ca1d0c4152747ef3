#include <algorithm>
#include <array>
#include <cmath>

#include "kvcache/retention/window.h"
#include "kvcache/spec/policies.h"

namespace kvlm::retention {

namespace {

constexpr std::array kOptions = {
    kKeep,
    OptionInfo{.key = "beta",
               .type = OptionInfo::Type::kReal,
               .low = 1,
               .high = 1000,
               .standard = "20",
               .help = "the last layer keeps 1/beta of the average budget"},
    kWindow,
    kKernel,
    OptionInfo{.key = "no_floor",
               .choices = "off|on",
               .standard = "off",
               .help = "on: layers may keep fewer tokens than window; off: all budgets are equal "
                       "if one would be smaller"},
    kHeadShared,
    kEvictIfAsked,
    kDistance,
};

/// SnapKV's scores with budgets on a straight line over the layers, the first keeping most.
///
/// c = r N on average, c / beta in the last layer and 2 c - c / beta in the first, moved together
/// if that exceeds the slots before the window. If the last layer would keep less than the window,
/// every layer keeps c, as in the reference: at small budgets there is no pyramid. no_floor=on
/// keeps the line and truncates the window to its newest tokens [S]; equal budgets below the window
/// are raised to it [S]. As published in NVIDIA/kvpress, decode evicts only with evict=; the forget
/// ratio is then 1 - m_l / N.
///
/// Source: Cai et al. 2024, "PyramidKV" [G], as in NVIDIA/kvpress [K]; docs/formulas.md,
/// "PyramidKV".
class PyramidKv final : public WindowRule {
 public:
  PyramidKv(const Settings& settings, double beta, bool no_floor, bool tied,
            const PlaceEviction& eviction)
      : WindowRule(settings, eviction), beta_(beta), no_floor_(no_floor), tied_(tied) {}

  int64_t peak_rows_total(int layers, int prompt_rows, int max_rows) const noexcept override {
    if (identity()) return int64_t{layers} * growing_peak(prompt_rows, prompt_rows, max_rows);
    int64_t kept = 0;
    int64_t peak = 0;
    for (int l = 0; l < layers; ++l) {
      const int m = rows_of_layer(l, layers, prompt_rows);
      kept += m;
      peak += peak_rows(m, forget(m, prompt_rows), prompt_rows, max_rows);
    }
    if (!tied_) return peak;
    // The mean of a pair may be rounded up, by less than a token per layer.
    return eviction().peak_rows_total(kept + layers, layers, prompt_rows, max_rows);
  }

 private:
  static double forget(int kept, int n) noexcept { return 1 - static_cast<double>(kept) / n; }

  LayerBudget budget(std::span<const int> layers, int of_layers, int n) const override {
    double sum = 0;
    for (const int layer : layers) sum += rows_of_layer(layer, of_layers, n);
    const auto kept = static_cast<int>(
        std::nearbyint(sum / static_cast<double>(std::max<size_t>(1, layers.size()))));
    return {kept, forget(kept, n)};
  }

  int rows_of_layer(int layer, int layers, int n) const noexcept {
    const int window = settings().window;
    const double average = keep() * n;
    double least = average / beta_;
    double most = 2 * average - least;
    if (most >= n - window) {
      most = n - window;
      least = 2 * average - most;
    }
    const double floor = no_floor_ ? 1 : window;
    if (layers < 2 || !(n >= most && most >= least && least >= floor)) {
      return std::min(n, std::max(rounded_rows(keep(), n), window));
    }
    return static_cast<int>(std::nearbyint(most - layer * (most - least) / (layers - 1)));
  }

  double beta_;
  bool no_floor_;
  bool tied_;
};

std::unique_ptr<Retention> make_rule(const OptionValues& options, const PolicyContext& context) {
  return std::make_unique<PyramidKv>(WindowRule::Settings::from(options), options.real("beta"),
                                     options.text("no_floor") == "on", context.with_sharing,
                                     PlaceEviction::from(options, context));
}

}  // namespace

const RetentionEntry pyramidkv{
    {.name = "pyramidkv",
     .kind = PartKind::kRetention,
     .source = "PyramidKV, as in kvpress",
     .stores = "as snapkv; early layers keep more tokens than late ones",
     .composes = "any quantizer; share=codes and xquant only with head_shared=on",
     .options = kOptions,
     .example = "pyramidkv,keep=0.3",
     .arxiv = "2406.02069"},
    make_rule};

}  // namespace kvlm::retention
