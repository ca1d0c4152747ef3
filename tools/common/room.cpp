#include "tools/common/room.h"

#include <fmt/format.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <fstream>
#include <limits>

#include "kernels/base/error.h"
#include "kernels/base/human_bytes.h"

namespace kvlm {

namespace {

bool fits(const Demand& demand, size_t bytes) {
  return demand.weight_bytes <= bytes && demand.cache_bytes <= bytes - demand.weight_bytes;
}

/// "its weights take 2.00 GB and --kv-memory 1.00 GB"
std::string figures(const Demand& demand) {
  if (demand.weight_bytes == 0) {  // those of a file that is mapped
    return fmt::format("--kv-memory takes {}", human_bytes(demand.cache_bytes));
  }
  return fmt::format("its weights take {}{}", human_bytes(demand.weight_bytes),
                     demand.cache_bytes == 0
                         ? ""
                         : fmt::format(" and --kv-memory {}", human_bytes(demand.cache_bytes)));
}

const char* what_is_large(const Demand& demand) {
  return demand.cache_bytes == 0 ? "model" : "model or cache";
}

}  // namespace

void require_room(const Demand& demand, Device device, const cuda::DeviceFacts& facts) {
  if (fits(demand, facts.free_bytes)) return;
  throw Error(ErrorCode::kOutOfMemory,
              fmt::format("{} does not fit on {} ({}): {}, and {} of {} are free; use a smaller "
                          "{}, or --device cpu",
                          demand.model, device_name(device), facts.name, figures(demand),
                          human_bytes(facts.free_bytes), human_bytes(facts.total_bytes),
                          what_is_large(demand)));
}

void require_memory(const Demand& demand, size_t total) {
  if (fits(demand, total)) return;
  throw Error(
      ErrorCode::kOutOfMemory,
      fmt::format("{} does not fit in memory: {}, but there are {} in all; use a smaller {}",
                  demand.model, figures(demand), human_bytes(total), what_is_large(demand)));
}

size_t memory_limit() {
  size_t limit = SIZE_MAX;
  const long pages = sysconf(_SC_PHYS_PAGES);
  const long page_bytes = sysconf(_SC_PAGE_SIZE);
  if (pages > 0 && page_bytes > 0) {
    limit = static_cast<size_t>(pages) * static_cast<size_t>(page_bytes);
  }
  struct rlimit of_process {};
  if (getrlimit(RLIMIT_AS, &of_process) == 0 && of_process.rlim_cur != RLIM_INFINITY) {
    limit = std::min<size_t>(limit, of_process.rlim_cur);
  }
  // Where a container's own limit is found, in version 2 and 1; "max" is none.
  for (const char* path :
       {"/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"}) {
    size_t of_group = 0;
    if (std::ifstream(path) >> of_group) limit = std::min(limit, of_group);
  }
  return limit;
}

cuda::DeviceFacts facts_within(Device device, std::optional<size_t> most) {
  cuda::DeviceFacts facts = cuda::device_facts(device.index);
  if (!most) return facts;
  const size_t used = facts.total_bytes - facts.free_bytes;
  facts.free_bytes = std::min(facts.free_bytes, *most - std::min(*most, used));
  facts.total_bytes = std::min(facts.total_bytes, *most);
  return facts;
}

size_t available_memory() {
  size_t bytes = memory_limit();
  std::ifstream file("/proc/meminfo");
  std::string name;
  for (size_t kib = 0; file >> name >> kib;
       file.ignore(std::numeric_limits<std::streamsize>::max(), '\n')) {
    if (name == "MemAvailable:") bytes = std::min(bytes, kib * 1024);
  }
  return bytes;
}

}  // namespace kvlm
