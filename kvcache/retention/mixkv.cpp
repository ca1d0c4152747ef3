#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>

#include "kvcache/retention/window.h"
#include "kvcache/spec/policies.h"

// score() makes of keys and values what the cache adds to attention, so that rows stay on the
// device; mix() adds it, when attention is known.
namespace kvlm::retention {

namespace {

constexpr OptionInfo kMixWindow{.key = "window",
                                .type = OptionInfo::Type::kInteger,
                                .low = 1,
                                .high = 4096,
                                .standard = "64",
                                .official = "32",
                                .help = kWindow.help};
constexpr std::array kOptions = {
    kKeep,
    kMixWindow,
    kKernel,
    OptionInfo{.key = "mode",
               .choices = "headwise|mean",
               .standard = "headwise",
               .help = "weights of importance and diversity. headwise: by the similarity of the KV "
                       "head's keys, measured in the prompt; mean: equal"},
    kHeadShared,
    kEvictIfAsked,
    kDistance};

/// Scores scaled from their least to their greatest as 0 to 1, divided by their mean; 0 if all are
/// equal.
std::vector<double> spread(std::span<const double> scores) {
  std::vector<double> made(scores.begin(), scores.end());
  if (made.empty()) return made;
  const auto [least, most] = std::ranges::minmax(made);
  double sum = 0;
  for (double& x : made) {
    x = (x - least) / (most - least + 1e-8);
    sum += x;
  }
  const double mean = sum / static_cast<double>(made.size());
  for (double& x : made) x = mean > 0 ? x / mean : 0;
  return made;
}

/// Keeps, per kv_head, the last `window` tokens of the prompt and those before it of the best mix
/// of importance (SnapKV's pooled attention a, and the norm of the value v) and diversity d (minus
/// the cosine of the key to the mean direction), each scaled to a's mean:
///
///   r d + (1 - r) (a + v),  r = mean cosine between two keys of the kv_head, in [0, 1)
///
/// so that heads whose keys are alike (redundant ones) choose by diversity. Ties to the earlier. If
/// heads or tied layers choose together, their scores are added, with the mean attention [S].
///
/// Departures: r is measured in the prompt. The published code reads it from a table of one model
/// for all models. Its budget is a number of tokens, here a share (keep).
///
/// Source: "Mixing Importance with Diversity" (MixKV), arXiv 2510.20707 [P], and its code [C];
/// docs/formulas.md, "MixKV".
class MixKv final : public WindowRule {
 public:
  MixKv(const OptionValues& options, const PolicyContext& context)
      : WindowRule(Settings::from(options), PlaceEviction::from(options, context)),
        headwise_(options.text("mode") == "headwise") {}

  ImportanceNeeds needs() const noexcept override {
    ImportanceNeeds needs = WindowRule::needs();
    needs.row_scores = !identity();
    return needs;
  }

  /// Of token j before the window v_j + r / (1 - r) d_j, relative to a's mean, and 1 - r in the
  /// place of the last token.
  void score(const LayerRows& layer, std::span<double> scores, Stream& stream) const override {
    const int head_dim = layer.shape->head_dim;
    std::vector<double> norms(scores.size());
    row_norms(layer.values, head_dim, norms, stream);
    cosines_to_mean(layer.keys, head_dim, scores, stream);
    const size_t n = scores.size() / static_cast<size_t>(layer.shape->kv_heads);
    const size_t before = n - std::min(n, static_cast<size_t>(settings().window));
    for (size_t first = 0; first < scores.size(); first += n) {
      const std::span<double> head = scores.subspan(first, n);
      const double length = std::accumulate(head.begin(), head.end(), 0.0) / static_cast<double>(n);
      const double similarity = similarity_of(length, n);
      for (double& x : head) x = -x;
      const std::vector<double> diversity = spread(head.first(before));
      const std::vector<double> importance = spread(std::span(norms).subspan(first, before));
      const double share = headwise_ ? similarity / (1 - similarity) : 1;
      for (size_t j = 0; j < before; ++j) head[j] = importance[j] + share * diversity[j];
      std::fill(head.begin() + static_cast<std::ptrdiff_t>(before), head.end(), 0.0);
      head.back() = headwise_ ? 1 - similarity : 1;
    }
  }

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

  /// Mean cosine between two of n keys, from the length of their mean direction: the mean of all
  /// n x n products is its square, of which n are 1.
  static double similarity_of(double length, size_t n) noexcept {
    constexpr double kMost = 1 - 1e-6;
    const auto keys = static_cast<double>(n);
    const double mean = n > 1 ? (keys * length * length - 1) / (keys - 1) : 0;
    return std::isfinite(mean) ? std::clamp(mean, 0.0, kMost) : 0;
  }

  void mix(const PromptView& prompt, const Unit& unit, int kv_head,
           std::span<double> before) const override {
    if (before.empty()) return;
    const std::vector<double> attention(before.begin(), before.end());
    const double mean =
        std::accumulate(before.begin(), before.end(), 0.0) / static_cast<double>(before.size());
    const auto n = static_cast<size_t>(prompt.rows);
    const auto kv_heads = static_cast<size_t>(prompt.shape->kv_heads);
    std::ranges::fill(before, 0.0);
    for (const int row : unit.rows) {
      for (size_t head = 0; head < kv_heads; ++head) {
        if (kv_head >= 0 && head != static_cast<size_t>(kv_head)) continue;
        const std::span<const double> own =
            prompt.row_scores.subspan((static_cast<size_t>(row) * kv_heads + head) * n, n);
        for (size_t j = 0; j < before.size(); ++j) {
          const double added = own.back() * (attention[j] + mean * own[j]);
          if (std::isfinite(added)) before[j] += added;
        }
      }
    }
  }

  bool headwise_;
};

}  // namespace

const RetentionEntry mixkv{
    {.name = "mixkv",
     .kind = PartKind::kRetention,
     .source = "MixKV",
     .stores = "per KV head, the last tokens of the prompt and the best mix of importance and "
               "diversity",
     .composes = "any quantizer; share=codes and xquant only with head_shared=on",
     .options = kOptions,
     .example = "mixkv,keep=0.3,window=32",
     .arxiv = "2510.20707"},
    make<MixKv>};

}  // namespace kvlm::retention
