#pragma once

#include <memory>
#include <string>

#include "runtime/generator.h"
#include "runtime/service.h"

namespace kvlm {

/// Counts and times of a server, as Prometheus reads them. For any thread.
class Metrics {
 public:
  Metrics();
  ~Metrics();
  Metrics(const Metrics&) = delete;
  Metrics& operator=(const Metrics&) = delete;

  void step(double seconds);
  void stall(double seconds);
  void request(int status, const std::string& model, double seconds);
  void answer(const GenerationResult& result, double queue_ms);
  void clamped();
  void ignored(const std::string& key);
  void cancelled();

  /// The text of GET /metrics.
  std::string text(const Service::Status& status);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace kvlm
