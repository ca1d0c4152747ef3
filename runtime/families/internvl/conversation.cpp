#include "runtime/families/internvl/conversation.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <array>
#include <vector>

#include "kernels/base/error.h"
#include "kernels/base/printable.h"

namespace kvlm {

namespace {

constexpr std::string_view kSystemOf2 =
    "你是由上海人工智能实验室联合商汤科技开发的书生多模态大模型，英文名叫InternVL, "
    "是一个有用无害的人工智能助手。";
constexpr std::string_view kSystemOf25 =
    "你是书生·万象，英文名是InternVL，是由上海人工智能实验室、清华大学及多家合作单位联合开发的"
    "多模态大语言模型。";

constexpr std::array kConversations = {
    InternVlConversation{"internvl2_5", kSystemOf25, "<|im_end|>\n"},
    InternVlConversation{"internlm2-chat", kSystemOf2, "<|im_end|>"},
    InternVlConversation{"Hermes-2", kSystemOf2, "<|im_end|>"},
};

constexpr std::string_view kTemplate =
    "{{ '<|im_start|>system\\n' }}"
    "{% if messages and messages[0]['role'] == 'system' %}"
    "{% for item in messages[0]['content'] %}{{ item['text'] }}{% endfor %}"
    "{% else %}{{ system_message }}{% endif %}{{ separator }}"
    "{% for message in messages %}"
    "{% if not (loop.first and message['role'] == 'system') %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% for item in message['content'] %}"
    "{% if item['type'] == 'image' %}{{ '<image>\\n' }}"
    "{% elif item['type'] == 'video' %}{{ '<video>\\n' }}"
    "{% else %}{{ item['text'] }}{% endif %}"
    "{% endfor %}{{ separator }}"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}";

}  // namespace

std::map<std::string, std::string> InternVlConversation::variables(
    const std::optional<std::string>& system_message) const {
  return {{"system_message", system_message.value_or(std::string(system))},
          {"separator", std::string(separator)}};
}

const InternVlConversation& internvl_conversation(const std::string& name) {
  std::vector<std::string_view> known;
  for (const InternVlConversation& conversation : kConversations) {
    if (conversation.name == name) return conversation;
    known.push_back(conversation.name);
  }
  throw Error(
      ErrorCode::kUnsupported,
      fmt::format(
          "config.json: template is \"{}\"; supported conversation templates of this family are {}",
          printable(name), fmt::join(known, ", ")));
}

std::string_view internvl_chat_template() noexcept { return kTemplate; }

}  // namespace kvlm
