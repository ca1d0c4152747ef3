#include "tests/allocations.h"

#include <atomic>
#include <cstdlib>
#include <new>

namespace {

std::atomic<size_t> count{0};

}  // namespace

namespace kvlm {

size_t allocations() noexcept { return count.load(); }

}  // namespace kvlm

// Not inlined: GCC would take the malloc it sees inside for a mismatched pair.
[[gnu::noinline]] void* operator new(size_t bytes) {
  count.fetch_add(1, std::memory_order_relaxed);
  if (void* p = std::malloc(bytes == 0 ? 1 : bytes)) return p;
  throw std::bad_alloc();
}
[[gnu::noinline]] void operator delete(void* p) noexcept { std::free(p); }
[[gnu::noinline]] void operator delete(void* p, size_t) noexcept { std::free(p); }
