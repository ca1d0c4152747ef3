#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "kernels/base/tensor.h"

namespace kvlm {

/// Identifies an open sequence; reused after close().
enum class SequenceId : int32_t {};

/// Modality tag of a text token. Visual tokens have the number of their image in the sequence.
inline constexpr int16_t kTextRow = -1;

/// What the attention layers of one decoder need from a cache.
struct CacheShape {
  int layers = 0;
  int q_heads = 0;
  int kv_heads = 0;
  int head_dim = 0;
  /// (rotary_dim / 2,) inverse frequencies of RoPE, for policies that give stored keys other
  /// positions (StreamingLLM). Empty if a position has several axes (M-RoPE).
  std::vector<float> rope_frequencies;
  /// f32 | f16 | bf16: type in which prompts attend on a device with matrix units for it, see
  /// attention(). The type of the decoder's weights.
  DType multiply = DType::kF32;

  int q_per_kv() const noexcept { return q_heads / kv_heads; }
  /// Numbers in K and V that one token adds over all layers.
  size_t elements_per_token() const noexcept {
    return 2 * static_cast<size_t>(layers) * static_cast<size_t>(kv_heads) *
           static_cast<size_t>(head_dim);
  }
};

/// Upper bounds of a sequence, known before its prefill.
struct SequenceSize {
  int prompt_rows = 0;  ///< tokens of the first prompt
  int visual_rows = 0;  ///< visual tokens of the first prompt
  int max_rows = 0;     ///< tokens of the whole sequence
  /// Remembers which tokens of the first prompt each layer keeps, for KvCache::cached_prompt().
  bool records = false;

  bool operator==(const SequenceSize&) const = default;
};

/// Tokens that one forward pass adds to one sequence.
struct StepRows {
  SequenceId sequence{};
  int rows = 0;
  /// Tokens of a prompt, which attend in full precision to the step's K and V as given. Otherwise
  /// one generated token, which attends to the cache as stored.
  bool prompt = false;
  /// Last tokens of the prompt: after this pass policies select, merge, pack and share.
  bool ends_prompt = false;
  /// (rows,) modality tags; empty means all text.
  std::span<const int16_t> modality;
};

/// Inputs that a policy needs besides keys and values, and its limits.
struct CacheNeeds {
  /// (rows, hidden) input embeddings of prompt tokens. VidKV scores visual tokens for protection by
  /// their product with text tokens (VidKV eq. 7).
  bool prompt_embeddings = false;
  /// Selection depends on attention of the prompt's queries, so attend() needs them.
  bool prompt_queries = false;
  /// Images are packed only at the end of the first prompt: a conversation with a new image must be
  /// prefilled again from its start.
  bool images_first = false;
  /// The cache takes one prompt: every turn of a conversation prefills it from its start.
  bool one_prompt = false;
};

/// Memory of a sequence or of the whole cache.
struct CacheReport {
  size_t bytes = 0;            ///< in use; close() would free them at once
  size_t f16_bytes = 0;        ///< bytes of the same tokens in a plain f16 cache
  double stored_bits = 0;      ///< 8 * bytes / numbers of all tokens fed
  double nominal_bits = 0;     ///< bits of codes alone, as the papers count
  double slots = 0;            ///< stored tokens, mean over layers
  int64_t guarded_remaps = 0;  ///< CalibQuant: clamped slopes so far, over all sequences
};

/// What a layer holds of a first prompt, in the order of its tokens.
struct CachedLayer {
  int slots = 0;                    ///< tokens that each KV head keeps
  std::vector<float> keys, values;  ///< (kv_heads, slots, head_dim) as attention reads them
  std::vector<int32_t> kept;        ///< (kv_heads, slots) rows of the prompt, ascending
  std::vector<int16_t> tags;        ///< (kv_heads, slots) modality
};

/// Keys and values of many sequences. The cache computes attention: attend() takes queries, keys
/// and values of a layer and returns the output, so callers never read keys. A forward pass is
///
///   begin(step); for each layer: attend(layer, ...); end();
///
/// with the tokens of all sequences concatenated in the step's order. Sequences differ in length,
/// also by layer. All bytes come from one arena. In decode, begin, attend and end allocate nothing
/// on the CPU. If a pass fails between begin() and end(), its sequences can only be closed. Not
/// thread-safe.
class KvCache {
 public:
  virtual ~KvCache() = default;

  virtual const CacheShape& shape() const noexcept = 0;
  /// Canonical text of the --kv spec.
  virtual const std::string& spec() const noexcept = 0;
  virtual CacheNeeds needs() const noexcept = 0;

  /// Whether a sequence of this size can be admitted now.
  virtual bool fits(const SequenceSize& size) const = 0;
  /// Admits a sequence and reserves its memory. Throws Error{kOutOfMemory} with `who`, the bytes
  /// needed and the bytes free; then nothing has changed.
  virtual SequenceId open(const SequenceSize& size, const std::string& who) = 0;
  /// Admits a sequence that continues from `parent`, whose first prompt has ended. Call it between
  /// steps. Later tokens of either do not affect the other. Each has the same bits as a sequence
  /// that was fed all of its tokens itself. Two cases differ by rounding: unpacked tokens were
  /// packed or evicted before and `max_rows` differs from the parent's; a GPU's decode table does
  /// not handle the fork (docs/architecture.md, "Forks").
  ///
  ///   max_rows  tokens of the whole sequence, the parent's included
  ///
  /// Packed blocks that never change are shared. They count once in bytes(), and in the report of
  /// the last sequence that holds them, until it is closed, even if their tokens are evicted.
  /// Sequences may be closed in any order; a shared block is freed with its last reader. Everything
  /// else is copied: unpacked tokens, blocks that are still being filled, and blocks that a policy
  /// repacks (VidKV's flush=requant_...). Memory is reserved only for the copies and for new
  /// tokens. All policies can fork.
  ///
  /// Throws Error{kOutOfMemory} as open() does, with nothing changed. Throws
  /// Error{kInvalidArgument} if the parent is not open, its first prompt has not ended, or it has
  /// more than max_rows tokens.
  virtual SequenceId fork(SequenceId parent, int max_rows, const std::string& who,
                          Stream& stream) = 0;
  /// Closes a sequence and frees its memory, except for blocks that forks share.
  virtual void close(SequenceId sequence) noexcept = 0;

  /// Begins a forward pass. Spans must live until end(). Throws Error{kInvalidArgument} if a
  /// sequence would exceed its max_rows.
  virtual void begin(std::span<const StepRows> step, Stream& stream) = 0;
  /// Passes the input embeddings of the step's tokens. If needs().prompt_embeddings, call it once
  /// between begin() and the first attend().
  virtual void give_embeddings(ConstTensorView embeddings, Stream& stream) = 0;

  /// Stores the step's keys and values in `layer` and computes attention for its queries.
  ///
  ///   q, out  (rows, q_heads, head_dim)   f32 (CUDA also f16 | bf16); out may alias q
  ///   k, v    (rows, kv_heads, head_dim)  as q, k after RoPE
  ///   scale   applied to q . k
  ///
  /// Token i of a prompt attends to the sequence's earlier tokens and to tokens 0..i of the step.
  ///
  /// If a step has only first prompts and needs().prompt_queries is false, q and out may be empty:
  /// tokens are stored and packed without attention. This fills a cache with made-up tokens.
  virtual void attend(int layer, ConstTensorView q, ConstTensorView k, ConstTensorView v,
                      TensorView out, float scale, Stream& stream) = 0;

  /// For CUDA graphs; call it after begin(). Steps with equal numbers launch the same kernels in
  /// attend() if inputs have the same addresses. 0: no other step does. One such step may be
  /// recorded (kernels/base/recording.h) and replayed. Then call repeated() in place of all
  /// attend() calls, in the recorded step, too.
  virtual uint64_t repetition() const noexcept { return 0; }
  virtual void repeated() noexcept {}

  /// Sets a pass of first prompts aside between two layers, so that passes of generated tokens of
  /// other sequences can begin and end. Neither pass changes a bit of the other.
  virtual void pause() = 0;
  /// Goes on with the paused pass, also if one of the others has failed.
  virtual void resume() = 0;

  /// Ends the pass: packs after a prompt, flushes residual windows, evicts.
  virtual void end(Stream& stream) = 0;

  /// Tokens fed to a sequence so far; evicted ones count.
  /// A copy of what `layer` holds, after the first prompt and before any other step of a sequence
  /// that was opened with SequenceSize::records. Throws Error{kInvalidArgument} for another one.
  virtual CachedLayer cached_prompt(SequenceId sequence, int layer, Stream& stream) = 0;

  virtual int tokens(SequenceId sequence) const noexcept = 0;
  /// Position of the sequence's next token: tokens(), unless a policy counts otherwise (PrefixKV's
  /// code: the length of layer 0).
  virtual int next_position(SequenceId sequence) const noexcept { return tokens(sequence); }
  /// Bytes in use, over all sequences.
  virtual size_t bytes() const noexcept = 0;
  virtual CacheReport report(SequenceId sequence) const noexcept = 0;
};

}  // namespace kvlm
