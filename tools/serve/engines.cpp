#include "tools/serve/engines.h"

#include <fmt/format.h>

#include <algorithm>
#include <thread>
#include <utility>

#include "kernels/base/error.h"
#include "kernels/base/human_bytes.h"
#include "kernels/base/queue.h"
#include "kvcache/make_cache.h"
#include "tools/common/messages.h"
#include "tools/common/room.h"
#include "tools/run/batch_room.h"

// Which device answers a request is decided once, when it comes; from there on its Service has it.
namespace kvlm {

Engines::Engines(const ServeOptions& options, Watch& watch) : options_(options) {
  SessionOptions session = options.session;
  const int count = static_cast<int>(options.devices.size());
  if (count > 1) {
    const int threads = session.threads > 0 ? session.threads
                                            : static_cast<int>(std::thread::hardware_concurrency());
    session.threads = std::max(1, threads / count);
  }
  for (const std::string& device : options.devices) {
    session.device = device;
    all_.push_back({std::make_unique<Session>(session, &watch), nullptr});
    all_.back().session->stream().set_watch(nullptr);
  }
}

bool Engines::on_gpu() const noexcept {
  return all_.front().session->device().kind != DeviceKind::kCpu;
}

std::string Engines::devices() const {
  std::string names;
  for (const Engine& engine : all_) {
    names += (names.empty() ? "" : ", ") + device_name(engine.session->device());
  }
  return names;
}

std::vector<std::string> Engines::warnings() const {
  std::vector<std::string> found;
  for (const Engine& engine : all_) {
    for (const std::string& warning : engine.session->warnings()) {
      if (std::ranges::find(found, warning) == found.end()) found.push_back(warning);
    }
  }
  return found;
}

size_t Engines::cache_bytes() const {
  const auto capacity = [](const Engine& engine) {
    return engine.service->status().capacity_bytes;
  };
  return capacity(*std::ranges::min_element(all_, {}, capacity));
}

size_t Engines::cache_bytes_for(Session& session) const {
  if (options_.kv_memory) return *options_.kv_memory;
  const Decoder& decoder = session.model().decoder();
  const int context = std::min(decoder.max_positions(), options_.max_prompt + options_.max_answer);
  if (session.device().kind == DeviceKind::kCpu) {
    return std::min(session_bytes(*session.plan(), context, 8), memory_limit() / 4 / all_.size());
  }
  const size_t free = cuda::device_facts(session.device().index).free_bytes;
  const size_t activations = activation_bytes(session.model(), context, session.device().kind);
  return free > activations ? (free - activations) / 20 * 19 : free / 2;
}

void Engines::begin(const std::vector<std::shared_ptr<const CachePlan>>& plans,
                    std::function<void(double)> on_step, std::function<void(double)> on_stall) {
  for (Engine& engine : all_) {
    Session& session = *engine.session;
    Service::Settings settings;
    settings.cache_bytes = cache_bytes_for(session);
    settings.most_running = static_cast<size_t>(options_.most_running);
    settings.most_waiting = static_cast<size_t>(options_.most_waiting);
    settings.decode_share = options_.decode_share;
    settings.on_step = on_step;
    settings.on_stall = on_stall;
    if (session.device().kind != DeviceKind::kCpu) {
      settings.preparing_threads = std::min(session.threads(), 16);
      settings.warm_rows = options_.max_prompt;
      settings.warm_policies = plans;
    }
    engine.service = make_service(session, settings);
  }
  if (const size_t least = session_bytes(*plan(), 2); least > cache_bytes()) {
    print_message(
        "vlm-serve: warning: the cache of {} holds no request, the smallest takes {}; give a "
        "larger --kv-memory\n",
        human_bytes(cache_bytes()), human_bytes(least));
  }
}

/// Without --kv-memory the cache becomes smaller until all else has room, too.
std::unique_ptr<Service> Engines::make_service(Session& session,
                                               Service::Settings& settings) const {
  while (true) {
    try {
      return std::make_unique<Service>(session.model(), session.stream(), settings);
    } catch (const Error& error) {
      if (error.code() != ErrorCode::kOutOfMemory) throw;
      const size_t smaller = settings.cache_bytes / 10 * 9;
      if (options_.kv_memory || smaller < session_bytes(*session.plan(), 2)) {
        throw Error(ErrorCode::kOutOfMemory,
                    fmt::format("no memory for prompts of {} tokens and {} sequences with a "
                                "cache of {} ({}); give a smaller --kv-memory, --max-prompt or "
                                "--max-batch",
                                options_.max_prompt, options_.most_running,
                                human_bytes(settings.cache_bytes), error.what()));
      }
      settings.cache_bytes = smaller;
    }
  }
}

std::shared_ptr<Ticket> Engines::submit(ServiceJob job) {
  std::vector<std::pair<size_t, Service*>> by_load;
  size_t waiting = 0;
  for (const Engine& engine : all_) {
    const Service::Status status = engine.service->status();
    waiting += status.waiting;
    by_load.emplace_back(status.running + status.waiting, engine.service.get());
  }
  if (waiting >= static_cast<size_t>(options_.most_waiting) && all_.size() > 1) {
    throw ServiceRefusal(ServiceRefusal::Reason::kFull,
                         fmt::format("{} requests are waiting already; try again later", waiting));
  }
  std::ranges::stable_sort(by_load, {}, &std::pair<size_t, Service*>::first);
  for (size_t i = 0; i + 1 < by_load.size(); ++i) {
    try {
      return by_load[i].second->submit(job);
    } catch (const Error& error) {
      if (error.code() != ErrorCode::kOutOfMemory) throw;  // another device may have more
    }
  }
  return by_load.back().second->submit(std::move(job));
}

void Engines::drain(std::chrono::milliseconds most) {
  std::vector<std::thread> threads;
  for (const Engine& engine : all_) {
    if (engine.service) threads.emplace_back([&engine, most] { engine.service->drain(most); });
  }
  for (std::thread& thread : threads) thread.join();
}

void Engines::hurry() noexcept {
  for (const Engine& engine : all_) engine.service->hurry();
}

Service::Status Engines::status() const {
  Service::Status sum;
  for (const Engine& engine : all_) {
    const Service::Status one = engine.service->status();
    sum.running += one.running;
    sum.waiting += one.waiting;
    sum.reserved_bytes += one.reserved_bytes;
    sum.most_reserved_bytes += one.most_reserved_bytes;
    sum.capacity_bytes += one.capacity_bytes;
    sum.draining |= one.draining;
    sum.failed |= one.failed;
    for (const auto& [spec, bytes] : one.cache_bytes) sum.cache_bytes[spec] += bytes;
  }
  return sum;
}

}  // namespace kvlm
