#include "vision/resize.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <hwy/targets.h>

#include <chrono>
#include <map>
#include <string>
#include <vector>

#include "tests/vision/test_images.h"

namespace kvlm {
namespace {

using test::crc32;
using test::error_of;
using test::picture;
using ::testing::ElementsAre;
using ::testing::ElementsAreArray;
using ::testing::HasSubstr;

const std::map<std::string, Resample> kFilters = {
    {"nearest", Resample::kNearest},   {"lanczos", Resample::kLanczos},
    {"bilinear", Resample::kBilinear}, {"bicubic", Resample::kBicubic},
    {"box", Resample::kBox},           {"hamming", Resample::kHamming}};
constexpr ResizeBackend kBackends[] = {ResizeBackend::kPil, ResizeBackend::kTorchvision};

/// A row of eight grey values, lying or standing.
Image vector_row(bool standing) {
  Image image{standing ? 8 : 1, standing ? 1 : 8, {}};
  for (const int value : {0, 10, 200, 255, 30, 90, 120, 250})
    image.rgb.insert(image.rgb.end(), 3, static_cast<uint8_t>(value));
  return image;
}

TEST(Resize, TestVectors) {
  const std::vector<std::vector<uint8_t>> expected = {
      {69, 142, 144},
      {19, 195, 78, 178},
      {0, 170, 148, 74, 202},
      {0, 0, 33, 174, 253, 230, 54, 44, 96, 110, 191, 255}};
  for (const ResizeBackend backend : kBackends) {
    for (const auto& row : expected) {
      std::vector<uint8_t> rgb;
      for (const uint8_t value : row) rgb.insert(rgb.end(), 3, value);
      const int size = static_cast<int>(row.size());
      EXPECT_THAT(resize(vector_row(false), 1, size, Resample::kBicubic, backend).rgb,
                  ElementsAreArray(rgb));
      EXPECT_THAT(resize(vector_row(true), size, 1, Resample::kBicubic, backend).rgb,
                  ElementsAreArray(rgb));
    }
  }
}

TEST(Resize, TestVectorTaps) {
  const ResizeAxis axis = make_resize_axis(8, 4, Resample::kBicubic, ResizeBackend::kPil);
  EXPECT_EQ(axis.shift, 22);
  EXPECT_THAT(axis.first, ElementsAre(0, 0, 1, 3));
  EXPECT_THAT(axis.taps, ElementsAre(5, 7, 7, 5));
  const auto row = [&axis](size_t i) {
    const auto begin = axis.weights.begin() + static_cast<std::ptrdiff_t>(i) * axis.max_taps;
    return std::vector<int32_t>(begin, begin + axis.taps[i]);
  };
  EXPECT_THAT(row(0), ElementsAre(1947982, 1947982, 508932, -157945, -52648));
  EXPECT_THAT(row(1), ElementsAre(-145748, 469632, 1797559, 1797559, 469632, -145748, -48583));
  EXPECT_THAT(row(2), ElementsAre(-48583, -145748, 469632, 1797559, 1797559, 469632, -145748));
  EXPECT_THAT(row(3), ElementsAre(-52648, -157945, 508932, 1947982, 1947982));
}

TEST(Resize, TestVectorPrecisions) {
  const std::map<int, int> expected = {{3, 16}, {4, 16}, {5, 15}, {12, 14}};
  for (const auto& [size, shift] : expected) {
    EXPECT_EQ(make_resize_axis(8, size, Resample::kBicubic, ResizeBackend::kTorchvision).shift,
              shift)
        << size;
  }
}

/// Whichever instructions the processor has.
class EveryTarget : public ::testing::TestWithParam<int64_t> {
 protected:
  void SetUp() override { hwy::SetSupportedTargetsForTest(GetParam()); }
  void TearDown() override { hwy::SetSupportedTargetsForTest(0); }
};

TEST_P(EveryTarget, ResizeEqualsTheLibrariesBitForBit) {
  for (auto& in : test::goldens("resize")) {
    std::string backend, filter, kind;
    int height, width, to_height, to_width;
    in >> backend >> filter >> kind >> height >> width >> to_height >> to_width;
    const uint32_t expected = test::read_crc(in);
    const Image result =
        resize(picture(kind, height, width), to_height, to_width, kFilters.at(filter),
               backend == "pil" ? ResizeBackend::kPil : ResizeBackend::kTorchvision);
    EXPECT_EQ(result.height, to_height);
    EXPECT_EQ(result.width, to_width);
    EXPECT_EQ(crc32(result), expected) << in.str();
  }
}

INSTANTIATE_TEST_SUITE_P(Resize, EveryTarget,
                         ::testing::ValuesIn(hwy::SupportedAndGeneratedTargets()),
                         [](const auto& test) { return hwy::TargetName(test.param); });

TEST(Resize, AnUnchangedSizeIsACopy) {
  const Image image = picture("noise", 7, 5);
  for (const ResizeBackend backend : kBackends) {
    for (const auto& [name, filter] : kFilters) {
      EXPECT_EQ(resize(image, 7, 5, filter, backend).rgb, image.rgb) << name;
    }
  }
}

TEST(Resize, AConstantPictureStaysConstant) {
  Image image{23, 31, std::vector<uint8_t>(size_t{23} * 31 * 3, 200)};
  for (const ResizeBackend backend : kBackends) {
    for (const Resample filter : {Resample::kLanczos, Resample::kBilinear, Resample::kBicubic}) {
      for (const int size : {1, 7, 22, 23, 24, 100}) {
        EXPECT_THAT(resize(image, size, 2 * size, filter, backend).rgb, testing::Each(200)) << size;
      }
    }
  }
}

TEST(Resize, RefusesWhatCannotBe) {
  const Image image = picture("noise", 7, 5);
  const auto message = [&](int height, int width) {
    return error_of(ErrorCode::kInvalidArgument,
                    [&] { resize(image, height, width, Resample::kBicubic, ResizeBackend::kPil); });
  };
  EXPECT_THAT(message(0, 5), HasSubstr("5 x 7 pixels would be resized to 5 x 0"));
  message(5, -1);
  message(1 << 15, 1 << 14);  // 2^29 pixels
  for (const Resample filter : {Resample::kBox, Resample::kHamming}) {
    EXPECT_THAT(error_of(ErrorCode::kUnsupported,
                         [&] { resize(image, 3, 3, filter, ResizeBackend::kTorchvision); }),
                HasSubstr("PIL"));
  }
  error_of(ErrorCode::kInvalidArgument,
           [] { resize(Image{}, 3, 3, Resample::kBicubic, ResizeBackend::kPil); });
}

TEST(Resize, ALargePhotographIsQuick) {
  const Image image{6000, 8000, std::vector<uint8_t>(size_t{6000} * 8000 * 3, 77)};
  const auto start = std::chrono::steady_clock::now();
  const Image result = resize(image, 336, 448, Resample::kBicubic, ResizeBackend::kTorchvision);
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
  EXPECT_THAT(result.rgb, testing::Each(77));
  RecordProperty("seconds", std::to_string(seconds.count()));
  EXPECT_LT(seconds.count(), 20.0);  // some 0.3 s; sanitizers and a busy machine are slower
}

}  // namespace
}  // namespace kvlm
