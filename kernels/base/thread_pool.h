#pragma once

#include <cstddef>
#include <memory>

#include "kernels/base/watch.h"

namespace kvlm {

/// Persistent worker threads for parallel loops. The calling thread works too, so a pool of one
/// has no other thread and starts none.
class ThreadPool {
 public:
  /// `threads` >= 1; 0 means one per core that this process may run on.
  explicit ThreadPool(int threads = 0);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int threads() const noexcept;

  /// From now on `watch`, or nobody for null, is asked before every task whether to go on; if not,
  /// tasks that have not begun are left out and run() throws Error{kCancelled}. Not during run().
  void set_watch(Watch* watch) noexcept;
  Watch* watch() const noexcept;

  /// Calls body(context, task, worker) once for every task in [0, tasks), spread over the threads,
  /// worker in [0, threads()), and returns when all are done. Which worker runs a task is not
  /// fixed: results must not depend on it. Allocates nothing. The first exception is rethrown here,
  /// after the join. Calls from inside a task are refused by assertion; calls from two threads take
  /// turns.
  void run(size_t tasks, void (*body)(void* context, size_t task, int worker), void* context);

  /// run() for a callable body(task, worker).
  template <class Body>
  void parallel_for(size_t tasks, Body&& body) {
    using Callable = std::remove_reference_t<Body>;
    run(
        tasks,
        [](void* context, size_t task, int worker) {
          (*static_cast<Callable*>(context))(task, worker);
        },
        const_cast<void*>(static_cast<const void*>(std::addressof(body))));
  }

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace kvlm
