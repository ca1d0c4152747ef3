#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace kvlm {

/// Ids to text, one at a time. What push() and finish() return, concatenated, is what
/// Tokenizer::decode gives for all ids at once.
class TextStream {
 public:
  virtual ~TextStream() = default;
  /// The text that is certain now and was not returned before; often empty.
  virtual std::string push(int32_t id) = 0;
  /// What was held back. Nothing may be pushed after.
  virtual std::string finish() = 0;
};

/// Text to ids and back, one implementation per algorithm (sentencepiece, tokenizer.json pipeline).
/// Immutable after construction; safe to share between threads.
class Tokenizer {
 public:
  virtual ~Tokenizer() = default;

  struct EncodeOptions {
    /// Run the post-processor, which prepends BOS for LLaMA.
    bool add_special_tokens = true;
    /// Match added tokens such as "<image>" in the text (the reference does). Off, they are text
    /// like any other and no special id can come out of it.
    bool parse_special = true;
  };
  /// Throws Error{kInvalidArgument} if the text is not valid UTF-8.
  virtual std::vector<int32_t> encode(std::string_view text,
                                      const EncodeOptions& options) const = 0;
  std::vector<int32_t> encode(std::string_view text) const { return encode(text, EncodeOptions()); }

  /// The text of `ids`; special tokens are left out when skip_special. Ids outside the vocabulary
  /// (padding rows of the embedding) give nothing.
  virtual std::string decode(std::span<const int32_t> ids, bool skip_special) const = 0;

  /// decode() one id at a time; the tokenizer must outlive it. This default decodes all ids again
  /// at every push, which is quadratic; the tokenizers below do better.
  virtual std::unique_ptr<TextStream> stream(bool skip_special) const;

  /// Largest id + 1, added tokens included.
  virtual int32_t vocab_size() const noexcept = 0;
  /// The id of a token by its exact string, added tokens first.
  virtual std::optional<int32_t> id_of(std::string_view token) const = 0;
  /// The token's own string ("▁the", "<0x0A>"); "" outside the vocabulary.
  virtual std::string token_of(int32_t id) const = 0;
  /// The bytes that a token adds to a text in whose middle it is, maybe a part of a character;
  /// "" outside the vocabulary.
  virtual std::string bytes_of(int32_t id) const = 0;
  virtual std::optional<int32_t> bos_id() const noexcept = 0;
  virtual std::optional<int32_t> eos_id() const noexcept = 0;
};

/// An added token, from tokenizer_config.json (added_tokens_decoder) or added_tokens.json.
struct AddedToken {
  int32_t id = 0;
  std::string content;
  bool special = true;
  bool normalized = false;
  bool lstrip = false;
  bool rstrip = false;
  bool single_word = false;
};

/// What tokenizer_config.json and its companions say beside the vocabulary.
struct TokenizerConfig {
  std::vector<AddedToken> added_tokens;
  std::optional<std::string> bos_token;
  std::optional<std::string> eos_token;
  std::optional<std::string> unk_token;
  /// Every token with a name of its own ("pad_token", "image_token"), bos_token and so on included;
  /// a chat template knows them by these names.
  std::map<std::string, std::string> named_tokens;
  bool add_bos_token = true;     ///< sentencepiece only: tokenizer.json has its post-processor
  bool add_eos_token = false;    ///< likewise
  bool legacy = true;            ///< sentencepiece only: a prefix behind every special token too
  bool add_prefix_space = true;  ///< sentencepiece with legacy false only
};

/// Executes the pipeline written in a tokenizer.json, as it is: normalizer, pre_tokenizer, model,
/// post_processor, decoder. Of `config` it takes bos_token, eos_token and added_tokens: those the
/// file lacks are added, and where both name a token, `config` says how it matches. Throws
/// Error{kCorruptFile} for damage, Error{kUnsupported} for a component that is not built in; `name`
/// is the file's name in messages.
std::unique_ptr<Tokenizer> make_json_tokenizer(std::string_view json, const TokenizerConfig& config,
                                               const std::string& name);

/// A sentencepiece tokenizer.model, run by the sentencepiece library: BPE as LLaMA has it, and
/// whatever other model type the library accepts (unigram, word, char).
///
/// Added tokens come from `config`; the model's own `<unk>`, BOS and EOS are special too.
/// decode() drops the dummy prefix where the slow LlamaTokenizer does: at the front of the text
/// and, with legacy, of every run after a special token that is shown. Unlike it, never two spaces
/// at the front, and no space is put around special tokens.
/// Throws Error{kCorruptFile} if the library refuses the model.
std::unique_ptr<Tokenizer> make_sentencepiece_tokenizer(std::string_view model,
                                                        const TokenizerConfig& config,
                                                        const std::string& name);

/// Reads the pieces of TokenizerConfig out of tokenizer_config.json text and, where present,
/// special_tokens_map.json and added_tokens.json text (empty string_view: absent).
TokenizerConfig parse_tokenizer_config(std::string_view tokenizer_config,
                                       std::string_view special_tokens_map,
                                       std::string_view added_tokens, const std::string& name);

/// Turns ids into text as they come, holding back incomplete UTF-8 and whatever the next token may
/// still change, so that the concatenation of all pieces equals decode() of all ids. The tokenizer
/// must outlive it.
class StreamDecoder {
 public:
  explicit StreamDecoder(const Tokenizer& tokenizer, bool skip_special = true)
      : stream_(tokenizer.stream(skip_special)) {}
  /// The text that is certain now and was not returned before; often empty.
  std::string push(int32_t id) { return stream_->push(id); }
  /// What was held back. Nothing may be pushed after.
  std::string finish() { return stream_->finish(); }

 private:
  std::unique_ptr<TextStream> stream_;
};

}  // namespace kvlm
