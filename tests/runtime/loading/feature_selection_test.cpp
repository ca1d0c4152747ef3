#include "runtime/loading/feature_selection.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "kernels/base/error.h"
#include "tests/runtime/loading/safetensors_writer.h"

namespace kvlm {
namespace {

using nlohmann::json;
using test::failure;
using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;

FeatureSelection selection(const json& config) {
  return parse_feature_selection(ConfigReader(config, "config.json"), -2, "default");
}

std::string refusal(const json& config) {
  return failure([&] { selection(config); });
}

TEST(FeatureSelection, MissingFieldsAreTheCallers) {
  const FeatureSelection absent = selection(json::object());
  EXPECT_THAT(absent.layers, ElementsAre(-2));
  EXPECT_FALSE(absent.keep_first_row);
  const json empty = json::object();
  EXPECT_TRUE(
      parse_feature_selection(ConfigReader(empty, "config.json"), -1, "full").keep_first_row);
}

TEST(FeatureSelection, ReadsWhatTheFileSays) {
  const FeatureSelection found =
      selection({{"vision_feature_layer", -1}, {"vision_feature_select_strategy", "full"}});
  EXPECT_THAT(found.layers, ElementsAre(-1));
  EXPECT_TRUE(found.keep_first_row);
  EXPECT_THAT(refusal({{"vision_feature_select_strategy", "some"}}),
              AllOf(HasSubstr("\"some\""), HasSubstr("default or full")));
}

TEST(FeatureSelection, LayersMayBeAList) {
  EXPECT_THAT(selection({{"vision_feature_layer", {-2, -5, 3}}}).layers, ElementsAre(-2, -5, 3));
  EXPECT_THAT(selection({{"vision_feature_layer", {7}}}).layers, ElementsAre(7));
  for (const json& value :
       {json::array(), json::array({1.5}), json::array({"a"}), json::array({nullptr}), json("-2"),
        json(5000), json(-5000), json(1.5)}) {
    EXPECT_THAT(refusal({{"vision_feature_layer", value}}), HasSubstr("vision_feature_layer"))
        << value;
  }
  // Far outside, it must not come back into range: the tower refuses it by its layers.
  const FeatureSelection far =
      selection({{"vision_feature_layer", {int64_t{1} << 40, -(int64_t{1} << 40)}}});
  EXPECT_GT(far.layers[0], 1024);
  EXPECT_LT(far.layers[1], -1024);
}

}  // namespace
}  // namespace kvlm
