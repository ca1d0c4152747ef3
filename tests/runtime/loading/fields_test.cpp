#include "runtime/loading/fields.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "kernels/base/error.h"
#include "tests/runtime/loading/safetensors_writer.h"

namespace kvlm {
namespace {

using nlohmann::json;
using test::failure;
using testing::AllOf;
using testing::HasSubstr;

TEST(ParseActivation, KnowsEveryNameOfTheReference) {
  const auto parsed = [](const json& value) {
    const json object = {{"act", value}};
    return parse_activation(ConfigReader(object, "x.json"), "act", "gelu");
  };
  EXPECT_EQ(parsed("quick_gelu"), Activation::kQuickGelu);
  EXPECT_EQ(parsed("gelu"), Activation::kGelu);
  EXPECT_EQ(parsed("gelu_pytorch_tanh"), Activation::kGeluTanh);
  EXPECT_EQ(parsed("gelu_new"), Activation::kGeluTanh);
  EXPECT_EQ(parsed("silu"), Activation::kSilu);
  EXPECT_EQ(parsed("swish"), Activation::kSilu);
  EXPECT_EQ(parsed(nullptr), Activation::kGelu);
  EXPECT_THAT(failure([&] { parsed("GELU"); }),
              AllOf(HasSubstr("\"GELU\""), HasSubstr("quick_gelu")));
}

}  // namespace
}  // namespace kvlm
