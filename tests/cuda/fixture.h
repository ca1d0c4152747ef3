#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <memory>
#include <vector>

#include "kernels/base/queue.h"
#include "kernels/elementwise.h"
#include "tests/kernels/values.h"

namespace kvlm::testing {

inline constexpr Device kGpu{DeviceKind::kCuda, 0};

/// A stream on the GPU beside one on the CPU; skips where there is no GPU.
class Cuda : public ::testing::Test {
 protected:
  void SetUp() override {
    if (cuda::device_count() == 0) GTEST_SKIP() << "no GPU: " << cuda::why_none();
    gpu_ = std::make_unique<Stream>(pool_, kGpu);
  }

  Tensor on_gpu(ConstTensorView host) {
    Tensor placed(host.dtype(), host.shape(), kGpu);
    copy(placed, host, *gpu_);
    return placed;
  }
  Tensor on_host(ConstTensorView view) {
    Tensor host(view.dtype(), view.shape());
    copy(host, view, *gpu_);
    return host;
  }
  /// || gpu - cpu || / || cpu ||, NaN if either has one.
  double error(ConstTensorView gpu, ConstTensorView cpu) {
    const Tensor host = on_host(gpu);
    const auto a = values_of(host);
    const auto b = values_of(cpu);
    double difference = 0;
    double norm = 0;
    for (size_t i = 0; i < b.size(); ++i) {
      difference += (a[i] - b[i]) * (a[i] - b[i]);
      norm += b[i] * b[i];
    }
    return norm == 0 ? std::sqrt(difference) : std::sqrt(difference / norm);
  }

  ThreadPool pool_{2};
  Stream cpu_{pool_};
  std::unique_ptr<Stream> gpu_;
};

}  // namespace kvlm::testing
