#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "kvcache/engine/inspector.h"
#include "kvcache/quantizer.h"

namespace kvlm {

/// Counts of cache values, and their ends (1BitVKV, figures 2 and 4).
struct ValueCounts {
  static constexpr double kLow = -20;
  static constexpr double kWidth = 0.5;
  static constexpr size_t kBins = 80;  ///< values beyond the ends fall into the outer bins
  std::vector<int64_t> bins = std::vector<int64_t>(kBins);
  int64_t count = 0;
  float low = 0;   ///< of no value: 0
  float high = 0;  ///< likewise

  void add(float value);
};

/// What keys and values of a model look like, layer by layer, rows of pictures and of text apart:
/// how they are distributed in every KV head, how far their outlier channels stand out, and how far
/// the 2-bit codes of neighbouring layers lie apart (XQuant, figure 3), which are made as
/// `kivi,bits=2` makes them, of all rows.
class ValueSurvey {
 public:
  static constexpr int kDistances = 4;  ///< of 2-bit codes: 0 to 3
  using Distances = std::array<int64_t, kDistances>;
  enum Rows : size_t { kVisualRows, kTextRows, kBoth };

  /// Throws Error{kInvalidArgument} unless there are layers, heads and channels.
  ValueSurvey(int layers, int kv_heads, int head_dim);

  /// Adds the rows of a sequence, (kv_heads,) of each layer in turn.
  void add_layer(int layer, std::span<const HeadRows> heads);

  const ValueCounts& counts(int layer, KvSide side, Rows rows, int head) const;
  /// The mean magnitude of the largest channel of all KV heads over that of their median channel
  /// (the lower one of two); 0 if that is 0 or there are no rows.
  double outlier_ratio(int layer, KvSide side, Rows rows) const;
  /// Between codes of `layer` and of the next one: how many are so far apart.
  const Distances& distances(int layer, KvSide side, Rows rows) const;
  /// How many codes of a layer are 0, 1, 2 and 3.
  const Distances& codes(int layer, KvSide side, Rows rows) const;
  int layers() const noexcept { return layers_; }
  int kv_heads() const noexcept { return kv_heads_; }

 private:
  using Codes = std::vector<uint8_t>;  // (rows, head_dim)
  size_t index(int layer, KvSide side, Rows rows) const noexcept;
  Codes codes_of(KvSide side, std::span<const float> x) const;
  void compare(int layer, KvSide side, const std::vector<Codes>& codes, const HeadRows& rows);
  void count(int layer, KvSide side, const std::vector<Codes>& codes, const HeadRows& rows);

  int layers_;
  int kv_heads_;
  int head_dim_;
  std::array<Packing, 2> packings_;  // by KvSide
  std::vector<ValueCounts> counts_;  // (layers, parts, modalities, kv_heads)
  std::vector<std::vector<double>>
      magnitudes_;                          // (layers, parts, modalities): (kv_heads, head_dim)
  std::vector<Distances> distances_;        // (layers, parts, modalities)
  std::vector<Distances> codes_;            // likewise
  std::array<std::vector<Codes>, 2> last_;  // by KvSide, (kv_heads,) of the layer before
};

}  // namespace kvlm
