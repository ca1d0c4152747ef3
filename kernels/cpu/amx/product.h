#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "kernels/base/device.h"
#include "kernels/base/dtype.h"

// Products of f32 rows with bf16 or f16 weights on AMX, which multiplies bf16 and adds in f32.
// An f32 is the exact sum of three bf16 parts, a bf16 weight is one part and an f16 weight the
// exact sum of two. Products of parts whose orders add up to three or more, at most 2^-26 of the
// whole, are left out: three products for a bf16 weight, five for an f16 weight. Parts below 2^-126
// count as zero.
//
// The sum of an output runs over the channels in one order, whatever else is multiplied: the bits
// of a row of y depend on its row of x alone.
namespace kvlm::cpu::amx {

/// Whether this CPU has the instructions and the system lets this process use them.
bool available() noexcept;

/// The bf16 parts that an f32 becomes.
enum class Split : uint8_t {
  kRounded,  ///< one part: x and f16 weights are rounded to bf16
  kExact,    ///< three
};

/// Rows of x split into parts, in memory of a stream.
struct PackedRows {
  const float* x;  // (rows, in)
  size_t rows, in;
  Split split;
  uint16_t* parts;  // [rows / 32][in / 32][parts][2][16][32]
};

/// Packs x into stream.shared_scratch(). Nothing if an x is infinite, not a number, or rounds to
/// infinity in bf16: parts cannot express it.
std::optional<PackedRows> pack_rows(const float* x, size_t rows, size_t in, Split split,
                                    Stream& stream);

/// One product.
struct Product {
  float* y;            // (rows, out)
  const std::byte* w;  // (out, in) of `dtype`
  const float* bias;   // (out,) or null
  DType dtype;         // f16 or bf16
  bool add;
  size_t out;
};

/// y = x * w^T + bias, or y += x * w^T + bias with `add`.
void multiply(const Product& product, const PackedRows& x, Stream& stream);

}  // namespace kvlm::cpu::amx
