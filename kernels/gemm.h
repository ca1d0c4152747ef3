#pragma once

#include <initializer_list>
#include <optional>
#include <span>

#include "kernels/activation.h"
#include "kernels/base/tensor.h"
#include "kernels/weight.h"

namespace kvlm {

/// y[r,:] = x[r,:] * W^T + bias   or, with add, y[r,:] += x[r,:] * W^T + bias.
///
///   x     (rows, in)    f32 (CUDA also f16 | bf16; operand_dtype() is taken as it is)
///   w     (out, in)     f32 | f16 | bf16, read in its own format, accumulated in f32; or quantized
///   bias  (out,)        f32; may be empty()
///   y     (rows, out)   f32; may not alias x
///
/// On CUDA w and bias may be read before what is queued ahead is done, so only copies, or work that
/// the host has waited for, may have written them.
///
/// Above kMaxDecodeRows rows the CPU multiplies f16 and bf16 weights on AMX where it can, with x
/// split into three bf16 parts, as exactly as in f32 (cpu/amx/product.h), or rounded to one where
/// Stream::rounds_rows(). Otherwise it widens the weights to f32 on the way (cpu/matmul.h).
///
/// With quantized weights the CPU rounds x to int8, per row and 32 inputs
/// (cpu/quantized_product.h), and a GPU to the format's activations, in which it also rounds the
/// weights above kMostQuantized rows.
///
/// A row of y depends on its row of x alone, bit for bit: not on `rows` while rows <=
/// kMaxDecodeRows (on CUDA up to 4, and above in half precision), and never on the number of
/// threads. Asynchronous on CUDA. Throws Error{kInvalidArgument} on a shape, dtype or device
/// mismatch.
void linear(TensorView y, ConstTensorView x, const Weight& w, ConstTensorView bias, bool add,
            Stream& stream);

/// What becomes of a product p before it is stored, in this order.
struct LinearTail {
  ConstTensorView bias = {};                  ///< (out,) f32, added to p; may be empty
  std::optional<Activation> activation = {};  ///< p = activation(p)
  bool gated = false;                         ///< p[i] = activation(p[2 i]) * p[2 i + 1]
  ConstTensorView scale = {};                 ///< (columns of y,) f32: p *= scale; may be empty
  bool add = false;                           ///< y += p, else y = p
};

/// linear() with a tail; the columns of y are those of w's rows, or with `gated`, which needs an
/// activation, half as many.
///
///   y  f32 (CUDA also f16 | bf16, rounded to nearest even, without add)
///
/// On CUDA, products of half-precision weights that are not stored at once are rounded to the
/// weights' dtype in between. Otherwise as linear().
void linear(TensorView y, ConstTensorView x, const Weight& w, const LinearTail& tail,
            Stream& stream);

/// One of several products of the same x.
struct Projection {
  TensorView y;          ///< (rows, out)
  Weight w;              ///< (out, in)
  ConstTensorView bias;  ///< (out,); may be empty()
};

/// linear() of every projection, without add, in fewer passes over x and fewer launches: the same
/// bits, but that on CUDA neighbours of one shape, of many rows, may be multiplied together if
/// their memory lies at equal distances, with their sums in another order.
void linears(std::span<const Projection> projections, ConstTensorView x, Stream& stream);

/// The dtype in which products with all of `ws` take `rows` rows of x as they are: on CUDA that of
/// the weights where many rows are multiplied in it, otherwise, and where they differ, f32. Rows
/// that are rounded to it beforehand give the bits that f32 rows give.
DType operand_dtype(std::initializer_list<Weight> ws, int64_t rows);

/// y = activation(gate.y) * up.y of two products of the same x. On CUDA a few rows take one launch,
/// and so do many where gates_alone() says so.
///
///   x         (rows, in)   as linear()
///   gate, up  equal sizes; their y are workspace, (rows, out) f32: the contents are lost. Empty
///             where gates_alone() says so
///   y         (rows, out)  f32 (CUDA also f16 | bf16, rounded to nearest even); may be gate.y, and
///             may overlap no operand otherwise
///
/// Throws Error{kInvalidArgument} on a shape, dtype or device mismatch. Asynchronous on CUDA.
void gated_linears(TensorView y, const Projection& gate, const Projection& up,
                   Activation activation, ConstTensorView x, Stream& stream);

/// Whether gated_linears() makes y of `rows` rows of `dtype` without the products on the way, so
/// that they need no workspace if x and y begin at multiples of 16 bytes, which it throws
/// Error{kInvalidArgument} for otherwise. The y of gate and up are not looked at. On CUDA it
/// answers for the current GPU.
bool gates_alone(const Projection& gate, const Projection& up, Activation activation, DType dtype,
                 int64_t rows);

/// Above this many rows a GPU turns quantized weights into floats first.
inline constexpr int64_t kMostQuantized = 256;

/// Up to this many rows `linear` streams the weights once and computes each row as it would alone;
/// above it multiplies tiles of y.
inline constexpr int64_t kMaxDecodeRows = 16;

}  // namespace kvlm
