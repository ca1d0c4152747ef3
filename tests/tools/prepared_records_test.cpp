// Records that are prepared ahead of their turn, by threads of their own or by a pool.
#include "tools/run/prepared_records.h"

#include <fmt/format.h>
#include <gmock/gmock.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <new>
#include <thread>

#include "kernels/base/error.h"

namespace kvlm {
namespace {

using namespace std::chrono_literals;

constexpr int64_t kAny = int64_t{1} << 40;

/// Records that decode to so many pixels each, at hand at once or as they are let go.
class Source final : public RecordSource {
 public:
  explicit Source(std::vector<int64_t> pixels) : pixels_(std::move(pixels)) {}
  Source(size_t count, size_t released)
      : pixels_(std::vector<int64_t>(count, 1)), released_(released) {}

  std::shared_ptr<const Record> take(bool wait) override {
    if (wait && next_ >= released_) std::this_thread::sleep_for(1ms);
    if (next_ >= std::min<size_t>(released_, pixels_.size())) return nullptr;
    Record record;
    record.line = next_++;
    return std::make_shared<const Record>(std::move(record));
  }
  bool ended() const override { return next_ == pixels_.size(); }
  void release(size_t count) { released_ = count; }
  int64_t pixels(size_t record) const { return pixels_[record]; }

 private:
  std::vector<int64_t> pixels_;
  std::atomic<size_t> next_{0};
  std::atomic<size_t> released_{SIZE_MAX};
};

/// PreparedRecords by the numbers of records.
class Records {
 public:
  Records(std::vector<int64_t> pixels, std::function<PreparedRecord(size_t, const Watch&)> prepare,
          const PrepareLimits& limits, ThreadPool& pool, const Watch* watch)
      : Records(std::make_unique<Source>(std::move(pixels)), std::move(prepare), limits, pool,
                watch) {}
  Records(std::unique_ptr<Source> source,
          std::function<PreparedRecord(size_t, const Watch&)> prepare, const PrepareLimits& limits,
          ThreadPool& pool, const Watch* watch)
      : source_(std::move(source)),
        records_(
            *source_,
            [this](const Record& record) {
              OpenRecord open;
              open.pixels = source_->pixels(record.line);
              return open;
            },
            [prepare](const Record& record, const OpenRecord&, const Watch& when) {
              return prepare(record.line, when);
            },
            limits, pool, watch) {}

  std::shared_ptr<const Record> next(bool wait) { return records_.next(wait); }
  PreparedRecord& front() {
    next(/*wait=*/true);
    return records_.front();
  }
  PreparedRecord* after_front() { return records_.after_front(); }
  void pop() { records_.pop(); }
  bool ready() { return records_.ready(); }
  bool one_at_a_time() const { return records_.one_at_a_time(); }
  Source& source() { return *source_; }

 private:
  std::unique_ptr<Source> source_;
  PreparedRecords records_;
};

PreparedRecord named(size_t record) {
  PreparedRecord prepared;
  prepared.request.request.id = fmt::format("{}", record);
  return prepared;
}

/// Who has been prepared, and how many at a time; any thread notes it.
class Log {
 public:
  void begin(size_t record) {
    const std::lock_guard lock(mutex_);
    began_.push_back(record);
    most_ = std::max(most_, ++now_);
    changed_.notify_all();
  }
  void end() {
    const std::lock_guard lock(mutex_);
    --now_;
    changed_.notify_all();
  }
  /// Waits until so many have been begun, for ten seconds at most.
  bool wait_for(size_t count) {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, 10s, [&] { return began_.size() >= count; });
  }
  /// Waits until so many run at once.
  bool wait_for_company(int count) {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, 10s, [&] { return most_ >= count; });
  }
  std::vector<size_t> began() {
    const std::lock_guard lock(mutex_);
    return began_;
  }
  int most() {
    const std::lock_guard lock(mutex_);
    return most_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<size_t> began_;
  int now_ = 0;
  int most_ = 0;
};

class Canceller final : public Watch {
 public:
  void progress(std::string_view, size_t, size_t) override {}
  bool cancelled() const noexcept override { return cancelled_; }
  void cancel() { cancelled_ = true; }

 private:
  std::atomic<bool> cancelled_{false};
};

/// With threads beside the caller and without.
class PreparedRecordsBy : public testing::TestWithParam<int> {
 protected:
  PrepareLimits limits(size_t records, int64_t pixels = kAny) const {
    return {GetParam(), records, pixels};
  }
  ThreadPool pool_{3};
  Log log_;
};

INSTANTIATE_TEST_SUITE_P(Threads, PreparedRecordsBy, testing::Values(0, 1, 3));

TEST_P(PreparedRecordsBy, GivesThemInOrder) {
  constexpr size_t kCount = 40;
  Records records(
      std::vector<int64_t>(kCount, 1),
      [](size_t record, const Watch&) {
        std::this_thread::sleep_for((record % 3 == 0 ? 2ms : 0ms));  // so that some overtake
        return named(record);
      },
      limits(5), pool_, nullptr);
  for (size_t record = 0; record < kCount; ++record) {
    EXPECT_EQ(records.front().request.request.id, fmt::format("{}", record));
    EXPECT_EQ(&records.front(), &records.front()) << "it stays until it is popped";
    records.pop();
  }
  EXPECT_FALSE(records.one_at_a_time());
}

TEST_P(PreparedRecordsBy, HoldsNoMoreThanTheLimits) {
  // In all 10: the third has to wait for both before it, the last is beyond the limit by itself.
  const std::vector<int64_t> pixels{4, 6, 1, 9, 1, 1, 30};
  std::atomic<int64_t> held{0};
  std::atomic<int64_t> most{0};
  std::atomic<int> count{0};
  std::atomic<int> most_count{0};
  {
    Records records(
        pixels,
        [&](size_t record, const Watch&) {
          const int64_t now = held += pixels[record];
          if (record + 1 < pixels.size()) most = std::max(most.load(), now);
          most_count = std::max(most_count.load(), ++count);
          return named(record);
        },
        limits(3, 10), pool_, nullptr);
    for (size_t record = 0; record < pixels.size(); ++record) {
      records.front();
      std::this_thread::sleep_for(2ms);  // time enough for threads to go too far
      held -= pixels[record];
      --count;
      records.pop();
    }
  }
  EXPECT_LE(most, 10);
  EXPECT_LE(most_count, 3);
}

TEST_P(PreparedRecordsBy, AFailureIsOfItsRecordAndIsTriedAgainWhenAsked) {
  std::atomic<int> tries{0};
  Records records(
      std::vector<int64_t>(4, 1),
      [&](size_t record, const Watch&) {
        if (record == 1 && ++tries < 3) throw Error(ErrorCode::kCorruptFile, "torn");
        return named(record);
      },
      limits(4), pool_, nullptr);
  records.front();
  records.pop();
  EXPECT_THROW(records.front(), Error);
  EXPECT_THROW(records.front(), Error);
  EXPECT_EQ(records.front().request.request.id, "1");
  records.pop();
  EXPECT_EQ(records.front().request.request.id, "2");
}

TEST_P(PreparedRecordsBy, OneThatFindsNoMemoryIsTriedAlone) {
  std::atomic<int> tries{0};
  Records records(
      std::vector<int64_t>(6, 1),
      [&](size_t record, const Watch&) {
        log_.begin(record);
        log_.end();
        if (record == 2 && ++tries == 1) throw std::bad_alloc();
        return named(record);
      },
      limits(4), pool_, nullptr);
  if (GetParam() > 0) {
    EXPECT_TRUE(log_.wait_for(4)) << "the third is beside others";
  }
  for (size_t record = 0; record < 6; ++record) {
    EXPECT_EQ(records.front().request.request.id, fmt::format("{}", record));
    EXPECT_EQ(records.one_at_a_time(), record >= 2);
    records.pop();
  }
  EXPECT_EQ(tries, 2);
}

TEST_P(PreparedRecordsBy, ThatOneFailsAloneIsSaidAndTriedAgain) {
  std::atomic<int> tries{0};
  Records records(
      std::vector<int64_t>(3, 1),
      [&](size_t record, const Watch&) {
        if (record == 0 && ++tries < 4) throw Error(ErrorCode::kOutOfMemory, "no memory");
        return named(record);
      },
      limits(3), pool_, nullptr);
  EXPECT_THROW(records.front(), Error);  // beside the others, then alone, or alone at once
  while (tries < 3) EXPECT_THROW(records.front(), Error);
  EXPECT_EQ(records.front().request.request.id, "0");
}

TEST_P(PreparedRecordsBy, GivesUpWhenItsWatchCancels) {
  Canceller canceller;
  pool_.set_watch(&canceller);
  Records records(
      std::vector<int64_t>(8, 1),
      [&](size_t record, const Watch& watch) {
        if (record == 2) canceller.cancel();
        give_up_if_cancelled(&watch);
        return named(record);
      },
      limits(8), pool_, &canceller);
  try {
    for (int record = 0; record < 8; ++record) {
      records.front();
      records.pop();
    }
    ADD_FAILURE() << "nothing was given up";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kCancelled);
  }
}

TEST(PreparedRecords, ArePreparedWhileTheCallerDoesSomethingElse) {
  ThreadPool pool(1);
  Log log;
  Records records(
      std::vector<int64_t>(100, 1),
      [&](size_t record, const Watch&) {
        log.begin(record);
        log.end();
        return named(record);
      },
      {2, 7, kAny}, pool, nullptr);
  EXPECT_TRUE(log.wait_for(7)) << "nobody asked for one yet";
  records.front();
  records.pop();
  EXPECT_TRUE(log.wait_for(8));
  std::this_thread::sleep_for(5ms);
  EXPECT_EQ(log.began().size(), 8u);
}

TEST(PreparedRecords, TheOneAfterTheFirstIsShownOnceItIsThere) {
  ThreadPool pool(1);
  Log log;
  std::atomic<bool> held{true};
  Records records(
      std::vector<int64_t>(3, 1),
      [&](size_t record, const Watch&) {
        while (record == 2 && held) std::this_thread::sleep_for(1ms);
        log.begin(record);
        log.end();
        if (record == 1) throw Error(ErrorCode::kInvalidArgument, "no picture");
        return named(record);
      },
      {1, 3, kAny}, pool, nullptr);
  ASSERT_TRUE(log.wait_for(2));
  records.front();
  EXPECT_EQ(records.after_front(), nullptr) << "it could not be prepared";
  records.pop();
  EXPECT_THROW(records.front(), Error);
  EXPECT_EQ(records.after_front(), nullptr) << "it is being prepared";
  held = false;
  ASSERT_TRUE(log.wait_for(3));
  PreparedRecord* next = nullptr;
  for (int i = 0; i < 10000 && next == nullptr; ++i) {
    std::this_thread::sleep_for(1ms);
    next = records.after_front();
  }
  ASSERT_NE(next, nullptr);
  records.pop();
  EXPECT_EQ(&records.front(), next);
  EXPECT_EQ(records.after_front(), nullptr) << "it is the last";
}

TEST(PreparedRecords, ThreadsWorkTogether) {
  for (const int threads : {0, 3}) {
    ThreadPool pool(3);
    Log log;
    Records records(
        std::vector<int64_t>(12, 1),
        [&](size_t record, const Watch&) {
          log.begin(record);
          EXPECT_TRUE(log.wait_for_company(3)) << "of three threads";
          log.end();
          return named(record);
        },
        {threads, 4, kAny}, pool, nullptr);
    records.front();
    EXPECT_EQ(log.most(), 3);
  }
}

TEST(PreparedRecords, WithoutThreadsNothingRunsBesideTheCaller) {
  ThreadPool pool(3);
  Log log;
  Records records(
      std::vector<int64_t>(12, 1),
      [&](size_t record, const Watch&) {
        log.begin(record);
        log.end();
        return named(record);
      },
      {0, 9, kAny}, pool, nullptr);
  std::this_thread::sleep_for(2ms);
  EXPECT_TRUE(log.began().empty());
  records.front();
  EXPECT_EQ(log.began().size(), 3u) << "one a thread";
}

TEST_P(PreparedRecordsBy, ThoseOfAStreamArePreparedAsTheyCome) {
  Records records(
      std::make_unique<Source>(5, 0), [](size_t record, const Watch&) { return named(record); },
      limits(3), pool_, nullptr);
  EXPECT_EQ(records.next(/*wait=*/false), nullptr) << "none came";
  EXPECT_FALSE(records.ready());
  records.source().release(2);
  for (size_t record = 0; record < 2; ++record) {
    ASSERT_NE(records.next(/*wait=*/true), nullptr);
    EXPECT_EQ(records.front().request.request.id, fmt::format("{}", record));
    records.pop();
  }
  EXPECT_EQ(records.next(/*wait=*/false), nullptr);
  records.source().release(5);
  for (size_t record = 2; record < 5; ++record) {
    EXPECT_EQ(records.front().request.request.id, fmt::format("{}", record));
    records.pop();
  }
  EXPECT_EQ(records.next(/*wait=*/true), nullptr) << "it was the last";
}

TEST_P(PreparedRecordsBy, AStreamThatDoesNotComeIsNotWaitedForWhenCancelled) {
  Canceller canceller;
  Records records(
      std::make_unique<Source>(5, 0), [](size_t record, const Watch&) { return named(record); },
      limits(3), pool_, &canceller);
  std::thread later([&] {
    std::this_thread::sleep_for(20ms);
    canceller.cancel();
  });
  EXPECT_EQ(records.next(/*wait=*/true), nullptr);
  later.join();
}

TEST(PreparedRecords, OneIsReadyOnceItIsPrepared) {
  ThreadPool pool(1);
  std::atomic<bool> held{true};
  Records records(
      std::vector<int64_t>(2, 1),
      [&](size_t record, const Watch&) {
        while (held) std::this_thread::sleep_for(1ms);
        return named(record);
      },
      {1, 2, kAny}, pool, nullptr);
  ASSERT_NE(records.next(/*wait=*/true), nullptr);
  EXPECT_FALSE(records.ready());
  held = false;
  for (int i = 0; i < 10000 && !records.ready(); ++i) std::this_thread::sleep_for(1ms);
  EXPECT_TRUE(records.ready());
}

TEST(PreparedRecords, TheEndWaitsForNoWholeRecord) {
  ThreadPool pool(1);
  Log log;
  const auto start = std::chrono::steady_clock::now();
  {
    Records records(
        std::vector<int64_t>(5, 1),
        [&](size_t record, const Watch& watch) {
          log.begin(record);
          for (int piece = 0; piece < 10'000; ++piece) {
            give_up_if_cancelled(&watch);
            std::this_thread::sleep_for(2ms);
          }
          return named(record);
        },
        {2, 5, kAny}, pool, nullptr);
    EXPECT_TRUE(log.wait_for(2));
  }
  EXPECT_LT(std::chrono::steady_clock::now() - start, 10s);
}

}  // namespace
}  // namespace kvlm
