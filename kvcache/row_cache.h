#pragma once

#include <memory>

#include "kvcache/kv_cache.h"

namespace kvlm {

/// The plain cache: every key and value of every token as a full-precision row of `format`
/// (f32 | f16 | bf16). The yardstick of every policy.
std::unique_ptr<KvCache> make_row_cache(DType format, const CacheShape& shape, size_t arena_bytes,
                                        Device device);

/// Arena bytes of one sequence of max_rows tokens.
size_t row_cache_reserved_bytes(DType format, const CacheShape& shape, int max_rows) noexcept;

}  // namespace kvlm
