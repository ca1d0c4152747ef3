#pragma once

#include <chrono>
#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "runtime/service.h"
#include "tools/common/session.h"
#include "tools/serve/options.h"

namespace kvlm {

/// The loaded model on each device of vlm-serve, with a Service each. A request goes to the one
/// with the fewest, or to another if that one's cache is too small.
class Engines {
 public:
  /// Loads them one after the other; `watch` follows.
  Engines(const ServeOptions& options, Watch& watch);

  /// Begins to serve.
  ///   plans     policies for which memory is set aside
  ///   on_step   as Service::Settings; any of their threads may call it
  void begin(const std::vector<std::shared_ptr<const CachePlan>>& plans,
             std::function<void(double)> on_step, std::function<void(double)> on_stall);

  /// For prompts, which are the same on all of them.
  Model& model() noexcept { return all_.front().session->model(); }
  std::shared_ptr<const CachePlan> plan() const noexcept { return all_.front().session->plan(); }
  bool on_gpu() const noexcept;
  /// "cuda:0, cuda:1".
  std::string devices() const;
  /// Of each session, without repetition.
  std::vector<std::string> warnings() const;
  /// Of the device that has the least.
  size_t cache_bytes() const;

  /// As Service has them.
  std::shared_ptr<Ticket> submit(ServiceJob job);
  void drain(std::chrono::milliseconds most);
  void hurry() noexcept;
  /// Summed over the devices; failed if one has.
  Service::Status status() const;

 private:
  struct Engine {
    std::unique_ptr<Session> session;
    std::unique_ptr<Service> service;
  };

  size_t cache_bytes_for(Session& session) const;
  std::unique_ptr<Service> make_service(Session& session, Service::Settings& settings) const;

  const ServeOptions& options_;
  std::vector<Engine> all_;
};

}  // namespace kvlm
