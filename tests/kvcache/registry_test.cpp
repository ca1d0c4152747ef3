#include "kvcache/registry.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <span>

#include "kernels/base/error.h"

namespace kvlm {
namespace {

using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;

constexpr const char* kFormats[] = {"f16", "bf16", "f32"};

const CacheShape kShape{3, 8, 2, 12, {}};

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
    for (const OptionInfo* option : options_of(*info)) {
      EXPECT_FALSE(option->help.empty()) << info->name << "," << option->key;
      for (const std::string_view value : {option->standard, option->official, option->paper}) {
        if (value.empty()) continue;
        EXPECT_EQ(checked_value(info->name, *option, value), value);
      }
    }
  }
}

TEST(Registry, ReservesWholeCacheLinesPerLayer) {
  // One layer: 2 x 2 x 12 x 5 x 2 bytes = 480, rounded up to 512.
  EXPECT_EQ(reserved_bytes(parse_spec("f16"), kShape, {1, 0, 5}), 3u * 512);
  EXPECT_EQ(reserved_bytes(parse_spec("f16"), kShape, {5, 0, 5}), 3u * 512);
  // More than 32 bits: keys and values of 80 layers x 64 heads x 128 channels x 131072 rows.
  const CacheShape big{80, 64, 64, 128, {}};
  EXPECT_EQ(reserved_bytes(parse_spec("f32"), big, {1, 0, 131072}),
            size_t{4} * 2 * 80 * 64 * 128 * 131072);
}

/// What reserved_bytes() says is exactly enough.
TEST(Registry, ReservedBytesAdmitOneSequenceAndNotOneByteLess) {
  for (const std::string_view name : kFormats) {
    const CacheSpec spec = parse_spec(name);
    const size_t bytes = reserved_bytes(spec, kShape, {3, 0, 7});
    const auto enough = make_cache(spec, kShape, 2 * bytes, {});
    enough->open({3, 0, 7}, "a");
    enough->open({3, 0, 7}, "b");
    EXPECT_THROW(enough->open({1, 0, 1}, "c"), Error);
    const auto short_of = make_cache(spec, kShape, 2 * bytes - 64, {});
    short_of->open({3, 0, 7}, "a");
    EXPECT_THROW(short_of->open({3, 0, 7}, "b"), Error);
  }
}

TEST(Registry, RefusesMoreMemoryThanThereIs) {
  try {
    make_cache(parse_spec("f16"), kShape, size_t{1} << 60, {});
    FAIL() << "expected an Error";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kOutOfMemory);
  }
}

TEST(Registry, CachesSayTheirShapeAndSpec) {
  for (const std::string_view name : kFormats) {
    const auto cache = make_cache(parse_spec(name), kShape, 1 << 16, {});
    EXPECT_EQ(cache->spec(), name);
    EXPECT_EQ(cache->shape().layers, 3);
    EXPECT_EQ(cache->shape().q_per_kv(), 4);
    EXPECT_FALSE(cache->needs().prompt_embeddings);
  }
}

}  // namespace
}  // namespace kvlm
