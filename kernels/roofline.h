#pragma once

#include <cstddef>
#include <span>

#include "kernels/base/device.h"
#include "kernels/base/dtype.h"

namespace kvlm {

/// What this machine can do at most, measured, not looked up: the roof that benchmarks are compared
/// with, in the same run.

/// Bytes per second of one pass over `bytes`, which should exceed the last cache several times and
/// lie on the stream's device: on the CPU a plain read loop on all threads of the stream's pool, on
/// CUDA a copy of one half onto the other, both halves counted.
double measure_memory_rate(std::span<std::byte> bytes, Stream& stream);

/// Floating-point operations per second of one large product (size, size) * (size, size)^T: on the
/// CPU in f32 (cpu/matmul.h; AMX may exceed it), one product per thread of the stream's pool at
/// once; on CUDA by the library, with both operands in `dtype`.
double measure_matrix_rate(int size, DType dtype, Stream& stream);

}  // namespace kvlm
