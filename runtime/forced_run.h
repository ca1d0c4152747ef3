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

/// One sequence that is fed tokens chosen beforehand, for comparing logits rather than generating.
/// A pass that the stream's watch cancels throws Error{kCancelled}; the run is of no use then.
class ForcedRun {
 public:
  /// Prefills. Throws Error{kOutOfMemory} if `cache` has no room for the prompt and max_tokens.
  ForcedRun(Model& model, KvCache& cache, const EncodedPrompt& encoded, int max_tokens,
            Stream& stream);
  ~ForcedRun();
  ForcedRun(const ForcedRun&) = delete;
  ForcedRun& operator=(const ForcedRun&) = delete;

  /// (vocab,) logits after the newest token.
  std::span<const float> logits() const noexcept { return logits_; }
  void feed(int32_t token);
  SequenceId id() const noexcept { return id_; }
  CacheReport report() const noexcept { return cache_->report(id_); }

 private:
  void forward(const StepRows& step, std::span<const Position> positions, Tensor& embeddings,
               std::span<const AddedRows> added = {});

  Model* model_;
  KvCache* cache_;
  Stream* stream_;
  SequenceId id_{};
  int32_t position_shift_ = 0;
  Tensor embedding_;  // (1, hidden)
  std::vector<float> logits_;
};

}  // namespace kvlm
