#include "vision/patches.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/vision/normalize.h"
#include "tests/vision/test_images.h"
#include "vision/preprocess.h"
#include "vision/smart_resize.h"

namespace kvlm {
namespace {

using test::error_of;
using test::picture;
using ::testing::HasSubstr;

Tensor patches(std::span<const Image> frames, const PatchLayout& layout,
               const PreprocessSpec& spec) {
  const PatchGrid grid =
      patches_of(static_cast<int>(frames.size()), frames[0].height, frames[0].width, layout);
  const VisualPatches cut = cut_frames(frames, layout, normalization_table(spec));
  EXPECT_EQ(cut.grids, std::vector<PatchGrid>{grid});
  return patch_values(cut);
}

/// The same the slow way: normalised pictures, then every value fetched by its place.
std::vector<float> slow_patches(std::span<const Image> frames, const PatchLayout& layout,
                                const PreprocessSpec& spec) {
  std::vector<Tensor> pixels;
  for (const Image& frame : frames) pixels.push_back(normalize(frame, spec));
  const int height = frames[0].height;
  const int width = frames[0].width;
  const PatchGrid grid = patches_of(static_cast<int>(frames.size()), height, width, layout);
  std::vector<float> values;
  int64_t index = 0;
  for (const auto& [row, column] : patch_places(grid, layout.merge)) {
    const int64_t slice = index++ / (int64_t{grid.rows} * grid.columns);
    for (int channel = 0; channel < 3; ++channel) {
      for (int deep = 0; deep < layout.depth; ++deep) {
        const auto frame = std::min(static_cast<size_t>(slice) * static_cast<size_t>(layout.depth) +
                                        static_cast<size_t>(deep),
                                    frames.size() - 1);
        for (int dy = 0; dy < layout.patch; ++dy) {
          for (int dx = 0; dx < layout.patch; ++dx) {
            const int64_t y = int64_t{row} * layout.patch + dy;
            const int64_t x = int64_t{column} * layout.patch + dx;
            values.push_back(pixels[frame].as<float>()[(channel * height + y) * width + x]);
          }
        }
      }
    }
  }
  return values;
}

TEST(WritePatches, EqualsNormalizeAndCut) {
  for (const NormalizeBackend backend :
       {NormalizeBackend::kPil, NormalizeBackend::kTorchvision, NormalizeBackend::kToTensor}) {
    PreprocessSpec spec;
    spec.normalize_backend = backend;
    for (const PatchLayout& layout :
         {PatchLayout{14, 1, 1}, PatchLayout{14, 2, 2}, PatchLayout{16, 2, 2}, PatchLayout{1, 3, 1},
          PatchLayout{5, 1, 3}, PatchLayout{4, 2, 1}}) {
      for (const size_t count : {1, 2, 5}) {
        const int side = layout.patch * layout.merge;
        std::vector<Image> frames;
        for (size_t i = 0; i < count; ++i) {
          frames.push_back(picture(i % 2 == 0 ? "noise" : "smooth", 2 * side, 3 * side));
        }
        const Tensor rows = patches(frames, layout, spec);
        const std::vector<float> slow = slow_patches(frames, layout, spec);
        ASSERT_EQ(rows.shape().elements(), static_cast<int64_t>(slow.size()));
        EXPECT_EQ(test::crc32(rows.as<float>(), rows.bytes()),
                  test::crc32(slow.data(), slow.size() * sizeof(float)))
            << layout.patch << ' ' << layout.merge << ' ' << layout.depth << ' ' << count;
      }
    }
  }
}

TEST(WritePatches, LeavesOutWhatIsNoWholePatch) {
  const PatchLayout layout{14, 1, 1};
  const Image image = picture("noise", 31, 45);
  const std::span<const Image> frames(&image, 1);
  const Tensor rows = patches(frames, layout, {});
  EXPECT_EQ(rows.shape(), (Shape{6, 588}));
  const std::vector<float> slow = slow_patches(frames, layout, {});
  EXPECT_EQ(test::crc32(rows.as<float>(), rows.bytes()),
            test::crc32(slow.data(), slow.size() * sizeof(float)));
}

TEST(WritePatches, EqualsQwensProcessorBitForBit) {
  for (auto& in : test::goldens("patches", "geometry.txt")) {
    std::string backend, kind;
    int height, width;
    PatchLayout layout;
    PixelBudget budget;
    PatchGrid grid;
    in >> backend >> kind >> height >> width >> layout.patch >> layout.merge >> layout.depth >>
        budget.min_pixels >> budget.max_pixels >> grid.slices >> grid.rows >> grid.columns;
    const uint32_t expected = test::read_crc(in);
    PreprocessSpec spec;
    if (backend == "pil") {
      spec.resize_backend = ResizeBackend::kPil;
      spec.normalize_backend = NormalizeBackend::kPil;
    }
    const auto [tall, wide] = smart_resize(height, width, layout.patch * layout.merge, budget);
    const Image resized =
        resize(picture(kind, height, width), tall, wide, spec.resample, spec.resize_backend);
    EXPECT_EQ(patches_of(1, tall, wide, layout), grid);
    const Tensor rows = patches({&resized, 1}, layout, spec);
    EXPECT_EQ(test::crc32(rows.as<float>(), rows.bytes()), expected) << in.str();
  }
}

TEST(WritePatches, EqualsQwensVideoProcessorBitForBit) {
  for (auto& in : test::goldens("clip", "geometry.txt")) {
    std::string kind;
    int count, height, width;
    PatchLayout layout;
    PatchGrid grid;
    in >> kind >> count >> height >> width >> layout.patch >> layout.merge >> layout.depth >>
        grid.slices >> grid.rows >> grid.columns;
    const uint32_t expected = test::read_crc(in);
    const Image whole = picture(kind, height + count, width);
    const std::ptrdiff_t line = std::ptrdiff_t{width} * 3;
    std::vector<Image> frames;
    for (int i = 0; i < count; ++i) {
      const auto begin = whole.rgb.begin() + i * line;
      frames.push_back({height, width, {begin, begin + height * line}});
    }
    EXPECT_EQ(patches_of(count, height, width, layout), grid);
    const Tensor rows = patches(frames, layout, {});
    EXPECT_EQ(test::crc32(rows.as<float>(), rows.bytes()), expected) << in.str();
  }
}

TEST(WritePatches, SaysWhatDoesNotFit) {
  const PatchLayout layout{14, 2, 2};
  std::vector<Image> frames = {picture("noise", 28, 28), picture("noise", 28, 56)};
  frames[1].name = "frame2.png";
  Tensor rows(DType::kU8, {4, 1176});
  EXPECT_THAT(error_of(ErrorCode::kInvalidArgument, [&] { write_patches(rows, frames, layout); }),
              HasSubstr("frame2.png is 56 x 28 pixels, but a frame before it 28 x 28"));
  error_of(ErrorCode::kInvalidArgument, [&] { write_patches(rows, {}, layout); });
  frames = {picture("noise", 28, 28)};
  Tensor few(DType::kU8, {3, 1176});
  EXPECT_THAT(error_of(ErrorCode::kInvalidArgument, [&] { write_patches(few, frames, layout); }),
              HasSubstr("have shape (4, 1176) in bytes on the CPU, found space for (3, 1176)"));
  frames = {picture("noise", 42, 28)};
  EXPECT_THAT(error_of(ErrorCode::kInvalidArgument, [&] { write_patches(rows, frames, layout); }),
              HasSubstr("1 x 3 x 2 patches cannot be merged"));
  frames = {picture("noise", 13, 28)};
  error_of(ErrorCode::kInvalidArgument, [&] { write_patches(rows, frames, layout); });
}

}  // namespace
}  // namespace kvlm
