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
#include "kvcache/buffer/kv_buffer.h"
#include "kvcache/kv_cache.h"
#include "kvcache/plan/cache_plan.h"

namespace kvlm {

/// K and V buffers of one KV head for one store (visual tokens, or the rest).
struct StoreBuffers {
  KvBuffer keys;
  KvBuffer values;
  /// VidKV: packed values of protected tokens
  KvBuffer protected_values;

  /// Nothing is packed (with `protects`: nor in protected_values), and each token's key and value
  /// have the same index in their rings. So unpacked kernels can read both.
  bool full_alike(bool protects) const noexcept {
    return keys.packed() + values.packed() == 0 && (!protects || protected_values.packed() == 0) &&
           keys.ring.before_wrap() == values.ring.before_wrap();
  }
  KvBuffer& buffer(KvSide side) noexcept { return side == KvSide::kKeys ? keys : values; }
  const KvBuffer& buffer(KvSide side) const noexcept {
    return side == KvSide::kKeys ? keys : values;
  }
};

/// One KV head of one layer of one sequence. Its slots are those of kVisual, then those of kRest;
/// `tags` are in token order.
struct HeadState {
  std::array<StoreBuffers, kStores> stores;
  std::array<HeadFacts, kStores> facts;
  /// Bit i: value slot i of kRest is protected, packed or not. Null if the policy protects none. KV
  /// heads that keep the same slots share one bitmap. On the host.
  uint64_t* protected_bits = nullptr;
  /// (slots,) modality tags, in token order.
  std::vector<int16_t> tags;
  /// LayerSelection.scores of the remaining prompt tokens, if the rule evicts by them and evict()
  /// is called for this KV head. On the host.
  std::vector<float> scores;
  /// (slots,) attention weights: sums over steps, or those of the newest step. Null if unused.
  float* weights = nullptr;

  int slots() const noexcept { return stores[kVisual].keys.slots() + stores[kRest].keys.slots(); }
  /// Packed value slots of kRest.
  int packed_values() const noexcept {
    return stores[kRest].values.packed() + stores[kRest].protected_values.packed();
  }
  KvBuffer& buffer(size_t store, KvSide side) noexcept { return stores[store].buffer(side); }
  const KvBuffer& buffer(size_t store, KvSide side) const noexcept {
    return stores[store].buffer(side);
  }
  /// Resets the state; vectors keep their capacity for the next sequence.
  void clear() noexcept {
    for (StoreBuffers& buffers : stores) {
      for (KvBuffer* buffer : {&buffers.keys, &buffers.values, &buffers.protected_values})
        buffer->reset();
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
  /// (kv_heads,) tokens of the first prompt in each store.
  std::vector<std::array<int, kStores>> counts;
  /// By store and KvSide: KV heads whose residual window is full after the newest token.
  std::array<std::array<int, 2>, kStores> due{};
  size_t buffer_bytes = 0;  ///< of all K and V buffers
  int kept = 0;             ///< slots at the end of the first prompt
  double forget = 0;
  int tail = 1;
  std::array<size_t, kStores> mask_bytes{};  ///< VidKV's channel masks (Quantizer::facts_bytes)
  int protection_bitmaps = 0;                ///< bitmaps of protected slots, counted as arena bytes
  std::vector<uint64_t> protection;          ///< memory of the bitmaps if the arena is on a GPU
  // StreamingLLM's re-rotation: original keys of the sinks, and positions rotated so far.
  float* sinks = nullptr;  ///< (kv_heads, sink_rows, head_dim), in the arena
  int sink_rows = 0;
  int rotated_by = 0;
  /// LayerSelection.slots of the first prompt, if the size says SequenceSize::records.
  std::vector<std::vector<int32_t>> selected;

  /// Resets the state; KV heads keep their capacity for the next sequence.
  void clear() noexcept {
    std::vector<HeadState> emptied = std::move(heads);
    for (HeadState& head : emptied) head.clear();
    *this = {};
    heads = std::move(emptied);
  }
};

/// State of a first prompt until its end.
struct PromptState {
  ArenaExtent staging;  ///< unpacked K and V of Layouts::staged_layers()
  int staged = 0;       ///< tokens complete in every layer
  /// (staged_layers, kv_heads, prompt rows); followed by as many of needs().weighted_sums
  std::vector<double> importance;
  /// (staged_layers, prompt rows) over KV heads, if the rule needs only those
  std::vector<double> means;
  Buffer sums;                     ///< `importance` on a GPU, followed by space for the means
  std::array<Readback, 2> read;    ///< sums on their way to the host: one layer group and the next
  size_t asked = 0;                ///< calls of read_back(), which alternate between the two
  size_t had = 0;                  ///< of these, how many were awaited
  std::vector<double> sparsity;    ///< (staged_layers,)
  std::vector<double> row_scores;  ///< as importance
  std::array<int32_t, 2> summed_rows{};
  std::vector<float> protection;  ///< (prompt rows,) VidKV's scores
};

/// Layers that evict alike, so that Retention::evict() is called once for all of them.
struct DroppingLayers {
  int slots = 0;   ///< of each KV head
  int scored = 0;  ///< remaining prompt tokens, if eviction is by score
  int kept = 0;
  /// First slot after all images, if these are stored separately
  int behind_images = 0;
  double forget = 0;
  bool turned = false;  ///< sinks were rotated before, or there are none
  /// The layer whose scores the host uses to choose; -1: none
  int chosen_by = -1;

  bool operator==(const DroppingLayers&) const = default;
};

/// K or V buffers of kRest with equal counters: one entry counts for all of them.
struct GainedRows {
  int dropping = -1;  ///< index in Sequence.dropping; -1: no eviction
  KvSide side = KvSide::kKeys;
  const FlushRule* window = nullptr;  ///< null: never packed
  bool host = false;                  ///< the host flushes the window
  int full = 0;                       ///< unpacked tokens in each buffer
  size_t row_bytes = 0;
  size_t packed_bytes = 0;  ///< of the tokens of one flush, packed
  size_t buffers = 1;

  bool alike(const GainedRows& other) const noexcept {
    return dropping == other.dropping && side == other.side && window == other.window &&
           host == other.host && full == other.full && row_bytes == other.row_bytes &&
           packed_bytes == other.packed_bytes;
  }
};

/// One conversation in the cache.
struct Sequence {
  // First the fields that a decode step reads: a batch has hundreds of sequences.
  bool open = false;
  bool prompted = false;  ///< the first prompt has ended
  bool on_gpu = false;    ///< uploaded to the DecodeTable
  /// on_gpu, but the table cannot count its tokens: after every step the host counts, packs and
  /// evicts, and uploads the sequence again.
  bool told_anew = false;
  /// While on_gpu, tokens are evicted in place (TableHead.placed)
  bool placed = false;
  /// The most places in a K or V buffer of any KV head, occupied or empty (KvBuffer::places()); -1:
  /// not computed yet. Cached because it visits every KV head.
  int places = -1;
  SequenceSize size;
  int rows = 0;                         ///< tokens fed, complete in every layer
  int uncounted = 0;                    ///< the newest of them, not yet in the host's buffers
  int prompt_rows = 0;                  ///< of the first prompt
  std::shared_ptr<ArenaExtent> memory;  ///< own extent; forks may read its blocks
  // on_gpu, if the table counts the tokens:
  std::vector<GainedRows> gained;        ///< counters of its K and V buffers
  std::vector<DroppingLayers> dropping;  ///< counters of its evicting layers
  std::vector<int16_t> dropping_of;      ///< (layers,) index in `dropping`
  /// (uncounted, dropping) slots passed to DecodeTable::evict() after each uncounted token.
  std::vector<int> dropped;
  /// (layers, kv_heads) arrival numbers (WeighedRows.came) in memory order, after a DecodeTable has
  /// evicted tokens; numbered as `tags`. Empty until the host reads them.
  std::vector<std::vector<int>> came;
  size_t used_when_placed = 0;  ///< on_gpu: bytes of `memory` at the upload
  /// placed: number of uncounted tokens from which on a window may be full
  int host_flushes_at = 0;
  /// Bytes of `memory` assigned to layers: packed blocks from its beginning, all else from its end.
  size_t placed_blocks = 0;
  size_t placed_rest = 0;
  size_t shared = 0;  ///< bytes of blocks in `memory` shared with forks
  /// Memory of other sequences, open or closed, whose blocks this one reads.
  std::vector<std::shared_ptr<ArenaExtent>> read;
  bool goes_on_elsewhere = false;  ///< new blocks are in another extent than the shared ones
  /// Of a closed sequence: empty layers, for reuse.
  std::vector<LayerState> layers;
  /// (rows,) tags up to the end of the newest prompt; later tokens are text. With retention only
  /// during the first prompt: afterwards HeadState.tags replaces it.
  std::vector<int16_t> modality;
  PromptState prompt;

  /// The GPU evicts packed tokens, so the host's buffers are out of date.
  bool drops_on_gpu() const noexcept { return on_gpu && placed; }
  /// Slots per KV head of a layer, counted by host or GPU.
  int slots_of(size_t layer) const noexcept {
    if (on_gpu && !dropping.empty()) {
      return dropping[static_cast<size_t>(dropping_of[layer])].slots;
    }
    return layers[layer].heads[0].slots() + (on_gpu ? uncounted : 0);
  }
};

/// The largest step of the open sequences, for which workspaces are allocated.
struct Workload {
  size_t slots = 0;  ///< upper bound of sequence ids
  size_t sequences = 0;
  size_t heads = 0;    ///< of one layer, over all sequences
  size_t rows = 0;     ///< the most tokens in all sequences
  size_t longest = 0;  ///< the most tokens in one sequence
};

}  // namespace kvlm
