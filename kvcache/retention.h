#pragma once

#include <cmath>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "kernels/least_weight.h"
#include "kernels/merge_rows.h"
#include "kernels/row_scores.h"
#include "kvcache/kv_cache.h"

namespace kvlm {

/// Inputs that a retention rule needs: which of a prompt's queries to sum attention over
/// (docs/formulas.md, "Importance"), and others.
struct ImportanceNeeds {
  enum class Rows : uint8_t {
    kNone,
    kAll,   ///< all queries
    kLast,  ///< the last last_of(n) queries
    /// Queries after the last visual token; the last min(n, 32) if there are none
    kPostVision,
  };
  /// Attention weights that evict() uses in decode, averaged over query heads.
  enum class DecodeWeights : uint8_t {
    kNone,
    kOfStep,  ///< of this step (TOVA), or of the last token of a later prompt
    kSummed,  ///< summed over the prompt and all steps since (H2O)
  };
  Rows rows = Rows::kNone;
  int last_rows = 0;
  double last_share = 0;  ///< kLast: plus this share of the prompt, rounded down
  /// kLast: weight of the newest query in the sums; the first has 1 (summed_weight()).
  float newest_weight = 1;
  bool sparsity = false;  ///< VL-Cache: share of small entries
  /// A joint rule: PromptView.weighted, attention summed over the same queries, each weighted by
  /// the mean attention that it gets of those that see it (TGV-KV).
  bool weighted_sums = false;
  DecodeWeights decode_weights = DecodeWeights::kNone;
  bool row_scores = false;  ///< score() of every layer
  /// score() needs queries, so a first prompt must come in one pass.
  bool queries = false;

  /// kLast: number of queries for n rows.
  int last_of(int n) const noexcept {
    return last_rows + static_cast<int>(std::floor(last_share * n + 1e-9));
  }
  /// Selection depends on the prompt's contents, not only on its length.
  bool sees_rows() const noexcept { return rows != Rows::kNone || row_scores; }
  /// Selection depends on attention of the prompt's queries.
  bool sees_queries() const noexcept { return rows != Rows::kNone || queries; }
};

/// Stored tokens of one layer at the end of a prompt.
struct LayerRows {
  const CacheShape* shape = nullptr;
  std::span<const StoredRows> keys;    ///< (kv_heads,) of n rows each, after RoPE
  std::span<const StoredRows> values;  ///< (kv_heads,)
  ConstTensorView queries;             ///< (n, q_heads, head_dim) after RoPE, if requested
  float scale = 1;                     ///< of q . k
  int layer = 0;
  std::span<const int16_t> modality = {};  ///< (n,)
};

/// Input of Retention::select(): a prompt at its end.
struct PromptView {
  const CacheShape* shape = nullptr;
  int rows = 0;  ///< n
  /// The layer to select for, the only one in importance, sparsity and row_scores. -1: all layers.
  int layer = -1;
  std::span<const int16_t> modality;  ///< (n,)
  /// (layers, importance_heads(), n) as QueuedSums.sums; may be empty.
  std::span<const double> importance;
  /// As importance, if needs().weighted_sums; else empty.
  std::span<const double> weighted = {};
  /// Importance is the mean over kv_heads, (layers, 1, n)
  bool head_means = false;
  std::span<const double> sparsity;      ///< (layers,) share of small entries; may be empty
  std::span<const double> row_scores;    ///< (layers, kv_heads, n) of score(); may be empty
  std::span<const int32_t> summed_rows;  ///< (2,) first and end of the queries in importance

  int importance_heads() const noexcept { return head_means ? 1 : shape->kv_heads; }
};

/// The tokens that a layer keeps.
struct LayerSelection {
  /// Ascending prompt rows: one list for all kv_heads, or kv_heads lists of one length.
  std::vector<std::vector<int32_t>> slots;
  /// Share of tokens that the layer forgets, used in decode: 1 - kept / n as the rule defines it.
  double forget = 0;
  /// Newest slots that decode never evicts (TGV-KV: as many as were kept after the images).
  int tail = 1;
  /// Same shape as slots: their scores, if decode evicts by them; else empty.
  std::vector<std::vector<float>> scores = {};
  /// In each list, how many of the first and last slots nothing is merged into (kPosition).
  int lone_first = 0;
  int lone_last = 0;
  int kept() const noexcept { return static_cast<int>(slots.front().size()); }
};

/// Input of Retention::evict(): a layer in decode, after a new token was stored and attended.
struct DecodeView {
  int rows = 0;         ///< n, stored tokens including the new one
  int prompt_rows = 0;  ///< N
  int step = 0;         ///< t: 1 for the first token after the prompt
  int kept = 0;         ///< m_l: tokens kept when the prompt ended
  double forget = 0;    ///< LayerSelection.forget
  int tail = 1;         ///< LayerSelection.tail
  int scored = 0;       ///< prompt tokens left, if they have scores; else 0
  /// (n,) needs().decode_weights by slot, of one kv_head if per_head(), else the mean over
  /// kv_heads. Empty if not requested.
  std::span<const float> weights;
};

/// Which tokens stay: once at the end of a prompt, then token by token. Stateless. Kept keys are
/// not rotated to other positions unless rerotates().
class Retention {
 public:
  virtual ~Retention() = default;

  virtual ImportanceNeeds needs() const noexcept = 0;
  /// Every kv_head keeps its own tokens (equally many). If false, the rule sees the mean importance
  /// over KV heads, unless it continues the sums in decode.
  virtual bool per_head() const noexcept { return false; }
  /// All layers keep the same slots, in decode too, whatever the attention (StreamingLLM).
  virtual bool same_in_all_layers() const noexcept { return false; }
  /// A layer's selection depends on other layers, so it is made after the last one.
  virtual bool joint() const noexcept { return false; }

  /// If needs().row_scores: scores the stored tokens of a layer by their contents. Runs on the
  /// cache's device and waits for the result.
  ///   scores  (kv_heads, n) on the host
  virtual void score(const LayerRows&, std::span<double> /*scores*/, Stream&) const {}

  /// The selections of all layers if joint() (prompt.layer is -1), else of prompt.layer alone. The
  /// last prompt token must be kept. Layers of a pair (pairs[l] == pairs[l'], empty: none) get one
  /// selection (docs/formulas.md, "Shared codes"). With pairs, rules whose selections differ by
  /// layer are called as if joint(). May be called for several layers at once, by threads of the
  /// stream's pool.
  virtual std::vector<LayerSelection> select(const PromptView& prompt,
                                             std::span<const int> pairs) const = 0;
  virtual MergeRule merge() const noexcept { return MergeRule::kNone; }

  /// evict() may return a slot.
  virtual bool evicts() const noexcept { return false; }
  /// The slot to evict after this step's attention, counted in token order, or kNoSlot. kLeastScore
  /// means the slot of least LayerSelection.scores among those of least_weight(). Unless it uses
  /// view.weights, the result is the same for all KV heads of a layer. Called once per step and
  /// layer (and kv_head, if per_head()). Allocates nothing.
  virtual int evict(const DecodeView&) const noexcept { return kNoSlot; }
  /// evict() may return kLeastScore.
  virtual bool evicts_by_score() const noexcept { return false; }
  /// The candidates of evict(), if it evicts the one of least view.weights (least_weighed()) in
  /// every step that leaves more than `kept` slots, or returns kLeastScore. A view without weights
  /// suffices: a GPU that keeps weights or scores then chooses itself. Null: evict() chooses
  /// otherwise for this view.
  virtual std::optional<LeastWeight> least_weight(const DecodeView&) const noexcept {
    return std::nullopt;
  }

  /// Most tokens that a layer holds at any time, the newest included: from `kept` of prompt_rows at
  /// the end of the prompt until max_rows tokens were fed.
  virtual int peak_rows(int kept, double forget, int prompt_rows, int max_rows) const noexcept = 0;
  /// Upper bound of the sum of peak_rows over layers, for any selection.
  virtual int64_t peak_rows_total(int layers, int prompt_rows, int max_rows) const noexcept {
    return int64_t{layers} * peak_rows_of_layer(layers, prompt_rows, max_rows);
  }
  /// Upper bound of peak_rows of any layer, for any selection. By default, of a layer that keeps
  /// everything.
  virtual int peak_rows_of_layer(int /*layers*/, int prompt_rows, int max_rows) const noexcept {
    return peak_rows(prompt_rows, /*forget=*/0, prompt_rows, max_rows);
  }

  /// When later tokens are evicted, keys of the sinks are rotated forward, so that all distances
  /// are those of ranks (docs/formulas.md, "StreamingLLM").
  virtual bool rerotates() const noexcept { return false; }
  /// If rerotates(): the most sinks, of which a layer also stores the original keys.
  virtual int most_sinks() const noexcept { return 0; }
  /// The next position is the number of tokens in layer 0 (PrefixKV's published code).
  virtual bool positions_from_layer0() const noexcept { return false; }
};

}  // namespace kvlm
