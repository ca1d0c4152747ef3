#include "llm/llama.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cassert>
#include <cmath>
#include <initializer_list>
#include <list>
#include <utility>
#include <vector>

#include "kernels/activation.h"
#include "kernels/base/recording.h"
#include "kernels/elementwise.h"
#include "kernels/gemm.h"
#include "kernels/norm.h"
#include "kernels/rope.h"

// A decoder of LLaMA's kind: Llama::forward() fills the angles of RoPE, runs attention_block() and
// mlp_block() of every layer, and head() gives the logits. Attention itself is the cache's. On a
// GPU repeated_layers() replays the layers of a decode step as a CUDA graph while the cache says
// that its steps launch the same.
namespace kvlm {

namespace {

struct Linear {
  Weight weight;         // (out, in)
  ConstTensorView bias;  // (out,) f32 or empty
};

struct Layer {
  ConstTensorView input_norm;      // (hidden,) f32
  ConstTensorView attention_norm;  // (hidden,) f32, post_attention_layernorm
  ConstTensorView q_norm, k_norm;  // (head_dim,) f32 or empty
  Linear q, k, v, o, gate, up, down;
};

/// A tensor that is made longer when a step needs more rows than any before.
class RowBuffer {
 public:
  /// Sets `moved` whenever its rows move.
  RowBuffer(Device device, bool& moved) : device_(device), moved_(&moved) {}
  TensorView rows(int64_t count, Shape row, DType dtype = DType::kF32) {
    const int64_t bytes = count * row.elements() * static_cast<int64_t>(dtype_bytes(dtype));
    if (bytes > capacity_) {
      *moved_ = true;
      capacity_ = 0;  // as long as there may be no memory for more
      tensor_ = Tensor();
      tensor_ = Tensor(DType::kU8, {bytes}, device_);
      capacity_ = bytes;
    }
    const Shape shape = row.rank() == 1 ? Shape{count, row[0]} : Shape{count, row[0], row[1]};
    return {tensor_.view().data(), dtype, shape, device_};
  }

 private:
  Device device_;
  bool* moved_;
  Tensor tensor_;
  int64_t capacity_ = 0;  // bytes
};

class Llama final : public Decoder {
 public:
  Llama(const LlamaConfig& config, WeightMap& weights, const std::string& prefix);

  CacheShape cache_shape() const override {
    CacheShape shape = llama_cache_shape(config_);
    shape.multiply = weight_dtype();
    return shape;
  }
  int hidden() const noexcept override { return config_.hidden; }
  int vocab_size() const noexcept override { return config_.vocab_size; }
  int max_positions() const noexcept override { return config_.max_positions; }
  int sliding_window() const noexcept override {
    return config_.max_positions == config_.sliding_window ? config_.sliding_window : 0;
  }
  int settled_positions() const noexcept override {
    return config_.rope.type == RopeConfig::Type::kDynamic ? config_.rope.max_positions
                                                           : config_.max_positions;
  }
  DType weight_dtype() const noexcept override { return lm_head_.dtype(); }
  std::string weight_format() const override { return layers_.front().gate.weight.format_name(); }
  size_t weight_bytes() const noexcept override { return weight_bytes_; }
  size_t step_weight_bytes() const noexcept override { return step_weight_bytes_; }
  size_t workspace_bytes(int64_t rows) const noexcept override {
    return llama_workspace_bytes(config_, rows);
  }
  void embed(std::span<const int32_t> ids, TensorView out, Stream& stream) override {
    gather_rows(out, embeddings_, ids, stream);
  }
  TensorView forward(const DecoderStep& step, KvCache& cache, Stream& stream,
                     const Tap& tap) override;

 private:
  /// A pass that a cache can repeat, and of which step it was made.
  struct Pass {
    const KvCache* cache = nullptr;  // its address alone: it may be gone, and another one be there
    uint64_t last_pass = 0;          // KvCache::repetition() of the step before
    int alike = 0;                   // steps before with that number
    uint64_t recorded = 0;           // KvCache::repetition()
    const void* x = nullptr;         // embeddings of the recorded step
    TensorView logits;
    Recording recording;
  };

  Linear take_linear(WeightMap& weights, const std::string& name, int out, int in, bool bias);
  std::array<TensorView, 3> qkv_rows(int64_t rows);
  void fill_angles(const DecoderStep& step, TensorView cos, TensorView sin, Stream& stream);
  void look_angles_up(TensorView cos, TensorView sin, Stream& stream);
  /// rms_norm() of x, in the dtype in which its products with `products` take it.
  ConstTensorView normed(ConstTensorView x, ConstTensorView norm,
                         std::initializer_list<Weight> products, Stream& stream);
  void attention_block(int index, bool generates, TensorView x, ConstTensorView cos,
                       ConstTensorView sin, KvCache& cache, Stream& stream);
  TensorView layers(const DecoderStep& step, ConstTensorView cos, ConstTensorView sin,
                    KvCache& cache, Stream& stream, const Tap& tap);
  TensorView repeated_layers(const DecoderStep& step, ConstTensorView cos, ConstTensorView sin,
                             KvCache& cache, Stream& stream);
  Pass& pass_of(const KvCache& cache);
  void mlp_block(const Layer& layer, TensorView x, Stream& stream);
  TensorView head(const DecoderStep& step, TensorView x, Stream& stream);
  /// Layers of a prompt that are done; one more when the cache has made its own of them.
  void report_prefill(int done, Stream& stream) const {
    report_progress(stream.watch(), "prefill", static_cast<size_t>(done),
                    static_cast<size_t>(config_.layers) + 1);
  }

  LlamaConfig config_;
  RopeAngles angles_;
  std::vector<std::shared_ptr<const void>> owners_;
  size_t weight_bytes_ = 0;
  size_t step_weight_bytes_ = 0;
  Weight embeddings_;     // (vocab, hidden)
  ConstTensorView norm_;  // (hidden,) f32
  Weight lm_head_;        // (vocab, hidden)
  std::vector<Layer> layers_;

  Device device_;
  bool moved_ = false;  // a buffer has
  RowBuffer normed_{device_, moved_};
  RowBuffer qkv_{device_, moved_};  // in one, so that products can be made together
  RowBuffer attended_{device_, moved_}, gate_{device_, moved_}, up_{device_, moved_};
  RowBuffer gated_{device_, moved_};  // where it cannot take the place of gate_
  RowBuffer cos_{device_, moved_}, sin_{device_, moved_}, last_{device_, moved_};
  RowBuffer prompt_cos_{device_, moved_}, prompt_sin_{device_, moved_};  // others decode meanwhile
  RowBuffer logits_{device_, moved_};
  RowBuffer host_cos_{Device{}, moved_}, host_sin_{Device{}, moved_};  // made on the host
  std::array<Tensor, 2> tables_;                                       // of cos and sin, on a GPU
  std::vector<int32_t> tabled_;                                        // rows of them

  std::list<Pass> passes_;  // the one of the latest step first
  bool records_ = true;
};

/// Caches of which a recording is kept at once: those of a service that takes turns between cache
/// policies.
constexpr size_t kMostPasses = 8;

/// A step without rows of a prompt.
bool is_decode(const DecoderStep& step) {
  return std::none_of(step.sequences.begin(), step.sequences.end(),
                      [](const StepRows& sequence) { return sequence.prompt; });
}

/// Steps that must have been alike before one is recorded: batches that sequences join and leave
/// change too often. To record a pass takes an H100's host 1 to 3 ms for a few rows, and 8 where
/// the library multiplies many.
constexpr int kFewRows = 4;
constexpr int kAlikeBefore = 8;

Linear Llama::take_linear(WeightMap& weights, const std::string& name, int out, int in, bool bias) {
  Linear linear;
  linear.weight = weights.take_matrix(name + ".weight", {out, in}, MatrixUse::kDecoder);
  step_weight_bytes_ += linear.weight.bytes();
  if (bias) linear.bias = weights.take_f32(name + ".bias", {out});
  return linear;
}

Llama::Llama(const LlamaConfig& config, WeightMap& weights, const std::string& prefix)
    : config_(config), angles_(config.rope), device_(weights.device()) {
  const int hidden = config.hidden;
  const int q_width = config.q_heads * config.head_dim;
  const int kv_width = config.kv_heads * config.head_dim;
  for (int i = 0; i < config.layers; ++i) {
    const std::string name = fmt::format("{}layers.{}.", prefix, i);
    Layer layer;
    layer.input_norm = weights.take_f32(name + "input_layernorm.weight", {hidden});
    layer.attention_norm = weights.take_f32(name + "post_attention_layernorm.weight", {hidden});
    if (config.qk_norm) {
      layer.q_norm = weights.take_f32(name + "self_attn.q_norm.weight", {config.head_dim});
      layer.k_norm = weights.take_f32(name + "self_attn.k_norm.weight", {config.head_dim});
    }
    layer.q = take_linear(weights, name + "self_attn.q_proj", q_width, hidden, config.qkv_bias);
    layer.k = take_linear(weights, name + "self_attn.k_proj", kv_width, hidden, config.qkv_bias);
    layer.v = take_linear(weights, name + "self_attn.v_proj", kv_width, hidden, config.qkv_bias);
    layer.o = take_linear(weights, name + "self_attn.o_proj", hidden, q_width, config.output_bias);
    layer.gate =
        take_linear(weights, name + "mlp.gate_proj", config.intermediate, hidden, config.mlp_bias);
    layer.up =
        take_linear(weights, name + "mlp.up_proj", config.intermediate, hidden, config.mlp_bias);
    layer.down =
        take_linear(weights, name + "mlp.down_proj", hidden, config.intermediate, config.mlp_bias);
    layers_.push_back(layer);
  }
  norm_ = weights.take_f32(prefix + "norm.weight", {hidden});

  // Presence decides: whichever of the two tables exists serves both ends, and when both do and
  // differ they are not tied, whatever the flag says, as in transformers.
  const auto take_table = [&](const std::string& name) {
    return weights.take_matrix(name, {config.vocab_size, hidden}, MatrixUse::kVocabulary);
  };
  const std::string embed_name = prefix + "embed_tokens.weight";
  const bool tied = config.tie_embeddings;
  if (tied && !weights.contains(embed_name)) {
    embeddings_ = lm_head_ = take_table("lm_head.weight");
  } else {
    const bool has_head = weights.contains("lm_head.weight");
    const bool same = tied && has_head && weights.same(embed_name, "lm_head.weight");
    embeddings_ = take_table(embed_name);
    if (has_head || !tied) lm_head_ = take_table("lm_head.weight");
    if (same || (tied && !has_head)) lm_head_ = embeddings_;
  }
  step_weight_bytes_ += lm_head_.bytes();
  weight_bytes_ =
      step_weight_bytes_ + (lm_head_.data() == embeddings_.data() ? 0 : embeddings_.bytes());
  owners_ = weights.owners();
}

/// Angles of so many rows or more are looked up on a GPU: their upload would take longer.
constexpr int64_t kManyAngles = 32;

void Llama::fill_angles(const DecoderStep& step, TensorView cos, TensorView sin, Stream& stream) {
  const bool here = device_.kind == DeviceKind::kCpu;
  if (!here && cos.shape()[0] >= kManyAngles) {
    tabled_.resize(step.positions.size());
    if (angles_.find(step.positions, tabled_)) return look_angles_up(cos, sin, stream);
  }
  const Shape width{cos.shape()[1]};
  const TensorView host_cos = here ? cos : host_cos_.rows(cos.shape()[0], width);
  const TensorView host_sin = here ? sin : host_sin_.rows(sin.shape()[0], width);
  assert(std::cmp_equal(step.positions.size(), cos.shape()[0]));
  if (config_.rope.type == RopeConfig::Type::kDynamic) {  // scaled by each sequence's length
    int64_t row = 0;
    for (const StepRows& rows : step.sequences) {
      const auto positions =
          step.positions.subspan(static_cast<size_t>(row), static_cast<size_t>(rows.rows));
      int32_t last = 0;
      for (const Position& position : positions) last = std::max(last, position.largest());
      angles_.fill(positions, int64_t{last} + 1, host_cos.slice(row, rows.rows),
                   host_sin.slice(row, rows.rows));
      row += rows.rows;
    }
  } else {
    angles_.fill(step.positions, 0, host_cos, host_sin);
  }
  if (here) return;
  copy(cos, host_cos, stream);
  copy(sin, host_sin, stream);
}

/// Angles of the positions in tabled_.
void Llama::look_angles_up(TensorView cos, TensorView sin, Stream& stream) {
  const std::array from{angles_.cos_table(), angles_.sin_table()};
  const std::array to{cos, sin};
  for (size_t i = 0; i < from.size(); ++i) {
    if (tables_[i].empty()) {
      Tensor table(DType::kF32, from[i].shape(), device_);
      copy(table, from[i], stream);
      tables_[i] = std::move(table);
    }
    gather_rows(to[i], tables_[i], tabled_, stream);
  }
}

ConstTensorView Llama::normed(ConstTensorView x, ConstTensorView norm,
                              std::initializer_list<Weight> products, Stream& stream) {
  const int64_t rows = x.shape()[0];
  const TensorView y = normed_.rows(rows, {config_.hidden}, operand_dtype(products, rows));
  rms_norm(y, x, norm, config_.rms_eps, stream);
  return y;
}

/// Room for queries, keys and values, one behind the other.
std::array<TensorView, 3> Llama::qkv_rows(int64_t rows) {
  constexpr int64_t kAligned = 128 / sizeof(float);
  const std::array heads{config_.q_heads, config_.kv_heads, config_.kv_heads};
  const auto padded = [&](int of) {
    return (rows * of * config_.head_dim + kAligned - 1) / kAligned * kAligned;
  };
  int64_t all = 0;
  for (const int of : heads) all += padded(of);
  float* at = qkv_.rows(1, {all}).as<float>();
  std::array<TensorView, 3> made;
  for (size_t i = 0; i < made.size(); ++i) {
    const Shape shape{rows, heads[i], config_.head_dim};
    made[i] = {reinterpret_cast<std::byte*>(at), DType::kF32, shape, device_};
    at += padded(heads[i]);
  }
  return made;
}

void Llama::attention_block(int index, bool generates, TensorView x, ConstTensorView cos,
                            ConstTensorView sin, KvCache& cache, Stream& stream) {
  const Layer& layer = layers_[static_cast<size_t>(index)];
  const int64_t rows = x.shape()[0];
  const int64_t q_width = int64_t{config_.q_heads} * config_.head_dim;
  const int64_t kv_width = int64_t{config_.kv_heads} * config_.head_dim;
  const auto [q, k, v] = qkv_rows(rows);

  // Where prompts are long, memory is dear; generated rows spare the cache a copy of the queries.
  const TensorView out = generates ? attended_.rows(rows, {config_.q_heads, config_.head_dim}) : q;

  const Projection qkv[] = {{q.reshape({rows, q_width}), layer.q.weight, layer.q.bias},
                            {k.reshape({rows, kv_width}), layer.k.weight, layer.k.bias},
                            {v.reshape({rows, kv_width}), layer.v.weight, layer.v.bias}};
  linears(qkv,
          normed(x, layer.input_norm, {layer.q.weight, layer.k.weight, layer.v.weight}, stream),
          stream);
  const auto norm_heads = [&](TensorView of, ConstTensorView norm) {
    const TensorView heads = of.reshape({of.shape()[0] * of.shape()[1], config_.head_dim});
    rms_norm(heads, heads, norm, config_.rms_eps, stream);
  };
  if (config_.qk_norm) {
    norm_heads(q, layer.q_norm);
    norm_heads(k, layer.k_norm);
  }
  const TensorView rotated[] = {q, k};
  rotate(rotated, cos, sin, stream);
  cache.attend(index, q, k, v, out, 1.0f / std::sqrt(static_cast<float>(config_.head_dim)), stream);
  linear(x, out.reshape({rows, q_width}), layer.o.weight, layer.o.bias, /*add=*/true, stream);
}

void Llama::mlp_block(const Layer& layer, TensorView x, Stream& stream) {
  const int64_t rows = x.shape()[0];
  const Shape width{config_.intermediate};
  constexpr Activation kActivation = Activation::kSilu;
  Projection gate{{}, layer.gate.weight, layer.gate.bias};
  Projection up{{}, layer.up.weight, layer.up.bias};
  const DType dtype = operand_dtype({layer.down.weight}, rows);
  if (!gates_alone(gate, up, kActivation, dtype, rows)) {
    gate.y = gate_.rows(rows, width);
    up.y = up_.rows(rows, width);
  }
  const TensorView gated = dtype == DType::kF32 ? gate.y : gated_.rows(rows, width, dtype);
  gated_linears(gated, gate, up, kActivation,
                normed(x, layer.attention_norm, {layer.gate.weight, layer.up.weight}, stream),
                stream);
  linear(x, gated, layer.down.weight, layer.down.bias, /*add=*/true, stream);
}

TensorView Llama::head(const DecoderStep& step, TensorView x, Stream& stream) {
  const auto sequences = static_cast<int64_t>(step.sequences.size());
  TensorView wanted = x;
  if (!step.all_logits && x.shape()[0] != sequences) {
    wanted = last_.rows(sequences, {config_.hidden});
    int64_t row = 0;
    for (int64_t i = 0; i < sequences; ++i) {
      row += step.sequences[static_cast<size_t>(i)].rows;
      convert(wanted.slice(i, 1), x.slice(row - 1, 1), stream);
    }
  }
  const TensorView logits = logits_.rows(wanted.shape()[0], {config_.vocab_size});
  linear(logits, normed(wanted, norm_, {lm_head_}, stream), lm_head_, {}, false, stream);
  return logits;
}

TensorView Llama::forward(const DecoderStep& step, KvCache& cache, Stream& stream, const Tap& tap) {
  const TensorView x = step.embeddings;
  const int64_t rows = x.shape()[0];
  const int half = config_.rope.rotary_dim / 2;
  const bool decodes = is_decode(step);
  const TensorView cos = (decodes ? cos_ : prompt_cos_).rows(rows, {half});
  const TensorView sin = (decodes ? sin_ : prompt_sin_).rows(rows, {half});
  fill_angles(step, cos, sin, stream);

  cache.begin(step.sequences, stream);
  if (cache.needs().prompt_embeddings) cache.give_embeddings(x, stream);
  const TensorView logits = tap ? layers(step, cos, sin, cache, stream, tap)
                                : repeated_layers(step, cos, sin, cache, stream);
  if (!decodes) report_prefill(config_.layers, stream);
  cache.end(stream);
  if (!decodes) report_prefill(config_.layers + 1, stream);
  return logits;
}

/// layers(), by a recording where the cache can repeat its part.
TensorView Llama::repeated_layers(const DecoderStep& step, ConstTensorView cos, ConstTensorView sin,
                                  KvCache& cache, Stream& stream) {
  if (std::exchange(moved_, false)) {
    for (Pass& pass : passes_) pass.recording.clear();
  }
  Pass& pass = pass_of(cache);
  const uint64_t repetition = cache.repetition();
  const auto run = [&] { return layers(step, cos, sin, cache, stream, {}); };
  pass.alike = std::exchange(pass.last_pass, repetition) == repetition ? pass.alike + 1 : 0;
  if (repetition == 0) return run();
  if (repetition != pass.recorded || step.embeddings.data() != pass.x ||
      !pass.recording.fits(stream)) {
    // Where there is no room for a recording, none is tried again.
    const int wait = step.embeddings.shape()[0] <= kFewRows ? 1 : kAlikeBefore;
    if (pass.alike < wait || !records_) return run();
    records_ = pass.recording.make(stream, [&] { pass.logits = run(); });
    if (!records_) return run();
    pass.recorded = repetition;
    pass.x = step.embeddings.data();
  }
  pass.recording.run(stream);
  cache.repeated();
  return pass.logits;
}

Llama::Pass& Llama::pass_of(const KvCache& cache) {
  const auto found = std::ranges::find(passes_, &cache, &Pass::cache);
  if (found != passes_.end()) {
    passes_.splice(passes_.begin(), passes_, found);
    return passes_.front();
  }
  if (passes_.size() == kMostPasses) passes_.pop_back();
  passes_.emplace_front().cache = &cache;
  return passes_.front();
}

/// Everything between the embeddings and the logits.
TensorView Llama::layers(const DecoderStep& step, ConstTensorView cos, ConstTensorView sin,
                         KvCache& cache, Stream& stream, const Tap& tap) {
  const TensorView x = step.embeddings;
  const bool generates = is_decode(step);
  for (int i = 0; i < config_.layers; ++i) {
    if (!generates) report_prefill(i, stream);
    attention_block(i, generates, x, cos, sin, cache, stream);
    mlp_block(layers_[static_cast<size_t>(i)], x, stream);
    if (tap) tap(fmt::format("llm.layer.{}", i), x);
    for (const AddedRows& added : step.added) {
      if (added.layer == i) add(x.slice(added.row, added.values.shape()[0]), added.values, stream);
    }
  }
  if (tap) {
    const TensorView all = normed_.rows(x.shape()[0], {config_.hidden});
    rms_norm(all, x, norm_, config_.rms_eps, stream);
    tap("llm.norm", all);
  }
  return head(step, x, stream);
}

}  // namespace

CacheShape llama_cache_shape(const LlamaConfig& config) {
  CacheShape shape{config.layers, config.q_heads, config.kv_heads, config.head_dim, {}};
  if (config.rope.axes() == 1) {
    shape.rope_frequencies = rope_frequencies(config.rope, config.rope.max_positions);
  }
  return shape;
}

size_t llama_workspace_bytes(const LlamaConfig& config, int64_t rows) noexcept {
  const int64_t q = int64_t{config.q_heads} * config.head_dim;
  const int64_t kv = int64_t{config.kv_heads} * config.head_dim;
  // Embeddings and what is added to them, normed, qkv, attended, gate, up, gated; cos and sin.
  const int64_t row = 3 * int64_t{config.hidden} + (q + 2 * kv) + q +
                      3 * int64_t{config.intermediate} + config.head_dim;
  return (static_cast<size_t>(rows * row) + static_cast<size_t>(config.vocab_size)) * sizeof(float);
}

std::unique_ptr<Decoder> make_llama(const LlamaConfig& config, WeightMap& weights,
                                    const std::string& prefix) {
  return std::make_unique<Llama>(config, weights, prefix);
}

}  // namespace kvlm
