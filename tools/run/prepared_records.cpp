#include "tools/run/prepared_records.h"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <cassert>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>
#include <optional>
#include <system_error>
#include <thread>
#include <utility>

#include "kernels/base/error.h"
#include "runtime/failure_kind.h"

// Prepares the records of a batch: threads open, decode and cut images while a GPU is busy, or,
// without threads of its own, several at a time when the next one is wanted. Records and pixels
// held are bounded; records are handed out in the order of the input.
namespace kvlm {

namespace {

constexpr std::chrono::milliseconds kPatience{RecordSource::kPatienceMs};

/// A record that was taken from the source.
struct Entry {
  explicit Entry(std::shared_ptr<const Record> taken, size_t place)
      : record(std::move(taken)), number(place) {}

  bool finished() const noexcept { return made || failure; }

  std::shared_ptr<const Record> record;
  size_t number;
  bool claimed = false;  // a thread is at work on it, or was
  bool counted = false;  // its pixels are among those held
  bool thrown = false;   // the failure, by front()
  bool crowded = false;  // others were held meanwhile
  std::optional<OpenRecord> open;
  std::optional<PreparedRecord> made;
  std::exception_ptr failure;
};

}  // namespace

struct PreparedRecords::State final : Watch {
  State(RecordSource& from, Open open_record, Prepare prepare_record, const PrepareLimits& set,
        ThreadPool& caller, const Watch* of_caller)
      : source(from),
        open(std::move(open_record)),
        prepare(std::move(prepare_record)),
        pool(caller),
        outer(of_caller),
        limits(set) {}

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

  /// Whether the limits let an entry be prepared: in order, so that the first one always may.
  /// Locked.
  bool has_room(const Entry& entry) const noexcept {
    if (entry.number != uncounted) return false;
    const int64_t pixels = entry.open ? entry.open->pixels : 0;
    return entry.number == first || pixels <= limits.pixels - held_pixels;
  }
  bool is_wanted(const Entry& entry) const noexcept {
    return entry.number - first < limits.records;
  }

  /// Takes the next record from the source, waiting a little for it. False if none came. Locked,
  /// but not while it waits.
  bool take(std::unique_lock<std::mutex>& lock, bool wait) {
    if (taking || ended || held.size() >= limits.records) return false;
    taking = true;
    lock.unlock();
    std::shared_ptr<const Record> record;
    std::exception_ptr broken;
    try {
      record = source.take(wait);
    } catch (...) {
      broken = std::current_exception();
    }
    const bool last = broken != nullptr || source.ended();
    lock.lock();
    taking = false;
    ended = ended || last;
    if (broken && !source_failure) source_failure = broken;
    changed.notify_all();
    if (!record) return false;
    held.push_back(std::make_unique<Entry>(std::move(record), first + held.size()));
    return true;
  }

  /// The first entry that no thread works on. Locked.
  Entry* claim() noexcept {
    for (const auto& entry : held) {
      if (!is_wanted(*entry)) break;
      if (entry->claimed) continue;
      entry->claimed = true;
      entry->crowded = held.size() > 1;
      ++preparing;
      return entry.get();
    }
    return nullptr;
  }

  /// Counts the pixels of an entry. Locked.
  void count(Entry& entry) noexcept {
    entry.counted = true;
    held_pixels += entry.open ? entry.open->pixels : 0;
    uncounted = entry.number + 1;
  }

  /// Opens a claimed entry. Returns why it could not, or null.
  std::exception_ptr open_it(Entry& entry) noexcept {
    if (entry.open) return nullptr;
    try {
      give_up_if_cancelled(this);
      entry.open = open(*entry.record);
      return nullptr;
    } catch (...) {
      return std::current_exception();
    }
  }

  /// Prepares an entry that is counted, unless it has failed already. Unlocked.
  void prepare_it(Entry& entry, std::exception_ptr failure) noexcept {
    std::optional<PreparedRecord> made;
    try {
      give_up_if_cancelled(this);
      if (!failure) made = prepare(*entry.record, *entry.open, *this);
    } catch (...) {
      failure = std::current_exception();
    }
    finish(entry, std::move(made), failure);
  }

  void finish(Entry& entry, std::optional<PreparedRecord> made,
              std::exception_ptr failure) noexcept {
    {
      const std::lock_guard lock(mutex);
      entry.crowded = entry.crowded || held.size() > 1;
      entry.made = std::move(made);
      entry.failure = std::move(failure);
      --preparing;
    }
    changed.notify_all();
  }

  void loop() {
    std::unique_lock lock(mutex);
    while (!stop) {
      Entry* const entry = claim();
      if (entry == nullptr) {
        if (taking || ended || held.size() >= limits.records) {
          changed.wait(lock);
        } else {
          take(lock, /*wait=*/true);
        }
        continue;
      }
      lock.unlock();
      const std::exception_ptr failure = open_it(*entry);
      lock.lock();
      changed.wait(lock, [&] { return stop || has_room(*entry) || !is_wanted(*entry); });
      if (!has_room(*entry)) {  // the end, or no more than one at a time from here on
        entry->claimed = false;
        --preparing;
        changed.notify_all();
        continue;
      }
      count(*entry);
      changed.notify_all();
      lock.unlock();
      prepare_it(*entry, failure);
      lock.lock();
    }
  }

  /// Prepares the next records on the pool, which is idle where this has no threads of its own.
  void run_wave() {
    std::vector<std::pair<Entry*, std::exception_ptr>> wave;
    std::unique_lock lock(mutex);
    while (wave.size() < static_cast<size_t>(pool.threads())) {
      Entry* const entry = claim();
      if (entry == nullptr) {
        if (!take(lock, /*wait=*/false)) break;
        continue;
      }
      std::exception_ptr failure = open_it(*entry);
      if (!has_room(*entry)) {
        entry->claimed = false;
        --preparing;
        break;
      }
      count(*entry);
      wave.emplace_back(entry, std::move(failure));
    }
    lock.unlock();
    std::vector<char> begun(wave.size());
    try {
      pool.parallel_for(wave.size(), [&](size_t task, int) {
        begun[task] = 1;
        prepare_it(*wave[task].first, wave[task].second);
      });
    } catch (...) {  // cancelled: tasks that had not begun are left out
      for (size_t task = 0; task < wave.size(); ++task) {
        if (begun[task] == 0) finish(*wave[task].first, {}, std::current_exception());
      }
    }
  }

  /// Drops all that is held and prepares the first record while no other is. Unlocked.
  void run_alone() {
    std::unique_lock lock(mutex);
    limits.records = 1;
    alone = true;
    changed.notify_all();
    changed.wait(lock, [&] { return preparing == 0; });
    for (const auto& entry : held) {
      entry->claimed = entry->counted = false;
      entry->made.reset();
      entry->failure = nullptr;
    }
    uncounted = first;
    held_pixels = 0;
    Entry& entry = *held.front();
    entry.claimed = true;
    entry.crowded = false;
    ++preparing;
    const std::exception_ptr failure = open_it(entry);
    count(entry);
    lock.unlock();
    prepare_it(entry, failure);
  }

  RecordSource& source;
  const Open open;
  const Prepare prepare;
  ThreadPool& pool;
  const Watch* const outer;
  std::atomic<bool> stop{false};

  std::mutex mutex;  // of what follows, but for an entry that is claimed, or that front() gave
  std::condition_variable changed;
  PrepareLimits limits;
  bool alone = false;   // limits.records has become 1
  bool taking = false;  // somebody waits for the source
  bool ended = false;   // the source has no more
  std::exception_ptr source_failure;
  std::deque<std::unique_ptr<Entry>> held;
  size_t first = 0;      // number of held.front()
  size_t uncounted = 0;  // of the first entry whose pixels are not counted
  int64_t held_pixels = 0;
  size_t preparing = 0;  // of those held
  std::vector<std::thread> threads;
};

PreparedRecords::PreparedRecords(RecordSource& source, Open open, Prepare prepare,
                                 const PrepareLimits& limits, ThreadPool& pool, const Watch* watch)
    : state_(std::make_unique<State>(source, std::move(open), std::move(prepare), limits, pool,
                                     watch)) {
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

std::shared_ptr<const Record> PreparedRecords::next(bool wait) {
  State& state = *state_;
  std::unique_lock lock(state.mutex);
  while (state.held.empty()) {
    if (state.source_failure) std::rethrow_exception(std::exchange(state.source_failure, nullptr));
    if (state.ended || state.cancelled()) return nullptr;
    if (state.threads.empty()) {
      if (!state.take(lock, wait) && !wait) return nullptr;
    } else if (wait) {
      state.changed.wait_for(lock, kPatience);
    } else {
      return nullptr;
    }
  }
  return state.held.front()->record;
}

bool PreparedRecords::ready() {
  if (!next(/*wait=*/false)) return false;
  const std::lock_guard lock(state_->mutex);
  return state_->threads.empty() || state_->held.front()->finished();
}

PreparedRecord& PreparedRecords::front() {
  State& state = *state_;
  std::unique_lock lock(state.mutex);
  assert(!state.held.empty());
  Entry& entry = *state.held.front();
  if (state.threads.empty() && !entry.claimed) {
    lock.unlock();
    state.run_wave();
    lock.lock();
  }
  state.changed.wait(lock, [&] { return entry.finished(); });
  if (entry.failure && (entry.thrown || (entry.crowded && is_out_of_memory(entry.failure)))) {
    lock.unlock();
    state.run_alone();
    lock.lock();
  }
  if (!entry.failure) return *entry.made;
  entry.thrown = true;
  std::rethrow_exception(entry.failure);
}

PreparedRecord* PreparedRecords::after_front() {
  State& state = *state_;
  const std::lock_guard lock(state.mutex);
  if (state.held.size() < 2) return nullptr;
  std::optional<PreparedRecord>& made = state.held[1]->made;
  return made ? &*made : nullptr;
}

void PreparedRecords::pop() {
  State& state = *state_;
  std::unique_ptr<Entry> done;  // whose memory is freed unlocked
  {
    const std::lock_guard lock(state.mutex);
    assert(!state.held.empty());
    done = std::move(state.held.front());
    state.held.pop_front();
    ++state.first;
    if (done->counted && done->open) state.held_pixels -= done->open->pixels;
    state.uncounted = std::max(state.uncounted, state.first);
  }
  state.changed.notify_all();
}

bool PreparedRecords::one_at_a_time() const {
  const std::lock_guard lock(state_->mutex);
  return state_->alone;
}

}  // namespace kvlm
