#include "runtime/prompt.h"

#include <fmt/format.h>
#include <gmock/gmock.h>

#include "kernels/base/error.h"
#include "tests/runtime/golden.h"
#include "tests/runtime/loading/safetensors_writer.h"

namespace kvlm {
namespace {

using test::error_of;
using test::LoadedModel;
using test::prompt_of;
using testing::HasSubstr;

constexpr int32_t kImage = 300;  // <image> of the golden checkpoints
constexpr int32_t kBos = 1;

LoadedModel load(const std::function<void(ModelSource&)>& edit = {}) {
  return LoadedModel(test::golden_root() / "llava_gqa", {}, 1, edit);
}

TEST(UserMessage, PutsThePicturesBeforeTheText) {
  const ChatMessage message = user_message("what?", 2, "<image>");
  EXPECT_EQ(message.role, "user");
  ASSERT_EQ(message.content.size(), 3u);
  EXPECT_EQ(message.content[0].kind, ContentItem::Kind::kImage);
  EXPECT_EQ(message.content[1].kind, ContentItem::Kind::kImage);
  EXPECT_EQ(message.content[2].kind, ContentItem::Kind::kText);
  EXPECT_EQ(message.content[2].text, "what?");
  EXPECT_EQ(user_message("what?", 0, "<image>").content.size(), 1u);
}

TEST(UserMessage, LeavesPlaceholdersOfTheTextWhereTheyAre) {
  const ChatMessage message = user_message("first <image> then <image>", 2, "<image>");
  ASSERT_EQ(message.content.size(), 1u);
  EXPECT_EQ(message.content[0].text, "first <image> then <image>");
}

TEST(UserMessage, RendersAsTheTemplatePutsIt) {
  const LoadedModel model = load();
  EXPECT_EQ(model->render({user_message("what?", 1, "<image>")}),
            "USER: <image>\nwhat? ASSISTANT:");
  EXPECT_EQ(model->render({user_message("a <image> b", 1, "<image>")}),
            "USER: a <image> b ASSISTANT:");
}

TEST(DefaultQuestion, IsOfThePicturesOrOfTheVideo) {
  const LoadedModel model = load();
  EXPECT_EQ(default_question(*model, 1, 0), model->caption_prompt());
  EXPECT_EQ(default_question(*model, 1, 1), model->caption_prompt());
  EXPECT_EQ(default_question(*model, 0, 0), model->caption_prompt());
  EXPECT_EQ(default_question(*model, 0, 2), "Describe the video.");
}

TEST(MakePrompt, ExpandsEveryPlaceholderToItsOwnTokens) {
  const LoadedModel model = load();
  const std::vector<int> tokens = {3, 1, 5};
  const Prompt prompt =
      prompt_of(*model, {user_message("<image>a<image>b<image>", 3, "<image>")}, tokens);
  std::vector<int> rows(3);
  int next = 0;
  for (size_t row = 0; row < prompt.ids.size(); ++row) {
    const bool visual = prompt.ids[row] == kImage;
    EXPECT_EQ(prompt.modality[row] != kTextRow, visual) << row;
    if (!visual) continue;
    EXPECT_GE(prompt.modality[row], next) << "images in order";
    next = prompt.modality[row];
    ++rows[static_cast<size_t>(next)];
  }
  EXPECT_EQ(rows, tokens);
  EXPECT_EQ(prompt.positions, following_positions(0, prompt.ids.size()));
  EXPECT_EQ(prompt.next_position, static_cast<int32_t>(prompt.ids.size()));
}

/// Rows are told apart by 16-bit tags.
TEST(MakePrompt, RefusesMorePicturesThanThereAreTags) {
  const LoadedModel model = load();
  constexpr size_t kMost = 32768;
  std::vector<int> tokens(kMost, 1);
  const Prompt prompt = prompt_of(*model, {user_message("x", kMost, "<image>")}, tokens);
  EXPECT_EQ(std::count(prompt.ids.begin(), prompt.ids.end(), kImage), int64_t{kMost});
  EXPECT_EQ(*std::max_element(prompt.modality.begin(), prompt.modality.end()), int64_t{kMost} - 1);
  for (const size_t images : {kMost + 1, size_t{40000}}) {
    tokens.resize(images, 1);
    const Error error =
        error_of([&] { prompt_of(*model, {user_message("x", images, "<image>")}, tokens); });
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    EXPECT_THAT(error.what(), HasSubstr(fmt::format("{} images and videos", images)));
    EXPECT_THAT(error.what(), HasSubstr("at most 32768"));
  }
}

TEST(RequireContext, CountsPicturesAndVideos) {
  const LoadedModel model = load();
  const auto refusal = [&](std::vector<VisualPlace> visuals) {
    const PromptOutline outline{.ids = {},
                                .spans = {},
                                .span_visuals = {},
                                .visuals = visuals,
                                .rows = 900,
                                .visual_rows = 850};
    return std::string(
        error_of([&] { require_context(outline, "it", *model, 512, "take fewer"); }).what());
  };
  EXPECT_THAT(refusal({{false, 0}}), HasSubstr("850 of them of its 1 image, but"));
  EXPECT_THAT(refusal({{true, 0}, {true, 1}}), HasSubstr("850 of them of its 2 videos, but"));
  EXPECT_THAT(refusal({{false, 0}, {true, 0}, {false, 1}}),
              HasSubstr("850 of them of its 2 images and 1 video, but"));
}

TEST(MakePrompt, TextAroundAPictureDoesNotDependOnItsSize) {
  const LoadedModel model = load();
  const std::vector<ChatMessage> messages = {user_message("what is it?", 1, "<image>")};
  const auto without_pictures = [&](int tokens) {
    std::vector<int32_t> ids = prompt_of(*model, messages, std::span(&tokens, 1)).ids;
    EXPECT_EQ(std::count(ids.begin(), ids.end(), kImage), tokens);
    std::erase(ids, kImage);
    return ids;
  };
  EXPECT_EQ(without_pictures(1), without_pictures(16));
}

TEST(MakePrompt, NamesBothNumbersWhenPicturesAndPlaceholdersDiffer) {
  const LoadedModel model = load();
  const auto failure = [&](const std::string& text, int placeholders, std::vector<int> pictures) {
    ChatMessage message{"user", {}};
    message.content.resize(static_cast<size_t>(placeholders), {ContentItem::Kind::kImage, {}});
    message.content.push_back({ContentItem::Kind::kText, text});
    const Error error = error_of([&] { prompt_of(*model, {message}, pictures); });
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    return std::string(error.what());
  };
  EXPECT_THAT(failure("what?", 0, {16}),
              HasSubstr("the prompt has 0 <image> placeholders and 1 image is given"));
  EXPECT_THAT(failure("what?", 1, {}),
              HasSubstr("the prompt has 1 <image> placeholder and 0 images are given"));
  EXPECT_THAT(failure("what?", 1, {16, 16}),
              HasSubstr("the prompt has 1 <image> placeholder and 2 images are given"));
  EXPECT_THAT(failure("an <image> of mine", 1, {16}),
              HasSubstr("the prompt has 2 <image> placeholders and 1 image is given"));
  EXPECT_THAT(failure("an <image> of mine", 1, {16}), HasSubstr("give 2 images"));
}

/// Where the placeholder is another text than the token that stands for rows.
TEST(MakePrompt, RefusesVisualTokensOfTheTextsOwn) {
  const LoadedModel model(test::golden_root() / "internvl_original");
  const Error error =
      error_of([&] { prompt_of(*model, {user_message("<IMG_CONTEXT>?", 0, "<image>")}); });
  EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
  EXPECT_THAT(error.what(), HasSubstr("has 1 visual token where its images and videos make 0; "
                                      "leave <IMG_CONTEXT> out of the text"));
}

TEST(MakePrompt, StartsWithBosOnce) {
  const LoadedModel plain = load();
  const std::vector<ChatMessage> messages = {user_message("hi", 0, "<image>")};
  const Prompt prompt = prompt_of(*plain, messages);
  EXPECT_EQ(prompt.ids[0], kBos);
  EXPECT_NE(prompt.ids[1], kBos);

  const LoadedModel own = load(test::with_file(
      "chat_template.jinja", "{{ bos_token }}{{ messages[0]['content'][0]['text'] }}"));
  ASSERT_EQ(own->render(messages), "<s>hi");
  const Prompt with_own = prompt_of(*own, messages);
  EXPECT_EQ(std::count(with_own.ids.begin(), with_own.ids.end(), kBos), 1);
  EXPECT_EQ(with_own.ids[0], kBos);

  const LoadedModel none =
      load(test::with_file("chat_template.jinja", "{{ messages[0]['content'][0]['text'] }}"));
  const Prompt with_none = prompt_of(*none, messages);
  EXPECT_EQ(std::count(with_none.ids.begin(), with_none.ids.end(), kBos), 1);
  // A BOS that is not at the start is the text's own affair.
  const Prompt inside = prompt_of(*none, {user_message("hi <s> there", 0, "<image>")});
  EXPECT_EQ(std::count(inside.ids.begin(), inside.ids.end(), kBos), 2);
}

/// Row r of the embedding is row r of the prompt, also when the prompt is embedded from some row on
/// and that row lies within a picture.
/// The request has a place for its picture; the template does not.
TEST(MakePrompt, ATemplateWithoutPlaceholdersIsTheFilesFault) {
  const LoadedModel model = load(test::with_file("chat_template.jinja", "hello"));
  const int tokens = 3;
  const Error error = error_of(
      [&] { prompt_of(*model, {user_message("x", 1, "<image>")}, std::span(&tokens, 1)); });
  EXPECT_EQ(error.code(), ErrorCode::kCorruptFile);
  EXPECT_THAT(error.what(), HasSubstr("makes 0 <image> placeholders of 1 image"));
}

TEST(EmbedPrompt, SplicesPicturesIntoTheText) {
  const LoadedModel model = load();
  const std::vector<int> tokens = {3, 4};
  const Prompt prompt = prompt_of(*model, {user_message("a<image>b<image>", 2, "<image>")}, tokens);
  const auto width = static_cast<size_t>(model->decoder().hidden());
  std::vector<Tensor> pictures;
  for (size_t picture = 0; picture < 2; ++picture) {
    pictures.emplace_back(DType::kF32, Shape{tokens[picture], static_cast<int64_t>(width)});
    for (size_t i = 0; i < static_cast<size_t>(tokens[picture]) * width; ++i) {
      pictures[picture].as<float>()[i] = static_cast<float>(1000 * (picture + 1) + i);
    }
  }
  const auto rows = static_cast<int64_t>(prompt.ids.size());
  for (int64_t first = 0; first < rows; ++first) {
    Tensor ours(DType::kF32, {rows - first, static_cast<int64_t>(width)});
    std::vector<VisualFeatures> views;
    for (const Tensor& picture : pictures) views.push_back({picture.view(), {}});
    embed_prompt(*model, prompt, first, views, ours, model.stream());
    std::vector<size_t> next(2);
    for (int64_t row = 0; row < rows; ++row) {
      const int16_t tag = prompt.modality[static_cast<size_t>(row)];
      std::vector<float> expected(width);
      if (tag == kTextRow) {
        const int32_t id = prompt.ids[static_cast<size_t>(row)];
        model->decoder().embed(
            std::span(&id, 1),
            TensorView(expected.data(), DType::kF32, {1, static_cast<int64_t>(width)}),
            model.stream());
      } else {
        const auto picture = static_cast<size_t>(tag);
        const float* from = pictures[picture].as<float>() + width * next[picture]++;
        expected.assign(from, from + width);
      }
      if (row < first) continue;
      const float* got = ours.as<float>() + static_cast<size_t>(row - first) * width;
      ASSERT_EQ(std::vector<float>(got, got + width), expected)
          << "row " << row << ", embedded from " << first;
    }
  }
}

}  // namespace
}  // namespace kvlm
