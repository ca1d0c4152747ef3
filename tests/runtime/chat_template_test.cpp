// The template engine against Jinja2: model templates and one construct at a time. The goldens are
// made by tests/runtime/make_chat_golden.py.

#include "runtime/chat_template.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <nlohmann/json.hpp>

#include "kernels/base/error.h"
#include "tests/source_folder.h"

namespace kvlm {
namespace {

using nlohmann::json;
using testing::HasSubstr;

const json& golden() {
  static const json kGolden = [] {
    std::ifstream file(test::source_folder() / "tests/runtime/data/chat_templates.json");
    return json::parse(file);
  }();
  return kGolden;
}

std::vector<ChatMessage> chat(const std::string& name) {
  std::vector<ChatMessage> messages;
  for (const json& message : golden().at("chats").at(name)) {
    ChatMessage& turn = messages.emplace_back();
    turn.role = message.at("role").get<std::string>();
    for (const json& item : message.at("content")) {
      const auto type = item.at("type").get<std::string>();
      if (type == "text") {
        turn.content.push_back({ContentItem::Kind::kText, item.at("text").get<std::string>()});
      } else {
        const bool image = type == "image";
        turn.content.push_back({image ? ContentItem::Kind::kImage : ContentItem::Kind::kVideo, ""});
      }
    }
  }
  return messages;
}

std::string render(const std::string& source, const std::string& chat_name = "late",
                   bool prompt = true) {
  return ChatTemplate(source, "chat_template.jinja")
      .render(chat(chat_name),
              {.bos_token = "<s>", .eos_token = "</s>", .add_generation_prompt = prompt});
}

Error error_of(const std::string& source) {
  try {
    const std::string text = render(source);
    ADD_FAILURE() << source << " gives " << text.substr(0, 200);
  } catch (const Error& error) {
    return error;
  }
  return Error(ErrorCode::kDevice, "");
}

TEST(ChatTemplate, RendersModelTemplatesAsJinja2) {
  for (const json& entry : golden().at("cases")) {
    const auto source =
        golden().at("models").at(entry.at("model").get<std::string>()).get<std::string>();
    const auto name = entry.at("chat").get<std::string>();
    const bool prompt = entry.at("prompt").get<bool>();
    if (entry.contains("error")) {
      EXPECT_THROW(render(source, name, prompt), Error) << entry;
    } else {
      EXPECT_EQ(render(source, name, prompt), entry.at("text").get<std::string>()) << entry;
    }
  }
}

TEST(ChatTemplate, RendersEveryConstructAsJinja2) {
  for (const json& entry : golden().at("pieces")) {
    const auto source = entry.at("source").get<std::string>();
    if (entry.contains("error")) {
      EXPECT_THROW(render(source), Error) << entry;
      continue;
    }
    try {
      EXPECT_EQ(render(source), entry.at("text").get<std::string>()) << source;
    } catch (const Error& error) {
      ADD_FAILURE() << source << " throws " << error.what();
    }
  }
}

TEST(ChatTemplate, RendersLlava15) {
  const auto source = golden().at("models").at("llava15").get<std::string>();
  EXPECT_EQ(render(source, "one"), "USER: <image>\nWhat is shown in this image? ASSISTANT:");
}

TEST(ChatTemplate, PassesOnTheTemplatesOwnWords) {
  const Error error = error_of("a\n{{ raise_exception('Roles must ' ~ 'alternate') }}");
  EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
  EXPECT_STREQ(error.what(), "chat_template.jinja: Roles must alternate");
}

TEST(ChatTemplate, NamesWhatIsNotBuiltWithItsLine) {
  for (const auto& [source, word] : std::vector<std::pair<std::string, std::string>>{
           {"\n{% macro f(x) %}{% endmacro %}", "{% macro %}"},
           {"\n{% include 'x' %}", "{% include %}"},
           {"\n{{ strftime_now('%Y') }}", "strftime_now()"},
           {"\n{{ cycler(1) }}", "cycler()"},
           {"\n{{ messages | sort }}", "the filter sort"},
           {"\n{{ 1 is callable }}", "the test callable"},
           {"\n{{ messages | select('callable') | list }}", "the test callable"},
           {"\n{{ messages.append(1) }}", ".append()"},
           {"\n{{ loop.cycle(1) }}", ".cycle()"},
           {"\n{{ 2 ** 3 }}", "**"},
           {"\n{{ f(*a) }}", "f()"},
           {"\n{{ 'a %s' % 1 }}", "%"},
           {"\n{{ 99999999999999999999 }}", "99999999999999999999"},
           {"\n{% for x in [] recursive %}{% endfor %}", "recursive"},
           {"\n{% set ns = namespace() %}{{ [ns] }}", "namespace"},
           {"\n{{ 'x' | tojson(sort_keys=true) }}", "sort_keys"}}) {
    const Error error = error_of(source);
    EXPECT_EQ(error.code(), ErrorCode::kUnsupported) << source;
    EXPECT_THAT(error.what(), HasSubstr(word)) << source;
    EXPECT_THAT(error.what(), HasSubstr("chat_template.jinja line 2")) << source;
  }
}

TEST(ChatTemplate, RefusesWhatIsNotATemplate) {
  for (const char* source : {"{% if 1 %}", "{{ 1", "{{ 'a }}", "{# x", "{% raw %}", "{% endfor %}",
                             "{{ 1 2 }}", "{{ ] }}", "\xFF", "{{ '\\ud800' }}", "{{ a ? b }}"}) {
    const Error error = error_of(source);
    EXPECT_EQ(error.code(), ErrorCode::kCorruptFile) << source;
    EXPECT_THAT(error.what(), HasSubstr("chat_template.jinja")) << source;
  }
  EXPECT_EQ(error_of(std::string(2 << 20, 'a')).code(), ErrorCode::kCorruptFile);
}

std::string repeated(const std::string& text, int times) {
  std::string out;
  for (int i = 0; i < times; ++i) out += text;
  return out;
}

TEST(ChatTemplate, StopsHostileTemplates) {
  const std::string double_up = "{% set x = x + x %}";
  const std::vector<std::string> hostile = {
      // Too deep for the stack, were they followed.
      "{{ " + repeated("(", 50000) + "1" + repeated(")", 50000) + " }}",
      "{{ " + repeated("[", 50000) + repeated("]", 50000) + " }}",
      "{{ " + repeated("not ", 50000) + "1 }}",
      "{{ " + repeated("-", 50000) + "1 }}",
      "{{ 1" + repeated(" + 1", 50000) + " }}",
      "{{ a" + repeated(".a", 50000) + " }}",
      "{{ a" + repeated(" | upper", 50000) + " }}",
      "{{ 1" + repeated(" if 1 else 1", 50000) + " }}",
      "{{ 1" + repeated(" if 1", 50000) + " }}",
      "{{ 1" + repeated(" is odd", 50000) + " }}",
      "{{ {1:" + repeated("{1:", 30000) + " }}",
      repeated("{% if 1 %}", 20000) + repeated("{% endif %}", 20000),
      repeated("{% for x in y %}", 20000),
      "{% set ns = namespace(x=[]) %}{% for i in range(100000) %}{% set ns.x = [ns.x] %}{% endfor "
      "%}",
      // Too long.
      "{% for a in range(100000000) %}{% endfor %}",
      "{% set r = range(5000) %}{% for a in r %}{% for b in r %}{% for c in r %}{% endfor %}"
      "{% endfor %}{% endfor %}",
      "{{ 'a' * 9223372036854775807 }}",
      "{{ [1] * 9223372036854775807 }}",
      // Too big.
      "{% set x = 'aaaaaaaaaaaaaaaa' %}" + repeated(double_up, 60) + "{{ x }}",
      "{% set x = [1] %}" + repeated(double_up, 60) + "{{ x }}",
      "{% set x = 'a' %}" + repeated("{% set x = x.replace('a', x + x) %}", 30),
      "{% set x = [1] %}" + repeated("{% set x = [x, x] %}", 50) + "{{ x }}",
      "{% set x = [1] %}" + repeated("{% set x = [x, x] %}", 50) + "{{ x | tojson }}",
      "{% set x = [1] %}{% set y = [1] %}" +
          repeated("{% set x = [x, x] %}{% set y = [y, y] %}", 50) + "{{ x == y }}",
      "{% set x = 'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa' * 10000 %}"
      "{% for i in range(1000) %}{{ x }}{% endfor %}",
      "{{ -9223372036854775807 - 2 }}",
      "{{ (-9223372036854775807 - 1) // -1 }}",
      "{{ range(0, 9223372036854775807, 1) | list }}",
  };
  for (const std::string& source : hostile) {
    try {
      render(source);
      ADD_FAILURE() << "rendered " << source.substr(0, 100);
    } catch (const Error& error) {
      EXPECT_LT(std::string(error.what()).size(), 500) << error.what();
    }
  }
}

TEST(ChatTemplate, CanBeMovedAndUsedAgain) {
  ChatTemplate first("{{ messages | length }}", "t");
  ChatTemplate second = std::move(first);
  EXPECT_EQ(second.render(chat("turns"), {}), "3");
  EXPECT_EQ(second.render(chat("none"), {}), "0");
  first = std::move(second);
  EXPECT_EQ(first.render(chat("one"), {}), "1");
}

TEST(ChatTemplate, LeavesMissingTokensUndefined) {
  const ChatTemplate text("{{ bos_token }}{{ bos_token is defined }}", "t");
  EXPECT_EQ(text.render({}, {}), "False");
  EXPECT_EQ(text.render({}, {.bos_token = "<s>", .eos_token = ""}), "<s>True");
}

}  // namespace
}  // namespace kvlm
