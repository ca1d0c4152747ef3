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

/// When the oldest full-precision rows of a lane are packed. After a prompt that leaves n rows,
/// floor((n - hold) / prompt_unit) * prompt_unit of them are packed; in decode, after attention,
/// `rows` of them each time `trigger` rows are unpacked.
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
  FlushRule flush;          ///< unused by a quantizer of visual rows
  double nominal_bits = 0;  ///< the paper's own figure: codes only
  /// Of kHead, packed once: KV heads of a layer have one range together. Each keeps a copy of it.
  bool range_of_layer = false;
};

/// Facts about one kv_head of one layer that a quantizer fixes when a prompt ends.
struct HeadFacts {
  /// (head_dim,) keys are packed in this channel order; empty: as they come. VidKV: the channels
  /// of the first section, ascending, then those of the second.
  std::vector<uint16_t> key_channels;
};

/// Remap of the scores of visual slots (CalibQuant).
struct RemapRule {
  float tau_low = 0;
  float tau_high = 0;
  bool guarded = true;
};

/// Layers that use the same codes. Plain data (docs/formulas.md, "Shared codes").
struct ShareMap {
  /// (layers,) the layer in whose memory a layer's codes lie, the first that uses them: itself
  /// where it has its own. Empty: nothing is shared.
  std::vector<int> key_owner;
  std::vector<int> value_owner;
  /// (layers,) the layer whose rows they are made from; empty: the owner.
  std::vector<int> key_writer = {};
  std::vector<int> value_writer = {};

  bool any() const noexcept { return !key_owner.empty(); }
};

/// A way of packing rows: data, mostly. What differs between policies is which format, which
/// arithmetic and when; kernels/pack.h and kernels/attend_packed.h do the work. Stateless once
/// made: what a prompt teaches lives in HeadFacts.
class Quantizer {
 public:
  virtual ~Quantizer() = default;

  /// Packs visual rows only, once, when their prompt ends; flush rules are unused.
  virtual bool visual_only() const noexcept { return false; }
  /// visual_only(): each picture has scales (and remap) of its own, not all of a prompt together.
  virtual bool per_image() const noexcept { return false; }
  /// visual_only(): visual rows of this side are packed at all; else they stay full.
  virtual bool packs(KvSide) const noexcept { return true; }
  virtual const Packing& packing(KvSide side, int layer) const noexcept = 0;
  /// The remap of visual scores in `layer`, or null.
  virtual const RemapRule* remap(int) const noexcept { return nullptr; }

  /// VidKV's semantic token protection: values of protected visual rows have this packing; null:
  /// none.
  virtual const Packing* protected_values() const noexcept { return nullptr; }
  /// Scores of prompt rows for protection; rows that are not visual are ignored.
  ///   embeddings (rows, hidden) f32; modality (rows,)
  virtual std::vector<float> protection_scores(ConstTensorView /*embeddings*/,
                                               std::span<const int16_t> /*modality*/) const {
    return {};
  }
  /// Which of the retained rows are protected: ascending indices into `modality`.
  virtual std::vector<int32_t> protect(std::span<const float> /*scores*/,
                                       std::span<const int16_t> /*modality*/) const {
    return {};
  }

  /// Sets facts[h] of every kv_head from the keys that are about to be packed.
  ///   low, high  (kv_heads, head_dim) the ends of each channel over those rows
  virtual void learn(std::span<const float> /*low*/, std::span<const float> /*high*/,
                     std::span<HeadFacts> /*facts*/) const {}
  /// The ends of channels are not enough: learn_rows() is called in place of learn().
  virtual bool learns_from_rows() const noexcept { return false; }
  /// As learn(), from the keys themselves.
  ///   keys  of every kv_head (rows, head_dim), on the host
  virtual void learn_rows(std::span<const float* const> /*keys*/, int /*rows*/,
                          std::span<HeadFacts> /*facts*/) const {}
  /// Bytes of what learn() fixed, of one layer (VidKV: the channel mask).
  virtual size_t facts_bytes(int /*kv_heads*/) const noexcept { return 0; }
  /// The basis in which keys are packed, with the channels that learn() ordered; null: their own.
  virtual const KeyBasis* key_basis() const noexcept { return nullptr; }

  /// Layers that use another layer's codes (XQuant).
  virtual ShareMap share() const { return {}; }
  /// A flush packs the dequantized old rows of the side once more with the new ones (VidKV's
  /// published code), instead of only the new ones.
  virtual bool repacks(KvSide) const noexcept { return false; }
};

}  // namespace kvlm
