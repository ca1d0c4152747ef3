#include "vision/preprocess.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "tests/vision/normalize.h"
#include "tests/vision/test_images.h"

namespace kvlm {
namespace {

using test::error_of;
using test::picture;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

uint32_t crc32(const Tensor& tensor) { return test::crc32(tensor.as<float>(), tensor.bytes()); }

PreprocessSpec spec_for(const std::string& backend) {
  PreprocessSpec spec;
  spec.resize_backend = backend == "pil" ? ResizeBackend::kPil : ResizeBackend::kTorchvision;
  if (backend == "pil") spec.normalize_backend = NormalizeBackend::kPil;
  if (backend == "to_tensor") spec.normalize_backend = NormalizeBackend::kToTensor;
  return spec;
}

/// One row or column whose pixels are 1, 2, 3, ...
Image ramp(int height, int width) {
  Image image{height, width, {}};
  for (int i = 1; i <= height * width; ++i)
    image.rgb.insert(image.rgb.end(), 3, static_cast<uint8_t>(i));
  return image;
}

std::vector<int> reds(const Image& image) {
  std::vector<int> values;
  for (size_t i = 0; i < image.rgb.size(); i += 3) values.push_back(image.rgb[i]);
  return values;
}

TEST(Preprocess, EqualsTheProcessorBitForBit) {
  for (auto& in : test::goldens("pixels")) {
    std::string backend, kind;
    int height, width, edge, crop;
    in >> backend >> kind >> height >> width >> edge >> crop;
    const uint32_t expected = test::read_crc(in);
    PreprocessSpec spec = spec_for(backend);
    spec.shortest_edge = edge;
    spec.crop_height = spec.crop_width = crop;
    const Tensor pixels = normalize(fit(picture(kind, height, width), spec), spec);
    ASSERT_EQ(pixels.shape(), (Shape{3, crop, crop}));
    const int64_t count = pixels.shape().elements();
    for (int64_t i = 0; i < 8; ++i) {  // says how far off it is, should the checksum differ
      float value = 0;
      in >> value;
      EXPECT_NEAR(pixels.as<float>()[(2 * i + 1) * count / 16], value, 2e-6f) << in.str();
    }
    ASSERT_TRUE(in);
    EXPECT_EQ(crc32(pixels), expected) << in.str();
  }
}

TEST(Preprocess, EveryByteThroughEveryFloatPath) {
  Image image{16, 16, {}};
  for (int value = 0; value < 256; ++value)
    image.rgb.insert(image.rgb.end(), 3, static_cast<uint8_t>(value));
  for (auto& in : test::goldens("table")) {
    std::string backend;
    double factor = 0;
    bool rescale, normal;
    in >> backend >> factor >> rescale >> normal;
    const uint32_t expected = test::read_crc(in);
    PreprocessSpec spec = spec_for(backend);
    spec.rescale_factor = factor;
    spec.do_rescale = rescale;
    spec.do_normalize = normal;
    EXPECT_EQ(crc32(normalize(image, spec)), expected) << in.str();
  }
}

TEST(Preprocess, WithoutAnyStepThePixelsAreTheBytes) {
  PreprocessSpec spec;
  spec.do_resize = spec.do_center_crop = spec.do_rescale = spec.do_normalize = false;
  const Image image = ramp(2, 3);
  const Tensor pixels = normalize(fit(image, spec), spec);
  ASSERT_EQ(pixels.shape(), (Shape{3, 2, 3}));
  for (int i = 0; i < 18; ++i) EXPECT_EQ(pixels.as<float>()[i], static_cast<float>(i % 6 + 1));
}

TEST(Preprocess, PadsWithTheMeanColourFirst) {
  PreprocessSpec spec;
  spec.do_pad = true;
  spec.do_resize = spec.do_center_crop = spec.do_rescale = spec.do_normalize = false;
  const Tensor pixels = normalize(fit(ramp(1, 4), spec), spec);
  ASSERT_EQ(pixels.shape(), (Shape{3, 4, 4}));
  const float* p = pixels.as<float>();
  EXPECT_EQ(p[0], 122);
  EXPECT_EQ(p[16], 116);
  EXPECT_EQ(p[32], 104);
  EXPECT_THAT(std::vector<float>(p + 4, p + 8), ElementsAre(1, 2, 3, 4));
}

TEST(Preprocess, FixedSizeWinsWithoutAShortestEdge) {
  PreprocessSpec spec;
  spec.shortest_edge = 0;
  spec.resize_height = 5;
  spec.resize_width = 9;
  spec.do_center_crop = false;
  EXPECT_EQ(normalize(fit(picture("noise", 20, 20), spec), spec).shape(), (Shape{3, 5, 9}));
}

TEST(ShortestEdge, TruncatesTheLongerSide) {
  EXPECT_EQ(shortest_edge_size(480, 640, 336), (std::array{336, 448}));
  EXPECT_EQ(shortest_edge_size(640, 480, 336), (std::array{448, 336}));
  EXPECT_EQ(shortest_edge_size(333, 1001, 336), (std::array{336, 1010}));  // 1010.018
  EXPECT_EQ(shortest_edge_size(1001, 333, 336), (std::array{1010, 336}));
  EXPECT_EQ(shortest_edge_size(7, 7, 336), (std::array{336, 336}));
  EXPECT_EQ(shortest_edge_size(3, 2, 1), (std::array{1, 1}));
  EXPECT_EQ(shortest_edge_size(1, 1, 224), (std::array{224, 224}));
}

TEST(ShortestEdge, RefusesWhatDoesNotFit) {
  error_of(ErrorCode::kInvalidArgument, [] { shortest_edge_size(0, 5, 336); });
  error_of(ErrorCode::kInvalidArgument, [] { shortest_edge_size(5, 5, 0); });
  EXPECT_THAT(error_of(ErrorCode::kInvalidArgument, [] { shortest_edge_size(1, 1 << 28, 336); }),
              HasSubstr("268435456 x 1 pixels is too narrow"));
}

TEST(CenterCrop, CutsTheMiddle) {
  for (const ResizeBackend backend : {ResizeBackend::kPil, ResizeBackend::kTorchvision}) {
    EXPECT_THAT(reds(center_crop(ramp(1, 7), 1, 3, backend)), ElementsAre(3, 4, 5));
    EXPECT_THAT(reds(center_crop(ramp(1, 7), 1, 4, backend)), ElementsAre(2, 3, 4, 5));
    EXPECT_THAT(reds(center_crop(ramp(4, 1), 1, 1, backend)), ElementsAre(2));
    EXPECT_THAT(reds(center_crop(ramp(2, 2), 2, 2, backend)), ElementsAre(1, 2, 3, 4));
  }
}

TEST(CenterCrop, PadsASmallerImageWithZeros) {
  EXPECT_THAT(reds(center_crop(ramp(1, 2), 1, 5, ResizeBackend::kPil)), ElementsAre(0, 0, 1, 2, 0));
  EXPECT_THAT(reds(center_crop(ramp(1, 2), 1, 5, ResizeBackend::kTorchvision)),
              ElementsAre(0, 1, 2, 0, 0));
  for (const ResizeBackend backend : {ResizeBackend::kPil, ResizeBackend::kTorchvision}) {
    // Too low and too wide at once.
    EXPECT_THAT(reds(center_crop(ramp(1, 5), 3, 3, backend)),
                ElementsAre(0, 0, 0, 2, 3, 4, 0, 0, 0));
  }
  for (const int height : {0, -1, 1 << 30}) {
    EXPECT_THAT(error_of(ErrorCode::kInvalidArgument,
                         [&] { center_crop(ramp(1, 5), height, 3, ResizeBackend::kPil); }),
                HasSubstr("check crop_size"));
  }
}

TEST(PadToSquare, CentresTheImage) {
  const Image wide = pad_to_square(ramp(1, 4), {9, 8, 7});
  EXPECT_EQ(wide.height, 4);
  EXPECT_EQ(wide.width, 4);
  EXPECT_THAT(reds(wide), ElementsAre(9, 9, 9, 9, 1, 2, 3, 4, 9, 9, 9, 9, 9, 9, 9, 9));
  EXPECT_EQ(wide.rgb[1], 8);
  EXPECT_EQ(wide.rgb[2], 7);
  EXPECT_THAT(reds(pad_to_square(ramp(3, 2), {0, 0, 0})), ElementsAre(1, 2, 0, 3, 4, 0, 5, 6, 0));
  EXPECT_THAT(reds(pad_to_square(ramp(1, 1), {0, 0, 0})), ElementsAre(1));
}

TEST(Normalize, RefusesConstantsThatDivideByZero) {
  PreprocessSpec spec;
  spec.std[1] = 0;
  EXPECT_THAT(error_of(ErrorCode::kInvalidArgument, [&] { normalize(ramp(1, 1), spec); }),
              HasSubstr("channel 1"));
  spec = {};
  spec.rescale_factor = std::numeric_limits<double>::quiet_NaN();
  error_of(ErrorCode::kInvalidArgument, [&] { normalize(ramp(1, 1), spec); });
  error_of(ErrorCode::kInvalidArgument, [] { fit(Image{}, PreprocessSpec{}); });
}

}  // namespace
}  // namespace kvlm
