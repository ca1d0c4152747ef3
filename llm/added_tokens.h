#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "llm/tokenizer.h"

namespace kvlm {

/// A stretch of text: an added token (id) or what lies between two (no id).
struct TextPart {
  std::string_view text;
  std::optional<int32_t> id;
};

/// Cuts text at added tokens: leftmost, then longest, not overlapping. single_word asks for
/// non-word neighbours; lstrip and rstrip take the white space beside the token with it.
class AddedTokenSplitter {
 public:
  /// `pattern` is matched instead of token.content (its normalised form); an empty one never is.
  void add(const AddedToken& token, std::string_view pattern);
  /// The parts of `text` in order, none empty.
  std::vector<TextPart> split(std::string_view text) const;

 private:
  /// The longest pattern at text[pos]: its token's index and its length.
  struct Match {
    int32_t token = -1;
    size_t bytes = 0;
  };
  Match match_at(std::string_view text, size_t pos) const;

  std::vector<AddedToken> tokens_;
  std::unordered_map<uint64_t, int32_t> edges_;  // node * 256 + byte -> node; 0 is the root
  std::vector<int32_t> accepts_ = {-1};          // per node, index into tokens_
};

}  // namespace kvlm
