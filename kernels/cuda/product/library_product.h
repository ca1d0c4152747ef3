#pragma once

#include <cstdint>
#include <tuple>

#include "kernels/base/tensor.h"

// Matrix products by cuBLASLt, whose choice for a shape is made once and kept.
namespace kvlm::cuda {

/// What a product is made of, and into.
struct ProductKind {
  DType dtype;  // of x and w
  DType made;   // of y, and of the bias
  int64_t rows, in, out;
  bool bias, add;
  bool gelu = false;  // kGeluTanh of it
  int count = 1;      // products of the same x

  auto key() const { return std::tie(dtype, made, rows, in, out, bias, add, gelu, count); }
  bool operator<(const ProductKind& other) const { return key() < other.key(); }
};

/// How far each of several products lies behind the one before, in elements.
struct ProductStrides {
  int64_t w, y, bias;

  bool operator==(const ProductStrides&) const = default;
};

/// The memory of a call.
struct ProductOperands {
  void* y;
  const void* x;
  const void* w;
  const void* bias;          // or null
  ProductStrides strides{};  // of several products
};

/// y (rows, out) = x (rows, in) w^T (out, in) + bias on the tensor cores, `count` of them with the
/// same x. Returns false, having done nothing, where the library does not multiply several at once.
/// Any thread may call it. Throws Error on what cuBLASLt reports. Asynchronous.
bool multiply_by_library(const ProductKind& kind, const ProductOperands& operands, Stream& stream);

}  // namespace kvlm::cuda
