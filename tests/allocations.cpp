#include "tests/allocations.h"

#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <new>

namespace {

std::atomic<size_t> count{0};

void note() noexcept { count.fetch_add(1, std::memory_order_relaxed); }

}  // namespace

namespace kvlm {

size_t allocations() noexcept { return count.load(); }

}  // namespace kvlm

#if defined(__GLIBC__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)

// The names under which glibc keeps the functions that are replaced here; operator new calls
// malloc, so it is counted too.
extern "C" {
// NOLINTBEGIN(bugprone-reserved-identifier,readability-identifier-naming)
void* __libc_malloc(size_t bytes);
void* __libc_calloc(size_t number, size_t bytes);
void* __libc_realloc(void* p, size_t bytes);
void* __libc_memalign(size_t alignment, size_t bytes);
// NOLINTEND(bugprone-reserved-identifier,readability-identifier-naming)

void* malloc(size_t bytes) noexcept {
  note();
  return __libc_malloc(bytes);
}
void* calloc(size_t number, size_t bytes) noexcept {
  note();
  return __libc_calloc(number, bytes);
}
void* realloc(void* p, size_t bytes) noexcept {
  note();
  return __libc_realloc(p, bytes);
}
void* aligned_alloc(size_t alignment, size_t bytes) noexcept {
  note();
  return __libc_memalign(alignment, bytes);
}
int posix_memalign(void** p, size_t alignment, size_t bytes) noexcept {
  note();
  *p = __libc_memalign(alignment, bytes);
  return *p == nullptr ? ENOMEM : 0;
}
}

#else

// A sanitizer has replaced malloc itself. Not inlined: GCC would take the malloc it sees inside for
// a mismatched pair.
[[gnu::noinline]] void* operator new(size_t bytes) {
  note();
  if (void* p = std::malloc(bytes == 0 ? 1 : bytes)) return p;
  throw std::bad_alloc();
}

// The standard library's temporary buffers ask this way.
[[gnu::noinline]] void* operator new(size_t bytes, const std::nothrow_t&) noexcept {
  try {
    return operator new(bytes);
  } catch (...) {
    return nullptr;
  }
}

[[gnu::noinline]] void operator delete(void* p) noexcept { std::free(p); }
[[gnu::noinline]] void operator delete(void* p, size_t) noexcept { std::free(p); }

#endif
