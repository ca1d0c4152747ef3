#include "kvcache/make_cache.h"

#include <utility>

#include "kvcache/plan/sequence_bounds.h"
#include "kvcache/policy_cache.h"

namespace kvlm {

Reservation reservation(const CachePlan& plan, const SequenceSize& size) {
  return SequenceBounds(plan).reservation(size);
}

size_t session_bytes(const CachePlan& plan, int max_rows, int sequences) {
  return SequenceBounds(plan).session_bytes(max_rows, sequences);
}

std::unique_ptr<KvCache> make_cache(std::shared_ptr<const CachePlan> plan, size_t arena_bytes,
                                    Device device) {
  return std::make_unique<PolicyCache>(std::move(plan), arena_bytes, device);
}

std::unique_ptr<KvCache> make_cache(std::shared_ptr<const CachePlan> plan,
                                    std::shared_ptr<Arena> arena) {
  return std::make_unique<PolicyCache>(std::move(plan), std::move(arena));
}

}  // namespace kvlm
