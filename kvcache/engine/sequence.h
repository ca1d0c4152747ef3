#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "kernels/base/buffer.h"
#include "kernels/base/readback.h"
#include "kvcache/arena.h"
#include "kvcache/kv_cache.h"
#include "kvcache/plan/cache_plan.h"
#include "kvcache/plane/plane.h"

namespace kvlm {

/// What one store of one KV head holds.
struct StorePlanes {
  Plane keys;
  Plane values;
  Plane protected_values;  ///< VidKV: packed values of protected rows

  /// Nothing is packed (`protects`: nor could be on protected_values), and row by row keys and
  /// values are in the same places of their rings.
  bool full_alike(bool protects) const noexcept {
    return keys.packed() + values.packed() == 0 && (!protects || protected_values.packed() == 0) &&
           keys.ring.before_wrap() == values.ring.before_wrap();
  }
  Plane& plane(KvSide side) noexcept { return side == KvSide::kKeys ? keys : values; }
  const Plane& plane(KvSide side) const noexcept { return side == KvSide::kKeys ? keys : values; }
};

/// One KV head of one layer of one sequence. Its slots are those of kVisual, then those of kRest;
/// the order of the tokens is kept beside.
struct HeadState {
  std::array<StorePlanes, kStores> stores;
  std::array<HeadFacts, kStores> facts;
  /// Bit i: value slot i of kRest is protected, packed or not; null: none ever is. KV heads that
  /// keep the same slots have it in common. On the host.
  uint64_t* protected_bits = nullptr;
  /// The modality tag of each slot, in the order of the tokens.
  std::vector<int16_t> tags;
  /// LayerSelection.scores of the prompt's rows that are still held, where evict() is asked about
  /// this KV head and goes by them. On the host.
  std::vector<float> scores;
  /// (slots,) attention weights, summed over steps or of the newest; null: not wanted.
  float* weights = nullptr;

  int slots() const noexcept { return stores[kVisual].keys.slots() + stores[kRest].keys.slots(); }
  /// Packed value slots of kRest.
  int packed_values() const noexcept {
    return stores[kRest].values.packed() + stores[kRest].protected_values.packed();
  }
  Plane& plane(size_t store, KvSide side) noexcept { return stores[store].plane(side); }
  const Plane& plane(size_t store, KvSide side) const noexcept { return stores[store].plane(side); }
  /// Forgets everything; lists keep their memory for the next sequence.
  void clear() noexcept {
    for (StorePlanes& planes : stores) {
      for (Plane* plane : {&planes.keys, &planes.values, &planes.protected_values}) plane->reset();
    }
    for (HeadFacts& of_store : facts) of_store.key_channels.clear();
    protected_bits = nullptr;
    tags.clear();
    scores.clear();
    weights = nullptr;
  }
};

/// One layer of one sequence.
struct LayerState {
  std::vector<HeadState> heads;  ///< (kv_heads,)
  /// (kv_heads,) rows of the first prompt that went to each store.
  std::vector<std::array<int, kStores>> counts;
  /// KV heads whose window of a store and side is full, since a row was appended last.
  std::array<std::array<int, 2>, kStores> due{};
  size_t plane_bytes = 0;  ///< of all planes
  int kept = 0;            ///< slots when the first prompt had ended
  double forget = 0;
  std::array<size_t, kStores> mask_bytes{};  ///< of what quantizers have learned
  int protection_bitmaps = 0;                ///< bitmaps of protected slots, in the arena
  std::vector<uint64_t> protection;          ///< their place where the arena is on a GPU
  // StreamingLLM's re-rotation: the sinks' keys as they came, and by how much they were rotated.
  float* sinks = nullptr;  ///< (kv_heads, sink_rows, head_dim), in the arena
  int sink_rows = 0;
  int rotated_by = 0;

  /// Forgets everything; KV heads keep their memory for the next sequence.
  void clear() noexcept {
    std::vector<HeadState> emptied = std::move(heads);
    for (HeadState& head : emptied) head.clear();
    *this = {};
    heads = std::move(emptied);
  }
};

/// A first prompt that is under way.
struct PromptState {
  ArenaExtent staging;             ///< full rows of Layouts::staged_layers()
  int staged = 0;                  ///< rows complete in every layer
  std::vector<double> importance;  ///< (staged_layers, kv_heads, prompt rows)
  std::vector<double> means;     ///< (staged_layers, prompt rows) over KV heads, if rules see those
  Buffer sums;                   ///< `importance` on a GPU; room for means
  std::array<Readback, 2> read;  ///< of one group of layers and the next: what rules select by
  size_t asked = 0;              ///< so often `read` was asked for, by turns
  size_t had = 0;                ///< and waited for
  std::vector<double> sparsity;  ///< (staged_layers,)
  std::vector<double> row_scores;  ///< as importance
  std::array<int32_t, 2> summed_rows{};
  std::vector<float> protection;  ///< (prompt rows,) VidKV's scores
};

/// Layers that drop rows alike: their Retention::evict() has seen the same so far.
struct DroppingLayers {
  int slots = 0;   ///< of a KV head
  int scored = 0;  ///< rows of the prompt that are left, by scores
  int kept = 0;
  int behind_pictures = 0;  ///< the first slot behind all pictures, if these are stored apart
  double forget = 0;
  bool turned = false;  ///< sinks have been
  int chosen_by = -1;   ///< the layer by whose scores the host chooses; -1: by none

  bool operator==(const DroppingLayers&) const = default;
};

/// Planes of kRest whose rows are counted alike, keys or values.
struct GainedRows {
  int dropping = -1;  ///< which of Sequence.dropping; -1: no rows are dropped
  KvSide side = KvSide::kKeys;
  const FlushRule* window = nullptr;  ///< null: rows are never packed
  bool host = false;                  ///< the host flushes the window
  int full = 0;                       ///< full rows of each
  size_t row_bytes = 0;
  size_t packed_bytes = 0;  ///< of the rows of a flush, packed
  size_t planes = 1;

  bool alike(const GainedRows& other) const noexcept {
    return dropping == other.dropping && side == other.side && window == other.window &&
           host == other.host && full == other.full && row_bytes == other.row_bytes &&
           packed_bytes == other.packed_bytes;
  }
};

/// A conversation: what a cache holds of it.
struct Sequence {
  // What a step of decode reads comes first: a batch has hundreds of sequences.
  bool open = false;
  bool prompted = false;  ///< the first prompt has ended
  bool on_gpu = false;    ///< a DecodeTable holds it
  /// on_gpu: the host counts its rows at the end of every step, packs and drops them, and tells the
  /// table anew.
  bool told_anew = false;
  bool placed = false;  ///< its lanes are when they are on_gpu (TableLane.placed)
  /// Where a table drops packed rows: places of a side of a KV head (Plane::places()), at most; -1:
  /// not counted yet. Counted once: a batch has hundreds of sequences, of thousands of KV heads.
  int places = -1;
  SequenceSize size;
  int rows = 0;                         ///< tokens fed, complete in every layer
  int uncounted = 0;                    ///< the newest of them, which planes do not count yet
  int prompt_rows = 0;                  ///< of the first prompt
  std::shared_ptr<ArenaExtent> memory;  ///< its own, whose blocks forks may read
  // on_gpu, where the table counts its rows:
  std::vector<GainedRows> gained;        ///< what each of them adds
  std::vector<DroppingLayers> dropping;  ///< where rows are dropped
  std::vector<int16_t> dropping_of;      ///< the same: (layers,) which of them each layer is of
  /// (uncounted, dropping) what was said to the GPU after each row (DecodeTable::evict()).
  std::vector<int> dropped;
  /// (layers, kv_heads) while their rows lie as a DecodeTable has dropped them:
  /// WeighedRows.came, of rows that are numbered as `tags` are. On the host, once it has asked.
  std::vector<std::vector<int>> came;
  size_t used_when_placed = 0;  ///< on_gpu: bytes of `memory` then
  int host_flushes_at = 0;      ///< placed: uncounted rows with which a window may be full
  /// Bytes of `memory` that layers have been given: for packed blocks, from its begin on, and for
  /// all else, from its end back.
  size_t placed_blocks = 0;
  size_t placed_rest = 0;
  size_t shared = 0;  ///< bytes of blocks in `memory` that were shared
  /// Memory of sequences, open or not, whose blocks this one reads.
  std::vector<std::shared_ptr<ArenaExtent>> read;
  bool goes_on_elsewhere = false;  ///< blocks that it packs follow blocks that it shares
  /// Of a sequence that is closed, empty ones for the next.
  std::vector<LayerState> layers;
  /// (rows,) tags up to the end of the newest prompt: what follows is text. With retention, of the
  /// first prompt while it is under way; KV heads have their own afterwards.
  std::vector<int16_t> modality;
  PromptState prompt;

  /// The GPU drops packed rows: what the host knows of planes is from before.
  bool drops_on_gpu() const noexcept { return on_gpu && placed; }
  /// Slots of a KV head of a layer, whoever counts them.
  int slots_of(size_t layer) const noexcept {
    if (on_gpu && !dropping.empty()) {
      return dropping[static_cast<size_t>(dropping_of[layer])].slots;
    }
    return layers[layer].heads[0].slots() + (on_gpu ? uncounted : 0);
  }
};

/// The largest step that open sequences can make: what workspaces are made for.
struct Workload {
  size_t slots = 0;  ///< numbers of sequences are below
  size_t sequences = 0;
  size_t heads = 0;    ///< KV heads of one layer, over all sequences
  size_t rows = 0;     ///< the most rows that those can hold
  size_t longest = 0;  ///< the most rows of one of them
};

}  // namespace kvlm
