// DecodeTable by itself: what a policy's cache does not lay in its rings.
#include "kernels/decode_table.h"

#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "kernels/base/recording.h"
#include "kernels/elementwise.h"
#include "kernels/gemm.h"
#include "kernels/norm.h"
#include "kernels/row_batch.h"
#include "tests/cuda/fixture.h"

namespace kvlm {
namespace {

using testing::kGpu;
using testing::normal_tensor;

constexpr int kHeads = 2;
constexpr float kScale = 0.1f;

/// Rings of keys and values (2, kHeads, ring rows, head_dim) and where a step's rows lie in them.
struct Rings {
  Tensor rows;
  int first = 0;
  int full = 0;  // before the step

  int queries = 3;

  int ring() const { return static_cast<int>(rows.shape()[2]); }
  const std::byte* of(int side, int head) const {
    const Shape& shape = rows.shape();
    const int64_t bytes = shape[2] * shape[3] * static_cast<int64_t>(dtype_bytes(rows.dtype()));
    return rows.view().data() + (side * kHeads + head) * bytes;
  }
};

class DecodeTables : public testing::Cuda {
 protected:
  /// The outputs (kHeads, queries, head_dim) of a step, by the table.
  Tensor step(const Rings& on_host_rings, const Tensor& q, const Tensor& kv) {
    const Rings rings{on_gpu(on_host_rings.rows), on_host_rings.first, on_host_rings.full,
                      on_host_rings.queries};
    const auto dim = static_cast<int>(rings.rows.shape()[3]);
    const std::vector<std::array<RowWindow, 2>> windows(1);
    TableShape shape;
    shape.layers = 1;
    shape.kv_heads = kHeads;
    shape.q_per_kv = rings.queries;
    shape.head_dim = dim;
    shape.rows = rings.rows.dtype();
    DecodeTable table(shape, windows, kGpu);
    TableLoad load;
    load.slots = 1;
    load.longest = rings.ring();
    table.reserve(load);
    std::vector<TableHead> heads(kHeads);
    for (int h = 0; h < kHeads; ++h) {
      for (const int side : {0, 1}) {
        GrowingRows& gained = side == 0 ? heads[h].keys_gained : heads[h].values_gained;
        gained.ring = const_cast<std::byte*>(rings.of(side, h));
        gained.ring_rows = rings.ring();
        gained.first = rings.first;
        gained.full = rings.full;
      }
    }
    table.set(0, 0, heads, *gpu_);
    const TableRow row{0, 0};
    table.start({&row, 1}, *gpu_);
    const Tensor gpu_kv = on_gpu(kv);
    const Tensor gpu_q = on_gpu(q);
    Tensor out(DType::kF32, q.shape(), kGpu);
    table.store(0, gpu_kv.view().as<float>(), gpu_kv.view().slice(1, 1).as<float>(), *gpu_);
    table.attend(0, gpu_q.view().as<float>(), out.as<float>(), kScale, *gpu_);
    return on_host(out);
  }

  /// The same on the CPU, over the rows in their order.
  Tensor expected(const Rings& rings, const Tensor& q, const Tensor& kv) {
    const int64_t dim = rings.rows.shape()[3];
    const int ring_rows = rings.ring();
    const int count = rings.full + 1;
    Tensor rows(DType::kF32, {2 * kHeads, count, dim});
    Tensor wide(DType::kF32, {2 * kHeads * ring_rows, dim});
    convert(wide, rings.rows.view().reshape({2 * kHeads * ring_rows, dim}), cpu_);
    Tensor newest(rings.rows.dtype(), {2 * kHeads, dim});
    convert(newest, kv.view().reshape({2 * kHeads, dim}), cpu_);
    Tensor rounded(DType::kF32, newest.shape());
    convert(rounded, newest, cpu_);
    for (int ring = 0; ring < 2 * kHeads; ++ring) {
      for (int i = 0; i < count; ++i) {
        const float* from =
            i < rings.full
                ? wide.as<float>() + (ring * ring_rows + (rings.first + i) % ring_rows) * dim
                : rounded.as<float>() + ring * dim;
        std::copy_n(from, dim, rows.as<float>() + (ring * count + i) * dim);
      }
    }
    Tensor out(DType::kF32, q.shape());
    RowBatch batch;
    batch.start(rings.queries, static_cast<int>(dim));
    for (int64_t h = 0; h < kHeads; ++h) {
      const KeyValueRows run{rows.view().slice(h, 1).data(),
                             rows.view().slice(kHeads + h, 1).data(), DType::kF32, count};
      batch.add(q.view().slice(h, 1).as<float>(), {&run, 1}, out.view().slice(h, 1).as<float>());
    }
    batch.attend(kScale, cpu_);
    return out;
  }

  /// The outputs of rings of which `full` rows from `first` on are full.
  void check(DType dtype, int dim, int ring_rows,
             const std::vector<std::pair<int, int>>& first_and_full, int queries = 3) {
    Rings rings;
    rings.queries = queries;
    rings.rows = normal_tensor(dtype, {2, kHeads, ring_rows, dim}, 1);
    const Tensor q = normal_tensor(DType::kF32, {kHeads, queries, dim}, 2);
    const Tensor kv = normal_tensor(DType::kF32, {2, kHeads, dim}, 3);
    for (const auto& [first, full] : first_and_full) {
      rings.first = first;
      rings.full = full;
      EXPECT_LE(error(step(rings, q, kv), expected(rings, q, kv)), 2e-5)
          << dtype_name(dtype) << " x " << dim << ", " << full << " of " << ring_rows
          << " rows from " << first;
    }
  }
};

/// Rings that wrap in any of their parts, and end with the row that a step brings.
TEST_F(DecodeTables, AttendRingsThatWrap) {
  for (const auto& [dtype, dim] :
       {std::pair{DType::kF16, 128}, {DType::kF16, 64}, {DType::kBF16, 128}, {DType::kF32, 128}}) {
    check(dtype, dim, 1000,
          {{0, 999},
           {0, 5},
           {300, 999},
           {999, 999},
           {999, 1},
           {700, 300},
           {700, 299},
           {650, 700},
           {100, 0},
           {744, 511}});
  }
}

/// Of so many rows that parts of them are longer, and of one less.
TEST_F(DecodeTables, AttendLongRings) {
  for (const auto& [dtype, dim] : {std::pair{DType::kF16, 128}, {DType::kF16, 64}}) {
    check(dtype, dim, 7000,
          {{0, 6142}, {0, 6143}, {0, 6144}, {0, 6399}, {6800, 6143}, {3000, 6999}, {6999, 6655}});
  }
  for (const int queries : {1, 7, 9}) check(DType::kF16, 128, 6400, {{17, 6399}}, queries);
  check(DType::kF16, 64, 6400, {{17, 6399}}, 9);
  check(DType::kF16, 256, 6400, {{17, 6399}});   // two channels a thread that joins
  check(DType::kF16, 16, 66000, {{17, 65999}});  // more parts than threads
  check(DType::kF32, 128, 6144, {{17, 6143}});
  check(DType::kBF16, 128, 6143, {{17, 6142}});
}

/// Kernels of a step that start before those in front of them have ended wait for what those write,
/// also when they are recorded.
TEST_F(DecodeTables, LayersWaitForEachOther) {
  constexpr int kLayers = 4;
  constexpr int kQueries = 4;
  constexpr int kRing = 1500;
  enum class Mode : uint8_t { kWaiting, kQueued, kRecorded };
  for (const int dim : {128, 64}) {
    const int64_t width = int64_t{kHeads} * kQueries * dim;
    const int64_t key_width = int64_t{kHeads} * dim;
    const Tensor product =
        on_gpu(normal_tensor(DType::kBF16, {width + 2 * key_width, width}, 1, 0.05f));
    const Tensor weight = on_gpu(normal_tensor(DType::kF32, {width}, 2));
    const std::vector<std::array<RowWindow, 2>> windows(kLayers);
    TableShape shape;
    shape.layers = kLayers;
    shape.kv_heads = kHeads;
    shape.q_per_kv = kQueries;
    shape.head_dim = dim;
    shape.rows = DType::kF16;
    TableLoad load;
    load.slots = 1;
    load.longest = kRing;
    const auto run = [&](Mode mode) {
      const Tensor rings =
          on_gpu(normal_tensor(DType::kF16, {kLayers * 2 * kHeads, kRing, dim}, 3));
      DecodeTable table(shape, windows, kGpu);
      table.reserve(load);
      for (int layer = 0; layer < kLayers; ++layer) {
        std::vector<TableHead> heads(kHeads);
        for (int ring = 0; ring < 2 * kHeads; ++ring) {
          TableHead& head = heads[static_cast<size_t>(ring % kHeads)];
          GrowingRows& gained = ring < kHeads ? head.keys_gained : head.values_gained;
          gained.ring = const_cast<std::byte*>(rings.view().slice(layer * 4 + ring, 1).data());
          gained.ring_rows = kRing;
          gained.first = 1200;
          gained.full = 500;
        }
        table.set(0, layer, heads, *gpu_);
      }
      Tensor x = on_gpu(normal_tensor(DType::kF32, {1, width}, 4));
      Tensor normed(DType::kF32, {1, width}, kGpu);
      Tensor qkv(DType::kF32, {1, width + 2 * key_width}, kGpu);
      Tensor out(DType::kF32, {1, width}, kGpu);
      const auto done = [&] {
        if (mode == Mode::kWaiting) gpu_->synchronize();
      };
      const auto layers = [&] {
        const float* q = qkv.as<float>();
        for (int layer = 0; layer < kLayers; ++layer) {
          rms_norm(normed, x, weight, 1e-5f, *gpu_);
          done();
          linear(qkv, normed, product, {}, /*add=*/false, *gpu_);
          done();
          table.store(layer, q + width, q + width + key_width, *gpu_);
          done();
          table.attend(layer, q, out.as<float>(), kScale, *gpu_);
          done();
          add(x, out, *gpu_);
          done();
        }
      };
      Recording recording;
      const TableRow row{0, 0};
      for (int step = 0; step < 100; ++step) {
        table.start({&row, 1}, *gpu_);
        done();
        if (mode != Mode::kRecorded) {
          layers();
          continue;
        }
        if (step == 0) recording.make(*gpu_, layers);
        recording.run(*gpu_);
      }
      return on_host(x);
    };
    const Tensor expected = run(Mode::kWaiting);
    EXPECT_FALSE(std::isnan(expected.as<float>()[0]));
    for (int i = 0; i < 3; ++i) {
      EXPECT_TRUE(testing::same_bits(run(Mode::kQueued).view(), expected.view())) << dim;
      EXPECT_TRUE(testing::same_bits(run(Mode::kRecorded).view(), expected.view())) << dim;
    }
  }
}

}  // namespace
}  // namespace kvlm
