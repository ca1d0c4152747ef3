#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/base/thread_pool.h"
#include "kernels/quantized/matrix.h"

// How a quantized matrix lies in memory. Codes come first, then scales, then zero points. What a
// device reads together lies together:
//
// - CPU: strips of 16 outputs, one after the other. A line of 64 bytes of a strip holds 4 inputs of
//   each output, byte 4 r + t input t of output r: the operand of vpdpbusd. Of 4-bit codes, line p
//   of each 32 inputs (4 lines) holds inputs 4 p + t in the low and 16 + 4 p + t in the high half
//   of a byte. Scales and zero points are (strips, groups, 16).
// - GPU: tiles of 32 outputs and 32 inputs, one after the other along the inputs. Lane 4 n + c of a
//   warp holds, of outputs n, 8 + n, 16 + n and 24 + n, inputs 8 c to 8 c + 7: its fragments of
//   four products of m16n8k16. Scales and zero points are (tiles of outputs, groups, 32), of which
//   4 n to 4 n + 3 are those of these four outputs.
namespace kvlm {

/// Outputs of a strip on the CPU, and outputs and inputs of a tile on a GPU.
inline constexpr int64_t kStripOutputs = 16;
inline constexpr int64_t kTileOutputs = 32;
/// Inputs are padded to a multiple of this on both.
inline constexpr int64_t kInputBlock = 32;

/// Where the parts of a matrix lie, in bytes from its start.
struct QuantizedLayout {
  int64_t out = 0;  ///< outputs with padding
  int64_t in = 0;   ///< inputs with padding
  size_t scales = 0;
  size_t zeros = 0;
  size_t bytes = 0;  ///< all
};
QuantizedLayout layout_of(const QuantizedFormat& format, DeviceKind device) noexcept;

/// Some rows of a quantized matrix, a byte a code: what every format of a file, and rounding, is
/// turned into before it is laid out for a device.
struct QuantizedRows {
  std::vector<uint8_t> codes;  ///< (rows, in)
  std::vector<float> scales;   ///< (rows, groups), each a number of the format's dtype
  std::vector<uint8_t> zeros;  ///< (rows, groups), or empty

  void resize(const QuantizedFormat& format, int64_t rows);
  /// The weights of one of the rows, (in,).
  void widen(const QuantizedFormat& format, int64_t row, float* to) const;
};

/// A quantized matrix in a file, or one that is made while it is read.
class QuantizedSource {
 public:
  explicit QuantizedSource(const QuantizedFormat& format) : format_(format) {}
  virtual ~QuantizedSource() = default;
  const QuantizedFormat& format() const noexcept { return format_; }
  /// Fills `to`, which has room for them, with rows [first, first + count). From any thread.
  virtual void read(int64_t first, int64_t count, QuantizedRows& to) const = 0;

 protected:
  QuantizedFormat format_;
};

/// Lays a matrix out for a device at `to`, host memory of layout_of().bytes bytes.
void lay_out(const QuantizedSource& source, DeviceKind device, std::byte* to, ThreadPool& pool);

/// Rows [first, first + count) of a matrix in host memory in the CPU's layout: lay_out() backwards.
void read_rows(const QuantizedMatrix& matrix, int64_t first, int64_t count, QuantizedRows& to);

}  // namespace kvlm
