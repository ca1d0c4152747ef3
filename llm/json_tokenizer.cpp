#include <fmt/format.h>

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include <algorithm>
#include <array>
#include <map>
#include <nlohmann/json.hpp>
#include <utility>

#include "kernels/base/error.h"
#include "kernels/base/printable.h"
#include "llm/added_tokens.h"
#include "llm/bpe.h"
#include "llm/decode_chain.h"
#include "llm/find_text.h"
#include "llm/json_part.h"
#include "llm/strict_json.h"
#include "llm/tokenizer.h"
#include "llm/unicode.h"

// Executes a tokenizer.json: added tokens cut the text, then the normalizer, the pre-tokenizer, BPE
// (bpe.h) and the post-processor work on what is between them; the decoder is decode_chain.h. Each
// stage is read here from the file's JSON and refuses a kind that is not built in. A file is
// hostile: Growth bounds how much longer a text may become.
namespace kvlm {

namespace {

using nlohmann::json;

[[noreturn]] void corrupt(const std::string& name, const std::string& what) {
  throw Error(ErrorCode::kCorruptFile,
              fmt::format("{}: {}; download the file again", name, printable(what)));
}

[[noreturn]] void unsupported(const std::string& name, const std::string& what) {
  throw Error(ErrorCode::kUnsupported,
              fmt::format("{}: {} is not supported; use a model whose tokenizer has BPE and the "
                          "steps of LLaMA's or Qwen's",
                          name, printable(what)));
}

/// Bounds what the steps of one part of the pipeline can make of a text, from the file alone: a
/// few kilobytes of steps that each double it would take all memory at the first word.
class Growth {
 public:
  Growth(std::string part, std::string name) : part_(std::move(part)), name_(std::move(name)) {}

  /// A step that makes up to `ratio` bytes of each, and `more` bytes of none.
  void step(double ratio, size_t more = 0) {
    constexpr int kMaxSteps = 64;
    constexpr double kMaxRatio = 64;
    constexpr size_t kMaxMore = 4096;
    if (++steps_ > kMaxSteps) {
      refuse(fmt::format("has more than {0} steps; at most {0} are", kMaxSteps));
    }
    ratio_ *= std::max(ratio, 1.0);
    more_ += more;
    if (ratio_ > kMaxRatio) {
      refuse(fmt::format("can make a text {:.0f} times as long; at most {} times is", ratio_,
                         kMaxRatio));
    }
    if (more_ > kMaxMore) {
      refuse(fmt::format("prepends {} bytes; at most {} is", more_, kMaxMore));
    }
  }
  void replace(const std::string& from, const std::string& to) {
    step(static_cast<double>(to.size()) / static_cast<double>(from.size()));
  }

 private:
  [[noreturn]] void refuse(const std::string& what) const {
    throw Error(ErrorCode::kUnsupported,
                fmt::format("{}: the {} {} supported; use the tokenizer.json of the model's page",
                            name_, part_, what));
  }

  std::string part_;
  std::string name_;
  int steps_ = 0;
  double ratio_ = 1;
  size_t more_ = 0;
};

/// Part of the text between two added tokens.
struct Piece {
  std::string text;
  bool at_start = false;  // begins where the whole text begins
};

// --- normalizers ---------------------------------------------------------------------------------

struct NormalizeStep {
  enum class Kind : uint8_t { kPrepend, kReplace, kNfc } kind;
  std::string from;
  std::string to;

  std::string apply(const std::string& text) const;
};

std::string replace_all(std::string_view text, std::string_view from, std::string_view to) {
  std::string out;
  size_t done = 0;
  for (size_t found; (found = find_text(text, from, done)) != text.npos;
       done = found + from.size()) {
    out += text.substr(done, found - done);
    out += to;
  }
  out += text.substr(done);
  return out;
}

std::string NormalizeStep::apply(const std::string& text) const {
  switch (kind) {
    case Kind::kPrepend:
      return text.empty() ? text : to + text;
    case Kind::kReplace:
      return replace_all(text, from, to);
    case Kind::kNfc:
      return to_nfc(text);
  }
  return text;
}

/// The literal of a pattern {"String": ...}; a regex is refused.
std::string literal_pattern(const JsonPart& component, const std::string& what) {
  const JsonPart literal = component.at("pattern").at("String");
  if (literal.is_null())
    unsupported(component.file(), what + " with a pattern that is not a String");
  std::string text = literal.text();
  if (text.empty()) unsupported(component.file(), what + " of the empty string");
  return text;
}

void read_normalizer(const JsonPart& component, Growth& growth, std::vector<NormalizeStep>& steps) {
  if (component.is_null()) return;
  const std::string type = component.at("type").text();
  if (type == "Sequence") {
    for (const JsonPart& inner : component.at("normalizers").entries()) {
      read_normalizer(inner, growth, steps);
    }
  } else if (type == "Prepend") {
    steps.push_back({NormalizeStep::Kind::kPrepend, "", component.at("prepend").text()});
    growth.step(1, steps.back().to.size());
  } else if (type == "Replace") {
    steps.push_back({NormalizeStep::Kind::kReplace,
                     literal_pattern(component, "normalizer Replace"),
                     component.at("content").text()});
    growth.replace(steps.back().from, steps.back().to);
  } else if (type == "NFC") {
    steps.push_back({NormalizeStep::Kind::kNfc, "", ""});
    growth.step(1);  // what it makes is not made longer by another
  } else {
    unsupported(component.file(), "normalizer " + type);
  }
}

// --- pre-tokenizers ------------------------------------------------------------------------------

/// A compiled regular expression in the dialect of tokenizer.json (Oniguruma), run by PCRE2.
class Regex {
 public:
  Regex(const std::string& pattern, const std::string& name) : name_(name) {
    int code = 0;
    size_t offset = 0;
    const std::string translated = translate(pattern, name);
    code_.reset(pcre2_compile(reinterpret_cast<PCRE2_SPTR>(translated.data()), translated.size(),
                              PCRE2_UTF | PCRE2_UCP | PCRE2_NEVER_BACKSLASH_C, &code, &offset,
                              nullptr));
    if (code_ == nullptr) {
      std::array<PCRE2_UCHAR, 256> text{};
      pcre2_get_error_message(code, text.data(), text.size());
      unsupported(name, fmt::format("the regular expression {} ({} at {})", pattern,
                                    reinterpret_cast<const char*>(text.data()), offset));
    }
  }

  /// Calls found(start, end) for every match, left to right, not overlapping, none empty.
  template <class Found>
  void for_each(std::string_view text, Found&& found) const {
    const std::unique_ptr<pcre2_match_data, MatchDataFree> data(
        pcre2_match_data_create_from_pattern(code_.get(), nullptr));
    if (data == nullptr) throw Error(ErrorCode::kOutOfMemory, "no memory to match a text");
    for (size_t pos = 0; pos < text.size();) {
      const int count =
          pcre2_match(code_.get(), reinterpret_cast<PCRE2_SPTR>(text.data()), text.size(), pos,
                      PCRE2_NO_UTF_CHECK | PCRE2_NOTEMPTY, data.get(), nullptr);
      if (count == PCRE2_ERROR_NOMATCH) return;
      if (count < 0) {
        throw Error(
            ErrorCode::kInvalidArgument,
            fmt::format(
                "{}: its regular expression fails on this text (PCRE2 {}); shorten the text", name_,
                count));
      }
      const size_t* ends = pcre2_get_ovector_pointer(data.get());
      if (ends[1] <= ends[0] || ends[0] < pos) return;  // \K and the like; not in real files
      found(ends[0], ends[1]);
      pos = ends[1];
    }
  }

 private:
  struct CodeFree {
    void operator()(pcre2_code* code) const { pcre2_code_free(code); }
  };
  struct MatchDataFree {
    void operator()(pcre2_match_data* data) const { pcre2_match_data_free(data); }
  };

  /// The pattern for PCRE2. What the two dialects read differently is refused, but for \s, which in
  /// PCRE2 has U+180E (no White_Space) on top of Oniguruma's: the set is spelled out.
  static std::string translate(std::string_view pattern, const std::string& name) {
    constexpr std::string_view kSpaces =
        "\\x09-\\x0D\\x20\\x85\\xA0\\x{1680}\\x{2000}-\\x{200A}\\x{2028}\\x{2029}\\x{202F}"
        "\\x{205F}\\x{3000}";
    const auto refuse = [&](std::string_view what) {
      unsupported(name, fmt::format("{} in the regular expression {}", what, pattern));
    };
    std::string out;
    size_t class_start = 0;  // just after '[' (and '^'); 0: outside a class
    for (size_t i = 0; i < pattern.size(); ++i) {
      const char c = pattern[i];
      if (c == '\\' && i + 1 < pattern.size()) {
        const char escaped = pattern[++i];
        const bool letter = (escaped >= 'a' && escaped <= 'z') ||
                            (escaped >= 'A' && escaped <= 'Z') ||
                            (escaped >= '0' && escaped <= '9');
        if (letter && std::string_view("pPsSdDrntx").find(escaped) == std::string_view::npos) {
          refuse(fmt::format("\\{}", escaped));
        }
        if (escaped == 's' || escaped == 'S') {
          if (class_start != 0 && escaped == 'S') refuse("\\S in a class");
          if (class_start == 0) out += escaped == 's' ? "[" : "[^";
          out += kSpaces;
          if (class_start == 0) out += ']';
        } else {
          out += c;
          out += escaped;
        }
        continue;
      }
      if (class_start != 0) {
        if (c == '[') refuse("a class in a class");
        if (c == '&' && pattern.substr(i).starts_with("&&")) refuse("&&");
        if (c == ']' && i > class_start) class_start = 0;
      } else if (c == '[') {
        class_start = i + (pattern.substr(i + 1).starts_with('^') ? 2 : 1);
        out += pattern.substr(i, class_start - i);
        i = class_start - 1;
        continue;
      } else if (c == '^' || c == '$') {
        refuse(std::string(1, c));
      }
      out += c;
    }
    return out;
  }

  std::string name_;
  std::unique_ptr<pcre2_code, CodeFree> code_;
};

class PreTokenizer {
 public:
  virtual ~PreTokenizer() = default;
  /// Appends the parts of `piece` (not empty) to `out`.
  virtual void apply(Piece piece, std::vector<Piece>& out) const = 0;
};

void push_part(const Piece& piece, size_t start, size_t end, std::vector<Piece>& out) {
  if (start == end) return;
  out.push_back({piece.text.substr(start, end - start), piece.at_start && start == 0});
}

/// Cuts so that every match and everything between two is a piece.
void split_isolated(const Regex& regex, const Piece& piece, std::vector<Piece>& out) {
  size_t done = 0;
  regex.for_each(piece.text, [&](size_t start, size_t end) {
    push_part(piece, done, start, out);
    push_part(piece, start, end, out);
    done = end;
  });
  push_part(piece, done, piece.text.size(), out);
}

class SplitPreTokenizer final : public PreTokenizer {
 public:
  SplitPreTokenizer(const JsonPart& component) : regex_(pattern_of(component), component.file()) {
    const std::string behavior = component.at("behavior").text();
    if (behavior != "Isolated")
      unsupported(component.file(), "pre_tokenizer Split with behavior " + behavior);
    // With Isolated, invert only swaps what is a match and what is not; the cuts are the same.
  }
  void apply(Piece piece, std::vector<Piece>& out) const override {
    split_isolated(regex_, piece, out);
  }

 private:
  static std::string pattern_of(const JsonPart& component) {
    const JsonPart regex = component.at("pattern").at("Regex");
    if (regex.is_null()) unsupported(component.file(), "pre_tokenizer Split without a Regex");
    return regex.text();
  }
  Regex regex_;
};

/// Cuts numbers off, whole or digit by digit.
class DigitsPreTokenizer final : public PreTokenizer {
 public:
  DigitsPreTokenizer(const JsonPart& component)
      : regex_(component.at("individual_digits").flag(false) ? R"(\p{N})" : R"(\p{N}+)",
               component.file()) {}
  void apply(Piece piece, std::vector<Piece>& out) const override {
    split_isolated(regex_, piece, out);
  }

 private:
  Regex regex_;
};

class ByteLevelPreTokenizer final : public PreTokenizer {
 public:
  ByteLevelPreTokenizer(const JsonPart& component)
      : add_prefix_space_(component.at("add_prefix_space").flag(true)) {
    if (!component.at("use_regex").flag(true)) return;
    // Radford et al. 2019 (GPT-2), the expression of its encoder.
    regex_.emplace(R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)",
                   component.file());
  }
  void apply(Piece piece, std::vector<Piece>& out) const override {
    if (add_prefix_space_ && !piece.text.starts_with(' ')) piece.text.insert(0, 1, ' ');
    const size_t first = out.size();
    if (regex_) {
      split_isolated(*regex_, piece, out);
    } else {
      out.push_back(std::move(piece));
    }
    for (size_t i = first; i < out.size(); ++i) {
      std::string mapped;
      for (const char c : out[i].text) {
        append_utf8(mapped, byte_level_char(static_cast<unsigned char>(c)));
      }
      out[i].text = std::move(mapped);
    }
  }

 private:
  bool add_prefix_space_;
  std::optional<Regex> regex_;
};

enum class PrependScheme : uint8_t { kAlways, kFirst, kNever };

/// Old files say add_prefix_space where new ones have prepend_scheme.
PrependScheme prepend_scheme(const JsonPart& component) {
  const auto scheme = component.at("prepend_scheme").text("always");
  if (!component.at("add_prefix_space").flag(true)) return PrependScheme::kNever;
  if (scheme == "always") return PrependScheme::kAlways;
  if (scheme == "first") return PrependScheme::kFirst;
  if (scheme == "never") return PrependScheme::kNever;
  unsupported(component.file(), "Metaspace with prepend_scheme " + scheme);
}

class MetaspacePreTokenizer final : public PreTokenizer {
 public:
  MetaspacePreTokenizer(const JsonPart& component)
      : replacement_(component.at("replacement").character()),
        scheme_(prepend_scheme(component)),
        split_(component.at("split").flag(true)) {}

  void apply(Piece piece, std::vector<Piece>& out) const override {
    piece.text = replace_all(piece.text, " ", replacement_);
    const bool prepend =
        scheme_ == PrependScheme::kAlways || (scheme_ == PrependScheme::kFirst && piece.at_start);
    if (prepend && !piece.text.starts_with(replacement_)) piece.text.insert(0, replacement_);
    if (!split_) {
      out.push_back(std::move(piece));
      return;
    }
    size_t done = 0;
    for (size_t cut; (cut = piece.text.find(replacement_, done + 1)) != std::string::npos;) {
      push_part(piece, done, cut, out);
      done = cut;
    }
    push_part(piece, done, piece.text.size(), out);
  }

 private:
  std::string replacement_;
  PrependScheme scheme_;
  bool split_;
};

void read_pre_tokenizer(const JsonPart& component, Growth& growth,
                        std::vector<std::unique_ptr<PreTokenizer>>& steps) {
  if (component.is_null()) return;
  const std::string type = component.at("type").text();
  if (type == "Sequence") {
    for (const JsonPart& inner : component.at("pretokenizers").entries()) {
      read_pre_tokenizer(inner, growth, steps);
    }
  } else if (type == "Split") {
    growth.step(1);
    steps.push_back(std::make_unique<SplitPreTokenizer>(component));
  } else if (type == "Digits") {
    growth.step(1);
    steps.push_back(std::make_unique<DigitsPreTokenizer>(component));
  } else if (type == "ByteLevel") {
    growth.step(4);  // a space before a piece of one byte, and two bytes for each
    steps.push_back(std::make_unique<ByteLevelPreTokenizer>(component));
  } else if (type == "Metaspace") {
    growth.step(8);  // four bytes before a piece of one, and four in its place
    steps.push_back(std::make_unique<MetaspacePreTokenizer>(component));
  } else {
    unsupported(component.file(), "pre_tokenizer " + type);
  }
}

// --- post-processor ------------------------------------------------------------------------------

struct Affixes {
  std::vector<int32_t> before;
  std::vector<int32_t> after;
};

void read_template(const JsonPart& component, Affixes& affixes) {
  const JsonPart specials = component.at("special_tokens");
  std::vector<int32_t> before;
  std::vector<int32_t> after;
  bool seen_text = false;
  const JsonPart single = component.at("single");
  for (const JsonPart& part : single.entries()) {
    if (const JsonPart sequence = part.at("Sequence"); !sequence.is_null()) {
      if (seen_text || sequence.at("id").text() != "A") part.fail("one text A");
      seen_text = true;
      continue;
    }
    const std::string token = part.at("SpecialToken").at("id").text();
    for (const JsonPart& id : specials.at(token).at("ids").entries()) {
      (seen_text ? after : before).push_back(static_cast<int32_t>(id.integer(0, kMaxTokenId)));
    }
  }
  if (!seen_text) single.fail("one text A among its entries");
  affixes.before.insert(affixes.before.begin(), before.begin(), before.end());
  affixes.after.insert(affixes.after.end(), after.begin(), after.end());
}

void read_post_processor(const JsonPart& component, Affixes& affixes) {
  if (component.is_null()) return;
  const std::string type = component.at("type").text();
  if (type == "Sequence") {
    for (const JsonPart& inner : component.at("processors").entries())
      read_post_processor(inner, affixes);
  } else if (type == "TemplateProcessing") {
    read_template(component, affixes);
  } else if (type != "ByteLevel") {  // which only moves offsets
    unsupported(component.file(), "post_processor " + type);
  }
}

// --- decoder -------------------------------------------------------------------------------------

void read_decoder(const JsonPart& component, Growth& growth, std::vector<DecodeStep>& steps) {
  const std::string type = component.at("type").text();
  using Kind = DecodeStep::Kind;
  if (type == "Sequence") {
    for (const JsonPart& inner : component.at("decoders").entries())
      read_decoder(inner, growth, steps);
    return;
  }
  if (type != "Replace") growth.step(1);
  if (type == "Replace") {
    steps.push_back({.kind = Kind::kReplace,
                     .from = literal_pattern(component, "decoder Replace"),
                     .to = component.at("content").text()});
    growth.replace(steps.back().from, steps.back().to);
  } else if (type == "ByteFallback") {
    steps.push_back({.kind = Kind::kByteFallback, .from = "", .to = ""});
  } else if (type == "Fuse") {
    steps.push_back({.kind = Kind::kFuse, .from = "", .to = ""});
  } else if (type == "Strip") {
    const auto count = [&](const char* key) {
      return static_cast<size_t>(component.at(key).integer(0, kMaxTokenId));
    };
    steps.push_back({.kind = Kind::kStrip,
                     .from = component.at("content").character(),
                     .to = "",
                     .left = count("start"),
                     .right = count("stop")});
  } else if (type == "ByteLevel") {
    steps.push_back({.kind = Kind::kByteLevel, .from = "", .to = ""});
  } else if (type == "Metaspace") {
    steps.push_back({.kind = Kind::kMetaspace,
                     .from = component.at("replacement").character(),
                     .to = "",
                     .strip_first = prepend_scheme(component) != PrependScheme::kNever});
  } else {
    unsupported(component.file(), "decoder " + type);
  }
}

// --- the pipeline --------------------------------------------------------------------------------

class JsonTokenizer final : public Tokenizer {
 public:
  JsonTokenizer(const JsonPart& file, const TokenizerConfig& config)
      : name_(file.file()), bpe_(file.at("model")) {
    Growth normal("normalizer", name_);
    read_normalizer(file.at("normalizer"), normal, normalizer_);
    Growth pieces("pre_tokenizer", name_);
    read_pre_tokenizer(file.at("pre_tokenizer"), pieces, pre_tokenizer_);
    read_post_processor(file.at("post_processor"), affixes_);
    if (const JsonPart decoder = file.at("decoder"); !decoder.is_null()) {
      Growth shown("decoder", name_);
      read_decoder(decoder, shown, decoder_);
    } else {
      decoder_.push_back({.kind = DecodeStep::Kind::kJoinSpaces, .from = "", .to = ""});
    }
    read_added_tokens(file.at("added_tokens"), config);
    read_truncation(file.at("truncation"));
    const auto id_of_token = [this](const std::optional<std::string>& token) {
      return token ? id_of(*token) : std::nullopt;
    };
    bos_id_ = id_of_token(config.bos_token);
    eos_id_ = id_of_token(config.eos_token);
  }

  using Tokenizer::encode;
  std::vector<int32_t> encode(std::string_view text, const EncodeOptions& options) const override {
    if (!is_valid_utf8(text)) {
      throw Error(ErrorCode::kInvalidArgument,
                  "the text to encode is not UTF-8; convert it, for example with iconv -f "
                  "WINDOWS-1252 -t UTF-8");
    }
    std::vector<int32_t> ids;
    if (options.add_special_tokens) ids = affixes_.before;
    if (options.parse_special) {
      for (const TextPart& part : raw_splitter_.split(text)) {
        if (part.id) {
          ids.push_back(*part.id);
        } else {
          encode_part(part.text, part.text.data() == text.data(), options, ids);
        }
      }
    } else if (!text.empty()) {
      encode_part(text, true, options, ids);
    }
    if (options.add_special_tokens) {
      ids.insert(ids.end(), affixes_.after.begin(), affixes_.after.end());
    }
    if (max_length_ && ids.size() > *max_length_) {
      throw Error(
          ErrorCode::kUnsupported,
          fmt::format("{}: cuts texts after {} tokens (truncation.max_length), which is not "
                      "supported, and this one has {}; shorten it, or set truncation to null",
                      name_, *max_length_, ids.size()));
    }
    return ids;
  }

  std::string decode(std::span<const int32_t> ids, bool skip_special) const override {
    DecodeChain chain(decoder_);
    std::string text;
    for (const int32_t id : ids) {
      if (const std::string* token = shown_token(id, skip_special)) text += chain.push(*token);
    }
    return text + chain.finish();
  }

  std::unique_ptr<TextStream> stream(bool skip_special) const override {
    class Stream final : public TextStream {
     public:
      Stream(const JsonTokenizer& tokenizer, bool skip_special)
          : tokenizer_(tokenizer), skip_special_(skip_special), chain_(tokenizer.decoder_) {}
      std::string push(int32_t id) override {
        const std::string* token = tokenizer_.shown_token(id, skip_special_);
        return token != nullptr ? chain_.push(*token) : "";
      }
      std::string finish() override { return chain_.finish(); }

     private:
      const JsonTokenizer& tokenizer_;
      bool skip_special_;
      DecodeChain chain_;
    };
    return std::make_unique<Stream>(*this, skip_special);
  }

  int32_t vocab_size() const noexcept override {
    return std::max(bpe_.vocab_size(), added_.empty() ? 0 : added_.rbegin()->first + 1);
  }
  std::optional<int32_t> id_of(std::string_view token) const override {
    const auto added = added_ids_.find(token);
    return added != added_ids_.end() ? added->second : bpe_.id_of(token);
  }
  std::string token_of(int32_t id) const override {
    const std::string* token = shown_token(id, false);
    return token != nullptr ? *token : "";
  }
  std::string bytes_of(int32_t id) const override {
    const std::string* token = shown_token(id, false);
    return token != nullptr ? bytes_of_token(decoder_, *token) : "";
  }
  std::optional<int32_t> bos_id() const noexcept override { return bos_id_; }
  std::optional<int32_t> eos_id() const noexcept override { return eos_id_; }

 private:
  /// The reference cuts what is longer, on the side that the file says.
  void read_truncation(const JsonPart& truncation) {
    if (truncation.is_null()) return;
    max_length_ = static_cast<size_t>(truncation.at("max_length").integer(0, kMaxTokenId));
  }

  void read_added_tokens(const JsonPart& list, const TokenizerConfig& config) {
    if (!list.is_null()) {
      for (const JsonPart& value : list.entries()) {
        AddedToken token;
        token.content = value.at("content").text();
        token.id = static_cast<int32_t>(value.at("id").integer(0, kMaxTokenId));
        token.special = value.at("special").flag(false);
        token.normalized = value.at("normalized").flag(!token.special);
        token.lstrip = value.at("lstrip").flag(false);
        token.rstrip = value.at("rstrip").flag(false);
        token.single_word = value.at("single_word").flag(false);
        add(token, false);
      }
    }
    for (const AddedToken& token : config.added_tokens) add(token, true);
    // Special tokens win where two have the same text to match, as in the reference.
    for (const bool special : {true, false}) {
      for (const auto& [id, token] : added_) {
        if (token.special != special) continue;
        if (token.normalized) {
          normalized_splitter_.add(token, normalize(token.content));
        } else {
          raw_splitter_.add(token, token.content);
        }
      }
    }
    barred_.resize(static_cast<size_t>(vocab_size()));
    for (const auto& [id, token] : added_) {
      if (token.special) barred_[static_cast<size_t>(id)] = true;
    }
  }

  /// An added token from the file, or from the configuration beside it, which may only change how
  /// one of the file's matches or bring new ones.
  void add(const AddedToken& token, bool from_config) {
    if (token.content.empty()) return;
    const auto known = id_of(token.content);
    const auto old = added_.find(token.id);
    const std::string* model_token = bpe_.token(token.id);
    const bool same_old = old == added_.end() || old->second.content == token.content;
    const bool same_model = model_token == nullptr || *model_token == token.content;
    if ((known && *known != token.id) || !same_old || (from_config && !same_model)) {
      corrupt(name_, fmt::format("added token \"{}\" has id {}, which is {}; the tokenizer files "
                                 "do not belong together",
                                 token.content, token.id,
                                 known ? fmt::format("{} elsewhere", *known)
                                       : fmt::format("\"{}\" elsewhere", token_of(token.id))));
    }
    added_[token.id] = token;
    added_ids_[token.content] = token.id;
  }

  std::string normalize(std::string_view text) const {
    std::string normal(text);
    for (const NormalizeStep& step : normalizer_) normal = step.apply(normal);
    return normal;
  }

  /// Ids of what lies between two added tokens of the raw text.
  void encode_part(std::string_view text, bool at_start, const EncodeOptions& options,
                   std::vector<int32_t>& ids) const {
    const std::string normal = normalize(text);
    if (normal.empty()) return;
    if (!options.parse_special) {
      encode_piece({normal, at_start}, options, ids);
      return;
    }
    for (const TextPart& part : normalized_splitter_.split(normal)) {
      if (part.id) {
        ids.push_back(*part.id);
      } else {
        const bool first = at_start && part.text.data() == normal.data();
        encode_piece({std::string(part.text), first}, options, ids);
      }
    }
  }

  void encode_piece(Piece piece, const EncodeOptions& options, std::vector<int32_t>& ids) const {
    std::vector<Piece> pieces;
    pieces.push_back(std::move(piece));
    for (const auto& step : pre_tokenizer_) {
      std::vector<Piece> split;
      for (Piece& whole : pieces) step->apply(std::move(whole), split);
      pieces = std::move(split);
    }
    static const std::vector<bool> kNoneBarred;
    for (const Piece& part : pieces) {
      bpe_.encode(part.text, options.parse_special ? kNoneBarred : barred_, ids);
    }
  }

  /// The string that stands for `id` in the decoder's list; null if none does.
  const std::string* shown_token(int32_t id, bool skip_special) const {
    const auto added = added_.find(id);
    if (added == added_.end()) return bpe_.token(id);
    return skip_special && added->second.special ? nullptr : &added->second.content;
  }

  std::string name_;
  Bpe bpe_;
  std::vector<NormalizeStep> normalizer_;
  std::vector<std::unique_ptr<PreTokenizer>> pre_tokenizer_;
  Affixes affixes_;
  std::vector<DecodeStep> decoder_;
  std::map<int32_t, AddedToken> added_;
  std::map<std::string, int32_t, std::less<>> added_ids_;
  AddedTokenSplitter raw_splitter_;         // normalized: false
  AddedTokenSplitter normalized_splitter_;  // normalized: true
  std::vector<bool> barred_;                // by id: special
  std::optional<int32_t> bos_id_;
  std::optional<int32_t> eos_id_;
  std::optional<size_t> max_length_;
};

}  // namespace

std::unique_ptr<Tokenizer> make_json_tokenizer(std::string_view text, const TokenizerConfig& config,
                                               const std::string& name) {
  const json file = parse_json(text, name);
  return std::make_unique<JsonTokenizer>(JsonPart(file, "", name), config);
}

}  // namespace kvlm
