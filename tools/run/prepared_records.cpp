#include "tools/run/prepared_records.h"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <cassert>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <optional>
#include <system_error>
#include <thread>
#include <utility>

#include "kernels/base/error.h"
#include "runtime/failure_kind.h"

// Prepares the records of a batch: threads decode and cut pictures while a GPU is busy, or, without
// threads of its own, several at a time when the next one is wanted. Records and pixels held are
// bounded; records are handed out in the order of the input.
namespace kvlm {

namespace {

/// A record that somebody prepares or has prepared: neither a record nor a failure yet, or one.
struct Entry {
  std::optional<PreparedRecord> record = std::nullopt;
  std::exception_ptr failure = nullptr;
  bool thrown = false;   // the failure, by front()
  bool crowded = false;  // others were held meanwhile

  bool finished() const noexcept { return record || failure; }
};

}  // namespace

struct PreparedRecords::State final : Watch {
  State(std::vector<int64_t> record_pixels, Prepare prepare_record, const PrepareLimits& set,
        ThreadPool& caller, const Watch* of_caller)
      : pixels(std::move(record_pixels)),
        prepare(std::move(prepare_record)),
        pool(caller),
        outer(of_caller),
        limits(set),
        slots(std::min(limits.records, pixels.size())) {}

  ~State() override {
    {
      const std::lock_guard lock(mutex);
      stop = true;
    }
    changed.notify_all();
    for (std::thread& thread : threads) thread.join();
  }

  void progress(std::string_view, size_t, size_t) override {}
  bool cancelled() const noexcept override {
    return stop || (outer != nullptr && outer->cancelled());
  }

  Entry& slot(size_t record) noexcept { return slots[record % slots.size()]; }
  size_t held() const noexcept { return next - first; }

  /// The next record that nobody prepares yet, if the limits let one more be held. Locked.
  std::optional<size_t> claim() noexcept {
    if (next >= pixels.size() || held() >= limits.records) return std::nullopt;
    if (held() > 0 && pixels[next] > limits.pixels - held_pixels) return std::nullopt;
    Entry& entry = slot(next);
    entry = {};
    entry.crowded = held() > 0;
    held_pixels += pixels[next];
    ++preparing;
    return next++;
  }

  /// Prepares a claimed record. Unlocked.
  void run(size_t record) noexcept {
    Entry made;
    try {
      give_up_if_cancelled(this);
      made.record = prepare(record, *this);
    } catch (...) {
      made.failure = std::current_exception();
    }
    finish(record, std::move(made));
  }

  void finish(size_t record, Entry made) noexcept {
    {
      const std::lock_guard lock(mutex);
      made.crowded = slot(record).crowded || held() > 1;
      slot(record) = std::move(made);
      --preparing;
    }
    changed.notify_all();
  }

  void loop() {
    std::unique_lock lock(mutex);
    while (!stop) {
      const std::optional<size_t> record = claim();
      if (!record) {
        changed.wait(lock);
        continue;
      }
      lock.unlock();
      run(*record);
      lock.lock();
    }
  }

  /// Prepares the next records on the pool. Unlocked.
  void run_wave() {
    std::vector<size_t> wave;
    wave.reserve(static_cast<size_t>(pool.threads()));
    std::vector<char> begun(wave.capacity());
    {
      const std::lock_guard lock(mutex);
      while (wave.size() < begun.size()) {
        const std::optional<size_t> record = claim();
        if (!record) break;
        wave.push_back(*record);
      }
    }
    try {
      pool.parallel_for(wave.size(), [&](size_t task, int) {
        begun[task] = 1;
        run(wave[task]);
      });
    } catch (...) {  // cancelled: tasks that had not begun are left out
      for (size_t task = 0; task < wave.size(); ++task) {
        if (begun[task] == 0) finish(wave[task], {{}, std::current_exception()});
      }
    }
  }

  /// Drops all that is held and prepares the first record with nothing beside it. Unlocked.
  void run_alone() {
    {
      std::unique_lock lock(mutex);
      limits.records = 1;
      alone = true;
      changed.wait(lock, [&] { return preparing == 0; });
      for (Entry& entry : slots) entry = {};
      next = first;
      held_pixels = 0;
      claim();
    }
    run(first);
  }

  const std::vector<int64_t> pixels;  // by record
  const Prepare prepare;
  ThreadPool& pool;
  const Watch* const outer;
  std::atomic<bool> stop{false};

  std::mutex mutex;  // of what follows, but for the record that front() gave
  std::condition_variable changed;
  PrepareLimits limits;
  bool alone = false;        // limits.records has become 1
  std::vector<Entry> slots;  // of the records from `first` to `next`, which are held
  size_t first = 0;          // whose turn it is
  size_t next = 0;           // whom nobody has claimed yet
  int64_t held_pixels = 0;
  size_t preparing = 0;  // of those held
  std::vector<std::thread> threads;
};

PreparedRecords::PreparedRecords(std::vector<int64_t> pixels, Prepare prepare,
                                 const PrepareLimits& limits, ThreadPool& pool, const Watch* watch)
    : state_(std::make_unique<State>(std::move(pixels), std::move(prepare), limits, pool, watch)) {
  assert(limits.records >= 1);
  State& state = *state_;
  try {
    for (int i = 0; i < limits.threads; ++i) {
      state.threads.emplace_back([&state] { state.loop(); });
    }
  } catch (const std::system_error& error) {
    throw Error(
        ErrorCode::kUnsupported,
        fmt::format(
            "cannot start {} threads that prepare images, only {}: {}; use fewer with --threads",
            limits.threads, state.threads.size(), error.what()));
  }
}

PreparedRecords::~PreparedRecords() = default;

PreparedRecord& PreparedRecords::front() {
  State& state = *state_;
  std::unique_lock lock(state.mutex);
  assert(state.first < state.pixels.size());
  if (state.held() == 0 && state.threads.empty()) {
    lock.unlock();
    state.run_wave();
    lock.lock();
  }
  Entry& entry = state.slot(state.first);
  state.changed.wait(lock, [&] { return entry.finished(); });
  if (entry.failure && (entry.thrown || (entry.crowded && is_out_of_memory(entry.failure)))) {
    lock.unlock();
    state.run_alone();
    lock.lock();
  }
  if (!entry.failure) return *entry.record;
  entry.thrown = true;
  std::rethrow_exception(entry.failure);
}

PreparedRecord* PreparedRecords::after_front() {
  State& state = *state_;
  const std::lock_guard lock(state.mutex);
  if (state.held() < 2) return nullptr;
  std::optional<PreparedRecord>& record = state.slot(state.first + 1).record;
  return record ? &*record : nullptr;
}

void PreparedRecords::pop() {
  State& state = *state_;
  Entry done;  // whose memory is freed unlocked
  {
    const std::lock_guard lock(state.mutex);
    assert(state.held() > 0 && state.slot(state.first).finished());
    done = std::exchange(state.slot(state.first), {});
    state.held_pixels -= state.pixels[state.first++];
  }
  state.changed.notify_all();
}

bool PreparedRecords::one_at_a_time() const {
  const std::lock_guard lock(state_->mutex);
  return state_->alone;
}

}  // namespace kvlm
