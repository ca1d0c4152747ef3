#include "llm/logit_rules.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "kernels/elementwise.h"

namespace kvlm {

namespace {

constexpr float kNever = -std::numeric_limits<float>::infinity();

}  // namespace

bool LogitRuleOptions::empty() const noexcept {
  return min_new_tokens <= 0 && min_length <= 0 && suppress_tokens.empty() &&
         begin_suppress_tokens.empty() && bad_words.empty() && no_repeat_ngram_size <= 0 &&
         !forced_eos_token;
}

LogitRules::LogitRules(LogitRuleOptions options, int vocab_size)
    : options_(std::move(options)),
      vocab_size_(vocab_size),
      bias_(static_cast<size_t>(vocab_size), 0.0f) {
  // As the reference does: an end is not a bad word.
  std::erase_if(options_.bad_words, [&](const std::vector<int32_t>& word) {
    return word.size() == 1 &&
           std::ranges::find(options_.eos_ids, word[0]) != options_.eos_ids.end();
  });
}

void LogitRules::start(std::span<const int32_t> prompt, int max_tokens) {
  max_tokens_ = max_tokens;
  generated_ = 0;
  context_.reserve(prompt.size() + static_cast<size_t>(std::max(max_tokens, 0)));
  context_.assign(prompt.begin(), prompt.end());
}

void LogitRules::accept(int32_t id) {
  context_.push_back(id);
  ++generated_;
}

void LogitRules::decide_end() {
  const bool too_early = generated_ < options_.min_new_tokens ||
                         context_.size() < static_cast<size_t>(std::max(options_.min_length, 0));
  if (too_early) banned_.insert(banned_.end(), options_.eos_ids.begin(), options_.eos_ids.end());
  if (options_.forced_eos_token && generated_ + 1 == max_tokens_) {
    forced_ = options_.forced_eos_token;
  }
}

void LogitRules::decide_words() {
  for (const std::vector<int32_t>& word : options_.bad_words) {
    if (word.empty() || word.size() - 1 > context_.size()) continue;
    const auto prefix = static_cast<std::ptrdiff_t>(word.size() - 1);
    if (std::equal(word.begin(), word.end() - 1, context_.end() - prefix)) {
      banned_.push_back(word.back());
    }
  }
}

void LogitRules::decide_ngrams() {
  const auto size = static_cast<size_t>(std::max(options_.no_repeat_ngram_size, 0));
  if (size == 0 || context_.size() + 1 < size) return;
  const std::span<const int32_t> context(context_);
  const std::span<const int32_t> tail = context.last(size - 1);
  for (size_t at = 0; at + size <= context.size(); ++at) {
    if (std::ranges::equal(tail, context.subspan(at, size - 1))) {
      banned_.push_back(context[at + size - 1]);
    }
  }
}

/// Fills bias_, and says in bias_changed_ whether it is another one than before.
void LogitRules::decide() {
  const std::vector<int32_t> banned_before = std::exchange(banned_, {});
  const std::optional<int32_t> forced_before = std::exchange(forced_, std::nullopt);
  decide_ngrams();
  decide_words();
  decide_end();
  const auto ban = [&](const std::vector<int32_t>& ids) {
    banned_.insert(banned_.end(), ids.begin(), ids.end());
  };
  ban(options_.suppress_tokens);
  if (generated_ == 0) ban(options_.begin_suppress_tokens);
  std::ranges::sort(banned_);
  banned_.erase(std::unique(banned_.begin(), banned_.end()), banned_.end());
  if (banned_ == banned_before && forced_ == forced_before) return;

  std::ranges::fill(bias_, forced_ ? kNever : 0.0f);
  const auto in_vocabulary = [&](int32_t id) { return id >= 0 && id < vocab_size_; };
  if (forced_ && in_vocabulary(*forced_)) bias_[static_cast<size_t>(*forced_)] = 0;
  for (const int32_t id : banned_) {
    if (in_vocabulary(id)) bias_[static_cast<size_t>(id)] = kNever;
  }
  bias_changed_ = true;
}

void LogitRules::apply(TensorView logits, Stream& stream) {
  decide();
  if (banned_.empty() && !forced_) return;
  const Shape shape{1, vocab_size_};
  if (placed_.empty()) placed_ = Tensor(DType::kF32, shape, stream.device());
  if (std::exchange(bias_changed_, false)) {
    copy(placed_, ConstTensorView(bias_.data(), DType::kF32, shape), stream);
  }
  add(logits, placed_, stream);
}

void LogitRules::apply(std::span<float> logits) {
  decide();
  for (size_t i = 0; i < logits.size(); ++i) logits[i] += bias_[i];
}

}  // namespace kvlm
