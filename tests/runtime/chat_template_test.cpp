// The template engine against Jinja2: model templates and one construct at a time. The goldens are
// made by tests/runtime/make_chat_golden.py.

#include "runtime/chat_template.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <ctime>
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
                   bool prompt = true, const json& variables = json::object()) {
  ChatTemplate::Context context{.bos_token = "<s>", .eos_token = "</s>"};
  context.add_generation_prompt = prompt;
  // Templates only ask whether such a variable is true, which any text but the empty one is.
  for (const auto& [name, value] : variables.items()) {
    if (value.get<bool>()) context.named_tokens[name] = "true";
  }
  return ChatTemplate(source, "chat_template.jinja").render(chat(chat_name), context);
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
    const json variables = entry.value("variables", json::object());
    if (entry.contains("error")) {
      EXPECT_THROW(render(source, name, prompt, variables), Error) << entry;
    } else {
      EXPECT_EQ(render(source, name, prompt, variables), entry.at("text").get<std::string>())
          << entry;
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
  EXPECT_STREQ(error.what(),
               "chat_template.jinja: Roles must alternate; this checkpoint's chat template refuses "
               "the conversation, so change the prompt, its images or the system message");
}

TEST(ChatTemplate, NamesWhatIsNotBuiltWithItsLine) {
  for (const auto& [source, word] : std::vector<std::pair<std::string, std::string>>{
           {"\n{% call f(x) %}{% endcall %}", "{% call %}"},
           {"\n{% macro f(x) %}{{ varargs }}{% endmacro %}", "the name varargs in a macro"},
           {"\n{% macro f(x) %}{{ kwargs }}{% endmacro %}", "the name kwargs in a macro"},
           {"\n{% macro f(x) %}{{ caller() }}{% endmacro %}", "caller"},
           {"\n{% macro f(x) %}{% endmacro %}{{ [f] }}", "a macro inside another value"},
           {"\n{% macro f(x) %}{% endmacro %}{% set n = namespace(f=f) %}", "a macro inside"},
           {"\n{% macro f(x) %}{% endmacro %}{% set g = f %}{{ g(1) }}", "g()"},
           {"\n{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "a macro does that calls itself"},
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
      "{% macro f(x) %}{{ f([x]) }}{% endmacro %}{{ f(1) }}",
      "{% macro f(n) %}{% for x in [1] %}{% set y %}{{ f(n) | upper ~ 'a' }}{% endset %}{% endfor "
      "%}"
      "{% endmacro %}{{ f(1) }}",
      // Too long.
      "{% macro f(n) %}{% if n %}{{ f(n - 1) ~ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
      "{% for a in range(1000000) %}{% macro f() %}{% endmacro %}{% endfor %}",
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

/// What takes quadratic time when it is searched place by place: half a megabyte in a whole one.
TEST(ChatTemplate, SearchesInLinearTime) {
  const std::string texts =
      "{% set u = 'a' * 1000 %}{% set x = u * 1000 %}{% set y = u * 500 ~ 'b' %}";
  const std::clock_t start = std::clock();
  EXPECT_EQ(render(texts + "{{ y in x }}"), "False");
  EXPECT_EQ(render(texts + "{{ y not in x }}"), "True");
  EXPECT_EQ(render(texts + "{{ x.find(y) }}"), "-1");
  EXPECT_EQ(render(texts + "{{ x.replace(y, '') == x }}"), "True");
  EXPECT_EQ(render(texts + "{{ x | replace(y, '') == x }}"), "True");
  EXPECT_EQ(render(texts + "{{ x.split(y) | length }}"), "1");
  const std::string other = "{% set x = 'a' * 100000 %}{% set y = 'b' * 100000 ~ 'a' %}";
  EXPECT_EQ(render(other + "{{ x.strip(y) }}{{ x | trim(y) }}"), "");
  EXPECT_LT((std::clock() - start) / CLOCKS_PER_SEC, 5);
}

TEST(ChatTemplate, ManyNamesTakeNoLongerEach) {
  std::string names = "{% set ns = namespace(";
  for (int i = 0; i < 30000; ++i) names.append("n").append(std::to_string(i)).append("=1,");
  names += ") %}";
  const std::clock_t start = std::clock();
  EXPECT_EQ(render(names + "{% for i in range(20000) %}{% set ns.n29999 = ns.n29999 + 1 %}"
                           "{% endfor %}{{ ns.n29999 }}"),
            "20001");
  EXPECT_LT((std::clock() - start) / CLOCKS_PER_SEC, 5);
}

/// Work that makes nothing counts too: 10,000 comparisons of 8 MB.
TEST(ChatTemplate, ChargesForWhatIsOnlyLookedAt) {
  const Error error = error_of(
      "{% set u = 'a' * 1000 %}{% set x = u * 8000 %}{% set parts = (x ~ 'b',) * 10000 %}"
      "{{ (x ~ 'c').startswith(parts) }}");
  EXPECT_EQ(error.code(), ErrorCode::kUnsupported);
  EXPECT_THAT(error.what(), HasSubstr("steps"));
}

TEST(ChatTemplate, CanBeMovedAndUsedAgain) {
  ChatTemplate first("{{ messages | length }}", "t");
  ChatTemplate second = std::move(first);
  EXPECT_EQ(second.render(chat("turns"), {}), "3");
  EXPECT_EQ(second.render(chat("none"), {}), "0");
  first = std::move(second);
  EXPECT_EQ(first.render(chat("one"), {}), "1");
}

/// As transformers 5.23 with Jinja2 3.1.6 gives them.
TEST(ChatTemplate, PrintsWhatPythonPrints) {
  for (const auto& [source, text] : std::vector<std::pair<std::string, std::string>>{
           {"{{ 'they\\'re o\\'neil a-b (c d'.title() }}", "They'Re O'Neil A-B (C D"},
           {"{{ 'they\\'re o\\'neil a-b (c d  <e {f [g 2nd x\ty \xC3\x89"
            "COLE \xC3\x9F"
            "a' | title }}",
            "They're O'neil A-B (C D  <E {F [G 2nd X\tY \xC3\x89"
            "cole SSa"},
           {"{{ range(3) }} {{ range(1, 9, 2) }} {{ [range(2)] }}",
            "range(0, 3) range(1, 9, 2) [range(0, 2)]"},
           {"{{ range(3) | list }} {{ range(3) == range(0, 3) }} {{ range(3) == [0, 1, 2] }}",
            "[0, 1, 2] True False"},
           {"{{ range(5)[2] }} {{ range(3) | length }} {{ range(4) | reverse | list }} "
            "{{ 1 in range(3) }}",
            "2 3 [3, 2, 1, 0] True"},
           {"{{ ['\xE2\x80\x8B \xC2\xAD \xE2\x80\xA8 \xC3\xA9 \xEE\x80\x80 \xF0\x9F\x98\x80 "
            "\xE3\x80\x80 "
            "\xEF\xBB\xBF \xF3\xA0\x80\x81 \xCC\x81'] }}",
            "['\\u200b \\xad \\u2028 \xC3\xA9 \\ue000 \xF0\x9F\x98\x80 \\u3000 \\ufeff \\U000e0001 "
            "\xCC\x81']"}}) {
    EXPECT_EQ(render(source), text) << source;
  }
  for (const char* source :
       {"{{ range(3) + [1] }}", "{{ range(3) * 2 }}", "{{ range(3) | tojson }}"}) {
    EXPECT_EQ(error_of(source).code(), ErrorCode::kCorruptFile) << source;
  }
}

/// The reference has them whether or not they are called; here they would silently be undefined.
TEST(ChatTemplate, RefusesFunctionsOfTheReferenceByName) {
  for (const std::string name : {"lipsum", "cycler", "joiner", "dict", "strftime_now", "range",
                                 "namespace", "raise_exception", "self"}) {
    const Error error = error_of("\n{{ " + name + " is defined }}");
    EXPECT_EQ(error.code(), ErrorCode::kUnsupported) << name;
    EXPECT_THAT(error.what(), HasSubstr("line 2: the name " + name + " without a call"));
  }
  EXPECT_EQ(render("{% set cycler = 3 %}{{ cycler }}"), "3");
}

/// What shows only in rendering is the file's fault too, and is said with what to do.
TEST(ChatTemplate, FaultsOfTheFileAreTheFiles) {
  for (const char* source : {"{{ 1 // 0 }}", "{{ nothing.at.all }}", "{{ 'a' < 1 }}", "{{ 1 2 }}",
                             "{{ 'a }}", "{% if %}"}) {
    const Error error = error_of(source);
    EXPECT_EQ(error.code(), ErrorCode::kCorruptFile) << source;
    EXPECT_THAT(error.what(), HasSubstr("; repair the template")) << source;
  }
  EXPECT_THAT(error_of("{{ 2 ** 3 }}").what(), HasSubstr("; write the template without it"));
  EXPECT_THAT(error_of("{% for a in range(100000000) %}{% endfor %}").what(),
              HasSubstr("; shorten the conversation"));
}

TEST(ChatTemplate, KnowsEveryNamedToken) {
  const ChatTemplate text("{{ pad_token }}{{ image_token }}{{ bos_token }}{{ unk_token }}", "t");
  EXPECT_EQ(text.render({}, {.bos_token = "<s>",
                             .eos_token = "",
                             .add_generation_prompt = true,
                             .named_tokens = {{"pad_token", "<pad>"}, {"image_token", "<i>"}}}),
            "<pad><i><s>");
}

TEST(ChatTemplate, LeavesMissingTokensUndefined) {
  const ChatTemplate text("{{ bos_token }}{{ bos_token is defined }}", "t");
  EXPECT_EQ(text.render({}, {}), "False");
  EXPECT_EQ(text.render({}, {.bos_token = "<s>", .eos_token = ""}), "<s>True");
}

}  // namespace
}  // namespace kvlm
