#include "kvcache/spec/registry.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "kernels/base/error.h"
#include "kvcache/make_cache.h"
#include "kvcache/retention/scored.h"
#include "tests/kvcache/feeder.h"
#include "tests/kvcache/plans.h"

namespace kvlm {
namespace {

using test::plan_of;
using testing::AllOf;
using testing::Contains;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::Not;

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
    const int kinds =
        find_format(info->name).has_value() + (find_quantizer(info->name) != nullptr) +
        (find_retention(info->name) != nullptr) + (find_simulation(info->name) != nullptr);
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

// ------------------------------------------------------------------------- rules from elsewhere

std::string refused(const std::function<void()>& body) {
  try {
    body();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    return error.what();
  }
  ADD_FAILURE() << "nothing was thrown";
  return {};
}

/// As knorm, by a function.
void short_keys(const LayerRows& layer, std::span<double> scores, Stream& stream) {
  row_norms(layer.keys, layer.shape->head_dim, scores, stream);
  for (double& score : scores) score = -score;
}

RetentionEntry entry(std::string_view name) {
  return {{.name = name, .options = retention::kScoredOptions}, retention::scored_by(short_keys)};
}

/// Registers a rule once in this process, whichever tests are run.
void register_once(const RetentionEntry& rule) {
  if (find_policy(rule.info.name) == nullptr) register_retention(rule);
}

constexpr int kPromptRows = 21;
const CacheShape kShape = testlife::shape_of(2, 2, 2, 8);

/// What a cache of `spec` answers to a prompt and four steps.
std::vector<std::vector<float>> answers(const std::string& spec) {
  const std::vector<int16_t> prompt(kPromptRows, kTextRow);
  const auto plan = plan_of(spec, kShape);
  const auto cache = make_cache(plan, session_bytes(*plan, kPromptRows + 4), {});
  testlife::Feeder feeder(kShape);
  const SequenceId id = cache->open(testlife::size_of(prompt, 4), "s");
  std::vector<std::vector<float>> all = feeder.pass(*cache, {{'s', id, 0, prompt, true}});
  for (int step = 0; step < 4; ++step) {
    for (auto& layer : feeder.pass(*cache, {{'s', id, kPromptRows + step, {kTextRow}, false}})) {
      all.push_back(std::move(layer));
    }
  }
  return all;
}

/// A rule that selects what it was made with, in every layer.
class Selects final : public Retention {
 public:
  explicit Selects(LayerSelection selection) : selection_(std::move(selection)) {}

  ImportanceNeeds needs() const noexcept override { return {}; }
  std::vector<LayerSelection> select(const PromptView&, std::span<const int>) const override {
    return {selection_};
  }
  int peak_rows(int kept, double /*forget*/, int prompt_rows,
                int max_rows) const noexcept override {
    return kept + max_rows - prompt_rows;
  }

 private:
  LayerSelection selection_;
};

/// Registers a rule that selects `selection`; its name.
std::string selecting(const std::string& name, LayerSelection selection) {
  register_once({{.name = name},
                 [selection = std::move(selection)](const OptionValues&, const PolicyContext&) {
                   return std::make_unique<Selects>(selection);
                 }});
  return name;
}

TEST(RegisteredRetention, IsKnownAsThoseThatAreBuiltIn) {
  register_once(entry("registered_norm"));
  const RetentionEntry* rule = find_retention("registered_norm");
  ASSERT_NE(rule, nullptr);
  EXPECT_EQ(rule->info.kind, PartKind::kRetention);
  EXPECT_EQ(find_policy("registered_norm"), &rule->info);
  EXPECT_THAT(part_names(), Contains("registered_norm"));
  EXPECT_EQ(policies().back()->name, "share");
  EXPECT_FALSE(rule->info.source.empty());
  EXPECT_FALSE(rule->info.stores.empty());
  EXPECT_FALSE(rule->info.composes.empty());
  EXPECT_EQ(rule->info.example, "registered_norm");
}

TEST(RegisteredRetention, IsParsedWithItsOptions) {
  register_once(entry("registered_norm"));
  EXPECT_EQ(canonical(parse_spec("int4 + registered_norm, keep=1/2")),
            "registered_norm,keep=0.5 + int4");
  EXPECT_THAT(refused([] { parse_spec("registered_norm,keep=2"); }),
              HasSubstr("did you mean keep=1?"));
  EXPECT_THAT(refused([] { parse_spec("registered_nrm"); }),
              HasSubstr("did you mean registered_norm?"));
}

TEST(RegisteredRetention, FitsTheTablesOfConflicts) {
  register_once(entry("registered_norm"));
  EXPECT_THAT(refused([] { parse_spec("registered_norm + knorm"); }),
              HasSubstr("two retention rules"));
  EXPECT_THAT(refused([] { parse_spec("registered_norm + int4 + share=codes"); }),
              HasSubstr("did you mean registered_norm,head_shared=on?"));
}

TEST(RegisteredRetention, SelectsInACache) {
  register_once(entry("registered_norm"));
  for (const char* quantizer : {"", " + int4", " + kivi,group=8,residual=16"}) {
    const auto spec = [&](std::string_view rule) {
      return fmt::format("{},keep=0.5,last=2{}", rule, quantizer);
    };
    EXPECT_EQ(answers(spec("registered_norm")), answers(spec("knorm"))) << quantizer;
    EXPECT_NE(answers(spec("registered_norm")), answers(spec("keydiff"))) << quantizer;
  }
}

/// An object of a class that the program brings.
TEST(RegisteredRetention, MayBeAnyRetention) {
  const std::string rule = selecting("registered_ends", {.slots = {{0, 1, 19, 20}}, .forget = 0});
  EXPECT_EQ(answers(rule + " + f32").size(), 10u);
  EXPECT_NE(answers(rule), answers("f16"));
}

TEST(RegisteredRetention, ThatSelectsWhatIsNotThereIsRefused) {
  const auto message = [](const std::string& name, LayerSelection selection) {
    const std::string rule = selecting(name, std::move(selection));
    return refused([&] { answers(rule); });
  };
  EXPECT_EQ(message("registered_beyond", {.slots = {{0, 21}}, .forget = 0}),
            "the rule of --kv registered_beyond selected slots of layer 0 that are not ascending "
            "from 0 to 20 with the last among them; see Retention::select()");
  EXPECT_THAT(message("registered_negative", {.slots = {{-1, 20}}, .forget = 0}),
              HasSubstr("not ascending"));
  EXPECT_THAT(message("registered_descending", {.slots = {{3, 2, 20}}, .forget = 0}),
              HasSubstr("not ascending"));
  EXPECT_THAT(message("registered_twice", {.slots = {{3, 3, 20}}, .forget = 0}),
              HasSubstr("not ascending"));
  EXPECT_THAT(message("registered_no_last", {.slots = {{0, 1}}, .forget = 0}),
              HasSubstr("the last among them"));
  EXPECT_THAT(message("registered_empty", {.slots = {{}}, .forget = 0}),
              HasSubstr("the last among them"));
  EXPECT_THAT(message("registered_no_list", {.slots = {}, .forget = 0}),
              HasSubstr("selected 0 lists of slots for layer 0, expected 1"));
  EXPECT_THAT(message("registered_lists", {.slots = {{20}, {20}}, .forget = 0}),
              HasSubstr("selected 2 lists of slots for layer 0, expected 1"));
  EXPECT_THAT(
      message("registered_scores", {.slots = {{0, 20}}, .forget = 0, .scores = {{1, 2, 3}}}),
      HasSubstr("scores"));
}

/// Everything that the entry points to may go.
TEST(RegisteredRetention, IsACopy) {
  if (find_policy("registered_copy") == nullptr) {
    auto text = std::make_unique<std::array<std::string, 5>>(std::array<std::string, 5>{
        "registered_copy", "strength of it all", "low|high", "low", "some source"});
    auto options = std::make_unique<std::vector<OptionInfo>>(retention::kScoredOptions.begin(),
                                                             retention::kScoredOptions.end());
    options->push_back(
        {.key = "strength", .choices = (*text)[2], .standard = (*text)[3], .help = (*text)[1]});
    register_retention({{.name = (*text)[0], .source = (*text)[4], .options = *options},
                        retention::scored_by(short_keys)});
    for (std::string& word : *text) word.assign(word.size(), '#');
    options->assign(options->size(), OptionInfo{});
  }
  EXPECT_EQ(canonical(parse_spec("registered_copy,strength=high")),
            "registered_copy,strength=high");
  EXPECT_EQ(find_policy("registered_copy")->source, "some source");
  EXPECT_EQ(find_policy("registered_copy")->options.back().help, "strength of it all");
}

TEST(RegisteredRetention, MayBeRegisteredWhileOthersParse) {
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([t] {
      for (int i = 0; i < 8; ++i) {
        const std::string name = fmt::format("registered_{}_{}", t, i);
        register_once(entry(name));
        EXPECT_EQ(canonical(parse_spec(name + " + kivi")), name + " + kivi");
        EXPECT_THAT(part_names(), Contains(name));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST(RegisteredRetention, OfANameThatIsTakenIsRefused) {
  register_once(entry("registered_norm"));
  for (const char* name : {"knorm", "int4", "f16", "share", "registered_norm"}) {
    EXPECT_EQ(
        refused([&] { register_retention(entry(name)); }),
        fmt::format("the policy name \"{}\" is taken; register the policy once, under another "
                    "name",
                    name));
  }
}

TEST(RegisteredRetention, OfAnOriginIsFoundByItsShortNameToo) {
  register_once(entry("elsewhere:registered_far"));
  for (const char* name : {"registered_far", "elsewhere:registered_far"}) {
    ASSERT_NE(find_policy(name), nullptr) << name;
    EXPECT_EQ(canonical(parse_spec(fmt::format("{},keep=0.5 + int4", name))),
              "elsewhere:registered_far,keep=0.5 + int4");
  }
  EXPECT_EQ(find_policy("other:registered_far"), nullptr);
  EXPECT_THAT(part_names(), Contains("registered_far"));
  for (const char* name : {"registered_far", "other:registered_far", "other:knorm"}) {
    EXPECT_THAT(refused([&] { register_retention(entry(name)); }), HasSubstr("is taken"));
  }
}

TEST(RegisteredRetention, OfANameThatNoSpecCanHaveIsRefused) {
  for (const std::string& name :
       {std::string(), std::string("My"), std::string("1bit"), std::string("a-b"),
        std::string("a b"), std::string("a,b"), std::string("a=b"), std::string("a+b"),
        std::string("visual"), std::string("text"), std::string("a:text"), std::string("a:"),
        std::string(":a"), std::string("@file"), std::string(65, 'a')}) {
    EXPECT_THAT(refused([&] { register_retention(entry(name)); }),
                AllOf(HasSubstr("[a-z][a-z0-9_]*"), Not(HasSubstr("\n"))))
        << name;
    EXPECT_EQ(find_policy(name), nullptr);
  }
}

TEST(RegisteredRetention, WithOptionsThatNoSpecCanWriteIsRefused) {
  const auto message = [](std::vector<OptionInfo> options) {
    RetentionEntry rule = entry("registered_options");
    rule.info.options = options;
    return refused([&] { register_retention(rule); });
  };
  const OptionInfo fine{.key = "mode", .choices = "a|b", .standard = "a", .help = "one of two"};
  EXPECT_THAT(message({fine, fine}), HasSubstr("mode twice"));
  OptionInfo option = fine;
  option.key = "profile";  // every rule has it
  EXPECT_THAT(message({option}), HasSubstr("profile twice"));
  option.key = "Mode";
  EXPECT_THAT(message({option}), HasSubstr("\"Mode\""));
  option = fine;
  option.standard = "c";
  EXPECT_THAT(message({option}), HasSubstr("mode=c"));
  option.standard = {};
  EXPECT_THAT(message({option}), HasSubstr("mode="));
  option = fine;
  option.paper = "c";
  EXPECT_THAT(message({option}), HasSubstr("mode=c"));
  option = fine;
  option.key = "keep";
  EXPECT_THAT(message({option}), HasSubstr("keep"));
  EXPECT_EQ(find_policy("registered_options"), nullptr);
}

TEST(RegisteredRetention, WithoutAMakerIsRefused) {
  RetentionEntry rule = entry("registered_nothing");
  rule.make = nullptr;
  EXPECT_THAT(refused([&] { register_retention(rule); }), HasSubstr("registered_nothing"));
  EXPECT_EQ(find_policy("registered_nothing"), nullptr);
}

TEST(RegisteredRetention, ThatMakesNothingIsRefusedWhereItIsNamed) {
  RetentionEntry rule = entry("registered_null");
  rule.make = [](const OptionValues&, const PolicyContext&) -> std::unique_ptr<Retention> {
    return nullptr;
  };
  register_once(rule);
  EXPECT_THAT(refused([] { parse_spec("registered_null"); }), HasSubstr("registered_null"));
  EXPECT_EQ(canonical(parse_spec("registered_null,keep=1")), "registered_null,keep=1");
}

}  // namespace
}  // namespace kvlm
