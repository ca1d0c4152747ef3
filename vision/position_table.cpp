#include "vision/position_table.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>

#include "kernels/base/error.h"

// Learned positions of a square grid for a picture of another size: each sample is a weighted sum
// of the table's, linear or cubic, with torch's coefficients.
namespace kvlm {

namespace {

/// Keys' kernel within a sample of the point, and between one and two samples from it; torch's
/// orders of operations.
float cubic_near(float x) {
  constexpr float kA = -0.75f;
  return ((kA + 2) * x - (kA + 3)) * x * x + 1;
}
float cubic_far(float x) {
  constexpr float kA = -0.75f;
  return ((kA * x - 5 * kA) * x + 8 * kA) * x - 4 * kA;
}

/// The two samples around point i of `output` along the table's axis, corners on corners.
struct Corners {
  std::array<int32_t, 2> indices;
  std::array<float, 2> weights;
};

Corners corners_at(int i, int output, int side) {
  const float at = static_cast<float>(i) * static_cast<float>(side - 1) /
                   static_cast<float>(std::max(output - 1, 1));
  const float low = std::floor(at);
  const float past = at - low;
  const auto index = static_cast<int32_t>(low);
  // The second weight is 1 - |past - 1| in the reference, which rounds twice.
  return {{std::min(index, side - 1), std::min(index + 1, side - 1)},
          {1 - past, 1 - std::abs(past - 1)}};
}

}  // namespace

AxisTaps interpolation_axis(int input, int output, Interpolation interpolation) {
  constexpr int kMost = 1 << 24;  // whole numbers are exact in float
  if (input < 1 || output < 1 || input > kMost || output > kMost) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("an axis of {} samples cannot be resampled to {}; expected 1 to {}",
                            input, output, kMost));
  }
  const bool cubic = interpolation == Interpolation::kBicubic;
  AxisTaps axis;
  axis.taps = cubic ? 4 : 2;
  axis.indices.reserve(static_cast<size_t>(output) * static_cast<size_t>(axis.taps));
  axis.weights.reserve(axis.indices.capacity());
  const auto add = [&](int32_t index, float weight) {
    axis.indices.push_back(std::clamp(index, 0, input - 1));
    axis.weights.push_back(weight);
  };
  const float scale = static_cast<float>(input) / static_cast<float>(output);
  for (int i = 0; i < output; ++i) {
    const float at = scale * (static_cast<float>(i) + 0.5f) - 0.5f;
    if (cubic) {
      const float low = std::floor(at);
      const float past = at - low;
      const auto index = static_cast<int32_t>(low);
      add(index - 1, cubic_far(past + 1));
      add(index, cubic_near(past));
      add(index + 1, cubic_near(1 - past));
      add(index + 2, cubic_far(1 - past + 1));
    } else if (input == output) {
      add(i, 1);
      add(i, 0);
    } else {
      const float inside = std::max(at, 0.0f);
      const auto index = std::min(static_cast<int32_t>(inside), input - 1);
      const float past = std::clamp(inside - static_cast<float>(index), 0.0f, 1.0f);
      add(index, 1 - past);
      add(index + 1, past);
    }
  }
  return axis;
}

RowBlend learned_positions(int side, const PatchGrid& grid, int merge) {
  constexpr int kMostSide = 46340;  // its square still fits
  if (side < 1 || side > kMostSide) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("a table of {} x {} positions cannot be used; expected 1 to {}: check "
                            "num_position_embeddings in config.json",
                            side, side, kMostSide));
  }
  check_merge(grid, merge);
  std::vector<Corners> down, across;
  for (int row = 0; row < grid.rows; ++row) down.push_back(corners_at(row, grid.rows, side));
  for (int column = 0; column < grid.columns; ++column) {
    across.push_back(corners_at(column, grid.columns, side));
  }
  RowBlend blend;
  blend.terms = 4;
  blend.indices.reserve(static_cast<size_t>(grid.patches()) * 4);
  blend.weights.reserve(blend.indices.capacity());
  for (int slice = 0; slice < grid.slices; ++slice) {
    for_each_place(grid, merge, [&](int row, int column) {
      const Corners& y = down[static_cast<size_t>(row)];
      const Corners& x = across[static_cast<size_t>(column)];
      for (size_t dy = 0; dy < 2; ++dy) {
        for (size_t dx = 0; dx < 2; ++dx) {
          blend.indices.push_back(y.indices[dy] * side + x.indices[dx]);
          blend.weights.push_back(y.weights[dy] * x.weights[dx]);
        }
      }
    });
  }
  return blend;
}

Tensor resample_positions(ConstTensorView table, int side, int rows, int columns,
                          Interpolation interpolation) {
  const AxisTaps down = interpolation_axis(side, rows, interpolation);
  const AxisTaps across = interpolation_axis(side, columns, interpolation);
  if (table.dtype() != DType::kF32 || table.device().kind != DeviceKind::kCpu ||
      table.shape().rank() != 2 || table.shape()[0] != int64_t{side} * side) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("a table of {} x {} positions has a row for each in f32 on the CPU, "
                            "found shape {}",
                            side, side, table.shape().str()));
  }
  const auto dim = static_cast<size_t>(table.shape()[1]);
  const auto taps = static_cast<size_t>(down.taps);
  Tensor out(DType::kF32, {int64_t{rows} * columns, table.shape()[1]});
  float* to = out.as<float>();
  std::vector<float> line(dim);
  for (size_t row = 0; row < static_cast<size_t>(rows); ++row) {
    for (size_t column = 0; column < static_cast<size_t>(columns); ++column, to += dim) {
      // Along the columns first, then down, as torch nests them.
      std::fill_n(to, dim, 0.0f);
      for (size_t v = 0; v < taps; ++v) {
        const auto from_row = static_cast<size_t>(down.indices[row * taps + v]);
        std::ranges::fill(line, 0.0f);
        for (size_t u = 0; u < taps; ++u) {
          const auto from_column = static_cast<size_t>(across.indices[column * taps + u]);
          const float* from =
              table.as<float>() + (from_row * static_cast<size_t>(side) + from_column) * dim;
          const float weight = across.weights[column * taps + u];
          for (size_t i = 0; i < dim; ++i) line[i] += weight * from[i];
        }
        const float weight = down.weights[row * taps + v];
        for (size_t i = 0; i < dim; ++i) to[i] += weight * line[i];
      }
    }
  }
  return out;
}

}  // namespace kvlm
