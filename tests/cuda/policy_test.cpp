// Caches of every policy on a GPU beside the same caches on the CPU, step by step.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <span>
#include <string>
#include <vector>

#include "kernels/base/queue.h"
#include "kvcache/plan/sequence_bounds.h"
#include "kvcache/policy_cache.h"
#include "tests/kvcache/groups.h"
#include "tests/kvcache/lives.h"
#include "tests/kvcache/simulated.h"
#include "tests/watched_cache.h"

namespace kvlm {
namespace {

using namespace testlife;

constexpr Device kGpu{DeviceKind::kCuda, 0};

std::unique_ptr<PolicyCache> make(const std::string& spec, const CacheShape& shape, size_t bytes,
                                  Device device) {
  return std::make_unique<PolicyCache>(test::plan_of(spec, shape), bytes, device);
}

void expect_near(const std::vector<float>& gpu, const std::vector<float>& cpu,
                 const std::string& where) {
  ASSERT_EQ(gpu.size(), cpu.size()) << where;
  float top = 0;
  for (const float x : cpu) top = std::max(top, std::abs(x));
  for (size_t i = 0; i < cpu.size(); ++i) {
    ASSERT_NEAR(gpu[i], cpu[i], 5e-5f * top) << where << ", element " << i;
  }
}

/// Outputs, bytes and what is stored of sequences of other lengths that join and leave.
/// What is stored is looked at every `every` rounds: between, buffers count nothing.
void check_life(const std::string& spec, const CacheShape& shape, int most_steps, int every) {
  SCOPED_TRACE(fmt::format("{} [heads {}x{}, dim {}]", spec, shape.kv_heads, shape.q_per_kv(),
                           shape.head_dim));
  const std::vector<int16_t> prompts[] = {PromptShape{5, {40}, 9}.modality(),
                                          PromptShape{2, {13, 30}, 20}.modality(),
                                          PromptShape{20, {}, 0}.modality()};
  const int steps[] = {most_steps, most_steps / 2, most_steps / 3};
  constexpr int kLaterRows = 7;  // of a second prompt half way
  size_t bytes = 0;
  for (size_t s = 0; s < 3; ++s) {
    const SequenceSize size = size_of(prompts[s], steps[s] + kLaterRows);
    bytes += SequenceBounds(*test::plan_of(spec, shape)).reservation(size).bytes();
  }
  const auto on_cpu = make(spec, shape, bytes, {});
  const auto on_gpu = make(spec, shape, bytes, kGpu);
  Feeder cpu(shape, 2);
  Feeder gpu(shape, 2, kGpu);
  const bool later = !on_cpu->needs().one_prompt && !on_gpu->needs().one_prompt;
  std::vector<SequenceId> ids(3);
  std::vector<int> fed(3, -1);
  std::vector<int> done(3, 0);
  for (int round = 0; round < most_steps + 12; ++round) {
    std::vector<Feeder::Input> inputs;
    for (size_t s = 0; s < 3; ++s) {
      const char name = static_cast<char>('a' + s);
      if (fed[s] == -1 && static_cast<size_t>(round) >= 5 * s) {
        ids[s] = on_cpu->open(size_of(prompts[s], steps[s] + kLaterRows), "s");
        ASSERT_EQ(on_gpu->open(size_of(prompts[s], steps[s] + kLaterRows), "s"), ids[s]);
        inputs.push_back({name, ids[s], 0, prompts[s], true});
        fed[s] = static_cast<int>(prompts[s].size());
      } else if (fed[s] > 0 && done[s] < steps[s]) {
        const bool prompt = later && ++done[s] == steps[s] / 2;
        if (!later) ++done[s];
        const std::vector<int16_t> rows(prompt ? kLaterRows : 1, kTextRow);
        inputs.push_back({name, ids[s], fed[s], rows, prompt});
        fed[s] += static_cast<int>(rows.size());
      }
    }
    if (inputs.empty()) continue;
    const auto expected = cpu.pass(*on_cpu, inputs);
    const auto got = gpu.pass(*on_gpu, inputs);
    for (size_t layer = 0; layer < expected.size(); ++layer) {
      expect_near(got[layer], expected[layer], fmt::format("round {}, layer {}", round, layer));
      if (testing::Test::HasFatalFailure()) return;
    }
    ASSERT_EQ(on_gpu->bytes(), on_cpu->bytes()) << "round " << round;
    ASSERT_EQ(on_gpu->report(inputs[0].id).guarded_remaps,
              on_cpu->report(inputs[0].id).guarded_remaps)
        << "round " << round;
    for (const Feeder::Input& input : inputs) {
      if (round % every != 0) break;
      const int layer = round / every % shape.layers;
      const size_t head = static_cast<size_t>(round / every / shape.layers % shape.kv_heads);
      const HeadRows want = on_cpu->inspect(input.id, layer, cpu.stream())[head];
      const HeadRows have = on_gpu->inspect(input.id, layer, gpu.stream())[head];
      ASSERT_EQ(have.keys, want.keys) << "keys, round " << round << ", layer " << layer;
      ASSERT_EQ(have.values, want.values) << "values, round " << round << ", layer " << layer;
    }
    for (const Feeder::Input& input : inputs) {
      const size_t s = static_cast<size_t>(input.name - 'a');
      if (done[s] == steps[s] && fed[s] > 0) {
        on_cpu->close(ids[s]);
        on_gpu->close(ids[s]);
      }
    }
  }
  EXPECT_EQ(on_gpu->bytes(), 0u);
}

/// What a prompt leaves in a cache, and what a simulated quantizer makes of it.
TEST(CudaCachedPrompt, EqualsTheCpu) {
  if (cuda::device_count() == 0) GTEST_SKIP() << "no GPU: " << cuda::why_none();
  test::register_rounded();
  const CacheShape shape = shape_of(4, 2, 4, 64);
  const std::vector<int16_t> prompt = PromptShape{5, {70, 33}, 20}.modality();
  SequenceSize size = size_of(prompt, 8);
  size.records = true;
  for (const std::string spec :
       {"f16", "kivi,group=16,residual=32", "calibquant,bits=2", "knorm,keep=0.4",
        "h2o,keep=0.5 + kivi", "snapkv,keep=0.5 + calibquant,bits=4", "rounded,hold=11",
        "knorm,keep=0.4 + rounded", "h2o,keep=0.5 + rounded,hold=3"}) {
    SCOPED_TRACE(spec);
    const size_t bytes = SequenceBounds(*test::plan_of(spec, shape)).reservation(size).bytes();
    const auto on_cpu = make(spec, shape, bytes, {});
    const auto on_gpu = make(spec, shape, bytes, kGpu);
    Feeder cpu(shape, 2);
    Feeder gpu(shape, 2, kGpu);
    Feeder::Input input{'s', on_cpu->open(size, "s"), 0, prompt, true};
    ASSERT_EQ(on_gpu->open(size, "s"), input.id);
    for (int step = 0; step < 4; ++step) {
      const auto expected = cpu.pass(*on_cpu, {input});
      const auto got = gpu.pass(*on_gpu, {input});
      for (int layer = 0; layer < shape.layers; ++layer) {
        const auto at = static_cast<size_t>(layer);
        expect_near(got[at], expected[at], fmt::format("step {}, layer {}", step, layer));
        if (step > 0) continue;
        const CachedLayer want = on_cpu->cached_prompt(input.id, layer, cpu.stream());
        const CachedLayer have = on_gpu->cached_prompt(input.id, layer, gpu.stream());
        ASSERT_EQ(have.kept, want.kept);
        ASSERT_EQ(have.tags, want.tags);
        ASSERT_EQ(have.keys, want.keys);
        ASSERT_EQ(have.values, want.values);
      }
      input.first += static_cast<int>(input.modality.size());
      input.modality = {kTextRow};
      input.prompt = false;
    }
  }
}

/// Shows what each layer has read as soon as it has attended, before the step ends.
class LookedInto final : public test::WatchedCache {
 public:
  using WatchedCache::WatchedCache;

  /// Of the newest step's generated rows: layers, in them sequences, in them kv_heads.
  std::vector<HeadRows> seen;

  void begin(std::span<const StepRows> step, Stream& stream) override {
    step_ = step;
    seen.clear();
    WatchedCache::begin(step, stream);
  }
  void attend(int layer, ConstTensorView q, ConstTensorView k, ConstTensorView v, TensorView out,
              float scale, Stream& stream) override {
    WatchedCache::attend(layer, q, k, v, out, scale, stream);
    for (const StepRows& rows : step_) {
      if (rows.prompt) continue;
      for (HeadRows& head : cache().inspect(rows.sequence, layer, stream)) {
        seen.push_back(std::move(head));
      }
    }
  }

 private:
  std::span<const StepRows> step_;
};

/// What each layer of several sequences has read, in every step. They are there twice: the second
/// ones find memory of the host as others have left it.
void check_each_layer(const std::string& spec, const CacheShape& shape) {
  constexpr int kSteps = 70;  // past two blocks of values that are packed one by one
  const std::vector<int16_t> prompts[] = {PromptShape{5, {40}, 9}.modality(),
                                          PromptShape{2, {13, 30}, 20}.modality(),
                                          PromptShape{5, {23}, 30}.modality()};
  size_t bytes = 0;
  for (const auto& prompt : prompts) {
    bytes +=
        SequenceBounds(*test::plan_of(spec, shape)).reservation(size_of(prompt, kSteps)).bytes();
  }
  LookedInto on_cpu(make(spec, shape, bytes, {}));
  LookedInto on_gpu(make(spec, shape, bytes, kGpu));
  Feeder cpu(shape, 2);
  Feeder gpu(shape, 2, kGpu);
  for (const size_t first : {size_t{0}, size_t{1}}) {
    std::vector<Feeder::Input> inputs;
    for (size_t s = 0; s < 3; ++s) {
      const std::vector<int16_t>& prompt = prompts[(first + s) % 3];
      const SequenceId id = on_cpu.open(size_of(prompt, kSteps), "s");
      ASSERT_EQ(on_gpu.open(size_of(prompt, kSteps), "s"), id);
      inputs.push_back({static_cast<char>('a' + s), id, 0, prompt, true});
    }
    for (int step = 0; step <= kSteps; ++step) {
      cpu.pass(on_cpu, inputs);
      gpu.pass(on_gpu, inputs);
      ASSERT_EQ(on_gpu.seen.size(), on_cpu.seen.size());
      for (size_t i = 0; i < on_cpu.seen.size(); ++i) {
        const HeadRows& want = on_cpu.seen[i];
        const HeadRows& have = on_gpu.seen[i];
        ASSERT_EQ(have.keys, want.keys) << spec << ", keys, step " << step << ", head " << i;
        ASSERT_EQ(have.values, want.values) << spec << ", values, step " << step << ", head " << i;
        ASSERT_EQ(have.tags, want.tags) << spec << ", tags, step " << step << ", head " << i;
      }
      for (Feeder::Input& input : inputs) {
        input.first += static_cast<int>(input.modality.size());
        input.modality = {kTextRow};
        input.prompt = false;
      }
    }
    for (const Feeder::Input& input : inputs) {
      on_cpu.close(input.id);
      on_gpu.close(input.id);
    }
  }
}

/// A sequence's outputs are the same bits alone as among others that come and go.
void check_company(const std::string& spec, const CacheShape& shape) {
  constexpr int kSteps = 70;
  constexpr size_t kSequences = 3;
  const std::vector<int16_t> prompts[kSequences] = {PromptShape{5, {40}, 9}.modality(),
                                                    PromptShape{2, {13, 30}, 20}.modality(),
                                                    PromptShape{20, {}, 0}.modality()};
  size_t bytes = 0;
  for (const auto& prompt : prompts) {
    bytes +=
        SequenceBounds(*test::plan_of(spec, shape)).reservation(size_of(prompt, kSteps)).bytes();
  }
  const auto together = make(spec, shape, bytes, kGpu);
  std::vector<std::unique_ptr<PolicyCache>> alone;
  Feeder feeder(shape, 2, kGpu);
  std::vector<Feeder::Input> inputs;
  std::vector<Feeder::Input> own;
  for (int step = 0; step < kSteps; ++step) {
    if (step % 20 == 0 && inputs.size() < kSequences) {
      const std::vector<int16_t>& prompt = prompts[inputs.size()];
      const SequenceSize size = size_of(prompt, kSteps);
      const auto name = static_cast<char>('a' + inputs.size());
      alone.push_back(make(spec, shape, bytes, kGpu));
      inputs.push_back({name, together->open(size, "s"), 0, prompt, true});
      own.push_back({name, alone.back()->open(size, "s"), 0, prompt, true});
    }
    const auto all = feeder.pass(*together, inputs);
    size_t first = 0;
    for (size_t s = 0; s < inputs.size(); ++s) {
      const auto expected = feeder.pass(*alone[s], {own[s]});
      for (size_t layer = 0; layer < expected.size() && !own[s].prompt; ++layer) {
        const auto begin = all[layer].begin() + static_cast<std::ptrdiff_t>(first);
        const std::vector<float> found(begin,
                                       begin + static_cast<std::ptrdiff_t>(expected[layer].size()));
        ASSERT_EQ(found, expected[layer]) << spec << ", step " << step << ", sequence " << s;
      }
      first += expected[0].size();
      for (Feeder::Input* input : {&inputs[s], &own[s]}) {
        input->first += static_cast<int>(input->modality.size());
        input->modality = {kTextRow};
        input->prompt = false;
      }
    }
  }
}

/// A sequence and its fork on both devices: outputs, bytes and what is stored, also when the parent
/// has been closed and another sequence has its memory.
void check_fork(const std::string& spec, const CacheShape& shape, int before) {
  SCOPED_TRACE(fmt::format("{} [heads {}x{}, dim {}], {} steps", spec, shape.kv_heads,
                           shape.q_per_kv(), shape.head_dim, before));
  const std::vector<int16_t> prompt = PromptShape{3, {17, 30}, 21}.modality();
  const SequenceSize size = size_of(prompt, 150);
  const size_t bytes = 3 * SequenceBounds(*test::plan_of(spec, shape)).reservation(size).bytes();
  const auto on_cpu = make(spec, shape, bytes, {});
  const auto on_gpu = make(spec, shape, bytes, kGpu);
  Feeder cpu(shape, 2);
  Feeder gpu(shape, 2, kGpu);
  const bool later = !on_cpu->needs().one_prompt && !on_gpu->needs().one_prompt;
  const auto pass = [&](std::vector<Feeder::Input>& inputs) {
    const auto expected = cpu.pass(*on_cpu, inputs);
    const auto got = gpu.pass(*on_gpu, inputs);
    for (size_t layer = 0; layer < expected.size(); ++layer) {
      expect_near(got[layer], expected[layer],
                  fmt::format("row {}, layer {}", inputs[0].first, layer));
    }
    ASSERT_EQ(on_gpu->bytes(), on_cpu->bytes());
    for (Feeder::Input& input : inputs) {
      ASSERT_EQ(on_gpu->report(input.id).bytes, on_cpu->report(input.id).bytes);
      input.first += static_cast<int>(input.modality.size());
      input.modality = {kTextRow};
      input.prompt = false;
    }
  };
  const auto decode = [&](std::vector<Feeder::Input>& inputs, int steps) {
    for (int i = 0; i < steps && !testing::Test::HasFatalFailure(); ++i) pass(inputs);
    for (const Feeder::Input& input : inputs) {
      for (int layer = 0; layer < shape.layers; ++layer) {
        const auto want = on_cpu->inspect(input.id, layer, cpu.stream());
        const auto have = on_gpu->inspect(input.id, layer, gpu.stream());
        for (size_t h = 0; h < want.size(); ++h) {
          ASSERT_EQ(have[h].keys, want[h].keys) << "layer " << layer << ", head " << h;
          ASSERT_EQ(have[h].values, want[h].values) << "layer " << layer << ", head " << h;
        }
      }
    }
  };
  const SequenceId parent = on_cpu->open(size, "p");
  ASSERT_EQ(on_gpu->open(size, "p"), parent);
  std::vector<Feeder::Input> inputs{{'s', parent, 0, prompt, true}};
  decode(inputs, 1 + before);
  const SequenceId child = on_cpu->fork(parent, size.max_rows, "c", cpu.stream());
  ASSERT_EQ(on_gpu->fork(parent, size.max_rows, "c", gpu.stream()), child);
  inputs.push_back(
      {'c', child, inputs[0].first, std::vector<int16_t>(later ? 7 : 1, kTextRow), later});
  decode(inputs, 45);
  on_cpu->close(parent);
  on_gpu->close(parent);
  const SequenceId other = on_cpu->open(size, "o");
  ASSERT_EQ(on_gpu->open(size, "o"), other);
  inputs[0] = {'o', other, 0, prompt, true};
  decode(inputs, 30);
  for (PolicyCache* cache : {on_cpu.get(), on_gpu.get()}) {
    cache->close(other);
    cache->close(child);
    EXPECT_EQ(cache->bytes(), 0u);
  }
}

class CudaPolicy : public testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    if (cuda::device_count() == 0) GTEST_SKIP() << "no GPU: " << cuda::why_none();
  }
};

TEST_P(CudaPolicy, EqualsTheCpuStepByStep) {
  check_life(GetParam(), shape_of(2, 2, 2, 16), 150, 13);
  check_life(GetParam(), shape_of(2, 1, 3, 20), 60, 1);
  check_life(GetParam(), shape_of(2, 2, 7, 128), 90, 7);
  check_life(GetParam(), shape_of(2, 1, 1, 80), 40, 1);
  check_life(GetParam(), shape_of(2, 1, 5, 64), 60, 3);
  check_life(GetParam(), shape_of(2, 1, 2, 96), 40, 3);
  check_life(GetParam(), shape_of(2, 1, 3, 256), 20, 3);
}

TEST_P(CudaPolicy, EachLayerReadsWhatTheCpuReads) {
  check_each_layer(GetParam(), shape_of(4, 2, 2, 16));
}

TEST_P(CudaPolicy, ForksEqualTheCpu) {
  check_fork(GetParam(), shape_of(2, 2, 2, 16), 0);
  check_fork(GetParam(), shape_of(2, 1, 5, 128), 37);
}

TEST_P(CudaPolicy, DoesNotDependOnWhatElseHappens) { check_lives(GetParam(), kGpu); }

TEST_P(CudaPolicy, GoesOnWhileAPromptPauses) { check_pauses(GetParam(), kGpu); }

TEST_P(CudaPolicy, DoesNotDependOnItsCompany) {
  check_company(GetParam(), shape_of(2, 2, 2, 16));
  check_company(GetParam(), shape_of(2, 1, 5, 128));
}

/// Opens the same sequences on both devices, of `steps` rows behind their prompts.
std::vector<Feeder::Input> open_all(PolicyCache& on_cpu, PolicyCache& on_gpu,
                                    std::span<const std::vector<int16_t>> prompts, int steps) {
  std::vector<Feeder::Input> inputs;
  for (const std::vector<int16_t>& rows : prompts) {
    const SequenceId id = on_cpu.open(size_of(rows, steps), "s");
    EXPECT_EQ(on_gpu.open(size_of(rows, steps), "s"), id);
    inputs.push_back({static_cast<char>('a' + inputs.size()), id, 0, rows, true});
  }
  return inputs;
}

/// A cache on either device, which are fed the same.
struct BothCaches {
  PolicyCache& on_cpu;
  PolicyCache& on_gpu;
  Feeder cpu{on_cpu.shape(), 2};
  Feeder gpu{on_cpu.shape(), 2, kGpu};

  /// Outputs and bytes of a step are the same. Then `inputs` are each sequence's next row.
  void check_pass(std::span<Feeder::Input> inputs, const std::string& where) {
    const std::vector<Feeder::Input> given(inputs.begin(), inputs.end());
    const auto expected = cpu.pass(on_cpu, given);
    const auto got = gpu.pass(on_gpu, given);
    for (size_t layer = 0; layer < expected.size(); ++layer) {
      expect_near(got[layer], expected[layer], fmt::format("{}, layer {}", where, layer));
      if (testing::Test::HasFatalFailure()) return;
    }
    ASSERT_EQ(on_gpu.bytes(), on_cpu.bytes()) << where;
    for (Feeder::Input& input : inputs) {
      input.first += static_cast<int>(input.modality.size());
      input.modality = {kTextRow};
      input.prompt = false;
    }
  }
};

/// Prompts, then a row of every sequence in each step: outputs and bytes are the same.
void check_passes(PolicyCache& on_cpu, PolicyCache& on_gpu, std::vector<Feeder::Input> inputs,
                  int steps, const std::string& spec) {
  BothCaches caches{on_cpu, on_gpu};
  for (int step = 0; step < steps && !testing::Test::HasFatalFailure(); ++step) {
    caches.check_pass(inputs, fmt::format("{}, step {}", spec, step));
  }
}

/// Knows the number of what its newest step launches.
struct Launches final : test::WatchedCache {
  using WatchedCache::WatchedCache;
  uint64_t number = 0;

  void begin(std::span<const StepRows> step, Stream& stream) override {
    WatchedCache::begin(step, stream);
    number = cache().repetition();
  }
  int64_t laid() { return cache().laid(); }
};

/// Rows go where they lie, packed or not, by attention weight, by score or because the host names
/// them: no step is described, and the sequence is laid when its prompt has ended and twice more at
/// most, because the first packed row that is named takes it to the host, and so does a full one in
/// front of the picture.
TEST(CudaTable, DropsRows) {
  if (cuda::device_count() == 0) GTEST_SKIP() << "no GPU: " << cuda::why_none();
  const CacheShape shape = shape_of(2, 2, 2, 16);
  const std::vector<int16_t> prompt = PromptShape{5, {40}, 9}.modality();
  for (const char* spec : {"h2o,keep=0.5 + int4",
                           "h2o,keep=0.5 + kivi,group=8,residual=16",
                           "tova,keep=0.5 + int8",
                           "tova,keep=0.5 + kivi,group=8,residual=16",
                           "h2o,keep=0.5,head_shared=on + int4",
                           "streaming,keep=0.5 + int4",
                           "streaming,keep=0.3 + kivi,group=8,residual=16",
                           "uniform,keep=0.5,evict=score + int8",
                           "prefixkv,keep=0.5 + calibquant",
                           "streaming,keep=0.5 + head_quantile",
                           "streaming,keep=0.4 + calibquant,span=per_image",
                           "streaming,keep=0.5 + calibquant,bits=2 + int4,scope=text",
                           "h2o,keep=0.5 + calibquant",
                           "h2o,keep=0.5,head_shared=on + xquant,group=8,residual=16,km=0,vm=0",
                           "tova,keep=0.5 + kivi,group=8,residual=16 + share=codes",
                           "streaming,keep=0.5 + xquant,group=8,residual=16,km=0,vm=0",
                           "h2o,keep=0.5,head_shared=on + xquant,km=0,vm=0,merge=average",
                           "snapkv,keep=0.5,evict=score,head_shared=on + xquant,km=0,vm=0",
                           "tova,keep=0.5 + head_quantile",
                           "prefixkv,keep=0.5",
                           "random,keep=0.5",
                           "snapkv,keep=0.5,window=8,evict=score",
                           "snapkv,keep=0.5,window=8,evict=window",
                           "streaming,keep=0.5,rerotate=on",
                           "streaming,keep=0.5,rerotate=on,sinks=0",
                           "random,keep=0.5,evict=score + int4",
                           "random,keep=0.5 + int4",
                           "random,keep=0.5,evict=score + calibquant",
                           "snapkv,keep=0.5,window=8,evict=sliding,distance=9 + calibquant"}) {
    const SequenceSize size = size_of(prompt, 60);
    const size_t bytes = SequenceBounds(*test::plan_of(spec, shape)).reservation(size).bytes();
    Feeder feeder(shape, 2, kGpu);
    Launches cache(make(spec, shape, bytes, kGpu));
    std::vector<Feeder::Input> inputs{{'a', cache.open(size, "a"), 0, prompt, true}};
    int described = 0;  // steps
    for (int step = 0; step < 50; ++step) {
      feeder.pass(cache, inputs);
      described += cache.number == 0 ? 1 : 0;
      inputs = {{'a', inputs[0].id, static_cast<int>(prompt.size()) + step, {kTextRow}, false}};
    }
    EXPECT_LE(described, 1) << spec << ": the prompt";
    EXPECT_LE(cache.laid(), 3) << spec;
  }
}

/// Rows that go by weight in a step that ends with the host's window, beside a sequence for which
/// the table is large.
TEST(CudaTable, DropsRowsBesideALongSequence) {
  if (cuda::device_count() == 0) GTEST_SKIP() << "no GPU: " << cuda::why_none();
  const CacheShape shape = shape_of(2, 2, 2, 16);
  const std::vector<int16_t> prompt = PromptShape{5, {40}, 9}.modality();
  for (const char* spec : {"h2o,keep=0.5,head_shared=on + vidkv,group=8,residual=16",
                           "tova,keep=0.5 + vidkv,group=8,residual=16"}) {
    // Whose windows are full in other steps.
    const std::vector<int16_t> prompts[] = {prompt, PromptShape{7, {41}, 9}.modality()};
    const SequenceSize longer = size_of(prompt, 60000);
    const auto plan = test::plan_of(spec, shape);
    const SequenceBounds bounds(*plan);
    size_t bytes = bounds.reservation(longer).bytes();
    for (const auto& rows : prompts) bytes += bounds.reservation(size_of(rows, 60)).bytes();
    const auto on_cpu = make(spec, shape, bytes, {});
    const auto on_gpu = make(spec, shape, bytes, kGpu);
    const std::vector<Feeder::Input> inputs = open_all(*on_cpu, *on_gpu, prompts, 60);
    ASSERT_EQ(on_cpu->open(longer, "l"), on_gpu->open(longer, "l"));
    check_passes(*on_cpu, *on_gpu, inputs, 50, spec);
  }
}

TEST(CudaTable, LayersDoNotDependOnThoseBehind) {
  if (cuda::device_count() == 0) GTEST_SKIP() << "no GPU: " << cuda::why_none();
  for (const char* spec : kGroupedSpecs) check_groups(spec, kGpu);
}

/// So many KV heads that a warp drops the rows of each. Prompts come one by one, so that the table
/// learns of each when the next one begins; some have left by then.
TEST(CudaTable, DropsRowsOfManySequences) {
  if (cuda::device_count() == 0) GTEST_SKIP() << "no GPU: " << cuda::why_none();
  const CacheShape shape = shape_of(8, 8, 1, 16);
  constexpr int kSteps = 24;
  std::vector<std::vector<int16_t>> prompts;
  for (int i = 0; i < 140; ++i)
    prompts.push_back(PromptShape{1 + i % 3, {30 - i % 7}, 9}.modality());
  prompts[17] = PromptShape{3, {600}, 20}.modality();  // more rows than a warp moves at a time
  for (const char* spec : {"prefixkv,keep=0.5", "uniform,keep=0.6,evict=score",
                           "streaming,keep=0.5,rerotate=on", "h2o,keep=0.5"}) {
    SCOPED_TRACE(spec);
    const auto plan = test::plan_of(spec, shape);
    size_t bytes = 0;
    for (const auto& rows : prompts) {
      bytes += SequenceBounds(*plan).reservation(size_of(rows, kSteps)).bytes();
    }
    const auto on_cpu = make(spec, shape, bytes, {});
    const auto on_gpu = make(spec, shape, bytes, kGpu);
    BothCaches caches{*on_cpu, *on_gpu};
    std::vector<Feeder::Input> inputs;
    for (size_t i = 0; i < prompts.size() && !HasFatalFailure(); ++i) {
      inputs.push_back(open_all(*on_cpu, *on_gpu, std::span(prompts).subspan(i, 1), kSteps)[0]);
      inputs.back().name = static_cast<char>(i);
      caches.check_pass(std::span(inputs).last(1), fmt::format("prompt {}", i));
      if (i % 30 != 7) continue;
      on_cpu->close(inputs.back().id);
      on_gpu->close(inputs.back().id);
      inputs.pop_back();
    }
    for (int step = 0; step < kSteps && !HasFatalFailure(); ++step) {
      caches.check_pass(inputs, fmt::format("step {}", step));
    }
    if (HasFatalFailure()) return;
    for (const size_t at : {size_t{0}, size_t{16}, inputs.size() - 1}) {
      for (const int layer : {0, 7}) {
        const auto want = on_cpu->inspect(inputs[at].id, layer, caches.cpu.stream());
        const auto have = on_gpu->inspect(inputs[at].id, layer, caches.gpu.stream());
        for (size_t head = 0; head < want.size(); ++head) {
          ASSERT_EQ(have[head].keys, want[head].keys) << at << ", layer " << layer;
          ASSERT_EQ(have[head].values, want[head].values) << at << ", layer " << layer;
        }
      }
    }
  }
}

/// The table does not know a sequence yet whose prompt the host has waited for: forks of it, its
/// next prompt and steps of others come first.
TEST(CudaTable, SequencesWaitToBeKnown) {
  if (cuda::device_count() == 0) GTEST_SKIP() << "no GPU: " << cuda::why_none();
  const CacheShape shape = shape_of(5, 2, 2, 16);
  const std::vector<int16_t> prompts[] = {
      PromptShape{3, {30}, 9}.modality(), PromptShape{2, {25}, 8}.modality(),
      PromptShape{1, {20}, 7}.modality(), PromptShape{2, {15}, 6}.modality()};
  constexpr int kSteps = 40;
  for (const char* spec :
       {"prefixkv,keep=0.5", "h2o,keep=0.5", "snapkv,keep=0.5,window=8 + int4"}) {
    SCOPED_TRACE(spec);
    const auto plan = test::plan_of(spec, shape);
    const size_t bytes = 8 * SequenceBounds(*plan).reservation(size_of(prompts[0], kSteps)).bytes();
    const auto on_cpu = make(spec, shape, bytes, {});
    const auto on_gpu = make(spec, shape, bytes, kGpu);
    BothCaches caches{*on_cpu, *on_gpu};
    std::vector<Feeder::Input> inputs = open_all(*on_cpu, *on_gpu, prompts, kSteps);
    caches.check_pass(std::span(inputs).first(1), "prompt");
    const int most = size_of(prompts[0], kSteps).max_rows;
    const SequenceId forked = on_cpu->fork(inputs[0].id, most, "f", caches.cpu.stream());
    ASSERT_EQ(on_gpu->fork(inputs[0].id, most, "f", caches.gpu.stream()), forked);
    caches.check_pass(std::span(inputs).subspan(1, 1), "prompt behind a fork");
    std::vector<Feeder::Input> mixed = {inputs[0], inputs[2]};  // a row of one, a prompt of another
    caches.check_pass(mixed, "prompt beside a row");
    std::vector<Feeder::Input> last = {mixed[1], inputs[3]};  // a row of one that waits
    caches.check_pass(last, "prompt beside the first row of one that waits");
    inputs = {mixed[0], inputs[1], last[0], last[1]};
    inputs.push_back(
        {inputs[0].name, forked, static_cast<int>(prompts[0].size()), {kTextRow}, false});
    if (!on_cpu->needs().one_prompt && !on_gpu->needs().one_prompt) {
      inputs[1].prompt = true;
      inputs[1].modality = std::vector<int16_t>(5, kTextRow);
      caches.check_pass(std::span(inputs).subspan(1, 1), "next prompt");
    }
    for (int step = 0; step < 20 && !HasFatalFailure(); ++step) {
      caches.check_pass(inputs, fmt::format("step {}", step));
    }
    if (HasFatalFailure()) return;
  }
}

/// More sequences than are laid together, of so many KV heads that threads share them, which are
/// told anew at every step, or whose windows the host flushes.
TEST(CudaTable, ThreadsLayManySequences) {
  if (cuda::device_count() == 0) GTEST_SKIP() << "no GPU: " << cuda::why_none();
  const CacheShape shape = shape_of(8, 8, 1, 16);
  std::vector<std::vector<int16_t>> prompts;
  for (int i = 0; i < 35; ++i) prompts.push_back(PromptShape{1 + i % 3, {40 - i}, 9}.modality());
  for (const char* spec : {"prefixkv,keep=0.5 + vidkv,group=8,residual=16,protect=0.3",
                           "h2o,keep=0.5 + vidkv,group=8,residual=16",
                           "streaming,keep=0.5 + vidkv,group=8,residual=16"}) {
    const auto plan = test::plan_of(spec, shape);
    size_t bytes = 0;
    for (const auto& rows : prompts) {
      bytes += SequenceBounds(*plan).reservation(size_of(rows, 40)).bytes();
    }
    const auto on_cpu = make(spec, shape, bytes, {});
    const auto on_gpu = make(spec, shape, bytes, kGpu);
    const std::vector<Feeder::Input> inputs = open_all(*on_cpu, *on_gpu, prompts, 40);
    check_passes(*on_cpu, *on_gpu, inputs, 22, spec);
    if (HasFatalFailure()) return;
  }
}

INSTANTIATE_TEST_SUITE_P(Specs, CudaPolicy, testing::ValuesIn(kSpecs), name_of_spec);
// Groups that the fused decode attention serves.
INSTANTIATE_TEST_SUITE_P(Fused, CudaPolicy,
                         testing::Values("kivi,residual=32", "kivi,bits=4,residual=32"),
                         name_of_spec);

}  // namespace
}  // namespace kvlm
