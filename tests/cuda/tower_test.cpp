// What vision towers compute with: attention inside segments, products with tails, rows of tiles;
// then whole towers in every format, against the CPU in f32.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "kernels/attention.h"
#include "kernels/byte_values.h"
#include "kernels/elementwise.h"
#include "kernels/gemm.h"
#include "kernels/qkv.h"
#include "kernels/rope.h"
#include "kernels/tile_rows.h"
#include "tests/cuda/fixture.h"
#include "vision/intern_vit.h"
#include "vision/qwen_vit.h"

namespace kvlm {
namespace {

using testing::Cuda;
using testing::kGpu;
using testing::make_tensor;
using testing::normal_tensor;

class Towers : public Cuda {
 protected:
  Tensor poison(DType dtype, const Shape& shape) {
    const auto count = static_cast<size_t>(shape.elements());
    return on_gpu(make_tensor(dtype, shape, std::vector<float>(count, std::nanf(""))));
  }
  /// What f32 rows become in `dtype`, as f32.
  static Tensor rounded(const Tensor& x, DType dtype) {
    const auto values = testing::values_of(x);
    const std::vector<float> floats(values.begin(), values.end());
    const Tensor halves = make_tensor(dtype, x.shape(), floats);
    const auto back = testing::values_of(halves);
    return make_tensor(DType::kF32, x.shape(), std::vector<float>(back.begin(), back.end()));
  }
};

constexpr DType kHalves[] = {DType::kF16, DType::kBF16};

double tolerance(DType dtype) {
  return dtype == DType::kF16 ? 2e-3 : dtype == DType::kBF16 ? 1.5e-2 : 1e-5;
}

// ------------------------------------------------------------------------------------- attention

const std::vector<std::vector<int32_t>>& cuts() {
  static const std::vector<std::vector<int32_t>> all = {
      {0, 1},
      {0, 64, 128, 160, 176},
      {0, 7, 208, 209, 300},
      {0, 577, 1154},
      {0, 1025, 2050, 3075},
      {0, 64, 128, 192, 256, 320, 384, 448, 512, 576, 640, 704, 768, 832, 860},
  };
  return all;
}

class SegmentsOnGpu : public Towers {};

TEST_F(SegmentsOnGpu, AttendAsOnTheCpu) {
  for (const int head_dim : {5, 16, 32, 64, 72, 80, 96, 128, 200}) {
    for (const auto& bounds : cuts()) {
      const int heads = bounds.back() > 1000 ? 2 : 3;
      if (bounds.back() > 2000 && head_dim != 64 && head_dim != 80) continue;
      const Shape shape{bounds.back(), heads, head_dim};
      const Tensor q = normal_tensor(DType::kF32, shape, 1);
      const Tensor k = normal_tensor(DType::kF32, shape, 2);
      const Tensor v = normal_tensor(DType::kF32, shape, 3);
      const float scale = 1 / std::sqrt(static_cast<float>(head_dim));
      Tensor expected(DType::kF32, shape);
      segment_attention(expected, q, k, v, Segments(bounds, cpu_), scale, DType::kF32, cpu_);
      const Segments segments(bounds, *gpu_);
      for (const DType multiply : {DType::kF32, DType::kF16, DType::kBF16}) {
        Tensor out = poison(DType::kF32, shape);
        segment_attention(out, on_gpu(q), on_gpu(k), on_gpu(v), segments, scale, multiply, *gpu_);
        EXPECT_LE(error(out, expected), tolerance(multiply))
            << head_dim << " channels, " << bounds.back() << " rows, " << dtype_name(multiply);
      }
    }
  }
}

TEST_F(SegmentsOnGpu, AttendToWhatOneProductMade) {
  for (const int head_dim : {8, 16, 32, 64, 72, 80, 104, 128, 192, 256}) {
    for (const auto& bounds : cuts()) {
      if (bounds.back() > 2000 && head_dim != 64 && head_dim != 80) continue;
      for (const DType dtype : kHalves) {
        constexpr int kHeads = 2;
        const int64_t n = bounds.back();
        const Shape shape{n, kHeads, head_dim};
        const Tensor qkv = normal_tensor(dtype, {n, 3, kHeads, head_dim}, 4);
        Tensor parts[3];
        for (int part = 0; part < 3; ++part) {
          parts[part] = Tensor(DType::kF32, shape);
          const auto values = testing::values_of(qkv);
          const int64_t width = int64_t{kHeads} * head_dim;
          for (int64_t i = 0; i < n * width; ++i) {
            parts[part].as<float>()[i] = static_cast<float>(
                values[static_cast<size_t>((i / width * 3 + part) * width + i % width)]);
          }
        }
        const float scale = 1 / std::sqrt(static_cast<float>(head_dim));
        Tensor expected(DType::kF32, shape);
        segment_attention(expected, parts[0], parts[1], parts[2], Segments(bounds, cpu_), scale,
                          DType::kF32, cpu_);
        Tensor out = poison(dtype, shape);
        segment_attention(out, on_gpu(qkv), Segments(bounds, *gpu_), scale, *gpu_);
        EXPECT_LE(error(out, expected), tolerance(dtype))
            << head_dim << " channels, " << n << " rows, " << dtype_name(dtype);
      }
    }
  }
}

/// A segment is what it is alone, whatever is beside it, bit for bit.
TEST_F(SegmentsOnGpu, AreIndependentOfTheirCompany) {
  for (const int head_dim : {64, 80}) {
    for (const DType dtype : kHalves) {
      const std::vector<int32_t> bounds = {0, 40, 617, 681, 2706};
      const Shape shape{bounds.back(), 3, 4, head_dim};
      const Tensor qkv = on_gpu(normal_tensor(dtype, shape, 5));
      Tensor together(dtype, {bounds.back(), 4, head_dim}, kGpu);
      segment_attention(together, qkv, Segments(bounds, *gpu_), 0.2f, *gpu_);
      for (size_t i = 0; i + 1 < bounds.size(); ++i) {
        const int32_t rows = bounds[i + 1] - bounds[i];
        const int32_t own[] = {0, rows};
        Tensor alone(dtype, {rows, 4, head_dim}, kGpu);
        segment_attention(alone, qkv.view().slice(bounds[i], rows), Segments(own, *gpu_), 0.2f,
                          *gpu_);
        EXPECT_TRUE(testing::same_bits(on_host(alone).view(),
                                       on_host(together.view().slice(bounds[i], rows)).view()))
            << head_dim << " channels, segment " << i;
      }
    }
  }
}

/// Nor do infinities that are read beside its last keys.
TEST_F(SegmentsOnGpu, DoNotSeeInfinitiesBehindThem) {
  for (const int head_dim : {64, 80}) {
    for (const DType dtype : kHalves) {
      for (const int32_t rows : {1, 63, 65, 577, 2048}) {
        const Shape shape{rows + 100, 3, 4, head_dim};
        const Tensor plain = normal_tensor(dtype, shape, 9);
        const auto values = testing::values_of(plain);
        std::vector<float> wild(values.begin(), values.end());
        std::fill(wild.begin() + int64_t{rows} * 12 * head_dim, wild.end(),
                  std::numeric_limits<float>::infinity());
        const int32_t bounds[] = {0, rows, rows + 100};
        Tensor tame(dtype, {rows + 100, 4, head_dim}, kGpu);
        Tensor out(dtype, {rows + 100, 4, head_dim}, kGpu);
        segment_attention(tame, on_gpu(plain), Segments(bounds, *gpu_), 0.2f, *gpu_);
        segment_attention(out, on_gpu(make_tensor(dtype, shape, wild)), Segments(bounds, *gpu_),
                          0.2f, *gpu_);
        EXPECT_TRUE(testing::same_bits(on_host(tame.view().slice(0, rows)).view(),
                                       on_host(out.view().slice(0, rows)).view()))
            << head_dim << " channels, " << rows << " rows";
      }
    }
  }
}

TEST_F(SegmentsOnGpu, MayOverwriteTheirQueries) {
  const std::vector<int32_t> bounds = {0, 100, 164};
  const Shape shape{164, 2, 80};
  const Tensor q = normal_tensor(DType::kF32, shape, 6);
  const Tensor k = on_gpu(normal_tensor(DType::kF32, shape, 7));
  const Tensor v = on_gpu(normal_tensor(DType::kF32, shape, 8));
  for (const DType multiply : {DType::kF32, DType::kBF16}) {
    Tensor apart(DType::kF32, shape, kGpu);
    segment_attention(apart, on_gpu(q), k, v, Segments(bounds, *gpu_), 0.1f, multiply, *gpu_);
    Tensor in_place = on_gpu(q);
    segment_attention(in_place, in_place, k, v, Segments(bounds, *gpu_), 0.1f, multiply, *gpu_);
    EXPECT_EQ(error(in_place, on_host(apart)), 0);
  }
}

// ------------------------------------------------------------------------------ queries and keys

TEST_F(Towers, TurnAndNormQueriesAndKeysInsideTheirProduct) {
  constexpr int64_t kRows = 33;
  constexpr int64_t kHeads = 3;
  constexpr int64_t kDim = 40;
  const Tensor cos = normal_tensor(DType::kF32, {kRows, kDim / 2}, 1);
  const Tensor sin = normal_tensor(DType::kF32, {kRows, kDim / 2}, 2);
  const Tensor q_weight = normal_tensor(DType::kF32, {kHeads * kDim}, 3);
  const Tensor k_weight = normal_tensor(DType::kF32, {kHeads * kDim}, 4);
  for (const DType dtype : kHalves) {
    const Tensor qkv = normal_tensor(dtype, {kRows, 3, kHeads, kDim}, 5);
    const auto values = testing::values_of(qkv);
    const int64_t width = kHeads * kDim;
    std::vector<float> turned(values.begin(), values.end());
    std::vector<float> normed = turned;
    for (int64_t row = 0; row < kRows; ++row) {
      for (int64_t part = 0; part < 2; ++part) {
        const int64_t first = (row * 3 + part) * width;
        double squares = 0;
        for (int64_t i = 0; i < width; ++i) {
          const double x = values[static_cast<size_t>(first + i)];
          squares += x * x;
        }
        const double inverse = 1 / std::sqrt(squares / static_cast<double>(width) + 1e-6);
        for (int64_t i = 0; i < width; ++i) {
          const auto at = static_cast<size_t>(first + i);
          const float weight = (part == 0 ? q_weight : k_weight).as<float>()[i];
          normed[at] = static_cast<float>(values[at] * inverse) * weight;
          const int64_t channel = i % kDim;
          const int64_t half = kDim / 2;
          const float c = cos.as<float>()[row * half + channel % half];
          const float s = sin.as<float>()[row * half + channel % half];
          const double other = values[channel < half ? at + kDim / 2 : at - kDim / 2];
          turned[at] = static_cast<float>(values[at] * c + (channel < half ? -other : other) * s);
        }
      }
    }
    Tensor rotated = on_gpu(qkv);
    rotate_queries_and_keys(rotated, on_gpu(cos), on_gpu(sin), *gpu_);
    EXPECT_LE(error(rotated, make_tensor(DType::kF32, qkv.shape(), turned)), tolerance(dtype));
    Tensor scaled = on_gpu(qkv);
    norm_queries_and_keys(scaled, on_gpu(q_weight), on_gpu(k_weight), 1e-6f, *gpu_);
    EXPECT_LE(error(scaled, make_tensor(DType::kF32, qkv.shape(), normed)), tolerance(dtype));
  }
}

// ----------------------------------------------------------------------------- products with tails

struct TailCase {
  const char* name;
  bool bias, scale, add, gated;
  std::optional<Activation> activation;
};

TEST_F(Towers, FinishProductsAsTheCpuDoes) {
  const TailCase cases[] = {
      {"bias", true, false, false, false, {}},
      {"nothing", false, false, false, false, {}},
      {"gelu", true, false, false, false, Activation::kGelu},
      {"tanh", true, false, false, false, Activation::kGeluTanh},
      {"quick", true, false, false, false, Activation::kQuickGelu},
      {"add", true, false, true, false, {}},
      {"scale", true, true, true, false, {}},
      {"gated", true, false, false, true, Activation::kSilu},
  };
  struct Size {
    int64_t rows, in, out;
  };
  for (const Size& size : {Size{1, 64, 32},
                           {3, 40, 48},
                           {70, 64, 96},
                           {257, 72, 160},
                           {1025, 1024, 1024},
                           {300, 1280, 6848},
                           {130, 20, 12}}) {
    const Tensor x = normal_tensor(DType::kF32, {size.rows, size.in}, 1);
    const Tensor w = normal_tensor(DType::kF32, {size.out, size.in}, 2, 0.1f);
    const Tensor bias = normal_tensor(DType::kF32, {size.out}, 3);
    for (const TailCase& tail : cases) {
      const int64_t columns = tail.gated ? size.out / 2 : size.out;
      const Tensor scale = normal_tensor(DType::kF32, {columns}, 4);
      const Tensor before = normal_tensor(DType::kF32, {size.rows, columns}, 5);
      const auto tail_of = [&](ConstTensorView a, ConstTensorView b) {
        LinearTail made;
        if (tail.bias) made.bias = a;
        if (tail.scale) made.scale = b;
        made.activation = tail.activation;
        made.gated = tail.gated;
        made.add = tail.add;
        return made;
      };
      for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
        const Tensor x_used = rounded(x, dtype);
        const Tensor w_used = rounded(w, dtype);
        Tensor expected(DType::kF32, before.shape());
        copy(expected, before, cpu_);
        linear(expected, x_used, w_used, tail_of(bias, scale), cpu_);
        Tensor w_gpu(dtype, w.shape(), kGpu);
        convert(w_gpu, on_gpu(w), *gpu_);
        gpu_->synchronize();
        const Tensor bias_gpu = on_gpu(bias);
        const Tensor scale_gpu = on_gpu(scale);
        for (const DType made : {DType::kF32, dtype}) {
          if (made != DType::kF32 && tail.add) continue;
          Tensor x_gpu(made, x.shape(), kGpu);  // rows as they come from what was before
          convert(x_gpu, on_gpu(x_used), *gpu_);
          Tensor y = tail.add ? on_gpu(before) : poison(made, before.shape());
          linear(y, x_gpu, w_gpu, tail_of(bias_gpu, scale_gpu), *gpu_);
          EXPECT_LE(error(y, expected), tolerance(dtype) * (dtype == DType::kF32 ? 10 : 1))
              << tail.name << ": " << size.rows << " x " << size.in << " x " << size.out << ", "
              << dtype_name(dtype) << " to " << dtype_name(made);
        }
      }
    }
  }
}

/// GELU of halves has a formula of its own: within the rounding of its result for every half.
TEST_F(Towers, ActivateEveryHalf) {
  constexpr int64_t kHalvesThereAre = 1 << 16;
  constexpr int64_t kColumns = 16;
  Tensor identity(DType::kF32, {kColumns, kColumns});
  std::memset(identity.view().data(), 0, identity.bytes());
  for (int64_t i = 0; i < kColumns; ++i) identity.as<float>()[i * (kColumns + 1)] = 1;
  for (const DType dtype : kHalves) {
    Tensor x(dtype, {kHalvesThereAre, kColumns});
    std::memset(x.view().data(), 0, x.bytes());
    auto* bits = reinterpret_cast<uint16_t*>(x.view().data());
    for (int64_t i = 0; i < kHalvesThereAre; ++i) bits[i * kColumns] = static_cast<uint16_t>(i);
    Tensor w(dtype, identity.shape(), kGpu);
    convert(w, on_gpu(identity), *gpu_);
    Tensor y(dtype, x.shape(), kGpu);
    linear(y, on_gpu(x), w, LinearTail{.activation = Activation::kGelu}, *gpu_);
    const Tensor made = on_host(y);
    const auto values = testing::values_of(x);
    const auto results = testing::values_of(made);
    const bool fine = dtype == DType::kF16;
    for (size_t i = 0; i < values.size(); i += kColumns) {
      const auto value = static_cast<double>(values[i]);
      const auto result = static_cast<double>(results[i]);
      if (std::isnan(value)) {
        EXPECT_TRUE(std::isnan(result)) << "of NaN";
      } else if (std::isinf(value)) {
        EXPECT_EQ(result, value > 0 ? value : 0);
      } else {
        const double expected = 0.5 * value * std::erfc(-value * std::sqrt(0.5));
        EXPECT_NEAR(result, expected,
                    std::abs(expected) * (fine ? 0x1p-11 : 0x1p-8) + (fine ? 3e-7 : 8e-7))
            << dtype_name(dtype) << " of " << value;
      }
    }
  }
}

/// A row is what it is alone, whatever is beside it, bit for bit: pictures are encoded together.
TEST_F(Towers, RowsOfLongProductsDoNotDependOnTheirCompany) {
  for (const DType dtype : kHalves) {
    Tensor x(dtype, {3075, 1024}, kGpu);
    convert(x, on_gpu(normal_tensor(DType::kF32, x.shape(), 1)), *gpu_);
    Tensor w(dtype, {4096, 1024}, kGpu);
    convert(w, on_gpu(normal_tensor(DType::kF32, w.shape(), 2)), *gpu_);
    const Tensor bias = on_gpu(normal_tensor(DType::kF32, {4096}, 3));
    gpu_->synchronize();
    const LinearTail tail{.bias = bias, .activation = Activation::kGelu};
    Tensor together(dtype, {3075, 4096}, kGpu);
    linear(together, x, w, tail, *gpu_);
    Tensor alone(dtype, {1025, 4096}, kGpu);
    linear(alone, x.view().slice(1025, 1025), w, tail, *gpu_);
    EXPECT_TRUE(testing::same_bits(on_host(alone).view(),
                                   on_host(together.view().slice(1025, 1025)).view()));
  }
}

// ---------------------------------------------------------------------------------- rows of tiles

TEST_F(Towers, PlaceAndTakeTilesAsOnTheCpu) {
  for (const int64_t dim : {7, 64}) {
    for (const bool with_class : {false, true}) {
      constexpr int64_t kTiles = 3;
      const int64_t first = with_class ? 1 : 0;
      const Tensor patches = normal_tensor(DType::kF32, {kTiles * 9, dim}, 1);
      const Tensor token = normal_tensor(DType::kF32, {1, dim}, 2);
      const Tensor positions = normal_tensor(DType::kF32, {9 + first, dim}, 3);
      const Shape shape{kTiles * (9 + first), dim};
      Tensor x(DType::kF32, shape);
      scatter_tiles(x, patches, with_class ? token.view() : ConstTensorView(), positions, cpu_);
      Tensor gpu_x = poison(DType::kF32, shape);
      const Tensor gpu_token = on_gpu(token);
      scatter_tiles(gpu_x, on_gpu(patches), with_class ? gpu_token.view() : ConstTensorView(),
                    on_gpu(positions), *gpu_);
      EXPECT_EQ(error(gpu_x, x), 0);
      Tensor taken = normal_tensor(DType::kF32, {kTiles * 9, dim + 4}, 4);
      Tensor gpu_taken = on_gpu(taken);
      take_tiles(taken, 4, x, 9 + first, first, cpu_);
      take_tiles(gpu_taken, 4, gpu_x, 9 + first, first, *gpu_);
      EXPECT_EQ(error(gpu_taken, taken), 0);
    }
  }
}

TEST_F(Towers, UploadRowsInAnyFormat) {
  for (const int64_t rows : {1, 5, 5000}) {
    const Tensor from = normal_tensor(DType::kF32, {rows, 588}, 1);
    for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
      for (const int64_t width : {588, 592}) {
        Tensor to = poison(dtype, {rows, width});
        upload_rows(to, from, *gpu_);
        const Tensor used = rounded(from, dtype);
        std::vector<float> expected(static_cast<size_t>(rows * width));
        for (int64_t i = 0; i < rows * 588; ++i) {
          expected[static_cast<size_t>(i / 588 * width + i % 588)] = used.as<float>()[i];
        }
        EXPECT_EQ(error(to, make_tensor(DType::kF32, to.shape(), expected)), 0);
      }
    }
  }
}

TEST_F(Towers, PlaceBytesAsOnTheCpu) {
  for (const int64_t rows : {1, 5, 3000, 16000}) {
    for (const int64_t columns : {588, 1176, 3}) {
      if (rows * columns > 10'000'000) continue;
      Tensor from(DType::kU8, {rows, columns});
      for (int64_t i = 0; i < rows * columns; ++i) {
        from.as<uint8_t>()[i] = static_cast<uint8_t>(i * 37 + i / 256);
      }
      const Tensor values = normal_tensor(DType::kF32, {3, 256}, 1);
      for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
        for (const int64_t width : {columns, columns + 4, columns + 5}) {
          Tensor expected(dtype, {rows, width});
          place_bytes(expected, from, values, cpu_);
          Tensor to = poison(dtype, expected.shape());
          place_bytes(to, from, values, *gpu_);
          EXPECT_TRUE(testing::same_bits(on_host(to).view(), expected.view()))
              << rows << " rows of " << columns << " as " << width << " " << dtype_name(dtype);
        }
      }
    }
  }
}

// ----------------------------------------------------------------------------------------- towers

/// Random weights of one dtype, the same on every device.
void fill_weights(WeightMap& weights, DType dtype) {
  weights.make_missing([dtype](std::string_view name, const Shape& shape, bool wide, Device) {
    uint32_t seed = 7;
    for (const char letter : name) seed = seed * 31 + static_cast<uint8_t>(letter);
    const DType kept = wide ? DType::kF32 : dtype;
    const bool norm = shape.rank() == 1 && !name.ends_with("bias");
    const float inputs = static_cast<float>(shape.elements() / shape[0]);
    Tensor made =
        normal_tensor(kept, shape, seed, shape.rank() == 1 ? 0.1f : 1 / std::sqrt(inputs));
    if (norm) {
      for (int64_t i = 0; i < shape.elements(); ++i) made.as<float>()[i] += 1;
    }
    return std::make_shared<Tensor>(std::move(made));
  });
}

/// The least cosine of a row of `a` with that of `b`.
double least_cosine(ConstTensorView a, ConstTensorView b) {
  const auto x = testing::values_of(a);
  const auto y = testing::values_of(b);
  const auto width = static_cast<size_t>(a.shape()[1]);
  double least = 1;
  for (size_t row = 0; row < x.size() / width; ++row) {
    double xy = 0, xx = 0, yy = 0;
    for (size_t i = row * width; i < (row + 1) * width; ++i) {
      xy += x[i] * y[i], xx += x[i] * x[i], yy += y[i] * y[i];
    }
    least = std::min(least, xy / std::sqrt(xx * yy));
  }
  return least;
}

/// What the taps of a tower see, in their order; of a device on the host.
using Taps = std::vector<std::pair<std::string, Tensor>>;

VisionTap collect(Taps& taps, Stream& stream) {
  return [&taps, &stream](std::string_view name, ConstTensorView view) {
    Tensor copied(view.dtype(), view.shape());
    copy(copied, view, stream);
    stream.synchronize();
    taps.emplace_back(name, std::move(copied));
  };
}

VisualPatches patches_of(std::vector<PatchGrid> grids, int64_t columns, uint32_t seed) {
  int64_t rows = 0;
  for (const PatchGrid& grid : grids) rows += grid.patches();
  return {normal_tensor(DType::kF32, {rows, columns}, seed), std::move(grids)};
}

TEST_F(Towers, OfTilesAgreeWithTheCpu) {
  for (const bool large : {false, true}) {
    InternVitConfig config;
    config.hidden = 128;
    config.intermediate = 300;  // to be filled up
    config.layers = 3;
    config.heads = 2;
    config.image_size = 70;
    config.patch_size = 14;
    if (large) {  // as InternViT-6B
      config.norm = VitConfig::Norm::kRms;
      config.qkv_bias = false;
      config.qk_norm = true;
    }
    const VisualPatches one = patches_of({{1, 5, 5}}, 588, 1);
    const VisualPatches three = patches_of({{1, 5, 5}, {1, 5, 5}, {1, 5, 5}}, 588, 2);
    const VisualPatches* both[] = {&one, &three};
    for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
      WeightMap host;
      fill_weights(host, dtype);
      const auto expected = make_intern_vit(config, host, "", 0)->encode(both, cpu_, {});
      WeightMap placed;
      fill_weights(placed, dtype);
      placed.place_on(*gpu_);
      const auto tower = make_intern_vit(config, placed, "", size_t{256} << 20);
      const Tensor found = on_host(tower->encode(both, *gpu_, {}));
      EXPECT_GE(least_cosine(found, expected), dtype == DType::kF32 ? 0.999999 : 0.999)
          << dtype_name(dtype);
      if (dtype == DType::kF32) continue;
      const VisualPatches* last[] = {&three};
      const Tensor alone = on_host(tower->encode(last, *gpu_, {}));
      EXPECT_TRUE(testing::same_bits(alone.view(), found.view().slice(25, 75)));
    }
  }
}

TEST_F(Towers, OfAnySizeAgreeWithTheCpu) {
  for (const bool windows : {false, true}) {
    QwenVitConfig config;
    config.hidden = 160;
    config.intermediate = 212;  // to be filled up
    config.layers = 4;
    config.heads = 2;
    config.out = 96;
    if (windows) {
      config.rms_norm = true;
      config.gated_mlp = true;
      config.activation = Activation::kSilu;
      config.window = 4;
      config.full_attention = {2};
    } else {
      config.patch_bias = true;
      config.position_side = 12;
      config.activation = Activation::kGeluTanh;
      config.deepstack = {1};
      config.linear_names = true;
    }
    const VisualPatches picture = patches_of({{1, 18, 22}}, 1176, 1);
    const VisualPatches clip = patches_of({{3, 4, 6}}, 1176, 2);
    const VisualPatches* both[] = {&picture, &clip};
    for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
      WeightMap host;
      fill_weights(host, dtype);
      QwenVit reference(config, host, "", 0);
      const QwenFeatures expected = reference.encode(both, cpu_, {});
      WeightMap placed;
      fill_weights(placed, dtype);
      placed.place_on(*gpu_);
      QwenVit tower(config, placed, "", size_t{256} << 20);
      // One picture, so that both encode it as one split; the first tap that differs is named.
      for (const VisualPatches* alone : both) {
        Taps expected_taps;
        Taps found_taps;
        reference.encode({&alone, 1}, cpu_, collect(expected_taps, cpu_));
        tower.encode({&alone, 1}, *gpu_, collect(found_taps, *gpu_));
        ASSERT_EQ(found_taps.size(), expected_taps.size());
        for (size_t i = 0; i < found_taps.size(); ++i) {
          EXPECT_EQ(found_taps[i].first, expected_taps[i].first);
          EXPECT_GE(least_cosine(found_taps[i].second, expected_taps[i].second),
                    dtype == DType::kF32 ? 0.999999 : 0.999)
              << dtype_name(dtype) << " " << found_taps[i].first << " of "
              << alone->grids.front().patches() << " patches";
        }
      }
      const QwenFeatures found = tower.encode(both, *gpu_, {});
      const double least = dtype == DType::kF32 ? 0.999999 : 0.999;
      EXPECT_GE(least_cosine(on_host(found.rows), expected.rows), least) << dtype_name(dtype);
      for (size_t i = 0; i < found.deepstack.size(); ++i) {
        EXPECT_GE(least_cosine(on_host(found.deepstack[i]), expected.deepstack[i]), least);
      }
    }
  }
}

}  // namespace
}  // namespace kvlm
