// Sequences that go on from another one (KvCache::fork), beside sequences of a second cache that
// were fed all of the same rows themselves.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <set>
#include <string>
#include <vector>

#include "kernels/base/error.h"
#include "kvcache/make_cache.h"
#include "kvcache/policy_cache.h"
#include "tests/allocations.h"
#include "tests/kvcache/feeder.h"
#include "tests/kvcache/plans.h"

namespace kvlm {
namespace {

using namespace testlife;
using test::plan_of;
using ::testing::HasSubstr;

const CacheShape kSmall = shape_of(2, 2, 2, 16);

/// A sequence that was forked, in one cache, and one that was fed everything itself, in another.
struct Twin {
  char name;  ///< of the rows that come next
  SequenceId forked{};
  SequenceId fed{};
  int rows = 0;
};

class Forks {
 public:
  Forks(const std::string& spec, const CacheShape& shape, size_t forking_bytes, size_t fed_bytes)
      : feeder_(shape, 2),
        forking(make_cache(plan_of(spec, shape), forking_bytes, {})),
        feeding(make_cache(plan_of(spec, shape), fed_bytes, {})) {}

  /// Passes of both caches are alike, to the bit.
  void pass(std::vector<Twin*> twins, const std::vector<int16_t>& modality, bool prompt) {
    std::vector<Feeder::Input> a;
    std::vector<Feeder::Input> b;
    for (Twin* twin : twins) {
      a.push_back({twin->name, twin->forked, twin->rows, modality, prompt});
      b.push_back({twin->name, twin->fed, twin->rows, modality, prompt});
      twin->rows += static_cast<int>(modality.size());
    }
    ASSERT_EQ(feeder_.pass(*forking, a), feeder_.pass(*feeding, b)) << "row " << twins[0]->rows;
  }
  void decode(const std::vector<Twin*>& twins, int steps) {
    for (int i = 0; i < steps && !testing::Test::HasFatalFailure(); ++i) {
      pass(twins, {kTextRow}, false);
    }
  }
  /// A later prompt, where there can be one.
  void ask(const std::vector<Twin*>& twins, int rows) {
    if (feeding->needs().one_prompt) return decode(twins, rows);
    pass(twins, std::vector<int16_t>(static_cast<size_t>(rows), kTextRow), true);
  }
  Stream& stream() { return feeder_.stream(); }

 private:
  Feeder feeder_;

 public:
  std::unique_ptr<KvCache> forking;
  std::unique_ptr<KvCache> feeding;
};

/// Bytes of packed blocks that several buffers of `ids` hold.
size_t bytes_held_twice(KvCache& cache, const std::vector<SequenceId>& ids) {
  auto* policy = dynamic_cast<PolicyCache*>(&cache);
  if (policy == nullptr) return 0;
  std::set<const std::byte*> seen;
  size_t bytes = 0;
  for (const SequenceId id : ids) {
    for (int layer = 0; layer < cache.shape().layers; ++layer) {
      for (const HeadState& head : policy->layer(id, layer).heads) {
        for (const StoreBuffers& buffers : head.stores) {
          for (const KvBuffer* buffer :
               {&buffers.keys, &buffers.values, &buffers.protected_values}) {
            for (const PackedBlock& block : buffer->blocks.all()) {
              const bool again = !seen.insert(block.scales).second;
              if (again) bytes += buffer->layout().packed_bytes(block.rows);
            }
          }
        }
      }
    }
  }
  return bytes;
}

/// A block that is shared counts once; where rows go, until the last sequence goes.
void check_bytes(Forks& forks, const std::vector<const Twin*>& twins, bool drops) {
  size_t expected = 0;
  size_t own = 0;
  std::vector<SequenceId> ids;
  for (const Twin* twin : twins) {
    expected += forks.feeding->report(twin->fed).bytes;
    own += forks.forking->report(twin->forked).bytes;
    ids.push_back(twin->forked);
    ASSERT_EQ(forks.forking->tokens(twin->forked), forks.feeding->tokens(twin->fed));
    ASSERT_EQ(forks.forking->next_position(twin->forked), forks.feeding->next_position(twin->fed));
    ASSERT_EQ(forks.forking->report(twin->forked).slots, forks.feeding->report(twin->fed).slots);
  }
  expected -= bytes_held_twice(*forks.forking, ids);
  if (drops) {
    ASSERT_GE(forks.forking->bytes(), expected);
  } else {
    ASSERT_EQ(forks.forking->bytes(), expected);
  }
  ASSERT_LE(own, forks.forking->bytes());
}

/// Calls admit() until no memory is left, which has to be said in the sentence's words.
template <class Admit>
void fill(const KvCache& cache, const Admit& admit) {
  for (size_t before = cache.bytes();; before = cache.bytes()) {
    try {
      admit();
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kOutOfMemory);
      EXPECT_THAT(error.what(), HasSubstr("does not fit"));
      EXPECT_EQ(cache.bytes(), before);
      return;
    }
  }
}

bool drops_rows(const CachePlan& plan) {
  return plan.retention != nullptr && plan.retention->evicts();
}

class EveryFork : public testing::TestWithParam<const char*> {};

/// A fork, and a fork of that, go on beside their parents, which are closed one by one and whose
/// memory others take.
TEST_P(EveryFork, GoesOnAsIfItHadBeenFedEverything) {
  const std::string spec = GetParam();
  for (const CacheShape& shape : {kSmall, shape_of(3, 1, 3, 20)}) {
    for (const PromptShape& pictures :
         {PromptShape{5, {40}, 9}, PromptShape{3, {17, 30}, 41}, PromptShape{1, {}, 0}}) {
      for (const int before : {0, 37}) {
        const std::vector<int16_t> prompt = pictures.modality();
        const SequenceSize size = size_of(prompt, 260);
        const auto plan = plan_of(spec, shape);
        const size_t each = reservation(*plan, size).bytes();
        SCOPED_TRACE(testing::Message()
                     << prompt.size() << " rows, " << before << " steps, " << shape.kv_heads);
        Forks forks(spec, shape, 4 * each, 3 * each);
        Twin parent{'s', forks.forking->open(size, "p"), forks.feeding->open(size, "p")};
        Twin child{'s', {}, forks.feeding->open(size, "c")};
        Twin grandchild{'s', {}, forks.feeding->open(size, "g")};
        // What the forks will have in common: fed to each in the second cache.
        Feeder feeder(shape);
        for (const Twin* twin : {&child, &grandchild}) {
          feeder.pass(*forks.feeding, {{'s', twin->fed, 0, prompt, true}});
        }
        forks.pass({&parent}, prompt, true);
        const auto feed = [&](Twin& twin, char name, int rows) {
          for (; rows > 0; --rows) {
            feeder.pass(*forks.feeding, {{name, twin.fed, twin.rows++, {kTextRow}, false}});
          }
        };
        child.rows = grandchild.rows = parent.rows;
        feed(child, 's', before);
        feed(grandchild, 's', before);
        forks.decode({&parent}, before);
        child.forked = forks.forking->fork(parent.forked, size.max_rows, "c", forks.stream());
        EXPECT_NE(child.forked, parent.forked);
        parent.name = 'p';
        child.name = 'c';
        forks.ask({&child}, 7);
        forks.ask({&parent}, 12);
        forks.decode({&parent, &child}, 25);
        check_bytes(forks, {&parent, &child}, drops_rows(*plan));
        ASSERT_FALSE(HasFatalFailure());

        // The grandchild's rows are the child's up to here.
        if (forks.feeding->needs().one_prompt) {
          feed(grandchild, 'c', 7);
        } else {
          feeder.pass(*forks.feeding, {{'c', grandchild.fed, grandchild.rows,
                                        std::vector<int16_t>(7, kTextRow), true}});
          grandchild.rows += 7;
        }
        feed(grandchild, 'c', 25);
        grandchild.forked = forks.forking->fork(child.forked, size.max_rows, "g", forks.stream());
        grandchild.name = 'g';
        forks.decode({&grandchild, &parent, &child}, 19);
        check_bytes(forks, {&parent, &child, &grandchild}, drops_rows(*plan));
        ASSERT_FALSE(HasFatalFailure());

        forks.forking->close(parent.forked);
        const SequenceId other = forks.forking->open(size, "another");
        feeder.pass(*forks.forking, {{'o', other, 0, prompt, true}});
        forks.ask({&grandchild}, 9);
        forks.decode({&child, &grandchild}, 21);
        forks.forking->close(other);
        check_bytes(forks, {&child, &grandchild}, drops_rows(*plan));
        ASSERT_FALSE(HasFatalFailure());

        forks.forking->close(child.forked);
        std::vector<SequenceId> others;
        fill(*forks.forking, [&] { others.push_back(forks.forking->open(size, "o")); });
        for (const SequenceId id : others)
          feeder.pass(*forks.forking, {{'o', id, 0, prompt, true}});
        forks.decode({&grandchild}, 70);
        for (const SequenceId id : others) forks.forking->close(id);
        check_bytes(forks, {&grandchild}, drops_rows(*plan));
        ASSERT_FALSE(HasFatalFailure());
        EXPECT_EQ(forks.forking->report(grandchild.forked).bytes, forks.forking->bytes());

        forks.forking->close(grandchild.forked);
        EXPECT_EQ(forks.forking->bytes(), 0u);
        for (int i = 0; i < 4; ++i) forks.forking->open(size, "all of it is free");
      }
    }
  }
}

/// Several questions about a page that is read once and then closed: what it set aside is for its
/// own rows alone, and what forks set aside suffices.
TEST_P(EveryFork, TakesMoreRowsThanItsParent) {
  const std::string spec = GetParam();
  for (const PromptShape& pictures : {PromptShape{5, {40}, 9}, PromptShape{2, {70}, 0}}) {
    const std::vector<int16_t> prompt = pictures.modality();
    const SequenceSize size = size_of(prompt, 90);
    const auto plan = plan_of(spec, kSmall);
    const size_t each = reservation(*plan, size).bytes();
    Forks forks(spec, kSmall, 3 * each, 2 * each);
    const SequenceId page = forks.forking->open(size_of(prompt, 0), "page");
    Feeder feeder(kSmall);
    feeder.pass(*forks.forking, {{'s', page, 0, prompt, true}});
    Twin twins[] = {{'a'}, {'b'}};
    for (Twin& twin : twins) {
      twin.fed = forks.feeding->open(size, "s");
      feeder.pass(*forks.feeding, {{'s', twin.fed, 0, prompt, true}});
      twin.forked = forks.forking->fork(page, size.max_rows, "s", forks.stream());
      twin.rows = size.prompt_rows;
    }
    forks.forking->close(page);
    forks.ask({&twins[0]}, 11);
    forks.ask({&twins[1]}, 5);
    forks.decode({&twins[0], &twins[1]}, 60);
    check_bytes(forks, {&twins[0], &twins[1]}, drops_rows(*plan));
    ASSERT_FALSE(HasFatalFailure());
  }
}

/// A fork that does not fit changes nothing.
TEST_P(EveryFork, IsRefusedWithoutATrace) {
  const std::string spec = GetParam();
  const std::vector<int16_t> prompt = PromptShape{5, {40}, 9}.modality();
  const SequenceSize size = size_of(prompt, 40);
  const auto plan = plan_of(spec, kSmall);
  const size_t bytes = reservation(*plan, size).bytes();
  Forks forks(spec, kSmall, bytes, bytes);
  Twin twin{'s', forks.forking->open(size, "s"), forks.feeding->open(size, "s")};
  forks.pass({&twin}, prompt, true);
  std::vector<SequenceId> others;
  fill(*forks.forking, [&] {
    others.push_back(forks.forking->fork(twin.forked, size.max_rows, "q", forks.stream()));
  });
  for (const SequenceId id : others) forks.forking->close(id);
  EXPECT_EQ(forks.forking->bytes(), forks.feeding->bytes());
  EXPECT_EQ(forks.forking->report(twin.forked).bytes, forks.feeding->bytes());
  forks.decode({&twin}, 40);
  check_bytes(forks, {&twin}, drops_rows(*plan));
}

/// As often as unforked sequences in their second half: never.
TEST_P(EveryFork, DecodesWithoutAllocating) {
  constexpr int kSteps = 120;
  const std::vector<int16_t> prompt = PromptShape{5, {40}, 9}.modality();
  const SequenceSize size = size_of(prompt, kSteps);
  const auto plan = plan_of(GetParam(), kSmall);
  const auto cache = make_cache(plan, 3 * reservation(*plan, size).bytes(), {});
  Feeder feeder(kSmall, 2);
  const SequenceId page = cache->open(size, "page");
  feeder.pass(*cache, {{'s', page, 0, prompt, true}});
  std::vector<StepRows> step(2);
  for (StepRows& rows : step) {
    rows.sequence = cache->fork(page, size.max_rows, "s", feeder.stream());
    rows.rows = 1;
  }
  std::vector<float> q(2 * static_cast<size_t>(kSmall.q_heads * kSmall.head_dim), 0.5f);
  std::vector<float> k(2 * static_cast<size_t>(kSmall.kv_heads * kSmall.head_dim), 0.25f);
  const auto view = [](std::vector<float>& x, int heads) {
    return TensorView(x.data(), DType::kF32, {2, heads, kSmall.head_dim});
  };
  size_t before = 0;
  for (int i = 0; i < kSteps; ++i) {
    if (i == kSteps / 2) before = allocations();  // scratch of the workers is warm
    cache->begin(step, feeder.stream());
    for (int layer = 0; layer < kSmall.layers; ++layer) {
      k[static_cast<size_t>(i) % k.size()] += 0.5f;
      cache->attend(layer, view(q, kSmall.q_heads), view(k, kSmall.kv_heads),
                    view(k, kSmall.kv_heads), view(q, kSmall.q_heads), 0.25f, feeder.stream());
    }
    cache->end(feeder.stream());
  }
  EXPECT_EQ(allocations() - before, 0u);
}

INSTANTIATE_TEST_SUITE_P(Specs, EveryFork, testing::ValuesIn(kSpecs), name_of_spec);
INSTANTIATE_TEST_SUITE_P(Plain, EveryFork, testing::Values("f32", "f16", "bf16"), name_of_spec);

/// Eight questions about one page fit where two pages do not.
TEST(ForkTest, EightQuestionsTakeThePictureOnce) {
  const std::string spec = "calibquant";
  const CacheShape shape = shape_of(2, 2, 2, 32);
  const std::vector<int16_t> prompt = PromptShape{3, {600}, 2}.modality();
  constexpr int kTail = 12;
  const SequenceSize size = size_of(prompt, kTail);
  const auto plan = plan_of(spec, shape);
  const Reservation each = reservation(*plan, size);
  const size_t bytes = 2 * each.kept + each.staging - 64;
  const auto cache = make_cache(plan, bytes, {});
  Feeder feeder(shape);
  const SequenceId page = cache->open(size, "page");
  feeder.pass(*cache, {{'s', page, 0, prompt, true}});
  const size_t of_page = cache->bytes();
  EXPECT_THROW((void)cache->open(size, "page 2"), Error);
  for (int question = 1; question <= 8; ++question) {
    const SequenceId id = cache->fork(page, size.max_rows, "question", feeder.stream());
    for (int row = 0; row < kTail; ++row) {
      feeder.pass(*cache, {{'q', id, size.prompt_rows + row, {kTextRow}, false}});
    }
    // Five rows of text and those of the question, in full precision, keys and values.
    const size_t tail = 2 * 2 * 2 * 32 * sizeof(uint16_t) * (5 + kTail);
    EXPECT_EQ(cache->report(id).bytes, tail);
    EXPECT_EQ(cache->bytes(), of_page + static_cast<size_t>(question) * tail);
  }
}

/// A parent with room for a long answer that is closed leaves its picture and nothing else.
TEST(ForkTest, ClosedParentsGiveBackWhatNobodyReads) {
  const std::vector<int16_t> prompt = PromptShape{3, {64}, 2}.modality();
  const auto plan = plan_of("calibquant", kSmall);
  const SequenceSize size = size_of(prompt, 500);
  const size_t parents = reservation(*plan, size).bytes();
  const auto cache = make_cache(plan, parents + reservation(*plan, size_of(prompt, 1)).bytes(), {});
  Feeder feeder(kSmall);
  const SequenceId parent = cache->open(size, "parent");
  feeder.pass(*cache, {{'s', parent, 0, prompt, true}});
  const size_t before = cache->bytes();
  const SequenceId child = cache->fork(parent, size.prompt_rows + 1, "child", feeder.stream());
  const SequenceSize text = size_of(std::vector<int16_t>(20, kTextRow), 470);
  EXPECT_THROW((void)cache->open(text, "another"), Error);
  EXPECT_EQ(cache->report(parent).bytes, cache->report(child).bytes);  // text rows
  cache->close(parent);
  EXPECT_EQ(cache->bytes(), before);
  EXPECT_EQ(cache->report(child).bytes, before);
  const SequenceId another = cache->open(text, "another");
  feeder.pass(*cache, {{'o', another, 0, std::vector<int16_t>(20, kTextRow), true}});
}

TEST(ForkTest, RefusesSequencesWithoutAPrompt) {
  const SequenceSize size{10, 0, 20};
  for (const char* spec : {"f16", "f16 + prefixkv,keep=0.4", "calibquant"}) {
    const auto plan = plan_of(spec, kSmall);
    const auto cache = make_cache(plan, 2 * reservation(*plan, size).bytes(), {});
    Feeder feeder(kSmall);
    const auto refused = [&](SequenceId id) {
      try {
        cache->fork(id, 20, "s", feeder.stream());
        ADD_FAILURE() << spec << ": nothing was thrown";
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
        EXPECT_THAT(error.what(), HasSubstr("only after its first prompt"));
      }
    };
    refused(SequenceId{0});
    const SequenceId id = cache->open(size, "s");
    refused(id);
    if (std::string(spec) != "calibquant") {  // which takes its prompt in one pass
      feeder.pass(*cache, {{'s', id, 0, std::vector<int16_t>(4, kTextRow), true, false}});
      refused(id);
      feeder.pass(*cache, {{'s', id, 4, std::vector<int16_t>(6, kTextRow), true}});
    } else {
      feeder.pass(*cache, {{'s', id, 0, std::vector<int16_t>(10, kTextRow), true}});
    }
    cache->close(cache->fork(id, 20, "s", feeder.stream()));
    EXPECT_THROW((void)cache->fork(id, 9, "s", feeder.stream()), Error);
    cache->close(id);
    refused(id);
  }
}

}  // namespace
}  // namespace kvlm
