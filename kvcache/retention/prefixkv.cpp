#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>

#include "kernels/base/error.h"
#include "kvcache/retention/common.h"
#include "kvcache/retention/prefix_fit.h"
#include "kvcache/spec/policies.h"

namespace kvlm::retention {

namespace {

using Type = OptionInfo::Type;

constexpr std::array kOptions = {
    kKeep,
    kScore,
    kSinks,
    kLast,
    OptionInfo{.key = "mode",
               .choices = "auto|online|profile",
               .standard = "auto",
               .official = "profile",
               .paper = "profile",
               .help = "where the budgets of the layers come from. online: computed for each "
                       "prompt; profile: --kv-profile; auto: the profile if it was measured for "
                       "this keep, score and decoder, else online"},
    OptionInfo{
        .key = "fit",
        .choices = "greedy|rescale",
        .standard = "greedy",
        .official = "rescale",
        .paper = "rescale",
        .help =
            "search of online budgets. greedy: exact; rescale: scaled, as in the published code"},
    OptionInfo{.key = "protect",
               .choices = "inside|official",
               .standard = "inside",
               .official = "official",
               .help = "sinks and last in online budgets. inside: they count towards the budget; "
                       "official: they come on top"},
    kEvict,
    kDistance,
    OptionInfo{
        .key = "merge",
        .choices = "none|position|feature",
        .standard = "none",
        .help =
            "what happens to evicted tokens. none: dropped; position: averaged into the nearest "
            "kept token; feature: averaged into the kept token with the most similar key"},
    OptionInfo{.key = "pos",
               .choices = "logical|layer0_len",
               .standard = "logical",
               .official = "layer0_len",
               .help = "position of the next token. logical: number of tokens so far; layer0_len: "
                       "number of tokens that layer 0 holds, as in the published code"},
};

enum class Fit : uint8_t { kGreedy, kRescale };

struct Settings {
  double keep = 1;
  Score score = Score::kMeans;
  std::vector<double> forget;  ///< (layers,) of the offline profile; empty: fit online
  Fit fit = Fit::kGreedy;
  bool protect_on_top = false;
  MergeRule merge = MergeRule::kNone;
  bool positions_from_layer0 = false;
};

/// Keeps in every layer the most attended tokens, as few as have a share p of its attention, with
/// one p for all layers such that r of all tokens stay.
///
/// Budgets are fitted to each prompt (mode=online), or come from --kv-profile, where `vlm-kv
/// profile` averaged them over a few prompts (mode=profile): then a layer is compacted at the end
/// of its own prompt. mode=auto uses the profile if it is for this many layers and this keep, else
/// fits. The last tokens of the prompt stay, at most half of a layer's. The published rule, last=1,
/// drops the question, which the fewest tokens attend to. Decode evicts to the budget
/// (docs/formulas.md, "Eviction") with the forget ratio of the profile, or 1 - m / N of the fit.
///
/// Departures from the published code, each an option: the fit is exact (fit=rescale: within 5
/// tokens, then scaled; its search stops at 64 steps because it need not end), protected tokens are
/// inside the budget (protect=official), the position of a new token is the number of tokens fed
/// (pos=layer0_len). At least sinks + 2 tokens stay in every layer [S]; the code asserts. Merging
/// is in the paper only (4.3, Table 12); that values follow the keys' assignment is [S].
///
/// Source: Wang et al., "PrefixKV", 3.2-3.3, eq. 1, alg. 1 [P]; prefixkv.py [C];
/// docs/formulas.md, "PrefixKV".
class PrefixKv final : public PlacedRule {
 public:
  PrefixKv(Settings settings, const PlaceEviction& eviction)
      : PlacedRule(settings.keep, eviction), settings_(std::move(settings)) {}

  ImportanceNeeds needs() const noexcept override {
    return {.rows = identity() ? ImportanceNeeds::Rows::kNone : ImportanceNeeds::Rows::kAll};
  }
  bool joint() const noexcept override { return !identity() && settings_.forget.empty(); }
  MergeRule merge() const noexcept override {
    return identity() ? MergeRule::kNone : settings_.merge;
  }
  bool positions_from_layer0() const noexcept override { return settings_.positions_from_layer0; }

  std::vector<LayerSelection> select(const PromptView& prompt,
                                     std::span<const int> pairs) const override {
    if (identity()) return keep_everything(prompt);
    const std::vector<Unit> units = units_of(prompt, pairs);
    std::vector<std::vector<double>> scores;
    for (const Unit& unit : units) scores.push_back(unit_scores(prompt, unit, settings_.score));
    const std::vector<Budget> budgets = settings_.forget.empty()
                                            ? fitted(units, scores, prompt.shape->layers)
                                            : profiled(units, prompt.rows);
    std::vector<LayerSelection> selections;
    for (size_t u = 0; u < units.size(); ++u) {
      selections.push_back({{}, budgets[u].forget});
      add_best(selections.back(), scores[u], budgets[u].kept);
    }
    return by_layer(prompt, units, std::move(selections));
  }

  int64_t peak_rows_total(int layers, int prompt_rows, int max_rows) const noexcept override {
    const int64_t all = int64_t{layers} * std::max(prompt_rows, max_rows);
    if (identity()) return all;
    if (!settings_.forget.empty()) return std::min(all, profiled_peak(prompt_rows, max_rows));
    int64_t total = total_rows(keep(), layers, prompt_rows);
    if (settings_.fit == Fit::kRescale) total += layers;
    total = std::max(total, int64_t{layers} * std::min(ends().least(), prompt_rows));
    total = std::min(total, int64_t{layers} * prompt_rows);
    return std::min(all, eviction().peak_rows_total(total, layers, prompt_rows, max_rows));
  }

 private:
  struct Budget {
    int kept;
    double forget;
  };

  std::vector<Budget> fitted(std::span<const Unit> units,
                             std::span<const std::vector<double>> scores, int layers) const {
    std::vector<LayerDemand> demands;
    for (size_t u = 0; u < units.size(); ++u) {
      demands.push_back({lorenz_curve(scores[u]), units[u].size()});
    }
    const auto n = static_cast<int>(scores.front().size());
    const FitRules rules{.total = total_rows(keep(), layers, n),
                         .least = ends().least(),
                         .extra = settings_.protect_on_top ? ends().sinks + ends().last : 0};
    std::vector<Budget> budgets;
    for (const int kept :
         settings_.fit == Fit::kGreedy ? fit_greedy(demands, rules) : fit_rescale(demands, rules)) {
      budgets.push_back({kept, 1 - static_cast<double>(kept) / n});
    }
    return budgets;
  }

  std::vector<Budget> profiled(std::span<const Unit> units, int n) const {
    std::vector<Budget> budgets;
    for (const Unit& unit : units) {
      double forget = 0;
      for (const int layer : unit.layers) forget += settings_.forget[static_cast<size_t>(layer)];
      forget /= unit.size();
      const int kept = n - rounded_rows(forget, n);
      budgets.push_back({std::min(n, std::max(kept, ends().least())), forget});
    }
    return budgets;
  }

  /// Holds for tied layers too: their mean keeps at most the sum of both.
  int64_t profiled_peak(int prompt_rows, int max_rows) const noexcept {
    const auto layers = static_cast<int64_t>(settings_.forget.size());
    const int steps = std::max(0, max_rows - prompt_rows);
    const bool growing = steps == 0 || eviction().rule == PlaceEviction::Rule::kNone;
    const int tokens = growing ? prompt_rows : prompt_rows + steps - 1;
    double rows = 0;
    for (const double forget : settings_.forget) {
      rows += std::max<double>(ends().least(), tokens * (1 - forget));
    }
    // Rounding adds at most half a token to what is kept and less than one to a budget; the newest
    // token adds another.
    const auto whole = static_cast<int64_t>(std::floor(rows + 1e-6));
    return whole + layers * (growing ? 1 + int64_t{steps} : 2);
  }

  const Ends& ends() const noexcept { return eviction().ends; }

  Settings settings_;
};

/// The profile's forget ratios, if the options ask for a profile and it fits.
std::vector<double> profiled_forget(const OptionValues& options, const PolicyContext& context,
                                    double keep) {
  const std::string_view mode = options.text("mode");
  if (mode == "online") return {};
  const auto refuse = [&](const std::string& found) {
    if (mode == "auto") return std::vector<double>();
    throw Error(
        ErrorCode::kUnsupported,
        fmt::format(
            "--kv prefixkv,{} needs the forget ratios of {} layers for keep={}, but {}; measure "
            "them with vlm-kv profile --policy prefixkv --keep {} and pass the file with "
            "--kv-profile, or write mode=online to compute budgets for each prompt",
            options.given("mode") ? "mode=profile"
                                  : fmt::format("profile={}", options.text("profile")),
            context.shape->layers, keep, found, keep));
  };
  const std::string_view score = options.text(kScore.key);
  if (context.profile == nullptr || !context.profile->forget.contains(score)) {
    return refuse(fmt::format("no profile has ratios for score={}", score));
  }
  const std::vector<double>& forget = context.profile->forget.find(score)->second;
  if (static_cast<int>(forget.size()) != context.shape->layers) {
    return refuse(fmt::format("the profile has {} layers", forget.size()));
  }
  if (std::abs(context.profile->forget_keep - keep) > 1e-6) {
    return refuse(
        fmt::format("the profile was measured for keep={}", context.profile->forget_keep));
  }
  for (const double ratio : forget) {
    if (!(ratio >= 0 && ratio <= 1)) {
      throw Error(ErrorCode::kCorruptFile,
                  fmt::format("the profile has a forget ratio of {}, expected 0 to 1; measure it "
                              "again with vlm-kv profile",
                              ratio));
    }
  }
  return forget;
}

std::unique_ptr<Retention> make_rule(const OptionValues& options, const PolicyContext& context) {
  Settings settings;
  settings.keep = options.real("keep");
  if (!keeps_everything(settings.keep)) {
    settings.forget = profiled_forget(options, context, settings.keep);
  }
  settings.score = score_from(options);
  settings.fit = options.text("fit") == "greedy" ? Fit::kGreedy : Fit::kRescale;
  settings.protect_on_top = options.text("protect") == "official";
  if (options.text("merge") == "position") settings.merge = MergeRule::kPosition;
  if (options.text("merge") == "feature") settings.merge = MergeRule::kFeature;
  settings.positions_from_layer0 = options.text("pos") == "layer0_len";
  return std::make_unique<PrefixKv>(std::move(settings), PlaceEviction::from(options, context));
}

}  // namespace

const RetentionEntry prefixkv{
    {.name = "prefixkv",
     .kind = PartKind::kRetention,
     .source = "PrefixKV, sections 3.2-3.3, equation 1, algorithm 1",
     .stores = "in every layer the fewest tokens that hold the same share of its attention",
     .composes =
         "any quantizer; share=codes and xquant (the layers of a pair keep the same tokens)",
     .options = kOptions,
     .example = "prefixkv,keep=0.5 + kivi,bits=4",
     .arxiv = "2412.03409"},
    make_rule};

}  // namespace kvlm::retention
