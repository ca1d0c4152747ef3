#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>

#include "tools/serve/chat_request.h"
#include "tools/serve/engines.h"
#include "tools/serve/http_server.h"
#include "tools/serve/media.h"
#include "tools/serve/metrics.h"
#include "tools/serve/options.h"

namespace kvlm {

/// vlm-serve: an HTTP server that answers at once, and has a model once that is loaded.
class Server {
 public:
  /// Binds and begins to answer, with "loading" for now. Throws Error{kInvalidArgument} if the port
  /// is taken.
  explicit Server(const ServeOptions& options);
  ~Server();
  Server(const Server&) = delete;
  Server& operator=(const Server&) = delete;

  int port() const noexcept { return port_; }
  /// Serves by these, which outlive it, from now on.
  void begin(Engines& engines);
  /// Refuses new requests, and finishes the others for so long at most.
  void drain(std::chrono::seconds most);
  /// Ends a drain() at once.
  void hurry() noexcept;
  bool failed() const;
  /// Requests that are running, and that are waiting.
  std::pair<size_t, size_t> left() const;

 private:
  struct Asked;
  struct Exchange;

  void route();
  bool is_own_page(const httplib::Request& request) const;
  void check_head(const httplib::Request& request) const;
  std::string client_of(const httplib::Request& request) const;
  void guard(const httplib::Request& request, httplib::Response& response,
             const std::function<void(Exchange&)>& answer);
  void chat(Exchange& exchange);
  nlohmann::ordered_json explain(const std::string& body);
  std::shared_ptr<Asked> understand(const nlohmann::json& body);
  std::shared_ptr<Asked> ask(const std::string& body, const std::string& client);
  void reply_whole(Exchange& exchange, const std::shared_ptr<Asked>& asked);
  void reply_stream(Exchange& exchange, const std::shared_ptr<Asked>& asked);
  bool stream_on(const std::shared_ptr<Asked>& asked, httplib::DataSink& sink);
  void finish(const Asked& asked, int status);
  std::shared_ptr<const CachePlan> plan_of(const std::string& spec);
  std::string spec_of(const std::string& model, const std::optional<std::string>& kv) const;
  nlohmann::ordered_json models() const;
  nlohmann::ordered_json health() const;
  Engines& engines();
  void log(const nlohmann::ordered_json& line) const;

  const ServeOptions& options_;
  HttpServer http_;
  MediaReader media_;
  ChatLimits limits_;
  Metrics metrics_;
  int port_ = 0;
  int64_t started_;
  std::atomic<bool> draining_ = false;

  std::atomic<bool> ready_ = false;
  Engines* engines_ = nullptr;
  std::mutex plans_mutex_;
  std::map<std::string, std::shared_ptr<const CachePlan>> plans_;  // by canonical spec
  std::thread listening_;
};

}  // namespace kvlm
