#include "runtime/placeholders.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "runtime/prompt.h"
#include "tests/runtime/golden.h"

namespace kvlm {
namespace {

using test::golden_root;
using test::LoadedModel;
using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

std::vector<std::string> warnings(const LoadedModel& model, const std::string& text) {
  const ChatMessage message = user_message(text, 1, model->image_token());
  return foreign_placeholders(*model, {&message, 1});
}

TEST(ForeignPlaceholders, AreThoseOfOtherFamilies) {
  const LoadedModel llava(golden_root() / "llava_gqa");
  const LoadedModel internvl(golden_root() / "internvl");
  const LoadedModel qwen(golden_root() / "qwen2_vl");
  for (const char* text :
       {"<image>\nWhat is this?", "What is <image>?", "What is this?\n<image>"}) {
    EXPECT_THAT(warnings(llava, text), IsEmpty()) << text;
    EXPECT_THAT(
        warnings(qwen, text),
        ElementsAre(AllOf(HasSubstr("the prompt has <image>, which is plain text to qwen2_vl"),
                          HasSubstr("write <|image_pad|> where the image belongs"))))
        << text;
    EXPECT_THAT(warnings(internvl, text), ElementsAre(HasSubstr("write <IMG_CONTEXT>"))) << text;
  }
  EXPECT_THAT(warnings(llava, "<|vision_start|><|image_pad|><|vision_end|>What?"),
              ElementsAre(HasSubstr("has <|image_pad|>"), HasSubstr("has <|vision_start|>")));
  EXPECT_THAT(warnings(llava, "<IMG_CONTEXT> What?"), ElementsAre(HasSubstr("<IMG_CONTEXT>")));
  EXPECT_THAT(warnings(llava, "<video>What?"), ElementsAre(HasSubstr("a model without videos")));
  EXPECT_THAT(warnings(qwen, "<video>What?"), ElementsAre(HasSubstr("write <|video_pad|>")));
  EXPECT_THAT(warnings(qwen, "<|vision_start|><|image_pad|><|vision_end|>What?"), IsEmpty());
  EXPECT_THAT(warnings(internvl, "<img><IMG_CONTEXT></img>\nWhat?"), IsEmpty());
  for (const char* text : {"<image 1>", "<|image_1|>", "<Image-12>", "<ImageHere>", "<IMAGE>",
                           "[IMG]", "<start_of_image>", "<|begin_of_image|>", "<image_token>"}) {
    EXPECT_THAT(warnings(llava, fmt::format("In {} who is left?", text)),
                ElementsAre(HasSubstr(fmt::format("has {}, which is plain text", text))));
  }
  for (const char* text : {"a <imagenet> label", "<images>", "<img src='a.png'>", "[image]",
                           "image 1", "<visionary>"}) {
    EXPECT_THAT(warnings(llava, text), IsEmpty()) << text;
  }
  EXPECT_THAT(warnings(qwen, "What is <b>this</b> image?"), IsEmpty());
}

}  // namespace
}  // namespace kvlm
