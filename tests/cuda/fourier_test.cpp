// VidKV's spectra by cuFFT beside those by its table, which every device makes alike.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <string>
#include <vector>

#include "kernels/key_basis.h"
#include "kvcache/plan/sequence_bounds.h"
#include "kvcache/policy_cache.h"
#include "tests/cuda/fixture.h"
#include "tests/kvcache/lives.h"
#include "tests/kvcache/quantizers/make.h"

namespace kvlm {
namespace {

using testing::kGpu;

constexpr double kBound = 2e-6;  // of a transformed row, against its largest number

class Cufft : public testing::Cuda {};

/// Keys of three heads into their spectra and back: whole batches, parts of one, any length.
TEST_F(Cufft, EqualsTheTable) {
  constexpr int kDim = 128;
  const int rows[] = {1, 600, 423};
  for (const int first : {0, 5, 64, 123, 126, 127}) {
    const std::string bits = fmt::format("{}", 1 + std::ceil(first * 10000.0 / kDim) / 10000);
    const auto made = test::quantizer(fmt::format("vidkv,key_bits={},fft=cufft", bits),
                                      test::shape_of(1, 1, kDim));
    const KeyBasis& basis = *made->key_basis();
    ASSERT_EQ(basis.first, first);
    prepare_basis(basis, kGpu);
    const Tensor x = testing::normal_tensor(DType::kF32, {1024, kDim}, 3);
    const Tensor gpu_x = on_gpu(x);
    std::vector<std::vector<uint16_t>> channels(3, std::vector<uint16_t>(kDim));
    for (size_t i = 0; i < channels.size(); ++i) {
      std::iota(channels[i].begin(), channels[i].end(), uint16_t{0});
      std::rotate(channels[i].begin(), channels[i].begin() + static_cast<std::ptrdiff_t>(7 * i),
                  channels[i].end());
    }
    for (const BasisChange change : {BasisChange::kKey, BasisChange::kBack}) {
      const auto run = [&](const Tensor& from, Tensor& to, Stream& stream) {
        std::vector<BasisJob> jobs;
        int64_t at = 0;
        for (size_t i = 0; i < channels.size(); ++i) {
          jobs.push_back({from.as<float>() + at * kDim, to.view().as<float>() + at * kDim, rows[i],
                          channels[i].data()});
          at += rows[i];
        }
        change_basis(basis, change, jobs, stream);
      };
      Tensor y(DType::kF32, x.shape());
      Tensor gpu_y(DType::kF32, x.shape(), kGpu);
      run(x, y, cpu_);
      run(gpu_x, gpu_y, *gpu_);
      const Tensor back = on_host(gpu_y);
      for (int row = 0; row < 1024; ++row) {
        const float* want = y.as<float>() + row * kDim;
        const float* have = back.as<float>() + row * kDim;
        double top = 0;
        double apart = 0;
        for (int d = 0; d < kDim; ++d) {
          top = std::max<double>(top, std::abs(want[d]));
          apart = std::max<double>(apart, std::abs(have[d] - want[d]));
        }
        ASSERT_LE(apart, kBound * top)
            << "first " << first << ", change " << static_cast<int>(change) << ", row " << row;
      }
    }
  }
}

/// What is stored and read of a prompt, and of rows that windows pack: scales may round to the
/// other side and signs of numbers near 0 turn, of one number in a thousand. (Under
/// profile=official until rows are packed again: zeros that come back then have any sign.)
TEST_F(Cufft, CacheIsThatOfTheTableButForRounding) {
  using namespace testlife;
  for (const auto& [spec, steps] :
       {std::pair{"vidkv,group=8,residual=16,fft=cufft", 60},
        std::pair{"vidkv,group=8,residual=16,fft=cufft,key_bits=1.3,mask_scope=head", 60},
        std::pair{"vidkv,group=8,residual=16,profile=official", 4}}) {
    const CacheShape shape = shape_of(2, 2, 2, 128);
    const std::vector<int16_t> prompt = PromptShape{5, {40}, 9}.modality();
    const SequenceSize size = size_of(prompt, steps);
    const size_t bytes = SequenceBounds(*test::plan_of(spec, shape)).reservation(size).bytes();
    PolicyCache on_cpu(test::plan_of(spec, shape), bytes, Device{});
    PolicyCache on_gpu(test::plan_of(spec, shape), bytes, kGpu);
    Feeder cpu(shape, 2);
    Feeder gpu(shape, 2, kGpu);
    const SequenceId id = on_cpu.open(size, "s");
    ASSERT_EQ(on_gpu.open(size, "s"), id);
    std::vector<Feeder::Input> inputs{{'s', id, 0, prompt, true}};
    const auto compare = [&](const std::vector<float>& have, const std::vector<float>& want,
                             const std::string& what) {
      ASSERT_EQ(have.size(), want.size());
      float top = 0;
      for (const float x : want) top = std::max(top, std::abs(x));
      size_t off = 0;
      for (size_t i = 0; i < want.size(); ++i) off += std::abs(have[i] - want[i]) > 1e-3f * top;
      EXPECT_LE(off, want.size() / 1000) << spec << ", " << what;
    };
    for (int step = 0; step <= steps; ++step) {
      const auto want = cpu.pass(on_cpu, inputs);
      const auto have = gpu.pass(on_gpu, inputs);
      ASSERT_EQ(on_gpu.bytes(), on_cpu.bytes());
      for (int layer = 0; layer < shape.layers; ++layer) {
        compare(have[static_cast<size_t>(layer)], want[static_cast<size_t>(layer)],
                fmt::format("outputs of step {}, layer {}", step, layer));
        const auto cpu_rows = on_cpu.inspect(id, layer, cpu.stream());
        const auto gpu_rows = on_gpu.inspect(id, layer, gpu.stream());
        for (size_t h = 0; h < cpu_rows.size(); ++h) {
          const std::string where = fmt::format(" of step {}, layer {}", step, layer);
          compare(gpu_rows[h].keys, cpu_rows[h].keys, "keys" + where);
          EXPECT_EQ(gpu_rows[h].values, cpu_rows[h].values) << spec << ", values" << where;
        }
      }
      inputs[0].first += static_cast<int>(inputs[0].modality.size());
      inputs[0].modality = {kTextRow};
      inputs[0].prompt = false;
    }
  }
}

}  // namespace
}  // namespace kvlm
