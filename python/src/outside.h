#pragma once

#include <nanobind/nanobind.h>

#include <atomic>
#include <chrono>
#include <thread>

namespace kvlm::python {

/// Threads that are away from Python and will come back, or that end what Python has let go of.
/// Never destroyed: some may outlive the interpreter.
inline std::atomic<int>& threads_outside() {
  static auto* const count = new std::atomic<int>(0);
  return *count;
}

/// Counts a thread among them for as long as it lives.
class Outside {
 public:
  Outside() { ++threads_outside(); }
  ~Outside() { --threads_outside(); }
  Outside(const Outside&) = delete;
  Outside& operator=(const Outside&) = delete;
};
/// Lets other threads have the GIL for as long as it lives.
class ReleasedGil {
  Outside outside_;  // until the GIL is back
  nanobind::gil_scoped_release release_;
};

/// Waits until no thread is outside, a second at most: one that comes back to an interpreter that
/// has ended would be ended in the middle of C++, and the process with it.
inline void settle() {
  const nanobind::gil_scoped_release release;
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(1);
  while (threads_outside() > 0 && std::chrono::steady_clock::now() < end) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

}  // namespace kvlm::python
