#include "kvcache/registry.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <span>

namespace kvlm {
namespace {

using testing::ElementsAre;

TEST(Registry, KnowsThePlainFormats) {
  const std::vector<std::string_view> names = part_names();
  ASSERT_GE(names.size(), 3u);
  EXPECT_THAT(std::span(names).first(3), ElementsAre("f16", "bf16", "f32"));
  EXPECT_EQ(find_format("bf16"), DType::kBF16);
  EXPECT_EQ(find_format("share"), std::nullopt);
}

TEST(Registry, FindsEveryPartByItsNameAlone) {
  for (const PolicyInfo* info : policies()) {
    EXPECT_EQ(find_policy(info->name), info);
    const int kinds = find_format(info->name).has_value() +
                      (find_quantizer(info->name) != nullptr) +
                      (find_retention(info->name) != nullptr);
    EXPECT_EQ(kinds, info->kind == PartKind::kSharing ? 0 : 1) << info->name;
    EXPECT_EQ(find_retention(info->name) != nullptr, info->kind == PartKind::kRetention);
  }
  EXPECT_EQ(find_policy("zebra"), nullptr);
}

/// What `vlm-kv list` prints and the parser believes.
TEST(Registry, DescribesEveryPartAndEveryOption) {
  for (const PolicyInfo* info : policies()) {
    EXPECT_FALSE(info->source.empty()) << info->name;
    EXPECT_FALSE(info->stores.empty()) << info->name;
    EXPECT_FALSE(info->composes.empty()) << info->name;
    EXPECT_THAT(info->example, testing::HasSubstr(info->name));
    for (const OptionInfo* option : options_of(*info)) {
      EXPECT_FALSE(option->help.empty()) << info->name << "," << option->key;
      for (const std::string_view value : {option->standard, option->official, option->paper}) {
        if (value.empty()) continue;
        EXPECT_EQ(checked_value(info->name, *option, value), value);
      }
    }
  }
}

}  // namespace
}  // namespace kvlm
