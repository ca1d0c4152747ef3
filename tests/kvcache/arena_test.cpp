#include "kvcache/arena.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <utility>
#include <vector>

#include "kernels/base/error.h"

namespace kvlm {
namespace {

using testing::AllOf;
using testing::HasSubstr;

TEST(Arena, RoundsUpToWholeCacheLines) {
  Arena arena({}, 1000);
  EXPECT_EQ(arena.capacity(), 1024u);
  EXPECT_EQ(Arena::rounded(0), 0u);
  EXPECT_EQ(Arena::rounded(1), 64u);
  EXPECT_EQ(Arena::rounded(64), 64u);
  EXPECT_EQ(Arena::rounded(65), 128u);
  const ArenaExtent extent = arena.reserve(65, "a");
  EXPECT_EQ(extent.reserved(), 128u);
  EXPECT_EQ(arena.reserved(), 128u);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(extent.data()) % 64, 0u);
}

TEST(Arena, CountsWhatEachOfItsOwnersUses) {
  Arena arena({}, 1024);
  size_t first = 0;
  size_t second = 0;
  {
    ArenaExtent a = arena.reserve(256, "a", &first);
    ArenaExtent b = arena.reserve(256, "b", &second);
    ArenaExtent c = arena.reserve(64, "c", &second);
    a.set_used(100);
    b.set_used(200);
    c.set_used(3);
    a.set_used(7);
    EXPECT_EQ(first, 7u);
    EXPECT_EQ(second, 203u);
    EXPECT_EQ(arena.used(), 210u);
    ArenaExtent moved = std::move(b);
    b = std::move(c);
    b.set_used(1);
    EXPECT_EQ(second, 201u);
    moved = {};
    EXPECT_EQ(second, 1u);
    EXPECT_EQ(first, 7u);
  }
  EXPECT_EQ(first + second + arena.used() + arena.reserved(), 0u);
}

TEST(Arena, CountsWhatItsExtentsHandOut) {
  Arena arena({}, 1024);
  ArenaExtent a = arena.reserve(256, "a");
  ArenaExtent b = arena.reserve(128, "b");
  EXPECT_EQ(arena.used(), 0u);
  a.set_used(7);
  b.set_used(128);
  EXPECT_EQ(a.used(), 7u);
  EXPECT_EQ(arena.used(), 135u);
  a.set_used(3);
  EXPECT_EQ(arena.used(), 131u);
  EXPECT_EQ(arena.reserved(), 384u);
  a = ArenaExtent();
  EXPECT_EQ(arena.used(), 128u);
  EXPECT_EQ(arena.reserved(), 128u);
}

TEST(Arena, ExtentsShrink) {
  Arena arena({}, 512);
  ArenaExtent a = arena.reserve(256, "a");
  const ArenaExtent b = arena.reserve(128, "b");
  a.set_used(70);
  EXPECT_FALSE(arena.fits(192, 1));
  a.shrink(70);
  EXPECT_EQ(a.reserved(), 128u);
  EXPECT_EQ(a.used(), 70u);
  EXPECT_EQ(arena.used(), 70u);
  EXPECT_EQ(arena.reserved(), 256u);
  EXPECT_EQ(arena.reserve(128, "behind a").data(), a.data() + 128);
  a.shrink(100);  // rounded up, as it is
  EXPECT_EQ(a.reserved(), 128u);
  a = ArenaExtent();
  EXPECT_TRUE(arena.fits(256, 1));
}

TEST(Arena, MovedExtentsReturnTheirMemoryOnce) {
  Arena arena({}, 256);
  {
    ArenaExtent a = arena.reserve(64, "a");
    a.set_used(10);
    ArenaExtent b = std::move(a);
    EXPECT_EQ(b.used(), 10u);
    EXPECT_EQ(arena.used(), 10u);
    ArenaExtent c = arena.reserve(128, "c");
    c.set_used(20);
    c = std::move(b);  // gives up its own first
    EXPECT_EQ(arena.used(), 10u);
    EXPECT_EQ(arena.reserved(), 64u);
    ArenaExtent& same = c;
    c = std::move(same);
    EXPECT_EQ(arena.reserved(), 64u);
  }
  EXPECT_EQ(arena.reserved(), 0u);
  EXPECT_EQ(arena.used(), 0u);
  EXPECT_TRUE(arena.fits(256, 1));
}

TEST(Arena, RefusesByNameAndFigureAndStaysAsItWas) {
  Arena arena({}, 256);
  const ArenaExtent a = arena.reserve(128, "a");
  try {
    arena.reserve(129, "sequence 7");
    FAIL() << "expected an Error";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kOutOfMemory);
    EXPECT_THAT(error.what(), AllOf(HasSubstr("sequence 7"), HasSubstr("192"), HasSubstr("128"),
                                    HasSubstr("256")));
  }
  EXPECT_EQ(arena.reserved(), 128u);
  const ArenaExtent b = arena.reserve(128, "b");
  EXPECT_EQ(arena.reserved(), 256u);
}

TEST(Arena, ReservesNothingFromNothing) {
  Arena arena({}, 0);
  EXPECT_EQ(arena.capacity(), 0u);
  const ArenaExtent none = arena.reserve(0, "none");
  EXPECT_EQ(none.reserved(), 0u);
  EXPECT_TRUE(arena.fits(0, 5));
  EXPECT_FALSE(arena.fits(1, 1));
  EXPECT_THROW(arena.reserve(1, "one"), Error);
}

TEST(Arena, FitsSaysWhatReserveDoes) {
  Arena arena({}, 640);
  std::vector<ArenaExtent> extents;
  for (int i = 0; i < 5; ++i) extents.push_back(arena.reserve(128, "x"));
  extents[1] = {};
  extents[3] = {};
  EXPECT_TRUE(arena.fits(128, 2));
  EXPECT_FALSE(arena.fits(128, 3));
  EXPECT_FALSE(arena.fits(192, 1)) << "256 bytes are free, but not side by side";
  EXPECT_TRUE(arena.fits(64, 4));
}

TEST(Arena, MergesWhatIsGivenBackInAnyOrder) {
  std::vector<int> order = {0, 1, 2, 3};
  do {
    Arena arena({}, 4 * 64);
    std::vector<ArenaExtent> extents;
    for (int i = 0; i < 4; ++i) extents.push_back(arena.reserve(64, "x"));
    for (const int i : order) extents[static_cast<size_t>(i)] = {};
    EXPECT_TRUE(arena.fits(256, 1)) << testing::PrintToString(order);
  } while (std::next_permutation(order.begin(), order.end()));
}

/// Random reservations, releases and fills: extents never overlap and keep what is written to them,
/// the sums are exact, fits() tells what reserve() does, and everything merges to one range at
/// last.
TEST(Arena, KeepsItsPromisesOverRandomUse) {
  for (unsigned seed = 0; seed < 20; ++seed) {
    std::mt19937 rng(seed);
    const auto below = [&](size_t n) { return static_cast<size_t>(rng() % n); };
    Arena arena({}, 64 * 64);
    struct Held {
      ArenaExtent extent;
      std::byte mark;
    };
    std::vector<Held> held;
    size_t refused = 0;
    for (int turn = 0; turn < 2000; ++turn) {
      if (!held.empty() && below(2) == 0) {
        std::swap(held[below(held.size())], held.back());
        held.pop_back();
      } else {
        const size_t bytes = 1 + below(800);
        const bool fits = arena.fits(bytes, 1);
        try {
          ArenaExtent extent = arena.reserve(bytes, "x");
          ASSERT_TRUE(fits);
          const auto mark = static_cast<std::byte>(rng() % 256);
          std::memset(extent.data(), static_cast<int>(mark), extent.reserved());
          extent.set_used(bytes);
          held.push_back({std::move(extent), mark});
        } catch (const Error&) {
          ASSERT_FALSE(fits);
          ++refused;
        }
      }
      size_t reserved = 0;
      size_t used = 0;
      for (const Held& h : held) {
        reserved += h.extent.reserved();
        used += h.extent.used();
      }
      ASSERT_EQ(arena.reserved(), reserved);
      ASSERT_EQ(arena.used(), used);
    }
    for (const Held& h : held) {
      const std::byte* data = h.extent.data();
      ASSERT_TRUE(std::all_of(data, data + h.extent.reserved(), [&](std::byte b) {
        return b == h.mark;
      })) << "overlaps another extent";
    }
    EXPECT_GT(refused, 0u) << "the arena was never full: the test tests too little";
    held.clear();
    EXPECT_EQ(arena.reserved(), 0u);
    EXPECT_TRUE(arena.fits(arena.capacity(), 1)) << "the free ranges did not merge";
  }
}

}  // namespace
}  // namespace kvlm
