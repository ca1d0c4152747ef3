#include "kernels/base/thread_pool.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace kvlm {
namespace {

TEST(ThreadPool, RunsEveryTaskOnceOnAWorkerOfThePool) {
  for (const int threads : {1, 2, 3, 5, 16}) {
    ThreadPool pool(threads);
    EXPECT_EQ(pool.threads(), threads);
    for (const size_t tasks : {0, 1, 2, 3, 16, 17, 1000}) {
      std::vector<std::atomic<int>> runs(tasks);
      std::atomic<bool> worker_outside{false};
      pool.parallel_for(tasks, [&](size_t task, int worker) {
        runs[task].fetch_add(1);
        if (worker < 0 || worker >= threads) worker_outside = true;
      });
      for (const auto& count : runs) EXPECT_EQ(count.load(), 1);
      EXPECT_FALSE(worker_outside);
    }
  }
}

TEST(ThreadPool, ZeroThreadsMeansOnePerCore) { EXPECT_GE(ThreadPool(0).threads(), 1); }

TEST(ThreadPool, WritesOfTheTasksAreSeenAfterTheLoop) {
  ThreadPool pool(4);
  std::vector<int> values(64);  // not atomic: the join must order them
  for (int round = 0; round < 2000; ++round) {
    pool.parallel_for(values.size(), [&](size_t task, int) { values[task] += round; });
    for (const int value : values) ASSERT_EQ(value, round * (round + 1) / 2);
  }
}

TEST(ThreadPool, AWorkerRunsOneTaskAtATime) {
  ThreadPool pool(4);
  std::vector<int> depth(4);  // not atomic: a worker's number is its own
  pool.parallel_for(5000, [&](size_t, int worker) {
    int& mine = depth[static_cast<size_t>(worker)];
    EXPECT_EQ(++mine, 1);
    --mine;
  });
}

TEST(ThreadPool, SleepingWorkersWakeUp) {
  ThreadPool pool(3);
  for (int round = 0; round < 5; ++round) {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));  // longer than they spin
    std::atomic<int> here{0};
    // Passes only if all three threads are inside the loop together.
    pool.parallel_for(3, [&](size_t, int) {
      here.fetch_add(1);
      while (here.load() < 3) std::this_thread::yield();
    });
    EXPECT_EQ(here.load(), 3);
  }
}

TEST(ThreadPool, RethrowsTheFirstExceptionAndStaysUsable) {
  for (const int threads : {1, 2, 4}) {
    ThreadPool pool(threads);
    for (int round = 0; round < 200; ++round) {
      std::atomic<int> ran{0};
      try {
        pool.parallel_for(100, [&](size_t task, int) {
          ran.fetch_add(1);
          if (task % 3 == 1) throw std::runtime_error("task " + std::to_string(task));
        });
        FAIL() << "nothing was thrown";
      } catch (const std::runtime_error& error) {
        EXPECT_EQ(std::string(error.what()).substr(0, 5), "task ");
      }
      EXPECT_GE(ran.load(), 1);
      std::atomic<int> after{0};
      pool.parallel_for(10, [&](size_t, int) { after.fetch_add(1); });
      EXPECT_EQ(after.load(), 10);
    }
  }
}

TEST(ThreadPool, AFailedLoopOfOneTaskRethrowsToo) {
  ThreadPool pool(2);
  EXPECT_THROW(pool.parallel_for(1, [](size_t, int) { throw std::logic_error("no"); }),
               std::logic_error);
  int ran = 0;
  pool.parallel_for(1, [&](size_t, int) { ++ran; });
  EXPECT_EQ(ran, 1);
}

TEST(ThreadPool, CallsFromTwoThreadsTakeTurns) {
  ThreadPool pool(3);
  int inside = 0;  // not atomic: turns must order it
  const auto caller = [&] {
    for (int round = 0; round < 500; ++round) {
      std::atomic<int> ran{0};
      const size_t tasks = round % 3 == 0 ? 1 : 9;
      pool.parallel_for(tasks, [&](size_t task, int) {
        if (task == 0) ++inside;
        ran.fetch_add(1);
      });
      EXPECT_EQ(ran.load(), static_cast<int>(tasks));
    }
  };
  std::thread other(caller);
  caller();
  other.join();
  EXPECT_EQ(inside, 1000);
}

TEST(ThreadPool, ManyPoolsLiveAndDieTogether) {
  std::vector<std::unique_ptr<ThreadPool>> pools;
  for (int i = 0; i < 8; ++i) pools.push_back(std::make_unique<ThreadPool>(3));
  std::atomic<int> ran{0};
  for (int round = 0; round < 50; ++round) {
    for (const auto& pool : pools) pool->parallel_for(4, [&](size_t, int) { ran.fetch_add(1); });
  }
  EXPECT_EQ(ran.load(), 50 * 8 * 4);
  pools.clear();
  for (int i = 0; i < 200; ++i) ThreadPool(3);  // destroyed before its workers do anything
  for (int i = 0; i < 200; ++i) {
    ThreadPool pool(3);
    pool.parallel_for(3, [&](size_t, int) { ran.fetch_add(1); });
  }
  EXPECT_EQ(ran.load(), 50 * 8 * 4 + 600);
}

TEST(ThreadPool, ATaskMayUseAnotherPool) {
  ThreadPool outer(2);
  std::atomic<int> ran{0};
  outer.parallel_for(4, [&](size_t, int) {
    ThreadPool inner(2);
    inner.parallel_for(4, [&](size_t, int) { ran.fetch_add(1); });
  });
  EXPECT_EQ(ran.load(), 16);
}

#ifndef NDEBUG
TEST(ThreadPoolDeathTest, RefusesALoopInsideItsOwnTask) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_DEATH(
      {
        ThreadPool pool(2);
        pool.parallel_for(2, [&](size_t, int) { pool.parallel_for(2, [](size_t, int) {}); });
      },
      "inside");
}
#endif

}  // namespace
}  // namespace kvlm
