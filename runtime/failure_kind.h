#pragma once

#include <exception>

namespace kvlm {

/// Whether a failure is that there was no memory, of whatever kind.
bool is_out_of_memory(const std::exception_ptr& failure);

/// Whether a failure is that whoever follows the work wants no more.
bool is_cancellation(const std::exception_ptr& failure);

/// Whether a failure is that a device is lost, which is lost for everybody.
bool is_device_failure(const std::exception_ptr& failure);

}  // namespace kvlm
