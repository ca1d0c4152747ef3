#include "kernels/base/thread_pool.h"

#include <fmt/format.h>
#include <hwy/cache_control.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cassert>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "kernels/base/error.h"

// Worker threads that sleep between loops: a loop is a counter that workers take tasks from until
// none is left, and the caller takes tasks too. The first exception is carried to the caller.
namespace kvlm {

namespace {

int available_cores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof set, &set) == 0) return std::max(1, CPU_COUNT(&set));
  return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}

// The pool whose task this thread is running; a loop inside it would wait for itself.
thread_local const void* inside_task_of = nullptr;

class InsideTask {
 public:
  explicit InsideTask(const void* pool) noexcept : outer_(std::exchange(inside_task_of, pool)) {}
  ~InsideTask() { inside_task_of = outer_; }
  InsideTask(const InsideTask&) = delete;
  InsideTask& operator=(const InsideTask&) = delete;

 private:
  const void* outer_;
};

}  // namespace

// One loop at a time. A thread takes a task by lowering `untaken`; having one, it may read the
// loop's other fields, because the loop cannot end before `unfinished` counts that task. So the
// caller waits for tasks and not for threads: workers that sleep through a short loop cost nothing.
// A worker spins briefly before it sleeps, because a decode step is hundreds of short loops and
// waking a sleeping thread costs more than most of them.
struct ThreadPool::State {
  std::mutex turn;  // one caller at a time
  std::atomic<size_t> untaken{0};
  std::atomic<size_t> unfinished{0};
  size_t tasks = 0;
  void (*body)(void*, size_t, int) = nullptr;
  void* context = nullptr;
  Watch* watch = nullptr;

  std::mutex mutex;
  std::condition_variable wake;  // untaken became more than 0, or stop
  std::condition_variable done;  // unfinished became 0
  std::atomic<int> sleepers{0};
  std::atomic<bool> stop{false};
  std::exception_ptr failure;  // guarded by mutex
  int spins = 0;
  std::vector<std::thread> workers;

  ~State() {
    {
      const std::lock_guard lock(mutex);
      stop.store(true);
    }
    wake.notify_all();
    for (std::thread& worker : workers) worker.join();
  }

  /// Runs tasks until none is untaken.
  void work(int worker) {
    for (;;) {
      size_t left = untaken.load(std::memory_order_relaxed);
      do {
        if (left == 0) return;
      } while (!untaken.compare_exchange_weak(left, left - 1, std::memory_order_acquire,
                                              std::memory_order_relaxed));
      size_t finished = 1;
      try {
        give_up_if_cancelled(watch);
        const InsideTask inside(this);
        body(context, tasks - left, worker);
      } catch (...) {
        const std::lock_guard lock(mutex);
        if (!failure) failure = std::current_exception();
        finished += untaken.exchange(0, std::memory_order_relaxed);
      }
      if (unfinished.fetch_sub(finished, std::memory_order_acq_rel) == finished) {
        const std::lock_guard lock(mutex);
        done.notify_one();
      }
    }
  }

  /// Lets workers take `count` tasks, and wakes as many as sleep and are wanted.
  void offer(size_t count) {
    unfinished.store(count, std::memory_order_relaxed);
    untaken.store(count);
    if (sleepers.load() == 0) return;
    { const std::lock_guard lock(mutex); }  // no sleeper is between its check and its wait
    if (count > workers.size()) return wake.notify_all();
    for (size_t i = 1; i < count; ++i) wake.notify_one();
  }

  /// Waits until all tasks are finished.
  void await_end() {
    for (int spin = 0; unfinished.load(std::memory_order_acquire) != 0; ++spin) {
      if (spin < spins) {
        hwy::Pause();
        continue;
      }
      std::unique_lock lock(mutex);
      done.wait(lock, [&] { return unfinished.load(std::memory_order_acquire) == 0; });
    }
  }

  void loop(int worker) {
    while (!stop.load(std::memory_order_relaxed)) {
      for (int spin = 0; spin < spins && untaken.load(std::memory_order_relaxed) == 0; ++spin) {
        hwy::Pause();
      }
      if (untaken.load(std::memory_order_relaxed) == 0) {
        std::unique_lock lock(mutex);
        // Sequentially consistent with run(): either this thread sees the tasks, or run() sees it.
        sleepers.fetch_add(1);
        wake.wait(lock, [&] { return untaken.load() != 0 || stop.load(); });
        sleepers.fetch_sub(1);
      }
      work(worker);
    }
  }
};

ThreadPool::ThreadPool(int threads) : state_(std::make_unique<State>()) {
  const int cores = available_cores();
  if (threads <= 0) threads = cores;
  // Some tens of microseconds; a thread that has no core of its own would only be in the way.
  state_->spins = threads <= cores ? 4000 : 50;
  state_->workers.reserve(static_cast<size_t>(threads - 1));
  try {
    for (int worker = 1; worker < threads; ++worker) {
      state_->workers.emplace_back([state = state_.get(), worker] { state->loop(worker); });
    }
  } catch (const std::system_error& error) {
    throw Error(ErrorCode::kUnsupported,
                fmt::format("cannot start {} threads, only {}: {}; ask for fewer", threads,
                            state_->workers.size() + 1, error.what()));
  }
}

ThreadPool::~ThreadPool() = default;

int ThreadPool::threads() const noexcept { return static_cast<int>(state_->workers.size()) + 1; }

void ThreadPool::set_watch(Watch* watch) noexcept { state_->watch = watch; }

Watch* ThreadPool::watch() const noexcept { return state_->watch; }

void ThreadPool::run(size_t tasks, void (*body)(void*, size_t, int), void* context) {
  State& state = *state_;
  assert(inside_task_of != &state && "a loop inside a task of the same pool");
  if (tasks == 0) return;
  const std::lock_guard turn(state.turn);
  if (state.workers.empty() || tasks == 1) {
    const InsideTask inside(&state);
    for (size_t task = 0; task < tasks; ++task) {
      give_up_if_cancelled(state.watch);
      body(context, task, 0);
    }
    return;
  }
  state.tasks = tasks;
  state.body = body;
  state.context = context;
  state.offer(tasks);
  state.work(0);
  state.await_end();
  const std::lock_guard lock(state.mutex);
  if (state.failure) std::rethrow_exception(std::exchange(state.failure, nullptr));
}

}  // namespace kvlm
