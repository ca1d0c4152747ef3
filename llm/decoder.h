#pragma once

#include <cstddef>
#include <functional>
#include <span>
#include <string_view>

#include "kernels/base/tensor.h"
#include "kvcache/kv_cache.h"
#include "llm/position.h"

namespace kvlm {

/// Called with a name ("llm.layer.3") and an activation of a forward pass; used to compare with the
/// reference tap by tap. Empty in production.
using Tap = std::function<void(std::string_view, ConstTensorView)>;

/// What is added to some rows of a pass after one of its layers: a tower's features of an earlier
/// layer, for the rows of a picture (Qwen3-VL's deepstack).
struct AddedRows {
  int layer = 0;           ///< after which
  int64_t row = 0;         ///< the first of them, in the pass
  ConstTensorView values;  ///< (rows, hidden) f32
};

/// The rows of one forward pass: those of all sequences side by side, in the order of `sequences`.
struct DecoderStep {
  std::span<const StepRows> sequences;
  /// (rows,) where they stand; a decoder of one axis reads `time`.
  std::span<const Position> positions;
  /// (rows, hidden) f32: embedded text with visual tokens spliced in. Destroyed by the pass.
  TensorView embeddings;
  /// Compute the logits of every row instead of each sequence's last.
  bool all_logits = false;
  /// Prompts only.
  std::span<const AddedRows> added = {};
};

/// Embeddings to logits. Owns its weights and workspaces, which a step of at most as many rows as
/// an earlier one does not grow; on a GPU, recording a step takes memory. One thread at a time.
class Decoder {
 public:
  virtual ~Decoder() = default;

  virtual CacheShape cache_shape() const = 0;
  virtual int hidden() const noexcept = 0;
  virtual int vocab_size() const noexcept = 0;
  /// Positions that the model was made for (max_position_embeddings).
  virtual int max_positions() const noexcept = 0;
  /// The sliding window that limits max_positions(), or 0.
  virtual int sliding_window() const noexcept { return 0; }
  /// The rows of a sequence of up to this length are rotated alike however it goes on; those of a
  /// longer one depend on its length when they are read (dynamic RoPE).
  virtual int settled_positions() const noexcept { return max_positions(); }
  /// The type its matrices are stored in, or that their products take activations in where they are
  /// quantized.
  virtual DType weight_dtype() const noexcept = 0;
  /// How the matrices of its layers are stored: "bf16", "int4 in groups of 32".
  virtual std::string weight_format() const { return std::string(dtype_name(weight_dtype())); }
  /// Bytes of its weights, and of those that one decode step reads.
  virtual size_t weight_bytes() const noexcept = 0;
  virtual size_t step_weight_bytes() const noexcept = 0;
  /// Bytes of activations that a step of so many rows needs, embeddings and one sequence's logits
  /// included; without what its cache and the device's libraries take.
  virtual size_t workspace_bytes(int64_t rows) const noexcept = 0;

  /// out[r,:] = embedding of ids[r]; (rows, hidden) f32.
  virtual void embed(std::span<const int32_t> ids, TensorView out, Stream& stream) = 0;

  /// Runs cache.begin(), all layers and cache.end(). Reports every layer of prompts to
  /// stream.watch(), as phase "prefill". Throws Error{kCancelled} when the watch is cancelled:
  /// layers may hold different rows then, and the step's sequences must be closed. In its report
  /// of a prompt's layers 1 to layers - 1, the watch may pause the pass (KvCache::pause()) and
  /// decode other sequences, also over other caches, with this decoder. The returned view,
  /// (sequences, vocab) or with all_logits (rows, vocab), f32, is valid until the next call; the
  /// caller may overwrite it.
  virtual TensorView forward(const DecoderStep& step, KvCache& cache, Stream& stream,
                             const Tap& tap) = 0;
};

}  // namespace kvlm
