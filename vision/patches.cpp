#include "vision/patches.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <string>

#include "kernels/base/error.h"
#include "kernels/byte_values.h"
#include "kernels/elementwise.h"
#include "vision/smart_resize.h"

namespace kvlm {

namespace {

void check_frames(std::span<const Image> frames) {
  if (frames.empty()) {
    throw Error(ErrorCode::kInvalidArgument, "a video without frames has no patches");
  }
  const Image& first = frames.front();
  for (const Image& frame : frames) {
    if (frame.height == first.height && frame.width == first.width) continue;
    const auto named = [](const Image& image) {
      return image.name.empty() ? std::string("a frame") : image.name;
    };
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("{} is {} x {} pixels, but {} before it {} x {}; expected the frames "
                            "of a video to be of one size",
                            named(frame), frame.width, frame.height, named(first), first.width,
                            first.height));
  }
}

/// Writes one channel of one patch, of which the first byte is at `from`.
void write_square(const uint8_t* from, size_t line_bytes, size_t patch, uint8_t* to) {
  for (size_t dy = 0; dy < patch; ++dy, from += line_bytes) {
    for (size_t dx = 0; dx < patch; ++dx) to[dx] = from[3 * dx];
    to += patch;
  }
}

int64_t columns_of(const PatchLayout& layout) {
  return int64_t{3} * layout.depth * layout.patch * layout.patch;
}

Tensor values_of(const NormalizationTable& table) {
  Tensor values(DType::kF32, {3, 256});
  float* to = values.as<float>();
  for (const auto& channel : table) to = std::ranges::copy(channel, to).out;
  return values;
}

}  // namespace

PatchGrid patches_of(int frames, int height, int width, const PatchLayout& layout) {
  const PatchGrid grid = patch_grid(frames, height, width, layout.patch, layout.depth);
  check_merge(grid, layout.merge);
  return grid;
}

void write_patches(TensorView rows, std::span<const Image> frames, const PatchLayout& layout) {
  check_frames(frames);
  const int height = frames.front().height;
  const int width = frames.front().width;
  const PatchGrid grid = patches_of(static_cast<int>(frames.size()), height, width, layout);
  const Shape shape{grid.patches(), columns_of(layout)};
  if (rows.shape() != shape || rows.dtype() != DType::kU8 ||
      rows.device().kind != DeviceKind::kCpu) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("the patches of {} images of {} x {} pixels have shape {} in bytes on "
                            "the CPU, found space for {}",
                            frames.size(), width, height, shape.str(), rows.shape().str()));
  }

  const auto patch = static_cast<size_t>(layout.patch);
  const size_t line_bytes = static_cast<size_t>(width) * 3;
  const size_t square = patch * patch;
  const auto depth = static_cast<size_t>(layout.depth);
  uint8_t* to = rows.as<uint8_t>();
  for (size_t slice = 0; slice < static_cast<size_t>(grid.slices); ++slice) {
    for_each_place(grid, layout.merge, [&](int row, int column) {
      const size_t at =
          static_cast<size_t>(row) * patch * line_bytes + static_cast<size_t>(column) * patch * 3;
      for (size_t channel = 0; channel < 3; ++channel) {
        for (size_t deep = 0; deep < depth; ++deep, to += square) {
          const size_t frame = slice * depth + deep;
          if (frame >= frames.size() && deep > 0) {
            std::copy_n(to - square, square, to);
            continue;
          }
          write_square(frames[frame].rgb.data() + at + channel, line_bytes, patch, to);
        }
      }
    });
  }
}

VisualPatches cut_frames(std::span<const Image> frames, const PatchLayout& layout,
                         const NormalizationTable& table) {
  check_frames(frames);
  const PatchGrid grid = patches_of(static_cast<int>(frames.size()), frames.front().height,
                                    frames.front().width, layout);
  VisualPatches cut{
      Tensor(DType::kU8, {grid.patches(), columns_of(layout)}), {grid}, values_of(table)};
  write_patches(cut.rows, frames, layout);
  return cut;
}

VisualPatches cut_tiles(std::span<const Image> tiles, const PatchLayout& layout,
                        const NormalizationTable& table) {
  VisualPatches cut;
  int64_t rows = 0;
  for (const Image& tile : tiles) {
    cut.grids.push_back(patches_of(1, tile.height, tile.width, layout));
    rows += cut.grids.back().patches();
  }
  cut.values = values_of(table);
  cut.rows = Tensor(DType::kU8, {rows, columns_of(layout)});
  int64_t row = 0;
  for (size_t i = 0; i < tiles.size(); ++i) {
    const int64_t patches = cut.grids[i].patches();
    write_patches(cut.rows.view().slice(row, patches), tiles.subspan(i, 1), layout);
    row += patches;
  }
  return cut;
}

void place_patches(TensorView to, const VisualPatches& patches, int64_t first, Stream& stream) {
  const ConstTensorView rows = patches.rows.view().slice(first, to.shape()[0]);
  if (rows.dtype() == DType::kU8) return place_bytes(to, rows, patches.values, stream);
  if (stream.device().kind == DeviceKind::kCpu) return copy(to, rows, stream);
  upload_rows(to, rows, stream);
}

Tensor patch_values(const VisualPatches& patches) {
  Tensor values(DType::kF32, patches.rows.shape());
  ThreadPool caller(1);
  Stream stream(caller);
  place_patches(values, patches, 0, stream);
  return values;
}

}  // namespace kvlm
