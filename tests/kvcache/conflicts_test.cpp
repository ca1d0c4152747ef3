#include "kvcache/conflicts.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <string_view>
#include <vector>

#include "kvcache/planner.h"
#include "kvcache/words.h"

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

struct Refused {
  std::vector<std::string_view> parts;
  const char* text;
};

/// One for every row of the tables, in their order.
const std::vector<Refused> kRefused = {
    {{"h2o", "prefixkv"}, "has two retention parts, h2o and prefixkv; keep one"},
    {{"kivi", "share,what=codes", "share,from=0:2,what=codes"},
     "has two sharing parts; keep one share=codes"},
    {{"int8", "kivi"}, "names two quantizers, int8 and kivi, for the same slots; keep one"},
    {{"kivi,layers=0-3", "kivi,bits=4,layers=3-5"},
     "names two quantizers, kivi,layers=0-3 and kivi,bits=4,layers=3-5, for layer 3; keep one"},
    {{"calibquant", "kivi"},
     "has kivi for all slots beside calibquant for visual slots; did you mean calibquant + "
     "kivi,scope=text?"},
    {{"f16,scope=visual", "f32,scope=text"},
     "names two formats, f16 and f32; rows that nothing packs have one, keep one"},
    {{"f16", "share,what=codes"},
     "shares codes, and nothing makes any; add a quantizer, for example kivi + share=codes"},
    {{"xquant,kq=4", "share,what=codes"},
     "has share=codes beside xquant,kq=4, which shares codes itself; did you mean xquant,kq=4?"},
    {{"xquant,layers=0-3"},
     "has xquant,layers=0-3, and xquant pairs layers itself; drop layers=0-3"},
    {{"calibquant", "xquant,scope=text"},
     "has another quantizer beside xquant, whose codes layers share; keep xquant alone"},
    {{"kivi,scope=visual", "calibquant,layers=0"},
     "has kivi in some layers and calibquant in others, and calibquant packs once where kivi packs "
     "as rows age; keep one of them"},
    {{"vidkv,protect=0.2,scope=visual"},
     "has vidkv,protect=0.2,scope=visual, which protects visual rows among all, in a scope; did "
     "you "
     "mean vidkv for all rows?"},
    {{"snapkv,keep=0.5", "vidkv,scope=text"},
     "has vidkv for some rows beside snapkv,keep=0.5, of which every kv_head keeps another number; "
     "its mask is learned from all heads alike: did you mean snapkv,head_shared=on,keep=0.5?"},
    {{"calibquant,rotate=hadamard", "kivi,scope=text"},
     "turns rows for calibquant and not for kivi, and rows of a layer are turned together; did you "
     "mean kivi,scope=text,rotate=hadamard?"},
    {{"expected_attention", "kivi,rotate=hadamard"},
     "has rotate=hadamard beside expected_attention, which scores keys as they were before it; "
     "drop "
     "rotate=hadamard or take another rule"},
    {{"streaming,rerotate=on", "kivi"},
     "has a quantizer beside streaming,rerotate=on, which turns keys again; packed keys cannot be "
     "turned: did you mean streaming,rerotate=off?"},
    {{"h2o", "xquant"},
     "has xquant beside h2o, which keeps other slots in every kv_head; shared codes need one set "
     "of "
     "slots: did you mean h2o,head_shared=on?"},
    {{"kivi", "kivi,bits=4,layers=0-2", "share,what=codes"},
     "shares codes of keys between layers 2 and 3, which pack them differently; let each pair of "
     "layers be packed alike"},
    {{"head_quantile,value_bits=16", "share,what=codes"},
     "shares codes of values, which head_quantile,value_bits=16 does not pack; did you mean "
     "share=codes,from=0:off?"},
    {{"vidkv", "share,what=codes"},
     "shares keys of vidkv, whose channels differ by layer; did you mean vidkv + "
     "share=codes,from=off:0?"},
    {{"vidkv,flush=requant_all", "share,from=off:0,what=codes"},
     "shares codes of vidkv,flush=requant_all, which packs old rows again; did you mean "
     "vidkv,flush=append?"},
};

/// A row that nothing can reach says nothing to anybody, and one that no test reaches anything.
TEST(Conflicts, EveryRowIsReachedAndSaysWhatToDo) {
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
  EXPECT_EQ(text({"f16", "f32"}), "names two formats, f16 and f32, for the same slots; keep one");
  EXPECT_EQ(text({"xquant,layers=0-3,scope=visual", "xquant,scope=text"}),
            "has xquant,layers=0-3, and xquant pairs layers itself; drop layers=0-3");
  EXPECT_EQ(text({"xquant,scope=visual", "xquant,layers=0-3,scope=text"}),
            "has another quantizer beside xquant, whose codes layers share; keep xquant alone");
  EXPECT_EQ(text({"kivi,layers=0-3", "kivi,bits=4"}), "none");
}

}  // namespace
}  // namespace kvlm
