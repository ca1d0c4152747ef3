// Prefill and decode of many sequences, on the tiny golden checkpoint llava_gqa. That its tokens
// are right is golden_test.cpp's business.
#include "runtime/generator.h"

#include <fmt/format.h>
#include <gmock/gmock.h>

#include <chrono>
#include <map>
#include <set>
#include <string>
#include <thread>

#include "kernels/base/error.h"
#include "kvcache/plan/formula.h"
#include "tests/allocations.h"
#include "tests/runtime/golden.h"
#include "tests/runtime/loading/safetensors_writer.h"
#include "tests/runtime/recording_model.h"

namespace kvlm {
namespace {

using test::error_of;
using test::generate;
using test::golden_case;
using test::LoadedModel;
using test::RecordingModel;
using testing::AllOf;
using testing::HasSubstr;

constexpr const char* kFolder = "llava_gqa";

LoadedModel load(int threads = 1) {
  return LoadedModel(test::golden_root() / kFolder, {}, threads);
}

GenerationRequest golden_request(const char* name) { return golden_case(kFolder, name).request(); }

GenerationRequest text_request(const std::string& text, int max_tokens = 12) {
  GenerationRequest request;
  request.id = "text";
  request.messages = {user_message(text, 0, "<image>")};
  request.max_tokens = max_tokens;
  return request;
}

/// Steps until nothing is unfinished.
void run(Generator& generator) {
  generator.deliver();
  while (generator.active() > 0) {
    generator.step();
    generator.deliver();
  }
}

/// Eight requests with different pictures, lengths and ends, some of them drawn at random.
std::vector<GenerationRequest> eight_requests() {
  std::vector<GenerationRequest> requests;
  for (const char* name :
       {"case0", "case1", "case2", "case3", "case4", "case5", "case6", "case0"}) {
    requests.push_back(golden_request(name));
    requests.back().id = fmt::format("request {}", requests.size());
  }
  requests[1].max_tokens = 5;
  requests[2].max_tokens = 20;
  requests[4].max_tokens = 1;
  requests[6].max_tokens = 9;
  requests[6].sampling.temperature = 0.8;
  requests[6].sampling.seed = 4;
  requests[7].sampling.temperature = 1.2;
  requests[7].sampling.top_p = 0.9;
  requests[7].sampling.top_k = 40;
  requests[7].sampling.seed = 5;
  return requests;
}

/// Log probabilities are those of the recorded logits, and change no token.
TEST(Generator, LogprobsAreOfTheModelsOwnLogits) {
  const LoadedModel model = load();
  for (const int most : {0, 3}) {
    RecordingModel recording(*model);
    const auto cache = model.cache("f16");
    GenerationRequest request = golden_request("case0");
    request.sampling.repetition_penalty = 1.4;
    const GenerationResult plain = generate(recording, *cache, model.stream(), request);
    EXPECT_TRUE(plain.logprobs.empty());
    request.top_logprobs = most;
    const auto other = model.cache("f16");
    const GenerationResult result = generate(*model, *other, model.stream(), request);
    ASSERT_EQ(result.tokens, plain.tokens);
    ASSERT_EQ(result.logprobs.size(), result.tokens.size());
    const auto passes = recording.passes();
    for (size_t i = 0; i < result.tokens.size(); ++i) {
      const std::vector<float>& logits = passes[i].logits;
      const std::span last =
          std::span(logits).last(static_cast<size_t>(model->decoder().vocab_size()));
      double sum = 0;
      for (const float logit : last) sum += std::exp(static_cast<double>(logit));
      const auto expected = [&](int32_t id) {
        return static_cast<double>(last[static_cast<size_t>(id)]) - std::log(sum);
      };
      EXPECT_NEAR(result.logprobs[i].logprob, expected(result.tokens[i]), 1e-5);
      ASSERT_EQ(result.logprobs[i].top.size(), static_cast<size_t>(most));
      float before = 0;
      for (const auto& [id, logprob] : result.logprobs[i].top) {
        EXPECT_NEAR(logprob, expected(id), 1e-5);
        EXPECT_LE(logprob, before);
        before = logprob;
      }
      if (most > 0) {
        EXPECT_EQ(last[static_cast<size_t>(result.logprobs[i].top[0].first)],
                  *std::max_element(last.begin(), last.end()));
      }
    }
  }
}

struct Trace {
  std::vector<int32_t> tokens;
  std::string text;
  std::vector<std::vector<float>> logits;
};

Trace trace_alone(const LoadedModel& model, const GenerationRequest& request,
                  std::string_view kv = "f16") {
  RecordingModel recording(*model);
  const auto cache = model.cache(kv);
  Trace trace;
  GenerationResult result = generate(recording, *cache, model.stream(), request);
  trace.tokens = std::move(result.tokens);
  trace.text = std::move(result.text);
  for (RecordingModel::Pass& pass : recording.passes()) trace.logits.push_back(pass.logits);
  return trace;
}

/// All requests together: request i joins after `every` * i steps, and leaves when it is done, so
/// that later ones take over its place.
std::vector<Trace> trace_together(const LoadedModel& model,
                                  const std::vector<GenerationRequest>& requests, size_t every,
                                  std::string_view kv = "f16") {
  RecordingModel recording(*model);
  const auto cache = model.cache(kv, 160, requests.size());
  Generator generator(recording, *cache, model.stream());
  std::vector<Trace> traces(requests.size());
  std::map<SequenceId, size_t> owner;  // of the sequences in the cache
  std::map<size_t, int> keys;
  const auto collect = [&] {
    for (RecordingModel::Pass& pass : recording.passes()) {
      traces[owner.at(pass.sequence)].logits.push_back(std::move(pass.logits));
    }
    recording.passes().clear();
  };
  size_t next = 0;
  for (size_t step = 0; next < requests.size() || generator.active() > 0; ++step) {
    while (next < requests.size() && step >= every * next) {
      const int key = generator.admit(
          requests[next], [&traces, next](std::string_view text) { traces[next].text += text; });
      owner[recording.passes().back().sequence] = next;
      keys[next++] = key;
      collect();
    }
    generator.step();
    collect();
    generator.deliver();
    for (auto entry = keys.begin(); entry != keys.end();) {
      if (!generator.finished(entry->second)) {
        ++entry;
        continue;
      }
      traces[entry->first].tokens = generator.take(entry->second).tokens;
      entry = keys.erase(entry);
    }
  }
  EXPECT_TRUE(keys.empty());
  EXPECT_EQ(cache->bytes(), 0u);
  return traces;
}

class GeneratorBatch : public testing::TestWithParam<size_t> {};

/// Batch 1 and batch 8 give the same tokens, text and, bit for bit, the same logits, whoever joins
/// and leaves in between.
TEST_P(GeneratorBatch, BatchOfEightEqualsEachAloneBitForBit) {
  const LoadedModel model = load();
  const std::vector<GenerationRequest> requests = eight_requests();
  const std::vector<Trace> together = trace_together(model, requests, GetParam());
  std::set<size_t> lengths;
  for (size_t i = 0; i < requests.size(); ++i) {
    const Trace alone = trace_alone(model, requests[i]);
    EXPECT_EQ(together[i].tokens, alone.tokens) << requests[i].id;
    EXPECT_EQ(together[i].text, alone.text) << requests[i].id;
    ASSERT_EQ(together[i].logits.size(), alone.logits.size());
    for (size_t step = 0; step < alone.logits.size(); ++step) {
      ASSERT_EQ(together[i].logits[step], alone.logits[step]) << requests[i].id << " step " << step;
    }
    lengths.insert(alone.tokens.size());
  }
  EXPECT_GE(lengths.size(), 6u) << "they should leave at different steps";
}

INSTANTIATE_TEST_SUITE_P(JoiningEvery, GeneratorBatch, testing::Values(0, 1, 3));

/// More sequences than one streamed product takes.
TEST(Generator, BatchOfTwentyGivesTheTokensOfEachAlone) {
  const LoadedModel model = load();
  std::vector<GenerationRequest> requests;
  for (int i = 0; i < 20; ++i) {
    requests.push_back(text_request(fmt::format("tell me {} colours", i), 10));
  }
  const std::vector<Trace> together = trace_together(model, requests, 0);
  for (size_t i = 0; i < requests.size(); ++i) {
    EXPECT_EQ(together[i].tokens, trace_alone(model, requests[i]).tokens) << i;
  }
}

TEST(Generator, ThreadsDoNotChangeOneBit) {
  const std::vector<GenerationRequest> requests = eight_requests();
  const std::vector<Trace> one = trace_together(load(1), requests, 1);
  for (const int threads : {2, 3, 5}) {
    const std::vector<Trace> more = trace_together(load(threads), requests, 1);
    for (size_t i = 0; i < requests.size(); ++i) {
      EXPECT_EQ(more[i].tokens, one[i].tokens) << threads << " threads, " << requests[i].id;
      EXPECT_EQ(more[i].logits, one[i].logits) << threads << " threads, " << requests[i].id;
    }
  }
}

/// By the count of everything that asks for memory in this process.
TEST(Generator, StepAllocatesNothingFor300Steps) {
  for (const int threads : {1, 3}) {
    const LoadedModel model = load(threads);
    for (const size_t batch : {1, 8}) {
      for (const char* kv : {"f16", "f32"}) {
        const auto cache = model.cache(kv, 400, batch);
        Generator generator(*model, *cache, model.stream());
        for (size_t i = 0; i < batch; ++i) {
          GenerationRequest request = golden_request("case0");
          request.max_tokens = 340;
          request.ignore_eos = true;
          request.sampling.repetition_penalty = 1.05;
          if (i % 2 == 1) {
            request.sampling.temperature = 0.7;
            request.sampling.top_k = 40;
            request.sampling.top_p = 0.9;
          }
          generator.admit(request, {});
        }
        generator.step();
        const size_t before = allocations();
        for (int step = 0; step < 300; ++step) generator.step();
        EXPECT_EQ(allocations() - before, 0u)
            << threads << " threads, batch of " << batch << ", --kv " << kv;
        EXPECT_EQ(generator.active(), static_cast<int>(batch));
      }
    }
  }
}

/// Bytes of a sequence of `request` after `steps` decode steps, by the closed formula.
size_t expected_bytes(const CachePlan& plan, const GenerationResult& result, int images,
                      int steps) {
  const LayerCounts counts{result.prompt_tokens, result.visual_tokens, images, steps};
  const std::vector<LayerCounts> layers(static_cast<size_t>(plan.shape.layers), counts);
  size_t sum = 0;
  for (const PartBytes& layer : formula(plan, layers)) sum += layer.total();
  return sum;
}

class GeneratorBytes : public testing::TestWithParam<const char*> {};

/// bytes() equals the formula after the prefill and after each of 300 decode steps.
TEST_P(GeneratorBytes, CacheBytesEqualTheFormulaAtEveryStep) {
  const LoadedModel model = load();
  const auto plan = plan_cache(parse_spec(GetParam()), model->decoder().cache_shape());
  const auto cache = make_cache(plan, 2 * session_bytes(*plan, 400), test::test_device());
  Generator generator(*model, *cache, model.stream());
  const auto admit = [&](const char* name) {
    GenerationRequest request = golden_request(name);
    request.max_tokens = 305;
    request.ignore_eos = true;
    return generator.admit(request, {});
  };
  const int a = admit("case0");  // a picture
  const auto bytes_a = [&](int steps) {
    return expected_bytes(*plan, generator.result(a), 1, steps);
  };
  EXPECT_EQ(cache->bytes(), bytes_a(0));
  const int b = admit("case2");  // text alone
  const auto bytes_b = [&](int steps) {
    return expected_bytes(*plan, generator.result(b), 0, steps);
  };
  for (int step = 1; step <= 300; ++step) {
    generator.step();
    ASSERT_EQ(cache->bytes(), bytes_a(step) + bytes_b(step)) << "step " << step;
    ASSERT_EQ(generator.result(a).cache.bytes, bytes_a(step));
  }
  const int rows_a = generator.result(a).prompt_tokens + 300;
  const CacheReport report = generator.result(a).cache;
  EXPECT_EQ(report.f16_bytes, expected_bytes(*plan_cache(parse_spec("f16"), plan->shape),
                                             generator.result(a), 1, 300));
  EXPECT_EQ(report.slots, rows_a);
  const size_t left = bytes_b(300);
  generator.take(a);
  EXPECT_EQ(cache->bytes(), left);
  generator.take(b);
  EXPECT_EQ(cache->bytes(), 0u);
}

INSTANTIATE_TEST_SUITE_P(, GeneratorBytes,
                         testing::Values("f32", "f16", "bf16", "kivi,group=8,residual=16",
                                         "vidkv,group=8,residual=16",
                                         "calibquant + int4,scope=text"),
                         [](const auto& tested) {
                           std::string name(tested.param);
                           std::replace_if(
                               name.begin(), name.end(),
                               [](unsigned char c) { return std::isalnum(c) == 0; }, '_');
                           return name;
                         });

TEST(Generator, FinishReasons) {
  const LoadedModel model = load();
  GenerationRequest request = golden_request("case5");
  GenerationResult result = generate(model, "f32", request);
  EXPECT_EQ(result.finish_reason, "stop");
  EXPECT_EQ(result.tokens.back(), 2) << "the eos is returned as a token";
  EXPECT_THAT(result.text, testing::Not(HasSubstr("</s>"))) << "but not as text";
  const size_t until_eos = result.tokens.size();

  request.ignore_eos = true;
  result = generate(model, "f32", request);
  EXPECT_EQ(result.finish_reason, "length");
  EXPECT_EQ(result.tokens.size(), 32u);
  EXPECT_EQ(result.tokens[until_eos - 1], 2);

  request.ignore_eos = false;
  request.max_tokens = static_cast<int>(until_eos);  // both at once: the model ended it
  EXPECT_EQ(generate(model, "f32", request).finish_reason, "stop");
  request.max_tokens = static_cast<int>(until_eos) - 1;
  EXPECT_EQ(generate(model, "f32", request).finish_reason, "length");
  request.max_tokens = 1;
  result = generate(model, "f32", request);
  EXPECT_EQ(result.tokens.size(), 1u);
  EXPECT_EQ(result.finish_reason, "length");
}

TEST(Generator, CancelledSequencesKeepWhatTheyHave) {
  const LoadedModel model = load();
  const auto cache = model.cache("f32", 200, 2);
  Generator generator(*model, *cache, model.stream());
  std::string shown;
  const int a = generator.admit(golden_request("case0"), [&](std::string_view t) { shown += t; });
  const int b = generator.admit(golden_request("case2"), {});
  generator.step();
  generator.step();
  generator.cancel(a);
  EXPECT_TRUE(generator.finished(a));
  EXPECT_FALSE(generator.finished(b));
  EXPECT_EQ(generator.active(), 1);
  run(generator);
  const GenerationResult result = generator.take(a);
  EXPECT_EQ(result.finish_reason, "cancelled");
  EXPECT_EQ(result.tokens.size(), 3u);
  EXPECT_EQ(result.text, model->tokenizer().decode(result.tokens, true));
  EXPECT_EQ(shown, result.text);
  generator.cancel(b);  // it has ended by itself
  EXPECT_EQ(generator.take(b).finish_reason, "length");
}

/// Cancels when it is asked for the `patience`-th time; counts how often it was.
class Canceller final : public Watch {
 public:
  explicit Canceller(int patience) : patience_(patience) {}
  void progress(std::string_view phase, size_t done, size_t total) override {
    if (done == total) ended.insert(std::string(phase));
  }
  bool cancelled() const noexcept override { return ++asked >= patience_; }

  std::set<std::string> ended;
  mutable int asked = 0;

 private:
  int patience_;
};

class GeneratorCancelled : public testing::TestWithParam<const char*> {};

TEST_P(GeneratorCancelled, APromptGivenUpAnywhereLeavesTheCacheToTheNext) {
  const LoadedModel model = load();
  const auto cache = model.cache(GetParam(), 160, 2);
  Generator generator(*model, *cache, model.stream());
  const GenerationRequest request = golden_request("case0");
  Canceller patient(1 << 30);
  std::vector<int32_t> expected;
  {
    const WatchScope scope(model.stream(), &patient);
    const int key = generator.admit(request, {});
    run(generator);
    expected = generator.take(key).tokens;
  }
  EXPECT_THAT(patient.ended, testing::UnorderedElementsAre("vision", "prefill"));
  const size_t bytes = cache->bytes();
  int given_up = 0;
  for (int patience = 1; patience <= patient.asked; patience += 1 + patience / 8) {
    Canceller canceller(patience);
    int key = -1;
    {
      const WatchScope scope(model.stream(), &canceller);
      key = generator.admit(request, {});
    }
    if (generator.result(key).finish_reason != "cancelled") {  // its prompt was done before
      generator.take(key);
      continue;
    }
    ++given_up;
    EXPECT_TRUE(generator.finished(key));
    EXPECT_EQ(generator.active(), 0);
    EXPECT_TRUE(generator.take(key).tokens.empty());
    ASSERT_EQ(cache->bytes(), bytes) << "after " << patience;
    const int next = generator.admit(request, {});
    run(generator);
    ASSERT_EQ(generator.take(next).tokens, expected) << "after " << patience;
  }
  EXPECT_GT(given_up, 10);
}

INSTANTIATE_TEST_SUITE_P(Policies, GeneratorCancelled,
                         testing::Values("f16", "kivi,bits=2", "prefixkv,keep=0.5 + int4",
                                         "calibquant,bits=2", "xquant", "vidkv"));

TEST(Generator, ATurnGivenUpIsAskedAgainAsIfItHadNeverBeen) {
  const LoadedModel model = load();
  const auto cache = model.cache("f16", 300);
  Generator generator(*model, *cache, model.stream());
  generator.set_session_rows(300);
  GenerationRequest first = golden_request("case0");
  const int key = generator.admit(first, {});
  run(generator);
  GenerationRequest second = first;
  second.messages.push_back(
      {"assistant", {{ContentItem::Kind::kText, generator.result(key).text}}});
  second.messages.push_back(user_message("Why?", 0, "<image>"));
  {
    Canceller canceller(3);
    const WatchScope scope(model.stream(), &canceller);
    generator.resume(key, second, {});
  }
  EXPECT_TRUE(generator.finished(key));
  EXPECT_EQ(generator.result(key).finish_reason, "cancelled");
  EXPECT_EQ(generator.result(key).text, "");
  generator.resume(key, second, {});
  run(generator);
  const auto fresh_cache = model.cache("f16", 300);
  Generator fresh(*model, *fresh_cache, model.stream());
  fresh.set_session_rows(300);
  const int again = fresh.admit(second, {});
  run(fresh);
  EXPECT_EQ(generator.result(key).tokens, fresh.result(again).tokens);
}

TEST(Generator, AShortStepIsFinishedAlthoughItsWatchCancels) {
  const LoadedModel model = load();
  const auto cache = model.cache("f16");
  Generator generator(*model, *cache, model.stream());
  const int key = generator.admit(golden_request("case0"), {});
  Canceller canceller(1);
  const WatchScope scope(model.stream(), &canceller);
  generator.step();
  EXPECT_EQ(generator.result(key).tokens.size(), 2u);
  EXPECT_EQ(generator.active(), 1);
}

TEST(Generator, ALongStepIsGivenUpWithWhatWasMadeBefore) {
  const LoadedModel model = load();
  RecordingModel slow(*model);
  const auto cache = model.cache("f16");
  Generator generator(slow, *cache, model.stream());
  const int key = generator.admit(golden_request("case0"), {});
  const size_t bytes = cache->bytes();
  slow.set_before(
      [](const DecoderStep&) { std::this_thread::sleep_for(std::chrono::milliseconds(400)); });
  Canceller canceller(1);
  const WatchScope scope(model.stream(), &canceller);
  generator.step();
  generator.deliver();
  EXPECT_TRUE(generator.finished(key));
  EXPECT_LT(cache->bytes(), bytes);  // a pass that is given up costs the sequence its cache
  const GenerationResult result = generator.take(key);
  EXPECT_EQ(result.finish_reason, "cancelled");
  EXPECT_EQ(result.tokens.size(), 1u);
}

TEST(Generator, TextIsTheDecodingOfAllTokens) {
  const LoadedModel model = load();
  for (uint64_t seed = 0; seed < 25; ++seed) {
    GenerationRequest request = golden_request("case0");
    request.sampling.temperature = 1.5;
    request.sampling.seed = seed;
    request.max_tokens = 60;
    const auto cache = model.cache("f16");
    Generator generator(*model, *cache, model.stream());
    std::string shown;
    const int key = generator.admit(request, [&](std::string_view text) {
      EXPECT_FALSE(text.empty());
      shown += text;
    });
    run(generator);
    const GenerationResult result = generator.take(key);
    EXPECT_EQ(result.text, model->tokenizer().decode(result.tokens, true)) << "seed " << seed;
    EXPECT_EQ(shown, result.text);
  }
}

TEST(Generator, SeedDecidesTheTokens) {
  const LoadedModel model = load();
  GenerationRequest request = golden_request("case2");
  request.sampling.temperature = 1;
  request.sampling.seed = 1;
  const std::vector<int32_t> first = generate(model, "f16", request).tokens;
  EXPECT_EQ(generate(model, "f16", request).tokens, first);
  request.sampling.seed = 2;
  EXPECT_NE(generate(model, "f16", request).tokens, first);
}

/// Any piece of the answer as stop text, within a token, across tokens or at the very start: the
/// text ends before its first occurrence, and nothing of it is ever shown.
TEST(Generator, StopTextEndsTheAnswerBeforeIt) {
  const LoadedModel model = load();
  const GenerationResult whole = generate(model, "f32", golden_request("case0"));
  // Starts of characters, so that a stop text is valid UTF-8 as a user would give it.
  std::vector<size_t> starts;
  for (size_t i = 0; i < whole.text.size(); ++i) {
    if ((static_cast<unsigned char>(whole.text[i]) & 0xc0) != 0x80) starts.push_back(i);
  }
  starts.push_back(whole.text.size());
  size_t across = 0;
  for (size_t begin = 0; begin + 1 < starts.size(); begin += begin < 6 ? 1 : 3) {
    for (const size_t length : {size_t{1}, size_t{2}, size_t{5}}) {
      if (begin + length >= starts.size()) continue;
      const std::string stop =
          whole.text.substr(starts[begin], starts[begin + length] - starts[begin]);
      GenerationRequest request = golden_request("case0");
      request.stop = {stop};
      const auto cache = model.cache("f32");
      Generator generator(*model, *cache, model.stream());
      std::string shown;
      const int key =
          generator.admit(std::move(request), [&](std::string_view text) { shown += text; });
      run(generator);
      const GenerationResult result = generator.take(key);
      EXPECT_EQ(result.text, whole.text.substr(0, whole.text.find(stop))) << "stop " << stop;
      EXPECT_EQ(shown, result.text);
      EXPECT_EQ(result.finish_reason, "stop");
      // The tokens go as far as the one that completed the stop text.
      const std::string decoded = model->tokenizer().decode(result.tokens, true);
      if (result.tokens.size() < whole.tokens.size()) ++across;
      EXPECT_EQ(result.tokens,
                std::vector<int32_t>(
                    whole.tokens.begin(),
                    whole.tokens.begin() + static_cast<std::ptrdiff_t>(result.tokens.size())));
    }
  }
  EXPECT_GT(across, 10u) << "stop texts should end the generation early";
}

TEST(Generator, StopTextAtTheVeryStartLeavesNothing) {
  const LoadedModel model = load();
  GenerationRequest request = golden_request("case0");
  request.stop = {generate(model, "f32", request).text.substr(0, 3)};
  const GenerationResult result = generate(model, "f32", request);
  EXPECT_EQ(result.text, "");
  EXPECT_EQ(result.finish_reason, "stop");
  EXPECT_LT(result.tokens.size(), 5u);
}

TEST(Generator, StopTextThatOnlyStartsIsShownInTheEnd) {
  const LoadedModel model = load();
  GenerationRequest request = golden_request("case0");
  const std::string text = generate(model, "f32", request).text;
  request.stop = {text.substr(text.size() - 4) + "never", "", "absent"};
  const GenerationResult result = generate(model, "f32", request);
  EXPECT_EQ(result.text, text);
  EXPECT_EQ(result.finish_reason, "length");
}

TEST(Generator, EarliestOfSeveralStopTextsCounts) {
  const LoadedModel model = load();
  GenerationRequest request = golden_request("case0");
  const std::string text = generate(model, "f32", request).text;  // "\x1f" "re is..."
  ASSERT_TRUE(text.starts_with("\x1fre is")) << "the goldens have changed";
  request.stop = {" is", "e ", "zzz"};
  EXPECT_EQ(generate(model, "f32", request).text, "\x1fr");
}

TEST(Generator, MaxTokensAreCutAtTheContext) {
  const LoadedModel model = load();
  GenerationRequest request = golden_request("case2");
  request.max_tokens = 100000;
  request.ignore_eos = true;
  const GenerationResult result = generate(model, "f16", request);
  EXPECT_EQ(result.prompt_tokens, 35);
  EXPECT_EQ(result.tokens.size(), 512u - 35);
  EXPECT_EQ(result.finish_reason, "length");
}

/// "a a a ..." of n words, for prompts of a wanted length.
std::string words(int n) {
  std::string text;
  for (int i = 0; i < n; ++i) text += " z";
  return text;
}

TEST(Generator, RefusesAPromptLongerThanTheContextByBothNumbers) {
  const LoadedModel model = load();
  const auto cache = model.cache("f16", 512);
  Generator generator(*model, *cache, model.stream());
  const int key = generator.admit(text_request("a", 20), {});
  const size_t bytes = cache->bytes();
  GenerationRequest request = text_request(words(600));
  request.id = "record-9";
  const int tokens = static_cast<int>(test::prompt_of(*model, request.messages).ids.size());
  ASSERT_GE(tokens, 512);
  const Error error = error_of([&] { generator.admit(request, {}); });
  EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
  EXPECT_THAT(error.what(),
              AllOf(HasSubstr("record-9"), HasSubstr(fmt::format("{} tokens", tokens)),
                    HasSubstr("context of 512")));
  EXPECT_EQ(cache->bytes(), bytes);
  run(generator);  // the other goes on
  EXPECT_EQ(generator.take(key).tokens, generate(model, "f16", text_request("a", 20)).tokens);
}

/// A picture takes 1.4 MB once it is ready for a tower of 336 x 336; those that the context cannot
/// hold are not made ready.
TEST(Generator, RefusesMorePicturesThanTheContextHoldsBeforeTheyArePrepared) {
  const LoadedModel model = load();
  test::RecordingModel recorded(*model);
  const auto cache = model.cache("f16", 512);
  Generator generator(recorded, *cache, model.stream());
  GenerationRequest request = golden_request("case0");
  ASSERT_FALSE(request.images.empty());
  request.id = "record-9";
  request.images.assign(2000, request.images.front());
  request.messages = {user_message("what?", 2000, recorded.image_token())};
  const Error error = error_of([&] { generator.admit(request, {}); });
  EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
  EXPECT_THAT(error.what(), AllOf(HasSubstr("record-9"), HasSubstr("of its 2000 images"),
                                  HasSubstr("context of 512")));
  EXPECT_EQ(recorded.prepared(), 0);
  EXPECT_EQ(cache->bytes(), 0u);
}

TEST(Generator, SessionRowsAreTheContext) {
  const LoadedModel model = load();
  const auto cache = model.cache("f16", 64);
  Generator generator(*model, *cache, model.stream());
  generator.set_session_rows(64);
  GenerationRequest request = golden_request("case2");
  request.max_tokens = 1000;
  request.ignore_eos = true;
  const int key = generator.admit(request, {});
  run(generator);
  EXPECT_EQ(generator.take(key).tokens.size(), 64u - 35);
  const Error error = error_of([&] { generator.admit(text_request(words(100)), {}); });
  EXPECT_THAT(error.what(), HasSubstr("context of 64"));
}

TEST(Generator, RefusesWhatDoesNotFitAndServesItWhenThereIsRoom) {
  const LoadedModel model = load();
  const auto plan = plan_cache(parse_spec("f16"), model->decoder().cache_shape());
  // Exactly one request of 35 + 32 rows.
  const auto cache = make_cache(plan, reservation(*plan, {35, 0, 67}).bytes(), {});
  Generator generator(*model, *cache, model.stream());
  const int key = generator.admit(golden_request("case2"), {});
  const size_t bytes = cache->bytes();
  GenerationRequest request = golden_request("case5");
  request.id = "record-2";
  const Error error = error_of([&] { generator.admit(request, {}); });
  EXPECT_EQ(error.code(), ErrorCode::kOutOfMemory);
  EXPECT_THAT(error.what(), AllOf(HasSubstr("record-2"), HasSubstr("60 tokens under --kv f16"),
                                  HasSubstr("0 bytes of ")));
  EXPECT_EQ(cache->bytes(), bytes);
  EXPECT_EQ(generator.active(), 1);
  run(generator);
  EXPECT_EQ(generator.take(key).tokens, generate(model, "f16", golden_request("case2")).tokens);
  const int second = generator.admit(request, {});
  EXPECT_EQ(second, key) << "the place is free again";
  run(generator);
  EXPECT_EQ(generator.take(second).tokens, generate(model, "f16", request).tokens);
}

TEST(Generator, RefusesPicturesWithoutPlaceholdersAndGoesOn) {
  const LoadedModel model = load();
  const auto cache = model.cache("f16", 200, 2);
  Generator generator(*model, *cache, model.stream());
  const int key = generator.admit(golden_request("case0"), {});
  GenerationRequest request = golden_request("case0");
  request.images.push_back(request.images[0]);
  const Error error = error_of([&] { generator.admit(request, {}); });
  EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
  EXPECT_THAT(error.what(), AllOf(HasSubstr("1 <image> placeholder "), HasSubstr("2 images")));
  run(generator);
  EXPECT_EQ(generator.take(key).tokens, generate(model, "f16", golden_request("case0")).tokens);
}

TEST(Generator, CountsTokensAndTime) {
  const LoadedModel model = load();
  const GenerationResult result = generate(model, "f16", golden_request("case1"));
  EXPECT_EQ(result.prompt_tokens, 86);
  EXPECT_EQ(result.visual_tokens, 32);
  EXPECT_GT(result.timings.vision_ms, 0);
  EXPECT_GT(result.timings.prefill_ms, 0);
  EXPECT_GE(result.timings.ttft_ms, result.timings.prefill_ms);
  EXPECT_GT(result.timings.decode_ms, 0);
  EXPECT_EQ(result.cache.slots, 86 + 31) << "the last token is not fed";
  EXPECT_EQ(generate(model, "f16", golden_request("case2")).visual_tokens, 0);
}

ChatMessage says(const char* role, const std::string& text) {
  return {role, {{ContentItem::Kind::kText, text}}};
}

/// A further turn gives what a fresh sequence of the whole conversation gives, whether its start is
/// what the cache holds or not.
TEST(Generator, ResumedTurnsEqualAFreshConversation) {
  const LoadedModel model = load();
  RecordingModel recording(*model);
  const auto cache = model.cache("f32", 400);
  Generator generator(recording, *cache, model.stream());
  generator.set_session_rows(400);
  GenerationRequest request = golden_request("case0");
  request.max_tokens = 1;
  const int key = generator.admit(request, {});
  run(generator);

  const auto turn = [&](const std::string& answer, const std::string& question) {
    request.messages.push_back(says("assistant", answer));
    request.messages.push_back(says("user", question));
    request.max_tokens = 20;
    generator.resume(key, request, {});
    run(generator);
    const GenerationResult result = generator.result(key);
    EXPECT_EQ(result.tokens, generate(model, "f32", request).tokens) << question;
    EXPECT_EQ(result.finish_reason, "length");
    return recording.passes();
  };
  // Nothing was generated into the cache beyond the prompt: it is kept.
  const int prompt = generator.result(key).prompt_tokens;
  recording.passes().clear();
  int fed = turn("red", "and now?").at(0).rows;
  EXPECT_EQ(fed, generator.result(key).prompt_tokens - prompt);
  // The cache now holds an answer that this conversation does not have: prefilled anew.
  recording.passes().clear();
  fed = turn("something else", "why?").at(0).rows;
  EXPECT_EQ(fed, generator.result(key).prompt_tokens);
  EXPECT_EQ(cache->bytes(), generator.result(key).cache.bytes) << "the old rows are gone";
}

/// Dynamic RoPE turns the rows of a long sequence by its length when they are read: the reference
/// reads the whole conversation at every turn.
TEST(Generator, TurnsBeyondTheSettledPositionsAreReadAnew) {
  const LoadedModel model(test::golden_root() / "llava_rope_dynamic");
  ASSERT_EQ(model->decoder().settled_positions(), 48);
  ASSERT_EQ(model->decoder().max_positions(), 96);
  RecordingModel recording(*model);
  const auto cache = model.cache("f32", 96);
  Generator generator(recording, *cache, model.stream());
  generator.set_session_rows(96);
  GenerationRequest request = text_request("one two", 1);
  const int key = generator.admit(request, {});
  run(generator);
  const int first = generator.result(key).prompt_tokens;
  ASSERT_LT(first, 30);

  std::vector<int> fed;
  std::vector<int> lengths;
  for (const char* question : {"a", "what is in this picture, and where is it?"}) {
    request.messages.push_back(says("assistant", "b"));
    request.messages.push_back(says("user", question));
    recording.passes().clear();
    generator.resume(key, request, {});
    run(generator);
    fed.push_back(recording.passes().at(0).rows);
    lengths.push_back(generator.result(key).prompt_tokens);
    RecordingModel fresh(*model);
    const auto own = model.cache("f32", 96);
    generate(fresh, *own, model.stream(), request);
    EXPECT_EQ(recording.passes()[0].logits.size(), fresh.passes()[0].logits.size());
    for (size_t i = 0; i < fresh.passes()[0].logits.size(); ++i) {
      ASSERT_NEAR(recording.passes()[0].logits[i], fresh.passes()[0].logits[i], 1e-5) << question;
    }
  }
  ASSERT_LE(lengths[0], 48);
  ASSERT_GT(lengths[1], 48);
  EXPECT_EQ(fed[0], lengths[0] - first) << "short: what the cache holds stays";
  EXPECT_EQ(fed[1], lengths[1]);
}

TEST(Generator, APromptBeyondTheSlidingWindowIsRefusedOnesWithinAreServed) {
  const LoadedModel whole = load();
  const LoadedModel model(test::golden_root() / kFolder, {}, 1, [](ModelSource& source) {
    source.config["text_config"]["model_type"] = "mistral";
    source.config["text_config"]["sliding_window"] = 40;
  });
  const auto cache = model.cache("f32", 100);
  Generator generator(*model, *cache, model.stream());
  const Error error = error_of([&] { generator.admit(text_request(words(60)), {}); });
  EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
  EXPECT_THAT(error.what(), HasSubstr("a context of 40 (its sliding window"));
  const GenerationResult result = generate(model, "f32", text_request("one two", 100));
  EXPECT_EQ(static_cast<int>(result.tokens.size()) + result.prompt_tokens, 40);
  std::vector<int32_t> expected = generate(whole, "f32", text_request("one two", 100)).tokens;
  expected.resize(result.tokens.size());
  EXPECT_EQ(result.tokens, expected);
}

/// The rules of generation_config.json reach the tokens, alone and in company.
TEST(Generator, RulesDecideWhatMayComeNext) {
  const LoadedModel model = load();
  const std::vector<int32_t> plain = generate(model, "f16", text_request("a", 6)).tokens;
  GenerationRequest suppressed = text_request("a", 6);
  suppressed.sampling.rules.suppress_tokens = {plain[0]};
  GenerationRequest forced = text_request("a", 6);
  forced.sampling.rules.forced_eos_token = 2;
  GenerationRequest unique = text_request("a", 6);
  unique.sampling.rules.no_repeat_ngram_size = 1;

  const auto cache = model.cache("f16", 160, 4);
  Generator generator(*model, *cache, model.stream());
  std::vector<int> keys;
  for (const GenerationRequest& request : {text_request("a", 6), suppressed, forced, unique}) {
    keys.push_back(generator.admit(request, {}));
  }
  run(generator);
  std::vector<std::vector<int32_t>> tokens;
  for (const int key : keys) tokens.push_back(generator.take(key).tokens);
  EXPECT_EQ(tokens[0], plain);
  EXPECT_EQ(std::count(tokens[1].begin(), tokens[1].end(), plain[0]), 0);
  EXPECT_EQ(tokens[1], generate(model, "f16", suppressed).tokens);
  ASSERT_EQ(tokens[2].size(), 6u);
  EXPECT_EQ(tokens[2].back(), 2);
  EXPECT_TRUE(std::equal(tokens[2].begin(), tokens[2].end() - 1, plain.begin()));
  EXPECT_EQ(std::set<int32_t>(tokens[3].begin(), tokens[3].end()).size(), tokens[3].size());
}

TEST(Generator, RefusedTurnLeavesTheSequenceToBeTakenOrResumed) {
  const LoadedModel model = load();
  const auto cache = model.cache("f32", 128);
  Generator generator(*model, *cache, model.stream());
  generator.set_session_rows(128);
  GenerationRequest request = golden_request("case2");
  request.max_tokens = 1;
  const int key = generator.admit(request, {});
  run(generator);
  GenerationRequest longer = request;
  longer.messages.push_back(says("assistant", "a"));
  longer.messages.push_back(says("user", words(200)));
  const Error error = error_of([&] { generator.resume(key, longer, {}); });
  EXPECT_THAT(error.what(), HasSubstr("context of 128"));
  EXPECT_TRUE(generator.finished(key));
  EXPECT_EQ(generator.active(), 0);
  generator.step();  // nothing to do
  GenerationRequest shorter = request;
  shorter.messages.push_back(says("assistant", "a"));
  shorter.messages.push_back(says("user", "b"));
  shorter.max_tokens = 8;
  generator.resume(key, shorter, {});
  run(generator);
  EXPECT_EQ(generator.take(key).tokens, generate(model, "f32", shorter).tokens);
  EXPECT_EQ(cache->bytes(), 0u);
}

TEST(Generator, TapsThePrefillOnly) {
  const LoadedModel model = load();
  const auto cache = model.cache("f16", 200);
  Generator generator(*model, *cache, model.stream());
  std::vector<std::string> names;
  generator.set_tap([&](std::string_view name, ConstTensorView) { names.emplace_back(name); });
  const int key = generator.admit(golden_request("case0"), {});
  const std::vector<std::string> of_prefill = {
      "pixel_values",   "vision.patch_embed", "vision.embeddings", "vision.pre_norm",
      "vision.layer.0", "vision.layer.1",     "vision.selected",   "projector_out",
      "inputs_embeds",  "llm.layer.0",        "llm.layer.1",       "llm.norm",
      "logits_prefill"};
  EXPECT_EQ(names, of_prefill);
  run(generator);
  EXPECT_EQ(names, of_prefill);
  generator.take(key);
}

TEST(Generator, StepWithoutSequencesDoesNothing) {
  const LoadedModel model = load();
  const auto cache = model.cache("f16", 10);
  Generator generator(*model, *cache, model.stream());
  generator.step();
  generator.deliver();
  EXPECT_EQ(generator.active(), 0);
}

}  // namespace
}  // namespace kvlm
