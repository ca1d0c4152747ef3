#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kvcache/kv_cache.h"
#include "runtime/model.h"
#include "runtime/prompt.h"

namespace kvlm {

/// A conversation ready for a decoder: its tokens, and its pictures and clips as visual rows.
struct EncodedPrompt {
  Prompt prompt;
  VisualRows visual;
};

/// Prepares and encodes the pictures and clips of a conversation, each in the order of their
/// placeholders. Throws Error{kInvalidArgument} if they and placeholders do not match, or if the
/// model has no positions for the prompt and a token; Error{kCancelled} if the stream's watch wants
/// no more.
EncodedPrompt encode_prompt(Model& model, const std::vector<ChatMessage>& messages,
                            std::span<const Image> images, std::span<const DecodedClip> clips,
                            Stream& stream);

/// Sequences of one cache that are fed tokens chosen beforehand, for comparing logits rather than
/// generating. Each is prefilled alone and steps together with others; they change no bit of one
/// another on the CPU. A pass that the stream's watch cancels throws Error{kCancelled}; the run is
/// of no use then.
class ForcedRun {
 public:
  struct Token {
    SequenceId sequence;
    int32_t id;
  };

  ForcedRun(Model& model, KvCache& cache, Stream& stream);
  ~ForcedRun();
  ForcedRun(const ForcedRun&) = delete;
  ForcedRun& operator=(const ForcedRun&) = delete;

  /// Prefills one more; logits(0) are its own. Throws Error{kOutOfMemory} if the cache has no room
  /// for the prompt and max_tokens. It stays until the run ends.
  SequenceId join(const EncodedPrompt& encoded, int max_tokens);
  /// One token each for some of the sequences, in one pass.
  void feed(std::span<const Token> tokens);
  /// (vocab,) logits after the token that was fed `i`th by the newest call.
  std::span<const float> logits(size_t i) const noexcept;
  CacheReport report(SequenceId sequence) const noexcept { return cache_->report(sequence); }

 private:
  struct Sequence {
    SequenceId id;
    int32_t position_shift;  // the position after the prompt minus its rows (M-RoPE)
  };

  void forward(std::span<const StepRows> step, std::span<const Position> positions,
               TensorView embeddings, std::span<const AddedRows> added = {});

  Model* model_;
  KvCache* cache_;
  Stream* stream_;
  std::vector<Sequence> sequences_;
  // Of one step, kept between steps.
  std::vector<int32_t> ids_;
  std::vector<StepRows> rows_;
  std::vector<Position> positions_;
  Tensor embeddings_;  // (sequences, hidden)
  std::vector<float> logits_;
};

}  // namespace kvlm
