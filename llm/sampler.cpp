#include "llm/sampler.h"

#include <cassert>

#include "kernels/base/error.h"
#include "kernels/elementwise.h"

namespace kvlm {

namespace {

/// Without its random number and what it has seen.
RowSampling choice_of(const SamplerOptions& options) {
  RowSampling row;
  row.temperature = options.temperature;
  row.top_k = options.top_k;
  row.top_p = options.top_p;
  row.repetition_penalty = static_cast<float>(options.repetition_penalty);
  return row;
}

void check_chosen(int32_t id) {
  if (id != kNoToken) return;
  throw Error(ErrorCode::kCorruptFile,
              "the model's logits are not finite numbers: its weights are damaged or overflow; "
              "check the checkpoint's files, or try --dtype f32");
}

}  // namespace

Sampler::Sampler(const SamplerOptions& options, int vocab_size)
    : options_(options),
      vocab_size_(vocab_size),
      random_(options.seed),
      seen_((static_cast<size_t>(vocab_size) + 31) / 32) {
  if (!options_.rules.empty()) rules_.emplace(options_.rules, vocab_size);
}

void Sampler::mark(int32_t id) noexcept {
  if (id < 0 || id >= vocab_size_) return;
  seen_[static_cast<size_t>(id) / 32] |= uint32_t{1} << (id % 32);
}

void Sampler::see(std::span<const int32_t> ids, int max_tokens) {
  if (rules_) rules_->start(ids, max_tokens);
  for (const int32_t id : ids) mark(id);
  placed_is_current_ = false;
}

void Sampler::restrict(TensorView row, Stream& stream) {
  if (rules_) rules_->apply(row, stream);
}

RowSampling Sampler::choice() {
  RowSampling row = choice_of(options_);
  // 53 random bits, not std::uniform_real_distribution, whose values differ between libraries.
  if (row.draws()) row.uniform = static_cast<double>(random_() >> 11) * 0x1p-53;
  return row;
}

void Sampler::place(Stream& stream) {
  const Shape words{static_cast<int64_t>(seen_.size())};
  if (placed_.bytes() == 0) placed_ = Buffer(stream.device(), seen_.size() * sizeof(uint32_t));
  copy(TensorView(placed_.data(), DType::kI32, words, stream.device()),
       ConstTensorView(seen_.data(), DType::kI32, words), stream);
  placed_is_current_ = true;
}

RowSampling Sampler::next(Stream& stream) {
  RowSampling row = choice();
  if (row.repetition_penalty == 1) return row;
  if (stream.device().kind == DeviceKind::kCpu) {
    row.seen = seen_.data();
  } else {
    if (!placed_is_current_) place(stream);
    row.seen = reinterpret_cast<uint32_t*>(placed_.data());
  }
  return row;
}

void Sampler::accept(int32_t id) {
  check_chosen(id);
  mark(id);
  if (rules_) rules_->accept(id);
}

int32_t Sampler::sample(std::span<float> logits) {
  assert(static_cast<int>(logits.size()) == vocab_size_);
  if (rules_) rules_->apply(logits);
  RowSampling row = choice();
  row.seen = seen_.data();
  if (row.draws()) order_.resize(static_cast<size_t>(vocab_size_));
  const int32_t id = sample_row(logits, row, order_);
  check_chosen(id);
  return id;
}

}  // namespace kvlm
