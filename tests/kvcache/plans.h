#pragma once

#include <memory>
#include <optional>
#include <string>

#include "kernels/base/error.h"
#include "kvcache/plan/planner.h"
#include "kvcache/spec/spec.h"

namespace kvlm::test {

inline std::shared_ptr<CachePlan> plan_of(const std::string& spec, const CacheShape& shape) {
  return plan_cache(parse_spec(spec), shape);
}

/// Why `spec` cannot serve a decoder of `shape`; nothing if it can.
inline std::optional<std::string> unsupported(const CacheSpec& spec, const CacheShape& shape) {
  try {
    plan_cache(spec, shape);
    return std::nullopt;
  } catch (const Error& error) {
    return error.what();
  }
}

}  // namespace kvlm::test
