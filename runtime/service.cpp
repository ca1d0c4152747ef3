#include "runtime/service.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "kernels/base/human_bytes.h"
#include "kernels/base/watch.h"
#include "kvcache/make_cache.h"
#include "runtime/failure_kind.h"
#include "runtime/warm_up.h"

// Continuous batching for requests that come from many threads. One thread owns the model: between
// two steps of decode it drops what was cancelled and admits at most one prompt. Who waits, and in
// which order, is decided here; what a sequence does, in generator.h.
namespace kvlm {

namespace {

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

std::exception_ptr cancellation() {
  return std::make_exception_ptr(Error(ErrorCode::kCancelled, "cancelled"));
}

/// Cancels what is done for one request.
class TicketWatch final : public Watch {
 public:
  TicketWatch(const Ticket& ticket, const Watch* outer) : ticket_(ticket), outer_(outer) {}
  void progress(std::string_view, size_t, size_t) override {}
  bool cancelled() const noexcept override {
    return ticket_.is_cancelled() || (outer_ != nullptr && outer_->cancelled());
  }

 private:
  const Ticket& ticket_;
  const Watch* outer_;
};

}  // namespace

struct Ticket::Bell {
  std::mutex mutex;
  std::condition_variable work;
  bool cancelled = false;  // some ticket was
};

Ticket::News Ticket::wait(std::chrono::milliseconds most) {
  std::unique_lock lock(mutex_);
  news_.wait_for(lock, most, [&] { return done_ || !text_.empty(); });
  return {std::exchange(text_, {}), std::exchange(tokens_, {}), std::exchange(logprobs_, {}),
          admitted_, done_};
}

void Ticket::cancel() noexcept {
  if (cancelled_.exchange(true)) return;
  const std::scoped_lock lock(bell_->mutex);
  bell_->cancelled = true;
  bell_->work.notify_all();
}

bool Ticket::is_cancelled() const noexcept { return cancelled_.load(std::memory_order_relaxed); }

const GenerationResult& Ticket::result() const {
  const std::scoped_lock lock(mutex_);
  if (failure_) std::rethrow_exception(failure_);
  return result_;
}

void Ticket::append(std::string_view text) {
  const std::scoped_lock lock(mutex_);
  text_ += text;
  news_.notify_all();
}

void Ticket::append(std::span<const int32_t> tokens, std::span<const TokenLogprobs> logprobs) {
  const std::scoped_lock lock(mutex_);
  tokens_.insert(tokens_.end(), tokens.begin(), tokens.end());
  logprobs_.insert(logprobs_.end(), logprobs.begin(), logprobs.end());
}

void Ticket::finish(GenerationResult result, std::exception_ptr failure) {
  const std::scoped_lock lock(mutex_);
  result_ = std::move(result);
  failure_ = std::move(failure);
  done_ = true;
  news_.notify_all();
}

void Ticket::fail(const std::exception_ptr& failure) {
  if (!is_cancellation(failure)) return finish({}, failure);
  GenerationResult result;
  result.finish_reason = "cancelled";
  finish(std::move(result), nullptr);
}

Service::Service(Model& model, Stream& stream, const Settings& settings)
    : model_(model),
      stream_(stream),
      watch_(stream.watch()),
      settings_(settings),
      arena_(std::make_shared<Arena>(stream.device(), settings.cache_bytes)),
      bell_(std::make_shared<Ticket::Bell>()) {
  status_.capacity_bytes = arena_->capacity();
  stream_.enter_thread();
  for (const auto& plan : settings_.warm_policies) {
    const Policy& policy = policy_of(plan);
    warm_up(model_, *policy.cache, *policy.generator, settings_.most_running, settings_.warm_rows);
  }
  for (int i = 0; i < settings_.preparing_threads; ++i) {
    preparing_.emplace_back([this] { prepare_ahead(); });
  }
  thread_ = std::thread([this] { run(); });
}

Service::~Service() {
  {
    const std::scoped_lock lock(bell_->mutex);
    status_.draining = stopping_ = true;
    bell_->work.notify_all();
  }
  drain(std::chrono::milliseconds(0));
  thread_.join();
  for (std::thread& thread : preparing_) thread.join();
}

std::shared_ptr<Ticket> Service::submit(ServiceJob job) {
  const Reservation needed = reservation(*job.plan, job.size);
  if (Arena::rounded(needed.kept) + Arena::rounded(needed.staging) > arena_->capacity()) {
    throw Error(ErrorCode::kOutOfMemory,
                fmt::format("the request needs {} of cache for {} tokens under --kv {}, and there "
                            "are {} in all; ask for fewer tokens or a cache policy of fewer bits",
                            human_bytes(needed.bytes()), job.size.max_rows, job.plan->spec,
                            human_bytes(arena_->capacity())));
  }
  std::shared_ptr<Ticket> ticket(new Ticket(std::move(job), bell_));
  const std::scoped_lock lock(bell_->mutex);
  using Reason = ServiceRefusal::Reason;
  if (status_.failed) {
    throw ServiceRefusal(Reason::kFailed, "the device is lost; start the server again");
  }
  if (status_.draining) {
    throw ServiceRefusal(Reason::kDraining, "the server is about to end; ask another one");
  }
  if (waiting_count_ >= settings_.most_waiting) {
    throw ServiceRefusal(Reason::kFull, fmt::format("{} requests are waiting already; try again "
                                                    "later",
                                                    waiting_count_));
  }
  waiting_[ticket->job_.client].push_back(ticket);
  status_.waiting = ++waiting_count_;
  bell_->work.notify_all();
  return ticket;
}

void Service::drain(std::chrono::milliseconds most) {
  std::unique_lock lock(bell_->mutex);
  status_.draining = true;
  const auto ended = [&] { return waiting_count_ == 0 && status_.running == 0; };
  idle_.wait_for(lock, most, [&] { return ended() || hurried_; });
  hurried_ = true;
  bell_->work.notify_all();
  idle_.wait(lock, ended);
}

void Service::hurry() noexcept {
  const std::scoped_lock lock(bell_->mutex);
  hurried_ = true;
  idle_.notify_all();
}

Service::Status Service::status() const {
  const std::scoped_lock lock(bell_->mutex);
  return status_;
}

std::vector<std::shared_ptr<Ticket>> Service::next_in_turn(size_t most) const {
  std::vector<std::shared_ptr<Ticket>> tickets;
  std::vector<const std::deque<std::shared_ptr<Ticket>>*> clients;
  const auto first = waiting_.upper_bound(last_client_);
  for (auto client = first; client != waiting_.end(); ++client) clients.push_back(&client->second);
  for (auto client = waiting_.begin(); client != first; ++client) {
    clients.push_back(&client->second);
  }
  for (size_t place = 0; tickets.size() < std::min(most, waiting_count_); ++place) {
    for (const auto* client : clients) {
      if (place < client->size() && tickets.size() < most) tickets.push_back((*client)[place]);
    }
  }
  return tickets;
}

void Service::remove(const std::shared_ptr<Ticket>& ticket) {
  if (ahead_ == ticket) ahead_.reset();
  const auto client = waiting_.find(ticket->job_.client);
  if (client == waiting_.end()) return;
  const auto place = std::ranges::find(client->second, ticket);
  if (place == client->second.end()) return;
  client->second.erase(place);
  if (client->second.empty()) waiting_.erase(client);
  status_.waiting = --waiting_count_;
}

/// The work of a preparing thread.
void Service::prepare_ahead() {
  const size_t ahead = 2 * static_cast<size_t>(settings_.preparing_threads);
  std::unique_lock lock(bell_->mutex);
  while (true) {
    std::shared_ptr<Ticket> ticket;
    bell_->work.wait(lock, [&] {
      for (const std::shared_ptr<Ticket>& next : next_in_turn(ahead)) {
        if (next->phase_ == Ticket::Phase::kWaiting && !next->is_cancelled()) {
          ticket = next;
          return true;
        }
      }
      return stopping_;
    });
    if (stopping_) return;
    ticket->phase_ = Ticket::Phase::kPreparing;
    lock.unlock();
    std::exception_ptr failure;
    try {
      ticket->prepared_ = ticket->job_.prepare(TicketWatch(*ticket, nullptr));
    } catch (...) {
      failure = std::current_exception();
    }
    lock.lock();
    ticket->phase_ = Ticket::Phase::kReady;
    if (failure) {
      remove(ticket);
      ticket->fail(failure);
    }
    bell_->work.notify_all();
  }
}

Service::Policy& Service::policy_of(const std::shared_ptr<const CachePlan>& plan) {
  const auto found = std::ranges::find_if(
      policies_, [&](const Policy& policy) { return policy.plan->spec == plan->spec; });
  if (found != policies_.end()) {
    policies_.splice(policies_.begin(), policies_, found);
    return policies_.front();
  }
  for (auto policy = policies_.end(); policies_.size() >= kMostPolicies;) {
    if (policy == policies_.begin()) break;
    --policy;
    if (policy->running == 0) policy = policies_.erase(policy);
  }
  Policy policy{plan, make_cache(plan, arena_), nullptr};
  policy.generator = std::make_unique<Generator>(model_, *policy.cache, stream_);
  policy.generator->set_pause([this] { between_layers(); });
  policies_.push_front(std::move(policy));
  return policies_.front();
}

/// The request that is admitted next, taken out of the queue; null if none is now. Under the mutex.
std::shared_ptr<Ticket> Service::choose() {
  if (running_.size() >= settings_.most_running) return nullptr;
  if (owed_s_ > 0 && !running_.empty()) return nullptr;
  std::vector<std::shared_ptr<Ticket>> skipped;
  for (const std::shared_ptr<Ticket>& ticket : next_in_turn(kMostPasses + 1)) {
    if (settings_.preparing_threads > 0 && ticket->phase_ != Ticket::Phase::kReady) return nullptr;
    try {
      if (!policy_of(ticket->job_.plan).cache->fits(ticket->job_.size)) {
        if (ticket->passed_ >= kMostPasses) return nullptr;
        skipped.push_back(ticket);
        continue;
      }
    } catch (const std::exception&) {  // no memory for another cache
      remove(ticket);
      ticket->fail(std::current_exception());
      continue;
    }
    for (const auto& other : skipped) ++other->passed_;
    if (skipped.empty()) last_client_ = ticket->job_.client;
    remove(ticket);
    status_.running = running_.size() + 1;
    bell_->work.notify_all();  // others are among the next to be prepared
    return ticket;
  }
  return nullptr;
}

/// The request whose images can be encoded while a prompt of this policy is read: the next in turn,
/// if it is for the same cache. Null on a CPU, and while another one waits with encoded images.
std::shared_ptr<Ticket> Service::next_after(const Policy& policy) {
  const std::scoped_lock lock(bell_->mutex);
  if (settings_.preparing_threads == 0 || waiting_count_ == 0 || ahead_) return nullptr;
  std::shared_ptr<Ticket> next = next_in_turn(1).front();
  const bool is_ready = next->phase_ == Ticket::Phase::kReady && !next->is_cancelled();
  if (!is_ready || next->job_.plan->spec != policy.plan->spec) return nullptr;
  ahead_ = next;
  return next;
}

/// Generator::admit(); where memory is short without encoding for `next`, which may be null.
int Service::begin(Policy& policy, Ticket& ticket, const std::shared_ptr<Ticket>& next) {
  const auto on_text = [&ticket](std::string_view text) { ticket.append(text); };
  try {
    return policy.generator->admit(std::move(ticket.prepared_), on_text,
                                   next ? &next->prepared_ : nullptr);
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kOutOfMemory || !next || !next->prepared_.encoded) throw;
    next->prepared_.encoded.reset();
  }
  return policy.generator->admit(std::move(ticket.prepared_), on_text);
}

void Service::admit(const std::shared_ptr<Ticket>& ticket) {
  Policy& policy = policy_of(ticket->job_.plan);
  read_ = ticket;
  charged_ = Clock::now();
  owed_s_ = stalled_s_ = layer_s_ = 0;
  layers_ = 0;
  try {
    const TicketWatch watch(*ticket, stream_.watch());
    if (settings_.preparing_threads == 0) ticket->prepared_ = ticket->job_.prepare(watch);
    {
      const std::scoped_lock lock(ticket->mutex_);
      ticket->queue_ms_ = 1000 * seconds_since(ticket->submitted_);
      ticket->admitted_ = true;
    }
    TicketWatch of_prompt(*ticket, stream_.watch());
    const WatchScope scope(stream_, &of_prompt);
    const int key = begin(policy, *ticket, next_after(policy));
    if (ticket->job_.on_prompt && !policy.generator->finished(key)) {
      try {
        ticket->job_.on_prompt(*policy.generator, key);
      } catch (...) {
        policy.generator->cancel(key);
        policy.generator->take(key);
        throw;
      }
    }
    ++policy.running;
    running_.push_back({ticket, &policy, key});
    policy.generator->deliver();
  } catch (...) {
    const std::exception_ptr failure = std::current_exception();
    ticket->fail(failure);
    if (is_device_failure(failure)) throw;
  }
  read_.reset();
  charge();
  if (std::ranges::any_of(running_, [&](const Running& r) { return r.ticket != ticket; })) {
    end_stall();
  }
}

/// Seconds of decode that answers are owed for so many of a prompt.
double Service::share_of(double seconds) const noexcept {
  return settings_.decode_share / (1 - settings_.decode_share) * seconds;
}

/// Answers are owed their share of the time that a prompt has taken since the last call.
void Service::charge() {
  const double took = seconds_since(charged_);
  charged_ = Clock::now();
  layer_s_ = took / ++layers_;
  layers_ = 0;
  stalled_s_ += took;
  owed_s_ += share_of(took);
}

/// Answers that have waited for a prompt go on.
void Service::end_stall() {
  const double waited = std::exchange(stalled_s_, 0);
  if (settings_.on_stall) settings_.on_stall(waited);
}

/// Steps of the other answers, while a prompt pauses.
void Service::between_layers() {
  {
    const std::scoped_lock lock(bell_->mutex);
    if (hurried_) read_->cancelled_ = true;
  }
  if (running_.empty() || settings_.decode_share == 0) return;
  if (stream_.device().kind != DeviceKind::kCpu) {
    if (read_->job_.size.prompt_rows < kLongPrompt) return;
    // To wait for the GPU costs time, so not as long as nothing can be owed.
    if (owed_s_ + share_of(layer_s_ * (layers_ + 1)) <= 0) {
      ++layers_;
      return;
    }
    stream_.synchronize();
  }
  charge();
  if (owed_s_ <= 0) return;
  end_stall();
  const WatchScope scope(stream_, watch_);
  while (owed_s_ > 0 && !running_.empty() && !read_->is_cancelled()) {
    drop_cancelled();
    step();
    const std::scoped_lock lock(bell_->mutex);
    publish();
  }
  charged_ = Clock::now();
}

void Service::step() {
  const Clock::time_point start = Clock::now();
  std::exception_ptr failure;
  bool stepped = false;
  for (Policy& policy : policies_) {
    if (policy.running == 0) continue;
    try {
      stepped |= policy.generator->active() > 0;
      policy.generator->step();
    } catch (...) {
      failure = std::current_exception();
    }
    policy.generator->deliver();
  }
  const double took = seconds_since(start);
  owed_s_ -= took;
  if (stepped && settings_.on_step) settings_.on_step(took);
  collect(failure);
  if (failure && is_device_failure(failure)) std::rethrow_exception(failure);
}

void Service::pass_logprobs(Running& entry) {
  const std::span all = entry.policy->generator->logprobs(entry.key);
  if (all.size() == entry.logprobs) return;
  entry.ticket->append(entry.policy->generator->tokens(entry.key).subspan(entry.logprobs),
                       all.subspan(entry.logprobs));
  entry.logprobs = all.size();
}

/// Answers that are complete go to their tickets; `failure` is why a step has failed, or null.
void Service::collect(const std::exception_ptr& failure) {
  std::erase_if(running_, [&](Running& entry) {
    pass_logprobs(entry);
    if (!entry.policy->generator->finished(entry.key)) return false;
    GenerationResult result = entry.policy->generator->take(entry.key);
    --entry.policy->running;
    const bool failed = result.finish_reason == "error";
    entry.ticket->finish(std::move(result), failed ? failure : nullptr);
    return true;
  });
}

void Service::drop_cancelled() {
  for (Running& entry : running_) {
    const bool ended = entry.policy->generator->finished(entry.key);
    if (entry.ticket->is_cancelled() && !ended) entry.policy->generator->cancel(entry.key);
  }
  collect(nullptr);
  const std::scoped_lock lock(bell_->mutex);
  if (hurried_) {
    for (const Running& entry : running_) entry.ticket->cancelled_ = true;
  }
  if (!bell_->cancelled && !hurried_) return;
  bell_->cancelled = false;
  for (const std::shared_ptr<Ticket>& ticket : next_in_turn(waiting_count_)) {
    if (hurried_) ticket->cancelled_ = true;
    if (!ticket->is_cancelled() || ticket->phase_ == Ticket::Phase::kPreparing) continue;
    remove(ticket);
    ticket->fail(cancellation());
  }
}

/// Says what it is doing. Under the mutex.
void Service::publish() {
  status_.running = running_.size() + (read_ ? 1 : 0);
  status_.waiting = waiting_count_;
  status_.reserved_bytes = arena_->reserved();
  status_.most_reserved_bytes = std::max(status_.most_reserved_bytes, status_.reserved_bytes);
  status_.cache_bytes.clear();
  for (const Policy& policy : policies_) {
    status_.cache_bytes[policy.plan->spec] = policy.cache->bytes();
  }
  if (waiting_count_ == 0 && status_.running == 0) idle_.notify_all();
}

/// Whether there is something to do but to wait. Under the mutex.
bool Service::has_work() const {
  if (!running_.empty() || stopping_ || bell_->cancelled) return true;
  if (waiting_count_ == 0) return false;
  if (hurried_) return true;
  return settings_.preparing_threads == 0 ||
         next_in_turn(1).front()->phase_ == Ticket::Phase::kReady;
}

void Service::run() {
  try {
    stream_.enter_thread();
    while (true) {
      std::shared_ptr<Ticket> next;
      {
        std::unique_lock lock(bell_->mutex);
        publish();
        bell_->work.wait(lock, [&] { return has_work(); });
        if (stopping_ && running_.empty() && waiting_count_ == 0) return;
      }
      drop_cancelled();
      {
        const std::scoped_lock lock(bell_->mutex);
        next = choose();
      }
      if (next) admit(next);
      {
        const std::scoped_lock lock(bell_->mutex);
        publish();  // the high-water mark is behind an admission
      }
      step();
    }
  } catch (...) {
    fail_all(std::current_exception());
  }
}

/// Ends every request after a failure that ends the service: the device is lost.
void Service::fail_all(const std::exception_ptr& failure) {
  const std::scoped_lock lock(bell_->mutex);
  status_.failed = true;
  for (Running& entry : running_) entry.ticket->finish({}, failure);
  running_.clear();
  for (const std::shared_ptr<Ticket>& ticket : next_in_turn(waiting_count_)) {
    ticket->finish({}, failure);
  }
  waiting_.clear();
  waiting_count_ = status_.waiting = status_.running = 0;
  stopping_ = true;
  bell_->work.notify_all();
  idle_.notify_all();
}

}  // namespace kvlm
