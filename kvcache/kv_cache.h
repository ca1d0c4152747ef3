#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "kernels/base/tensor.h"

namespace kvlm {

/// Names a sequence that a cache holds; reused after close().
enum class SequenceId : int32_t {};

/// The modality tag of a row: text, or which picture of its sequence it belongs to (0, 1, ...).
inline constexpr int16_t kTextRow = -1;

/// What the attention layers of one decoder need from a cache.
struct CacheShape {
  int layers = 0;
  int q_heads = 0;
  int kv_heads = 0;
  int head_dim = 0;
  /// (rotary_dim / 2,) inverse frequencies of RoPE, for policies that move kept keys to other
  /// positions (StreamingLLM); empty where positions are not one number (M-RoPE).
  std::vector<float> rope_frequencies;
  /// f32 | f16 | bf16: the type in which prompts attend on a device with matrix units for it, see
  /// attention(). A decoder names the type of its weights.
  DType multiply = DType::kF32;

  int q_per_kv() const noexcept { return q_heads / kv_heads; }
  /// Elements of K and V together that one token adds over all layers.
  size_t elements_per_token() const noexcept {
    return 2 * static_cast<size_t>(layers) * static_cast<size_t>(kv_heads) *
           static_cast<size_t>(head_dim);
  }
};

/// What a sequence takes at most, known before its prefill.
struct SequenceSize {
  int prompt_rows = 0;  ///< tokens fed as the first prompt
  int visual_rows = 0;  ///< those among them that are visual
  int max_rows = 0;     ///< all tokens ever fed

  bool operator==(const SequenceSize&) const = default;
};

/// The rows that one forward pass adds to one sequence.
struct StepRows {
  SequenceId sequence{};
  int rows = 0;
  /// Part of a prompt: attention is exact, in full precision over the rows as given. Else one
  /// generated token, attended from storage.
  bool prompt = false;
  /// The last rows of the prompt: policies select, merge, pack and share after this pass.
  bool ends_prompt = false;
  /// (rows,) modality tags; empty means all text.
  std::span<const int16_t> modality;
};

/// What a policy wants to be given beside keys and values.
struct CacheNeeds {
  /// (rows, hidden) input embeddings of prompt rows, before any layer: VidKV's token protection
  /// scores visual rows by their product with text rows (VidKV eq. 7).
  bool prompt_embeddings = false;
  /// What is kept of a prompt depends on how its queries attend: they cannot be left out.
  bool prompt_queries = false;
  /// Pictures are packed when the first prompt ends, and only then: a conversation that gets a new
  /// picture is prefilled anew.
  bool pictures_first = false;
  /// No prompt can follow the first: a conversation is prefilled anew for every turn.
  bool one_prompt = false;
};

/// What a sequence (or the whole cache) occupies.
struct CacheReport {
  size_t bytes = 0;            ///< handed out by the arena, that close() would take back at once
  size_t f16_bytes = 0;        ///< what plain f16 rows of all tokens fed so far would take
  double stored_bits = 0;      ///< 8 * bytes / elements of all tokens fed so far
  double nominal_bits = 0;     ///< the policy's own claim: codes only
  double slots = 0;            ///< rows held, mean over layers
  int64_t guarded_remaps = 0;  ///< CalibQuant: slopes clamped so far, over all sequences
};

/// Keys and values of many sequences. The cache attends: a layer hands in queries, keys and values
/// of the step's rows and gets the attention output; nobody reads keys. A forward pass is
///
///   begin(step); for each layer: attend(layer, ...); end();
///
/// A sequence whose pass has failed between begin() and end() is good for close() only.
///
/// with the rows of all sequences of the step side by side, in the step's order. Sequences are
/// ragged, also per layer. All bytes come from one arena; begin, attend and end allocate nothing in
/// decode. One thread at a time.
class KvCache {
 public:
  virtual ~KvCache() = default;

  virtual const CacheShape& shape() const noexcept = 0;
  /// Canonical text of the policy.
  virtual const std::string& spec() const noexcept = 0;
  virtual CacheNeeds needs() const noexcept = 0;

  /// Admits a sequence. Throws Error{kOutOfMemory} naming `who`, the bytes needed and the bytes
  /// free if its size can not be guaranteed; then nothing has changed.
  virtual SequenceId open(const SequenceSize& size, const std::string& who) = 0;
  /// Admits a sequence that goes on from where `parent` is, whose first prompt has ended; between
  /// steps. What either is fed afterwards is its own, and each gives bit for bit what a sequence
  /// gives that was fed all of its rows itself. (After rows of a ring have been packed or dropped,
  /// as long as `max_rows` is the parent's, else but for rounding; on a GPU but for rounding where
  /// its table does not serve the fork, see docs/architecture.md, "Forks".)
  ///
  ///   max_rows  all tokens ever fed, the parent's included
  ///
  /// Packed blocks that are never written again are shared: they count once in bytes(), in the
  /// report of the last sequence that holds them, and until that is closed, whoever drops their
  /// rows. Any of the sequences may be closed first; what the parent has set aside is free when
  /// nobody reads its blocks. Everything else is copied: full rows, also those of plain caches,
  /// blocks that are still being filled, and those that a policy packs anew (VidKV's
  /// flush=requant_...). Only that and what it gains is set aside. No policy refuses.
  ///
  /// Throws Error{kOutOfMemory} as open() does, with nothing changed; Error{kInvalidArgument} if
  /// the parent is not open, its first prompt has not ended or it holds more than max_rows tokens.
  virtual SequenceId fork(SequenceId parent, int max_rows, const std::string& who,
                          Stream& stream) = 0;
  /// Forgets a sequence; its memory is free for the next open(), but for what forks share.
  virtual void close(SequenceId sequence) noexcept = 0;

  /// Announces the rows of a forward pass. Spans must live until end(). Throws
  /// Error{kInvalidArgument} if a sequence would exceed its max_rows.
  virtual void begin(std::span<const StepRows> step, Stream& stream) = 0;
  /// Input embeddings of the step's rows, once between begin() and the first attend(), if needs()
  /// says so.
  virtual void give_embeddings(ConstTensorView embeddings, Stream& stream) = 0;

  /// Appends the step's K and V rows to `layer` and computes attention for its queries.
  ///
  ///   q, out  (rows, q_heads, head_dim)   f32 (CUDA also f16 | bf16); out may alias q
  ///   k, v    (rows, kv_heads, head_dim)  as q, k after RoPE
  ///   scale   applied to q . k
  ///
  /// Row i of a prompt sees the sequence's earlier tokens and rows 0..i of the step.
  ///
  /// In a step of first prompts only, q and out may be empty unless needs().prompt_queries: rows
  /// are stored and packed, and nobody attends. For filling a cache with rows that are made up.
  virtual void attend(int layer, ConstTensorView q, ConstTensorView k, ConstTensorView v,
                      TensorView out, float scale, Stream& stream) = 0;

  /// After begin(): steps of one number have attend() calls that launch the same on a GPU, given
  /// rows at the same addresses; 0: no other step has. One such step may be recorded
  /// (kernels/base/recording.h) and run, once or again; repeated() takes the place of all attend()
  /// calls, also of those that were recorded.
  virtual uint64_t repetition() const noexcept { return 0; }
  virtual void repeated() noexcept {}

  /// Completes the pass: policies pack after a prompt, flush residual windows and evict.
  virtual void end(Stream& stream) = 0;

  /// Tokens fed to a sequence so far.
  virtual int tokens(SequenceId sequence) const noexcept = 0;
  /// The position of the sequence's next token, counted from the first: tokens(), unless a policy
  /// counts otherwise (PrefixKV's code: the length of layer 0).
  virtual int next_position(SequenceId sequence) const noexcept { return tokens(sequence); }
  /// Bytes that the arena has handed out, all sequences.
  virtual size_t bytes() const noexcept = 0;
  virtual CacheReport report(SequenceId sequence) const noexcept = 0;
};

}  // namespace kvlm
