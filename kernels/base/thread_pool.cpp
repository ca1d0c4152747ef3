#include "kernels/base/thread_pool.h"

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

namespace kvlm {

namespace {

int available_cores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof set, &set) == 0) return std::max(1, CPU_COUNT(&set));
  return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}

}  // namespace

// One loop at a time: `generation` announces it, `next` hands out tasks, `busy` counts the workers
// that have not seen its end. A worker spins briefly before it sleeps, because a decode step is
// hundreds of short loops and waking a sleeping thread costs more than most of them.
struct ThreadPool::State {
  std::mutex turn;  // one caller at a time
  std::mutex mutex;
  std::condition_variable wake;
  std::condition_variable done;
  std::atomic<uint64_t> generation{0};
  std::atomic<size_t> next{0};
  std::atomic<int> busy{0};
  std::atomic<bool> stop{false};
  size_t tasks = 0;
  void (*body)(void*, size_t, int) = nullptr;
  void* context = nullptr;
  std::exception_ptr failure;  // guarded by mutex
  std::vector<std::thread> workers;

  void work(int worker) {
    for (;;) {
      const size_t task = next.fetch_add(1, std::memory_order_relaxed);
      if (task >= tasks) return;
      try {
        body(context, task, worker);
      } catch (...) {
        const std::lock_guard lock(mutex);
        if (!failure) failure = std::current_exception();
        next.store(tasks, std::memory_order_relaxed);
      }
    }
  }

  void loop(int worker) {
    constexpr int kSpins = 4000;
    uint64_t seen = 0;
    for (;;) {
      int spins = 0;
      while (generation.load(std::memory_order_acquire) == seen && !stop.load()) {
        if (++spins < kSpins) {
          __builtin_ia32_pause();
          continue;
        }
        std::unique_lock lock(mutex);
        wake.wait(lock, [&] { return generation.load() != seen || stop.load(); });
      }
      if (stop.load()) return;
      seen = generation.load(std::memory_order_acquire);
      work(worker);
      if (busy.fetch_sub(1, std::memory_order_acq_rel) == 1) {
        const std::lock_guard lock(mutex);
        done.notify_one();
      }
    }
  }
};

ThreadPool::ThreadPool(int threads) : state_(std::make_unique<State>()) {
  if (threads <= 0) threads = available_cores();
  for (int worker = 1; worker < threads; ++worker) {
    state_->workers.emplace_back([state = state_.get(), worker] { state->loop(worker); });
  }
}

ThreadPool::~ThreadPool() {
  {
    const std::lock_guard lock(state_->mutex);
    state_->stop.store(true);
  }
  state_->wake.notify_all();
  for (std::thread& worker : state_->workers) worker.join();
}

int ThreadPool::threads() const noexcept { return static_cast<int>(state_->workers.size()) + 1; }

void ThreadPool::run(size_t tasks, void (*body)(void*, size_t, int), void* context) {
  State& state = *state_;
  if (state.workers.empty() || tasks <= 1) {
    for (size_t task = 0; task < tasks; ++task) body(context, task, 0);
    return;
  }
  const std::lock_guard turn(state.turn);
  state.tasks = tasks;
  state.body = body;
  state.context = context;
  state.next.store(0, std::memory_order_relaxed);
  state.busy.store(static_cast<int>(state.workers.size()), std::memory_order_relaxed);
  {
    const std::lock_guard lock(state.mutex);
    state.generation.fetch_add(1, std::memory_order_release);
  }
  state.wake.notify_all();
  state.work(0);
  for (int spins = 0; state.busy.load(std::memory_order_acquire) != 0;) {
    if (++spins < 4000) {
      __builtin_ia32_pause();
      continue;
    }
    std::unique_lock lock(state.mutex);
    state.done.wait(lock, [&] { return state.busy.load(std::memory_order_acquire) == 0; });
  }
  const std::lock_guard lock(state.mutex);
  if (state.failure) std::rethrow_exception(std::exchange(state.failure, nullptr));
}

}  // namespace kvlm
