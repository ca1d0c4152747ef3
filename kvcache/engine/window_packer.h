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

/// Packs the oldest tokens of full residual windows in decode (docs/formulas.md, "Windows").
class WindowPacker {
 public:
  WindowPacker(const CacheTraits& traits, Unpacker& unpacker, KeyBasisChange& key_basis,
               ProtectedValues& protected_values);

  /// Allocates for the windows of `load`, so that flush() allocates nothing.
  void reserve(const Workload& load);
  /// Flushes full windows of a layer, after one token was appended to each sequence.
  void flush(std::span<Sequence* const> sequences, int layer, Stream& stream);
  /// Clears the queue after a failed step.
  void clear() noexcept { queue_.clear(); }

 private:
  /// One call packs kRowsTogether tokens, or the windows of kSequencesTogether sequences if more.
  static constexpr size_t kRowsTogether = 8192;
  static constexpr size_t kSequencesTogether = 32;
  /// Most tokens, old and new, that are repacked in one call, unless one sequence has more.
  static constexpr size_t kAnewTogether = size_t{1} << 17;

  /// A layer of a sequence with a full window, and its place in the workspace.
  struct Flushed {
    LayerState* state;
    size_t row = 0;   // first entry in sources_, jobs_ and floats_
    size_t jobs = 0;  // number of its jobs
  };
  /// Keys or values of a KV head to pack anew: tokens packed before, then new ones.
  struct Anew {
    LayerState* state;
    HeadState* head;
    float* x;
    int old;
    int rows;        // old and new
    int first_slot;  // of the new tokens
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
  std::vector<Anew> anew_;     // of one layer, for some sequences
  size_t anew_rows_ = 0;       // allocated
  std::vector<PackJob> jobs_;  // of windows flushed together
  std::vector<const std::byte*> sources_;
  std::vector<Unpacker::PackedRows> packed_;  // of anew_
  std::vector<ByteRange> copies_;
  std::vector<LayerState*> learning_;
  std::vector<const float*> keys_;  // of learning_, (sequences, kv_heads)
  FloatSpace floats_;               // tokens to pack
  FloatSpace fresh_;                // new tokens of anew_, before they are copied after old ones
};

}  // namespace kvlm
