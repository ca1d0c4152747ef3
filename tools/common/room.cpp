#include "tools/common/room.h"

#include <fmt/format.h>

#include "kernels/base/error.h"

namespace kvlm {

void require_room(const Demand& demand, Device device, const cuda::DeviceFacts& facts) {
  const bool fits = demand.weight_bytes <= facts.free_bytes &&
                    demand.cache_bytes <= facts.free_bytes - demand.weight_bytes;
  if (fits) return;
  throw Error(ErrorCode::kOutOfMemory,
              fmt::format("{} does not fit on {} ({}): its weights take {} bytes{}, and {} of {} "
                          "bytes are free; use a smaller {}, or --device cpu",
                          demand.model, device_name(device), facts.name, demand.weight_bytes,
                          demand.cache_bytes == 0
                              ? ""
                              : fmt::format(" and --kv-memory {} bytes", demand.cache_bytes),
                          facts.free_bytes, facts.total_bytes,
                          demand.cache_bytes == 0 ? "model" : "model or cache"));
}

}  // namespace kvlm
