#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "python/src/media.h"
#include "runtime/service.h"
#include "tools/common/session.h"

namespace kvlm::python {

/// A request in the terms of the module.
struct Question {
  std::vector<ChatMessage> messages;  ///< empty: `prompt`, or the model's own for a caption
  std::string prompt;
  std::vector<SentImage> images;
  std::vector<SentVideo> videos;
  SamplingRequest frames;
  std::string kv;  ///< empty: the model's
  std::optional<int> max_tokens;
  std::optional<double> temperature, top_p, repetition_penalty;
  std::optional<int> top_k;
  uint64_t seed = 0;
  std::vector<std::string> stop;
  std::optional<int> logprobs;
  bool records = false;  ///< what the prompt leaves in the cache: Answer::cached()
};

/// An answer on its way. Ends its request when nobody holds it any more.
class Answer {
 public:
  Answer(std::shared_ptr<Ticket> ticket, std::string spec, std::vector<Clip> clips,
         std::shared_ptr<CachedPrompt> cached)
      : ticket_(std::move(ticket)),
        spec_(std::move(spec)),
        clips_(std::move(clips)),
        cached_(std::move(cached)) {}
  ~Answer() { ticket_->cancel(); }
  Answer(const Answer&) = delete;
  Answer& operator=(const Answer&) = delete;

  Ticket& ticket() noexcept { return *ticket_; }
  const std::string& spec() const noexcept { return spec_; }
  const std::vector<Clip>& clips() const noexcept { return clips_; }
  /// Of one that is done and whose question records it. Throws the Error with which it failed;
  /// Error{kCancelled} if it was ended before.
  std::shared_ptr<CachedPrompt> cached() const;

 private:
  std::shared_ptr<Ticket> ticket_;
  std::string spec_;
  std::vector<Clip> clips_;
  std::shared_ptr<CachedPrompt> cached_;
};

/// A loaded model and the service that answers with it. For any thread; after a fork it refuses
/// everything.
class Engine {
 public:
  /// `cache_bytes` of the arena; without it, eight sequences of the model's whole context, within a
  /// quarter of the memory. `watch` follows the loading. Throws as Session.
  Engine(const SessionOptions& options, std::optional<size_t> cache_bytes, Watch* watch);
  ~Engine();

  /// Throws Error for what cannot be answered, as vlm-run does.
  std::unique_ptr<Answer> ask(Question question);
  /// The object that `vlm-run --json` prints. Throws the Error with which it failed.
  std::string result_json(Answer& answer) const;
  /// How tokens look, for logprobs: any bytes.
  std::string token_bytes(int32_t token) const;

  const Session& session() const noexcept { return session_; }
  Model& model() const noexcept { return *model_; }
  const Service& service() const noexcept { return *service_; }
  /// Cancels what is left, and refuses everything from now on.
  void close();

 private:
  void require_open() const;
  std::shared_ptr<const CachePlan> plan_of(const std::string& spec);

  int process_;
  SessionOptions options_;
  Session session_;
  Model* model_;
  std::mutex mutex_;                                               // of plans_
  std::map<std::string, std::shared_ptr<const CachePlan>> plans_;  // by canonical spec
  std::unique_ptr<Service> service_;
};

}  // namespace kvlm::python
