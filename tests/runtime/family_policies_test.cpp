// Every policy of `vlm-kv list` on every family: it serves a request of pictures or of a clip, and
// its first token is the plain cache's to the bit; or it is refused in one sentence before.
#include <fmt/format.h>
#include <gmock/gmock.h>

#include <algorithm>
#include <set>

#include "kvcache/spec/registry.h"
#include "tests/kvcache/plans.h"
#include "tests/runtime/golden.h"
#include "tests/runtime/recording_model.h"

namespace kvlm {
namespace {

using test::GoldenCase;
using test::LoadedModel;

/// A spec that names the policy, with half of the rows where it drops some.
std::string spec_of(const PolicyInfo& info) {
  switch (info.kind) {
    case PartKind::kQuantizer:
      return std::string(info.name);
    case PartKind::kRetention:
      return fmt::format("{},keep=0.5", info.name);
    case PartKind::kSharing:
      return "kivi,bits=2 + share=codes,from=0:0";
    case PartKind::kSimulation:
      return std::string(info.name);
  }
  return {};
}

/// Logits of the first token, and all tokens.
struct Answer {
  std::vector<float> first;
  std::vector<int32_t> tokens;
};

Answer answer(const LoadedModel& loaded, const CacheSpec& spec, GenerationRequest request) {
  test::RecordingModel model(*loaded);
  const auto plan = plan_cache(spec, loaded->decoder().cache_shape());
  const auto cache = make_cache(plan, session_bytes(*plan, 512), test::test_device());
  Answer result;
  result.tokens = test::generate(model, *cache, loaded.stream(), std::move(request)).tokens;
  result.first = model.passes().front().logits;
  return result;
}

class FamilyPolicies : public testing::TestWithParam<GoldenCase> {};

/// A request is read while another one's answer is made, in pauses between layers of images and
/// prompt: both get the tokens that they have alone.
TEST_P(FamilyPolicies, GoOnWhileAPromptPauses) {
  const LoadedModel loaded(GetParam().folder);
  constexpr int kTokens = 40;
  if (GetParam().entry.at("prompt_tokens").get<int>() + kTokens >
      loaded->decoder().max_positions()) {
    GTEST_SKIP() << "the context does not hold the prompt";
  }
  GenerationRequest request = GetParam().request();
  request.max_tokens = kTokens;
  request.ignore_eos = true;
  const CacheSpec spec = parse_spec("h2o,keep=0.5 + int4");
  const Answer alone = answer(loaded, spec, request);
  const auto plan = plan_cache(spec, loaded->decoder().cache_shape());
  const auto cache = make_cache(plan, 2 * session_bytes(*plan, 512), test::test_device());
  Generator generator(*loaded, *cache, loaded.stream());
  size_t pauses = 0;
  const int first = generator.admit(request, {});
  generator.set_pause([&] {
    ++pauses;
    generator.step();
    generator.deliver();
  });
  const int second = generator.admit(request, {});
  EXPECT_EQ(std::min<size_t>(pauses + 1, kTokens), generator.tokens(first).size());
  EXPECT_GT(pauses, 0u);
  while (!generator.finished(first) || !generator.finished(second)) {
    generator.step();
    generator.deliver();
  }
  EXPECT_EQ(generator.take(first).tokens, alone.tokens);
  EXPECT_EQ(generator.take(second).tokens, alone.tokens);
}

TEST_P(FamilyPolicies, ServeWithAnExactFirstToken) {
  const LoadedModel loaded(GetParam().folder);
  const CacheShape shape = loaded->decoder().cache_shape();
  constexpr int kTokens = 8;
  if (GetParam().entry.at("prompt_tokens").get<int>() + kTokens >
      loaded->decoder().max_positions()) {
    GTEST_SKIP() << "the context does not hold the prompt";
  }
  GenerationRequest request = GetParam().request();
  request.max_tokens = kTokens;
  request.ignore_eos = true;
  const Answer plain = answer(loaded, parse_spec("f32"), request);
  ASSERT_EQ(plain.tokens.size(), size_t{kTokens});
  size_t served = 0;
  for (const PolicyInfo* info : policies()) {
    const CacheSpec spec = parse_spec(spec_of(*info));
    if (const auto reason = test::unsupported(spec, shape)) {
      EXPECT_EQ(reason->find('\n'), std::string::npos) << *reason;
      EXPECT_GE(reason->size(), 20u) << info->name << ": " << *reason;
      continue;
    }
    const Answer ours = answer(loaded, spec, request);
    EXPECT_EQ(ours.tokens.size(), size_t{kTokens}) << info->name;
    EXPECT_EQ(ours.first, plain.first) << info->name;
    ++served;
  }
  EXPECT_GE(served, policies().size() - 4);
}

/// Of every folder of a family the prompts with pictures and clips.
std::vector<GoldenCase> cases_of(std::initializer_list<std::string_view> families) {
  const std::set<std::string> kinds = {"one_image", "two_images", "video", "image_and_video",
                                       "several_images"};
  std::vector<GoldenCase> cases;
  for (const std::string_view family : families) {
    for (GoldenCase& golden : test::golden_cases(family)) {
      if (kinds.contains(golden.kind()) && !golden.entry.at("messages").is_null()) {
        cases.push_back(std::move(golden));
      }
    }
  }
  return cases;
}

std::string case_name(const testing::TestParamInfo<GoldenCase>& tested) {
  return tested.param.folder.filename().string() + "_" + tested.param.name();
}

INSTANTIATE_TEST_SUITE_P(InternVl, FamilyPolicies, testing::ValuesIn(cases_of({"internvl"})),
                         case_name);
INSTANTIATE_TEST_SUITE_P(Families, FamilyPolicies, testing::ValuesIn(cases_of({"llava"})),
                         case_name);
INSTANTIATE_TEST_SUITE_P(
    Llavas, FamilyPolicies,
    testing::ValuesIn(cases_of({"llava_interleave", "llava_next", "llava_onevision"})), case_name);
INSTANTIATE_TEST_SUITE_P(QwenVl, FamilyPolicies,
                         testing::ValuesIn(cases_of({"qwen2_vl", "qwen2_5_vl", "qwen3_vl"})),
                         case_name);

}  // namespace
}  // namespace kvlm
