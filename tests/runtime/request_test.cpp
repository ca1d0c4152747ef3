// Requests that are prepared apart from running them.
#include "runtime/request.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <thread>

#include "kernels/base/error.h"
#include "runtime/generator.h"
#include "tests/runtime/golden.h"
#include "tests/runtime/loading/safetensors_writer.h"
#include "tests/runtime/recording_model.h"

namespace kvlm {
namespace {

using test::error_of;
using test::LoadedModel;

/// Every family, with tiles, anyres, sizes of their own and clips.
constexpr const char* kModels[] = {"llava_gqa", "llava_next", "llava_onevision",
                                   "internvl",  "qwen2_5_vl", "qwen3_vl"};

std::vector<GenerationRequest> requests_of(const std::string& model) {
  std::vector<GenerationRequest> requests;
  for (const test::GoldenCase& golden : test::golden_cases_of(test::golden_root() / model)) {
    // Those of a text as it is rendered are no conversation.
    const bool conversation = !golden.entry.at("messages").is_null() ||
                              golden.entry.at("prompt").get<std::string>().starts_with("USER: ");
    if (conversation) requests.push_back(golden.request());
  }
  return requests;
}

PreparedRequest prepare(Model& model, const GenerationRequest& request) {
  return prepare_request(model, request, model.decoder().max_positions(), nullptr);
}

std::vector<int32_t> finish(Generator& generator, int key) {
  while (!generator.finished(key)) {
    generator.step();
    generator.deliver();
  }
  return generator.take(key).tokens;
}

void expect_same(const PreparedRequest& made, const PreparedRequest& expected) {
  EXPECT_EQ(made.prompt.ids, expected.prompt.ids);
  EXPECT_EQ(made.prompt.modality, expected.prompt.modality);
  EXPECT_EQ(made.prompt.positions, expected.prompt.positions);
  EXPECT_EQ(made.prompt.next_position, expected.prompt.next_position);
  ASSERT_EQ(made.visuals.size(), expected.visuals.size());
  for (size_t i = 0; i < made.visuals.size(); ++i) {
    const ConstTensorView rows = made.visuals[i].patches.rows;
    const ConstTensorView expected_rows = expected.visuals[i].patches.rows;
    EXPECT_EQ(made.visuals[i].rows, expected.visuals[i].rows);
    ASSERT_EQ(rows.bytes(), expected_rows.bytes());
    EXPECT_TRUE(std::equal(rows.data(), rows.data() + rows.bytes(), expected_rows.data()));
    const ConstTensorView values = made.visuals[i].patches.values;
    const ConstTensorView expected_values = expected.visuals[i].patches.values;
    ASSERT_EQ(values.bytes(), expected_values.bytes());
    EXPECT_TRUE(std::equal(values.data(), values.data() + values.bytes(), expected_values.data()));
  }
}

class PreparedRequests : public testing::TestWithParam<const char*> {};

INSTANTIATE_TEST_SUITE_P(Families, PreparedRequests, testing::ValuesIn(kModels),
                         [](const auto& test) { return std::string(test.param); });

/// Three threads prepare all requests while a fourth runs one: each makes what one alone makes.
TEST_P(PreparedRequests, AreTheSameByAnyThread) {
  const LoadedModel model(test::golden_root() / GetParam());
  const std::vector<GenerationRequest> requests = requests_of(GetParam());
  ASSERT_FALSE(requests.empty());
  std::vector<PreparedRequest> expected;
  for (const GenerationRequest& request : requests) expected.push_back(prepare(*model, request));
  std::vector<std::vector<PreparedRequest>> made(3);
  std::vector<std::thread> threads;
  for (std::vector<PreparedRequest>& own : made) {
    threads.emplace_back([&] {
      for (const GenerationRequest& request : requests) own.push_back(prepare(*model, request));
    });
  }
  const auto cache = model.cache("f16");
  Generator generator(*model, *cache, model.stream());
  GenerationRequest first = requests[0];
  first.max_tokens = 8;
  const std::vector<int32_t> tokens = finish(generator, generator.admit(first, {}));
  for (std::thread& thread : threads) thread.join();
  for (const std::vector<PreparedRequest>& own : made) {
    for (size_t i = 0; i < requests.size(); ++i) expect_same(own.at(i), expected[i]);
  }
  made[0][0].request.max_tokens = 8;
  EXPECT_EQ(finish(generator, generator.admit(std::move(made[0][0]), {})), tokens);
}

TEST(PreparedRequest, KeepsNoPixels) {
  const LoadedModel model(test::golden_root() / "qwen2_5_vl");
  for (const GenerationRequest& request : requests_of("qwen2_5_vl")) {
    const PreparedRequest made = prepare(*model, request);
    for (const Image& image : made.request.images) EXPECT_TRUE(image.rgb.empty());
    for (const DecodedClip& clip : made.request.videos) EXPECT_TRUE(clip.frames.empty());
  }
}

TEST(PreparedRequest, IsStillPreparedAfterItFoundNoRoom) {
  const LoadedModel loaded(test::golden_root() / "llava_gqa");
  test::RecordingModel model(*loaded);
  const GenerationRequest request = requests_of("llava_gqa")[0];
  PreparedRequest waiting = prepare(model, request);
  const auto cache = loaded.cache("f16", static_cast<int>(waiting.prompt.ids.size()) + 40);
  Generator generator(model, *cache, loaded.stream());
  const int first = generator.admit(request, {});
  EXPECT_EQ(error_of([&] { generator.admit(std::move(waiting), {}); }).code(),
            ErrorCode::kOutOfMemory);
  const int prepared = model.prepared();
  const std::vector<int32_t> tokens = finish(generator, first);
  EXPECT_EQ(finish(generator, generator.admit(std::move(waiting), {})), tokens);
  EXPECT_EQ(model.prepared(), prepared);
}

TEST(PreparedRequest, IsGivenUpBetweenPictures) {
  struct Canceller final : Watch {
    void progress(std::string_view, size_t, size_t) override {}
    bool cancelled() const noexcept override { return true; }
  } canceller;
  const LoadedModel model(test::golden_root() / "llava_gqa");
  EXPECT_EQ(error_of([&] {
              prepare_request(*model, requests_of("llava_gqa")[0], 400, &canceller);
            }).code(),
            ErrorCode::kCancelled);
}

}  // namespace
}  // namespace kvlm
