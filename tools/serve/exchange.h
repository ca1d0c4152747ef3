#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "runtime/clip_file.h"
#include "runtime/service.h"
#include "tools/serve/chat_reply.h"
#include "tools/serve/chat_request.h"
#include "tools/serve/http_server.h"
#include "tools/serve/media.h"
#include "tools/serve/server.h"

namespace kvlm {

/// A request that was understood.
struct Server::Asked {
  ChatRequest request;
  ReplyFacts facts;
  std::string client;
  std::vector<std::unique_ptr<MemoryFile>> files;
  std::vector<OpenClip> clips;
  std::shared_ptr<const CachePlan> plan;
  SequenceSize size;
  int context = 0;
  std::chrono::steady_clock::time_point start = std::chrono::steady_clock::now();
  std::shared_ptr<Ticket> ticket;
  // What came of its answer: the text that is not written yet, and all of it.
  std::string text, whole;
  std::optional<LogprobList> logprobs;

  /// Whether the answer is complete.
  bool take(const Ticket::News& news) {
    text += news.text;
    whole += news.text;
    logprobs->add(news.tokens, news.logprobs);
    return news.done;
  }

  ~Asked() {
    if (ticket) ticket->cancel();
  }
};

/// A request and its response, and what is logged of them.
struct Server::Exchange {
  const httplib::Request& request;
  httplib::Response& response;
  std::string model = "-";
  bool logged = false;  // or will be, by somebody else
};

}  // namespace kvlm
