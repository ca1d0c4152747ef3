#include "llm/added_tokens.h"

#include <algorithm>

#include "llm/unicode.h"

namespace kvlm {

namespace {

uint64_t edge_key(int32_t node, char byte) {
  return static_cast<uint64_t>(node) * 256 + static_cast<uint8_t>(byte);
}

bool starts_with_word(std::string_view text) {
  return !text.empty() && is_word_char(utf8_step(text, 0).value);
}

/// The scalar that ends `text`, and its first byte.
std::pair<char32_t, size_t> last_scalar(std::string_view text) {
  size_t start = text.size() - 1;
  while (start > 0 && (static_cast<uint8_t>(text[start]) & 0xC0) == 0x80) --start;
  return {utf8_step(text, start).value, start};
}

bool ends_with_word(std::string_view text) {
  return !text.empty() && is_word_char(last_scalar(text).first);
}

size_t trailing_space_start(std::string_view text) {
  while (!text.empty()) {
    const auto [scalar, start] = last_scalar(text);
    if (!is_white_space(scalar)) break;
    text = text.substr(0, start);
  }
  return text.size();
}

size_t leading_space_bytes(std::string_view text) {
  size_t pos = 0;
  while (pos < text.size()) {
    const Utf8Step step = utf8_step(text, pos);
    if (!is_white_space(step.value)) break;
    pos += step.bytes;
  }
  return pos;
}

}  // namespace

void AddedTokenSplitter::add(const AddedToken& token, std::string_view pattern) {
  if (pattern.empty()) return;
  int32_t node = 0;
  for (const char byte : pattern) {
    const auto [edge, fresh] =
        edges_.try_emplace(edge_key(node, byte), static_cast<int32_t>(accepts_.size()));
    if (fresh) accepts_.push_back(-1);
    node = edge->second;
  }
  auto& accept = accepts_[static_cast<size_t>(node)];
  if (accept >= 0) return;
  accept = static_cast<int32_t>(tokens_.size());
  tokens_.push_back(token);
}

AddedTokenSplitter::Match AddedTokenSplitter::match_at(std::string_view text, size_t pos) const {
  Match match;
  int32_t node = 0;
  for (size_t end = pos; end < text.size();) {
    const auto edge = edges_.find(edge_key(node, text[end]));
    if (edge == edges_.end()) break;
    node = edge->second;
    ++end;
    if (const int32_t token = accepts_[static_cast<size_t>(node)]; token >= 0) {
      match = {token, end - pos};
    }
  }
  return match;
}

std::vector<TextPart> AddedTokenSplitter::split(std::string_view text) const {
  std::vector<TextPart> parts;
  size_t done = 0;  // everything before is in `parts`
  for (size_t pos = 0; pos < text.size();) {
    const Match match = match_at(text, pos);
    if (match.token < 0) {
      ++pos;
      continue;
    }
    const AddedToken& token = tokens_[static_cast<size_t>(match.token)];
    size_t start = pos;
    size_t stop = pos + match.bytes;
    pos = stop;  // also when the match is refused below, as the reference does
    if (token.single_word &&
        (ends_with_word(text.substr(0, start)) || starts_with_word(text.substr(stop)))) {
      continue;
    }
    if (token.lstrip) start = std::max(trailing_space_start(text.substr(0, start)), done);
    if (token.rstrip) stop += leading_space_bytes(text.substr(stop));
    if (done < start) parts.push_back({text.substr(done, start - done), std::nullopt});
    parts.push_back({text.substr(start, stop - start), token.id});
    done = stop;
  }
  if (done < text.size()) parts.push_back({text.substr(done), std::nullopt});
  return parts;
}

}  // namespace kvlm
