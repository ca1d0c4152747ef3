#include "kvcache/make_cache.h"

#include <utility>

#include "kvcache/policy_cache.h"
#include "kvcache/row_cache.h"

namespace kvlm {

Reservation reservation(const CachePlan& plan, const SequenceSize& size) {
  if (plan.plain()) return {row_cache_reserved_bytes(plan.rows, plan.shape, size.max_rows), 0};
  return Layouts(plan).reservation(size);
}

size_t session_bytes(const CachePlan& plan, int max_rows) {
  if (plan.plain()) return row_cache_reserved_bytes(plan.rows, plan.shape, max_rows);
  return Layouts(plan).session_bytes(max_rows);
}

std::unique_ptr<KvCache> make_cache(std::shared_ptr<const CachePlan> plan, size_t arena_bytes,
                                    Device device) {
  if (plan->plain()) return make_row_cache(plan->rows, plan->shape, arena_bytes, device);
  return std::make_unique<PolicyCache>(std::move(plan), arena_bytes, device);
}

}  // namespace kvlm
