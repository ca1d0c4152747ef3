// Lanes that are kept on a GPU and grow by a row at a time, against the same memory described anew.
#include <fmt/format.h>

#include <algorithm>
#include <vector>

#include "kernels/attend_packed.h"
#include "kernels/pack.h"
#include "tests/cuda/fixture.h"
#include "tests/kvcache/quantizers/make.h"

namespace kvlm {
namespace {

using test::quantizer;
using test::shape_of;
using testing::Cuda;
using testing::kGpu;
using testing::normal_tensor;

constexpr int kMostRows = 150;  // that lanes gain here, of several descriptions

/// How the lanes of a batch are stored.
struct Store {
  const char* spec;
  int head_dim;
  DType dtype;  // of full rows
  bool remapped = false;
  bool weights_wanted = false;
};

/// A lane on the GPU: packed rows, then full ones with room behind them.
class GrowingLane {
 public:
  GrowingLane(const Quantizer& quantizer, const Store& store, int q_per_kv, int packed, int full,
              uint32_t seed, Stream& stream)
      : store_(store),
        packed_(packed),
        full_(full),
        weights_(DType::kF32, {q_per_kv, packed + full + kMostRows}, kGpu) {
    for (const Part part : {Part::kKeys, Part::kValues}) {
      const auto side = static_cast<size_t>(part);
      const PartPlan& plan = quantizer.plan(part, 0);
      if (packed > 0) pack_rows(plan, side, seed, stream);
      const Tensor rows = normal_tensor(store.dtype, {full, store.head_dim}, seed + 7);
      rows_[side] = Tensor(store.dtype, {full + kMostRows, store.head_dim}, kGpu);
      copy(rows_[side].view().slice(0, full), rows, stream);
      ++seed;
    }
    stream.synchronize();  // what was copied from ends here
  }

  int slots() const { return packed_ + full_ + grown; }
  /// Valid until it is called again.
  PackedLane lane(const float* q, float* out) {
    PackedLane lane;
    lane.q = q;
    lane.out = out;
    lane.slots = slots();
    lane.weights = weights_.as<float>();
    lane.weights_wanted = store_.weights_wanted;
    for (size_t side = 0; side < 2; ++side) {
      runs_[side].clear();
      if (packed_ > 0) runs_[side].push_back(packed_runs_[side]);
      SlotRun rows;
      rows.slots = full_ + grown;
      rows.rows = rows_[side].view().data();
      rows.dtype = store_.dtype;
      runs_[side].push_back(rows);
    }
    lane.keys = runs_[0];
    lane.values = runs_[1];
    remap_ = {0, packed_, 0.2f, 1.5f, true};
    if (store_.remapped && packed_ > 0) lane.remaps = {&remap_, 1};
    return lane;
  }
  /// The row that was appended last.
  ConstTensorView last_row(size_t side) const {
    return rows_[side].view().slice(full_ + grown - 1, 1);
  }
  TensorView next_row(size_t side) { return rows_[side].view().slice(full_ + grown, 1); }
  const Tensor& weights() const { return weights_; }

  int grown = 0;

 private:
  /// Blocks lie evenly, as in a cache.
  void pack_rows(const PartPlan& plan, size_t side, uint32_t seed, Stream& stream) {
    const PackedFormat& format = plan.format;
    const int block = format.block_rows == 0 ? packed_ : format.block_rows;
    const int count = (packed_ + block - 1) / block;
    const auto padded = [](size_t bytes) { return (bytes + 15) / 16 * 16; };
    const size_t code_bytes = padded(static_cast<size_t>(block) * format.row_bytes());
    const size_t scale_bytes = padded(format.scales(block) * dtype_bytes(format.meta));
    const auto room = [&](size_t bytes) {
      return Tensor(DType::kU8, {static_cast<int64_t>(bytes) * count}, kGpu);
    };
    codes_[side] = room(code_bytes);
    scales_[side] = room(scale_bytes);
    zeros_[side] = room(scale_bytes);
    const Tensor x = normal_tensor(DType::kF32, {packed_, format.channels()}, seed);
    Tensor placed(DType::kF32, x.shape(), kGpu);
    copy(placed, x, stream);
    std::vector<PackJob> jobs;
    for (int i = 0; i < count; ++i) {
      const int rows = std::min(block, packed_ - i * block);
      const auto at = static_cast<size_t>(i);
      const PackedBlock packed{codes_[side].view().data() + at * code_bytes,
                               scales_[side].view().data() + at * scale_bytes,
                               zeros_[side].view().data() + at * scale_bytes,
                               rows,
                               rows,
                               nullptr};
      blocks_[side].push_back(packed);
      jobs.push_back({placed.as<float>() + int64_t{i} * block * format.channels(), rows,
                      const_cast<std::byte*>(packed.codes), const_cast<std::byte*>(packed.scales),
                      const_cast<std::byte*>(packed.zeros)});
    }
    pack(format, plan.rules, jobs, stream);
    stream.synchronize();
    SlotRun& run = packed_runs_[side];
    run.slots = packed_;
    run.format = &format;
    run.blocks = blocks_[side];
    if (count > 1) {
      run.code_stride = static_cast<std::ptrdiff_t>(code_bytes);
      run.scale_stride = static_cast<std::ptrdiff_t>(scale_bytes);
    }
  }

  Store store_;
  int packed_, full_;
  Tensor codes_[2], scales_[2], zeros_[2], rows_[2];
  std::vector<PackedBlock> blocks_[2];
  SlotRun packed_runs_[2];
  std::vector<SlotRun> runs_[2];
  ScoreRemap remap_;
  Tensor weights_;
};

class KeptLanes : public Cuda {
 protected:
  /// Lanes of up to `slots` slots, kept, as they gain kMostRows rows: after each, what they give is
  /// what the same memory gives described anew.
  void expect_equal(const Store& store, int q_per_kv, int slots) {
    SCOPED_TRACE(fmt::format("{} x {}, {} full rows, {} q_per_kv, {} slots", store.spec,
                             store.head_dim, dtype_name(store.dtype), q_per_kv, slots));
    const auto made = quantizer(store.spec, shape_of(1, 1, store.head_dim));
    std::vector<GrowingLane> held;
    held.reserve(4);
    const auto hold = [&](int packed, int full) {
      held.emplace_back(*made, store, q_per_kv, packed, full,
                        static_cast<uint32_t>(100 * held.size()), *gpu_);
    };
    hold(slots - 37, 37);
    hold(0, slots - 5);
    hold(slots / 3, 1);
    hold(0, 1);
    const auto count = static_cast<int64_t>(held.size());
    const Shape of_heads{count, q_per_kv, store.head_dim};
    // Queries and outputs move between steps.
    const Tensor queries[] = {on_gpu(normal_tensor(DType::kF32, of_heads, 1)),
                              on_gpu(normal_tensor(DType::kF32, of_heads, 2))};
    Tensor outs[] = {Tensor(DType::kF32, of_heads, kGpu), Tensor(DType::kF32, of_heads, kGpu)};
    Tensor fresh(DType::kF32, of_heads, kGpu);
    const auto lanes_of = [&](const Tensor& q, Tensor& out) {
      std::vector<PackedLane> lanes;
      for (int64_t i = 0; i < count; ++i) {
        lanes.push_back(held[static_cast<size_t>(i)].lane(q.view().slice(i, 1).as<float>(),
                                                          out.view().slice(i, 1).as<float>()));
      }
      return lanes;
    };
    const auto base = [](const Tensor& x) { return x.view().as<float>(); };

    PackedBatch batch(kGpu);
    const auto describe = [&] {
      auto lanes = lanes_of(queries[0], outs[0]);
      batch.describe(lanes, q_per_kv, store.head_dim, base(queries[0]), base(outs[0]),
                     /*keep=*/true, *gpu_);
    };
    describe();
    int descriptions = 1;
    for (int step = 0; step <= kMostRows; ++step) {
      if (step > 0) {
        const Tensor k =
            normal_tensor(DType::kF32, {count, store.head_dim}, static_cast<uint32_t>(2 * step));
        const Tensor v = normal_tensor(DType::kF32, {count, store.head_dim},
                                       static_cast<uint32_t>(2 * step + 1));
        const bool room = batch.room() > 0;
        if (room) {
          const Tensor gpu_k = on_gpu(k);
          const Tensor gpu_v = on_gpu(v);
          batch.append(gpu_k.as<float>(), gpu_v.as<float>(), *gpu_);
          gpu_->synchronize();
        }
        for (int64_t i = 0; i < count; ++i) {
          GrowingLane& lane = held[static_cast<size_t>(i)];
          for (size_t side = 0; side < 2; ++side) {
            const Tensor& x = side == 0 ? k : v;
            Tensor row(store.dtype, {1, store.head_dim});
            convert(row, x.view().slice(i, 1), cpu_);
            if (!room) copy(lane.next_row(side), row, *gpu_);
            ++lane.grown;
            ASSERT_TRUE(testing::same_bits(on_host(lane.last_row(side)).view(), row.view()))
                << "row " << step << " of lane " << i;
            --lane.grown;
          }
          ++lane.grown;
        }
        if (!room) {
          describe();
          ++descriptions;
        }
      }
      const auto turn = static_cast<size_t>(step % 2);
      batch.attend(base(queries[turn]), outs[turn].as<float>(), 0.1f, *gpu_);
      std::vector<Tensor> weights;
      for (size_t i = 0; store.weights_wanted && i < held.size(); ++i) {
        weights.push_back(on_host(held[i].weights()));
      }
      auto lanes = lanes_of(queries[turn], fresh);
      attend_packed(lanes, q_per_kv, store.head_dim, 0.1f, *gpu_);
      ASSERT_TRUE(testing::same_bits(on_host(outs[turn]).view(), on_host(fresh).view()))
          << "after " << step << " rows";
      for (size_t i = 0; store.weights_wanted && i < held.size(); ++i) {
        const auto size = static_cast<size_t>(q_per_kv * held[i].slots());
        const Tensor anew = on_host(held[i].weights());
        ASSERT_TRUE(std::equal(anew.as<float>(), anew.as<float>() + size, weights[i].as<float>()))
            << "weights after " << step << " rows";
      }
    }
    EXPECT_GE(descriptions, 2);  // there is never room for all
    // What a batch of other lanes would have been: each by itself.
    for (size_t i = 0; i < held.size(); ++i) {
      const auto at = static_cast<int64_t>(i);
      Tensor alone(DType::kF32, {1, q_per_kv, store.head_dim}, kGpu);
      auto lane =
          held[i].lane(queries[kMostRows % 2].view().slice(at, 1).as<float>(), alone.as<float>());
      attend_packed({&lane, 1}, q_per_kv, store.head_dim, 0.1f, *gpu_);
      EXPECT_TRUE(
          testing::same_bits(on_host(alone).view(), on_host(fresh.view().slice(at, 1)).view()))
          << "lane " << i;
    }
  }
};

constexpr Store kStores[] = {{"calibquant", 128, DType::kF16, true},
                             {"kivi", 128, DType::kF16},
                             {"kivi", 128, DType::kBF16},
                             {"int4", 64, DType::kF32, false, true}};

TEST_F(KeptLanes, GiveWhatTheSameLanesGiveDescribedAnew) {
  // Limits of pieces are passed: 256 and 2048 slots (pieces of 256, 1024), 1024 and 4096 (where
  // pieces get longer), 6144 (pieces of 2048).
  for (const Store& store : kStores) {
    for (const int q_per_kv : {1, 4, 7}) {
      for (const int slots : {200, 900, 1020, 1950, 4090, 6100}) {
        expect_equal(store, q_per_kv, slots);
        if (::testing::Test::HasFatalFailure()) return;
      }
    }
  }
}

}  // namespace
}  // namespace kvlm
