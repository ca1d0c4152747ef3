#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "kernels/base/device.h"

namespace kvlm {

/// What is done to a row.
enum class BasisChange : uint8_t {
  kKey,    ///< a key as it is packed
  kQuery,  ///< a query that is multiplied with such keys, so that dot products stay
  kBack,   ///< a packed key as the model made it
};

/// Keys are packed in another basis: their channels in another order, the last of them as a linear
/// transform of n = dim - first channels. Data that a quantizer makes once.
struct KeyBasis {
  int dim = 0;
  int first = 0;  ///< channels before it are reordered only
  /// By BasisChange: (n, n) row-major, out = matrix . in; empty: channels are reordered only.
  std::array<std::vector<float>, 3> matrix;
  /// The matrices are those of a real Fourier transform in Hermitian packing
  /// [Re_0 ... Re_floor(n/2), Im_1 ... Im_ceil(n/2)-1], and keys are changed by cuFFT on a GPU.
  bool cufft = false;
};

/// Rows of one order of channels.
struct BasisJob {
  const float* from = nullptr;  ///< (rows, dim)
  float* to = nullptr;          ///< (rows, dim), may not overlap `from`
  int rows = 0;
  /// (dim,) the model's channel of each channel of the basis, on the host.
  const uint16_t* channels = nullptr;
};

/// Throws Error{kInvalidArgument} for a dim above 1024 or a matrix that is not square.
void check_basis(const KeyBasis& basis, BasisChange change);

/// Changes the basis of rows, each dot product in eight sums side by side: the same bits on every
/// device, but for keys of a basis whose transform is cuFFT's. Asynchronous on CUDA. Throws as
/// check_basis() does.
void change_basis(const KeyBasis& basis, BasisChange change, std::span<const BasisJob> jobs,
                  Stream& stream);

/// Loads what change_basis() needs on a device, for the calling thread. Throws Error{kUnsupported}
/// where cuFFT is missing, and Error{kOutOfMemory} or Error{kDevice} where it fails.
void prepare_basis(const KeyBasis& basis, Device device);

/// change_basis() of the same jobs at every step, described once: what a step then gives to a GPU
/// is always the same, so that it can be recorded (kernels/base/recording.h). On a GPU alone: a CPU
/// has nothing to keep.
class BasisBatch {
 public:
  explicit BasisBatch(Device device);
  ~BasisBatch();
  BasisBatch(BasisBatch&&) noexcept;

  /// Takes jobs whose rows are counted from `from`. Throws like change_basis().
  void describe(const KeyBasis& basis, BasisChange change, std::span<const BasisJob> jobs,
                const float* from, Stream& stream);
  void run(const float* from, Stream& stream);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

/// The smallest and largest number of each channel over the rows of an array.
///
///   x          arrays of (rows, dim) f32
///   low, high  (arrays, dim) on the host
///
/// Waits for the result on CUDA. Throws Error{kInvalidArgument} if sizes do not agree.
void channel_ends(std::span<const float* const> x, int rows, int dim, std::span<float> low,
                  std::span<float> high, Stream& stream);

}  // namespace kvlm
