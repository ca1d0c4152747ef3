// tower_bench [--device cuda] [--dtype bf16] [--repeats N] [--layers N] [--only NAME]
//
// Vision towers of released shapes with random weights: InternViT-300M over 13 tiles,
// Qwen2.5-VL-7B's tower for 1280 x 960 pixels, and each of the operations of which their layers are
// made, with the rate that they reach. What a call queues is waited for after some calls, not after
// each.

#include <fmt/format.h>

#include <chrono>
#include <cmath>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/attention.h"
#include "kernels/base/error.h"
#include "kernels/elementwise.h"
#include "kernels/fill.h"
#include "kernels/gemm.h"
#include "kernels/norm.h"
#include "kernels/qkv.h"
#include "tools/bench/statistics.h"
#include "vision/intern_vit.h"
#include "vision/patch_order.h"
#include "vision/qwen_vit.h"

namespace kvlm {
namespace {

struct Options {
  Device device;
  DType dtype = DType::kBF16;
  int repeats = 10;
  int layers = 0;  // 0: all
  std::string only;
};

using Clock = std::chrono::steady_clock;

double seconds_of(const std::function<void()>& action) {
  const Clock::time_point start = Clock::now();
  action();
  return std::chrono::duration<double>(Clock::now() - start).count();
}

class Bench {
 public:
  Bench(const Options& options, Stream& stream) : options_(options), stream_(stream) {}

  Tensor random(DType dtype, const Shape& shape, float width = 1) {
    Tensor made(dtype, shape, stream_.device());
    fill_random(made, ++seed_, width, stream_);
    stream_.synchronize();
    return made;
  }

  /// Runs `action` several times between two waits; `flops` and `bytes` are those of one call.
  void time(const std::string& name, double flops, double bytes, int calls,
            const std::function<void()>& action) {
    if (name.find(options_.only) == std::string::npos) return;
    action();
    stream_.synchronize();
    std::vector<double> us;
    for (int i = 0; i < options_.repeats; ++i) {
      us.push_back(1e6 / calls * seconds_of([&] {
                     for (int call = 0; call < calls; ++call) action();
                     stream_.synchronize();
                   }));
    }
    const Spread spread = spread_of(us);
    fmt::print("{:<44} {:>9.1f} us ({:.1f} to {:.1f})", name, spread.median, spread.min,
               spread.max);
    if (flops > 0) fmt::print(" {:>7.1f} TFLOP/s", flops / spread.median / 1e6);
    if (bytes > 0) fmt::print(" {:>6.2f} TB/s", bytes / spread.median / 1e6);
    fmt::print("\n");
  }

  void product(const std::string& name, int64_t rows, int64_t in, int64_t out,
               std::optional<Activation> activation, bool gated) {
    const DType dtype = options_.dtype;
    const Tensor x = random(dtype, {rows, in});
    const Tensor w = random(dtype, {out, in}, std::sqrt(3.0f / static_cast<float>(in)));
    const Tensor bias = random(DType::kF32, {out});
    const int64_t columns = gated ? out / 2 : out;
    Tensor y(dtype, {rows, columns}, stream_.device());
    const LinearTail tail{.bias = bias, .activation = activation, .gated = gated};
    const double flops =
        2 * static_cast<double>(rows) * static_cast<double>(in) * static_cast<double>(out);
    time(name, flops, 0, 20, [&] { linear(y, x, w, tail, stream_); });
  }

  void layer(const std::string& name, int64_t rows, int heads, int head_dim, int64_t inner,
             bool gated, bool scaled, Activation activation,
             const std::vector<std::pair<std::string, std::vector<int32_t>>>& cuts) {
    const int64_t hidden = int64_t{heads} * head_dim;
    const DType dtype = options_.dtype;
    Tensor x = random(DType::kF32, {rows, hidden});
    const Tensor weight = random(DType::kF32, {hidden});
    Tensor normed(dtype, x.shape(), stream_.device());
    const auto x_bytes = static_cast<double>(x.bytes());
    const Tensor added = random(dtype, {rows, hidden});
    const ConstTensorView scale = scaled ? weight.view() : ConstTensorView();
    const Addend addend{added, {}, scale};
    time(name + " add and norm", 0, 2 * x_bytes + 2 * static_cast<double>(normed.bytes()), 20, [&] {
      add_norm(normed, x, Residual::kSum, {&addend, 1}, weight, weight, 1e-6f, stream_);
    });
    product(name + " qkv", rows, hidden, 3 * hidden, {}, false);
    Tensor qkv = random(dtype, {rows, 3, heads, head_dim});
    if (gated) {
      const Tensor angles = random(DType::kF32, {rows, head_dim / 2});
      time(name + " rotate", 0, 4.0 / 3 * static_cast<double>(qkv.bytes()), 20,
           [&] { rotate_queries_and_keys(qkv, angles, angles, stream_); });
    }
    Tensor out(dtype, {rows, heads, head_dim}, stream_.device());
    for (const auto& [cut, bounds] : cuts) {
      const Segments segments(bounds, stream_);
      double pairs = 0;
      for (size_t i = 1; i < bounds.size(); ++i) {
        const double length = bounds[i] - bounds[i - 1];
        pairs += length * length;
      }
      time(name + " attention, " + cut, 4 * pairs * static_cast<double>(hidden),
           static_cast<double>(qkv.bytes() + out.bytes()), 20, [&] {
             segment_attention(out, qkv, segments, 1 / std::sqrt(static_cast<float>(head_dim)),
                               stream_);
           });
    }
    product(name + " out", rows, hidden, hidden, {}, false);
    product(name + " up", rows, hidden, gated ? 2 * inner : inner, activation, gated);
    product(name + " down", rows, inner, hidden, {}, false);
  }

  WeightMap weights() {
    WeightMap made;
    made.make_missing([this](std::string_view, const Shape& shape, bool wide, Device) {
      const float inputs = static_cast<float>(shape.elements() / shape[0]);
      if (shape.rank() == 1 || wide) {
        auto vector = std::make_shared<Tensor>(DType::kF32, shape);
        std::fill_n(vector->as<float>(), shape.elements(), 0.01f);
        return vector;
      }
      return std::make_shared<Tensor>(random(options_.dtype, shape, std::sqrt(3.0f / inputs)));
    });
    made.place_on(stream_);
    return made;
  }

  static VisualPatches patches(std::vector<PatchGrid> grids, int64_t columns) {
    int64_t rows = 0;
    for (const PatchGrid& grid : grids) rows += grid.patches();
    VisualPatches made{Tensor(DType::kF32, {rows, columns}), std::move(grids)};
    for (int64_t i = 0; i < rows * columns; ++i) {
      made.rows.as<float>()[i] = random_value(1, static_cast<uint64_t>(i), 1);
    }
    return made;
  }

  void towers() {
    const size_t workspace = tower_workspace_bytes(stream_.device());
    {
      InternVitConfig config;
      if (options_.layers > 0) config.layers = options_.layers;
      WeightMap all = weights();
      const auto tower = make_intern_vit(config, all, "", workspace);
      const VisualPatches picture = patches(std::vector<PatchGrid>(13, {1, 32, 32}), 588);
      const VisualPatches* pictures[] = {&picture};
      time("InternViT-300M, 13 tiles", 24 * 391e9, 0, 1,
           [&] { tower->encode(pictures, stream_, {}); });
      time("InternViT-300M, 13 tiles, 4 images in turn", 24 * 391e9, 0, 4,
           [&] { tower->encode(pictures, stream_, {}); });
    }
    QwenVitConfig config;
    config.rms_norm = true;
    config.gated_mlp = true;
    config.intermediate = 3420;
    config.activation = Activation::kSilu;
    config.window = 4;
    config.full_attention = {7, 15, 23, 31};
    if (options_.layers > 0) config.layers = options_.layers;
    WeightMap all = weights();
    QwenVit tower(config, all, "", workspace);
    const VisualPatches picture = patches({{1, 68, 92}}, 1176);
    const VisualPatches* pictures[] = {&picture};
    time("Qwen2.5-VL-7B tower, 1280 x 960", 0, 0, 1, [&] { tower.encode(pictures, stream_, {}); });
    time("Qwen2.5-VL-7B tower, 1280 x 960, 4 in turn", 0, 0, 4,
         [&] { tower.encode(pictures, stream_, {}); });
  }

  void layers() {
    std::vector<int32_t> tiles;
    for (int32_t i = 0; i <= 13; ++i) tiles.push_back(i * 1025);
    layer("InternViT-300M", 13325, 16, 64, 4096, false, true, Activation::kGelu,
          {{"13 tiles", tiles}});
    const PatchGrid grid{1, 68, 92};
    const WindowOrder windows = window_order({&grid, 1}, 2, 4);
    layer("Qwen2.5-VL", 6256, 16, 80, 3424, true, false, Activation::kSilu,
          {{"windows", windows.bounds}, {"all", {0, 6256}}});
    const double rate = 2.0 * 8192 * 8192 * 8192;
    const Tensor a = random(options_.dtype, {8192, 8192});
    const Tensor b = random(options_.dtype, {8192, 8192});
    Tensor y(options_.dtype, {8192, 8192}, stream_.device());
    time("8192 x 8192 x 8192", rate, 0, 5, [&] { linear(y, a, b, LinearTail{}, stream_); });
  }

 private:
  const Options& options_;
  Stream& stream_;
  uint64_t seed_ = 0;
};

int run(int argc, char** argv) {
  Options options;
  options.device = {DeviceKind::kCuda, 0};
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string_view name = argv[i];
    const std::string value = argv[i + 1];
    if (name == "--device")
      options.device.kind = value == "cpu" ? DeviceKind::kCpu : DeviceKind::kCuda;
    if (name == "--dtype") {
      options.dtype = value == "f32" ? DType::kF32 : value == "f16" ? DType::kF16 : DType::kBF16;
    }
    if (name == "--repeats") options.repeats = std::stoi(value);
    if (name == "--layers") options.layers = std::stoi(value);
    if (name == "--only") options.only = value;
  }
  ThreadPool pool;
  Stream stream(pool, options.device);
  Bench bench(options, stream);
  bench.towers();
  if (options.dtype != DType::kF32 && options.device.kind != DeviceKind::kCpu) bench.layers();
  return 0;
}

}  // namespace
}  // namespace kvlm

int main(int argc, char** argv) {
  try {
    return kvlm::run(argc, argv);
  } catch (const kvlm::Error& error) {
    fmt::print(stderr, "tower_bench: {}\n", error.what());
    return 1;
  }
}
