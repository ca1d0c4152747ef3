#include "kernels/cpu/attend_packed.h"

// Packed decode attention on the CPU: per KV head all scores, the remap, softmax, then the weighted
// values. Segments of a format that vnni/ supports are multiplied as integers there; here are
// unpacked tokens, all other formats, and CPUs without AVX-512 VNNI.

// Three instruction sets suffice: the compiled code is large.
#include <hwy/detect_targets.h>
#undef HWY_DISABLED_TARGETS
#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_SSE4)

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/attend_packed.cpp"
#include "hwy/foreach_target.h"
// After foreach_target.h:
#include <cmath>

#include "hwy/highway.h"
#include "kernels/cpu/attention-inl.h"
#include "kernels/cpu/packed_blocks-inl.h"
#include "kernels/cpu/vnni/attend.h"

HWY_BEFORE_NAMESPACE();
namespace kvlm::cpu::HWY_NAMESPACE {

namespace {

constexpr auto kMost = static_cast<size_t>(kMaxQueries);

// --------------------------------------------------------------------------- queries, four at most

/// scores.of[i][r] = q_i . K_r of at most kQueries queries and kTileRows dense rows.
template <class T, int kQueries = kMaxQueries>
void score(const std::byte* keys, size_t width, size_t rows, const float* q, size_t queries,
           TileScores& scores) {
  if constexpr (kQueries > 1) {
    if (queries < kQueries) return score<T, kQueries - 1>(keys, width, rows, q, queries, scores);
  }
  const RowSource<T> source({keys, keys, kDTypeOf<T>, static_cast<int64_t>(rows)}, width);
  source.template score_tile<kQueries>(0, rows, q, scores);
}

/// out_i += sum_r weights.of[i][r] V_r of at most kQueries queries and kTileRows dense rows.
template <class T, int kQueries = kMaxQueries>
void accumulate(const std::byte* values, size_t width, size_t rows, const TileScores& weights,
                size_t queries, float* out) {
  if constexpr (kQueries > 1) {
    if (queries < kQueries) {
      return accumulate<T, kQueries - 1>(values, width, rows, weights, queries, out);
    }
  }
  constexpr float kKeep[] = {1, 1, 1, 1};
  const RowSource<T> source({values, values, kDTypeOf<T>, static_cast<int64_t>(rows)}, width);
  source.template accumulate_tile<kQueries>(0, rows, weights, kKeep, out);
}

// ----------------------------------------------------------------------------------------- scores

/// scores[i * stride + j] = scale * q_i . K_j of a segment of dense rows.
template <class T>
void score_rows(const SlotSegment& segment, const float* q, size_t queries, size_t head_dim,
                float scale, float* scores, size_t stride) {
  const auto rows = static_cast<size_t>(segment.slots);
  TileScores tile;
  for (size_t first = 0; first < rows; first += kTileRows) {
    const size_t count = std::min(kTileRows, rows - first);
    const std::byte* keys = segment.rows + first * head_dim * sizeof(T);
    for (size_t i = 0; i < queries; i += kMost) {
      const size_t some = std::min(kMost, queries - i);
      score<T>(keys, head_dim, count, q + i * head_dim, some, tile);
      for (size_t k = 0; k < some; ++k) {
        for (size_t r = 0; r < count; ++r) {
          scores[(i + k) * stride + first + r] = tile.of[k][r] * scale;
        }
      }
    }
  }
}

/// Folds a block's slopes and offsets into the queries: a score is query . codes + bias.
void fold_queries(const float* q, size_t queries, size_t channels, float scale,
                  const Scratch& scratch) {
  for (size_t i = 0; i < queries; ++i) {
    float bias = 0;
    for (size_t c = 0; c < channels; ++c) {
      const float u = q[i * channels + c] * scale;
      scratch.query[i * channels + c] = u * scratch.slopes[c];
      bias += u * scratch.offsets[c];
    }
    scratch.bias[i] = bias;
  }
}

/// Reads the live rows of a block among kTileRows from `first` on; returns how many.
size_t read_tile(const BlockReader& reader, const PackedBlock& block, size_t first, float* tile) {
  const size_t last = std::min(static_cast<size_t>(block.rows), first + kTileRows);
  size_t count = 0;
  for (size_t r = first; r < last; ++r) {
    if (is_live(block, r)) reader.read_row(block, r, tile + count++ * reader.channels());
  }
  return count;
}

/// scores of the `count` rows of a tile.
void score_tile(const Scratch& scratch, size_t queries, size_t channels, size_t count,
                float* scores, size_t stride) {
  TileScores tile;
  for (size_t i = 0; i < queries; i += kMost) {
    const size_t some = std::min(kMost, queries - i);
    score<float>(reinterpret_cast<const std::byte*>(scratch.tile), channels, count,
                 scratch.query + i * channels, some, tile);
    for (size_t k = 0; k < some; ++k) {
      float* to = scores + (i + k) * stride;
      for (size_t r = 0; r < count; ++r) to[r] = tile.of[k][r] + scratch.bias[i + k];
    }
  }
}

/// scores of the live rows of packed keys.
void score_blocks(const SlotSegment& segment, const float* q, size_t queries, float scale,
                  const Scratch& scratch, float* scores, size_t stride) {
  const BlockReader reader(*segment.format, scratch);
  const size_t channels = reader.channels();
  if (reader.per_token()) {
    for (size_t i = 0; i < queries * channels; ++i) scratch.query[i] = q[i] * scale;
    std::fill(scratch.bias, scratch.bias + queries, 0.0f);
  }
  for (const PackedBlock& block : segment.blocks) {
    if (block.live_rows == 0) continue;
    if (!reader.per_token()) {
      reader.read_factors(block);
      fold_queries(q, queries, channels, scale, scratch);
    }
    for (size_t first = 0; first < static_cast<size_t>(block.rows); first += kTileRows) {
      const size_t count = read_tile(reader, block, first, scratch.tile);
      if (count == 0) continue;
      score_tile(scratch, queries, channels, count, scores, stride);
      scores += count;
    }
  }
}

struct Ends {
  float least;
  float greatest;
};

/// Of `count` numbers, at least one.
Ends ends_of(const float* x, size_t count) {
  const Floats d;
  Ends ends{x[0], x[0]};
  size_t i = 0;
  if (count >= kLanes) {
    FloatVec least = hn::LoadU(d, x);
    FloatVec greatest = least;
    for (i = kLanes; i + kLanes <= count; i += kLanes) {
      const FloatVec some = hn::LoadU(d, x + i);
      least = hn::Min(some, least);
      greatest = hn::Max(some, greatest);
    }
    ends = {hn::GetLane(hn::MinOfLanes(d, least)), hn::GetLane(hn::MaxOfLanes(d, greatest))};
  }
  for (; i < count; ++i) {
    ends.least = std::min(ends.least, x[i]);
    ends.greatest = std::max(ends.greatest, x[i]);
  }
  return ends;
}

/// Applies a remap to its slots of one query's scores; returns whether its slope was clamped.
bool remap_scores(const ScoreRemap& remap, float* scores) {
  if (remap.slots == 0) return false;
  float* begin = scores + remap.first;
  float* end = begin + remap.slots;
  const auto [lo, greatest] = ends_of(begin, static_cast<size_t>(remap.slots));
  const float range = greatest - lo;
  const float base = lo - remap.tau_low;
  if (!(range > 0)) {
    std::fill(begin, end, base);
    return false;
  }
  float slope = (range + remap.tau_low - remap.tau_high) / range;
  const bool clamp = remap.guarded && slope < 0;
  if (clamp) slope = 0;
  for (float* s = begin; s != end; ++s) *s = slope * (*s - lo) + base;
  return clamp;
}

/// Scores to weights that sum to 1.
void softmax(float* scores, size_t count) {
  const Floats d;
  const size_t whole = count / kLanes * kLanes;
  FloatVec maxima = hn::Set(d, scores[0]);
  for (size_t j = 0; j < whole; j += kLanes) maxima = hn::Max(maxima, hn::LoadU(d, scores + j));
  float max = hn::GetLane(hn::MaxOfLanes(d, maxima));
  for (size_t j = whole; j < count; ++j) max = std::max(max, scores[j]);
  FloatVec sums = hn::Zero(d);
  const FloatVec top = hn::Set(d, max);
  for (size_t j = 0; j < whole; j += kLanes) {
    const FloatVec w = softmax_weight(d, hn::Sub(hn::LoadU(d, scores + j), top));
    hn::StoreU(w, d, scores + j);
    sums = hn::Add(sums, w);
  }
  float sum = hn::GetLane(hn::SumOfLanes(d, sums));
  for (size_t j = whole; j < count; ++j) {
    scores[j] = hn::GetLane(softmax_weight(d, hn::Set(d, scores[j] - max)));
    sum += scores[j];
  }
  const float inverse = 1 / sum;
  const FloatVec factor = hn::Set(d, inverse);
  for (size_t j = 0; j < whole; j += kLanes) {
    hn::StoreU(hn::Mul(hn::LoadU(d, scores + j), factor), d, scores + j);
  }
  for (size_t j = whole; j < count; ++j) scores[j] *= inverse;
}

// ----------------------------------------------------------------------------------------- values

/// tile.of[i][r] = the weight of slots[r].
void gather(const SlotWeights& weights, size_t first_query, size_t queries,
            const std::array<size_t, kTileRows>& slots, size_t count, TileScores& tile) {
  for (size_t i = 0; i < queries; ++i) {
    const float* from = weights.of + (first_query + i) * weights.stride;
    for (size_t r = 0; r < count; ++r) tile.of[i][r] = from[slots[r]];
  }
}

/// out_i += sum_j w_ij V_j over a segment of dense rows.
template <class T>
void add_rows(const SlotSegment& segment, SlotWalk walk, const SlotWeights& weights,
              size_t head_dim, float* out) {
  const auto rows = static_cast<size_t>(segment.slots);
  std::array<size_t, kTileRows> slots;
  TileScores tile;
  for (size_t first = 0; first < rows; first += kTileRows) {
    const size_t count = std::min(kTileRows, rows - first);
    for (size_t r = 0; r < count; ++r) slots[r] = walk.next();
    for (size_t i = 0; i < weights.queries; i += kMost) {
      const size_t some = std::min(kMost, weights.queries - i);
      gather(weights, i, some, slots, count, tile);
      accumulate<T>(segment.rows + first * head_dim * sizeof(T), head_dim, count, tile, some,
                    out + i * head_dim);
    }
  }
}

/// Adds the weighted codes of the `count` rows of a tile to sums, and their weights to the total.
void add_tile(const SlotWeights& weights, const std::array<size_t, kTileRows>& slots, size_t count,
              size_t channels, const Scratch& scratch, float* sums) {
  TileScores tile;
  for (size_t i = 0; i < weights.queries; i += kMost) {
    const size_t some = std::min(kMost, weights.queries - i);
    gather(weights, i, some, slots, count, tile);
    accumulate<float>(reinterpret_cast<const std::byte*>(scratch.tile), channels, count, tile, some,
                      sums + i * channels);
    for (size_t k = 0; k < some; ++k) {
      for (size_t r = 0; r < count; ++r) scratch.total[i + k] += tile.of[k][r];
    }
  }
}

/// Scales the sums of a block's codes and adds them to the output.
void add_sums(const Scratch& scratch, size_t queries, size_t channels, float* out) {
  for (size_t i = 0; i < queries; ++i) {
    for (size_t c = 0; c < channels; ++c) {
      out[i * channels + c] += scratch.sums[i * channels + c] * scratch.slopes[c] +
                               scratch.total[i] * scratch.offsets[c];
    }
  }
}

/// out_i += sum_j w_ij V_j over the live rows of packed values.
void add_blocks(const SlotSegment& segment, SlotWalk walk, const SlotWeights& weights,
                const Scratch& scratch, float* out) {
  const BlockReader reader(*segment.format, scratch);
  const size_t channels = reader.channels();
  std::array<size_t, kTileRows> slots;
  for (const PackedBlock& block : segment.blocks) {
    if (block.live_rows == 0) continue;
    float* sums = reader.per_token() ? out : scratch.sums;
    if (!reader.per_token()) {
      reader.read_factors(block);
      std::fill(sums, sums + weights.queries * channels, 0.0f);
      std::fill(scratch.total, scratch.total + weights.queries, 0.0f);
    }
    for (size_t first = 0; first < static_cast<size_t>(block.rows); first += kTileRows) {
      const size_t count = read_tile(reader, block, first, scratch.tile);
      if (count == 0) continue;
      for (size_t r = 0; r < count; ++r) slots[r] = walk.next();
      add_tile(weights, slots, count, channels, scratch, sums);
    }
    if (!reader.per_token()) add_sums(scratch, weights.queries, channels, out);
  }
}

// --------------------------------------------------------------------------------------- KV heads

size_t widest(const PackedHead& head, size_t head_dim) {
  size_t width = head_dim;
  for (const SlotSegment& segment : head.keys) {
    if (segment.format != nullptr) {
      width = std::max(width, static_cast<size_t>(segment.format->channels()));
    }
  }
  return width;
}

/// Whether vnni/ takes the segment. It is not a Highway target, and requires AVX-512.
bool scored_in_integers(const SlotSegment& segment) {
  return HWY_TARGET == HWY_AVX3 && vnni::available() && vnni::scores(*segment.format);
}
bool added_in_integers(const SlotSegment& segment) {
  return HWY_TARGET == HWY_AVX3 && vnni::available() && vnni::adds(*segment.format);
}

/// A KV head that a worker attends to.
struct HeadWork {
  PackedHead& head;
  size_t queries;
  size_t head_dim;
  float scale;
  std::byte* memory;  // scratch of vnni/; the same memory as `scratch`
  Scratch scratch;
};

/// The scores of a segment of keys.
void score_segment(const HeadWork& work, const SlotSegment& segment, float* scores) {
  const auto stride = static_cast<size_t>(work.head.slots);
  const float* q = segment.format != nullptr && segment.q != nullptr ? segment.q : work.head.q;
  if (segment.slots == 0) return;
  if (segment.format != nullptr && scored_in_integers(segment)) {
    vnni::score_blocks(segment, q, work.queries, work.scale, work.memory, scores, stride);
  } else if (segment.format != nullptr) {
    score_blocks(segment, q, work.queries, work.scale, work.scratch, scores, stride);
  } else if (segment.dtype == DType::kF16) {
    score_rows<f16>(segment, q, work.queries, work.head_dim, work.scale, scores, stride);
  } else if (segment.dtype == DType::kBF16) {
    score_rows<bf16>(segment, q, work.queries, work.head_dim, work.scale, scores, stride);
  } else {
    score_rows<float>(segment, q, work.queries, work.head_dim, work.scale, scores, stride);
  }
}

/// Adds a segment of weighted values, in the slots of `walk`, to the output.
void add_segment(const HeadWork& work, const SlotSegment& segment, const SlotWalk& walk,
                 const SlotWeights& weights) {
  if (segment.slots == 0) return;
  if (segment.format != nullptr && added_in_integers(segment)) {
    vnni::add_blocks(segment, walk, weights, work.memory, work.head.out);
  } else if (segment.format != nullptr) {
    add_blocks(segment, walk, weights, work.scratch, work.head.out);
  } else if (segment.dtype == DType::kF16) {
    add_rows<f16>(segment, walk, weights, work.head_dim, work.head.out);
  } else if (segment.dtype == DType::kBF16) {
    add_rows<bf16>(segment, walk, weights, work.head_dim, work.head.out);
  } else {
    add_rows<float>(segment, walk, weights, work.head_dim, work.head.out);
  }
}

}  // namespace

/// Scratch of one KV head, for this file or vnni/.
size_t head_scratch_bytes(const PackedHead& head, size_t head_dim, size_t queries) {
  size_t bytes = Scratch::bytes(widest(head, head_dim), queries);
  for (const std::span<const SlotSegment> segments : {head.keys, head.values}) {
    for (const SlotSegment& segment : segments) {
      if (segment.format == nullptr) continue;
      bytes = std::max(bytes, vnni::scratch_bytes(*segment.format, queries));
    }
  }
  return bytes;
}

void attend_packed_kernel(PackedHead& head, size_t queries, size_t head_dim, float scale,
                          Stream& stream, int worker) {
  std::fill(head.out, head.out + queries * head_dim, 0.0f);
  head.guarded_remaps = 0;
  if (head.slots == 0) return;
  std::byte* memory = stream.scratch(worker, head_scratch_bytes(head, head_dim, queries));
  const HeadWork work{head,  queries, head_dim,
                      scale, memory,  Scratch(memory, widest(head, head_dim), queries)};
  const auto slots = static_cast<size_t>(head.slots);
  float* scores = head.weights;
  for (const SlotSegment& segment : head.keys) {
    score_segment(work, segment, scores);
    scores += segment.slots;
  }
  for (size_t i = 0; i < queries; ++i) {
    for (const ScoreRemap& remap : head.remaps) {
      head.guarded_remaps += remap_scores(remap, head.weights + i * slots) ? 1 : 0;
    }
    softmax(head.weights + i * slots, slots);
  }
  const SlotWeights weights{head.weights, slots, queries};
  size_t slot = 0;
  for (const SlotSegment& segment : head.values) {
    add_segment(work, segment, SlotWalk(segment, slot), weights);
    if (segment.selection == nullptr) {
      slot += static_cast<size_t>(segment.slots);
    } else if (segment.selection_ends) {
      slot += static_cast<size_t>(segment.selected_of);
    }
  }
}

void unpack_blocks_kernel(const PackedFormat& format, std::span<const PackedBlock> blocks,
                          size_t first_row, size_t rows, float* out, Stream& stream, int worker) {
  const auto channels = static_cast<size_t>(format.channels());
  const Scratch scratch(stream.scratch(worker, Scratch::bytes(channels, 1)), channels, 1);
  const BlockReader reader(format, scratch);
  size_t at = 0;  // live row
  for (const PackedBlock& block : blocks) {
    const auto live = static_cast<size_t>(block.live_rows);
    if (at + live > first_row && at < first_row + rows) {
      if (!reader.per_token()) reader.read_factors(block);
      size_t row = at;
      for (size_t r = 0; r < static_cast<size_t>(block.rows); ++r) {
        if (!is_live(block, r)) continue;
        if (row >= first_row && row < first_row + rows) {
          reader.read_values(block, r, out + row * channels);
        }
        ++row;
      }
    }
    at += live;
  }
}

}  // namespace kvlm::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kvlm::cpu {

HWY_EXPORT(head_scratch_bytes);
HWY_EXPORT(attend_packed_kernel);
HWY_EXPORT(unpack_blocks_kernel);

void attend_packed(std::span<PackedHead> heads, int q_per_kv, int head_dim, float scale,
                   Stream& stream) {
  const auto queries = static_cast<size_t>(q_per_kv);
  const auto dim = static_cast<size_t>(head_dim);
  // Allocate every worker's scratch now: which worker gets which KV head is not known.
  size_t bytes = 0;
  for (const PackedHead& head : heads) {
    bytes = std::max(bytes, HWY_DYNAMIC_DISPATCH(head_scratch_bytes)(head, dim, queries));
  }
  for (int worker = 0; worker < stream.pool().threads(); ++worker) stream.scratch(worker, bytes);
  const auto kernel = HWY_DYNAMIC_DISPATCH(attend_packed_kernel);
  stream.pool().parallel_for(heads.size(), [&](size_t task, int worker) {
    kernel(heads[task], queries, dim, scale, stream, worker);
  });
}

void unpack_blocks(const PackedFormat& format, std::span<const PackedBlock> blocks, float* out,
                   Stream& stream) {
  constexpr size_t kTaskRows = 256;
  size_t rows = 0;
  for (const PackedBlock& block : blocks) rows += static_cast<size_t>(block.live_rows);
  const auto kernel = HWY_DYNAMIC_DISPATCH(unpack_blocks_kernel);
  stream.pool().parallel_for((rows + kTaskRows - 1) / kTaskRows, [&](size_t task, int worker) {
    const size_t first = task * kTaskRows;
    kernel(format, blocks, first, std::min(kTaskRows, rows - first), out, stream, worker);
  });
}

}  // namespace kvlm::cpu
#endif  // HWY_ONCE
