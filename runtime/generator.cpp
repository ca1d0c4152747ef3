#include "runtime/generator.h"

#include <fmt/format.h>

#include <algorithm>
#include <cassert>
#include <cmath>
#include <cstring>
#include <exception>
#include <numeric>
#include <optional>
#include <utility>

#include "kernels/base/error.h"
#include "kernels/base/queue.h"
#include "kernels/elementwise.h"
#include "runtime/failure_kind.h"

// The life of a request: admit() prepares, encodes and prefills it and draws its first token;
// step() feeds one row of every unfinished sequence; deliver() turns new tokens into text and ends
// sequences at a stop text. A later turn keeps what its cache already holds of the conversation.
// What fails closes its own sequence and no other.
namespace kvlm {

namespace {

using Clock = std::chrono::steady_clock;

double milliseconds(Clock::time_point from, Clock::time_point to) {
  return std::chrono::duration<double, std::milli>(to - from).count();
}

/// Text on its way to the user: holds back what may be the start of a stop text.
class TextGate {
 public:
  explicit TextGate(std::vector<std::string> stop) : stop_(std::move(stop)) {}

  /// Takes new text; returns what is certain to be shown.
  std::string push(const std::string& piece) {
    if (stopped_) return {};
    pending_ += piece;
    size_t first = std::string::npos;
    for (const std::string& stop : stop_) {
      if (!stop.empty()) first = std::min(first, pending_.find(stop));
    }
    if (first != std::string::npos) {
      stopped_ = true;
      return release(first);
    }
    return release(pending_.size() - held());
  }
  std::string finish() { return stopped_ ? std::string() : release(pending_.size()); }
  bool stopped() const noexcept { return stopped_; }

 private:
  /// Length of the longest end of pending_ that starts some stop text.
  size_t held() const {
    size_t longest = 0;
    for (const std::string& stop : stop_) {
      for (size_t length = std::min(stop.size(), pending_.size()); length > longest; --length) {
        if (pending_.compare(pending_.size() - length, length, stop, 0, length) == 0) {
          longest = length;
        }
      }
    }
    return longest;
  }
  std::string release(size_t length) {
    std::string out = pending_.substr(0, length);
    pending_.erase(0, stopped_ ? pending_.size() : length);
    return out;
  }

  std::vector<std::string> stop_;
  std::string pending_;
  bool stopped_ = false;
};

/// What a prompt takes, without what is generated after it.
SequenceSize size_of(const Prompt& prompt) {
  SequenceSize size;
  size.prompt_rows = size.max_rows = static_cast<int>(prompt.ids.size());
  size.visual_rows = static_cast<int>(prompt.visual_rows());
  return size;
}

/// A cache that holds `cached`, which stand at `positions`, can take the rest of the prompt,
/// instead of all of it anew.
bool can_continue(const Prompt& prompt, const std::vector<int32_t>& cached,
                  const std::vector<Position>& positions, const CacheNeeds& needs,
                  int settled_positions) {
  // The reference reads the conversation at once, with the angles of its whole length.
  if (std::cmp_greater(prompt.ids.size(), settled_positions)) return false;
  // An answer behind a long clip was generated behind its last time; as text of the conversation
  // it follows the text before it.
  if (needs.one_prompt || cached.size() >= prompt.ids.size() ||
      !std::equal(cached.begin(), cached.end(), prompt.ids.begin()) ||
      !std::equal(positions.begin(), positions.end(), prompt.positions.begin())) {
    return false;
  }
  const auto rest = prompt.modality.begin() + static_cast<std::ptrdiff_t>(cached.size());
  return !needs.images_first ||
         std::all_of(rest, prompt.modality.end(), [](int16_t tag) { return tag == kTextRow; });
}

/// The log probability of a token, and those of the `most` likeliest.
TokenLogprobs logprobs_of(std::span<const float> logits, int32_t token, int most) {
  const float top = *std::max_element(logits.begin(), logits.end());
  double sum = 0;
  for (const float logit : logits) sum += std::exp(static_cast<double>(logit - top));
  const auto total = static_cast<float>(static_cast<double>(top) + std::log(sum));
  TokenLogprobs found{logits[static_cast<size_t>(token)] - total, {}};
  std::vector<int32_t> order(logits.size());
  std::iota(order.begin(), order.end(), 0);
  const auto end = order.begin() + std::min<std::ptrdiff_t>(most, std::ssize(order));
  std::partial_sort(order.begin(), end, order.end(), [&](int32_t a, int32_t b) {
    const float left = logits[static_cast<size_t>(a)];
    const float right = logits[static_cast<size_t>(b)];
    return left > right || (left == right && a < b);
  });
  for (auto id = order.begin(); id != end; ++id) {
    found.top.emplace_back(*id, logits[static_cast<size_t>(*id)] - total);
  }
  return found;
}

/// The caller's watch without its progress reports; cancelling still works.
class QuietWatch : public Watch {
 public:
  explicit QuietWatch(const Watch* outer) noexcept : outer_(outer) {}
  void progress(std::string_view, size_t, size_t) override {}
  bool cancelled() const noexcept override { return outer_ != nullptr && outer_->cancelled(); }

 private:
  const Watch* outer_;
};

/// The caller's watch of a prompt; also calls `pause` between layers.
class LayerWatch final : public Watch {
 public:
  LayerWatch(Watch* outer, std::function<void()> pause) : outer_(outer), pause_(std::move(pause)) {}
  void progress(std::string_view phase, size_t done, size_t total) override {
    if (outer_ != nullptr) outer_->progress(phase, done, total);
    if (done > 0 && done + 1 < total) pause_();
  }
  bool cancelled() const noexcept override { return outer_ != nullptr && outer_->cancelled(); }

 private:
  Watch* outer_;
  std::function<void()> pause_;
};

/// The caller's watch of a decode step. A step of less than kShortStep is not cancelled, because
/// its sequences would lose their cache with the abandoned pass.
class StepWatch final : public QuietWatch {
 public:
  using QuietWatch::QuietWatch;
  bool cancelled() const noexcept override {
    return QuietWatch::cancelled() && Clock::now() - start_ > kShortStep;
  }

 private:
  static constexpr auto kShortStep = std::chrono::milliseconds(300);
  Clock::time_point start_ = Clock::now();
};

}  // namespace

struct Generator::Sequence {
  GenerationRequest request;
  OnText on_text;
  Prompt prompt;
  int max_tokens = 0;  // what the context leaves of request.max_tokens
  std::optional<SequenceId> cache_id;
  std::vector<int32_t> cached_ids;         // what the cache holds, in order
  std::vector<Position> cached_positions;  // where each of them stands
  std::vector<VisualInput> visuals;        // those of prompt.visuals, ready for the tower
  std::optional<VisualRows> encoded;       // what they become, if that is known

  std::optional<Sampler> sampler;
  std::optional<StreamDecoder> text_of;
  std::optional<TextGate> gate;
  std::vector<int32_t> tokens;
  std::vector<float> logits;  // (vocab,) of the next token, where logprobs are asked for
  std::vector<TokenLogprobs> logprobs;
  size_t delivered = 0;  // tokens already turned into text
  std::string text;
  int32_t position_shift = 0;  // the position after the prompt minus its rows (M-RoPE)
  bool done = false;
  bool flushed = false;
  std::string finish_reason;

  int visual_tokens = 0;
  Timings timings;
  Clock::time_point started;
  Clock::time_point first_token;
};

Generator::Generator(Model& model, KvCache& cache, Stream& stream)
    : model_(&model), cache_(&cache), stream_(&stream) {}

Generator::~Generator() = default;

void Generator::set_tap(Tap tap) {
  tap_ = std::move(tap);
  if (!tap_ || stream_->device().kind == DeviceKind::kCpu) return;
  tap_ = [on_host = std::move(tap_), stream = stream_](std::string_view name,
                                                       ConstTensorView tensor) {
    Tensor copied(tensor.dtype(), tensor.shape());
    copy(copied, tensor, *stream);
    on_host(name, copied);
  };
}

int Generator::context() const {
  const int most = model_->decoder().max_positions();
  return session_rows_ > 0 ? std::min(session_rows_, most) : most;
}

void Generator::begin(Sequence& sequence, int context) {
  const int prompt_rows = static_cast<int>(sequence.prompt.ids.size());
  sequence.visual_tokens = static_cast<int>(sequence.prompt.visual_rows());
  sequence.max_tokens = std::min(sequence.request.max_tokens, context - prompt_rows);
  sequence.sampler.emplace(sequence.request.sampling, model_->decoder().vocab_size());
  sequence.sampler->see(sequence.prompt.ids, sequence.max_tokens);
  sequence.text_of.emplace(model_->tokenizer());
  sequence.gate.emplace(sequence.request.stop);
  sequence.tokens.clear();
  sequence.tokens.reserve(static_cast<size_t>(sequence.max_tokens));
  sequence.logprobs.clear();
  sequence.delivered = 0;
  sequence.text.clear();
  sequence.done = sequence.flushed = false;
  sequence.finish_reason.clear();
}

VisualRows Generator::encode(const Prompt& prompt, int64_t first,
                             std::span<const VisualInput> visuals) {
  std::vector<size_t> wanted;
  std::vector<const VisualInput*> inputs;
  const std::span rows = std::span(prompt.modality).subspan(static_cast<size_t>(first));
  for (size_t i = 0; i < visuals.size(); ++i) {
    if (std::find(rows.begin(), rows.end(), static_cast<int16_t>(i)) == rows.end()) continue;
    wanted.push_back(i);
    inputs.push_back(&visuals[i]);
    if (tap_) tap_("pixel_values", patch_values(visuals[i].patches));
  }
  VisualRows encoded;
  if (!inputs.empty()) encoded = model_->encode(inputs, *stream_, tap_);
  std::vector<VisualFeatures> each(visuals.size());
  for (size_t i = 0; i < wanted.size(); ++i) each[wanted[i]] = std::move(encoded.each[i]);
  encoded.each = std::move(each);
  return encoded;
}

void Generator::encode_ahead(PreparedRequest& request) noexcept {
  if (request.encoded || request.visuals.empty()) return;
  QuietWatch watch(stream_->watch());
  const WatchScope scope(*stream_, &watch);
  try {
    stream_->queue().start_clock();
    request.encoded = encode(request.prompt, 0, request.visuals);
    stream_->queue().stop_clock();
  } catch (...) {
    request.encoded.reset();
  }
}

void Generator::prefill(Sequence& sequence, int64_t first, PreparedRequest* next) {
  LayerWatch watch(stream_->watch(), [this] { pause_prompt(); });
  const bool pauses = on_pause_ && first == 0 && !tap_;
  const WatchScope scope(*stream_, pauses ? &watch : stream_->watch());
  paused_ms_ = 0;
  const Clock::time_point vision_start = Clock::now();
  const bool encoded = sequence.encoded.has_value();
  stream_->synchronize();
  visual_ = {};  // before others are made
  visual_ = encoded ? *std::exchange(sequence.encoded, std::nullopt)
                    : encode(sequence.prompt, first, sequence.visuals);
  stream_->synchronize();
  const Clock::time_point prefill_start = Clock::now();
  const double paused_before = std::exchange(paused_ms_, 0);
  const bool clocked = encoded && stream_->device().kind != DeviceKind::kCpu;
  sequence.timings.vision_ms += clocked ? stream_->queue().clocked_ms()
                                        : milliseconds(vision_start, prefill_start) - paused_before;

  const auto rows = static_cast<int64_t>(sequence.prompt.ids.size()) - first;
  const TensorView embeddings = prompt_rows(rows);
  const std::vector<AddedRows> added =
      embed_prompt(*model_, sequence.prompt, first, visual_.each, embeddings, *stream_);
  if (tap_) tap_("inputs_embeds", embeddings);
  const auto skipped = static_cast<size_t>(first);
  const StepRows step{*sequence.cache_id, static_cast<int>(rows),
                      /*prompt=*/true,
                      /*ends_prompt=*/true, std::span(sequence.prompt.modality).subspan(skipped)};
  std::optional<Meanwhile> meanwhile;
  if (next != nullptr && !tap_) meanwhile.emplace(*stream_, [&] { encode_ahead(*next); });
  in_pass_ = true;
  const TensorView logits = model_->decoder().forward(
      {std::span(&step, 1), std::span(sequence.prompt.positions).subspan(skipped), embeddings,
       static_cast<bool>(tap_), added},
      *cache_, *stream_, tap_);
  in_pass_ = false;
  if (tap_) tap_("logits_prefill", logits);
  sequence.cached_ids = sequence.prompt.ids;
  sequence.cached_positions = sequence.prompt.positions;
  const size_t most = sequence.prompt.ids.size() + static_cast<size_t>(sequence.max_tokens);
  sequence.cached_ids.reserve(most);
  sequence.cached_positions.reserve(most);
  sequence.position_shift =
      sequence.prompt.next_position - static_cast<int32_t>(sequence.prompt.ids.size());

  const TensorView last = logits.slice(logits.shape()[0] - 1, 1);
  keep_logits(sequence, last);
  sequence.sampler->restrict(last, *stream_);
  const RowSampling sampling = sequence.sampler->next(*stream_);
  int32_t token = kNoToken;
  sample_rows(std::span(&token, 1), last, std::span(&sampling, 1), *stream_);
  sequence.first_token = Clock::now();
  sequence.timings.prefill_ms = milliseconds(prefill_start, sequence.first_token) - paused_ms_;
  sequence.timings.ttft_ms = milliseconds(sequence.started, sequence.first_token);
  accept(sequence, token);
}

void Generator::pause_prompt() {
  const Clock::time_point start = Clock::now();
  if (in_pass_) cache_->pause();
  paused_ = true;
  std::exception_ptr failure;
  try {
    on_pause_();
  } catch (...) {
    failure = std::current_exception();
  }
  paused_ = false;
  paused_ms_ += milliseconds(start, Clock::now());
  if (in_pass_) cache_->resume();
  if (failure) std::rethrow_exception(failure);
}

int Generator::admit(GenerationRequest request, OnText on_text) {
  PreparedRequest prepared;
  try {
    prepared = prepare_request(*model_, std::move(request), context(), stream_->watch());
  } catch (...) {
    if (!is_cancellation(std::current_exception())) throw;
    auto sequence = std::make_unique<Sequence>();
    end_unanswered(*sequence);
    return keep(std::move(sequence));
  }
  return admit(std::move(prepared), std::move(on_text));
}

int Generator::admit(PreparedRequest&& prepared, OnText on_text, PreparedRequest* next) {
  auto sequence = std::make_unique<Sequence>();
  const bool taken = std::find(sequences_.begin(), sequences_.end(), nullptr) == sequences_.end();
  make_room(sequences_.size() + (taken ? 1 : 0));
  sequence->started =
      Clock::now() - std::chrono::duration_cast<Clock::duration>(
                         std::chrono::duration<double, std::milli>(prepared.milliseconds));
  sequence->timings.vision_ms = prepared.milliseconds;
  sequence->on_text = std::move(on_text);
  sequence->request = std::move(prepared.request);
  sequence->prompt = std::move(prepared.prompt);
  sequence->visuals = std::move(prepared.visuals);
  sequence->encoded = std::move(prepared.encoded);
  try {
    begin(*sequence, prepared.context);
    SequenceSize size = size_of(sequence->prompt);
    size.records = sequence->request.records_prompt;
    size.max_rows = std::max(size.prompt_rows + sequence->max_tokens, session_rows_);
    sequence->cache_id = cache_->open(size, sequence->request.id);
    prefill(*sequence, 0, next);
  } catch (...) {
    forget(*sequence);
    if (!is_cancellation(std::current_exception())) {
      prepared.request = std::move(sequence->request);
      prepared.prompt = std::move(sequence->prompt);
      prepared.visuals = std::move(sequence->visuals);
      prepared.encoded = std::move(sequence->encoded);
      throw;
    }
    end_unanswered(*sequence);
  }
  if (session_rows_ == 0) sequence->visuals.clear();  // there will be no further turn
  return keep(std::move(sequence));
}

int Generator::keep(std::unique_ptr<Sequence> sequence) {
  const auto slot = std::find(sequences_.begin(), sequences_.end(), nullptr);
  const int key = static_cast<int>(slot - sequences_.begin());
  if (slot == sequences_.end()) {
    sequences_.push_back(std::move(sequence));
  } else {
    *slot = std::move(sequence);
  }
  return key;
}

void Generator::make_room(size_t slots) {
  if (slots <= room_) return;
  slots = std::max(slots, 2 * room_);  // sequences come one by one, and a GPU waits for memory
  sequences_.reserve(slots);
  stepping_.reserve(slots);
  rows_.reserve(slots);
  positions_.reserve(slots);
  ids_.reserve(slots);
  sampling_.reserve(slots);
  const auto count = static_cast<int64_t>(slots);
  embeddings_ = Tensor(DType::kF32, {count, model_->decoder().hidden()}, stream_->device());
  room_ = slots;
}

TensorView Generator::prompt_rows(int64_t rows) {
  if (prompt_embeddings_.empty() || prompt_embeddings_.view().shape()[0] < rows) {
    prompt_embeddings_ = Tensor();  // first, so that not both are held
    prompt_embeddings_ = Tensor(DType::kF32, {rows, model_->decoder().hidden()}, stream_->device());
  }
  return prompt_embeddings_.view().slice(0, rows);
}

void Generator::resume(int key, GenerationRequest request, OnText on_text) {
  Sequence& sequence = at(key);
  sequence.started = Clock::now();
  sequence.request = std::move(request);
  sequence.on_text = std::move(on_text);
  const size_t visuals_before = sequence.visuals.size();
  bool prefilling = false;
  try {
    sequence.timings = {};
    sequence.prompt =
        prepare_turn(*model_, sequence.request, context(), stream_->watch(), sequence.visuals);
    sequence.timings.vision_ms = milliseconds(sequence.started, Clock::now());
    begin(sequence, context());
    auto first = static_cast<int64_t>(sequence.cached_ids.size());
    if (!sequence.cache_id ||
        !can_continue(sequence.prompt, sequence.cached_ids, sequence.cached_positions,
                      cache_->needs(), model_->decoder().settled_positions())) {
      // Closed for good, also if there is no room to open it anew.
      if (sequence.cache_id) cache_->close(*std::exchange(sequence.cache_id, std::nullopt));
      sequence.cached_ids.clear();
      sequence.cached_positions.clear();
      first = 0;
      SequenceSize size = size_of(sequence.prompt);
      size.max_rows = session_rows_;
      sequence.cache_id = cache_->open(size, sequence.request.id);
    }
    prefilling = true;
    prefill(sequence, first);
  } catch (...) {
    if (prefilling) forget(sequence);
    if (sequence.visuals.size() > visuals_before) sequence.visuals.resize(visuals_before);
    sequence.done = sequence.flushed = true;
    if (!is_cancellation(std::current_exception())) throw;
    end_unanswered(sequence);
  }
}

void Generator::end_unanswered(Sequence& sequence) {
  sequence.tokens.clear();
  sequence.text.clear();
  sequence.finish_reason = "cancelled";
  sequence.done = sequence.flushed = true;
}

/// While the GPU has nothing to do.
void Generator::give_back_prompt() noexcept {
  if (paused_) return;
  constexpr size_t kKept = size_t{64} << 20;
  visual_ = {};
  if (prompt_embeddings_.bytes() > kKept) prompt_embeddings_ = Tensor();
}

/// Layers of a cache whose pass has failed may hold different rows.
void Generator::forget(Sequence& sequence) noexcept {
  in_pass_ = in_pass_ && paused_;
  give_back_prompt();
  if (sequence.cache_id) cache_->close(*std::exchange(sequence.cache_id, std::nullopt));
  sequence.cached_ids.clear();
  sequence.cached_positions.clear();
}

void Generator::keep_logits(Sequence& sequence, TensorView row) {
  if (!sequence.request.top_logprobs && !sequence.request.records_prompt) return;
  sequence.logits.resize(static_cast<size_t>(model_->decoder().vocab_size()));
  copy(TensorView(sequence.logits.data(), DType::kF32, row.shape()), row, *stream_);
}

void Generator::accept(Sequence& sequence, int32_t token) {
  sequence.sampler->accept(token);
  sequence.tokens.push_back(token);
  if (const auto most = sequence.request.top_logprobs) {
    sequence.logprobs.push_back(logprobs_of(sequence.logits, token, *most));
  }
  const std::vector<int32_t>& eos = model_->defaults().eos_ids;
  if (!sequence.request.ignore_eos && std::find(eos.begin(), eos.end(), token) != eos.end()) {
    sequence.done = true;
    sequence.finish_reason = "stop";
  } else if (static_cast<int>(sequence.tokens.size()) >= sequence.max_tokens) {
    sequence.done = true;
    sequence.finish_reason = "length";
  }
  sequence.timings.decode_ms = milliseconds(sequence.first_token, Clock::now());
}

void Generator::step() {
  stepping_.clear();
  rows_.clear();
  positions_.clear();
  ids_.clear();
  sampling_.clear();
  for (const std::unique_ptr<Sequence>& sequence : sequences_) {
    if (sequence == nullptr || sequence->done) continue;
    stepping_.push_back(sequence.get());
    ids_.push_back(sequence->tokens.back());
    positions_.push_back(Position::on_every_axis(cache_->next_position(*sequence->cache_id) +
                                                 sequence->position_shift));
    rows_.push_back({*sequence->cache_id, 1, false, false, {}});
  }
  if (stepping_.empty()) return;
  StepWatch watch(stream_->watch());
  const WatchScope scope(*stream_, &watch);
  try {
    const TensorView embeddings = embeddings_.view().slice(0, static_cast<int64_t>(ids_.size()));
    model_->decoder().embed(ids_, embeddings, *stream_);
    const TensorView logits =
        model_->decoder().forward({rows_, positions_, embeddings}, *cache_, *stream_, {});
    for (size_t i = 0; i < stepping_.size(); ++i) {
      keep_logits(*stepping_[i], logits.slice(static_cast<int64_t>(i), 1));
      stepping_[i]->sampler->restrict(logits.slice(static_cast<int64_t>(i), 1), *stream_);
      sampling_.push_back(stepping_[i]->sampler->next(*stream_));
    }
    sample_rows(ids_, logits, sampling_, *stream_);
    give_back_prompt();
  } catch (...) {
    const bool cancelled = is_cancellation(std::current_exception());
    for (Sequence* sequence : stepping_) {
      forget(*sequence);
      sequence->done = true;
      sequence->finish_reason = cancelled ? "cancelled" : "error";
    }
    if (cancelled) return;
    throw;
  }
  for (size_t i = 0; i < stepping_.size(); ++i) {
    stepping_[i]->cached_ids.push_back(stepping_[i]->tokens.back());
    stepping_[i]->cached_positions.push_back(positions_[i]);
    accept(*stepping_[i], ids_[i]);
  }
}

void Generator::deliver() {
  for (const std::unique_ptr<Sequence>& entry : sequences_) {
    if (entry == nullptr || entry->flushed) continue;
    Sequence& sequence = *entry;
    std::string shown;
    while (sequence.delivered < sequence.tokens.size() && !sequence.gate->stopped()) {
      shown += sequence.gate->push(sequence.text_of->push(sequence.tokens[sequence.delivered++]));
    }
    if (sequence.gate->stopped() && !sequence.done) {
      sequence.done = true;
      sequence.finish_reason = "stop";
    }
    if (sequence.done) {
      shown += sequence.gate->push(sequence.text_of->finish());
      shown += sequence.gate->finish();
      if (sequence.gate->stopped()) sequence.finish_reason = "stop";
      sequence.flushed = true;
    }
    sequence.text += shown;
    if (!shown.empty() && sequence.on_text) sequence.on_text(shown);
  }
}

int Generator::active() const noexcept {
  return static_cast<int>(
      std::count_if(sequences_.begin(), sequences_.end(),
                    [](const auto& sequence) { return sequence != nullptr && !sequence->done; }));
}

bool Generator::finished(int key) const noexcept { return at(key).done && at(key).flushed; }

void Generator::cancel(int key) {
  Sequence& sequence = at(key);
  if (!sequence.done) {
    sequence.done = true;
    sequence.finish_reason = "cancelled";
  }
  deliver();
}

std::span<const int32_t> Generator::tokens(int key) const { return at(key).tokens; }
std::span<const TokenLogprobs> Generator::logprobs(int key) const { return at(key).logprobs; }

CachedPrompt Generator::cached_prompt(int key) const {
  const Sequence& sequence = at(key);
  if (!sequence.cache_id) {
    throw Error(ErrorCode::kInvalidArgument, "the prompt was cancelled; there is no cache of it");
  }
  CachedPrompt found{sequence.prompt.ids, sequence.prompt.modality, sequence.logits, {}};
  for (int layer = 0; layer < cache_->shape().layers; ++layer) {
    found.layers.push_back(cache_->cached_prompt(*sequence.cache_id, layer, *stream_));
  }
  return found;
}

GenerationResult Generator::result(int key) const {
  const Sequence& sequence = at(key);
  GenerationResult result;
  result.text = sequence.text;
  result.tokens = sequence.tokens;
  result.logprobs = sequence.logprobs;
  result.finish_reason = sequence.finish_reason;
  result.prompt_tokens = static_cast<int>(sequence.prompt.ids.size());
  result.visual_tokens = sequence.visual_tokens;
  result.timings = sequence.timings;
  if (sequence.cache_id) result.cache = cache_->report(*sequence.cache_id);
  return result;
}

GenerationResult Generator::take(int key) {
  GenerationResult final_result = result(key);
  if (at(key).cache_id) cache_->close(*at(key).cache_id);
  sequences_[static_cast<size_t>(key)].reset();
  return final_result;
}

}  // namespace kvlm
