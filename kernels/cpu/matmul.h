#pragma once

#include <cstddef>

// The one door to the matrix-product library.
namespace kvlm::cpu {

/// A row-major matrix in memory: element (r, c) is data[r * stride + c].
template <class T>
struct Matrix {
  T* data;
  size_t stride;
};

/// y = x * w^T, or y += x * w^T with `add`, on the calling thread alone; callable from several
/// threads at a time, allocates nothing once warmed up.
///
///   y (rows, out)   x (rows, in)   w (out, in)   f32; y aliases neither
void multiply(Matrix<float> y, Matrix<const float> x, Matrix<const float> w, size_t rows,
              size_t out, size_t in, bool add);

}  // namespace kvlm::cpu
