// Batches of records over a model that fails when it is told to.
#include "tools/run/batch.h"

#include <fmt/format.h>
#include <gmock/gmock.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>
#include <new>
#include <set>
#include <sstream>
#include <stdexcept>

#include "kernels/base/error.h"
#include "tests/runtime/golden.h"
#include "tests/runtime/recording_model.h"
#include "tools/common/program.h"

namespace kvlm {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using test::RecordingModel;

constexpr const char* kLost = "the queue: the GPU reports \"lost\"; start again";

class BatchFailures : public testing::Test {
 protected:
  BatchFailures() {
    std::string pattern = (fs::temp_directory_path() / "kvlm-batch-XXXXXX").string();
    folder_ = mkdtemp(pattern.data());
    options_.session.model = "llava_gqa";  // the name that its records carry
    options_.session.device = device_name(test::test_device());
    options_.session.kv = "f32";
    options_.quiet = true;
    options_.batch_size = 1;
    options_.max_tokens = 4;
    options_.batch_in = (folder_ / "in.jsonl").string();
    options_.batch_out = (folder_ / "out.jsonl").string();
    std::ofstream in(options_.batch_in);
    for (int i = 0; i < kRecords; ++i) {
      in << json{{"id", i}, {"prompt", fmt::format("what is {}?", i)}}.dump() << "\n";
    }
  }
  ~BatchFailures() override { fs::remove_all(folder_); }

  /// Runs the batch; `before` is called before every forward pass. Returns the exit status.
  int run(std::function<void(const DecoderStep&)> before) {
    const test::LoadedModel loaded(test::golden_root() / options_.session.model);
    auto model = std::make_unique<RecordingModel>(*loaded);
    const RecordingModel& recorded = *model;
    model->set_before(std::move(before));
    Session session(options_.session, std::move(model));
    std::optional<BatchJob> job = open_batch(options_);
    const int status = run_batch(options_, *job, session);
    sampled_ = recorded.sampled();
    return status;
  }

  /// The records of --out, which must be whole lines.
  std::vector<json> written() const {
    const std::string text = test::read_file(options_.batch_out);
    EXPECT_TRUE(text.empty() || text.back() == '\n');
    std::vector<json> records;
    std::istringstream lines(text);
    for (std::string line; std::getline(lines, line);) records.push_back(json::parse(line));
    return records;
  }
  /// The ids of those that were answered, in order of the file.
  std::vector<int> answered() const {
    std::vector<int> ids;
    for (const json& record : written()) {
      if (record.contains("text")) ids.push_back(record.at("id"));
    }
    return ids;
  }

  /// A program with this body ends with status 1 and one sentence.
  void expect_lost(const std::function<void(const DecoderStep&)>& before) {
    testing::internal::CaptureStderr();
    const int status = run_program("vlm-run", [&] { return run(before); });
    EXPECT_EQ(status, kExitFailed);
    EXPECT_EQ(testing::internal::GetCapturedStderr(), fmt::format("vlm-run: {}\n", kLost));
  }

  static constexpr int kRecords = 6;
  fs::path folder_;
  RunOptions options_;
  int sampled_ = 0;  // videos, by the last run
};

TEST_F(BatchFailures, ALostDeviceEndsTheRunAndKeepsWhatIsFinished) {
  for (const bool in_prompt : {true, false}) {
    for (const int batch_size : {1, 2, 4}) {
      fs::remove(options_.batch_out);
      options_.batch_size = batch_size;
      int prompts = 0;
      expect_lost([&](const DecoderStep& step) {
        const bool prompt = step.sequences.front().prompt;
        prompts += prompt ? 1 : 0;
        if (prompts >= 5 && prompt == in_prompt) throw Error(ErrorCode::kDevice, kLost);
      });
      EXPECT_EQ(written().size(), answered().size()) << "what is lost is no record's failure";
      EXPECT_GE(answered().size(), 1u) << "the first answer waits for no batch to be full";
      EXPECT_LE(answered().size(), 4u);
      EXPECT_EQ(run({}), 0);
      const std::vector<int> all = answered();
      EXPECT_EQ(all.size(), static_cast<size_t>(kRecords));
      EXPECT_EQ(std::set<int>(all.begin(), all.end()).size(), all.size());
    }
  }
}

/// The prefill of a record that finds no memory beside the others is tried again when one of them
/// has left.
TEST_F(BatchFailures, ARecordWaitsForMemory) {
  options_.batch_size = 4;
  ASSERT_EQ(run({}), 0);
  const std::vector<json> expected = written();
  fs::remove(options_.batch_out);
  int prompts = 0;
  EXPECT_EQ(run([&](const DecoderStep& step) {
              if (step.sequences.front().prompt) {
                if (++prompts == 3) throw Error(ErrorCode::kOutOfMemory, "no memory");
              } else if (prompts == 3) {
                EXPECT_LE(step.sequences.size(), 2u) << "the third waits";
              }
            }),
            0);
  EXPECT_EQ(prompts, kRecords + 1);
  ASSERT_EQ(written().size(), expected.size());
  for (const json& record : written()) {
    ASSERT_FALSE(record.contains("error")) << record;
    EXPECT_EQ(record.at("tokens"), expected.at(record.at("id").get<size_t>()).at("tokens"));
  }
}

TEST_F(BatchFailures, ARecordThatFindsNoMemoryAloneFailsByItself) {
  int prompts = 0;
  EXPECT_EQ(run([&](const DecoderStep& step) {
              if (step.sequences.front().prompt && ++prompts == 3) {
                throw Error(ErrorCode::kOutOfMemory, "no memory");
              }
            }),
            kExitFailed);
  EXPECT_EQ(answered(), (std::vector<int>{0, 1, 3, 4, 5}));
  EXPECT_EQ(written().at(2), (json{{"id", 2}, {"error", "no memory"}, {"kind", "memory"}}));
}

/// Whatever one record throws is its own error, but for a lost device.
TEST_F(BatchFailures, ARecordThatThrowsFailsByItself) {
  const std::vector<std::pair<std::function<void()>, std::string>> failures{
      {[] { throw std::bad_alloc(); }, "out of memory"},
      {[] { throw std::length_error("vector::reserve"); }, "unexpected failure: vector::reserve"},
      {[] { throw std::runtime_error("odd"); }, "unexpected failure: odd"}};
  for (const auto& [fail, words] : failures) {
    fs::remove(options_.batch_out);
    int prompts = 0;
    EXPECT_EQ(run([&](const DecoderStep& step) {
                if (step.sequences.front().prompt && ++prompts == 3) fail();
              }),
              kExitFailed);
    EXPECT_EQ(answered(), (std::vector<int>{0, 1, 3, 4, 5}));
    EXPECT_THAT(written().at(2).at("error").get<std::string>(), testing::HasSubstr(words));
  }
}

/// A record that the machine's memory does not hold beside the others waits like one that the cache
/// does not hold.
TEST_F(BatchFailures, ARecordWaitsForTheMachine) {
  options_.batch_size = 4;
  int prompts = 0;
  EXPECT_EQ(run([&](const DecoderStep& step) {
              if (step.sequences.front().prompt && ++prompts == 3) throw std::bad_alloc();
            }),
            0);
  EXPECT_EQ(prompts, kRecords + 1);
  EXPECT_EQ(answered().size(), static_cast<size_t>(kRecords));
}

/// The context is looked at before anything runs, and one prompt too long is one record's error.
TEST_F(BatchFailures, APromptThatCannotBeServedFailsByItself) {
  const std::string picture = (test::golden_root() / "llava_gqa" / "image0.png").string();
  std::ofstream(options_.batch_in, std::ios::app)
      << json{{"id", 6}, {"prompt", std::string(30'000'000, 'a')}}.dump() << "\n"
      << json{{"id", 7}, {"prompt", std::string(6'000, 'a')}}.dump() << "\n"
      << json{{"id", 8}, {"images", std::vector<std::string>(400, picture)}}.dump() << "\n"
      << json{{"id", 9}, {"image", picture}, {"prompt", "<image> or <image>?"}}.dump() << "\n";
  EXPECT_EQ(run({}), kExitFailed);
  EXPECT_EQ(answered(), (std::vector<int>{0, 1, 2, 3, 4, 5}));
  const std::vector<json> records = written();
  ASSERT_EQ(records.size(), 10u);
  EXPECT_THAT(records[7].at("error").get<std::string>(), testing::HasSubstr("a context of"));
  EXPECT_THAT(
      records[8].at("error").get<std::string>(),
      testing::AllOf(testing::HasSubstr("of its 400 images"), testing::HasSubstr("a context of")));
  EXPECT_THAT(records[9].at("error").get<std::string>(), testing::HasSubstr("2 <image>"));
}

/// What a video is, and which of its frames are taken, is found out once, before anything runs;
/// they are decoded when it is the record's turn. Meanwhile no file is open.
TEST_F(BatchFailures, AVideoIsOpenedOnce) {
  options_.session.model = "internvl";
  const std::string clip = (test::source_folder() / "tests/vision/data/video/mixed3.gif").string();
  std::ofstream in(options_.batch_in);
  for (int i = 0; i < 40; ++i) in << json{{"id", i}, {"video", clip}}.dump() << "\n";
  in.close();
  size_t most_open = 0;
  EXPECT_EQ(run([&](const DecoderStep&) {
              const auto open =
                  std::distance(fs::directory_iterator("/proc/self/fd"), fs::directory_iterator());
              most_open = std::max(most_open, static_cast<size_t>(open));
            }),
            0);
  EXPECT_EQ(answered().size(), 40u);
  EXPECT_EQ(sampled_, 40);
  EXPECT_LT(most_open, 30u);
}

}  // namespace
}  // namespace kvlm
