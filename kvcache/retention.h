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

/// Which rows of a prompt's attention a retention rule sums, and what else it watches
/// (docs/formulas.md, "Importance").
struct ImportanceNeeds {
  enum class Rows : uint8_t {
    kNone,
    kAll,         ///< every row
    kLast,        ///< the last last_of(n) rows
    kPostVision,  ///< rows after the last visual row; the last min(n, 32) if there are none
  };
  /// The attention weights of generated rows that evict() goes by, averaged over query heads.
  enum class DecodeWeights : uint8_t {
    kNone,
    kOfStep,  ///< this step's alone (TOVA); of a later prompt, those of its last row
    kSummed,  ///< the prompt's, and those of all steps since (H2O)
  };
  Rows rows = Rows::kNone;
  int last_rows = 0;
  double last_share = 0;  ///< of the prompt's rows, on top of last_rows, rounded down
  /// kLast: what the newest row weighs in the sums; the first weighs 1 (summed_weight()).
  float newest_weight = 1;
  bool sparsity = false;  ///< VL-Cache: the share of small entries
  DecodeWeights decode_weights = DecodeWeights::kNone;
  bool row_scores = false;  ///< score() of every layer
  bool queries =
      false;  ///< score(), if it is asked for, sees queries: a first prompt must come in one pass

  /// kLast: how many of n rows.
  int last_of(int n) const noexcept {
    return last_rows + static_cast<int>(std::floor(last_share * n + 1e-9));
  }
  /// What is kept depends on what the prompt's rows hold, not on their number alone.
  bool sees_rows() const noexcept { return rows != Rows::kNone || row_scores; }
  /// It depends on how its queries attend.
  bool sees_queries() const noexcept { return rows != Rows::kNone || queries; }
};

/// A layer when a prompt has ended and all its rows are stored, where they lie.
struct LayerRows {
  const CacheShape* shape = nullptr;
  std::span<const StoredRows> keys;    ///< (kv_heads,) of n rows each, after RoPE
  std::span<const StoredRows> values;  ///< (kv_heads,)
  ConstTensorView queries;  ///< (n, q_heads, head_dim) after RoPE; empty unless asked for
  float scale = 1;          ///< of q . k
};

/// A prompt that has ended, as a retention rule sees it.
struct PromptView {
  const CacheShape* shape = nullptr;
  int rows = 0;  ///< n
  /// The one layer to select for, all that importance, sparsity and row_scores hold; -1: all
  /// layers.
  int layer = -1;
  std::span<const int16_t> modality;  ///< (n,)
  /// (layers, importance_heads(), n) as QueuedSums.sums; may be empty.
  std::span<const double> importance;
  bool head_means = false;               ///< importance is the mean over kv_heads, (layers, 1, n)
  std::span<const double> sparsity;      ///< (layers,) share of small entries; may be empty
  std::span<const double> row_scores;    ///< (layers, kv_heads, n) of score(); may be empty
  std::span<const int32_t> summed_rows;  ///< (2,) first and last + 1 row that importance sums

  int importance_heads() const noexcept { return head_means ? 1 : shape->kv_heads; }
};

/// The slots that a layer keeps.
struct LayerSelection {
  /// One list for all kv_heads, or kv_heads lists of one length: ascending prompt rows.
  std::vector<std::vector<int32_t>> slots;
  /// Share of rows that the layer forgets, steering decode; 1 - kept / n as the rule defines it.
  double forget = 0;
  /// As slots: what each was chosen by, for rules whose decode goes by it; else empty.
  std::vector<std::vector<float>> scores = {};
  /// Of each list, the first and the last slots that no dropped row is merged into (kPosition).
  int lone_first = 0;
  int lone_last = 0;
  int kept() const noexcept { return static_cast<int>(slots.front().size()); }
};

/// A layer of a sequence after a row was appended and attended, in decode.
struct DecodeView {
  int rows = 0;         ///< n, the new row included
  int prompt_rows = 0;  ///< N
  int step = 0;         ///< t: 1 for the first row after the prompt
  int kept = 0;         ///< m_l: rows kept when the prompt ended
  double forget = 0;    ///< LayerSelection.forget
  int scored = 0;       ///< rows of the prompt that are still held, if they have scores; else 0
  /// (n,) needs().decode_weights of the slots of one kv_head, or their mean over kv_heads if not
  /// per_head(); empty if not asked for.
  std::span<const float> weights;
};

/// Which rows stay: once when a prompt has ended, then row by row. Stateless once made. Rows move,
/// they are never rotated again except by a rule that says rerotates().
class Retention {
 public:
  virtual ~Retention() = default;

  virtual ImportanceNeeds needs() const noexcept = 0;
  /// Every kv_head keeps rows of its own (equally many). A rule that says no sees the mean
  /// importance of KV heads alone, unless it goes on summing in decode.
  virtual bool per_head() const noexcept { return false; }
  /// Every layer keeps the same slots, now and in decode, whatever attention says (StreamingLLM).
  virtual bool same_in_all_layers() const noexcept { return false; }
  /// A layer's choice depends on other layers, so that it is made after the last one.
  virtual bool joint() const noexcept { return false; }

  /// If needs().row_scores: what the rows of a layer are worth by what they hold. Computed on the
  /// device where they lie; waits for the result.
  ///   scores  (kv_heads, n) on the host
  virtual void score(const LayerRows&, std::span<double> /*scores*/, Stream&) const {}

  /// The selection of every layer if joint() (prompt.layer is -1), else of prompt.layer alone: a
  /// vector of one. Keeps the last row. Layers of one pair (pairs[l] == pairs[l'], empty: none) get
  /// one selection (docs/formulas.md, "Shared codes"); rules whose sets differ by layer are then
  /// asked for all layers at once as if joint(). Called for several layers at once, by threads of
  /// the stream's pool.
  virtual std::vector<LayerSelection> select(const PromptView& prompt,
                                             std::span<const int> pairs) const = 0;
  virtual MergeRule merge() const noexcept { return MergeRule::kNone; }

  /// evict() may name a slot.
  virtual bool evicts() const noexcept { return false; }
  /// The slot to drop after this step's attention, in the order of the tokens, or kNoSlot, or
  /// kLeastScore: the one of least LayerSelection.scores of those that least_weight() names. Unless
  /// view.weights decide, all KV heads of a layer get the same answer. Called once a step and layer
  /// (and kv_head, if per_head()). Allocates nothing.
  virtual int evict(const DecodeView&) const noexcept { return kNoSlot; }
  /// evict() may be kLeastScore.
  virtual bool evicts_by_score() const noexcept { return false; }
  /// Which slots evict() chooses from where it drops least_weighed() of view.weights, in every step
  /// that leaves a layer more than `kept` slots, or of scores, if it says kLeastScore. A view
  /// without weights will do; a GPU that keeps the weights, or the scores, then chooses itself.
  /// Null: evict() goes by something else, also in this view alone.
  virtual std::optional<LeastWeight> least_weight(const DecodeView&) const noexcept {
    return std::nullopt;
  }

  /// The most rows that a layer ever holds, the newest included, after `kept` of prompt_rows were
  /// kept and until max_rows tokens have been fed.
  virtual int peak_rows(int kept, double forget, int prompt_rows, int max_rows) const noexcept = 0;
  /// An upper bound, over all selections, of the sum over layers of peak_rows.
  virtual int64_t peak_rows_total(int layers, int prompt_rows, int max_rows) const noexcept {
    return int64_t{layers} * peak_rows_of_layer(layers, prompt_rows, max_rows);
  }
  /// An upper bound, over all selections and `layers`, of peak_rows. As if a layer kept everything,
  /// unless a rule knows better.
  virtual int peak_rows_of_layer(int /*layers*/, int prompt_rows, int max_rows) const noexcept {
    return peak_rows(prompt_rows, /*forget=*/0, prompt_rows, max_rows);
  }

  /// The keys of sinks are rotated forward as rows behind them go, so that all distances are those
  /// of ranks (docs/formulas.md, "StreamingLLM").
  virtual bool rerotates() const noexcept { return false; }
  /// rerotates(): the most first rows that turn, whose keys a layer keeps as they came.
  virtual int most_sinks() const noexcept { return 0; }
  /// The next position is the number of rows that layer 0 holds (PrefixKV's published code).
  virtual bool positions_from_layer0() const noexcept { return false; }
};

}  // namespace kvlm
