#pragma once

#include <cmath>
#include <cstdint>
#include <memory>
#include <random>

#include "kernels/base/device.h"
#include "kernels/quantized/layout.h"
#include "kernels/weight.h"

namespace kvlm::testing {

/// A quantized matrix of random codes, as rows and laid out for the CPU. `rows` may be changed
/// before on_cpu() is called.
struct MatrixMaker : QuantizedSource {
  MatrixMaker(const QuantizedFormat& of, uint32_t seed) : QuantizedSource(of), format(of) {
    std::mt19937 generator(seed);
    rows.resize(of, of.out);
    const auto codes = static_cast<uint32_t>(1 << code_bits(of.code));
    for (uint8_t& code : rows.codes) {
      code = static_cast<uint8_t>(generator() % codes);
      if (of.code == WeightCode::kE4M3 && (code & 0x7f) == 0x7f) code = 0;  // not a number
    }
    for (uint8_t& zero : rows.zeros) zero = static_cast<uint8_t>(generator() % codes);
    std::normal_distribution<float> normal(0, 0.01f);
    for (float& scale : rows.scales) {
      scale = normal(generator);
      if (of.scale == DType::kF16) scale = to_float(to_f16(scale));
      if (of.scale == DType::kBF16) scale = to_float(to_bf16(scale));
    }
  }

  void read(int64_t first, int64_t count, QuantizedRows& to) const override {
    const int64_t groups = format.groups();
    std::copy_n(rows.codes.begin() + first * format.in, count * format.in, to.codes.begin());
    std::copy_n(rows.scales.begin() + first * groups, count * groups, to.scales.begin());
    if (!rows.zeros.empty()) {
      std::copy_n(rows.zeros.begin() + first * groups, count * groups, to.zeros.begin());
    }
  }

  /// In host memory, in the layout of a device.
  Tensor laid_out_for(DeviceKind device) const {
    ThreadPool pool(1);
    Tensor tensor(DType::kU8, {static_cast<int64_t>(layout_of(format, device).bytes)});
    lay_out(*this, device, tensor.view().data(), pool);
    return tensor;
  }
  /// Valid until the next call.
  Weight on_cpu(bool exact = false) const {
    laid_out = laid_out_for(DeviceKind::kCpu);
    return Weight(QuantizedMatrix{format, laid_out.view().data(), Device{}, exact});
  }

  QuantizedFormat format;
  QuantizedRows rows;
  mutable Tensor laid_out;
};

}  // namespace kvlm::testing
