#include "runtime/jinja/text.h"

#include <fmt/format.h>

#include <cmath>
#include <set>

#include "llm/find_text.h"
#include "llm/unicode.h"
#include "runtime/jinja/lexer.h"

// Python's text functions as templates see them: case, strip, repr and JSON of strings and numbers,
// over Unicode characters.
namespace kvlm::jinja {

namespace {

/// Calls visit(scalar, its bytes) for each character.
template <class Visit>
void for_each_char(std::string_view text, Visit&& visit) {
  for (size_t pos = 0; pos < text.size();) {
    const Utf8Step step = utf8_step(text, pos);
    visit(step.value, text.substr(pos, step.bytes));
    pos += step.bytes;
  }
}

void append_upper(std::string& out, char32_t c) {
  if (c == 0xDF) {
    out += "SS";
  } else {
    append_utf8(out, upper_case(c));
  }
}

std::string_view last_char(std::string_view text) {
  size_t start = text.size() - 1;
  while (start > 0 && (static_cast<uint8_t>(text[start]) & 0xC0) == 0x80) --start;
  return text.substr(start);
}

}  // namespace

std::string to_upper(std::string_view text) {
  std::string out;
  for_each_char(text, [&](char32_t c, std::string_view) { append_upper(out, c); });
  return out;
}

std::string to_lower(std::string_view text) {
  std::string out;
  for_each_char(text, [&](char32_t c, std::string_view) { append_utf8(out, lower_case(c)); });
  return out;
}

std::string to_title(std::string_view text) {
  std::string out;
  bool inside = false;  // a word
  for_each_char(text, [&](char32_t c, std::string_view) {
    append_utf8(out, inside ? lower_case(c) : upper_case(c));
    inside = upper_case(c) != c || lower_case(c) != c;
  });
  return out;
}

std::string to_title_words(std::string_view text) {
  std::string out;
  bool inside = false;
  for_each_char(text, [&](char32_t c, std::string_view) {
    const bool border =
        is_python_space(c) || (c < 0x80 && std::string_view("-({[<").find(static_cast<char>(c)) !=
                                               std::string_view::npos);
    if (inside) {
      append_utf8(out, lower_case(c));
    } else {
      append_upper(out, c);
    }
    inside = !border;
  });
  return out;
}

std::string to_capitalized(std::string_view text) {
  std::string out;
  for_each_char(text, [&](char32_t c, std::string_view) {
    append_utf8(out, out.empty() ? upper_case(c) : lower_case(c));
  });
  return out;
}

std::string strip(std::string_view text, const std::string* chars, bool left, bool right) {
  std::set<char32_t> set;
  if (chars != nullptr) {
    for_each_char(*chars, [&](char32_t c, std::string_view) { set.insert(c); });
  }
  const auto goes = [&](std::string_view c) {
    const char32_t value = utf8_step(c, 0).value;
    return chars == nullptr ? is_python_space(value) : set.contains(value);
  };
  while (left && !text.empty()) {
    const std::string_view first = text.substr(0, utf8_step(text, 0).bytes);
    if (!goes(first)) break;
    text.remove_prefix(first.size());
  }
  while (right && !text.empty()) {
    const std::string_view last = last_char(text);
    if (!goes(last)) break;
    text.remove_suffix(last.size());
  }
  return std::string(text);
}

void split(std::string_view text, const std::string* separator, int64_t times,
           const std::function<void(std::string_view)>& visit) {
  int64_t cuts = 0;
  const auto may_cut = [&] { return times < 0 || cuts < times; };
  if (separator != nullptr) {
    for (size_t at; may_cut() && (at = find_text(text, *separator)) != text.npos; ++cuts) {
      visit(text.substr(0, at));
      text.remove_prefix(at + separator->size());
    }
    visit(text);
    return;
  }
  const std::string rest = strip(text, nullptr, true, false);
  text = rest;
  for (; !text.empty(); ++cuts) {
    if (!may_cut()) {
      visit(text);
      return;
    }
    size_t end = 0;
    size_t next = text.size();
    bool found = false;
    for (size_t pos = 0; pos < text.size();) {
      const Utf8Step step = utf8_step(text, pos);
      const bool space = is_python_space(step.value);
      if (space && !found) {
        found = true;
        end = pos;
      } else if (!space && found) {
        next = pos;
        break;
      }
      pos += step.bytes;
    }
    visit(text.substr(0, found ? end : text.size()));
    text.remove_prefix(next);
  }
}

std::string replaced(std::string_view text, std::string_view from, std::string_view to,
                     int64_t times) {
  std::string out;
  const auto again = [&] { return times < 0 || times-- > 0; };
  if (from.empty()) {
    for_each_char(text, [&](char32_t, std::string_view c) {
      if (again()) out += to;
      out += c;
    });
    if (again()) out += to;
    return out;
  }
  size_t done = 0;
  for (size_t at; (at = find_text(text, from, done)) != text.npos && again();
       done = at + from.size()) {
    out += text.substr(done, at - done);
    out += to;
  }
  out += text.substr(done);
  return out;
}

std::string quoted(std::string_view text) {
  const bool single = text.find('\'') != text.npos && text.find('"') == text.npos;
  const char quote = single ? '"' : '\'';
  std::string out(1, quote);
  for_each_char(text, [&](char32_t c, std::string_view bytes) {
    if (c == '\n') {
      out += "\\n";
    } else if (c == '\r') {
      out += "\\r";
    } else if (c == '\t') {
      out += "\\t";
    } else if (c == '\\' || c == static_cast<unsigned char>(quote)) {
      out += '\\';
      out += bytes;
    } else if (!is_printable(c)) {
      const auto code = static_cast<uint32_t>(c);
      out += c < 0x100     ? fmt::format("\\x{:02x}", code)
             : c < 0x10000 ? fmt::format("\\u{:04x}", code)
                           : fmt::format("\\U{:08x}", code);
    } else {
      out += bytes;
    }
  });
  out += quote;
  return out;
}

std::string json_quoted(std::string_view text) {
  std::string out = "\"";
  for (const char c : text) {
    switch (c) {
      case '"':
        out += "\\\"";
        break;
      case '\\':
        out += "\\\\";
        break;
      case '\n':
        out += "\\n";
        break;
      case '\r':
        out += "\\r";
        break;
      case '\t':
        out += "\\t";
        break;
      case '\b':
        out += "\\b";
        break;
      case '\f':
        out += "\\f";
        break;
      default:
        if (static_cast<unsigned char>(c) < 0x20) {
          out += fmt::format("\\u{:04x}", static_cast<unsigned>(c));
        } else {
          out += c;
        }
    }
  }
  out += '"';
  return out;
}

std::string real_text(double value) {
  if (std::isnan(value)) return "nan";
  if (std::isinf(value)) return value < 0 ? "-inf" : "inf";
  // The shortest digits that read back; fmt turns to exponents where Python does.
  std::string text = fmt::format("{}", value);
  if (text.find_first_of(".e") == std::string::npos) text += ".0";
  return text;
}

}  // namespace kvlm::jinja
