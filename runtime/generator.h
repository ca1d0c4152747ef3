#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "kvcache/kv_cache.h"
#include "llm/sampler.h"
#include "runtime/model.h"
#include "runtime/request.h"

namespace kvlm {

/// Milliseconds, wall clock.
struct Timings {
  double vision_ms = 0;   ///< preprocessing, tower and projector; not the decoding of files
  double prefill_ms = 0;  ///< embedding, decoder and cache over the prompt, without its pauses
  double ttft_ms = 0;     ///< from the request to its first token
  double decode_ms = 0;   ///< from the first token to the last
};

/// Natural logarithms of a token's probability by the model's own logits, before rules, penalty and
/// temperature.
struct TokenLogprobs {
  float logprob = 0;                           ///< of the token that was chosen
  std::vector<std::pair<int32_t, float>> top;  ///< of the likeliest, the first of equals first
};

struct GenerationResult {
  std::string text;
  std::vector<int32_t> tokens;          ///< generated ids, the final eos included
  std::vector<TokenLogprobs> logprobs;  ///< of `tokens`; empty unless asked for
  std::string finish_reason;            ///< "stop", "length" or "cancelled"
  int prompt_tokens = 0;                ///< visual tokens included
  int visual_tokens = 0;
  Timings timings;
  CacheReport cache;
};

/// What a prompt left in the cache, on the host.
struct CachedPrompt {
  std::vector<int32_t> ids;         ///< of its tokens; placeholders where visual tokens stand
  std::vector<int16_t> modality;    ///< of the same: -1 for text, else the number of the image
  std::vector<float> logits;        ///< (vocab,) of the next token, before rules and penalty
  std::vector<CachedLayer> layers;  ///< (layers,)
};

/// Prefill and decode of many sequences over one model and one cache; sequences join and leave
/// between steps. Owns all their state. One thread at a time.
///
/// When the stream's watch cancels, the call that is at work returns within one layer, and the
/// sequences of its pass are finished as "cancelled", with the tokens made before; a step of decode
/// is given up only where it takes long.
///
///   const int key = generator.admit(request, on_text);
///   while (!generator.finished(key)) { generator.step(); generator.deliver(); }
///   GenerationResult result = generator.take(key);
class Generator {
 public:
  using OnText = std::function<void(std::string_view)>;

  Generator(Model& model, KvCache& cache, Stream& stream);
  ~Generator();

  /// Prepares, encodes and prefills a request and samples its first token. on_text gets the text as
  /// it becomes certain, from deliver(). Throws Error if the request cannot be served (a picture
  /// and placeholder mismatch, longer than the context, no room in the cache); others go on
  /// undisturbed.
  int admit(GenerationRequest request, OnText on_text);
  /// The same for one that was prepared already; after an Error `prepared` is what it was, but that
  /// pictures which were encoded ahead may have to be encoded again. On a GPU the pictures and
  /// clips of `next`, which may be null and is to be admitted next, by this generator, are encoded
  /// behind what is queued when the prompt first copies something to the host: its first token, or
  /// what its cache decides by (importance behind some or all layers, scores of rows in the first,
  /// of tokens to protect before it). A failure of that is left to its own admit(); memory that it
  /// took is not there for this one.
  int admit(PreparedRequest&& prepared, OnText on_text, PreparedRequest* next = nullptr);
  /// A further turn of a sequence that has finished: it keeps its cache where the new conversation
  /// starts with the tokens that it holds, else it is prefilled anew. `request` holds the whole
  /// conversation; its pictures and videos start with those of the turns before.
  void resume(int key, GenerationRequest request, OnText on_text);

  /// One token for every unfinished sequence, in one forward pass. On the CPU it allocates nothing,
  /// but for StreamingLLM's re-rotation, which copies the sinks once. On a GPU a step takes memory
  /// if it describes a larger batch than any before, or is recorded.
  void step();
  /// Turns new tokens into text, calls on_text, and finishes sequences whose stop text appeared.
  void deliver();

  /// Unfinished sequences.
  int active() const noexcept;
  bool finished(int key) const noexcept;
  /// Ends a sequence early with finish_reason "cancelled".
  void cancel(int key);
  /// Ids and logprobs so far.
  std::span<const int32_t> tokens(int key) const;
  std::span<const TokenLogprobs> logprobs(int key) const;
  /// Of a sequence with GenerationRequest::records_prompt, between its admit() and the next step().
  /// Throws Error{kInvalidArgument} for another one.
  CachedPrompt cached_prompt(int key) const;
  /// The result so far; the sequence stays for resume().
  GenerationResult result(int key) const;
  /// The result; the sequence's memory is free for others.
  GenerationResult take(int key);

  /// Called between two layers of a prompt that begins a conversation, or of its images: then
  /// step(), deliver(), cancel() and take() may be called for the other sequences. Null: never.
  void set_pause(std::function<void()> pause) { on_pause_ = std::move(pause); }
  /// Called with every named activation of a prefill; for goldens.
  void set_tap(Tap tap);
  /// Reserves this many tokens for every sequence, so that resume() has room; at most the model's
  /// context. 0 means just what each request needs, without resume().
  void set_session_rows(int rows) noexcept { session_rows_ = rows; }

 private:
  struct Sequence;

  Sequence& at(int key) const { return *sequences_[static_cast<size_t>(key)]; }
  /// What a step of `slots` sequences needs, so that an admitted one cannot want for memory.
  void make_room(size_t slots);
  /// (rows, hidden) for a prompt's embeddings.
  TensorView prompt_rows(int64_t rows);
  /// Tokens of a prompt and its answer at most.
  int context() const;
  /// Ready for the first token of sequence.prompt's answer.
  void begin(Sequence& sequence, int context);
  void prefill(Sequence& sequence, int64_t first, PreparedRequest* next = nullptr);
  void pause_prompt();
  /// What the pictures and clips of a prompt become of which rows from `first` on stand for some;
  /// those of the others are empty.
  VisualRows encode(const Prompt& prompt, int64_t first, std::span<const VisualInput> visuals);
  void encode_ahead(PreparedRequest& request) noexcept;
  void give_back_prompt() noexcept;
  void forget(Sequence& sequence) noexcept;
  static void end_unanswered(Sequence& sequence);
  /// Keeps what the logits (1, vocab) of a sequence's next token say, if that was asked for.
  void keep_logits(Sequence& sequence, TensorView row);
  void accept(Sequence& sequence, int32_t token);
  /// Where a sequence stands from now on.
  int keep(std::unique_ptr<Sequence> sequence);

  Model* model_;
  KvCache* cache_;
  Stream* stream_;
  Tap tap_;
  int session_rows_ = 0;
  std::function<void()> on_pause_;
  bool in_pass_ = false;  // of a prompt
  bool paused_ = false;   // a prompt is
  double paused_ms_ = 0;  // of the prompt, or of its images
  std::vector<std::unique_ptr<Sequence>> sequences_;
  // Of one decode step, kept between steps.
  std::vector<Sequence*> stepping_;
  std::vector<StepRows> rows_;
  std::vector<Position> positions_;
  std::vector<int32_t> ids_;  // that go in, then those that come out
  std::vector<RowSampling> sampling_;
  size_t room_ = 0;    // sequences that make_room() has made room for
  Tensor embeddings_;  // (room_, hidden)
  // Of the latest prompt, kept beyond it, because a GPU that gives memory back first finishes what
  // it has to do, the next prompt's pictures among it: until the next step or prompt, or where an
  // embedding takes little memory, always.
  Tensor prompt_embeddings_;  // (rows of the longest so far, hidden)
  VisualRows visual_;
};

}  // namespace kvlm
