// Packed formats on a GPU against the CPU: codes byte by byte, attention over KV heads of every
// format.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <random>
#include <tuple>
#include <vector>

#include "kernels/attend_packed.h"
#include "kernels/base/error.h"
#include "kernels/elementwise.h"
#include "kernels/pack.h"
#include "kernels/row_batch.h"
#include "kernels/slot_weights.h"
#include "tests/cuda/fixture.h"
#include "tests/cuda/table_heads.h"
#include "tests/kvcache/feeder.h"
#include "tests/kvcache/quantizers/make.h"

namespace kvlm {
namespace {

using test::quantizer;
using test::shape_of;
using testing::attend_heads;
using testing::Cuda;
using testing::kGpu;
using testing::normal_tensor;
using testing::normal_values;
using testlife::name_of_spec;

constexpr const char* kSpecs[] = {"int8",
                                  "int4",
                                  "nf4",
                                  "turboquant",
                                  "turboquant,key_bits=3,value_bits=3",
                                  "turboquant,key_bits=3,values=table",
                                  "kivi,residual=32,rotate=keys",
                                  "nf4,group=32",
                                  "nf4,group=128,meta=f32",
                                  "kivi,bits=1",
                                  "kivi",
                                  "kivi,bits=3",
                                  "kivi,bits=5",
                                  "kivi,bits=6,group=64,residual=128",
                                  "kivi,bits=8",
                                  "head_quantile",
                                  "head_quantile,bits=4,meta=f32",
                                  "head_quantile,round=floor",
                                  "calibquant",
                                  "calibquant,bits=2",
                                  "calibquant,bits=4,shrink=none",
                                  "xquant",
                                  "vidkv",
                                  "vidkv,key_bits=1",
                                  "vidkv,key_bits=1.25,trits=trit2b",
                                  "vidkv,onebit=zero_mean,scale=unit",
                                  "vidkv,onebit=minmax,scale=twn",
                                  "vidkv,onebit=zero_mean,trits=trit2b",
                                  "vidkv,value_axis=token",
                                  "vidkv,value_bits=1",
                                  "vidkv,value_bits=2",
                                  "vidkv,key_bits=2,value_bits=2"};

/// A packed block with the memory it lies in, on one device.
struct Packed {
  Tensor codes, scales, zeros;
  PackedBlock block(int rows, const uint64_t* live, int live_rows) {
    return {codes.view().data(), scales.view().data(), zeros.view().data(), rows, live_rows, live};
  }
};

class PackedCuda : public Cuda {
 protected:
  static Tensor bytes(size_t count, Device device) {
    return {DType::kU8, {static_cast<int64_t>(count) / 16 * 16 + 16}, device};
  }
  static Packed room(const PackedFormat& format, int rows, Device device) {
    return {bytes(static_cast<size_t>(rows) * format.row_bytes(), device),
            bytes(format.scales(rows) * dtype_bytes(format.meta), device),
            format.zeros(rows) == 0 ? Tensor()
                                    : bytes(format.zeros(rows) * dtype_bytes(format.meta), device)};
  }
  static PackJob job(Packed& packed, const Tensor& x, int rows) {
    return {x.view().data(), rows, packed.codes.view().data(), packed.scales.view().data(),
            packed.zeros.view().data()};
  }
  /// Bytes that differ.
  int differences(const Tensor& gpu, const Tensor& cpu, size_t count) {
    if (count == 0) return 0;  // zero points that nobody stores
    const Tensor host = on_host(gpu);
    int different = 0;
    for (size_t i = 0; i < count; ++i) {
      different += host.as<uint8_t>()[i] != cpu.as<uint8_t>()[i] ? 1 : 0;
    }
    return different;
  }
};

TEST_F(PackedCuda, CodesAndMetadataEqualTheCpus) {
  for (const char* spec : kSpecs) {
    for (const int dim : {20, 64, 80, 128}) {
      const auto made = quantizer(spec, shape_of(4, 1, dim));
      for (const KvSide side : {KvSide::kKeys, KvSide::kValues}) {
        const Packing& packing = made->packing(side, 0);
        for (const auto& [rows, dtype] :
             {std::pair(1, DType::kF32), std::pair(7, DType::kF16), std::pair(32, DType::kBF16),
              std::pair(333, DType::kF32), std::pair(333, DType::kF16)}) {
          const Tensor x = normal_tensor(dtype, {rows, packing.format.channels()}, 31, 2.0f);
          const Tensor gpu_x = on_gpu(x);
          Packed cpu = room(packing.format, rows, {});
          Packed gpu = room(packing.format, rows, kGpu);
          const PackJob cpu_job = job(cpu, x, rows);
          const PackJob gpu_job = job(gpu, gpu_x, rows);
          pack(packing.format, packing.rules, {&cpu_job, 1}, cpu_, dtype);
          pack(packing.format, packing.rules, {&gpu_job, 1}, *gpu_, dtype);
          const size_t code_bytes = static_cast<size_t>(rows) * packing.format.row_bytes();
          const std::string name = fmt::format(
              "{} {} dim {}, {} rows", spec, side == KvSide::kKeys ? "keys" : "values", dim, rows);
          EXPECT_EQ(differences(gpu.codes, cpu.codes, code_bytes), 0) << name;
          EXPECT_EQ(differences(gpu.scales, cpu.scales,
                                packing.format.scales(rows) * dtype_bytes(packing.format.meta)),
                    0)
              << name;
          EXPECT_EQ(differences(gpu.zeros, cpu.zeros,
                                packing.format.zeros(rows) * dtype_bytes(packing.format.meta)),
                    0)
              << name;
          // And back.
          Tensor out(DType::kF32, x.shape());
          Tensor gpu_out(DType::kF32, x.shape(), kGpu);
          const PackedBlock cpu_block = cpu.block(rows, nullptr, rows);
          const PackedBlock gpu_block = gpu.block(rows, nullptr, rows);
          unpack_blocks(packing.format, {&cpu_block, 1}, out.as<float>(), cpu_);
          unpack_blocks(packing.format, {&gpu_block, 1}, gpu_out.as<float>(), *gpu_);
          EXPECT_LE(error(gpu_out, out), 1e-6) << name;
        }
      }
    }
  }
}

TEST_F(PackedCuda, NumbersThatAreNone) {
  const auto made = quantizer("kivi", shape_of(1, 1, 32));
  const Packing& packing = made->packing(KvSide::kKeys, 0);
  std::vector<float> values = normal_values(32 * 32, 5);
  for (size_t i = 0; i < 32; ++i) values[i * 32] = std::nanf("");  // a channel of nothing else
  values[7] = std::nanf("");
  for (size_t i = 0; i < 32; ++i) values[i * 32 + 3] = 2.5f;  // an empty range
  const Tensor x = testing::make_tensor(DType::kF32, {32, 32}, values);
  const Tensor gpu_x = on_gpu(x);
  Packed cpu = room(packing.format, 32, {});
  Packed gpu = room(packing.format, 32, kGpu);
  const PackJob cpu_job = job(cpu, x, 32);
  const PackJob gpu_job = job(gpu, gpu_x, 32);
  pack(packing.format, packing.rules, {&cpu_job, 1}, cpu_);
  pack(packing.format, packing.rules, {&gpu_job, 1}, *gpu_);
  EXPECT_EQ(differences(gpu.codes, cpu.codes, 32 * packing.format.row_bytes()), 0);
  EXPECT_EQ(differences(gpu.scales, cpu.scales, 64), 0);
}

/// Groups over several blocks beside such as fit into one, ties and NaN among their numbers.
TEST_F(PackedCuda, LongAndShortJobsTogether) {
  for (const char* spec :
       {"kivi", "calibquant,bits=4", "head_quantile", "head_quantile,alpha=0,bits=2",
        "head_quantile,bits=5,group_axes=channel", "head_quantile,bits=3,group_axes=token", "vidkv",
        "vidkv,scale=twn,trits=trit2b"}) {
    const auto made = quantizer(spec, shape_of(4, 1, 80));
    for (const KvSide side : {KvSide::kKeys, KvSide::kValues}) {
      const Packing& packing = made->packing(side, 0);
      std::vector<Tensor> keep;
      std::vector<Packed> cpu, gpu;
      std::vector<PackJob> cpu_jobs, gpu_jobs;
      const std::vector<int> lengths = {3001, 5, 130};
      for (const int rows : lengths) {
        Tensor x = normal_tensor(DType::kF32, {rows, 80}, 17, 2.0f);
        for (int row = 0; row < rows; ++row) {
          float* at = x.as<float>() + row * 80;
          for (int i = 0; i < 40; ++i) at[i] = std::round(at[i] * 4) / 4;
          at[row % 7] = std::nanf("");
        }
        cpu.push_back(room(packing.format, rows, {}));
        gpu.push_back(room(packing.format, rows, kGpu));
        keep.push_back(on_gpu(x));
        gpu_jobs.push_back(job(gpu.back(), keep.back(), rows));
        keep.push_back(std::move(x));
        cpu_jobs.push_back(job(cpu.back(), keep.back(), rows));
      }
      pack(packing.format, packing.rules, cpu_jobs, cpu_);
      pack(packing.format, packing.rules, gpu_jobs, *gpu_);
      for (size_t i = 0; i < lengths.size(); ++i) {
        const int rows = lengths[i];
        const size_t meta = dtype_bytes(packing.format.meta);
        const std::string name =
            fmt::format("{} {}, {} rows", spec, side == KvSide::kKeys ? "keys" : "values", rows);
        EXPECT_EQ(differences(gpu[i].codes, cpu[i].codes,
                              static_cast<size_t>(rows) * packing.format.row_bytes()),
                  0)
            << name;
        EXPECT_EQ(differences(gpu[i].scales, cpu[i].scales, packing.format.scales(rows) * meta), 0)
            << name;
        EXPECT_EQ(differences(gpu[i].zeros, cpu[i].zeros, packing.format.zeros(rows) * meta), 0)
            << name;
      }
    }
  }
}

struct HeadShape {
  int head_dim, q_per_kv;
  bool dead_rows = true;
  bool weights_wanted = true;
  bool remapped = true;
  float rise = 0;     // of the first query's score from slot to slot of 200 packed rows
  float spread = 1;   // of packed values
  bool even = false;  // blocks lie at even strides; they are as long as the first
};

class PackedHeads : public PackedCuda {
 protected:
  struct Found {
    Tensor out;                  // (q_per_kv, head_dim)
    std::vector<float> weights;  // (slots,) means over queries
  };

  /// A KV head of blocks of `lengths` rows, some with dead rows, then full rows, with remaps over
  /// some slots; beside `company` others of the same rows, and one of a block of `longer` rows, if
  /// any.
  static Found attend(const char* spec, const HeadShape& s, const std::vector<int>& lengths,
                      int company, Device device, Stream& stream, int longer = 0) {
    const std::vector<uint64_t> live = {
        0xf0f0f0f0f0f0f0f0u, 0x123456789abcdef0u, ~uint64_t{0}, 0x7fu, 0xffffffff00000000u, 1};
    constexpr int kFull = 37;
    const auto made = quantizer(spec, shape_of(4, 1, s.head_dim));
    std::vector<Tensor> keep;  // what the KV heads point into
    std::vector<Packed> packed;
    packed.reserve(2 * lengths.size() + 2);
    std::vector<PackedBlock> blocks[2];
    std::vector<SlotSegment> segments[2];
    PackedBlock long_blocks[2];
    std::vector<SlotSegment> long_segments[2];
    const Tensor q = normal_tensor(DType::kF32, {s.q_per_kv, s.head_dim}, 77);
    constexpr float kScale = 0.1f;
    float square = 0;  // of the first query
    for (int i = 0; i < s.head_dim; ++i) square += q.as<float>()[i] * q.as<float>()[i];
    int slots = 0;
    for (const KvSide side : {KvSide::kKeys, KvSide::kValues}) {
      const Packing& packing = made->packing(side, 0);
      const auto which = static_cast<size_t>(side);
      int before = 0;  // rows
      const auto pack_rows = [&](PackJob to, uint32_t seed) {
        const auto rows = static_cast<int>(to.rows);
        Tensor x = normal_tensor(DType::kF32, {rows, packing.format.channels()}, seed);
        for (int i = 0; i < rows * s.head_dim; ++i) {
          const int row = before + i / s.head_dim;
          float& number = x.as<float>()[i];
          if (side == KvSide::kValues) number *= s.spread;
          if (side == KvSide::kKeys && s.rise != 0) {
            const float along = s.rise * static_cast<float>(row % 200) / (square * kScale);
            number += along * q.as<float>()[i % s.head_dim];
          }
        }
        before += rows;
        keep.push_back(Tensor(DType::kF32, x.shape(), device));
        copy(keep.back(), x, stream);
        to.x = keep.back().view().data();
        pack(packing.format, packing.rules, {&to, 1}, stream);
      };
      const auto packed_rows = [&](int rows, uint32_t seed) -> Packed& {
        packed.push_back(room(packing.format, rows, device));
        pack_rows(job(packed.back(), {}, rows), seed);
        return packed.back();
      };
      if (longer > 0) {
        long_blocks[which] =
            packed_rows(longer, static_cast<uint32_t>(7 + which)).block(longer, nullptr, longer);
        SlotSegment& long_segment = long_segments[which].emplace_back();
        long_segment.slots = longer;
        long_segment.format = &packing.format;
        long_segment.blocks = {&long_blocks[which], 1};
      }
      SlotSegment segment_of_blocks;
      int held = 0;
      if (s.even) {
        const int rows = lengths[0];
        const auto stride = [](size_t bytes) { return (bytes + 15) / 16 * 16; };
        const size_t meta = dtype_bytes(packing.format.meta);
        const size_t most = std::max(packing.format.scales(rows), packing.format.zeros(rows));
        const size_t codes = stride(static_cast<size_t>(rows) * packing.format.row_bytes());
        const size_t scales = stride(most * meta);
        segment_of_blocks.code_stride = static_cast<std::ptrdiff_t>(codes);
        segment_of_blocks.scale_stride = static_cast<std::ptrdiff_t>(scales);
        packed.push_back({bytes(codes * lengths.size(), device),
                          bytes(scales * lengths.size(), device),
                          bytes(scales * lengths.size(), device)});
        for (size_t b = 0; b < lengths.size(); ++b) {
          PackJob to = job(packed.back(), {}, rows);
          to.codes += b * codes;
          to.scales += b * scales;
          to.zeros += b * scales;
          pack_rows(to, static_cast<uint32_t>(40 + 10 * b + which));
          blocks[which].push_back({to.codes, to.scales, to.zeros, rows, rows, nullptr});
          held += rows;
        }
      }
      for (size_t b = 0; !s.even && b < lengths.size(); ++b) {
        const int rows = lengths[b];
        Packed& of_block = packed_rows(rows, static_cast<uint32_t>(40 + 10 * b + which));
        const bool dies = s.dead_rows && b % 2 == 1;
        int alive = rows;
        if (dies) {
          alive = 0;
          for (int i = 0; i < rows; ++i) {
            alive += static_cast<int>(live[static_cast<size_t>(i) / 64] >> (i % 64) & 1);
          }
        }
        blocks[which].push_back(of_block.block(rows, dies ? live.data() : nullptr, alive));
        held += alive;
      }
      segment_of_blocks.slots = held;
      segment_of_blocks.format = &packing.format;
      segment_of_blocks.blocks = blocks[which];
      const Tensor rows =
          normal_tensor(DType::kF16, {kFull, s.head_dim}, static_cast<uint32_t>(90 + which));
      keep.push_back(Tensor(DType::kF16, rows.shape(), device));
      copy(keep.back(), rows, stream);
      SlotSegment segment_of_rows;
      segment_of_rows.slots = kFull;
      segment_of_rows.rows = keep.back().view().data();
      segments[which] = {segment_of_blocks, segment_of_rows};
      long_segments[which].push_back(segment_of_rows);
      slots = held + kFull;
    }
    Tensor placed(DType::kF32, q.shape(), device);
    copy(placed, q, stream);
    const int64_t head_count = company + 1;
    Tensor weights(DType::kF32, {head_count, s.q_per_kv, slots}, device);
    Tensor out(DType::kF32, {head_count, s.q_per_kv, s.head_dim}, device);
    // Where nobody wants weights, a remap of whole runs, whose slope falls for few queries.
    const ScoreRemap remaps[] = {{0, 100, 0, 3, true}, {120, 60, 1, 2, false}};
    const ScoreRemap of_segment[] = {{0, slots - kFull, 0.2f, s.q_per_kv == 7 ? 9.0f : 1, false}};
    const ScoreRemap of_long[] = {{0, longer, 0.2f, 1, false}};
    Tensor long_out(DType::kF32, q.shape(), device);
    Tensor long_weights(DType::kF32, {s.q_per_kv, longer + kFull}, device);
    std::vector<PackedHead> heads;
    if (longer > 0) {
      PackedHead& head = heads.emplace_back();
      head.q = placed.as<float>();
      head.keys = long_segments[0];
      head.values = long_segments[1];
      head.slots = longer + kFull;
      head.weights = long_weights.as<float>();
      head.out = long_out.as<float>();
      head.weights_wanted = false;
      if (s.remapped) head.remaps = of_long;
    }
    for (int64_t i = 0; i < head_count; ++i) {
      PackedHead& head = heads.emplace_back();
      head.q = placed.as<float>();
      head.keys = segments[0];
      head.values = segments[1];
      head.slots = slots;
      head.weights = weights.view().slice(i, 1).as<float>();
      head.out = out.view().slice(i, 1).as<float>();
      head.weights_wanted = s.weights_wanted;
      head.remaps = remaps;
      if (!s.weights_wanted) head.remaps = of_segment;
      if (!s.remapped) head.remaps = {};
    }
    attend_heads(heads, s.q_per_kv, s.head_dim, kScale, stream);
    // Of the last KV head.
    Tensor host_weights(DType::kF32, {1, s.q_per_kv, slots});  // means in place of the first query
    copy(host_weights, weights.view().slice(company, 1), stream);
    Found found{Tensor(DType::kF32, {1, s.q_per_kv, s.head_dim}), {}};
    copy(found.out, out.view().slice(company, 1), stream);
    found.weights.assign(host_weights.as<float>(), host_weights.as<float>() + slots);
    return found;
  }
};

TEST_F(PackedHeads, AttentionOverEveryFormat) {
  for (const char* spec : kSpecs) {
    for (const HeadShape& s : {HeadShape{32, 1},
                               HeadShape{64, 4},
                               HeadShape{80, 7},
                               HeadShape{96, 2},
                               HeadShape{128, 8},
                               HeadShape{256, 4},
                               HeadShape{128, 1, false},
                               HeadShape{128, 4, false},
                               HeadShape{128, 7, false},
                               HeadShape{128, 8, false},
                               HeadShape{128, 12, false},
                               HeadShape{128, 1, false, false},
                               HeadShape{128, 4, false, false},
                               HeadShape{128, 7, false, false},
                               HeadShape{128, 12, false, false},
                               HeadShape{64, 4, false, false},
                               HeadShape{128, 1, false, false, false},
                               HeadShape{128, 4, false, false, false},
                               HeadShape{128, 7, false, false, false},
                               HeadShape{128, 8, true, false, false},
                               HeadShape{128, 12, false, false, false},
                               HeadShape{64, 1, false, false, false},
                               HeadShape{64, 7, false, false, false},
                               HeadShape{64, 12, false, false, false},
                               HeadShape{80, 3, false, false, false},
                               HeadShape{80, 9, false, false, false},
                               HeadShape{96, 1, false, false, false},
                               HeadShape{96, 8, false, false, false},
                               HeadShape{112, 4, false, false, false},
                               HeadShape{256, 4, false, false, false},
                               HeadShape{256, 11, false, false, false}}) {
      // Blocks of awkward lengths. Without dead rows, what the tensor cores serve.
      const std::vector<int> lengths = {32, 301, 1, 45, 1100};
      const Found expected = attend(spec, s, lengths, 0, {}, cpu_);
      const Found found = attend(spec, s, lengths, 0, kGpu, *gpu_);
      const std::string name = fmt::format("{} {} x {}", spec, s.q_per_kv, s.head_dim);
      // Each is within 1e-5 of the truth.
      EXPECT_LE(error(found.out, expected.out), 2e-5) << name;
      double difference = 0;
      for (size_t i = 0; s.weights_wanted && i < expected.weights.size(); ++i) {
        difference = std::max(difference, std::abs(static_cast<double>(expected.weights[i]) -
                                                   static_cast<double>(found.weights[i])));
      }
      EXPECT_LE(difference, 1e-5) << name;
    }
  }
}

/// What is added up shrinks where a score is much greater than those before, and not at once: both
/// are met by scores that rise slowly and fast. Large values have scales of 32 and more.
TEST_F(PackedHeads, ScoresThatRise) {
  const std::vector<int> lengths = {32, 301, 1, 45, 1100};
  for (const char* spec : {"int8", "int4", "nf4", "nf4,group=32", "kivi,bits=1", "kivi",
                           "kivi,bits=3", "kivi,bits=5", "head_quantile", "vidkv",
                           "vidkv,key_bits=1", "vidkv,value_axis=token", "vidkv,value_bits=2"}) {
    for (const auto& [head_dim, q_per_kv] :
         {std::pair(128, 1), std::pair(128, 4), std::pair(128, 7), std::pair(64, 4),
          std::pair(80, 3), std::pair(96, 2), std::pair(256, 7)}) {
      for (const auto& [rise, spread] :
           {std::pair(0.02f, 1.0f), std::pair(0.1f, 1.0f), std::pair(0.02f, 100.0f)}) {
        const HeadShape s{head_dim, q_per_kv, false, false, false, rise, spread};
        const Found expected = attend(spec, s, lengths, 0, {}, cpu_);
        const Found found = attend(spec, s, lengths, 0, kGpu, *gpu_);
        EXPECT_LE(error(found.out, expected.out), 2e-5) << fmt::format(
            "{} {} x {}, rises by {}, values of {}", spec, q_per_kv, head_dim, rise, spread);
      }
    }
  }
}

/// What else may be true of a KV head whose values lie in two codes.
struct Also {
  bool full_first = false;  // full rows but the newest lie in front of the selected ones
  bool dead = false;        // row 1 of every block of packed values is dead
};

/// KV heads whose values lie in two codes, as a bitmap says (VidKV's protected tokens).
class SelectedValues : public PackedCuda {
 protected:
  /// Memory of one KV head: keys in f16; of the first `rows` values those whose bit is set apart
  /// from the others, in blocks of 32 rows; then full rows.
  struct Head {
    std::vector<Tensor> keep;
    std::vector<Packed> packed;
    std::vector<uint64_t> bits;
    std::vector<uint64_t> live;  // of one block after the other
    std::array<std::vector<PackedBlock>, 2> blocks;
    std::vector<SlotSegment> keys, values;
    Tensor q, weights, out;
    int slots = 0;
  };
  static constexpr int kFull = 37;

  static const Tensor& placed(Head& head, const Tensor& x, Device device, Stream& stream) {
    head.keep.push_back(Tensor(x.dtype(), x.shape(), device));
    copy(head.keep.back(), x, stream);
    return head.keep.back();
  }

  /// `share` of the values have their bit set.
  static Head make(const Quantizer& quantizer, int head_dim, int q_per_kv, int rows, double share,
                   Device device, Stream& stream, Also also = {}) {
    Head head;
    head.slots = rows + kFull;
    head.keep.reserve(static_cast<size_t>(rows) + 8);
    head.packed.reserve(static_cast<size_t>(rows) + 2);
    head.live.reserve(static_cast<size_t>(rows) + 2);
    head.bits.resize(static_cast<size_t>(rows + 63) / 64);
    std::mt19937 rng(3);
    std::array<int, 2> held{};
    for (int i = 0; i < rows; ++i) {
      const bool chosen = std::uniform_real_distribution<>()(rng) < share;
      if (chosen) head.bits[static_cast<size_t>(i) / 64] |= uint64_t{1} << (i % 64);
      ++held[chosen ? 1 : 0];
    }
    SlotSegment keys;
    keys.slots = head.slots;
    keys.rows = placed(head, normal_tensor(DType::kF16, {head.slots, head_dim}, 5), device, stream)
                    .view()
                    .data();
    head.keys.push_back(keys);
    for (const bool chosen : {false, true}) {
      const size_t which = chosen ? 1 : 0;
      const Packing& packing =
          chosen ? *quantizer.protected_values() : quantizer.packing(KvSide::kValues, 0);
      for (int first = 0; first < held[which]; first += 32) {
        const int count = std::min(32, held[which] - first);
        const auto seed = static_cast<uint32_t>(100 + 2 * first + (chosen ? 1 : 0));
        const int stored = count + (also.dead ? 1 : 0);
        const Tensor& x =
            placed(head, normal_tensor(DType::kF32, {stored, head_dim}, seed), device, stream);
        head.packed.push_back(room(packing.format, stored, device));
        const PackJob one = job(head.packed.back(), x, stored);
        pack(packing.format, packing.rules, {&one, 1}, stream);
        head.live.push_back(((uint64_t{1} << stored) - 1) & ~uint64_t{2});
        head.blocks[which].push_back(
            head.packed.back().block(stored, also.dead ? &head.live.back() : nullptr, count));
      }
      if (held[which] == 0) continue;
      SlotSegment segment;
      segment.slots = held[which];
      segment.format = &packing.format;
      segment.blocks = head.blocks[which];
      segment.selection = head.bits.data();
      segment.selected_bit = chosen;
      segment.selected_of = rows;
      segment.selection_ends = chosen || held[1] == 0;
      head.values.push_back(segment);
    }
    SlotSegment full;
    full.slots = kFull;
    full.rows = placed(head, normal_tensor(DType::kF16, {kFull, head_dim}, 6), device, stream)
                    .view()
                    .data();
    if (also.full_first) {  // all but the newest
      full.slots = kFull - 1;
      head.values.insert(head.values.begin(), full);
      full.slots = 1;
      full.rows += static_cast<size_t>(kFull - 1) * static_cast<size_t>(head_dim) * sizeof(f16);
    }
    head.values.push_back(full);
    head.q = Tensor(DType::kF32, {q_per_kv, head_dim}, device);
    copy(head.q, normal_tensor(DType::kF32, {q_per_kv, head_dim}, 7), stream);
    head.weights = Tensor(DType::kF32, {q_per_kv, head.slots}, device);
    head.out = Tensor(DType::kF32, {q_per_kv, head_dim}, device);
    return head;
  }

  /// Attends with all KV heads at once.
  static void attend(std::vector<Head>& heads, bool weights_wanted, Stream& stream) {
    std::vector<PackedHead> described;
    for (Head& head : heads) {
      PackedHead& made = described.emplace_back();
      made.q = head.q.as<float>();
      made.keys = head.keys;
      made.values = head.values;
      made.slots = head.slots;
      made.weights = head.weights.as<float>();
      made.weights_wanted = weights_wanted;
      made.out = head.out.as<float>();
    }
    const auto dim = static_cast<int>(heads[0].q.shape()[1]);
    attend_heads(described, static_cast<int>(heads[0].q.shape()[0]), dim, 0.1f, stream);
  }
};

TEST_F(SelectedValues, AreAttendedToAsOnTheCpu) {
  for (const char* spec :
       {"vidkv,protect=0.2", "vidkv,protect=0.2,trits=trit2b", "vidkv,protect=0.2,value_bits=1"}) {
    for (const auto& [dim, q_per_kv] : {std::pair(128, 1), std::pair(128, 4), std::pair(128, 7)}) {
      const auto made = quantizer(spec, shape_of(4, 1, dim));
      for (const int rows : {1, 64, 65, 300, 1717, 16384 - kFull, 16385 - kFull}) {
        for (const double share : {0.0, 0.2, 1.0}) {
          for (const bool wanted : {false, true}) {
            std::vector<Head> cpu, gpu;
            cpu.push_back(make(*made, dim, q_per_kv, rows, share, {}, cpu_));
            gpu.push_back(make(*made, dim, q_per_kv, rows, share, kGpu, *gpu_));
            attend(cpu, wanted, cpu_);
            attend(gpu, wanted, *gpu_);
            const std::string name =
                fmt::format("{} x {}, {} rows, {}", spec, q_per_kv, rows, share);
            // An average of n rows is smaller by sqrt(n) than they are.
            const double bound = 2e-5 * std::max(1.0, std::sqrt(rows / 1500.0));
            EXPECT_LE(error(gpu[0].out, cpu[0].out), bound) << name;
            if (wanted) {
              const auto means = [&](const Head& of) { return of.weights.view().slice(0, 1); };
              EXPECT_LE(error(means(gpu[0]), means(cpu[0])), 1e-4) << name;
            }
          }
        }
      }
    }
  }
}

TEST_F(SelectedValues, LieBehindFullRowsAndAmongDeadOnes) {
  for (const char* spec : {"vidkv,protect=0.2", "vidkv,protect=0.2,value_bits=1"}) {
    const auto made = quantizer(spec, shape_of(4, 1, 128));
    for (const int q_per_kv : {1, 4}) {
      for (const int rows : {1, 65, 300, 1717}) {
        for (const double share : {0.0, 0.2, 1.0}) {
          for (const Also also : {Also{true, false}, Also{false, true}, Also{true, true}}) {
            std::vector<Head> cpu, gpu;
            cpu.push_back(make(*made, 128, q_per_kv, rows, share, {}, cpu_, also));
            gpu.push_back(make(*made, 128, q_per_kv, rows, share, kGpu, *gpu_, also));
            attend(cpu, false, cpu_);
            attend(gpu, false, *gpu_);
            EXPECT_LE(error(gpu[0].out, cpu[0].out), 2.2e-5)
                << spec << " x " << q_per_kv << ", " << rows << " rows, " << share
                << (also.full_first ? ", full rows first" : "") << (also.dead ? ", dead rows" : "");
          }
        }
      }
    }
  }
}

/// KV heads longer than what is put in order, in one batch with such that are.
TEST_F(SelectedValues, CompanyChangesNoBit) {
  const auto made = quantizer("vidkv,protect=0.2", shape_of(4, 1, 128));
  for (const int rows : {300, 5000}) {
    std::vector<Head> alone, beside;
    alone.push_back(make(*made, 128, 4, rows, 0.2, kGpu, *gpu_));
    beside.push_back(make(*made, 128, 4, 17000, 0.3, kGpu, *gpu_));
    beside.push_back(make(*made, 128, 4, rows, 0.2, kGpu, *gpu_));
    beside.push_back(make(*made, 128, 4, 900, 0.9, kGpu, *gpu_));
    attend(alone, false, *gpu_);
    attend(beside, false, *gpu_);
    EXPECT_TRUE(testing::same_bits(on_host(alone[0].out).view(), on_host(beside[1].out).view()))
        << rows;
  }
}

/// One block of packed rows in front of full ones, as pictures that were packed once: of every pair
/// of widths that image_block.cu has, of lengths around its chunks of 64, for one block of 4 or 8
/// warps and for clusters.
TEST_F(PackedHeads, AttentionOverPicturesPackedOnce) {
  for (const char* spec :
       {"calibquant", "calibquant,bits=2", "calibquant,bits=4", "calibquant,bits=8",
        "calibquant,key_bits=1,value_bits=2", "calibquant,key_bits=1,value_bits=4",
        "calibquant,key_bits=1,value_bits=8", "calibquant,key_bits=2,value_bits=1",
        "calibquant,key_bits=2,value_bits=4,value_axis=head", "calibquant,key_bits=4,value_bits=1",
        "calibquant,key_bits=4,value_bits=2", "calibquant,key_bits=8,value_bits=1", "head_quantile",
        "head_quantile,bits=2", "head_quantile,bits=4,group_axes=layer"}) {
    for (const HeadShape& s :
         {HeadShape{128, 1, false, false}, HeadShape{128, 4, false, false},
          HeadShape{128, 7, false, false}, HeadShape{128, 12, false, false},
          HeadShape{128, 4, false, false, false}, HeadShape{128, 8, false, false, false}}) {
      for (const int rows : {1, 63, 64, 65, 300, 1717, 4129, 9001}) {
        const Found expected = attend(spec, s, {rows}, 0, {}, cpu_);
        const Found found = attend(spec, s, {rows}, 0, kGpu, *gpu_);
        // An average of n rows is smaller by sqrt(n) than they are; the CPU's sums in f32 are not.
        const double bound = 2e-5 * std::max(1.0, std::sqrt(rows / 1500.0));
        EXPECT_LE(error(found.out, expected.out), bound)
            << fmt::format("{} {} x {}, {} rows", spec, s.q_per_kv, s.head_dim, rows);
      }
    }
  }
}

/// However many warps and blocks of threads share a KV head: one has a cluster, many a block each,
/// and short ones beside a long one as many warps as that.
TEST_F(PackedHeads, CompanyChangesNoBitOfPictures) {
  for (const char* spec : {"calibquant", "calibquant,bits=2", "head_quantile,bits=4"}) {
    for (const HeadShape& s :
         {HeadShape{128, 4, false, false}, HeadShape{128, 7, false, false, false}}) {
      for (const int rows : {300, 1500, 4096, 9001, 16384}) {
        const Found alone = attend(spec, s, {rows}, 0, kGpu, *gpu_);
        for (const int company : {5, 40, 140}) {
          const Found beside = attend(spec, s, {rows}, company, kGpu, *gpu_);
          EXPECT_EQ(error(beside.out, alone.out), 0)
              << fmt::format("{} x {}, {} rows, {} others", spec, s.q_per_kv, rows, company);
        }
        const Found longer = attend(spec, s, {rows}, 3, kGpu, *gpu_, 12001);
        EXPECT_EQ(error(longer.out, alone.out), 0)
            << fmt::format("{} x {}, {} rows beside 12001", spec, s.q_per_kv, rows);
      }
    }
  }
}

TEST_F(PackedHeads, CompanyChangesNoBit) {
  // Enough KV heads that blocks of threads take several splits of each, and all of them.
  constexpr int kCompany = 420;
  constexpr int kMore = 520;
  for (const char* spec : kSpecs) {
    for (const HeadShape& s :
         {HeadShape{128, 1, false, false}, HeadShape{128, 4, false, false},
          HeadShape{128, 4, false, false, false}, HeadShape{80, 5, false, false, false},
          HeadShape{256, 6, false, false, false}, HeadShape{128, 4, false, true},
          HeadShape{64, 2, true, true}}) {
      for (const std::vector<int>& lengths :
           {std::vector{32, 300, 1, 45, 1100}, std::vector{1717}}) {
        const Found alone = attend(spec, s, lengths, 0, kGpu, *gpu_);
        for (const int company : {kCompany, kMore}) {
          const Found beside = attend(spec, s, lengths, company, kGpu, *gpu_);
          const std::string name = fmt::format("{} {} x {}, {} blocks, {} others", spec, s.q_per_kv,
                                               s.head_dim, lengths.size(), company);
          EXPECT_EQ(error(beside.out, alone.out), 0) << name;
          if (s.weights_wanted) {
            EXPECT_EQ(beside.weights, alone.weights) << name;
          }
        }
      }
    }
  }
}

/// Long KV heads that are so many that warps have whole splits for themselves, in formats whose
/// kernels have room for that at some of the head_dims. On 132 multiprocessors a block has all
/// splits of 521 KV heads of four queries, or half of those of 261.
class LongHeads : public PackedHeads, public ::testing::WithParamInterface<const char*> {
 protected:
  void check(const HeadShape& s, const std::vector<int>& lengths) {
    const Found alone = attend(GetParam(), s, lengths, 0, kGpu, *gpu_);
    for (const int company : {260, 520}) {
      const Found beside = attend(GetParam(), s, lengths, company, kGpu, *gpu_);
      EXPECT_EQ(error(beside.out, alone.out), 0)
          << fmt::format("{} x {}, {} blocks, the first of {} rows, {} others", s.q_per_kv,
                         s.head_dim, lengths.size(), lengths[0], company);
    }
  }
};

TEST_P(LongHeads, CompanyChangesNoBit) {
  // With 37 rows behind them: 10 and 11 splits of 512 slots; 12, the last of 8, 100 and 128.
  for (const HeadShape& s :
       {HeadShape{128, 4, false, false, false}, HeadShape{128, 7, false, false, false},
        HeadShape{64, 2, false, false, false}, HeadShape{80, 5, false, false, false}}) {
    check(s, {5000});
    check(s, {4097, 1003});
    for (const int rows : {5603, 5695, 5723}) check(s, {rows});
  }
}

TEST_P(LongHeads, CompanyChangesNoBitOfEvenBlocks) {
  for (HeadShape s :
       {HeadShape{128, 4, false, false, false}, HeadShape{64, 2, false, false, false}}) {
    s.even = true;
    check(s, std::vector<int>(40, 128));
    check(s, std::vector<int>(175, 32));
  }
}

INSTANTIATE_TEST_SUITE_P(Specs, LongHeads,
                         ::testing::Values("int4", "nf4", "kivi,bits=1", "kivi", "kivi,bits=3",
                                           "xquant", "vidkv", "vidkv,value_axis=token",
                                           "vidkv,value_bits=1", "vidkv,key_bits=2,value_bits=2"),
                         name_of_spec);

/// Where nobody wants the weights of f16 rows, their softmax is deferred.
TEST_F(Cuda, ClampedSlopesAreCounted) {
  for (const auto& [dtype, dim, wanted] :
       {std::tuple{DType::kF32, 1, true}, {DType::kF16, 128, false}}) {
    // Scores 0, 1, 2, 1, by their first channel: the slope of the remap would be negative.
    Tensor rows(DType::kF32, {4, dim});
    Tensor first(DType::kF32, {1, dim});
    for (int i = 0; i < 4 * dim; ++i) rows.as<float>()[i] = 0;
    for (int i = 0; i < dim; ++i) first.as<float>()[i] = i == 0 ? 1 : 0;
    for (const int row : {1, 2, 3}) rows.as<float>()[row * dim] = row == 2 ? 2 : 1;
    Tensor stored(dtype, rows.shape());
    convert(stored, rows, cpu_);
    const Tensor keys = on_gpu(stored);
    const Tensor q = on_gpu(first);
    Tensor weights(DType::kF32, {2, 5}, kGpu);
    Tensor out(DType::kF32, {2, dim}, kGpu);
    SlotSegment segment;
    segment.slots = 4;
    segment.rows = keys.view().data();
    segment.dtype = dtype;
    SlotSegment newest = segment;
    newest.slots = 1;
    const SlotSegment segments[] = {segment, newest};
    const ScoreRemap remaps[] = {{0, 4, 0, 3, true}, {0, 4, 0, 3, false}};
    PackedHead heads[2];
    for (int64_t i = 0; i < 2; ++i) {
      PackedHead& head = heads[i];
      head.q = q.view().as<float>();
      head.keys = head.values = segments;
      head.remaps = {&remaps[i], 1};
      head.slots = 5;
      head.weights = weights.view().slice(i, 1).as<float>();
      head.weights_wanted = wanted;
      head.out = out.view().slice(i, 1).as<float>();
    }
    testing::TableHeads table(heads, 1, dim, *gpu_);
    for (int call = 1; call <= 3; ++call) EXPECT_EQ(table.attend(1), call) << dim;
  }
}

/// What attends on the CPU alone says so.
TEST_F(Cuda, AttentionOfOneCallIsTheCpus) {
  const auto refused = [](const auto& body) {
    try {
      body();
    } catch (const Error& e) {
      return e.code() == ErrorCode::kUnsupported;
    }
    return false;
  };
  EXPECT_TRUE(refused([&] { attend_packed({}, 1, 8, 1, *gpu_); }));
  RowBatch batch;
  batch.start(1, 8);
  EXPECT_TRUE(refused([&] { batch.attend(1, *gpu_); }));
  const float weight = 1;
  float sum = 0;
  const SlotWeights weights{&weight, &sum, 1, 0};
  EXPECT_TRUE(refused([&] { add_slot_weights({&weights, 1}, 1, *gpu_); }));
}

}  // namespace
}  // namespace kvlm
