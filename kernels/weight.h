#pragma once

#include <cassert>
#include <string>

#include "kernels/base/tensor.h"
#include "kernels/quantized/matrix.h"

namespace kvlm {

/// Borrows a matrix (out, in) that linear() multiplies by: plain floats as a file has them, or
/// quantized.
class Weight {
 public:
  Weight() noexcept = default;
  Weight(ConstTensorView plain) noexcept : plain_(plain) {}  // NOLINT(google-explicit-constructor)
  Weight(const Tensor& plain) noexcept : plain_(plain) {}    // NOLINT(google-explicit-constructor)
  explicit Weight(const QuantizedMatrix& quantized) noexcept : quantized_(quantized) {}

  bool is_quantized() const noexcept { return quantized_.data != nullptr; }
  bool empty() const noexcept { return !is_quantized() && plain_.empty(); }
  const QuantizedMatrix& quantized() const noexcept {
    assert(is_quantized());
    return quantized_;
  }
  /// Floats; an empty view of a quantized matrix.
  ConstTensorView plain() const noexcept { return plain_; }

  /// The dtype of its floats; of a quantized matrix that of the activations that a GPU multiplies.
  DType dtype() const noexcept {
    return is_quantized() ? quantized_.format.activations : plain_.dtype();
  }
  Shape shape() const noexcept {
    return is_quantized() ? quantized_.format.shape() : plain_.shape();
  }
  Device device() const noexcept { return is_quantized() ? quantized_.device : plain_.device(); }
  /// Where its numbers begin.
  const std::byte* data() const noexcept {
    return is_quantized() ? quantized_.data : plain_.data();
  }
  /// Bytes that it takes, padding included.
  size_t bytes() const noexcept;
  /// "bf16", "int4 in groups of 32", "int8 per output".
  std::string format_name() const;

 private:
  ConstTensorView plain_;
  QuantizedMatrix quantized_;
};

}  // namespace kvlm
