#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace kvlm {

/// One step of a tokenizer.json decoder (Hugging Face tokenizers has the same steps).
struct DecodeStep {
  enum class Kind : unsigned char {
    kReplace,       ///< every `from` in a token becomes `to`
    kByteFallback,  ///< runs of "<0xHH>" become text; a run that is not UTF-8, one U+FFFD per byte
    kFuse,          ///< all tokens become one
    kStrip,         ///< up to `left` times `from` off the front of a token, `right` off its back
    kByteLevel,     ///< the byte alphabet back to bytes, all tokens as one UTF-8 text
    kMetaspace,     ///< `from` becomes a space; dropped in the first token when `strip_first`
    kJoinSpaces,    ///< what happens without a decoder: tokens with a space between
  } kind;
  std::string from;
  std::string to;
  size_t left = 0;
  size_t right = 0;
  bool strip_first = false;
};

/// Token strings to text, incrementally: what push() and finish() return, concatenated, is what the
/// steps give on the whole list, because the whole list is decoded by the same code.
class DecodeChain {
 public:
  explicit DecodeChain(const std::vector<DecodeStep>& steps);
  ~DecodeChain();
  DecodeChain(DecodeChain&&) noexcept;
  DecodeChain& operator=(DecodeChain&&) noexcept;

  /// The text that no later token can change any more.
  std::string push(std::string_view token);
  /// The rest. Nothing may be pushed after.
  std::string finish();

 private:
  struct Output;
  class Stage;
  class Replace;
  class ByteFallback;
  class Fuse;
  class Strip;
  class ByteLevel;
  class Metaspace;
  class JoinSpaces;
  std::unique_ptr<Output> output_;
  std::vector<std::unique_ptr<Stage>> stages_;  // in order; each writes to the one after
};

/// The bytes that a token adds to a text in whose middle it is; they may be a part of a character.
std::string bytes_of_token(const std::vector<DecodeStep>& steps, std::string_view token);

/// The byte-level alphabet (GPT-2's bytes_to_unicode): the printable character that stands for a
/// byte.
char32_t byte_level_char(unsigned char byte);

}  // namespace kvlm
