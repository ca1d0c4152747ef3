#pragma once

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "kvcache/kv_cache.h"
#include "kvcache/policy.h"
#include "kvcache/policy_cache.h"
#include "kvcache/spec.h"

namespace kvlm {

/// Every part that a spec may have, in the order of `vlm-kv list`: plain formats, quantizers,
/// retention rules, sharing.
std::vector<const PolicyInfo*> policies();

/// Every name that a spec part may have.
std::vector<std::string_view> part_names();

/// The policy of a name, or null.
const PolicyInfo* find_policy(std::string_view name) noexcept;
const QuantizerEntry* find_quantizer(std::string_view name) noexcept;
const RetentionEntry* find_retention(std::string_view name) noexcept;
/// The element type of a plain format, or nothing if `name` is not one.
std::optional<DType> find_format(std::string_view name) noexcept;

/// Why `spec` cannot serve a decoder of this shape, with what `profile` (may be null) has; nothing
/// if it can. Asked at load, before any weight is read.
std::optional<std::string> unsupported(const CacheSpec& spec, const CacheShape& shape,
                                       const PolicyProfile* profile = nullptr);

/// What a cache of `spec` is made of for a decoder of `shape`; `profile`, what `vlm-kv profile`
/// measured, may be null. Throws Error{kUnsupported} with the reason and the cure for what specs 10
/// forbids or what does not fit the shape.
CacheParts parts_of(const CacheSpec& spec, const CacheShape& shape, const PolicyProfile* profile);

/// What open(size) sets aside in an arena.
struct Reservation {
  size_t kept = 0;     ///< bytes until close()
  size_t staging = 0;  ///< bytes more until the first prompt has ended

  size_t bytes() const noexcept { return kept + staging; }
};
Reservation reservation(const CacheSpec& spec, const CacheShape& shape, const SequenceSize& size,
                        const PolicyProfile* profile = nullptr);

/// Arena bytes that open(size) sets aside, all together.
size_t reserved_bytes(const CacheSpec& spec, const CacheShape& shape, const SequenceSize& size,
                      const PolicyProfile* profile = nullptr);

/// Arena bytes that suffice for open() of any sequence of at most max_rows tokens, however many of
/// them are its prompt or visual.
size_t session_bytes(const CacheSpec& spec, const CacheShape& shape, int max_rows,
                     const PolicyProfile* profile = nullptr);

/// A cache with an arena of exactly `arena_bytes` on `device`.
/// Throws Error{kUnsupported} with unsupported()'s reason, Error{kOutOfMemory}.
std::unique_ptr<KvCache> make_cache(const CacheSpec& spec, const CacheShape& shape,
                                    size_t arena_bytes, Device device,
                                    const PolicyProfile* profile = nullptr);

}  // namespace kvlm
