#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "kvcache/engine/float_space.h"
#include "kvcache/engine/pack_queue.h"
#include "kvcache/engine/sequence.h"
#include "kvcache/engine/traits.h"
#include "kvcache/engine/unpacker.h"
#include "kvcache/extensions/key_basis.h"
#include "kvcache/extensions/protected_values.h"

namespace kvlm {

/// Packs the oldest full rows of windows that decode has filled (docs/formulas.md, "Windows").
class WindowPacker {
 public:
  WindowPacker(const CacheTraits& traits, Unpacker& unpacker, KeyBasisChange& key_basis,
               ProtectedValues& protected_values);

  /// Room for the windows of `load`, so that flush() allocates nothing.
  void reserve(const Workload& load);
  /// Flushes the windows of a layer that are full, after a row was appended to each sequence.
  void flush(std::span<Sequence* const> sequences, int layer, Stream& stream);
  /// Forgets what a step that has failed has left.
  void clear() noexcept { queue_.clear(); }

 private:
  /// Rows that are packed in one call, as far as memory for their floats goes; of at least some
  /// sequences.
  static constexpr size_t kRowsTogether = 8192;
  static constexpr size_t kSequencesTogether = 32;
  /// Rows that are packed anew together, old ones and new ones, unless one sequence has more.
  static constexpr size_t kAnewTogether = size_t{1} << 17;

  /// A layer of a sequence whose window is flushed, and where in the workspace.
  struct Flushed {
    LayerState* state;
    size_t row = 0;   // of sources_, jobs_ and floats_
    size_t jobs = 0;  // made
  };
  /// Keys or values of a KV head whose window is packed anew: old rows that were packed, new ones.
  struct Anew {
    LayerState* state;
    HeadState* head;
    float* x;
    int old;
    int rows;        // old ones and new ones
    int first_slot;  // of the new ones
  };

  void reserve_window(const Workload& load, const Window& window, const Quantizer& quantizer);
  void reserve_anew(size_t rows, size_t sequences, const Window& window,
                    const Quantizer& quantizer);
  void list_full(std::span<Sequence* const> sequences, int layer, const Window& window);
  void flush_together(const Window& window, Stream& stream);
  void flush_some(std::span<Flushed> some, size_t rows, const Window& window, Stream& stream);
  void take_rows(std::span<Flushed> next, const Window& window);
  void close_up_jobs(std::span<const Flushed> some, size_t& jobs);
  void flush_anew(int layer, const Window& window, Stream& stream);
  size_t list_anew(size_t first, const Quantizer& quantizer, const Window& window);
  void gather_anew(const Quantizer& quantizer, const Window& window, Stream& stream);
  void pack_anew(const Quantizer& quantizer, const Window& window, Stream& stream);
  void pack_protected_anew(const Quantizer& quantizer, const Window& window, Stream& stream);
  void queue_keys_anew(const Quantizer& quantizer, const Window& window, Stream& stream);
  void learn_anew(const Quantizer& quantizer, const Window& window, Stream& stream);

  const CacheTraits& traits_;
  Unpacker& unpacker_;
  KeyBasisChange& key_basis_;
  ProtectedValues& protected_values_;
  PackQueue queue_;
  std::vector<Flushed> flushed_;
  std::vector<Anew> anew_;     // of one layer of some sequences
  size_t anew_rows_ = 0;       // there is room for
  std::vector<PackJob> jobs_;  // of rows that are flushed together
  std::vector<const std::byte*> sources_;
  std::vector<Unpacker::PackedRows> packed_;  // of anew_
  std::vector<ByteRange> copies_;
  std::vector<LayerState*> learning_;
  std::vector<const float*> keys_;  // of learning_, (sequences, kv_heads)
  FloatSpace floats_;               // rows on their way into blocks
  FloatSpace fresh_;                // new ones of anew_, before they are put behind old ones
};

}  // namespace kvlm
