#pragma once

#include <cstddef>

#include "kernels/base/dtype.h"

namespace kvlm::cpu {

/// A row-major matrix in memory: element (r, c) is data[r * stride + c].
template <class T>
struct Matrix {
  T* data;
  size_t stride;
};

/// The same in f32, f16 or bf16.
struct WeightRows {
  const std::byte* data;
  DType dtype;
  size_t stride;  // elements
};

/// y = x * w^T, or y += x * w^T with `add`, on the calling thread alone; callable from several
/// threads at a time, allocates nothing.
///
///   y (rows, out)   x (rows, in)   f32   w (out, in), read in its own format; y aliases neither
///
/// Sums are in f32 with fused multiplications where the processor has them: over 256 inputs in
/// order, then these sums in order. So a row of y depends on its row of x alone, bit for bit, and
/// on none of the sizes but `in`.
void multiply(Matrix<float> y, Matrix<const float> x, const WeightRows& w, size_t rows, size_t out,
              size_t in, bool add);

inline void multiply(Matrix<float> y, Matrix<const float> x, Matrix<const float> w, size_t rows,
                     size_t out, size_t in, bool add) {
  multiply(y, x, {reinterpret_cast<const std::byte*>(w.data), DType::kF32, w.stride}, rows, out, in,
           add);
}

}  // namespace kvlm::cpu
