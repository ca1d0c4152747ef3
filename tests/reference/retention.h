#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <map>
#include <numeric>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "kvcache/spec/policy.h"
#include "tests/reference/merge.h"

// Independent: which rows a prompt leaves and which slot a step drops, written from
// docs/formulas.md, "Importance" and "Retention" and "Shared codes", by sorting and counting, in
// double. Not independent: the values of options are read from the parser's tables (OptionValues).
// Options that no life in tests/kvcache/feeder.h uses are refused.
namespace kvlm::reference {

/// Rows that a layer keeps, ascending: one list, or one for each kv_head; and the share that it
/// forgets.
struct Selection {
  std::vector<std::vector<int>> slots;
  std::vector<std::vector<double>> scores;  ///< for each list, of all rows: what decode goes by
  double forget = 0;
  int tail = 1;  ///< of tgv: slots kept after the images, as many of which never go
  int lone_first = 0, lone_last = 0;  ///< of each list, the slots at its ends that none joins
};

/// A layer of a prompt's attention: importance (kv_heads, n) and the share of small entries; and
/// what a rule makes of its rows, (kv_heads, n).
struct LayerScores {
  std::vector<std::vector<double>> importance;
  /// Of tgv: each summed row and query head, and what that row looks at.
  std::vector<std::pair<size_t, std::vector<double>>> questions;
  std::vector<int16_t> modality;  ///< (n,)
  double sparsity = 0;
  std::vector<std::vector<double>> row_scores;
};

/// A layer as it is stored when a prompt has ended, and the queries of its rows.
struct StoredLayer {
  std::vector<Rows> keys, values;  ///< (kv_heads,) of n rows
  std::vector<Rows> queries;       ///< (q_heads,) of n rows, after RoPE
  double scale = 1;
  std::vector<float> frequencies;  ///< of RoPE
};

/// (n,) what the rows of a kv_head are worth by what they hold.
using RowScorer = std::vector<double> (*)(const StoredLayer& layer, size_t kv_head,
                                          const OptionValues& options);

inline double length_of(const std::vector<float>& x) {
  double sum = 0;
  for (const float element : x) sum += static_cast<double>(element) * static_cast<double>(element);
  return std::sqrt(sum);
}

inline std::vector<double> score_by_norm(const StoredLayer& layer, size_t kv_head,
                                         const OptionValues&) {
  std::vector<double> scores;
  for (const auto& key : layer.keys[kv_head]) scores.push_back(-length_of(key));
  return scores;
}

inline std::vector<double> score_by_difference(const StoredLayer& layer, size_t kv_head,
                                               const OptionValues&) {
  const Rows& keys = layer.keys[kv_head];
  std::vector<double> mean(keys[0].size());
  for (const auto& key : keys) {
    for (size_t i = 0; i < key.size(); ++i) {
      mean[i] += static_cast<double>(key[i]) / length_of(key) / static_cast<double>(keys.size());
    }
  }
  const double length = std::sqrt(std::inner_product(mean.begin(), mean.end(), mean.begin(), 0.0));
  std::vector<double> scores;
  for (const auto& key : keys) {
    const double product = std::inner_product(mean.begin(), mean.end(), key.begin(), 0.0);
    scores.push_back(-product / (length * length_of(key)));
  }
  return scores;
}

/// 0 to 1 from the least to the greatest, by their mean.
inline std::vector<double> spread_out(std::vector<double> x) {
  if (x.empty()) return x;
  const double least = *std::min_element(x.begin(), x.end());
  const double most = *std::max_element(x.begin(), x.end());
  double mean = 0;
  for (double& each : x) {
    each = (each - least) / (most - least + 1e-8);
    mean += each / static_cast<double>(x.size());
  }
  for (double& each : x) each = mean > 0 ? each / mean : 0;
  return x;
}

/// MixKV: what is added to a row's attention by a mean attention of 1; last 1 - r, r being the mean
/// cosine of two keys, each with each.
inline std::vector<double> score_by_mixture(const StoredLayer& layer, size_t kv_head,
                                            const OptionValues& options) {
  const Rows& keys = layer.keys[kv_head];
  const size_t n = keys.size();
  const size_t before = n - std::min(n, static_cast<size_t>(options.integer("window")));
  double cosines = 0;
  for (size_t i = 0; i < n; ++i) {
    for (size_t j = 0; j < i; ++j) {
      cosines += std::inner_product(keys[i].begin(), keys[i].end(), keys[j].begin(), 0.0) /
                 (length_of(keys[i]) * length_of(keys[j]));
    }
  }
  const double pairs = static_cast<double>(n) * static_cast<double>(n - 1) / 2;
  double r = n > 1 ? std::clamp(cosines / pairs, 0.0, 1 - 1e-6) : 0;
  if (options.text("mode") == "mean") r = 0.5;
  std::vector<double> norms;
  for (const auto& value : layer.values[kv_head]) norms.push_back(length_of(value));
  norms.resize(before);
  std::vector<double> others = score_by_difference(layer, kv_head, options);
  others.resize(before);
  const std::vector<double> importance = spread_out(norms);
  const std::vector<double> diversity = spread_out(others);
  std::vector<double> scores(n);
  for (size_t j = 0; j < before; ++j) scores[j] = importance[j] + r / (1 - r) * diversity[j];
  scores[n - 1] = 1 - r;
  return scores;
}

/// Channels f and f + half turned by the mean rotation to some positions.
inline std::vector<double> turned_to(const std::vector<double>& x,
                                     const std::vector<float>& frequencies, double first,
                                     int count) {
  std::vector<double> out = x;
  const size_t half = frequencies.size();
  for (size_t f = 0; f < half; ++f) {
    out[f] = out[f + half] = 0;
    for (int p = 0; p < count; ++p) {
      const double angle = (first + p) * static_cast<double>(frequencies[f]);
      out[f] += (x[f] * std::cos(angle) - x[f + half] * std::sin(angle)) / count;
      out[f + half] += (x[f + half] * std::cos(angle) + x[f] * std::sin(angle)) / count;
    }
  }
  return out;
}

/// The variance of q . k over the queries is k^T Sigma k: no matrix is made.
inline std::vector<double> score_by_expectation(const StoredLayer& layer, size_t kv_head,
                                                const OptionValues& options) {
  const Rows& keys = layer.keys[kv_head];
  const size_t n = keys.size();
  const size_t first = std::min(static_cast<size_t>(options.integer("sinks")), n - 1);
  const size_t per_head = layer.queries.size() / layer.keys.size();
  std::vector<double> scores(n);
  for (size_t head = kv_head * per_head; head < (kv_head + 1) * per_head; ++head) {
    std::vector<std::vector<double>> queries;
    for (size_t i = first; i < n; ++i) {
      const auto& q = layer.queries[head][i];
      const auto before =
          turned_to({q.begin(), q.end()}, layer.frequencies, -static_cast<double>(i), 1);
      queries.push_back(
          turned_to(before, layer.frequencies, static_cast<double>(n), options.integer("future")));
    }
    std::vector<double> weights(n);
    for (size_t j = first; j < n; ++j) {
      double mean = 0;
      double square = 0;
      for (const auto& q : queries) {
        const double score =
            layer.scale * std::inner_product(q.begin(), q.end(), keys[j].begin(), 0.0);
        mean += score / static_cast<double>(queries.size());
        square += score * score / static_cast<double>(queries.size());
      }
      const bool varies = options.text("covariance") == "on";
      weights[j] = std::exp(mean + (varies ? (square - mean * mean) / 2 : 0));
    }
    const double sum = std::accumulate(weights.begin(), weights.end(), 0.0);
    for (size_t j = 0; j < n; ++j) scores[j] += weights[j] / sum / static_cast<double>(per_head);
  }
  for (size_t j = 0; j < n && options.text("values") == "on"; ++j) {
    scores[j] = (scores[j] + options.real("epsilon")) * length_of(layer.values[kv_head][j]);
  }
  return scores;
}

/// The rules that score rows so.
inline const std::map<std::string, RowScorer>& row_scorers() {
  static const std::map<std::string, RowScorer> kScorers = {
      {"expected_attention", score_by_expectation},
      {"keydiff", score_by_difference},
      {"knorm", score_by_norm},
  };
  return kScorers;
}

/// The `kept` rows that stay: `last` at the end, `sinks` at the beginning (the end has precedence),
/// then the best, ties to the smaller row.
inline std::vector<int> best_rows(const std::vector<double>& scores, int kept, int sinks,
                                  int last) {
  const auto n = static_cast<int>(scores.size());
  std::vector<int> order(scores.size());
  std::iota(order.begin(), order.end(), 0);
  last = std::min(last, kept);
  sinks = std::min(sinks, kept - last);
  const auto rank = [&](int row) { return row >= n - last ? 0 : row < sinks ? 1 : 2; };
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) {
    if (rank(a) != rank(b)) return rank(a) < rank(b);
    return rank(a) == 2 && scores[static_cast<size_t>(a)] > scores[static_cast<size_t>(b)];
  });
  order.resize(static_cast<size_t>(std::min(kept, n)));
  std::sort(order.begin(), order.end());
  return order;
}

/// Scores in proportion, so that they sum to 1.
inline std::vector<double> in_proportion(std::vector<double> scores) {
  const double sum = std::accumulate(scores.begin(), scores.end(), 0.0);
  for (double& x : scores) x /= sum;
  return scores;
}

/// Budgets of PrefixKV and VL-Cache (docs/formulas.md, "PrefixKV"): rows are added one at a time
/// to the layer that has the smallest share of its attention, and taken from the one that has the
/// largest.
class Budgets {
 public:
  /// `scores` of layers or of pairs of them, which count `weights` times.
  Budgets(const std::vector<std::vector<double>>& scores, std::vector<int> weights)
      : weights_(std::move(weights)) {
    for (std::vector<double> sorted : scores) {
      std::sort(sorted.rbegin(), sorted.rend());
      std::vector<double> held(1, 0.0);
      for (const double x : sorted) held.push_back(held.back() + x);
      held.back() = 1;
      held_.push_back(std::move(held));
    }
    rows.assign(scores.size(), 0);
  }

  std::vector<int> rows;

  void clamp(int least) {
    for (int& m : rows) m = std::clamp(m, std::min(least, n()), n());
  }
  void add_up_to(int64_t total) {
    for (;;) {
      size_t to = rows.size();
      for (size_t l = 0; l < rows.size(); ++l) {
        if (rows[l] == n() || sum() + weights_[l] > total) continue;
        if (to == rows.size() || share(l) < share(to)) to = l;
      }
      if (to == rows.size()) return;
      ++rows[to];
    }
  }
  void take_down_to(int64_t total, int least) {
    while (sum() > total) {
      size_t from = rows.size();
      for (size_t l = 0; l < rows.size(); ++l) {
        if (rows[l] <= std::min(least, n())) continue;
        if (from == rows.size() || share(l) >= share(from)) from = l;
      }
      if (from == rows.size()) return;
      --rows[from];
    }
  }

 private:
  int n() const { return static_cast<int>(held_.front().size()) - 1; }
  double share(size_t l) const { return std::min(1.0, held_[l][static_cast<size_t>(rows[l])]); }
  int64_t sum() const {
    int64_t all = 0;
    for (size_t l = 0; l < rows.size(); ++l) all += int64_t{weights_[l]} * rows[l];
    return all;
  }

  std::vector<std::vector<double>> held_;  // by the k best rows, k = 0..n
  std::vector<int> weights_;
};

/// One rule with its options.
class Rule {
 public:
  Rule(const OptionValues& options, bool quantized)
      : name_(options.info().name), options_(options), keep_(options.real("keep")) {
    const auto text = [&](const char* key, const char* otherwise) {
      return std::string(options.has(key) ? options.text(key) : otherwise);
    };
    const auto number = [&](const char* key) {
      return options.has(key) ? options.integer(key) : 0;
    };
    sinks_ = number("sinks");
    means_ = text("score", "sums") == "means";
    seed_ = static_cast<uint64_t>(number("seed"));
    window_ = number("window");  // the end of the prompt that window rules spare
    last_ = options.has("last") ? options.integer("last") : std::max(1, window_);
    kernel_ = number("kernel");
    distance_ = number("distance");
    evict_ = text("evict", "none");
    if (evict_ == "auto") evict_ = quantized ? "window" : "score";
    head_shared_ = text("head_shared", "off") == "on";
    proportional_ = text("budget", "window") == "proportional";
    rerotates_ = text("rerotate", "off") == "on";
    if (options.has("beta")) beta_ = options.real("beta");
    if (options.has("recent")) recent_ = options.real("recent");
    if (text("merge", "none") == "position" || name_ == "elastic") merge_ = Merge::kPosition;
    if (text("merge", "none") == "feature") merge_ = Merge::kFeature;
    for (const auto& [key, value] : {std::pair("fit", "greedy"), std::pair("protect", "inside"),
                                     std::pair("prefill_only", "off"), std::pair("colmean", "off"),
                                     std::pair("no_floor", "off")}) {
      if (text(key, value) != value) {
        throw std::logic_error("the reference has no " + name_ + "," + key + "=" + text(key, ""));
      }
    }
    mixes_ = name_ == "mixkv";
    const auto known = {"mixkv",     "tgv",    "uniform",     "elastic",   "prefixkv",
                        "streaming", "h2o",    "snapkv",      "pyramidkv", "vlcache",
                        "tova",      "random", "pyramidinfer"};
    if (const auto found = row_scorers().find(name_); found != row_scorers().end()) {
      scorer_ = found->second;
    } else if (std::find(known.begin(), known.end(), name_) == known.end()) {
      throw std::logic_error("the reference has no rule " + name_);
    }
  }

  const std::string& name() const { return name_; }
  bool per_head() const {
    return !head_shared_ && (scores_rows() || name_ == "h2o" || name_ == "snapkv" ||
                             name_ == "pyramidkv" || name_ == "random" || name_ == "vlcache");
  }
  bool same_in_all_layers() const { return name_ == "streaming"; }
  bool weighs_in_decode() const { return name_ == "h2o" || evict_ == "step"; }
  /// What a row weighs is what the newest row gives it, nothing from before.
  bool weighs_by_step() const { return evict_ == "step"; }
  bool rerotates() const { return rerotates_; }
  Merge merge() const { return merge_; }

  /// The rows [first, last) of a prompt whose attention is summed.
  std::pair<size_t, size_t> summed(const std::vector<int16_t>& modality) const {
    const size_t n = modality.size();
    const auto newest = [&](size_t rows) { return std::pair(n > rows ? n - rows : 0, n); };
    if (name_ == "streaming" || name_ == "random" || scorer_ != nullptr) return {0, 0};
    if (name_ == "tova") return newest(1);
    if (name_ == "pyramidinfer")
      return newest(static_cast<size_t>(recent_rows(static_cast<int>(n))));
    if (window_ > 0) return newest(static_cast<size_t>(window_));
    if (name_ != "vlcache" && name_ != "tgv") return {0, n};
    size_t after = 0;  // rows behind the last visual one
    for (size_t j = 0; j < n; ++j) {
      if (modality[j] >= 0) after = j + 1;
    }
    return after == 0 || after == n ? newest(32) : std::pair(after, n);
  }

  /// What the attention of row `index` of `rows` summed ones counts.
  double counts(size_t index, size_t rows) const {
    const double newest = options_.has("weight") ? options_.real("weight") : 1;
    if (rows == 1) return 1;
    const double share = static_cast<double>(index) / static_cast<double>(rows - 1);
    return (1 - share) + share * newest;
  }

  /// Whether rows are scored by what they hold.
  bool scores_rows() const { return scorer_ != nullptr || mixes_; }
  std::vector<std::vector<double>> row_scores(const StoredLayer& layer) const {
    std::vector<std::vector<double>> scores;
    const RowScorer scorer = mixes_ ? score_by_mixture : scorer_;
    for (size_t h = 0; h < layer.keys.size(); ++h) scores.push_back(scorer(layer, h, options_));
    return scores;
  }

  /// What every layer keeps of n rows. Layers of one number in `pairs` count as one; empty: none.
  std::vector<Selection> select(const std::vector<LayerScores>& layers, int n,
                                const std::vector<int>& pairs) const {
    std::vector<std::vector<size_t>> units;
    for (size_t l = 0; l < layers.size(); ++l) {
      const auto mate = [&](const auto& unit) { return pairs[unit[0]] == pairs[l]; };
      const auto unit =
          pairs.empty() ? units.end() : std::find_if(units.begin(), units.end(), mate);
      if (unit == units.end()) {
        units.push_back({l});
      } else {
        unit->push_back(l);
      }
    }
    std::vector<std::vector<std::vector<double>>> scores;  // (units, 1 or kv_heads, n)
    for (const auto& unit : units) scores.push_back(unit_scores(layers, unit));
    const std::vector<int> kept = budgets(layers, units, n);
    std::vector<Selection> selections(layers.size());
    for (size_t u = 0; u < units.size(); ++u) {
      Selection selection;
      // What the layer before has dropped is gone.
      for (size_t j = 0; u > 0 && j < scores[u][0].size() && name_ == "pyramidinfer"; ++j) {
        const std::vector<int>& before = selections[units[u - 1][0]].slots[0];
        if (!std::binary_search(before.begin(), before.end(), static_cast<int>(j))) {
          scores[u][0][j] = -1;
        }
      }
      for (const auto& of_head : scores[u]) {
        selection.slots.push_back(chosen(of_head, kept[u]));
        selection.scores.push_back(window_ > 0 && !mixes_ ? pooled(of_head) : of_head);
      }
      const bool by_layer = name_ == "prefixkv" || name_ == "tgv" || name_ == "vlcache" ||
                            name_ == "pyramidkv" || name_ == "pyramidinfer";
      selection.forget = by_layer ? 1 - static_cast<double>(kept[u]) / n : 1 - keep_;
      if (name_ == "tgv") {
        const std::vector<int16_t>& tags = layers[0].modality;
        for (const int slot : selection.slots[0]) {
          const auto at = tags.begin() + slot;
          const auto is_text = [](int16_t tag) { return tag < 0; };
          const bool images = !std::all_of(tags.begin(), tags.end(), is_text);
          const bool question = images && std::all_of(at, tags.end(), is_text);
          selection.tail += question ? 1 : 0;
        }
        selection.tail = std::max(1, selection.tail - 1);
      }
      if (name_ == "elastic" && options_.text("anchors") == "inner") {
        selection.lone_last = tail(kept[u]);
        selection.lone_first = std::min(sinks_, kept[u] - selection.lone_last);
      }
      for (const size_t layer : units[u]) selections[layer] = selection;
    }
    return selections;
  }

  /// The slot that goes after step t, `scores` being those of the prompt's rows that are left, when
  /// a layer of N prompt rows that kept m has n rows; -1: none.
  int evict(int n, int prompt_rows, int step, int kept, double forget, int newest,
            const std::vector<double>& weights, const std::vector<double>& scores) const {
    if (name_ == "streaming") {
      const int most = proportional_ ? std::max(kept, streaming_rows(prompt_rows + step)) : kept;
      return n > std::max(most, sinks_ + 1) ? sinks_ : -1;
    }
    if (name_ == "h2o") {
      if (n <= kept) return -1;
      int least = 0;
      for (int j = 0; j < n - (kept + 1) / 2; ++j) {
        if (weights[static_cast<size_t>(j)] <= weights[static_cast<size_t>(least)]) least = j;
      }
      return least;
    }
    if (evict_ == "none") return -1;
    if (name_ == "pyramidinfer" && evict_ == "step") {
      const int sinks = std::min(sinks_, kept - 1);
      const int recent = std::min(recent_rows(prompt_rows), kept - sinks);
      int least = -1;
      for (int j = sinks; j < n - recent && n > kept; ++j) {
        const auto weight = [&](int slot) { return weights[static_cast<size_t>(slot)]; };
        if (least < 0 || weight(j) <= weight(least)) least = j;
      }
      return least;
    }
    if (name_ == "tgv" && evict_ == "step") {
      if (std::floor(n - std::max<double>(kept, (prompt_rows + step) * (1 - forget)) + 1e-6) < 1) {
        return -1;
      }
      int least = -1;
      for (int j = n - newest - 1; j >= sinks_; --j) {
        const auto weight = [&](int slot) { return weights[static_cast<size_t>(slot)]; };
        if (least < 0 || weight(j) < weight(least)) least = j;
      }
      return least < 0 ? std::min(sinks_, n - 2) : least;
    }
    if (evict_ == "step") return n > kept ? least_attended(n, kept, weights, scores) : -1;
    const double budget = std::max<double>(kept, (prompt_rows + step) * (1 - forget));
    if (std::floor(n - budget + 1e-6) < 1) return -1;
    if (evict_ == "score" || evict_ == "window") return spared(n, kept, scores);
    int slot = (evict_ == "sliding" ? n : kept) - distance_;
    if (slot < 1) slot = kept / 2;
    return std::min(std::max(slot, sinks_), n - 2);
  }

 private:
  /// Rows at the end of the prompt that always stay: at most half of those that are kept.
  int tail(int kept) const {
    return std::min(last_, std::max(1, std::min(kept / 2, kept - sinks_)));
  }

  /// What this step looks at least, both ends of the prompt and the newest row spared.
  int least_attended(int n, int kept, const std::vector<double>& weights,
                     const std::vector<double>& scores) const {
    const auto prompt = static_cast<int>(scores.size());
    int least = -1;
    for (int j = n - 2; j >= sinks_; --j) {
      const bool ends = j < prompt && j >= prompt - tail(kept);
      if (ends) continue;
      const auto weight = [&](int slot) { return weights[static_cast<size_t>(slot)]; };
      if (least < 0 || weight(j) < weight(least)) least = j;
    }
    return least < 0 ? std::min(sinks_, n - 2) : least;
  }

  /// Eviction that spares both ends of the prompt (docs/formulas.md, "Eviction").
  int spared(int n, int kept, const std::vector<double>& scores) const {
    const auto prompt = static_cast<int>(scores.size());
    std::vector<int> free;  // of the prompt, neither sinks nor tail
    for (int j = sinks_; j < prompt - tail(kept); ++j) free.push_back(j);
    if (evict_ == "score" && !free.empty()) {
      return *std::min_element(free.begin(), free.end(), [&](int a, int b) {
        const auto score = [&](int j) {
          return static_cast<float>(scores[static_cast<size_t>(j)]);
        };
        return score(a) != score(b) ? score(a) < score(b) : a > b;
      });
    }
    for (int j = std::max(n - distance_, sinks_); j < n - 1; ++j) {
      if (j < prompt - tail(kept) || j >= prompt) return j;
    }
    return free.empty() ? std::min(sinks_, n - 2) : free.back();
  }

  /// docs/formulas.md, "Random": what splitmix64 gives after `state`.
  static uint64_t mix(uint64_t state) {
    uint64_t z = state + UINT64_C(0x9e3779b97f4a7c15);
    z = (z ^ z >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ z >> 27) * UINT64_C(0x94d049bb133111eb);
    return z ^ z >> 31;
  }
  std::vector<double> drawn(size_t layer, size_t head, size_t n) const {
    std::vector<double> numbers;
    for (size_t j = 0; j < n; ++j) {
      numbers.push_back(
          std::ldexp(static_cast<double>(mix(mix(mix(mix(seed_) ^ layer) ^ head) ^ j) >> 11), -53));
    }
    return numbers;
  }

  std::vector<std::vector<double>> unit_scores(const std::vector<LayerScores>& layers,
                                               const std::vector<size_t>& unit) const {
    const size_t heads = per_head() ? layers[0].importance.size() : 1;
    const size_t n = layers[0].importance[0].size();
    std::vector<std::vector<double>> scores(heads, std::vector<double>(n));
    if (name_ == "streaming") return scores;
    if (name_ == "random") {
      for (size_t h = 0; h < heads; ++h) scores[h] = drawn(unit[0], h, n);
      return scores;
    }
    if (scorer_ != nullptr) {
      for (size_t h = 0; h < heads; ++h) scores[h] = alike(layers, unit, h);
      return scores;
    }
    if (name_ == "tgv") return {guided_scores(layers, unit)};
    for (size_t h = 0; h < heads; ++h) {
      scores[h] = attention_scores(layers, unit, per_head() ? static_cast<int>(h) : -1);
      if (mixes_) scores[h] = mixed(layers, unit, pooled(scores[h]), h);
    }
    return scores;
  }

  /// By attention, of one kv_head or, with -1, of all.
  std::vector<double> attention_scores(const std::vector<LayerScores>& layers,
                                       const std::vector<size_t>& unit, int of_head) const {
    const size_t n = layers[0].importance[0].size();
    std::vector<double> scores(n);
    for (const size_t layer : unit) {
      std::vector<double> of_layer(n);
      for (size_t head = 0; head < layers[layer].importance.size(); ++head) {
        if (of_head >= 0 && head != static_cast<size_t>(of_head)) continue;
        for (size_t j = 0; j < n; ++j) of_layer[j] += layers[layer].importance[head][j];
      }
      of_layer = in_proportion(of_layer);
      for (size_t j = 0; j < n && means_; ++j) of_layer[j] /= static_cast<double>(n - j);
      if (means_) of_layer = in_proportion(of_layer);
      for (size_t j = 0; j < n; ++j) scores[j] += of_layer[j];
    }
    return in_proportion(scores);
  }

  /// The mean of lists that are brought to one mean magnitude: of a kv_head, or of all.
  std::vector<double> alike(const std::vector<LayerScores>& layers, const std::vector<size_t>& unit,
                            size_t kv_head) const {
    std::vector<std::vector<double>> lists;
    for (const size_t layer : unit) {
      for (size_t h = 0; h < layers[layer].row_scores.size(); ++h) {
        if (!per_head() || h == kv_head) lists.push_back(layers[layer].row_scores[h]);
      }
    }
    std::vector<double> mean(lists[0].size());
    for (const std::vector<double>& list : lists) {
      double magnitude = 0;
      for (const double x : list) magnitude += std::abs(x);
      for (size_t j = 0; j < list.size() && magnitude > 0; ++j) {
        mean[j] += list[j] / (magnitude / static_cast<double>(list.size()));
      }
    }
    for (double& x : mean) x /= static_cast<double>(lists.size());
    return mean;
  }

  /// TGV-KV: some text follows some picture.
  static bool is_guided(const LayerScores& layer) {
    return layer.modality.back() < 0 &&
           std::ranges::any_of(layer.modality, [](int16_t tag) { return tag >= 0; });
  }

  /// What a layer's questions look at, (n,): all alike, or by what each gets of those behind it.
  static std::vector<double> looked_at(const LayerScores& layer, bool weighted) {
    std::vector<double> got(layer.modality.size()), weight(layer.modality.size(), 1.0);
    const size_t first = layer.questions.front().first;
    const size_t rows = layer.questions.back().first - first + 1;
    const double heads = static_cast<double>(layer.questions.size()) / static_cast<double>(rows);
    for (int pass = 0; pass < (weighted ? 2 : 1); ++pass) {
      std::fill(got.begin(), got.end(), 0.0);
      for (const auto& [row, looks] : layer.questions) {
        for (size_t j = 0; j < looks.size(); ++j) got[j] += weight[row] * looks[j] / heads;
      }
      for (size_t i = first; i < got.size(); ++i) {
        weight[i] = got[i] / static_cast<double>(got.size() - i);
      }
    }
    return got;
  }

  static std::vector<double> guided_scores(const std::vector<LayerScores>& layers,
                                           const std::vector<size_t>& unit) {
    const LayerScores& one = layers[unit[0]];
    std::vector<double> text(one.modality.size()), visual(one.modality.size());
    for (const size_t layer : unit) {
      const std::vector<double> plain = looked_at(layers[layer], false);
      const std::vector<double> weighted = looked_at(layers[layer], true);
      for (size_t j = 0; j < text.size(); ++j) {
        text[j] += plain[j];
        visual[j] += weighted[j];
      }
    }
    text = in_proportion(text);
    visual = in_proportion(visual);
    if (!is_guided(one)) return text;
    for (size_t j = 0; j < text.size(); ++j) {
      text[j] = one.modality[j] < 0 ? 1 + text[j] : visual[j];
    }
    return text;
  }

  /// TGV-KV's tokens of every unit.
  std::vector<int> guided_budgets(const std::vector<LayerScores>& layers,
                                  const std::vector<std::vector<size_t>>& units, int n) const {
    std::vector<double> share;  // (layers,)
    for (const LayerScores& layer : layers) {
      const std::vector<double> looks = looked_at(layer, false);
      double sum = 0;
      for (size_t j = 0; j < looks.size(); ++j) sum += layer.modality[j] >= 0 ? looks[j] : 0;
      share.push_back(is_guided(layer) ? sum : 0);
    }
    for (const auto& unit : units) {
      double mean = 0;
      for (const size_t layer : unit) mean += share[layer] / static_cast<double>(unit.size());
      for (const size_t layer : unit) share[layer] = mean;
    }
    const double all = std::accumulate(share.begin(), share.end(), 0.0);
    const auto count = static_cast<double>(layers.size());
    for (double& x : share) x = all > 0 ? x / all : 1 / count;
    std::vector<int> kept(units.size());
    if (options_.text("budgets") == "clipped") {
      for (size_t u = 0; u < units.size(); ++u) {
        const auto forget = static_cast<float>(1 - count * keep_ * share[units[u][0]]);
        const double dropped = std::nearbyint(static_cast<double>(forget) * n);
        kept[u] = std::min(n, std::max(sinks_ + 1, n - static_cast<int>(std::max(0.0, dropped))));
      }
      return kept;
    }
    const int least = std::min(n, sinks_ + 2);
    const double total = std::clamp(std::nearbyint(keep_ * count * n), count * least, count * n);
    std::vector<size_t> order(share.size());  // poured() goes from the largest share down
    std::iota(order.begin(), order.end(), size_t{0});
    std::ranges::stable_sort(order, [&](size_t a, size_t b) { return share[a] > share[b]; });
    std::vector<double> sorted;
    for (const size_t layer : order) sorted.push_back(share[layer]);
    const std::vector<double> of_sorted = poured(sorted, total, n, least);
    std::vector<double> rows(share.size());
    for (size_t i = 0; i < order.size(); ++i) rows[order[i]] = of_sorted[i];
    double left = total;
    std::vector<size_t> first(units.size());  // units by their fractions
    std::iota(first.begin(), first.end(), size_t{0});
    std::vector<double> fraction(units.size());
    for (size_t u = 0; u < units.size(); ++u) {
      const double own = rows[units[u][0]];
      kept[u] = static_cast<int>(std::floor(own + 1e-7));
      fraction[u] = std::nearbyint((own - kept[u]) * 1e6);
      left -= static_cast<double>(kept[u]) * static_cast<double>(units[u].size());
    }
    std::ranges::stable_sort(first, [&](size_t a, size_t b) { return fraction[a] > fraction[b]; });
    for (bool added = true; added;) {
      added = false;
      for (const size_t u : first) {
        if (kept[u] == n || left < static_cast<double>(units[u].size())) continue;
        ++kept[u];
        left -= static_cast<double>(units[u].size());
        added = true;
      }
    }
    return kept;
  }

  /// MixKV's scores from pooled attention: of a kv_head, or of all.
  std::vector<double> mixed(const std::vector<LayerScores>& layers, const std::vector<size_t>& unit,
                            const std::vector<double>& pool, size_t kv_head) const {
    const size_t n = pool.size();
    const size_t before = n - std::min(n, static_cast<size_t>(window_));
    double mean = 0;
    for (size_t j = 0; j < before; ++j) mean += pool[j] / static_cast<double>(before);
    std::vector<double> made(n);
    for (const size_t layer : unit) {
      for (size_t h = 0; h < layers[layer].row_scores.size(); ++h) {
        if (per_head() && h != kv_head) continue;
        const std::vector<double>& own = layers[layer].row_scores[h];
        for (size_t j = 0; j < before; ++j) made[j] += own[n - 1] * (pool[j] + mean * own[j]);
      }
    }
    std::fill(made.begin() + static_cast<std::ptrdiff_t>(before), made.end(), 1e6);
    return made;
  }

  std::vector<int> budgets(const std::vector<LayerScores>& layers,
                           const std::vector<std::vector<size_t>>& units, int n) const {
    const double wanted = keep_ * n;
    const int floored = static_cast<int>(std::floor(wanted + 1e-9));
    const int nearest = static_cast<int>(std::nearbyint(wanted));
    std::vector<int> kept(units.size(), n);
    if (name_ == "tgv") return guided_budgets(layers, units, n);
    if (name_ == "prefixkv" || name_ == "vlcache") {
      std::vector<std::vector<double>> curves;
      std::vector<int> weights;
      for (size_t u = 0; u < units.size(); ++u) {
        curves.push_back(attention_scores(layers, units[u], /*head=*/-1));
        weights.push_back(static_cast<int>(units[u].size()));
      }
      const auto total =
          static_cast<int64_t>(std::nearbyint(keep_ * static_cast<double>(layers.size()) * n));
      Budgets split(curves, weights);
      const int least = name_ == "prefixkv" ? sinks_ + 2 : sinks_ + 1;
      if (name_ == "prefixkv") {
        split.add_up_to(total);
      } else {
        split.rows = by_density(layers, units, n);
      }
      split.clamp(least);
      split.take_down_to(total, least);
      split.add_up_to(total);
      return split.rows;
    }
    if (name_ == "pyramidinfer") {
      const std::vector<int> of_layers = pyramid(layers.size(), n);
      for (size_t u = 0; u < units.size(); ++u) {
        int sum = 0;
        for (const size_t layer : units[u]) sum += of_layers[layer];
        kept[u] = sum / static_cast<int>(units[u].size());
      }
      return kept;
    }
    for (size_t u = 0; u < units.size(); ++u) {
      int rows = std::max(nearest, sinks_ + 2);  // uniform, elastic, random
      if (name_ == "streaming") rows = streaming_rows(n);
      if (name_ == "h2o") rows = std::max(floored, 1);
      if (name_ == "tova" || scorer_ != nullptr) rows = std::max(floored, sinks_ + 1);
      if (name_ == "snapkv" || mixes_) rows = std::max(floored, window_);
      if (name_ == "pyramidkv") {
        double sum = 0;
        for (const size_t layer : units[u]) sum += on_the_line(layer, layers.size(), n);
        rows = static_cast<int>(std::nearbyint(sum / static_cast<double>(units[u].size())));
      }
      kept[u] = std::min(n, rows);
    }
    return kept;
  }

  /// PyramidInfer's observers.
  int recent_rows(int n) const {
    return std::min(n, 1 + static_cast<int>(std::floor(std::min(recent_, keep_ / 2) * n + 1e-9)));
  }

  /// What PyramidInfer's layers keep of the context beside the first one.
  std::vector<double> pyramid_shares(size_t layers) const {
    std::vector<double> share(layers, 1.0);
    for (size_t l = 1; l < layers; ++l) {
      const double angle =
          std::acos(-1.0) * static_cast<double>(l - 1) / static_cast<double>(layers);
      const double decay = options_.real("decay");
      share[l] = share[l - 1] * (options_.text("schedule") == "cosine"
                                     ? decay + (1 - decay) * (1 + std::cos(angle)) / 2
                                     : decay);
    }
    return share;
  }

  /// `total` rows in proportion to `share`, but at least `least` and at most `all` of each: with
  /// the first `full` at `all` and the last `bare` at `least`, the scale of the others follows.
  static std::vector<double> poured(const std::vector<double>& share, double total, int all,
                                    int least) {
    const size_t layers = share.size();
    std::vector<double> rows(layers, least);
    for (size_t full = 0; full <= layers; ++full) {
      for (size_t end = full; end <= layers; ++end) {  // of the others
        const double left =
            total - static_cast<double>(full) * all - static_cast<double>(layers - end) * least;
        double shares = 0;
        for (size_t l = full; l < end; ++l) shares += share[l];
        const double scale = shares > 0 ? left / shares : 0;
        std::vector<double> tried(layers, least);
        bool fits = shares > 0 || std::abs(left) < 1e-6;
        for (size_t l = 0; l < layers; ++l) {
          const double own = scale * share[l];
          if (l < end) tried[l] = l < full ? all : own;
          if (full == end) continue;
          if (l < full ? own < all - 1e-6 : own > all + 1e-6) fits = false;
          if (l < end ? own < least - 1e-6 : own > least + 1e-6) fits = false;
        }
        if (fits) rows = tried;
      }
    }
    return rows;
  }

  /// PyramidInfer's rows of every layer (docs/formulas.md, "PyramidInfer").
  std::vector<int> pyramid(size_t layers, int n) const {
    const int recent = recent_rows(n);
    const int all = n - recent;
    const double total = std::nearbyint(keep_ * static_cast<double>(layers) * n) -
                         static_cast<double>(layers) * recent;
    const int room = std::max(0, static_cast<int>(total / static_cast<double>(layers)));
    const int sinks = std::max(std::min(sinks_, room), sinks_ + 1 - recent);
    const int least = std::min(all, std::max(options_.integer("least"), sinks));
    return with_rest(poured(pyramid_shares(layers), total, all, least), total, all, recent);
  }

  /// Rounded down, the rows that are left over going to the first layers; and the recent rows.
  static std::vector<int> with_rest(const std::vector<double>& rows, double total, int all,
                                    int recent) {
    std::vector<int> kept;
    for (const double x : rows) kept.push_back(static_cast<int>(std::floor(x + 1e-6)));
    double rest = total - std::accumulate(kept.begin(), kept.end(), 0.0);
    for (int& of_layer : kept) {
      if (rest >= 1 && of_layer < all) {
        ++of_layer;
        --rest;
      }
      of_layer += recent;
    }
    return kept;
  }

  int streaming_rows(int tokens) const {
    return std::max(static_cast<int>(std::floor(keep_ * tokens + 1e-9)), sinks_ + 1);
  }

  /// PyramidKV's rows of a layer (docs/formulas.md, "PyramidKV").
  int on_the_line(size_t layer, size_t layers, int n) const {
    const double mean = keep_ * n;
    double most = 2 * mean - mean / beta_;
    if (most >= n - window_) most = n - window_;
    const double least = 2 * mean - most;
    if (layers < 2 || most > n || least > most || least < window_) {
      return std::min(n, std::max(static_cast<int>(std::nearbyint(mean)), window_));
    }
    return static_cast<int>(std::nearbyint(most - static_cast<double>(layer) * (most - least) /
                                                      static_cast<double>(layers - 1)));
  }

  /// VL-Cache's rows before they are brought to the total (docs/formulas.md, "VL-Cache").
  std::vector<int> by_density(const std::vector<LayerScores>& layers,
                              const std::vector<std::vector<size_t>>& units, int n) const {
    double all = 0;
    for (const LayerScores& layer : layers) all += 1 - layer.sparsity;
    std::vector<int> rows;
    for (const auto& unit : units) {
      double mean = 0;
      for (const size_t layer : unit) {
        mean += (1 - layers[layer].sparsity) / static_cast<double>(unit.size());
      }
      const double share = mean / all * keep_ * static_cast<double>(layers.size());
      rows.push_back(static_cast<int>(std::nearbyint(std::clamp(share, 0.01, 1.0) * n)));
    }
    return rows;
  }

  /// The rows of one head that stay.
  std::vector<int> chosen(const std::vector<double>& scores, int kept) const {
    if (name_ == "streaming") return best_rows(scores, kept, sinks_, kept - sinks_);
    if (name_ == "tova") return best_rows(scores, kept, sinks_, tail(kept));
    if (name_ == "h2o") return best_rows(scores, kept, 0, (kept + 1) / 2);
    if (name_ == "pyramidinfer") {
      return best_rows(scores, kept, sinks_,
                       std::min(recent_rows(static_cast<int>(scores.size())), kept - sinks_));
    }
    if (name_ == "vlcache") {
      const int recent = static_cast<int>(std::ceil(recent_ * kept - 1e-9));
      return best_rows(scores, kept, sinks_,
                       std::min(std::max(tail(kept), recent), std::max(1, kept - sinks_)));
    }
    if (window_ == 0) return best_rows(scores, kept, sinks_, tail(kept));
    if (mixes_) return best_rows(scores, kept, 0, window_);
    return best_rows(pooled(scores), kept, 0, window_);
  }

  /// Slots before the window, averaged over their neighbours there; beyond the ends lie zeros. The
  /// window is above them all.
  std::vector<double> pooled(const std::vector<double>& scores) const {
    const auto n = static_cast<int>(scores.size());
    std::vector<double> pool(scores.size());
    for (int j = 0; j < n - window_; ++j) {
      for (int i = j - kernel_ / 2; i <= j + kernel_ / 2; ++i) {
        if (i < 0 || i >= n - window_) continue;
        pool[static_cast<size_t>(j)] += scores[static_cast<size_t>(i)] / kernel_;
      }
    }
    for (int j = std::max(0, n - window_); j < n; ++j) pool[static_cast<size_t>(j)] = 2;
    return pool;
  }

  std::string name_;
  OptionValues options_;
  RowScorer scorer_ = nullptr;
  double keep_;
  int sinks_ = 0, last_ = 0, window_ = 0, kernel_ = 0, distance_ = 0;
  std::string evict_;
  uint64_t seed_ = 0;
  bool means_ = false;
  bool mixes_ = false;
  bool head_shared_ = false, proportional_ = false, rerotates_ = false;
  double beta_ = 0, recent_ = 0;
  Merge merge_ = Merge::kNone;
};

}  // namespace kvlm::reference
