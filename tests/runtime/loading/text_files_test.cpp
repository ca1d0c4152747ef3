#include "runtime/loading/text_files.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/runtime/golden.h"
#include "tests/runtime/loading/safetensors_writer.h"

namespace kvlm {
namespace {

using test::LoadedModel;
using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;

/// Of a checkpoint whose files do not say which token ends an answer.
std::vector<int32_t> ends_of(const char* folder) {
  const auto without = [](ModelSource& source) {
    source.config.erase("eos_token_id");
    if (source.config.contains("text_config")) source.config["text_config"].erase("eos_token_id");
    test::with_file("generation_config.json", nullptr)(source);
  };
  const LoadedModel model(test::golden_root() / folder, {}, 1, without);
  EXPECT_EQ(model->defaults().sampling.rules.eos_ids, model->defaults().eos_ids);
  return model->defaults().eos_ids;
}

TEST(TextFiles, AnAnswerEndsWhereTheClassOfTheDecoderSays) {
  EXPECT_THAT(ends_of("llava_gqa"), ElementsAre(2));
  EXPECT_THAT(ends_of("llava_next_mistral"), ElementsAre(2));
  EXPECT_THAT(ends_of("qwen2_vl"), ElementsAre(151645));
  EXPECT_THAT(ends_of("qwen2_5_vl"), ElementsAre(151645));
}

/// Token 2 is a letter of theirs: an answer would end in the middle.
TEST(TextFiles, RefuseADecoderWhoseEndNobodyKnows) {
  for (const char* folder : {"llava_interleave", "llava_onevision", "internvl_qwen3", "qwen3_vl"}) {
    EXPECT_THAT(test::failure([&] { ends_of(folder); }),
                AllOf(HasSubstr(folder), HasSubstr("eos_token_id"),
                      HasSubstr("download generation_config.json")));
  }
}

}  // namespace
}  // namespace kvlm
