// The bundled tiny checkpoints against transformers, tap by tap (tests/golden/README.md), with the
// bounds of tests/runtime/gates.h. A tensor that is missing fails the test that wants it, and one
// that no test knows fails GoldenFile.HoldsWhatItsCasesNeed.
#include "tests/runtime/golden.h"

#include <fmt/format.h>
#include <gmock/gmock.h>

#include <cmath>
#include <filesystem>
#include <map>
#include <set>

#include "kernels/elementwise.h"
#include "tests/runtime/gates.h"
#include "tests/runtime/recording_model.h"

namespace kvlm {
namespace {

namespace fs = std::filesystem;
using test::collect;
using test::deviation;
using test::golden_case;
using test::GoldenCase;
using test::GoldenTensors;
using test::kLogitGate;
using test::kPixelGate;
using test::largest_difference;
using test::LoadedModel;
using test::narrow;
using test::Taps;
using test::within;

constexpr double kGapOverError = 20;  // below it a reference token may be a coin toss

/// One tap, in the order in which a forward pass produces them.
struct TapGate {
  std::string golden;
  std::string ours;
  double gate;
  bool relative;  // to max(1, deviation of the reference)
};

std::vector<TapGate> tap_gates() {
  return {
      {"pixel_values.torchvision", "pixel_values", kPixelGate, false},
      {"vision.patch_embed", "vision.patch_embed", 1e-5, true},
      {"vision.embeddings", "vision.embeddings", 1e-5, true},
      {"vision.pre_norm", "vision.pre_norm", 1e-5, true},
      {"vision.layer.0", "vision.layer.0", 2e-5, true},
      {"vision.layer.1", "vision.layer.1", 5e-5, true},
      {"vision.selected", "vision.selected", 5e-5, true},
      {"projector_in", "vision.selected", 5e-5, true},
      {"projector_out", "projector_out", 1e-4, true},
      {"inputs_embeds", "inputs_embeds", 1e-4, true},
      {"llm.layer.0", "llm.layer.0", 1e-4, true},
      {"llm.layer.1", "llm.layer.1", 1e-4, true},
      {"llm.norm", "llm.norm", 1e-4, true},
      {"logits_prefill", "logits_prefill", kLogitGate, false},
  };
}

/// The prompt of a case with its pictures prepared.
struct Prepared {
  std::vector<VisualInput> images;
  Prompt prompt;
};

Prepared prepare(Model& model, const GoldenCase& golden) {
  Prepared prepared;
  const std::vector<Image> images = golden.images();
  for (const Image& image : images) {
    prepared.images.push_back(model.prepare(image, images.size()));
  }
  const PromptVisuals visuals = visual_texts(model, images, {});
  prepared.prompt = make_prompt(model, outline_prompt(model, golden.messages(), visuals));
  return prepared;
}

/// Logits at the last prompt row and after each of `ids` but the last, fed one by one.
std::vector<std::vector<float>> forced_logits(const LoadedModel& model, KvCache& cache,
                                              const GoldenCase& golden,
                                              std::span<const int32_t> ids) {
  const Prepared prepared = prepare(*model, golden);
  const Prompt& prompt = prepared.prompt;
  Decoder& decoder = model->decoder();
  std::vector<const VisualInput*> inputs;
  for (const VisualInput& image : prepared.images) inputs.push_back(&image);
  VisualRows visual;
  if (!inputs.empty()) visual = model->encode(inputs, model.stream(), {});
  const auto rows = static_cast<int>(prompt.ids.size());
  const SequenceId id = cache.open({rows, 0, rows + static_cast<int>(ids.size())}, "forced");
  std::vector<std::vector<float>> logits;
  const auto run = [&](const StepRows& step, std::span<const Position> positions,
                       Tensor& embeddings) {
    const ConstTensorView row =
        decoder.forward({std::span(&step, 1), positions, embeddings}, cache, model.stream(), {});
    logits.emplace_back(static_cast<size_t>(decoder.vocab_size()));
    copy(TensorView(logits.back().data(), DType::kF32, row.shape()), row, model.stream());
  };
  Tensor all(DType::kF32, {rows, decoder.hidden()}, test::test_device());
  embed_prompt(*model, prompt, 0, visual.each, all, model.stream());
  run({id, rows, true, true, prompt.modality}, prompt.positions, all);
  Tensor one(DType::kF32, {1, decoder.hidden()}, test::test_device());
  for (size_t i = 0; i + 1 < ids.size(); ++i) {
    const Position position =
        Position::on_every_axis(prompt.next_position + static_cast<int32_t>(i));
    decoder.embed(ids.subspan(i, 1), one, model.stream());
    run({id, 1, false, false, {}}, std::span(&position, 1), one);
  }
  cache.close(id);
  return logits;
}

class Golden : public testing::TestWithParam<GoldenCase> {
 protected:
  const GoldenCase& golden_ = GetParam();
  GoldenTensors tensors_{golden_.goldens / "golden.safetensors"};
  LoadedModel model_{golden_.folder};
};

TEST_P(Golden, PromptTextEqualsTheReference) {
  EXPECT_EQ(model_->render(golden_.messages()), tensors_.text(golden_.tensor("prompt")));
}

TEST_P(Golden, TokenAndPositionIdsEqualTheReference) {
  const Prompt prompt = prepare(*model_, golden_).prompt;
  EXPECT_EQ(prompt.ids, narrow(tensors_.integers(golden_.tensor("input_ids"))));
  EXPECT_EQ(prompt.ids.size(), golden_.entry.at("prompt_tokens"));
  EXPECT_EQ(prompt.visual_rows(), golden_.entry.value("image_tokens", 0));
  std::vector<int32_t> positions;
  for (const Position& position : prompt.positions) positions.push_back(position.time);
  EXPECT_EQ(positions, narrow(tensors_.integers(golden_.tapped("position_ids"))));
  EXPECT_THAT(tensors_.integers(golden_.tapped("attention_mask")), testing::Each(1));
  // Which picture a row belongs to: the reference counts placeholders in order.
  int next = 0;
  for (size_t row = 0; row < prompt.ids.size(); ++row) {
    const bool visual = model_->is_visual(prompt.ids[row]);
    const int16_t expected =
        visual ? static_cast<int16_t>(next++ / model_->picture_text({}, 1).rows()) : kTextRow;
    ASSERT_EQ(prompt.modality[row], expected) << "row " << row;
  }
}

/// Cases whose pictures, resized pictures and pixels are in the goldens.
using PictureGolden = Golden;

TEST_P(PictureGolden, PicturesAndResizesEqualTheReference) {
  const std::vector<Image> images = golden_.images();
  const auto sizes = tensors_.integers(golden_.tapped("image_sizes"));
  for (size_t i = 0; i < images.size(); ++i) {
    const Image& image = images[i];
    EXPECT_EQ(image.rgb, tensors_.bytes(golden_.tapped(fmt::format("image_u8.{}", i))))
        << "picture " << i;
    EXPECT_EQ((std::vector<int64_t>{image.height, image.width}),
              (std::vector<int64_t>{sizes[2 * i], sizes[2 * i + 1]}));
    for (const auto& [backend, name] : {std::pair{ResizeBackend::kPil, "pil"},
                                        std::pair{ResizeBackend::kTorchvision, "torchvision"}}) {
      const std::string tensor = golden_.tapped(fmt::format("resized_u8.{}.{}", name, i));
      const std::vector<int64_t> shape = tensors_.shape(tensor);
      const auto size = shortest_edge_size(image.height, image.width, 56);
      ASSERT_THAT(shape, testing::ElementsAre(size[0], size[1], 3)) << tensor;
      const Image resized = resize(image, size[0], size[1], Resample::kBicubic, backend);
      EXPECT_EQ(resized.rgb, tensors_.bytes(tensor)) << tensor;
    }
  }
}

TEST_P(PictureGolden, PixelValuesOfBothBackendsEqualTheReference) {
  for (const auto& [backend, name] : {std::pair{ResizeBackend::kPil, "pil"},
                                      std::pair{ResizeBackend::kTorchvision, "torchvision"}}) {
    const std::string tensor = golden_.tapped(fmt::format("pixel_values.{}", name));
    LoadOptions options;
    options.image_backend = backend;
    const LoadedModel model(golden_.folder, options);
    std::vector<float> pixels;
    for (const VisualInput& image : prepare(*model, golden_).images) {
      const Tensor rows = patch_values(image.patches);
      pixels.insert(pixels.end(), rows.as<float>(), rows.as<float>() + rows.shape().elements());
    }
    EXPECT_TRUE(within(tensor, pixels, test::patches_of_pixels(tensors_, tensor, 14), kPixelGate));
  }
}

constexpr const char* kHalfGates = "activations are rounded here: HalfGolden has their gates";

TEST_P(Golden, EveryTapEqualsTheReference) {
  if (test::rounds_activations(golden_.folder)) GTEST_SKIP() << kHalfGates;
  Taps taps;
  const auto cache = model_.cache("f32");
  Generator generator(*model_, *cache, model_.stream());
  generator.set_tap(collect(taps));
  generator.admit(golden_.request(), {});
  for (const TapGate& gate : tap_gates()) {
    if (!golden_.holds(gate.golden)) continue;
    const std::string name = golden_.tapped(gate.golden);
    const std::vector<float> reference = gate.ours == "pixel_values"
                                             ? test::patches_of_pixels(tensors_, name, 14)
                                             : tensors_.floats(name);
    const double scale = gate.relative ? std::max(1.0, deviation(reference)) : 1.0;
    ASSERT_TRUE(within(gate.ours, taps[gate.ours], reference, gate.gate * scale))
        << "first tap that differs: " << gate.ours << " of " << golden_.folder.filename() << " "
        << golden_.name();
  }
}

TEST_P(PictureGolden, LastLogitsOfThePilBackendEqualTheReference) {
  if (test::rounds_activations(golden_.folder)) GTEST_SKIP() << kHalfGates;
  const std::string name = golden_.tapped("logits_last_pil");
  LoadOptions options;
  options.image_backend = ResizeBackend::kPil;
  const LoadedModel model(golden_.folder, options);
  const auto cache = model.cache("f32");
  const int32_t nothing = 0;
  const auto logits = forced_logits(model, *cache, golden_, std::span(&nothing, 1));
  EXPECT_TRUE(within(name, logits.at(0), tensors_.floats(name), kLogitGate));
}

/// Teacher-forced: every step is fed the reference's token, so one slip cannot hide the next.
TEST_P(Golden, StepLogitsEqualTheReferenceTeacherForced) {
  if (test::rounds_activations(golden_.folder)) GTEST_SKIP() << kHalfGates;
  const std::vector<int32_t> ids = narrow(tensors_.integers(golden_.tensor("greedy_ids")));
  ASSERT_GE(ids.size(), 16u);
  const auto cache = model_.cache("f32");
  const auto logits = forced_logits(model_, *cache, golden_, ids);

  const std::vector<float> reference = tensors_.floats(golden_.tensor("greedy_logits"));
  const auto vocab = static_cast<size_t>(model_->decoder().vocab_size());
  ASSERT_EQ(reference.size(), 4 * vocab);
  double error = 0;
  for (size_t step = 0; step < 4; ++step) {
    const auto row = std::span(reference).subspan(step * vocab, vocab);
    ASSERT_TRUE(within(fmt::format("greedy_logits[{}]", step), logits[step], row, kLogitGate));
    error = std::max(error, largest_difference(logits[step], row).error);
  }
  EXPECT_GT(golden_.entry.at("min_gap").get<double>(), kGapOverError * error)
      << "the goldens have a step that rounding may decide; export them with another seed";

  SamplerOptions options;
  options.repetition_penalty = golden_.entry.at("repetition_penalty");
  Sampler sampler(options, model_->decoder().vocab_size());
  sampler.see(prepare(*model_, golden_).prompt.ids);
  for (size_t step = 0; step < ids.size(); ++step) {
    std::vector<float> scores = logits[step];
    ASSERT_EQ(sampler.sample(scores), ids[step]) << "step " << step;
    if (step < 4 && golden_.kind() == "repetition_penalty") {
      const std::vector<float> all = tensors_.floats(golden_.tensor("greedy_scores"));
      EXPECT_TRUE(within(fmt::format("greedy_scores[{}]", step), scores,
                         std::span(all).subspan(step * vocab, vocab), kLogitGate));
    }
    sampler.see(std::span(ids).subspan(step, 1));
  }
}

/// Free-running, with the cache in full precision and in the formats that are the default for
/// speed.
TEST_P(Golden, GreedyTokensEqualTheReference) {
  const std::vector<int32_t> ids = narrow(tensors_.integers(golden_.tensor("greedy_ids")));
  // A context that ends earlier than the reference, which has no limit, cuts the answer.
  const size_t room = static_cast<size_t>(model_->decoder().max_positions()) -
                      golden_.entry.at("prompt_tokens").get<size_t>();
  const std::vector<int32_t> expected(
      ids.begin(), ids.begin() + static_cast<std::ptrdiff_t>(std::min(ids.size(), room)));
  const bool cut = expected.size() < ids.size();
  ASSERT_GE(expected.size(), std::min(ids.size(), size_t{31}));
  for (const char* kv : {"f32", "f16"}) {
    const GenerationResult result = test::generate(model_, kv, golden_.request());
    ASSERT_EQ(result.tokens, expected) << "--kv " << kv;
    const bool stopped = golden_.entry.at("stopped_by_eos");
    EXPECT_EQ(result.finish_reason, stopped ? "stop" : "length");
    EXPECT_EQ(result.tokens.back() == 2, stopped);
    EXPECT_EQ(result.prompt_tokens, golden_.entry.at("prompt_tokens"));
    EXPECT_EQ(result.visual_tokens, golden_.entry.value("image_tokens", 0));
    if (!cut) {
      EXPECT_EQ(result.text, tensors_.text(golden_.tensor("text_out")));
    }
  }
}

TEST_P(Golden, TextEqualsTheReference) {
  const std::vector<int32_t> ids = narrow(tensors_.integers(golden_.tensor("greedy_ids")));
  const Tokenizer& tokenizer = model_->tokenizer();
  for (const bool skip_special : {true, false}) {
    const std::string expected =
        tensors_.text(golden_.tensor(skip_special ? "text_out" : "text_out_special"));
    EXPECT_EQ(tokenizer.decode(ids, skip_special), expected);
    StreamDecoder stream(tokenizer, skip_special);
    std::string text;
    for (const int32_t id : ids) text += stream.push(id);
    EXPECT_EQ(text + stream.finish(), expected) << "streamed";
  }
}

std::vector<float> prefill_logits(const LoadedModel& model, const GoldenCase& golden) {
  Taps taps;
  const auto cache = model.cache("f32", golden.rows());
  Generator generator(*model, *cache, model.stream());
  generator.set_tap(collect(taps));
  generator.admit(golden.request(), {});
  return taps.at("logits_prefill");
}

std::string name_of(const testing::TestParamInfo<GoldenCase>& tested) {
  return fmt::format("{}_{}_{}", tested.param.folder.filename().string(), tested.param.name(),
                     tested.param.kind());
}

std::vector<GoldenCase> cases_with_pictures() {
  std::vector<GoldenCase> cases = test::golden_cases();
  std::erase_if(cases, [](const GoldenCase& golden) { return !golden.holds_pictures(); });
  return cases;
}

INSTANTIATE_TEST_SUITE_P(, Golden, testing::ValuesIn(test::golden_cases()), name_of);
INSTANTIATE_TEST_SUITE_P(, PictureGolden, testing::ValuesIn(cases_with_pictures()), name_of);

/// So that a tensor that is lost, or added, is noticed.
TEST(GoldenFile, HoldsWhatItsCasesNeed) {
  std::map<fs::path, std::set<std::string>> needed;
  for (const GoldenCase& golden : test::golden_cases())
    needed[golden.goldens].merge(golden.tensors());
  for (const char* what : {"image_u8", "torchvision", "vertical_first", "horizontal_first"}) {
    needed[test::golden_root() / "llava_mha"].insert(std::string("resize0.") + what);
  }
  EXPECT_EQ(needed.size(), 7u);
  for (const auto& [folder, names] : needed) {
    std::set<std::string> found;
    const GoldenTensors tensors(folder / "golden.safetensors");
    for (const SafetensorsEntry& tensor : tensors.entries()) found.insert(tensor.name);
    EXPECT_EQ(found, names) << folder;
  }
}

TEST(GoldenFile, PicturesHaveTheSizesOfTheManifest) {
  size_t pictures = 0;
  for (const GoldenCase& golden : test::golden_cases()) {
    const std::vector<Image> images = golden.images();
    ASSERT_EQ(images.size(), golden.entry.at("images").size());
    for (size_t i = 0; i < images.size(); ++i, ++pictures) {
      EXPECT_EQ(nlohmann::json({images[i].height, images[i].width}),
                golden.entry.at("image_sizes")[i]);
    }
  }
  EXPECT_GE(pictures, 10u);
}

/// Both passes of a resize round to bytes, so their order matters for a tall picture; Pillow 13
/// goes vertically first where that saves work.
TEST(GoldenFile, TallPictureIsResizedInTheOrderOfTheReference) {
  const GoldenTensors tensors(test::golden_root() / "llava_mha" / "golden.safetensors");
  const Image image{131, 59, tensors.bytes("resize0.image_u8")};
  const auto resized = [&](ResizeBackend backend) {
    return resize(image, 124, 56, Resample::kBicubic, backend).rgb;
  };
  EXPECT_EQ(resized(ResizeBackend::kTorchvision), tensors.bytes("resize0.torchvision"));
  EXPECT_THAT(resized(ResizeBackend::kPil),
              testing::AnyOf(tensors.bytes("resize0.vertical_first"),
                             tensors.bytes("resize0.horizontal_first")));
}

/// A case alone is what the reference gives it in a batch with left padding.
TEST(GoldenBatch, CasesOfABatchGiveTheTokensThatTheyHaveAlone) {
  for (const char* folder : {"llava_mha", "llava_gqa"}) {
    const LoadedModel model(test::golden_root() / folder);
    const GoldenTensors tensors(test::golden_root() / folder / "golden.safetensors");
    const nlohmann::json manifest = test::golden_manifest(test::golden_root() / folder);
    ASSERT_FALSE(manifest.at("batches").empty());
    for (const nlohmann::json& batch : manifest.at("batches")) {
      const std::vector<std::string> names = batch.at("cases");
      const auto cache = model.cache("f32", 256, names.size());
      Generator generator(*model, *cache, model.stream());
      std::vector<int> keys;
      for (const std::string& name : names) {
        keys.push_back(generator.admit(golden_case(folder, name).request(), {}));
      }
      while (generator.active() > 0) generator.step();
      for (size_t i = 0; i < names.size(); ++i) {
        EXPECT_EQ(generator.take(keys[i]).tokens,
                  narrow(tensors.integers(names[i] + ".greedy_ids")))
            << folder << " " << names[i];
      }
    }
  }
}

/// The second turn of a conversation finds the first in the cache and gives what it gives when
/// prefilled as a whole.
TEST(GoldenChat, SecondTurnOnTheCacheOfTheFirstEqualsTheReference) {
  for (const char* folder : {"llava_mha", "llava_gqa"}) {
    const GoldenCase golden = golden_case(folder, "case6");
    ASSERT_EQ(golden.kind(), "two_turns");
    const LoadedModel model(golden.folder);
    const GoldenTensors tensors(golden.goldens / "golden.safetensors");
    test::RecordingModel recording(*model);
    const auto cache = model.cache("f32", 512);
    Generator generator(recording, *cache, model.stream());
    generator.set_session_rows(512);

    GenerationRequest first = golden.request();
    first.messages.resize(1);
    first.max_tokens = 1;
    const int key = generator.admit(std::move(first), {});
    generator.deliver();
    ASSERT_TRUE(generator.finished(key));
    const int kept = generator.result(key).prompt_tokens;
    generator.resume(key, golden.request(), {});
    while (generator.active() > 0) generator.step();
    generator.deliver();
    const GenerationResult result = generator.take(key);
    EXPECT_EQ(result.tokens, narrow(tensors.integers("case6.greedy_ids"))) << folder;
    EXPECT_EQ(recording.encoded(), 1) << "the picture was encoded again";
    EXPECT_EQ(recording.passes().at(1).rows, result.prompt_tokens - kept);
    const std::vector<float> logits = tensors.floats("case6.greedy_logits");
    EXPECT_TRUE(within("logits of the second turn", recording.passes().at(1).logits,
                       std::span(logits).first(320), kLogitGate));
  }
}

/// --dtype rounds like the exporter: the converted checkpoint is the rounded one, bit for bit.
TEST(GoldenDtype, ConvertedWeightsAreTheRoundedCheckpointBitForBit) {
  for (const auto& [dtype, folder] :
       {std::pair{DType::kF16, "llava_gqa_f16"}, std::pair{DType::kBF16, "llava_gqa_bf16"}}) {
    const GoldenCase golden = golden_case(folder, "case0");
    LoadOptions options;
    options.dtype = dtype;
    const LoadedModel converted(test::golden_root() / "llava_gqa", options);
    const LoadedModel rounded(golden.folder);
    EXPECT_EQ(converted->dtype(), dtype);
    EXPECT_EQ(rounded->dtype(), dtype);
    EXPECT_EQ(converted->weight_bytes(), rounded->weight_bytes());
    EXPECT_EQ(prefill_logits(converted, golden), prefill_logits(rounded, golden)) << folder;
  }
}

}  // namespace
}  // namespace kvlm
