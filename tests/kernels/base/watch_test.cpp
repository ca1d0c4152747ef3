#include "kernels/base/watch.h"

#include <gmock/gmock.h>

#include <atomic>
#include <functional>
#include <string>
#include <tuple>
#include <vector>

#include "kernels/base/device.h"
#include "kernels/base/error.h"

namespace kvlm {
namespace {

using testing::ElementsAre;

/// Writes down what it is told, and cancels once it has been asked `patience` times.
class Notes final : public Watch {
 public:
  explicit Notes(int patience = 1 << 30) : patience_(patience) {}
  void progress(std::string_view phase, size_t done, size_t total) override {
    told.emplace_back(phase, done, total);
  }
  bool cancelled() const noexcept override { return patience_.fetch_sub(1) <= 0; }

  std::vector<std::tuple<std::string, size_t, size_t>> told;

 private:
  mutable std::atomic<int> patience_;
};

ErrorCode code_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const Error& error) {
    return error.code();
  }
  ADD_FAILURE() << "nothing was thrown";
  return {};
}

TEST(Watch, NobodyIsToldNothing) {
  give_up_if_cancelled(nullptr);
  report_progress(nullptr, "vision", 1, 2);
  PieceWatch piece(nullptr, 0, 2);
  piece.progress("vision", 1, 2);
  EXPECT_FALSE(piece.cancelled());
}

TEST(Watch, IsToldBeforeItIsAsked) {
  Notes notes(0);
  EXPECT_EQ(code_of([&] { report_progress(&notes, "vision", 1, 2); }), ErrorCode::kCancelled);
  EXPECT_THAT(notes.told, ElementsAre(std::tuple("vision", 1, 2)));
}

TEST(PieceWatch, PiecesMakeUpThePhase) {
  Notes notes;
  for (size_t picture = 0; picture < 2; ++picture) {
    PieceWatch piece(&notes, picture, 2);
    for (size_t layer = 0; layer <= 2; ++layer) report_progress(&piece, "vision", layer, 2);
  }
  EXPECT_THAT(notes.told, ElementsAre(std::tuple("vision", 0, 4), std::tuple("vision", 1, 4),
                                      std::tuple("vision", 2, 4), std::tuple("vision", 2, 4),
                                      std::tuple("vision", 3, 4), std::tuple("vision", 4, 4)));
}

TEST(WatchScope, TheOuterOneFollowsAgainAfterIt) {
  ThreadPool pool(1);
  Stream stream(pool);
  Notes outer, inner;
  stream.set_watch(&outer);
  {
    const WatchScope scope(stream, &inner);
    EXPECT_EQ(stream.watch(), &inner);
  }
  EXPECT_EQ(stream.watch(), &outer);
}

TEST(ThreadPoolWatch, LeavesOutTheRestAndStaysUsable) {
  for (const int threads : {1, 3}) {
    ThreadPool pool(threads);
    Notes notes(10);
    pool.set_watch(&notes);
    std::atomic<int> runs{0};
    const auto count = [&](size_t, int) { runs.fetch_add(1); };
    EXPECT_EQ(code_of([&] { pool.parallel_for(1000, count); }), ErrorCode::kCancelled);
    EXPECT_EQ(runs.load(), 10);
    pool.set_watch(nullptr);
    pool.parallel_for(1000, count);
    EXPECT_EQ(runs.load(), 1010);
  }
}

}  // namespace
}  // namespace kvlm
