#pragma once

#include <optional>
#include <string>

#include "kernels/base/device.h"
#include "kernels/base/queue.h"

namespace kvlm {

/// What a program is going to take of a device at least, known before any weight is read.
struct Demand {
  std::string model;
  size_t weight_bytes = 0;
  size_t cache_bytes = 0;  ///< 0 if nobody has said yet
};

/// Throws Error{kOutOfMemory} with the figures if `total` bytes, which is what the CPU's programs
/// have, cannot hold that.
void require_memory(const Demand& demand, size_t total);

/// Bytes of memory that this process can have at most: the machine's, or less where a limit of the
/// process or of its control group says so.
size_t memory_limit();

/// What of it is free by now, as far as the system says.
size_t available_memory();

/// Throws Error{kOutOfMemory} with the figures if what is free on a GPU cannot hold that.
void require_room(const Demand& demand, Device device, const cuda::DeviceFacts& facts);

/// What the driver says of a GPU, with no more free than is left of `most` bytes in use.
cuda::DeviceFacts facts_within(Device device, std::optional<size_t> most);

}  // namespace kvlm
