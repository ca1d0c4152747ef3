// A line of 4000 pixels, which no family has a tile for: as the reference answers, or refused.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "tests/runtime/golden.h"
#include "tests/runtime/loading/safetensors_writer.h"

namespace kvlm {
namespace {

using nlohmann::json;
using testing::AllOf;
using testing::HasSubstr;
using testing::Not;

/// The picture of make_thin_golden.py.
Image thin_picture(int height, int width) {
  Image image{height, width, std::vector<uint8_t>(static_cast<size_t>(height * width * 3))};
  for (size_t i = 0; i < image.rgb.size(); ++i) image.rgb[i] = static_cast<uint8_t>(7 * i);
  image.name = "thin.png";
  return image;
}

TEST(ThinPictures, AreAnsweredAsByTheReferenceOrRefusedByName) {
  const json cases =
      json::parse(test::read_file(test::source_folder() / "tests/runtime/data/thin_pictures.json"));
  for (const json& one : cases) {
    const std::string folder = one.at("folder");
    const int height = one.at("height");
    const int width = one.at("width");
    SCOPED_TRACE(folder + ", " + std::to_string(height) + " high");
    GenerationRequest request = test::golden_cases_of(test::golden_root() / folder).at(0).request();
    request.images = {thin_picture(height, width)};
    request.max_tokens = 16;
    const test::LoadedModel model(test::golden_root() / folder);
    if (one.contains("refused")) {
      const std::string message = test::failure([&] { test::generate(model, "f32", request); },
                                                ErrorCode::kInvalidArgument);
      EXPECT_THAT(message, AllOf(HasSubstr("thin.png"), HasSubstr("more than 200 times"),
                                 HasSubstr(std::to_string(width) + " x " + std::to_string(height)),
                                 Not(HasSubstr("\n"))));
      continue;
    }
    const GenerationResult result = test::generate(model, "f32", request);
    EXPECT_EQ(result.prompt_tokens, one.at("prompt_tokens"));
    EXPECT_EQ(result.tokens, one.at("greedy_ids").get<std::vector<int32_t>>());
  }
}

}  // namespace
}  // namespace kvlm
