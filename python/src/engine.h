#pragma once

#include <unistd.h>

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
  std::string system;                 ///< before `prompt`; empty: none
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

/// An answer that is being generated. Its destructor cancels the request. After a fork the child
/// process can only destroy it.
class Answer {
 public:
  Answer(std::shared_ptr<Ticket> ticket, std::string spec, std::vector<Clip> clips,
         std::shared_ptr<CachedPrompt> cached)
      : ticket_(std::move(ticket)),
        spec_(std::move(spec)),
        clips_(std::move(clips)),
        cached_(std::move(cached)) {}
  ~Answer();
  Answer(const Answer&) = delete;
  Answer& operator=(const Answer&) = delete;

  /// Throws Error in the child of a fork.
  Ticket& ticket() const;
  const std::string& spec() const noexcept { return spec_; }
  const std::vector<Clip>& clips() const noexcept { return clips_; }
  /// Of one that is done and whose question records it. Throws the Error with which it failed;
  /// Error{kCancelled} if it was ended before.
  std::shared_ptr<CachedPrompt> cached() const;

 private:
  int process_ = getpid();
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

  const Session& session() const noexcept { return *session_; }
  Model& model() const noexcept { return *model_; }
  /// Of the arena of all caches.
  size_t cache_bytes() const noexcept { return cache_bytes_; }
  /// The service, for as long as somebody holds it. Throws Error if it was closed, in the child of
  /// a fork, and for a rule that it waits for.
  std::shared_ptr<Service> service() const;
  /// Cancels what is left, and refuses everything from now on. Throws Error for a rule that it
  /// waits for.
  void close();

 private:
  std::shared_ptr<const CachePlan> plan_of(const std::string& spec);

  int process_;
  SessionOptions options_;
  std::unique_ptr<Session> session_;
  Model* model_;
  size_t cache_bytes_ = 0;
  mutable std::mutex mutex_;                                       // of the rest
  std::map<std::string, std::shared_ptr<const CachePlan>> plans_;  // by canonical spec
  std::shared_ptr<Service> service_;                               // null: closed
};

}  // namespace kvlm::python
