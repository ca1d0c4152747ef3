#include <fmt/format.h>
#include <sentencepiece_processor.h>

#include <algorithm>
#include <map>

#include "kernels/base/error.h"
#include "kernels/base/printable.h"
#include "llm/added_tokens.h"
#include "llm/bpe.h"
#include "llm/decode_chain.h"
#include "llm/tokenizer.h"
#include "llm/unicode.h"

// Exported by the library, but its header is not installed.
namespace sentencepiece::logging {
void SetMinLogLevel(int level);
}

namespace kvlm {

namespace {

constexpr std::string_view kSpace = "\xE2\x96\x81";  // U+2581 stands for a space
constexpr std::string_view kReplacement = "\xEF\xBF\xBD";

[[noreturn]] void corrupt(const std::string& name, const std::string& what) {
  throw Error(ErrorCode::kCorruptFile,
              fmt::format("{}: {}; download the file again", name, printable(what)));
}

/// Reads protobuf's wire format, field by field.
class ProtoReader {
 public:
  explicit ProtoReader(std::string_view bytes) : rest_(bytes) {}

  /// The next field; false at the end and after damage. `bytes` is set for length-delimited fields,
  /// `number` for varints.
  bool next(uint32_t& field, std::string_view& bytes, uint64_t& number) {
    uint64_t tag = 0;
    if (rest_.empty() || !varint(tag)) return false;
    field = static_cast<uint32_t>(tag >> 3);
    bytes = {};
    number = 0;
    uint64_t size = 0;
    switch (tag & 7) {
      case 0:
        return varint(number);
      case 1:
        return take(8, bytes);
      case 2:
        return varint(size) && take(size, bytes);
      case 5:
        return take(4, bytes);
      default:
        ok_ = false;
        return false;
    }
  }
  bool ok() const { return ok_; }

 private:
  bool varint(uint64_t& value) {
    value = 0;
    for (unsigned shift = 0; shift < 64 && !rest_.empty(); shift += 7) {
      const auto byte = static_cast<uint8_t>(rest_.front());
      rest_.remove_prefix(1);
      value |= static_cast<uint64_t>(byte & 0x7F) << shift;
      if (byte < 0x80) return true;
    }
    ok_ = false;
    return false;
  }
  bool take(uint64_t size, std::string_view& bytes) {
    if (size > rest_.size()) {
      ok_ = false;
      return false;
    }
    bytes = rest_.substr(0, size);
    rest_.remove_prefix(size);
    return true;
  }

  std::string_view rest_;
  bool ok_ = true;
};

/// ModelProto.normalizer_spec.add_dummy_prefix (fields 3 and 3), true if absent.
bool has_dummy_prefix(std::string_view model, const std::string& name) {
  bool dummy_prefix = true;
  uint32_t field = 0;
  std::string_view bytes;
  uint64_t number = 0;
  ProtoReader top(model);
  while (top.next(field, bytes, number)) {
    if (field != 3) continue;
    ProtoReader spec(bytes);
    while (spec.next(field, bytes, number)) {
      if (field == 3) dummy_prefix = number != 0;
    }
    if (!spec.ok()) corrupt(name, "damaged normalizer_spec");
  }
  if (!top.ok()) corrupt(name, "not a sentencepiece model (damaged protobuf)");
  return dummy_prefix;
}

class SentencepieceTokenizer final : public Tokenizer {
 public:
  SentencepieceTokenizer(std::string_view model, const TokenizerConfig& config,
                         const std::string& name)
      : legacy_(config.legacy), add_prefix_space_(config.add_prefix_space) {
    sentencepiece::logging::SetMinLogLevel(3);  // errors come back as a status; it must not print
    if (model.empty()) corrupt(name, "empty file");
    dummy_prefix_ = has_dummy_prefix(model, name);
    std::string bytes(model);
    if (!legacy_) {
      // A later normalizer_spec is merged into the first: {add_dummy_prefix: false}.
      bytes += std::string_view("\x1A\x02\x18\x00", 4);
    }
    const auto status = processor_.LoadFromSerializedProto(bytes);
    if (!status.ok()) corrupt(name, "not a sentencepiece model that this library can read");
    pieces_ = processor_.GetPieceSize();
    read_added_tokens(config, name);
    if (!legacy_) {
      unk_text_ = processor_.IdToPiece(processor_.unk_id());
      unk_pieces_ = encode_ids(unk_text_).size();
    }
    const auto piece = [&](const std::optional<std::string>& token, int fallback) {
      if (token) return id_of(*token);
      return fallback >= 0 ? std::optional<int32_t>(fallback) : std::nullopt;
    };
    bos_id_ = piece(config.bos_token, processor_.bos_id());
    eos_id_ = piece(config.eos_token, processor_.eos_id());
    if (config.add_bos_token && bos_id_) before_ = bos_id_;
    if (config.add_eos_token && eos_id_) after_ = eos_id_;
  }

  using Tokenizer::encode;
  std::vector<int32_t> encode(std::string_view text, const EncodeOptions& options) const override {
    if (!is_valid_utf8(text)) {
      throw Error(ErrorCode::kInvalidArgument,
                  "the text to encode is not UTF-8; convert it, for example with iconv -f "
                  "WINDOWS-1252 -t UTF-8");
    }
    std::vector<int32_t> ids;
    if (options.add_special_tokens && before_) ids.push_back(*before_);
    const size_t text_start = ids.size();
    std::string marked;
    if (!legacy_ && !text.empty()) {
      // The prefix once, for the whole text, as transformers' LlamaTokenizer has it.
      if (add_prefix_space_) marked = kSpace;
      for (size_t pos = 0; pos < text.size();) {
        const bool space = text.substr(pos).starts_with(kSpace);
        marked += space ? ' ' : text[pos];
        pos += space ? kSpace.size() : 1;
      }
      text = marked;
    }
    if (options.parse_special) {
      const std::vector<TextPart> parts = splitter_.split(text);
      for (size_t i = 0; i < parts.size(); ++i) {
        if (parts[i].id) {
          const bool only_prefix = !legacy_ && add_prefix_space_ && i == 1 &&
                                   parts[0].text == kSpace && added_.at(*parts[i].id).special;
          if (only_prefix) ids.resize(text_start);
          ids.push_back(*parts[i].id);
        } else {
          encode_part(parts[i].text, ids);
        }
      }
    } else if (!text.empty()) {
      encode_part(text, ids);
    }
    if (options.add_special_tokens && after_) ids.push_back(*after_);
    return ids;
  }

  std::string decode(std::span<const int32_t> ids, bool skip_special) const override {
    Stream stream(*this, skip_special);
    std::string text;
    for (const int32_t id : ids) text += stream.push(id);
    return text + stream.finish();
  }

  std::unique_ptr<TextStream> stream(bool skip_special) const override {
    return std::make_unique<Stream>(*this, skip_special);
  }

  int32_t vocab_size() const noexcept override {
    return std::max(pieces_, added_.empty() ? 0 : added_.rbegin()->first + 1);
  }
  std::optional<int32_t> id_of(std::string_view token) const override {
    if (const auto added = added_ids_.find(token); added != added_ids_.end()) return added->second;
    const int id = processor_.PieceToId(token);
    // The library answers with the unknown id for what it does not have.
    if (id >= 0 && id < pieces_ && processor_.IdToPiece(id) == token) return id;
    return std::nullopt;
  }
  std::string token_of(int32_t id) const override {
    if (const auto added = added_.find(id); added != added_.end()) return added->second.content;
    return id >= 0 && id < pieces_ ? processor_.IdToPiece(id) : "";
  }
  std::string bytes_of(int32_t id) const override {
    const bool is_byte = id >= 0 && id < pieces_ && !added_.contains(id) && processor_.IsByte(id);
    return bytes_of_token(
        {{.kind = is_byte ? DecodeStep::Kind::kByteFallback : DecodeStep::Kind::kMetaspace,
          .from = added_.contains(id) ? "" : std::string(kSpace),
          .to = ""}},
        token_of(id));
  }
  std::optional<int32_t> bos_id() const noexcept override { return bos_id_; }
  std::optional<int32_t> eos_id() const noexcept override { return eos_id_; }

 private:
  class Stream final : public TextStream {
   public:
    Stream(const SentencepieceTokenizer& tokenizer, bool skip_special)
        : tokenizer_(tokenizer),
          skip_special_(skip_special),
          drop_prefix_(tokenizer.drops_prefix()) {}

    std::string push(int32_t id) override {
      const auto& sp = tokenizer_.processor_;
      std::string text;
      if (const auto added = tokenizer_.added_.find(id); added != tokenizer_.added_.end()) {
        if (skip_special_ && added->second.special) return text;
        flush(text);
        text += added->second.content;
        // With legacy every run has its dummy prefix; else the text has one.
        drop_prefix_ = tokenizer_.legacy_ && tokenizer_.drops_prefix();
        return text;
      }
      if (id < 0 || id >= tokenizer_.pieces_ || sp.IsControl(id)) return text;
      if (sp.IsByte(id)) {
        push_byte(sp.IdToPiece(id), text);
        drop_prefix_ = false;
        return text;
      }
      flush(text);
      std::string_view piece = sp.IdToPiece(id);
      if (sp.IsUnknown(id)) piece = " \xE2\x81\x87 ";  // the library's mark, U+2047
      if (drop_prefix_ && piece.starts_with(kSpace)) piece.remove_prefix(kSpace.size());
      drop_prefix_ = false;
      while (!piece.empty()) {
        const bool space = piece.starts_with(kSpace);
        text += space ? ' ' : piece.front();
        piece.remove_prefix(space ? kSpace.size() : 1);
      }
      return text;
    }
    std::string finish() override {
      std::string text;
      flush(text);
      return text;
    }

   private:
    /// `piece` is "<0xHH>". What is not UTF-8 gives one U+FFFD per byte, as in the library.
    void push_byte(std::string_view piece, std::string& text) {
      int value = 0;
      for (const char c : piece.substr(3, 2)) {
        value = value * 16 + (c <= '9' ? c - '0' : (c | 0x20) - 'a' + 10);
      }
      bytes_.push_back(static_cast<char>(value));
      drain(text, false);
    }
    void flush(std::string& text) { drain(text, true); }
    void drain(std::string& text, bool all) {
      size_t pos = 0;
      while (pos < bytes_.size()) {
        const Utf8Step step = utf8_step(bytes_, pos);
        if (step.truncated && !all) break;
        text += step.valid ? std::string_view(bytes_).substr(pos, step.bytes) : kReplacement;
        pos += step.valid ? step.bytes : 1;
      }
      bytes_.erase(0, pos);
    }

    const SentencepieceTokenizer& tokenizer_;
    bool skip_special_;
    bool drop_prefix_;   // the next piece has the dummy prefix
    std::string bytes_;  // a sequence begun by byte pieces
  };

  bool drops_prefix() const { return dummy_prefix_ && (legacy_ || add_prefix_space_); }

  void read_added_tokens(const TokenizerConfig& config, const std::string& name) {
    for (const AddedToken& token : config.added_tokens) {
      if (token.content.empty()) continue;
      // An unused or padding piece may carry the added token's id under another name.
      added_[token.id] = token;
      if (!added_ids_.try_emplace(token.content, token.id).second) {
        corrupt(name, fmt::format("added token \"{}\" has two ids", token.content));
      }
      const int piece = processor_.PieceToId(token.content);
      if (piece != token.id && piece >= 0 && piece < pieces_ &&
          processor_.IdToPiece(piece) == token.content) {
        corrupt(name, fmt::format("added token \"{}\" has id {}, but the model has it as {}",
                                  token.content, token.id, piece));
      }
    }
    const auto add_piece = [&](int id) {
      if (id < 0 || id >= pieces_ || added_.contains(id)) return;
      AddedToken token;
      token.id = id;
      token.content = processor_.IdToPiece(id);
      if (token.content.empty()) return;
      if (added_ids_.try_emplace(token.content, id).second) added_[id] = token;
    };
    add_piece(processor_.unk_id());
    add_piece(processor_.bos_id());
    add_piece(processor_.eos_id());
    for (const auto& token : {config.bos_token, config.eos_token, config.unk_token}) {
      if (token) add_piece(id_of(*token).value_or(-1));
    }
    for (const auto& [id, token] : added_) splitter_.add(token, token.content);
  }

  std::vector<int> encode_ids(std::string_view text) const {
    std::vector<int> ids;
    const auto status = processor_.Encode(text, &ids);
    if (!status.ok()) {
      throw Error(ErrorCode::kInvalidArgument, "sentencepiece: " + printable(status.ToString()));
    }
    return ids;
  }

  /// Ids of what lies between two added tokens.
  void encode_part(std::string_view text, std::vector<int32_t>& ids) const {
    const bool spaced = text.starts_with(kSpace) || text.starts_with(' ');
    std::vector<int> part;
    if (!legacy_ && spaced) {
      // Behind another word, so that a model that drops leading spaces keeps these.
      part = encode_ids(unk_text_ + std::string(text));
      if (part.size() >= unk_pieces_) {
        part.erase(part.begin(), part.begin() + static_cast<std::ptrdiff_t>(unk_pieces_));
      }
    } else {
      part = encode_ids(text);
    }
    ids.insert(ids.end(), part.begin(), part.end());
  }

  sentencepiece::SentencePieceProcessor processor_;
  bool legacy_;
  bool add_prefix_space_;
  bool dummy_prefix_ = true;
  int32_t pieces_ = 0;
  std::string unk_text_;
  size_t unk_pieces_ = 0;
  std::map<int32_t, AddedToken> added_;
  std::map<std::string, int32_t, std::less<>> added_ids_;
  AddedTokenSplitter splitter_;
  std::optional<int32_t> before_;
  std::optional<int32_t> after_;
  std::optional<int32_t> bos_id_;
  std::optional<int32_t> eos_id_;
};

}  // namespace

std::unique_ptr<Tokenizer> make_sentencepiece_tokenizer(std::string_view model,
                                                        const TokenizerConfig& config,
                                                        const std::string& name) {
  return std::make_unique<SentencepieceTokenizer>(model, config, name);
}

}  // namespace kvlm
