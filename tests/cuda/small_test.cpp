// Every kernel that shares memory between threads, on tens of rows: what a race checker can watch
// in a minute (compute-sanitizer --tool racecheck cuda_tests --gtest_filter='Small*').
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <numeric>
#include <string>
#include <vector>

#include "kernels/attend_packed.h"
#include "kernels/attention.h"
#include "kernels/column_sums.h"
#include "kernels/expected_attention.h"
#include "kernels/key_basis.h"
#include "kernels/merge_rows.h"
#include "kernels/norm.h"
#include "kernels/pack.h"
#include "kernels/row_moves.h"
#include "kernels/row_scores.h"
#include "kernels/sample.h"
#include "kernels/slot_weights.h"
#include "tests/cuda/fixture.h"
#include "tests/cuda/table_heads.h"

namespace kvlm {
namespace {

using testing::full_rows;
using testing::kGpu;
using testing::normal_tensor;

class SmallShapes : public testing::Cuda {
 protected:
  static std::vector<float> floats_of(const Tensor& tensor) {
    const auto values = testing::values_of(tensor);
    return {values.begin(), values.end()};
  }
  /// Equal to the last bit.
  bool same(const Tensor& gpu, const Tensor& cpu) {
    return testing::same_bits(on_host(gpu).view(), cpu.view());
  }
};

// ------------------------------------------------------------------------------ packed attention

/// Codes of one section, or of two: half of the channels in 2 bits, the others as signs.
struct Codes {
  CodeFormat code = CodeFormat::kBits2;
  ScaleAxis axis = ScaleAxis::kChannel;
  int group_size = 0;
  bool mixed = false;

  PackedFormat format(int channels) const {
    PackedFormat made;
    made.axis = axis;
    made.group_size = group_size;
    made.section[0] = section_of(code, channels);
    if (mixed) {
      made.sections = 2;
      made.section[0].channels = channels / 2;
      made.section[1] = {CodeFormat::kBits1, channels / 2, false, 2, -1, 1 << 30, 0};
    }
    return made;
  }
  std::array<PackRule, 2> rules() const {
    std::array<PackRule, 2> made{};
    made[0].rule = rule_of(code);
    made[1].rule = CodeRule::kSign;
    return made;
  }
};

/// A KV head on one device: packed blocks, then full rows.
class SmallHead {
 public:
  struct Shape {
    Codes keys, values;
    int head_dim = 128;
    int q_per_kv = 4;
    bool weights_wanted = false;
    bool remapped = false;
    std::vector<int> blocks = {};  // rows of each
    int full = 19;
    bool dead_rows = false;
    DType dtype = DType::kF16;  // of full rows
    float value_spread = 1;     // of packed values
  };

  SmallHead(const Shape& shape, Device device, Stream& stream)
      : shape_(shape), device_(device), stream_(stream) {
    add(shape.keys, 0);
    add(shape.values, 1);
    q_ = placed(normal_tensor(DType::kF32, {shape.q_per_kv, shape.head_dim}, 3));
    weights_ = Tensor(DType::kF32, {shape.q_per_kv, slots_[0]}, device);
    out_ = Tensor(DType::kF32, q_.shape(), device);
  }

  Tensor attend() {
    PackedHead head;
    head.q = q_.as<float>();
    head.keys = segments_[0];
    head.values = segments_[1];
    const ScoreRemap remap{0, slots_[0] - shape_.full, 0.2f, 1.5f, true};
    if (shape_.remapped) head.remaps = {&remap, 1};
    head.slots = slots_[0];
    head.weights = weights_.as<float>();
    head.weights_wanted = shape_.weights_wanted;
    head.out = out_.as<float>();
    testing::attend_heads({&head, 1}, shape_.q_per_kv, shape_.head_dim, 0.1f, stream_);
    Tensor host(DType::kF32, out_.shape());
    copy(host, out_, stream_);
    return host;
  }

 private:
  Tensor placed(const Tensor& x) {
    Tensor made(x.dtype(), x.shape(), device_);
    copy(made, x, stream_);
    return made;
  }
  void add(const Codes& codes, size_t side) {
    formats_[side] = codes.format(shape_.head_dim);
    const PackedFormat& format = formats_[side];
    const auto room = [&](size_t bytes) {
      memory_.emplace_back(DType::kU8, kvlm::Shape{static_cast<int64_t>(bytes) / 16 * 16 + 16},
                           device_);
      return memory_.back().view().data();
    };
    uint32_t seed = static_cast<uint32_t>(side);
    for (const int rows : shape_.blocks) {
      const float spread = side == 0 ? 1 : shape_.value_spread;
      const Tensor x =
          placed(normal_tensor(DType::kF32, {rows, shape_.head_dim}, seed += 10, spread));
      const PackJob job{
          x.as<float>(), rows, room(static_cast<size_t>(rows) * format.row_bytes()),
          room(format.scales(rows) * dtype_bytes(format.meta)),
          format.zeros(rows) == 0 ? nullptr : room(format.zeros(rows) * dtype_bytes(format.meta))};
      pack(format, codes.rules(), {&job, 1}, stream_);
      PackedBlock block{job.codes, job.scales, job.zeros, rows, rows, nullptr};
      if (shape_.dead_rows) {
        block.live = &kLive;
        block.live_rows = std::popcount(kLive & ((uint64_t{1} << rows) - 1));
      }
      blocks_[side].push_back(block);
      slots_[side] += block.live_rows;
      stream_.synchronize();
    }
    SlotSegment packed;
    packed.slots = slots_[side];
    packed.format = &format;
    packed.blocks = blocks_[side];
    if (!shape_.blocks.empty()) segments_[side].push_back(packed);
    memory_.push_back(
        placed(normal_tensor(shape_.dtype, {shape_.full, shape_.head_dim}, seed + 5)));
    SlotSegment rows;
    rows.slots = shape_.full;
    rows.rows = memory_.back().view().data();
    rows.dtype = shape_.dtype;
    segments_[side].push_back(rows);
    slots_[side] += shape_.full;
  }

  static constexpr uint64_t kLive = 0xf0f0123456789abfu;
  Shape shape_;
  Device device_;
  Stream& stream_;
  std::vector<Tensor> memory_;
  PackedFormat formats_[2];
  std::vector<PackedBlock> blocks_[2];
  std::vector<SlotSegment> segments_[2];
  int slots_[2] = {};
  Tensor q_, weights_, out_;
};

class SmallPacked : public SmallShapes {
 protected:
  void expect_parity(const SmallHead::Shape& shape) {
    const Tensor expected = SmallHead(shape, {}, cpu_).attend();
    const Tensor found = SmallHead(shape, kGpu, *gpu_).attend();
    EXPECT_LE(error(found, expected), 2e-5)
        << fmt::format("codes {} and {}, {} x {}{}", static_cast<int>(shape.keys.code),
                       static_cast<int>(shape.values.code), shape.q_per_kv, shape.head_dim,
                       shape.weights_wanted ? ", weights" : "");
  }
};

TEST_F(SmallPacked, CodesOfTheTensorCores) {
  using enum ScaleAxis;
  const std::vector<int> blocks = {32, 70, 1};
  for (const CodeFormat code :
       {CodeFormat::kBits1, CodeFormat::kBits2, CodeFormat::kBits4, CodeFormat::kBits8}) {
    for (const int q_per_kv : {3, 7}) {
      for (const Codes& values : {Codes{code, kChannel}, Codes{code, kHead},
                                  Codes{code, kToken, 128}, Codes{code, kToken, 32}}) {
        const Codes keys{code, values.axis == kHead ? kHead : kChannel};
        expect_parity({.keys = keys, .values = values, .q_per_kv = q_per_kv, .blocks = blocks});
      }
      expect_parity({.keys = {code, kToken, 128},
                     .values = {code, kChannel},
                     .q_per_kv = q_per_kv,
                     .remapped = true,
                     .blocks = blocks});
    }
  }
  const Codes mixed{CodeFormat::kBits2, kChannel, 0, true};
  for (const int q_per_kv : {1, 4, 12}) {
    expect_parity({.keys = mixed,
                   .values = {CodeFormat::kTrit5, kChannel},
                   .q_per_kv = q_per_kv,
                   .blocks = blocks});
    expect_parity({.keys = mixed, .values = mixed, .q_per_kv = q_per_kv});  // full rows alone
  }
}

/// What the fused attention serves (kernels/cuda/attend/instances.cmake), and values whose scales
/// are so large that weights are raised less.
TEST_F(SmallPacked, KeysAndValuesInOnePass) {
  using enum ScaleAxis;
  using enum CodeFormat;
  const std::vector<int> blocks = {32, 70, 1, 64, 300};
  const auto check = [&](const Codes& keys, const Codes& values) {
    for (const int q_per_kv : {3, 7}) {
      for (const float spread : {1.0f, 3000.0f}) {
        expect_parity({.keys = keys,
                       .values = values,
                       .q_per_kv = q_per_kv,
                       .blocks = blocks,
                       .value_spread = spread});
      }
    }
  };
  for (const CodeFormat code : {kBits1, kBits2, kBits3, kBits4, kBits5, kBits8}) {
    check({code, kChannel}, {code, kToken, 32});
    check({code, kToken, 128}, {code, kToken, 128});
    check({code, kHead}, {code, kHead});
  }
  check({kBits2, kChannel}, {kBits1, kToken, 32});
  check({kBits2, kToken, 32}, {kBits2, kToken, 32});
  check({kNf4, kToken, 32}, {kNf4, kToken, 32});
  check({kNf4, kToken, 64}, {kNf4, kToken, 64});
  check({kNf4, kToken, 128}, {kNf4, kToken, 128});
  for (const Codes& values : {Codes{kTrit5, kChannel},
                              {kTrit5, kToken, 32},
                              {kTrit2b, kChannel},
                              {kBits1, kChannel},
                              {kBits2, kChannel}}) {
    check({kBits2, kChannel, 0, true}, values);
  }
}

/// The same where two passes serve them: scores are remapped, or weights are wanted, or keys and
/// values have codecs of their own.
TEST_F(SmallPacked, KeysAndValuesInTwoPasses) {
  using enum ScaleAxis;
  using enum CodeFormat;
  const auto check = [&](int head_dim, const Codes& keys, const Codes& values) {
    for (const bool remapped : {false, true}) {
      for (const bool weights_wanted : {false, true}) {
        expect_parity({.keys = keys,
                       .values = values,
                       .head_dim = head_dim,
                       .q_per_kv = remapped ? 7 : 2,
                       .weights_wanted = weights_wanted,
                       .remapped = remapped,
                       .blocks = {32, 70, 1, 64, 300}});
      }
    }
  };
  for (const int head_dim : {64, 80, 96, 128, 256}) {
    for (const CodeFormat code : {kBits1, kBits2, kBits3, kBits4, kBits5, kBits6, kBits7, kBits8}) {
      check(head_dim, {code, kChannel}, {code, kToken, 32});
      check(head_dim, {code, kToken, head_dim}, {code, kToken, head_dim});
      check(head_dim, {code, kHead}, {code, kChannel});
    }
    check(head_dim, {kBits8, kChannel}, {kBits1, kHead});
    for (const int group : {32, 64, head_dim}) {
      check(head_dim, {kNf4, kToken, group}, {kNf4, kToken, group});
    }
    check(head_dim, {kLloydMax4, kToken, head_dim}, {kBits4, kToken, head_dim});
    check(head_dim, {kLloydMax3, kToken, head_dim}, {kBits3, kToken, head_dim});
    check(head_dim, {kLloydMax3, kToken, head_dim}, {kLloydMax4, kToken, head_dim});
  }
  for (const Codes& values : {Codes{kTrit5, kChannel}, {kTrit5, kToken, 32}, {kTrit2b, kChannel}}) {
    check(128, {kBits2, kChannel, 0, true}, values);
  }
}

/// What image_block.cu serves: one block, by one block of threads and by a cluster of them.
TEST_F(SmallPacked, PicturesPackedOnce) {
  using enum ScaleAxis;
  using enum CodeFormat;
  for (const int rows : {1, 70, 530}) {
    for (const int q_per_kv : {1, 7}) {
      for (const CodeFormat code : {kBits1, kBits2, kBits4, kBits8}) {
        const Codes codes{code, rows == 70 ? kHead : kChannel};
        expect_parity({.keys = codes,
                       .values = codes,
                       .q_per_kv = q_per_kv,
                       .remapped = q_per_kv == 7,
                       .blocks = {rows}});
      }
    }
  }
  expect_parity({.keys = {kBits1, kChannel},
                 .values = {kBits1, kChannel},
                 .remapped = true,
                 .blocks = {2100},
                 .full = 300});
}

TEST_F(SmallPacked, EveryOtherFormat) {
  using enum ScaleAxis;
  for (const int head_dim : {20, 128}) {
    for (const bool dead_rows : {false, true}) {
      for (const bool weights_wanted : {false, true}) {
        const auto check = [&](const Codes& keys, const Codes& values, DType dtype) {
          expect_parity({.keys = keys,
                         .values = values,
                         .head_dim = head_dim,
                         .q_per_kv = 5,
                         .weights_wanted = weights_wanted,
                         .remapped = true,
                         .blocks = {33, 7, 63},
                         .dead_rows = dead_rows,
                         .dtype = dtype});
        };
        check({CodeFormat::kBits3, kChannel}, {CodeFormat::kBits5, kHead}, DType::kF32);
        check({CodeFormat::kTrit5, kChannel}, {CodeFormat::kTrit5, kChannel}, DType::kBF16);
        check({CodeFormat::kBits2, kToken, 32}, {CodeFormat::kBits6, kToken, 32}, DType::kF16);
      }
    }
  }
}

TEST_F(SmallPacked, SoftmaxesOfEveryLength) {
  const Codes codes;
  for (const int full : {40, 1100, 4200, 17000}) {
    expect_parity({.keys = codes,
                   .values = codes,
                   .head_dim = 8,
                   .q_per_kv = 1,
                   .weights_wanted = true,
                   .remapped = true,
                   .blocks = {33},
                   .full = full});
  }
}

TEST_F(SmallPacked, PackingByEveryRule) {
  using enum ScaleAxis;
  struct Case {
    Codes codes;
    PackRule rule;
  };
  const Case cases[] = {{{CodeFormat::kBits2, kChannel}, {}},
                        {{CodeFormat::kBits3, kToken, 8}, {}},
                        {{CodeFormat::kBits1, kHead}, {.alpha = 0.1f}},
                        {{CodeFormat::kBits2, kToken, 20}, {.alpha = 0.2f}},
                        {{CodeFormat::kBits4, kChannel}, {.alpha = 0.05f, .eta = 0.1f}},
                        {{CodeFormat::kTrit5, kChannel},
                         {.rule = CodeRule::kTernary, .ternary_scale = TernaryScale::kNonZero}},
                        {{CodeFormat::kTrit5, kToken, 8},
                         {.rule = CodeRule::kTernary, .ternary_scale = TernaryScale::kNonZero}},
                        {{CodeFormat::kNf4, kToken, 8}, {.rule = CodeRule::kCodebook}},
                        {{CodeFormat::kNf4, kToken, 32}, {.rule = CodeRule::kCodebook}},
                        {{CodeFormat::kLloydMax3, kToken, 20}, {.rule = CodeRule::kNormCodebook}},
                        {{CodeFormat::kLloydMax4, kToken, 20},
                         {.rule = CodeRule::kNormCodebook, .corrects_norm = false}},
                        {{CodeFormat::kBits4, kToken, 20}, {.rounding = Rounding::kHalfUp}},
                        {{CodeFormat::kBits2, kChannel, 0, true}, {}}};
  for (const Case& c : cases) {
    const PackedFormat format = c.codes.format(20);
    std::array<PackRule, 2> rules = c.codes.rules();
    rules[0] = c.rule;
    for (const int rows : {45, 300}) {
      const Tensor x = normal_tensor(DType::kF32, {rows, 20}, 9);
      const auto run = [&](Device device, Stream& stream) {
        Tensor placed(DType::kF32, x.shape(), device);
        copy(placed, x, stream);
        // Codes, scales and zero points side by side, zeros where nothing is written.
        constexpr int64_t kBytes = 4096;
        Tensor zeros(DType::kU8, {3 * kBytes});
        std::fill_n(zeros.as<uint8_t>(), 3 * kBytes, uint8_t{0});
        std::fill_n(zeros.view().data(), 0, std::byte{0});
        Tensor packed(DType::kU8, {3 * kBytes}, device);
        copy(packed, zeros, stream);
        std::byte* to = packed.view().data();
        const PackJob job{placed.as<float>(), rows, to, to + kBytes,
                          format.zeros(rows) > 0 ? to + 2 * kBytes : nullptr};
        pack(format, rules, {&job, 1}, stream);
        Tensor host(DType::kU8, packed.shape());
        copy(host, packed, stream);
        return host;
      };
      EXPECT_TRUE(testing::same_bits(run(kGpu, *gpu_).view(), run({}, cpu_).view()))
          << "codes " << static_cast<int>(format.section[0].code) << ", axis "
          << static_cast<int>(format.axis) << ", " << rows << " rows";
    }
  }
}

/// Codes of one tensor, merged with those of another: by every kernel that writes codes.
TEST_F(SmallPacked, PackingMergesCodes) {
  using enum ScaleAxis;
  struct Case {
    Codes codes;
    int channels;
    float alpha = 0;
  };
  const Case cases[] = {
      {{CodeFormat::kBits1, kChannel}, 20},       {{CodeFormat::kBits2, kChannel}, 44},
      {{CodeFormat::kBits2, kChannel}, 20, 0.1f}, {{CodeFormat::kBits2, kHead}, 20},
      {{CodeFormat::kBits1, kToken, 8}, 20},      {{CodeFormat::kBits2, kToken, 20}, 20, 0.1f},
      {{CodeFormat::kBits1, kToken, 32}, 128},    {{CodeFormat::kBits2, kToken, 32}, 128}};
  for (const Case& c : cases) {
    const PackedFormat format = c.codes.format(c.channels);
    for (const int rows : {1, 45, 300}) {
      const auto run = [&](Device device, Stream& stream) {
        constexpr int64_t kBytes = 1 << 14;
        Tensor zeros(DType::kU8, {3 * kBytes});
        std::fill_n(zeros.as<uint8_t>(), 3 * kBytes, uint8_t{0});
        Tensor packed(DType::kU8, zeros.shape(), device);
        copy(packed, zeros, stream);
        for (const uint32_t merge : {0u, 0xe994a950u}) {  // tables of no meaning but 3, 3 to 3
          const Tensor x = normal_tensor(DType::kF32, {rows, c.channels}, merge == 0 ? 9 : 10);
          Tensor placed(DType::kF32, x.shape(), device);
          copy(placed, x, stream);
          std::byte* to = packed.view().data();
          const PackJob job{placed.as<float>(), rows, to, to + kBytes, to + 2 * kBytes};
          pack(format, {PackRule{.alpha = c.alpha, .merge = merge}}, {&job, 1}, stream);
          stream.synchronize();
        }
        Tensor host(DType::kU8, packed.shape());
        copy(host, packed, stream);
        return host;
      };
      EXPECT_TRUE(testing::same_bits(run(kGpu, *gpu_).view(), run({}, cpu_).view()))
          << "codes " << static_cast<int>(format.section[0].code) << ", axis "
          << static_cast<int>(format.axis) << ", " << rows << " rows of " << c.channels;
    }
  }
}

/// Three jobs of 7, 40 and 1 rows, the second with the first's range, of ends and of quantiles.
TEST_F(SmallPacked, PackingJobsThatShareARange) {
  PackedFormat format;
  format.axis = ScaleAxis::kHead;
  format.section[0] = {.code = CodeFormat::kBits3, .channels = 20};
  const Tensor x = normal_tensor(DType::kF32, {48, 20}, 9);
  for (const float alpha : {0.0f, 0.1f}) {
    PackRule rule;
    rule.alpha = alpha;
    const auto run = [&](Device device, Stream& stream) {
      Tensor placed(DType::kF32, x.shape(), device);
      copy(placed, x, stream);
      Tensor zeros(DType::kU8, {4096});
      std::fill_n(zeros.as<uint8_t>(), 4096, uint8_t{0});
      Tensor packed(DType::kU8, {4096}, device);
      copy(packed, zeros, stream);
      std::byte* to = packed.view().data();
      const float* rows = placed.as<float>();
      const std::array jobs{PackJob{rows, 7, to, to + 2048, to + 3072},
                            PackJob{rows + 140, 40, to + 512, to + 2064, to + 3088, true},
                            PackJob{rows + 940, 1, to + 1024, to + 2080, to + 3104}};
      pack(format, {rule}, jobs, stream);
      Tensor host(DType::kU8, packed.shape());
      copy(host, packed, stream);
      return host;
    };
    EXPECT_TRUE(testing::same_bits(run(kGpu, *gpu_).view(), run({}, cpu_).view())) << alpha;
  }
}

// --------------------------------------------------------------------------------- full attention

TEST_F(SmallShapes, HeadsOfFullRows) {
  struct Case {
    int q_per_kv, head_dim;
  };
  for (const Case& c : {Case{1, 20}, Case{3, 32}, Case{5, 64}, Case{1, 128}, Case{4, 128},
                        Case{7, 128}, Case{2, 200}}) {
    for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
      // The last one is cut into parts.
      const std::vector<int> lengths = {37, 1, 21, 262};
      const Tensor found = full_rows(c.q_per_kv, c.head_dim, dtype, lengths, kGpu, *gpu_);
      const Tensor expected = full_rows(c.q_per_kv, c.head_dim, dtype, lengths, {}, cpu_);
      EXPECT_LE(error(found, expected), 3e-6)
          << c.q_per_kv << " x " << c.head_dim << " " << dtype_name(dtype);
    }
  }
}

TEST_F(SmallShapes, Prompts) {
  for (const int head_dim : {30, 64, 80, 128, 256}) {
    for (const DType multiply : {DType::kF32, DType::kF16, DType::kBF16}) {
      constexpr int64_t kRows = 70;
      const Tensor q = normal_tensor(DType::kF32, {kRows, 2, head_dim}, 1);
      const Tensor k = normal_tensor(DType::kF32, {kRows, 1, head_dim}, 2);
      const Tensor v = normal_tensor(DType::kF32, {kRows, 1, head_dim}, 3);
      const Tensor past = normal_tensor(DType::kF16, {2, 9, head_dim}, 4);
      const Tensor gpu_past = on_gpu(past);
      const auto segment_of = [&](const Tensor& rows) {
        return KeyValueRows{rows.view().slice(0, 1).data(), rows.view().slice(1, 1).data(),
                            DType::kF16, 9};
      };
      const KeyValueRows run = segment_of(past);
      const KeyValueRows gpu_segment = segment_of(gpu_past);
      Tensor out(DType::kF32, q.shape());
      Tensor gpu_out(DType::kF32, q.shape(), kGpu);
      const float scale = 1 / std::sqrt(static_cast<float>(head_dim));
      attention(out, q, k, v, {&run, 1}, true, scale, DType::kF32, cpu_);
      attention(gpu_out, on_gpu(q), on_gpu(k), on_gpu(v), {&gpu_segment, 1}, true, scale, multiply,
                *gpu_);
      const double gate = multiply == DType::kF32 ? 2e-6 : multiply == DType::kF16 ? 2e-3 : 1.5e-2;
      EXPECT_LE(error(gpu_out, out), gate) << head_dim << ", " << dtype_name(multiply);
    }
  }
  // As many blocks as take two tiles of rows each.
  const Tensor q = normal_tensor(DType::kF32, {130, 270, 32}, 1);
  const Tensor k = normal_tensor(DType::kF32, {130, 1, 32}, 2);
  Tensor out(DType::kF32, q.shape());
  Tensor gpu_out(DType::kF32, q.shape(), kGpu);
  attention(out, q, k, k, {}, false, 0.2f, DType::kF32, cpu_);
  const Tensor gpu_k = on_gpu(k);
  attention(gpu_out, on_gpu(q), gpu_k, gpu_k, {}, false, 0.2f, DType::kF16, *gpu_);
  EXPECT_LE(error(gpu_out, out), 2e-3);
}

TEST_F(SmallShapes, SumsOfColumns) {
  for (const int head_dim : {20, 128}) {
    const Tensor q = normal_tensor(DType::kF32, {67, 6, head_dim}, 1);
    const Tensor k = normal_tensor(DType::kF32, {67, 2, head_dim}, 2);
    const Tensor gpu_q = on_gpu(q);
    const Tensor gpu_k = on_gpu(k);
    std::vector<double> sums(134);
    std::vector<double> gpu_sums(134);
    const Shape bytes{134 * sizeof(double)};
    Tensor sums_there(DType::kU8, bytes, kGpu);
    std::vector<double> small(6);
    std::vector<double> gpu_small(6);
    column_sums({sums.data(), 67, 0, small}, q, k, {}, {3, 1.5f}, 0.2f, DType::kF32, cpu_);
    for (const DType multiply : {DType::kF32, DType::kF16}) {
      std::fill(gpu_small.begin(), gpu_small.end(), 0);
      column_sums({reinterpret_cast<double*>(sums_there.view().data()), 67, 0, gpu_small}, gpu_q,
                  gpu_k, {}, {3, 1.5f}, 0.2f, multiply, *gpu_);
      copy(TensorView(gpu_sums.data(), DType::kU8, bytes), sums_there, *gpu_);
      const double most = multiply == DType::kF32 ? 1e-4 : 2e-2;
      for (size_t i = 0; i < sums.size(); ++i) EXPECT_NEAR(gpu_sums[i], sums[i], most) << i;
      const double entries = multiply == DType::kF32 ? 1 : 8;
      for (size_t i = 0; i < small.size(); ++i) EXPECT_NEAR(gpu_small[i], small[i], entries) << i;
    }
  }
}

TEST_F(SmallShapes, ScoresOfRows) {
  for (const int head_dim : {20, 128, 150}) {
    for (const int64_t n : {1, 67, 300}) {
      const DType stored = head_dim == 20 ? DType::kF32 : DType::kF16;
      std::vector<Tensor> rows;
      std::vector<StoredRows> heads;
      std::vector<StoredRows> gpu_heads;
      for (uint32_t head = 0; head < 2; ++head) {
        rows.push_back(normal_tensor(stored, {n, head_dim}, head + 1));
        heads.push_back({rows.back().view().data(), stored, n});
        rows.push_back(on_gpu(rows.back()));
        gpu_heads.push_back({rows.back().view().data(), stored, n});
      }
      std::vector<double> on_cpu(static_cast<size_t>(2 * n));
      std::vector<double> on_device(on_cpu.size());
      const auto compare = [&](const char* what, double most) {
        for (size_t i = 0; i < on_cpu.size(); ++i) {
          EXPECT_NEAR(on_device[i], on_cpu[i], most * std::abs(on_cpu[i]))
              << what << " " << i << " of " << n << " x " << head_dim;
        }
      };
      row_norms(heads, head_dim, on_cpu, cpu_);
      row_norms(gpu_heads, head_dim, on_device, *gpu_);
      compare("norm", 1e-13);
      cosines_to_mean(heads, head_dim, on_cpu, cpu_);
      cosines_to_mean(gpu_heads, head_dim, on_device, *gpu_);
      compare("cosine", 1e-9);
      for (size_t h = 0; h < heads.size(); ++h) {
        EXPECT_EQ(rows_on_host(gpu_heads[h], head_dim, *gpu_),
                  rows_on_host(heads[h], head_dim, cpu_));
      }
      const std::vector<float> frequencies = {1, 0.2f, 0.01f};
      for (const DType dtype : {DType::kF32, DType::kF16}) {
        const Tensor q = normal_tensor(dtype, {n, 6, head_dim}, 5);
        const Tensor wide = testing::make_tensor(DType::kF32, q.shape(), floats_of(q));
        for (const bool covariance : {true, false}) {
          const FutureQueries future{.first_row = n > 4 ? 4 : 0,
                                     .positions = 30,
                                     .covariance = covariance,
                                     .scale = 0.1f,
                                     .frequencies = frequencies};
          expected_attention(future, wide, heads, on_cpu, cpu_);
          expected_attention(future, on_gpu(q), gpu_heads, on_device, *gpu_);
          compare("expected attention", 1e-4);
        }
      }
    }
  }
}

// ------------------------------------------------------------------------------------ stored rows

TEST_F(SmallShapes, BasesOfKeys) {
  struct Case {
    int dim, first, rows;
  };
  for (const auto& [dim, first, rows] : {Case{20, 8, 11}, Case{150, 7, 300}}) {
    KeyBasis basis;
    basis.dim = dim;
    basis.first = first;
    const int n = dim - first;
    for (size_t i = 0; i < 3; ++i) {
      basis.matrix[i] = testing::normal_values(n * n, static_cast<uint32_t>(i));
    }
    const auto width = static_cast<size_t>(dim);
    std::vector<uint16_t> channels(width);
    std::iota(channels.rbegin(), channels.rend(), uint16_t{0});
    const Tensor x = normal_tensor(DType::kF32, {rows, dim}, 5);
    const Tensor gpu_x = on_gpu(x);
    for (const BasisChange change : {BasisChange::kKey, BasisChange::kQuery, BasisChange::kBack}) {
      Tensor y(DType::kF32, x.shape());
      Tensor gpu_y(DType::kF32, x.shape(), kGpu);
      const BasisJob job{x.as<float>(), y.as<float>(), rows, channels.data()};
      const BasisJob gpu_job{gpu_x.as<float>(), gpu_y.as<float>(), rows, channels.data()};
      change_basis(basis, change, {&job, 1}, cpu_);
      change_basis(basis, change, {&gpu_job, 1}, *gpu_);
      EXPECT_TRUE(same(gpu_y, y)) << static_cast<int>(change);
    }
    std::vector<float> low(width), high(width), gpu_low(width), gpu_high(width);
    const float* const arrays[] = {x.as<float>()};
    const float* const gpu_arrays[] = {gpu_x.as<float>()};
    channel_ends(arrays, rows, dim, low, high, cpu_);
    channel_ends(gpu_arrays, rows, dim, gpu_low, gpu_high, *gpu_);
    EXPECT_EQ(gpu_low, low);
    EXPECT_EQ(gpu_high, high);
  }
}

TEST_F(SmallShapes, RangesOfRows) {
  // Rows of 24 are read 16 bytes at a time, and the second list is of more than a block's.
  const std::vector<int32_t> few{3, 39, 0};
  std::vector<int32_t> many;
  for (int32_t i = 0; i < 70; ++i) many.push_back(i * 7 % 40);
  for (const int dim : {20, 24}) {
    const Tensor rows = normal_tensor(DType::kF16, {40, dim}, 3);
    const Tensor gpu_rows = on_gpu(rows);
    const auto run = [&](const Tensor& from, Device device, Stream& stream) {
      const auto at = [&](int row) { return from.as<std::byte>() + row * dim * 2; };
      Tensor wide(DType::kF32, {73, dim}, device);
      Tensor listed(DType::kF16, {140, dim}, device);
      auto* floats = wide.view().data();
      auto* halves = listed.view().data();
      gather_listed(
          std::vector<ListedRows>{
              {at(0), floats, few}, {at(0), floats, {}}, {at(0), floats + 12 * dim, many}},
          DType::kF16, dim, DType::kF32, stream);
      gather_listed(
          std::vector<ListedRows>{{at(0), halves, many}, {at(0), halves + 140 * dim, many}},
          DType::kF16, dim, DType::kF16, stream);
      Tensor floats_again(DType::kF32, {70, dim}, device);
      const ListedRows again{floats, floats_again.view().data(), many};
      gather_listed({&again, 1}, DType::kF32, dim, DType::kF32, stream);
      Tensor copied(DType::kF16, {40, dim}, device);
      Tensor zeros(DType::kF16, {40, dim});
      std::fill_n(zeros.view().data(), 40 * dim * 2, std::byte{0});
      copy(copied, zeros, stream);
      auto* to = copied.view().as<std::byte>();
      // Ranges of 16 bytes, of 2 and of 1.
      const std::vector<ByteRange> bytes{
          {at(2), to, 33 * 16}, {at(20), to + 601, 2}, {at(21) + 1, to + 605, 7}};
      copy_ranges(bytes, stream);
      stream.synchronize();
      return std::array{std::move(wide), std::move(copied), std::move(listed),
                        std::move(floats_again)};
    };
    const auto [wide, copied, listed, again] = run(rows, {}, cpu_);
    const auto [gpu_wide, gpu_copied, gpu_listed, gpu_again] = run(gpu_rows, kGpu, *gpu_);
    EXPECT_TRUE(same(gpu_wide, wide)) << dim;
    EXPECT_TRUE(same(gpu_copied, copied)) << dim;
    EXPECT_TRUE(same(gpu_listed, listed)) << dim;
    EXPECT_TRUE(same(gpu_again, again)) << dim;
  }
}

TEST_F(SmallShapes, MergedRows) {
  constexpr int kRows = 41;
  constexpr int kDim = 20;
  const Tensor keys = normal_tensor(DType::kF32, {kRows, kDim}, 1);
  const Tensor values = normal_tensor(DType::kF32, {kRows, kDim}, 2);
  const std::vector<int32_t> kept = {1, 3, 4, 17, 38};
  for (const int lone : {-1, 0, 1}) {  // rows at both ends; -1: none, and by features
    const MergeRule rule = lone < 0 ? MergeRule::kFeature : MergeRule::kPosition;
    const auto run = [&](const Tensor& k, const Tensor& v, Device device, Stream& stream) {
      Tensor merged(DType::kF32, {2, 5, kDim}, device);
      merge_rows(
          rule,
          {k.as<float>(), v.as<float>(), kRows, kDim, kept, merged.view().slice(0, 1).as<float>(),
           merged.view().slice(1, 1).as<float>(), std::max(0, lone), 2 * std::max(0, lone)},
          stream);
      stream.synchronize();
      return merged;
    };
    const Tensor found = run(on_gpu(keys), on_gpu(values), kGpu, *gpu_);
    EXPECT_TRUE(same(found, run(keys, values, {}, cpu_))) << lone;
  }
}

TEST_F(SmallShapes, MeansOfWeights) {
  const Tensor weights = normal_tensor(DType::kF32, {3, 50}, 1);
  const Tensor gpu_weights = on_gpu(weights);
  Tensor sums(DType::kF32, {50});
  Tensor gpu_sums(DType::kF32, {50}, kGpu);
  const float* const arrays[] = {weights.as<float>(), weights.as<float>() + 50};
  const float* const gpu_arrays[] = {gpu_weights.as<float>(), gpu_weights.as<float>() + 50};
  const MeanJob job{0, 2, 50, sums.as<float>()};
  const MeanJob gpu_job{0, 2, 50, gpu_sums.as<float>()};
  mean_arrays(arrays, {&job, 1}, cpu_);
  mean_arrays(gpu_arrays, {&gpu_job, 1}, *gpu_);
  EXPECT_LE(error(gpu_sums, sums), 1e-6);
}

TEST_F(SmallShapes, MovedRows) {
  constexpr int kPlaces = 13;
  // Rows of 16, of 4 and of 2 bytes at a time.
  for (const int64_t width : {40, 6, 5}) {
    for (const bool from_front : {false, true}) {
      Tensor ring = normal_tensor(DType::kF16, {kPlaces, width}, 1);
      Tensor gpu_ring = on_gpu(ring);
      const auto gap_of = [&](Tensor& of) {
        return RowGap{of.view().data(), static_cast<size_t>(2 * width), kPlaces, 9, 11, 4,
                      from_front};
      };
      const RowGap gap = gap_of(ring);
      const RowGap gpu_gap = gap_of(gpu_ring);
      close_gaps({&gap, 1}, cpu_);
      close_gaps({&gpu_gap, 1}, *gpu_);
      const Tensor host = on_host(gpu_ring);
      const int first = from_front ? 10 : 9;  // of the ten rows that are left
      for (int row = 0; row < 10; ++row) {
        const int64_t place = (first + row) % kPlaces;
        EXPECT_TRUE(testing::same_bits(host.view().slice(place, 1), ring.view().slice(place, 1)))
            << "row " << row << " of " << width;
      }
    }
  }
}

// ---------------------------------------------------------------------------------- other kernels

TEST_F(SmallShapes, Norms) {
  for (const int64_t dim : {7, 300}) {
    const Tensor x = normal_tensor(DType::kF32, {3, dim}, 1);
    const Tensor weight = normal_tensor(DType::kF32, {dim}, 2);
    const Tensor gpu_x = on_gpu(x);
    const Tensor gpu_weight = on_gpu(weight);
    Tensor y(DType::kF32, x.shape());
    Tensor gpu_y(DType::kF32, x.shape(), kGpu);
    rms_norm(y, x, weight, 1e-5f, cpu_);
    rms_norm(gpu_y, gpu_x, gpu_weight, 1e-5f, *gpu_);
    EXPECT_LE(error(gpu_y, y), 4e-6);
    layer_norm(y, x, weight, weight, 1e-5f, cpu_);
    layer_norm(gpu_y, gpu_x, gpu_weight, gpu_weight, 1e-5f, *gpu_);
    EXPECT_LE(error(gpu_y, y), 2e-6);
  }
}

TEST_F(SmallShapes, Sampling) {
  constexpr int64_t kVocab = 5000;  // several blocks find a maximum
  std::vector<RowSampling> rows(5);
  rows[1] = {.temperature = 1, .uniform = 0.4};
  rows[2] = {.temperature = 0.7, .top_p = 0.9, .uniform = 0.8};
  rows[3] = {.temperature = 1, .top_k = 40, .top_p = 0.5, .uniform = 0.3};
  rows[4] = {.temperature = 2, .top_k = 3, .uniform = 0.999};
  Tensor logits = normal_tensor(DType::kF32, {5, kVocab}, 1, 2);
  for (int64_t i = 0; i < kVocab; ++i) {  // ties
    logits.as<float>()[3 * kVocab + i] = std::round(logits.as<float>()[3 * kVocab + i]);
  }
  std::vector<uint32_t> seen((kVocab + 31) / 32, 0x11111111u);
  const auto words = static_cast<int64_t>(seen.size());
  Tensor gpu_seen = on_gpu(ConstTensorView(seen.data(), DType::kI32, {words}));
  rows[2].repetition_penalty = 1.3f;
  std::vector<RowSampling> gpu_rows = rows;
  rows[2].seen = seen.data();
  gpu_rows[2].seen = reinterpret_cast<uint32_t*>(gpu_seen.view().data());
  Tensor gpu_logits = on_gpu(logits);
  std::vector<int32_t> ids(5);
  std::vector<int32_t> gpu_ids(5);
  sample_rows(ids, logits, rows, cpu_);
  sample_rows(gpu_ids, gpu_logits, gpu_rows, *gpu_);
  EXPECT_EQ(gpu_ids, ids);
}

}  // namespace
}  // namespace kvlm
