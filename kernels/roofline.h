#pragma once

#include <cstddef>
#include <span>

#include "kernels/base/device.h"

namespace kvlm {

/// What this machine can do at most, measured, not looked up: the roof that benchmarks are compared
/// with, in the same run.

/// Bytes per second of one pass of a plain read loop over `bytes` on all threads of the stream's
/// pool. `bytes` should exceed the last cache several times.
double measure_read_rate(std::span<const std::byte> bytes, Stream& stream);

/// Floating-point operations per second of one large product (size, size) * (size, size)^T in f32
/// by the library itself, one product per thread of the stream's pool at once.
double measure_matrix_rate(int size, Stream& stream);

}  // namespace kvlm
