#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <deque>
#include <exception>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "kernels/base/error.h"
#include "kvcache/arena.h"
#include "kvcache/plan/cache_plan.h"
#include "runtime/generator.h"
#include "runtime/request.h"

namespace kvlm {

/// A request for a Service.
struct ServiceJob {
  std::string client;                     ///< whose it is: clients take turns
  std::shared_ptr<const CachePlan> plan;  ///< its cache policy, for the service's decoder
  SequenceSize size;                      ///< what it needs of the cache at most
  /// Does what needs neither device nor cache. Called at most once, by any thread; `watch` cancels
  /// when the request is cancelled.
  std::function<PreparedRequest(const Watch& watch)> prepare;
  /// Called by the service's thread when the prompt is in the cache, before the first step of its
  /// answer (Generator::cached_prompt()). What it throws ends the request.
  std::function<void(const Generator& generator, int key)> on_prompt = {};
};

/// Why a Service does not take a request now.
class ServiceRefusal : public Error {
 public:
  enum class Reason : uint8_t { kFull, kDraining, kFailed };

  ServiceRefusal(Reason reason, const std::string& message)
      : Error(ErrorCode::kUnsupported, message), reason_(reason) {}
  Reason reason() const noexcept { return reason_; }

 private:
  Reason reason_;
};

/// A request on its way through a Service, which it may outlive. For any thread.
class Ticket {
 public:
  /// What became of a request since the last call.
  struct News {
    std::string text;
    std::vector<int32_t> tokens;  ///< of a request with logprobs
    std::vector<TokenLogprobs> logprobs;
    bool admitted = false;  ///< it has left the queue, now or earlier
    bool done = false;      ///< the last news
  };

  /// Waits for text or the end, at most that long, and takes it.
  News wait(std::chrono::milliseconds most);
  /// Ends the request within one layer of its prompt or one step of its answer.
  void cancel() noexcept;
  bool is_cancelled() const noexcept;

  /// Of a request that is done; its text has gone to wait(). Throws the Error with which it failed.
  const GenerationResult& result() const;
  /// From submit() to its place in the cache. Of a request that is done.
  double queue_ms() const noexcept { return queue_ms_; }

 private:
  friend class Service;
  struct Bell;  // wakes the service
  using Clock = std::chrono::steady_clock;

  Ticket(ServiceJob job, std::shared_ptr<Bell> bell)
      : job_(std::move(job)), bell_(std::move(bell)) {}
  void append(std::string_view text);
  void append(std::span<const int32_t> tokens, std::span<const TokenLogprobs> logprobs);
  void finish(GenerationResult result, std::exception_ptr failure);
  /// A cancellation is a result.
  void fail(const std::exception_ptr& failure);

  // Of the service, under its mutex.
  enum class Phase : uint8_t { kWaiting, kPreparing, kReady, kRunning };
  Phase phase_ = Phase::kWaiting;
  ServiceJob job_;
  std::shared_ptr<Bell> bell_;
  PreparedRequest prepared_;
  Clock::time_point submitted_ = Clock::now();
  int passed_ = 0;  // how often others were admitted before it, which did not fit

  mutable std::mutex mutex_;
  std::condition_variable news_;
  std::atomic<bool> cancelled_ = false;
  std::string text_;
  std::vector<int32_t> tokens_;
  std::vector<TokenLogprobs> logprobs_;
  bool admitted_ = false;
  bool done_ = false;
  GenerationResult result_;
  std::exception_ptr failure_;
  double queue_ms_ = 0;
};

/// Answers requests of many threads with one model, on one thread of its own: any cache policy a
/// request, all of them in one arena. A request is admitted when the cache has room for all that it
/// can need, so that it always ends and costs no other one its life. Its tokens depend on nothing
/// but itself.
///
/// The next request is the first of the client that has waited longest for its turn. If it does not
/// fit now, others may pass it, at most kMostPasses times. While a prompt is read, the answers that
/// are being made get decode_share of the time, in steps between its layers; on a GPU, where short
/// prompts are read at once, after it.
class Service {
 public:
  static constexpr int kMostPasses = 16;
  static constexpr size_t kMostPolicies = 8;  ///< that keep a cache; idle ones go
  static constexpr int kLongPrompt = 2048;    ///< tokens from which one pauses on a GPU

  struct Settings {
    size_t cache_bytes = 0;      ///< of the arena
    size_t most_running = 64;    ///< sequences at once
    size_t most_waiting = 1024;  ///< requests in the queue
    double decode_share = 0.2;   ///< [0, 1) of the time while prompts are read
    /// That prepare requests ahead, beside a GPU; 0: the service's own thread does.
    int preparing_threads = 0;
    /// Before the first request each of these is made to take what memory of a GPU it needs beside
    /// the cache for most_running sequences and prompts of so many tokens (warm_up.h).
    std::vector<std::shared_ptr<const CachePlan>> warm_policies = {};
    int warm_rows = 0;
    std::function<void(double seconds)> on_step = {};   ///< each step of decode, by its thread
    std::function<void(double seconds)> on_stall = {};  ///< each time answers waited for a prompt
  };

  /// What it is doing.
  struct Status {
    size_t running = 0;
    size_t waiting = 0;
    std::map<std::string, size_t> cache_bytes;  ///< in use, by cache policy
    size_t reserved_bytes = 0;                  ///< set aside for what is running
    size_t most_reserved_bytes = 0;             ///< so far
    size_t capacity_bytes = 0;
    bool draining = false;
    bool failed = false;  ///< the device is lost
  };

  /// Model and stream outlive it and are its thread's from now on. Throws Error{kOutOfMemory}.
  Service(Model& model, Stream& stream, const Settings& settings);
  /// Cancels what is left.
  ~Service();
  Service(const Service&) = delete;
  Service& operator=(const Service&) = delete;

  /// Takes a request into the queue. Throws ServiceRefusal; Error{kOutOfMemory} for one that even
  /// the empty cache has no room for.
  std::shared_ptr<Ticket> submit(ServiceJob job);
  /// Refuses new requests and waits until the others are done, at most that long; what is left
  /// then is cancelled.
  void drain(std::chrono::milliseconds most);
  /// Ends a drain() at once.
  void hurry() noexcept;
  Status status() const;
  /// This is its own thread, which must not wait for it.
  bool is_own_thread() const noexcept { return std::this_thread::get_id() == thread_.get_id(); }

 private:
  using Clock = std::chrono::steady_clock;
  /// A cache policy that is in use, or was.
  struct Policy {
    std::shared_ptr<const CachePlan> plan;
    std::unique_ptr<KvCache> cache;
    std::unique_ptr<Generator> generator;
    size_t running = 0;
  };
  struct Running {
    std::shared_ptr<Ticket> ticket;
    Policy* policy;
    int key;
    size_t logprobs = 0;  // of its tokens that its ticket has
  };

  void run();
  void prepare_ahead();
  Policy& policy_of(const std::shared_ptr<const CachePlan>& plan);
  /// The first requests of the queue, in the order of their turn.
  std::vector<std::shared_ptr<Ticket>> next_in_turn(size_t most) const;
  std::shared_ptr<Ticket> choose();
  void admit(const std::shared_ptr<Ticket>& ticket);
  void between_layers();
  double share_of(double seconds) const noexcept;
  void charge();
  void end_stall();
  int begin(Policy& policy, Ticket& ticket, const std::shared_ptr<Ticket>& next);
  std::shared_ptr<Ticket> next_after(const Policy& policy);
  void step();
  void collect(const std::exception_ptr& failure);
  static void pass_logprobs(Running& entry);
  void drop_cancelled();
  void remove(const std::shared_ptr<Ticket>& ticket);
  void publish();
  void fail_all(const std::exception_ptr& failure);
  bool has_work() const;

  Model& model_;
  Stream& stream_;
  Watch* watch_;  // of the stream
  Settings settings_;
  std::shared_ptr<Arena> arena_;
  // Of the service's thread.
  std::list<Policy> policies_;  // the one used last first
  std::vector<Running> running_;
  double owed_s_ = 0;              // of decode, before the next prompt or its next layer
  std::shared_ptr<Ticket> read_;   // the prompt that is read
  Clock::time_point charged_;      // until then its time was
  int layers_ = 0;                 // of it since then
  double layer_s_ = 0;             // that one of them takes
  double stalled_s_ = 0;           // that answers have waited for it
  std::shared_ptr<Ticket> ahead_;  // waits, and its images are encoded

  std::shared_ptr<Ticket::Bell> bell_;                                  // the mutex of all below
  std::map<std::string, std::deque<std::shared_ptr<Ticket>>> waiting_;  // by client
  std::string last_client_;                                             // whose turn was last
  size_t waiting_count_ = 0;
  Status status_;
  std::exception_ptr failure_;  // that ended it
  bool hurried_ = false;
  bool stopping_ = false;
  std::condition_variable idle_;
  std::vector<std::thread> preparing_;
  std::thread thread_;
};

}  // namespace kvlm
