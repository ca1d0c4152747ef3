#include "llm/decode_chain.h"

#include <algorithm>
#include <array>
#include <optional>
#include <utility>

#include "llm/find_text.h"
#include "llm/unicode.h"

// The decoder of a tokenizer.json, as a chain of stages that tokens flow through one at a time, so
// that text can be shown while it is made. Each stage holds back only what a later token may still
// change: an incomplete character, a space that may be dropped.
namespace kvlm {

namespace {

constexpr std::string_view kReplacement = "\xEF\xBF\xBD";

constexpr bool stands_for_itself(unsigned byte) {
  return (byte >= 33 && byte <= 126) || (byte >= 161 && byte <= 172) || byte >= 174;
}

constexpr std::array<char32_t, 256> kByteLevelChars = [] {
  std::array<char32_t, 256> chars{};
  char32_t next = 0x100;
  for (unsigned byte = 0; byte < 256; ++byte) {
    chars[byte] = stands_for_itself(byte) ? byte : next++;
  }
  return chars;
}();

/// The inverse of byte_level_char; the alphabet ends at U+0143.
constexpr std::array<int, 0x144> kByteLevelBytes = [] {
  std::array<int, 0x144> bytes{};
  bytes.fill(-1);
  for (unsigned byte = 0; byte < 256; ++byte) bytes[kByteLevelChars[byte]] = static_cast<int>(byte);
  return bytes;
}();

std::optional<char> byte_of_fallback(std::string_view token) {
  if (token.size() != 6 || !token.starts_with("<0x") || token[5] != '>') return std::nullopt;
  int value = 0;
  for (const char c : token.substr(3, 2)) {
    int digit = 0;
    if (c >= '0' && c <= '9') {
      digit = c - '0';
    } else if (c >= 'A' && c <= 'F') {
      digit = c - 'A' + 10;
    } else if (c >= 'a' && c <= 'f') {
      digit = c - 'a' + 10;
    } else {
      return std::nullopt;
    }
    value = value * 16 + digit;
  }
  return static_cast<char>(value);
}

std::string replaced(const std::string& text, std::string_view from, std::string_view to) {
  if (from.empty()) return text;
  std::string out;
  for (size_t at = 0; at < text.size();) {
    const bool here = std::string_view(text).substr(at).starts_with(from);
    out += here ? to : std::string_view(text).substr(at, 1);
    at += here ? from.size() : 1;
  }
  return out;
}

/// The bytes that a token of the byte-level alphabet stands for; one with another character is as
/// it is.
std::string byte_level_bytes(std::string token) {
  std::string bytes;
  for (size_t at = 0; at < token.size();) {
    const Utf8Step step = utf8_step(token, at);
    const bool known = step.valid && step.value < kByteLevelBytes.size();
    if (!known || kByteLevelBytes[step.value] < 0) return token;
    bytes.push_back(static_cast<char>(kByteLevelBytes[step.value]));
    at += step.bytes;
  }
  return bytes;
}

}  // namespace

std::string bytes_of_token(const std::vector<DecodeStep>& steps, std::string_view token) {
  std::string bytes(token);
  for (const DecodeStep& step : steps) {
    switch (step.kind) {
      case DecodeStep::Kind::kReplace:
        bytes = replaced(bytes, step.from, step.to);
        break;
      case DecodeStep::Kind::kMetaspace:
        bytes = replaced(bytes, step.from, " ");
        break;
      case DecodeStep::Kind::kByteFallback:
        if (const auto byte = byte_of_fallback(bytes)) return {*byte};
        break;
      case DecodeStep::Kind::kByteLevel:
        bytes = byte_level_bytes(std::move(bytes));
        break;
      case DecodeStep::Kind::kFuse:
      case DecodeStep::Kind::kStrip:
      case DecodeStep::Kind::kJoinSpaces:
        break;  // of a token's neighbours
    }
  }
  return bytes;
}

char32_t byte_level_char(unsigned char byte) { return kByteLevelChars[byte]; }

struct DecodeChain::Output {
  std::string text;
};

/// Reads a list of tokens, each in one or more write() calls and an end_token(); finish() ends the
/// list. Fused tokens arrive as one long token, written bit by bit.
class DecodeChain::Stage {
 public:
  explicit Stage(Stage* next, Output* output) : next_(next), output_(output) {}
  virtual ~Stage() = default;
  virtual void write(std::string_view text) = 0;
  virtual void end_token() = 0;
  virtual void finish() { pass_finish(); }

 protected:
  void pass(std::string_view text) {
    if (text.empty()) return;
    if (next_ != nullptr) {
      next_->write(text);
    } else {
      output_->text += text;
    }
  }
  void pass_end() {
    if (next_ != nullptr) next_->end_token();
  }
  void pass_token(std::string_view text) {
    pass(text);
    pass_end();
  }
  void pass_finish() {
    if (next_ != nullptr) next_->finish();
  }

 private:
  Stage* next_;  // null: the last one
  Output* output_;
};

class DecodeChain::Replace final : public Stage {
 public:
  Replace(const DecodeStep& step, Stage* next, Output* output)
      : Stage(next, output), from_(step.from), to_(step.to) {}

  void write(std::string_view text) override {
    held_ += text;
    size_t done = 0;
    for (size_t found; (found = find_text(held_, from_, done)) != std::string::npos;) {
      pass(std::string_view(held_).substr(done, found - done));
      pass(to_);
      done = found + from_.size();
    }
    // Hold back the longest end that may turn out to begin `from`.
    size_t keep = std::min(held_.size() - done, from_.size() - 1);
    while (
        !std::string_view(from_).starts_with(std::string_view(held_).substr(held_.size() - keep))) {
      --keep;
    }
    pass(std::string_view(held_).substr(done, held_.size() - keep - done));
    held_.erase(0, held_.size() - keep);
  }
  void end_token() override {
    pass_token(held_);
    held_.clear();
  }

 private:
  std::string from_;  // not empty
  std::string to_;
  std::string held_;
};

class DecodeChain::ByteFallback final : public Stage {
 public:
  using Stage::Stage;

  void write(std::string_view text) override { token_ += text; }
  void end_token() override {
    if (const auto byte = byte_of_fallback(token_)) {
      run_ += *byte;
    } else {
      flush();
      pass_token(token_);
    }
    token_.clear();
  }
  void finish() override {
    flush();
    pass_finish();
  }

 private:
  void flush() {
    if (run_.empty()) return;
    if (is_valid_utf8(run_)) {
      pass_token(run_);
    } else {
      for (size_t i = 0; i < run_.size(); ++i) pass_token(kReplacement);
    }
    run_.clear();
  }

  std::string token_;
  std::string run_;  // the bytes of the run so far
};

class DecodeChain::Fuse final : public Stage {
 public:
  using Stage::Stage;

  void write(std::string_view text) override { pass(text); }
  void end_token() override {}
  void finish() override {
    pass_end();
    pass_finish();
  }
};

class DecodeChain::Strip final : public Stage {
 public:
  Strip(const DecodeStep& step, Stage* next, Output* output)
      : Stage(next, output), content_(step.from), left_(step.left), right_(step.right) {}

  void write(std::string_view text) override {
    while (at_front_ && text.starts_with(content_) && stripped_ < left_) {
      text.remove_prefix(content_.size());
      ++stripped_;
    }
    if (text.empty()) return;
    at_front_ = false;
    // Of the end, up to `right_` times the content may be at the token's back.
    size_t tail = 0;
    while (tail < right_ &&
           text.substr(0, text.size() - tail * content_.size()).ends_with(content_)) {
      ++tail;
    }
    const size_t body = text.size() - tail * content_.size();
    if (body > 0) {
      pass_held(held_);
      pass(text.substr(0, body));
    } else {
      // All content: what overflows the held run is certain.
      const size_t total = held_ + tail;
      if (total > right_) pass_held(total - right_);
    }
    held_ = std::min(held_ + tail, right_);
  }
  void end_token() override {
    held_ = 0;
    stripped_ = 0;
    at_front_ = true;
    pass_end();
  }

 private:
  void pass_held(size_t count) {
    for (size_t i = 0; i < count; ++i) pass(content_);
    held_ -= std::min(held_, count);
  }

  std::string content_;  // one scalar; text comes in whole scalars, so it is never split
  size_t left_;
  size_t right_;
  bool at_front_ = true;
  size_t stripped_ = 0;  // at the front of this token
  size_t held_ = 0;      // times the content that may be at the back
};

class DecodeChain::ByteLevel final : public Stage {
 public:
  using Stage::Stage;

  void write(std::string_view text) override { token_ += text; }
  void end_token() override {
    std::string decoded;
    for (size_t pos = 0; pos < token_.size();) {
      const Utf8Step step = utf8_step(token_, pos);
      const int byte = step.value < kByteLevelBytes.size() ? kByteLevelBytes[step.value] : -1;
      if (byte < 0) {  // a token with a character outside the alphabet stands for itself
        decoded = token_;
        break;
      }
      decoded.push_back(static_cast<char>(byte));
      pos += step.bytes;
    }
    token_.clear();
    bytes_ += decoded;
    std::string text;
    bytes_.erase(0, append_lossy_utf8(text, bytes_));
    pass(text);
  }
  void finish() override {
    if (!bytes_.empty()) pass(kReplacement);  // a truncated sequence
    pass_end();
    pass_finish();
  }

 private:
  std::string token_;
  std::string bytes_;  // the beginning of a sequence
};

class DecodeChain::Metaspace final : public Stage {
 public:
  Metaspace(const DecodeStep& step, Stage* next, Output* output)
      : Stage(next, output), replacement_(step.from), strip_first_(step.strip_first) {}

  void write(std::string_view text) override {
    std::string spaced;
    for (size_t pos = 0; pos < text.size();) {
      if (text.substr(pos).starts_with(replacement_)) {
        if (!(first_ && strip_first_)) spaced += ' ';
        pos += replacement_.size();
      } else {
        spaced += text[pos++];
      }
    }
    pass(spaced);
  }
  void end_token() override {
    first_ = false;
    pass_end();
  }

 private:
  std::string replacement_;  // one scalar
  bool strip_first_;
  bool first_ = true;
};

class DecodeChain::JoinSpaces final : public Stage {
 public:
  using Stage::Stage;

  void write(std::string_view text) override {
    start();
    pass(text);
  }
  void end_token() override {
    start();
    in_token_ = false;
    any_ = true;
  }

 private:
  void start() {
    if (!in_token_ && any_) pass(" ");
    in_token_ = true;
  }

  bool in_token_ = false;
  bool any_ = false;
};

DecodeChain::DecodeChain(const std::vector<DecodeStep>& steps)
    : output_(std::make_unique<Output>()), stages_(steps.size()) {
  Stage* next = nullptr;
  for (size_t i = steps.size(); i-- > 0;) {
    const DecodeStep& step = steps[i];
    Output* output = output_.get();
    switch (step.kind) {
      case DecodeStep::Kind::kReplace:
        stages_[i] = std::make_unique<Replace>(step, next, output);
        break;
      case DecodeStep::Kind::kByteFallback:
        stages_[i] = std::make_unique<ByteFallback>(next, output);
        break;
      case DecodeStep::Kind::kFuse:
        stages_[i] = std::make_unique<Fuse>(next, output);
        break;
      case DecodeStep::Kind::kStrip:
        stages_[i] = std::make_unique<Strip>(step, next, output);
        break;
      case DecodeStep::Kind::kByteLevel:
        stages_[i] = std::make_unique<ByteLevel>(next, output);
        break;
      case DecodeStep::Kind::kMetaspace:
        stages_[i] = std::make_unique<Metaspace>(step, next, output);
        break;
      case DecodeStep::Kind::kJoinSpaces:
        stages_[i] = std::make_unique<JoinSpaces>(next, output);
        break;
    }
    next = stages_[i].get();
  }
}

DecodeChain::~DecodeChain() = default;
DecodeChain::DecodeChain(DecodeChain&&) noexcept = default;
DecodeChain& DecodeChain::operator=(DecodeChain&&) noexcept = default;

std::string DecodeChain::push(std::string_view token) {
  if (stages_.empty()) return std::string(token);
  stages_.front()->write(token);
  stages_.front()->end_token();
  return std::exchange(output_->text, {});
}

std::string DecodeChain::finish() {
  if (!stages_.empty()) stages_.front()->finish();
  return std::exchange(output_->text, {});
}

}  // namespace kvlm
