#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "kernels/base/tensor.h"
#include "kernels/key_basis.h"
#include "kernels/pack.h"
#include "kernels/packed_format.h"

namespace kvlm {

enum class KvSide : uint8_t { kKeys, kValues };
inline constexpr std::array kSides{KvSide::kKeys, KvSide::kValues};

/// When the oldest unpacked tokens of a KV head are packed. After a prompt of n kept tokens,
/// floor((n - hold) / prompt_unit) * prompt_unit are packed. In decode, after attention, `rows`
/// tokens are packed whenever `trigger` tokens are unpacked.
struct FlushRule {
  int prompt_unit = 1;
  int hold = 0;
  int trigger = 1;
  int rows = 1;

  int packed_after_prompt(int n) const noexcept {
    return n <= hold ? 0 : (n - hold) / prompt_unit * prompt_unit;
  }
};

/// How the keys or the values of one layer are packed.
struct Packing {
  PackedFormat format;
  std::array<PackRule, 2> rules{};
  FlushRule flush;          ///< unused if the quantizer is visual_only()
  double nominal_bits = 0;  ///< bits of codes alone, as the paper counts
  /// kHead, packed once: all KV heads of a layer share one range; each stores a copy of it.
  bool range_of_layer = false;
};

/// What is stored rotated by a Hadamard matrix (option rotate).
enum class Rotated : uint8_t { kNothing, kKeys, kKeysAndValues };

/// What a quantizer learned about one kv_head of one layer at the end of a prompt.
struct HeadFacts {
  /// (head_dim,) channel order of packed keys; empty: unchanged. VidKV: the channels of the first
  /// section, ascending, then those of the second.
  std::vector<uint16_t> key_channels;
};

/// Remap of the scores of visual slots (CalibQuant).
struct RemapRule {
  float tau_low = 0;
  float tau_high = 0;
  bool guarded = true;
};

/// Layers that share codes (docs/formulas.md, "Shared codes").
struct ShareMap {
  /// (layers,) the layer that stores a layer's codes: the first that uses them, or itself if it
  /// does not share. Empty: no sharing.
  std::vector<int> key_owner;
  std::vector<int> value_owner;
  /// (layers,) the layer from whose tokens the codes are made; empty: the owner. A layer whose rule
  /// has PackRule::merge then merges its own with them.
  std::vector<int> key_writer = {};
  std::vector<int> value_writer = {};

  bool any() const noexcept { return !key_owner.empty(); }
};

/// A way of packing tokens: mostly data. Policies differ in format, arithmetic and time;
/// kernels/pack.h and kernels/attend_packed.h do the work. Stateless: what a prompt teaches is in
/// HeadFacts.
class Quantizer {
 public:
  virtual ~Quantizer() = default;

  /// Packs only visual tokens, once, at the end of their prompt; flush rules are unused.
  virtual bool visual_only() const noexcept { return false; }
  /// visual_only(): each image has its own scales (and remap); else all images share them.
  virtual bool per_image() const noexcept { return false; }
  /// visual_only(): visual tokens of this side are packed; else they stay unpacked.
  virtual bool packs(KvSide) const noexcept { return true; }
  virtual const Packing& packing(KvSide side, int layer) const noexcept = 0;
  /// The remap of visual scores in a layer; null: none.
  virtual const RemapRule* remap(int) const noexcept { return nullptr; }

  /// VidKV's semantic token protection: packing of the values of protected visual tokens. Null: no
  /// protection.
  virtual const Packing* protected_values() const noexcept { return nullptr; }
  /// Protection scores of prompt tokens; those of text tokens are ignored.
  ///   embeddings (rows, hidden) f32; modality (rows,)
  virtual std::vector<float> protection_scores(ConstTensorView /*embeddings*/,
                                               std::span<const int16_t> /*modality*/) const {
    return {};
  }
  /// The protected ones among kept tokens: ascending indices into `modality`.
  virtual std::vector<int32_t> protect(std::span<const float> /*scores*/,
                                       std::span<const int16_t> /*modality*/) const {
    return {};
  }

  /// Sets facts[h] of every kv_head from the keys to be packed.
  ///   low, high  (kv_heads, head_dim) the range of each channel over those keys
  virtual void learn(std::span<const float> /*low*/, std::span<const float> /*high*/,
                     std::span<HeadFacts> /*facts*/) const {}
  /// Ranges of channels do not suffice: learn_rows() is called in place of learn().
  virtual bool learns_from_rows() const noexcept { return false; }
  /// As learn(), from the keys themselves.
  ///   keys  for every kv_head (rows, head_dim), on the host
  virtual void learn_rows(std::span<const float* const> /*keys*/, int /*rows*/,
                          std::span<HeadFacts> /*facts*/) const {}
  /// Bytes of what learn() stored for one layer (VidKV: the channel mask).
  virtual size_t facts_bytes(int /*kv_heads*/) const noexcept { return 0; }
  /// Basis in which keys are packed, after learn() ordered the channels. Null: the model's basis.
  virtual const KeyBasis* key_basis() const noexcept { return nullptr; }

  /// What rotate=auto means.
  virtual Rotated rotated() const noexcept { return Rotated::kNothing; }

  /// Layers that use another layer's codes (XQuant).
  virtual ShareMap share() const { return {}; }
  /// A flush dequantizes old tokens and packs them again with the new ones (VidKV's published
  /// code).
  virtual bool repacks(KvSide) const noexcept { return false; }
};

}  // namespace kvlm
