#pragma once

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "kvcache/engine/decode_attention.h"
#include "kvcache/engine/evictor.h"
#include "kvcache/engine/gained_counts.h"
#include "kvcache/engine/gpu_decode.h"
#include "kvcache/engine/inspector.h"
#include "kvcache/engine/later_prompt.h"
#include "kvcache/engine/prompt_packer.h"
#include "kvcache/engine/prompt_stage.h"
#include "kvcache/engine/row_appender.h"
#include "kvcache/engine/sequence.h"
#include "kvcache/engine/store.h"
#include "kvcache/engine/traits.h"
#include "kvcache/engine/unpacker.h"
#include "kvcache/engine/window_packer.h"
#include "kvcache/extensions/decode_weights.h"
#include "kvcache/extensions/key_basis.h"
#include "kvcache/extensions/protected_values.h"
#include "kvcache/extensions/rotation.h"
#include "kvcache/extensions/sink_rotation.h"
#include "kvcache/extensions/visual_remap.h"
#include "kvcache/kv_cache.h"

namespace kvlm {

/// The cache of any plan: retention, quantizers and sharing (docs/formulas.md, "Composition").
///
///   prompt tokens in full precision -> slots kept in each layer -> merged -> visual | other
///   -> packed blocks -> shared codes;  decode: append, attend, flush, evict
///
/// The first prompt comes in one pass, unless retention chooses for all layers at once. Tokens of
/// later prompts attend to the stored ones, then are stored as decode tokens. kvcache/engine has a
/// class for each stage, kvcache/extensions what only one policy needs.
class PolicyCache final : public KvCache {
 public:
  /// Caches share the plan, which is made once per model, and may share the arena.
  PolicyCache(std::shared_ptr<const CachePlan> plan, std::shared_ptr<Arena> arena);
  /// With an arena of its own.
  PolicyCache(std::shared_ptr<const CachePlan> plan, size_t arena_bytes, Device device);

  const CacheShape& shape() const noexcept override { return traits_.shape(); }
  const std::string& spec() const noexcept override { return plan().spec; }
  CacheNeeds needs() const noexcept override { return traits_.needs(); }

  bool fits(const SequenceSize& size) const override { return store_.fits(size); }
  SequenceId open(const SequenceSize& size, const std::string& who) override;
  SequenceId fork(SequenceId parent, int max_rows, const std::string& who, Stream& stream) override;
  void close(SequenceId sequence) noexcept override;
  void begin(std::span<const StepRows> step, Stream& stream) override;
  void give_embeddings(ConstTensorView embeddings, Stream& stream) override;
  void attend(int layer, ConstTensorView q, ConstTensorView k, ConstTensorView v, TensorView out,
              float scale, Stream& stream) override;
  uint64_t repetition() const noexcept override;
  void repeated() noexcept override;
  void pause() override;
  void resume() override;
  void end(Stream& stream) override;

  CachedLayer cached_prompt(SequenceId sequence, int layer, Stream& stream) override;
  int tokens(SequenceId sequence) const noexcept override { return store_.at(sequence).rows; }
  int next_position(SequenceId sequence) const noexcept override;
  size_t bytes() const noexcept override;
  CacheReport report(SequenceId sequence) const noexcept override;

  const CachePlan& plan() const noexcept { return traits_.plan(); }
  /// State of a layer, between steps. For tests and tools.
  const LayerState& layer(SequenceId sequence, int layer);
  /// Stored tokens as the latest attend() of `layer` read them, (kv_heads,). During a step they
  /// include its token. For tests and tools only.
  std::vector<HeadRows> inspect(SequenceId sequence, int layer, Stream& stream);
  /// GpuDecode::laid(). For tests.
  int64_t laid() const noexcept { return gpu_.laid(); }

 private:
  SequenceId admit(SequenceId id, const std::string& who);
  void reserve_workspaces();
  void abandon_step();
  void attend_prompt(const StepRows& rows, int layer, const QkvRows& given, const QkvRows& stored,
                     TensorView out, float scale, Stream& stream);
  int64_t guarded_remaps() const;

  CacheTraits traits_;
  KeyBasisChange key_basis_{traits_};
  ProtectedValues protected_values_{traits_};
  DecodeWeights decode_weights_{traits_};
  VisualRemap remap_{traits_};
  SinkRotation sinks_{traits_};
  Rotation rotation_{traits_};

  Placement placement_{traits_, decode_weights_, protected_values_, sinks_};
  SequenceStore store_;
  Unpacker unpacker_{traits_, protected_values_};
  RowAppender appender_{traits_};
  PromptPacker prompt_packer_{traits_, key_basis_, protected_values_};
  WindowPacker window_packer_{traits_, unpacker_, key_basis_, protected_values_};
  Evictor evictor_{traits_, decode_weights_, sinks_};
  PromptStage prompts_{traits_, placement_, prompt_packer_, decode_weights_, sinks_};
  LaterPrompt later_prompts_{traits_, unpacker_, appender_, window_packer_, evictor_};
  DecodeAttention decode_{traits_, appender_, key_basis_, remap_, decode_weights_};
  GpuDecode gpu_{traits_, store_, key_basis_, remap_};
  GainedCounts counts_{traits_};
  Inspector inspector_{traits_, unpacker_, remap_};

  std::span<const StepRows> step_;
  bool in_step_ = false;  // between begin() and end()
  int attended_ = 0;      // layers done in this step
  std::span<const StepRows> paused_step_;
  int paused_attended_ = 0;
  std::vector<Sequence*> settling_;
  // Cached result of guarded_remaps(), reset by every step
  mutable std::optional<int64_t> guarded_remaps_;
  FloatSpace queries_;  // copy of a pass's queries
};

}  // namespace kvlm
