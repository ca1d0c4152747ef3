#include "tools/serve/metrics.h"

#include <fmt/format.h>
#include <prometheus/counter.h>
#include <prometheus/gauge.h>
#include <prometheus/histogram.h>
#include <prometheus/registry.h>
#include <prometheus/text_serializer.h>

#include <mutex>
#include <set>
#include <utility>
#include <vector>

namespace kvlm {

namespace {

using Buckets = prometheus::Histogram::BucketBoundaries;

Buckets seconds_from(double least, int count) {
  Buckets buckets;
  for (int i = 0; i < count; ++i, least *= 2) buckets.push_back(least);
  return buckets;
}

}  // namespace

struct Metrics::State {
  prometheus::Histogram& histogram(const char* name, const char* help, Buckets buckets) {
    return prometheus::BuildHistogram().Name(name).Help(help).Register(registry).Add(
        {}, std::move(buckets));
  }
  prometheus::Family<prometheus::Counter>& counters(const char* name, const char* help) {
    return prometheus::BuildCounter().Name(name).Help(help).Register(registry);
  }
  prometheus::Family<prometheus::Gauge>& gauges(const char* name, const char* help) {
    return prometheus::BuildGauge().Name(name).Help(help).Register(registry);
  }

  std::mutex mutex;
  std::set<std::string> keys;               // that ignored() has counted
  std::vector<prometheus::Gauge*> by_spec;  // of the latest text()
  prometheus::Registry registry;
  prometheus::Family<prometheus::Counter>& requests =
      counters("kvlm_requests_total", "Requests by status and model");
  prometheus::Family<prometheus::Counter>& tokens =
      counters("kvlm_tokens_total", "Tokens of prompts, of images and of answers");
  prometheus::Counter& clamped =
      counters("kvlm_clamped_total", "Answers cut below what was asked for").Add({});
  prometheus::Family<prometheus::Counter>& ignored =
      counters("kvlm_ignored_total", "Keys of requests that were not followed");
  prometheus::Counter& cancelled =
      counters("kvlm_cancelled_total", "Requests whose client went away").Add({});
  prometheus::Gauge& running = gauges("kvlm_running", "Sequences in the cache").Add({});
  prometheus::Gauge& waiting = gauges("kvlm_waiting", "Requests in the queue").Add({});
  prometheus::Family<prometheus::Gauge>& cache =
      gauges("kvlm_cache_bytes", "Bytes of cache in use, by policy");
  prometheus::Gauge& reserved =
      gauges("kvlm_cache_reserved_bytes", "Bytes set aside for running sequences").Add({});
  prometheus::Gauge& most_reserved =
      gauges("kvlm_cache_reserved_bytes_max", "Most bytes set aside so far").Add({});
  prometheus::Gauge& capacity =
      gauges("kvlm_cache_capacity_bytes", "Bytes of cache in all").Add({});
  prometheus::Histogram& queue =
      histogram("kvlm_queue_seconds", "From a request to its prompt", seconds_from(0.001, 20));
  prometheus::Histogram& first =
      histogram("kvlm_ttft_seconds", "From a request to its first token", seconds_from(0.001, 20));
  prometheus::Histogram& steps =
      histogram("kvlm_step_seconds", "A token of every running sequence", seconds_from(0.0005, 16));
  prometheus::Histogram& stalls =
      histogram("kvlm_stall_seconds", "Time that running sequences waited for a prompt",
                seconds_from(0.001, 18));
  prometheus::Histogram& whole =
      histogram("kvlm_request_seconds", "From a request to its answer", seconds_from(0.001, 22));
};

Metrics::Metrics() : state_(std::make_unique<State>()) {}
Metrics::~Metrics() = default;

void Metrics::step(double seconds) { state_->steps.Observe(seconds); }
void Metrics::stall(double seconds) { state_->stalls.Observe(seconds); }
void Metrics::clamped() { state_->clamped.Increment(); }
void Metrics::cancelled() { state_->cancelled.Increment(); }

void Metrics::ignored(const std::string& key) {
  const std::scoped_lock lock(state_->mutex);
  constexpr size_t kMostKeys = 64;  // anybody may send any
  const bool known = state_->keys.contains(key) || state_->keys.size() < kMostKeys;
  if (known) state_->keys.insert(key);
  state_->ignored.Add({{"key", known ? key : "other"}}).Increment();
}

void Metrics::request(int status, const std::string& model, double seconds) {
  state_->requests.Add({{"status", std::to_string(status)}, {"model", model}}).Increment();
  state_->whole.Observe(seconds);
}

void Metrics::answer(const GenerationResult& result, double queue_ms) {
  const auto count = [&](const char* kind, size_t tokens) {
    state_->tokens.Add({{"kind", kind}}).Increment(static_cast<double>(tokens));
  };
  count("prompt", static_cast<size_t>(result.prompt_tokens));
  count("visual", static_cast<size_t>(result.visual_tokens));
  count("answer", result.tokens.size());
  state_->queue.Observe(queue_ms / 1000);
  state_->first.Observe((queue_ms + result.timings.ttft_ms) / 1000);
}

std::string Metrics::text(const Service::Status& status) {
  state_->running.Set(static_cast<double>(status.running));
  state_->waiting.Set(static_cast<double>(status.waiting));
  state_->reserved.Set(static_cast<double>(status.reserved_bytes));
  state_->most_reserved.Set(static_cast<double>(status.most_reserved_bytes));
  state_->capacity.Set(static_cast<double>(status.capacity_bytes));
  const std::scoped_lock lock(state_->mutex);
  for (prometheus::Gauge* gauge : std::exchange(state_->by_spec, {})) state_->cache.Remove(gauge);
  for (const auto& [spec, bytes] : status.cache_bytes) {
    state_->by_spec.push_back(&state_->cache.Add({{"kv", spec}}));
    state_->by_spec.back()->Set(static_cast<double>(bytes));
  }
  return prometheus::TextSerializer().Serialize(state_->registry.Collect());
}

}  // namespace kvlm
