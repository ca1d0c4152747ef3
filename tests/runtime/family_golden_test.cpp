// Every family against transformers, from messages to tokens (tests/golden/README.md), with the
// bounds of tests/runtime/gates.h. What is between a picture and the projector has tests of its own
// (TowerGolden, QwenTower).
#include <fmt/format.h>
#include <gmock/gmock.h>

#include <algorithm>
#include <memory>
#include <optional>

#include "tests/runtime/gates.h"
#include "tests/runtime/golden_run.h"

namespace kvlm {
namespace {

using test::deviation;
using test::GoldenCase;
using test::GoldenTensors;
using test::kLogitGate;
using test::kPixelGate;
using test::LoadedModel;
using test::narrow;
using test::Taps;
using test::within;

constexpr double kFeatureGate = 1e-4;  // relative to max(1, deviation of the reference)

class FamilyGolden : public testing::TestWithParam<GoldenCase>, protected test::GoldenRun {
 protected:
  FamilyGolden()
      : GoldenRun(GetParam(), std::make_shared<const LoadedModel>(GetParam().folder,
                                                                  test::reference_options())) {}

  static double feature_gate(std::span<const float> reference) {
    return kFeatureGate * std::max(1.0, deviation(reference));
  }
};

TEST_P(FamilyGolden, PromptTextEqualsTheReference) {
  if (!rendered()) GTEST_SKIP() << "the caller cannot set this template variable";
  EXPECT_EQ(model().render(golden_.messages()), tensors_.text(golden_.tensor("prompt")));
}

TEST_P(FamilyGolden, TokenAndPositionIdsEqualTheReference) {
  const Prompt prompt = this->prompt();
  EXPECT_EQ(prompt.ids, narrow(tensors_.integers(golden_.tensor("input_ids"))));
  EXPECT_EQ(prompt.visual_rows(),
            golden_.entry.value("image_tokens", 0) + golden_.entry.value("video_tokens", 0));
  const std::vector<int64_t> expected = tensors_.integers(golden_.tapped("position_ids"));
  const size_t rows = prompt.ids.size();
  ASSERT_EQ(prompt.positions.size(), rows);
  const bool axes = expected.size() == 3 * rows;
  ASSERT_TRUE(axes || expected.size() == rows);
  for (size_t row = 0; row < rows; ++row) {
    const Position& position = prompt.positions[row];
    EXPECT_EQ(position.time, expected[row]) << row;
    EXPECT_EQ(position.height, expected[row + (axes ? rows : 0)]) << row;
    EXPECT_EQ(position.width, expected[row + (axes ? 2 * rows : 0)]) << row;
  }
  if (has("rope_delta")) {
    EXPECT_EQ(prompt.next_position - std::ssize(prompt.ids),
              tensors_.integers(golden_.tapped("rope_delta"))[0]);
  }
  // The rows of one picture or clip have its tag, in the order of the prompt.
  int16_t largest = kTextRow;
  for (const int16_t tag : prompt.modality) {
    if (tag == kTextRow) continue;
    EXPECT_GE(tag, largest);
    EXPECT_LE(tag, largest + 1);
    largest = tag;
  }
  EXPECT_EQ(largest + 1, std::ssize(prompt.visuals));
}

TEST_P(FamilyGolden, PixelsEqualTheReference) {
  bool compared = false;
  for (const auto& [backend, name] : {std::pair{ResizeBackend::kTorchvision, "torchvision"},
                                      std::pair{ResizeBackend::kPil, "pil"}}) {
    const std::string tensor = fmt::format("pixel_values.{}", name);
    if (!has(tensor)) continue;
    compared = true;
    LoadOptions options;
    options.image_backend = backend;
    const LoadedModel model(golden_.folder, options);
    std::vector<float> pixels;
    int64_t rows_of_tile = 0;
    for (const auto& [clip, index] : prompt().visuals) {
      ASSERT_FALSE(clip) << "pictures have pixels of their own";
      const VisualPatches patches = model->prepare(images_[index], company()).patches;
      rows_of_tile = patches.grids.front().rows;
      const Tensor values = patch_values(patches);
      pixels.insert(pixels.end(), values.as<float>(),
                    values.as<float>() + values.shape().elements());
    }
    const auto shape = tensors_.shape(golden_.tapped(tensor));
    const std::vector<float> reference =
        shape.size() == 2
            ? floats(tensor)
            : test::patches_of_pixels(tensors_, golden_.tapped(tensor), shape[2] / rows_of_tile);
    EXPECT_TRUE(within(tensor, pixels, reference, kPixelGate));
  }
  EXPECT_EQ(compared, has("vision.patch_embed"));
}

TEST_P(FamilyGolden, FeaturesEqualTheReference) {
  if (golden_.entry.contains("same_inputs_as")) GTEST_SKIP() << "the other case has them";
  Taps taps;
  const Prompt prompt = this->prompt();
  const VisualRows visual = encode(inputs(prompt), collect_on_host(taps));
  const std::string run = has("video.projector_out") ? "video." : "";
  if (has(run + "projector_out")) {
    const std::vector<float> reference = floats(run + "projector_out");
    EXPECT_TRUE(within("projector_out", taps["projector_out"], reference, feature_gate(reference)));
  }
  Taps features;
  for (size_t i = 0; i < visual.each.size(); ++i) {
    const auto [clip, index] = prompt.visuals[i];
    collect_on_host(features)(fmt::format("{}{}", clip ? "video." : "", index),
                              visual.each[i].rows);
    for (size_t layer = 0; layer < visual.each[i].added.size(); ++layer) {
      collect_on_host(features)(fmt::format("deepstack.{}", layer), visual.each[i].added[layer]);
    }
    const std::string packed = fmt::format("{}packed_features.{}", clip ? "video." : "", index);
    if (!has(packed)) continue;
    const std::vector<float> reference = floats(packed);
    EXPECT_TRUE(within(packed, features[fmt::format("{}{}", clip ? "video." : "", index)],
                       reference, feature_gate(reference)));
  }
  for (int layer = 0; has(fmt::format("{}deepstack.{}", run, layer)); ++layer) {
    const std::string name = fmt::format("deepstack.{}", layer);
    const std::vector<float> reference = floats(run + name);
    EXPECT_TRUE(within(name, features[name], reference, feature_gate(reference)));
  }
}

/// Teacher-forced: every step is fed the reference's token, so one slip cannot hide the next.
TEST_P(FamilyGolden, LogitsEqualTheReferenceTeacherForced) {
  const std::vector<int32_t> ids = narrow(tensors_.integers(golden_.tensor("greedy_ids")));
  Taps taps;
  const auto logits = forced_logits(ids, taps);
  for (const char* name :
       {"inputs_embeds", "llm.layer.0", "llm.layer.1", "llm.layer.2", "llm.norm"}) {
    if (!has(name) || golden_.entry.contains("same_inputs_as")) continue;
    const std::vector<float> reference = floats(name);
    EXPECT_TRUE(within(name, taps[name], reference, feature_gate(reference)));
  }
  if (has("logits_prefill") && !golden_.entry.contains("same_inputs_as")) {
    EXPECT_TRUE(
        within("logits_prefill", taps["logits_prefill"], floats("logits_prefill"), kLogitGate));
  }
  const std::vector<float> reference = tensors_.floats(golden_.tensor("greedy_logits"));
  const auto vocab = static_cast<size_t>(model().decoder().vocab_size());
  ASSERT_EQ(reference.size(), 4 * vocab);
  for (size_t step = 0; step < 4; ++step) {
    EXPECT_TRUE(within(fmt::format("greedy_logits[{}]", step), logits[step],
                       std::span(reference).subspan(step * vocab, vocab), kLogitGate));
  }
  SamplerOptions options;
  options.repetition_penalty = golden_.entry.at("repetition_penalty");
  Sampler sampler(options, model().decoder().vocab_size());
  sampler.see(prompt().ids);
  for (size_t step = 0; step < ids.size(); ++step) {
    std::vector<float> scores = logits[step];
    ASSERT_EQ(sampler.sample(scores), ids[step]) << "step " << step;
    sampler.see(std::span(ids).subspan(step, 1));
  }
}

/// Free-running, with the cache in full precision and in the format that is the default.
TEST_P(FamilyGolden, GreedyTokensEqualTheReference) {
  if (golden_.entry.at("messages").is_null()) GTEST_SKIP() << "no conversation makes this prompt";
  // A request of several pictures tiles them only if it is told to.
  LoadOptions options;
  if (images_.size() > 1 && company() == 1 && loaded_->family() == "llava-onevision") {
    options.image_aspect = ImageAspect::kAnyres;
  }
  const std::optional<LoadedModel> told =
      options.image_aspect ? std::optional<LoadedModel>(std::in_place, golden_.folder, options)
                           : std::nullopt;
  std::vector<int32_t> expected = narrow(tensors_.integers(golden_.tensor("greedy_ids")));
  // A context that ends earlier than the reference, which has no limit, cuts the answer.
  const int64_t room =
      model().decoder().max_positions() - golden_.entry.at("prompt_tokens").get<int64_t>();
  if (room <= 0) {  // refused before anything is computed
    const auto cache = loaded_.cache("f32");
    EXPECT_THROW(test::generate(model(), *cache, loaded_.stream(), golden_.request()), Error);
    return;
  }
  const bool cut = room < std::ssize(expected);
  if (cut) expected.resize(static_cast<size_t>(room));
  for (const char* kv : {"f32", "f16"}) {
    const auto cache = loaded_.cache(kv);
    const GenerationResult result =
        test::generate(told ? **told : model(), *cache, loaded_.stream(), golden_.request());
    EXPECT_EQ(result.tokens, expected) << "--kv " << kv;
    if (cut) continue;
    EXPECT_EQ(result.finish_reason, golden_.entry.at("stopped_by_eos") ? "stop" : "length");
    EXPECT_EQ(result.text, tensors_.text(golden_.tensor("text_out")));
  }
}

/// Those of a family in full precision; HalfGolden has the gates of the others.
std::vector<GoldenCase> cases_of(std::string_view family) {
  std::vector<GoldenCase> cases = test::golden_cases(family);
  std::erase_if(cases, [](const GoldenCase& golden) {
    return golden.goldens.filename().string().ends_with("f16");  // bf16 too
  });
  return cases;
}

std::string case_name(const testing::TestParamInfo<GoldenCase>& info) {
  return info.param.folder.filename().string() + "_" + info.param.name();
}

INSTANTIATE_TEST_SUITE_P(InternVl, FamilyGolden, testing::ValuesIn(cases_of("internvl")),
                         case_name);
INSTANTIATE_TEST_SUITE_P(Llava, FamilyGolden, testing::ValuesIn(cases_of("llava")), case_name);
INSTANTIATE_TEST_SUITE_P(LlavaInterleave, FamilyGolden,
                         testing::ValuesIn(cases_of("llava_interleave")), case_name);
INSTANTIATE_TEST_SUITE_P(LlavaNext, FamilyGolden, testing::ValuesIn(cases_of("llava_next")),
                         case_name);
INSTANTIATE_TEST_SUITE_P(LlavaOnevision, FamilyGolden,
                         testing::ValuesIn(cases_of("llava_onevision")), case_name);
INSTANTIATE_TEST_SUITE_P(Qwen2Vl, FamilyGolden, testing::ValuesIn(cases_of("qwen2_vl")), case_name);
INSTANTIATE_TEST_SUITE_P(Qwen25Vl, FamilyGolden, testing::ValuesIn(cases_of("qwen2_5_vl")),
                         case_name);
INSTANTIATE_TEST_SUITE_P(Qwen3Vl, FamilyGolden, testing::ValuesIn(cases_of("qwen3_vl")), case_name);

}  // namespace
}  // namespace kvlm
