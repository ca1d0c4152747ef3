#include "kvcache/plan/conflicts.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "kvcache/plan/planner.h"
#include "kvcache/simulation.h"
#include "kvcache/spec/registry.h"
#include "kvcache/spec/words.h"

namespace kvlm {
namespace {

using testing::ElementsAreArray;

/// Parts that parse_spec() would refuse: NAME,KEY=VALUE,... each, options sorted.
CacheSpec spec_of(const std::vector<std::string_view>& parts) {
  CacheSpec spec;
  for (const std::string_view text : parts) {
    SpecPart& part = spec.parts.emplace_back();
    for (const std::string_view word : split_words(text, ',')) {
      const size_t equals = word.find('=');
      if (equals == std::string_view::npos) {
        part.name = word;
      } else {
        part.options.emplace_back(word.substr(0, equals), word.substr(equals + 1));
      }
    }
  }
  return spec;
}

class Unchanged final : public Simulation {
 public:
  void round_trip(KvSide, int, std::span<float>, int) const override {}
};

struct Refused {
  std::vector<std::string_view> parts;
  const char* text;
};

/// One for every row of the tables, in their order.
const std::vector<Refused> kRefused = {
    {{"h2o", "prefixkv"}, "has two retention rules, h2o and prefixkv; keep one"},
    {{"kivi", "share,what=codes", "share,from=0:2,what=codes"},
     "has two sharing parts; keep one share=codes"},
    {{"simulated_a", "simulated_b"},
     "has two simulated quantizers, simulated_a and simulated_b; keep one"},
    {{"int8", "kivi"}, "has two quantizers for the same tokens, int8 and kivi; keep one"},
    {{"kivi,layers=0-3", "kivi,bits=4,layers=3-5"},
     "has two quantizers for layer 3, kivi,layers=0-3 and kivi,bits=4,layers=3-5; keep one"},
    {{"calibquant", "kivi"},
     "has kivi for all tokens and calibquant for visual tokens; did you mean calibquant + "
     "kivi,scope=text?"},
    {{"f16,scope=visual", "f32,scope=text"},
     "has two formats for unquantized tokens, f16 and f32; keep one"},
    {{"simulated_a", "kivi,scope=text"},
     "has simulated_a, which simulates a quantizer, and the quantizer kivi; keep one"},
    {{"f16", "share,what=codes"},
     "shares codes, but no quantizer makes any; add a quantizer, for example kivi + share=codes"},
    {{"xquant,kq=4", "share,what=codes"},
     "has share=codes and xquant,kq=4, which shares codes itself; did you mean xquant,kq=4?"},
    {{"xquant,layers=0-3"},
     "has xquant,layers=0-3, but xquant pairs layers itself; drop layers=0-3"},
    {{"calibquant", "xquant,scope=text"},
     "has another quantizer next to xquant, whose codes are shared between layers; keep xquant "
     "alone"},
    {{"kivi,scope=visual", "calibquant,layers=0"},
     "has kivi in some layers and calibquant in others, but calibquant packs once, at the end of "
     "the prompt, and kivi packs tokens as they age; keep one of them"},
    {{"vidkv,protect=0.2,scope=visual"},
     "has vidkv,protect=0.2,scope=visual, which protects a share of all visual tokens, for some "
     "tokens only; did you mean vidkv for all tokens?"},
    {{"snapkv,keep=0.5", "vidkv,scope=text"},
     "has vidkv for some tokens and snapkv,keep=0.5, which keeps a different number of tokens in "
     "each KV head; the channel mask of vidkv is computed over all heads: did you mean "
     "snapkv,head_shared=on,keep=0.5?"},
    {{"calibquant,rotate=hadamard", "kivi,scope=text"},
     "rotates tokens for calibquant but not for kivi; all tokens of a layer must be rotated alike; "
     "did you mean kivi,rotate=hadamard,scope=text?"},
    {{"expected_attention", "kivi,rotate=hadamard"},
     "has kivi,rotate=hadamard, which stores keys rotated, and expected_attention, which scores "
     "them as they were before the rotation; use kivi,rotate=off or another retention rule"},
    {{"streaming,rerotate=on", "kivi"},
     "has a quantizer and streaming,rerotate=on, which rotates kept keys again; packed keys cannot "
     "be rotated: did you mean streaming,rerotate=off?"},
    {{"h2o", "xquant"},
     "has xquant and h2o, which keeps different tokens in each KV head; layers that share codes "
     "must keep the same tokens: did you mean h2o,head_shared=on?"},
    {{"kivi", "kivi,bits=4,layers=0-2", "share,what=codes"},
     "shares codes of keys between layers 2 and 3, which are packed differently; give both layers "
     "of each pair the same options"},
    {{"head_quantile,value_bits=16", "share,what=codes"},
     "shares codes of values, which head_quantile,value_bits=16 does not pack; did you mean "
     "share=codes,from=0:off?"},
    {{"vidkv", "share,what=codes"},
     "shares key codes of vidkv, whose 2-bit channels differ by layer; did you mean vidkv + "
     "share=codes,from=off:0?"},
    {{"vidkv,flush=requant_all", "share,from=off:0,what=codes"},
     "shares codes of vidkv,flush=requant_all, which packs old tokens again; did you mean "
     "vidkv,flush=append?"},
};

/// A row that nothing can reach says nothing to anybody, and one that no test reaches anything.
TEST(Conflicts, EveryRowIsReachedAndSaysWhatToDo) {
  for (const char* name : {"simulated_a", "simulated_b"}) {
    if (find_simulation(name) != nullptr) continue;
    register_simulation({{.name = name}, [](const OptionValues&, const PolicyContext&) {
                           return std::make_unique<Unchanged>();
                         }});
  }
  std::vector<std::string_view> reached;
  for (const Refused& refused : kRefused) {
    const std::optional<Conflict> conflict = conflict_without_decoder(spec_of(refused.parts));
    ASSERT_TRUE(conflict) << refused.text;
    EXPECT_EQ(conflict->text, refused.text);
    reached.push_back(conflict->row);
  }
  EXPECT_THAT(reached, ElementsAreArray(conflict_rows()));
}

/// What a pair of parts has several faults in is told by the first row, of the first pair.
TEST(Conflicts, TheFirstRowSpeaks) {
  const auto text = [](const std::vector<std::string_view>& parts) {
    return conflict_without_decoder(spec_of(parts)).value_or(Conflict{{}, "none"}).text;
  };
  EXPECT_EQ(text({"f16", "f32"}), "has two formats for the same tokens, f16 and f32; keep one");
  EXPECT_EQ(text({"xquant,layers=0-3,scope=visual", "xquant,scope=text"}),
            "has xquant,layers=0-3, but xquant pairs layers itself; drop layers=0-3");
  EXPECT_EQ(text({"xquant,scope=visual", "xquant,layers=0-3,scope=text"}),
            "has another quantizer next to xquant, whose codes are shared between layers; keep "
            "xquant alone");
  EXPECT_EQ(text({"kivi,layers=0-3", "kivi,bits=4"}), "none");
}

}  // namespace
}  // namespace kvlm
