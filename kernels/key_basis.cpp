#include "kernels/key_basis.h"

#include <algorithm>

#include "kernels/check.h"
#include "kernels/cpu/key_basis.h"
#include "kernels/cuda/pack/key_basis.h"

namespace kvlm {

namespace {

constexpr int kMaxDim = 1024;

}  // namespace

void check_basis(const KeyBasis& basis, BasisChange change) {
  const auto n = static_cast<size_t>(std::max(basis.dim - basis.first, 0));
  const size_t elements = basis.matrix[static_cast<size_t>(change)].size();
  if (basis.dim < 1 || basis.dim > kMaxDim || basis.first < 0 ||
      (elements != 0 && elements != n * n)) {
    check::refuse(
        "change_basis: {} channels, those from {} on with a matrix of {} numbers; expected 1 to {} "
        "channels and a square matrix",
        basis.dim, basis.first, elements, kMaxDim);
  }
}

void change_basis(const KeyBasis& basis, BasisChange change, std::span<const BasisJob> jobs,
                  Stream& stream) {
  if (jobs.empty()) return;
  check_basis(basis, change);
  if (stream.device().kind == DeviceKind::kCuda) {
    return cuda::change_basis(basis, change, jobs, stream);
  }
  cpu::change_basis(basis, change, jobs, stream);
}

void prepare_basis(const KeyBasis& basis, Device device) {
  if (device.kind == DeviceKind::kCuda) cuda::prepare_basis(basis, device.index);
}

void channel_ends(std::span<const float* const> x, int rows, int dim, std::span<float> low,
                  std::span<float> high, Stream& stream) {
  const size_t expected = x.size() * static_cast<size_t>(std::max(dim, 0));
  if (rows < 1 || dim < 1 || low.size() != expected || high.size() != expected) {
    check::refuse(
        "channel_ends: {} arrays of {} rows of {} channels, into outputs of {} and {} numbers; "
        "expected rows, and outputs of {} numbers each",
        x.size(), rows, dim, low.size(), high.size(), expected);
  }
  if (stream.device().kind == DeviceKind::kCuda) {
    return cuda::channel_ends(x, rows, dim, low, high, stream);
  }
  cpu::channel_ends(x, rows, dim, low, high, stream);
}

}  // namespace kvlm
