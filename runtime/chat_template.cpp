#include "runtime/chat_template.h"

#include <utility>

#include "runtime/jinja/evaluator.h"
#include "runtime/jinja/parser.h"

namespace kvlm {

using jinja::Value;

struct ChatTemplate::Program {
  std::string name;
  jinja::Block block;
};

namespace {

Value content_of(const std::vector<ContentItem>& content) {
  std::vector<Value> items;
  for (const ContentItem& item : content) {
    switch (item.kind) {
      case ContentItem::Kind::kText:
        items.push_back(jinja::make_dict({{"type", "text"}, {"text", item.text}}));
        break;
      case ContentItem::Kind::kImage:
        items.push_back(jinja::make_dict({{"type", "image"}}));
        break;
      case ContentItem::Kind::kVideo:
        items.push_back(jinja::make_dict({{"type", "video"}}));
        break;
    }
  }
  return jinja::make_list(std::move(items));
}

}  // namespace

ChatTemplate::ChatTemplate(std::string_view source, std::string name)
    : program_(std::make_unique<Program>()) {
  program_->name = std::move(name);
  program_->block = jinja::parse(source, program_->name);
}

ChatTemplate::~ChatTemplate() = default;
ChatTemplate::ChatTemplate(ChatTemplate&&) noexcept = default;
ChatTemplate& ChatTemplate::operator=(ChatTemplate&&) noexcept = default;

std::string ChatTemplate::render(const std::vector<ChatMessage>& messages,
                                 const Context& context) const {
  std::vector<Value> list;
  for (const ChatMessage& message : messages) {
    list.push_back(
        jinja::make_dict({{"role", message.role}, {"content", content_of(message.content)}}));
  }
  std::vector<std::pair<std::string, Value>> variables = {
      {"messages", jinja::make_list(std::move(list))},
      {"add_generation_prompt", context.add_generation_prompt},
      // The reference defines these two even when there are none.
      {"tools", Value()},
      {"documents", Value()},
  };
  // A tokenizer without a token leaves its name undefined.
  for (const auto& [key, text] : context.named_tokens) variables.emplace_back(key, text);
  if (!context.bos_token.empty()) variables.emplace_back("bos_token", context.bos_token);
  if (!context.eos_token.empty()) variables.emplace_back("eos_token", context.eos_token);
  return jinja::render(program_->block, std::move(variables), program_->name);
}

}  // namespace kvlm
