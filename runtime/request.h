#pragma once

#include <optional>
#include <string>
#include <vector>

#include "kernels/base/watch.h"
#include "llm/sampler.h"
#include "runtime/model.h"
#include "runtime/prompt.h"

namespace kvlm {

/// What one sequence is asked to do.
struct GenerationRequest {
  std::string id;  ///< names the sequence in messages
  std::vector<ChatMessage> messages;
  std::vector<Image> images;        ///< in the order of their placeholders
  std::vector<DecodedClip> videos;  ///< in the order of theirs
  SamplerOptions sampling;
  int max_tokens = 128;
  std::vector<std::string> stop;  ///< texts that end the generation and are not returned
  bool ignore_eos = false;        ///< go on to max_tokens; for measuring
  /// Each token's log probability, and so many of the likeliest tokens', are in the result.
  std::optional<int> top_logprobs = std::nullopt;
  bool records_prompt = false;  ///< for Generator::cached_prompt()
};

/// A request with everything done that needs neither a device nor a cache.
struct PreparedRequest {
  GenerationRequest request;  ///< its pictures and clips without pixels, which are cut
  Prompt prompt;
  std::vector<VisualInput> visuals;  ///< those of prompt.visuals
  int context = 0;                   ///< tokens that prompt and answer have together at most
  double milliseconds = 0;           ///< that it took
  /// What of the prompt may not mean what it looks like, a sentence each.
  std::vector<std::string> warnings = {};
  /// What `visuals` become, where that was done ahead (Generator::admit()).
  std::optional<VisualRows> encoded;
};

/// Tokenises a request, and resizes and cuts its pictures and clips. Any thread may, while others
/// do, and while one uses the model. Throws Error{kInvalidArgument} if pictures and placeholders do
/// not match, or a context of that many tokens does not hold the prompt; what Model::prepare() and
/// prepare_clip() throw; and Error{kCancelled} if `watch`, which may be null, cancels.
PreparedRequest prepare_request(Model& model, GenerationRequest request, int context,
                                const Watch* watch);

/// The same for a further turn: `visuals` are those of the conversation so far and become those of
/// this prompt; of them, and of the pixels of `request`, whatever is new is taken. After a failure
/// the first of them are still there.
Prompt prepare_turn(Model& model, GenerationRequest& request, int context, const Watch* watch,
                    std::vector<VisualInput>& visuals);

}  // namespace kvlm
