#pragma once

#include <algorithm>
#include <bit>

#include "kernels/cuda/attend/packed_tiles.cuh"
#include "kernels/cuda/device/launch.cuh"

// The products of image_block.cuh: one warp and half a chunk of packed codes.
//
// A half is 32 slots, four tiles of 8. Thread (row, quarter) has the codes of slot slot_of(row) of
// each tile as columns of an operand, and gets the sums of two digits of query row % 4 for slots
// quarter and quarter + 4 of each tile. The thread 16 further has the other two digits; together
// they compute four scores each. Their weights are in turn the digits for the product with V.
namespace kvlm::cuda::packed {

/// Weight of a score s: 2^(slope (s - top) + level).
struct ScoreWeighting {
  float slope;
  float top;
  float level;

  __device__ float operator()(float score) const {
    float weight;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(weight) : "f"(fmaf(slope, score - top, level)));
    return weight;
  }
};

constexpr int kHalfSlots = 32;
constexpr int kChunkSlots = 2 * kHalfSlots;
constexpr int kTiles = 4;        // of 8 slots, in a half
constexpr int kMostBlocks = 8;   // in a cluster
constexpr int kWeightBits = 32;  // of a weight, after the binary point
constexpr int kFoldThreads = 128;

/// Packed tokens, as bytes to multiply.
template <int kBits>
struct CodeBytes {
  static constexpr int kRowBytes = kDim * kBits / 8;
  static constexpr int kChunkBytes = kChunkSlots * kRowBytes;
  static constexpr int kStages = kBits == 1 ? 3 : 2;  // chunks in flight or in use
  static constexpr int kStageBytes = kStages * kChunkBytes;
  static constexpr int kPerByte = 8 / kBits;
  static constexpr uint32_t kMask = 0x01010101u * ((1u << kBits) - 1);

  /// Code i of each byte, times 2^shift(i).
  static __device__ uint32_t pick(uint32_t word, int i) { return word & kMask << (kBits * i); }
  static constexpr __device__ int shift(int channel) { return kBits * (channel % kPerByte); }
};

/// d (16 x 8) = c + a (16 x 32) b (32 x 8), bytes in, integers out: `a` signed or not, `b` not. A
/// thread has of a: columns 4 quarter to 4 quarter + 3 of row and row + 8, then those 16 further;
/// of b the same of column `row`; of c and d as of mma()'s d.
template <bool kSigned>
__device__ void mma_bytes(int (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, int c0,
                          int c1, int c2, int c3) {
  if constexpr (kSigned) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.u8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%10,%11,%12,%13};"
        : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(c0), "r"(c1), "r"(c2),
          "r"(c3));
  } else {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.u8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%10,%11,%12,%13};"
        : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(c0), "r"(c1), "r"(c2),
          "r"(c3));
  }
}

template <bool kSigned>
__device__ void add_bytes(int (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  mma_bytes<kSigned>(d, a, b0, b1, d[0], d[1], d[2], d[3]);
}

/// Byte i of each of four words, as word i.
__device__ inline void transpose_bytes(const uint32_t (&from)[4], uint32_t (&to)[4]) {
  const uint32_t low[2] = {__byte_perm(from[0], from[1], 0x5140),
                           __byte_perm(from[2], from[3], 0x5140)};
  const uint32_t high[2] = {__byte_perm(from[0], from[1], 0x7362),
                            __byte_perm(from[2], from[3], 0x7362)};
  to[0] = __byte_perm(low[0], low[1], 0x5410);
  to[1] = __byte_perm(low[0], low[1], 0x7632);
  to[2] = __byte_perm(high[0], high[1], 0x5410);
  to[3] = __byte_perm(high[0], high[1], 0x7632);
}

/// A thread's position: row of an operand, query, and which two of the query's digits.
struct ImageThread {
  int warp = static_cast<int>(threadIdx.x / 32);
  int warp_lane = static_cast<int>(threadIdx.x % 32);
  int row = warp_lane / 4;
  int quarter = warp_lane % 4;
  int query = row % 4;
  bool lower = row >= 4;  // digits 1 and 0, and the slots of tiles 2 and 3; else digits 3 and 2

  /// Slot of a tile in column `column` of an operand: neighbouring quarters have neighbouring
  /// slots.
  static __device__ int slot_of(int column) { return column / 2 + 4 * (column % 2); }
  /// Slot in a half of the thread's score i.
  __device__ int slot(int i) const { return 8 * ((lower ? 2 : 0) + i / 2) + quarter + 4 * (i % 2); }
};

/// Copies of a warp's chunks of codes to its shared memory: every kWarps-th of [first, end). Slots
/// after the last token repeat it.
template <int kBits, int kWarps>
class ChunkCopies {
 public:
  using Of = CodeBytes<kBits>;

  __device__ ChunkCopies(const std::byte* codes, int rows, int first, int end, std::byte* stages,
                         const ImageThread& my)
      : codes_(codes + my.warp_lane % kBits * 16),
        last_row_(rows - 1),
        row_((first + my.warp) * kChunkSlots + my.warp_lane / kBits),
        left_((end - first - my.warp + kWarps - 1) / kWarps),
        stages_(stages),
        to_(static_cast<uint32_t>(__cvta_generic_to_shared(stages)) + my.warp_lane * 16) {
    __syncwarp();  // previous contents have been read
#pragma unroll
    for (int i = 0; i + 1 < Of::kStages; ++i) copy(i * Of::kChunkBytes);
  }

  /// The next chunk. The previous one is overwritten.
  __device__ const std::byte* take() {
    await_copies<Of::kStages - 2>();
    __syncwarp();
    copy(at_ == 0 ? Of::kStageBytes - Of::kChunkBytes : at_ - Of::kChunkBytes);
    const std::byte* taken = stages_ + at_;
    at_ = at_ + Of::kChunkBytes == Of::kStageBytes ? 0 : at_ + Of::kChunkBytes;
    return taken;
  }

 private:
  __device__ void copy(int stage) {
    if (left_ > 0) {
#pragma unroll
      for (int i = 0; i < 2 * kBits; ++i) {  // 16 bytes of every 32 / kBits-th row
        const int row = min(row_ + i * (32 / kBits), last_row_);
        copy_async(to_ + static_cast<uint32_t>(stage + i * 32 * 16),
                   codes_ + static_cast<int64_t>(row) * Of::kRowBytes);
      }
    }
    end_copies();
    --left_;
    row_ += kWarps * kChunkSlots;
  }

  const std::byte* codes_;
  int last_row_;
  int row_;
  int left_;
  std::byte* stages_;
  uint32_t to_;
  int at_ = 0;
};

/// Reads 4 * kWords bytes of shared memory.
template <int kWords>
__device__ void read_words(const std::byte* from, uint32_t (&to)[kWords]) {
  if constexpr (kWords == 1) {
    to[0] = *reinterpret_cast<const uint32_t*>(from);
  } else if constexpr (kWords == 2) {
    const uint2 x = *reinterpret_cast<const uint2*>(from);
    to[0] = x.x, to[1] = x.y;
  } else {
#pragma unroll
    for (int i = 0; i < kWords; i += 4) {
      const uint4 x = *reinterpret_cast<const uint4*>(from + 4 * i);
      to[i] = x.x, to[i + 1] = x.y, to[i + 2] = x.z, to[i + 3] = x.w;
    }
  }
}

/// The fields of a DeviceSegment that are read here.
struct ImageSegment {
  DeviceBlock block{};
  int slots = 0;
  int format = 0;
  int kernel = 0;

  __device__ void load(const DeviceSegment& segment) {
    block.codes = segment.first_block.codes;
    block.scales = segment.first_block.scales;
    block.zeros = segment.first_block.zeros;
    slots = segment.slots;
    format = segment.format;
    kernel = segment.kernel;
  }
};

/// Scale and zero point of a channel of a packed block: x = scale * c + zero.
struct BlockMeaning {
  const DeviceBlock& block;
  Meaning of;
  bool by_channel;

  __device__ BlockMeaning(const AttendArgs& args, const ImageSegment& segment)
      : block(segment.block),
        of(args.formats[segment.format].section[0]),
        by_channel(args.formats[segment.format].axis == ScaleAxis::kChannel) {}

  __device__ float2 at(int channel) const {
    return one_affine(block, of, by_channel ? channel : 0);
  }
};

/// Sums of a block by digit of the weights: rows query (digit 3), query + 4 (digit 1), query + 8
/// (digit 2), query + 12 (digit 0).
struct DigitSums {
  static constexpr int kStride = kDim + 8;
  int of_codes[16 * kStride + 1];  // by column of every tile
  int of_weights[16];

  /// Rows that a warp adds to at once are in different banks.
  static constexpr __device__ int row(int r) { return r * kStride + r / 4 % 2; }
  static constexpr __device__ int column(int channel) { return channel % 16 * 8 + channel / 16; }
};

/// Shared memory of a block, of which a cluster reads of_block and sums.
template <int kWarps>
struct ImageShared {
  static constexpr int kQuarter = kDim / 4 + 4;              // quarters in different banks
  alignas(16) uint32_t digits[kGroupQueries][4 * kQuarter];  // of queries times scales
  float unit[kGroupQueries];                                 // score = unit * sum of digits + bias
  float bias[kGroupQueries];
  float2 of_values[kDim];              // scale and zero point of V
  float2 ends[kWarps][kGroupQueries];  // least and greatest score
  float2 of_block[kGroupQueries];
  float top[kGroupQueries];  // greatest remapped score, in units of log2
  DigitSums sums;
};

/// Folds the scales of the keys into four queries, as digits: one query per warp.
template <int kBits, int kWarps>
__device__ void fold_queries(const AttendArgs& args, const DeviceHead& head,
                             const ImageSegment& keys, int first_query, const ImageThread& my,
                             ImageShared<kWarps>& shared) {
  const BlockMeaning meaning(args, keys);
  const int query = my.warp;
  float4 loaded{0, 0, 0, 0};
  if (first_query + query < args.q_per_kv) {
    loaded = reinterpret_cast<const float4*>(head.q + (first_query + query) * kDim)[my.warp_lane];
  }
  float x[4] = {loaded.x, loaded.y, loaded.z, loaded.w};
  float bias = 0;
  float most = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int channel = 4 * my.warp_lane + i;
    const float2 of = meaning.at(channel);
    x[i] *= args.scale;
    bias += x[i] * of.y;
    x[i] *= of.x * power_of_two(-CodeBytes<kBits>::shift(channel));
    bias += 0 * x[i];  // propagates NaN and infinity
    most = fmaxf(most, fabsf(x[i]));
  }
  bias = warp_sum(bias);
  const int magnitude = static_cast<int>(__float_as_uint(warp_max(most)) >> 23) - 127;
  const int up = max(-120, min(120, 29 - magnitude));  // below 2^30
  uint32_t digits[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    // Four signed digits: carries go upwards.
    const auto whole = static_cast<uint32_t>(__float2int_rn(x[i] * power_of_two(up)));
    digits[i] = (whole + 0x00808080u) ^ 0x00808080u;
  }
  const int at = my.warp_lane / 8 * ImageShared<kWarps>::kQuarter + my.warp_lane % 8 * 4;
  *reinterpret_cast<uint4*>(shared.digits[query] + at) = {digits[0], digits[1], digits[2],
                                                          digits[3]};
  if (my.warp_lane == 0) {
    shared.unit[query] = power_of_two(-up);
    shared.bias[query] = bias;
  }
}

/// Digits of queries as operands, for rows row and row + 8. Register `reg` has the channels of
/// word `reg` of picked codes of a quarter of a token.
template <int kBits, int kWarps>
__device__ void query_operands(const ImageShared<kWarps>& shared, const ImageThread& my,
                               uint32_t (&a)[4][4]) {
  constexpr int kPer = CodeBytes<kBits>::kPerByte;
  const int digit = my.lower ? 1 : 3;
  const uint32_t* digits = shared.digits[my.query] + ImageShared<kWarps>::kQuarter * my.quarter;
#pragma unroll
  for (int reg = 0; reg < 8; ++reg) {
    const uint32_t* from = digits + reg / kPer * 4 * kPer + reg % kPer;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const auto of = static_cast<uint32_t>(digit - i);
      const uint32_t pick = of | (of + 4) << 4;
      const uint32_t low = __byte_perm(from[0], from[kPer], pick);
      const uint32_t high = __byte_perm(from[2 * kPer], from[3 * kPer], pick);
      a[reg / 2][reg % 2 * 2 + i] = __byte_perm(low, high, 0x5410);
    }
  }
}

/// The four scores of a thread in a half.
template <int kBits>
__device__ float4 score_half(const std::byte* half, const uint32_t (&a)[4][4],
                             const ImageThread& my, float of_mine, float of_other, float bias) {
  using Of = CodeBytes<kBits>;
  float sums[2 * kTiles];  // of two digits
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
    uint32_t words[kBits];
    read_words(half + (8 * tile + ImageThread::slot_of(my.row)) * Of::kRowBytes +
                   my.quarter * (Of::kRowBytes / 4),
               words);
    constexpr int kPer = Of::kPerByte;
    int d[4];
    mma_bytes<true>(d, a[0], Of::pick(words[0], 0), Of::pick(words[1 / kPer], 1 % kPer), 0, 0, 0,
                    0);
#pragma unroll
    for (int step = 1; step < 4; ++step) {
      add_bytes<true>(d, a[step], Of::pick(words[2 * step / kPer], 2 * step % kPer),
                      Of::pick(words[(2 * step + 1) / kPer], (2 * step + 1) % kPer));
    }
    sums[2 * tile] = static_cast<float>(d[0] * 256 + d[2]);
    sums[2 * tile + 1] = static_cast<float>(d[1] * 256 + d[3]);
  }
  float scores[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float mine = my.lower ? sums[4 + i] : sums[i];
    const float theirs = __shfl_xor_sync(kAll, my.lower ? sums[i] : sums[4 + i], 16);
    // of_mine and of_other are powers of two: both threads of a pair get the same sum.
    scores[i] = fmaf(mine, of_mine, theirs * of_other) + bias;
  }
  return {scores[0], scores[1], scores[2], scores[3]};
}

/// Sets the scores of evicted tokens to NaN: fmin and fmax ignore them, and they weigh nothing.
__device__ inline void forget_empty(float4& scores, uint32_t live, const ImageThread& my) {
  const auto of = [&](float score, int i) { return live >> my.slot(i) & 1 ? score : NAN; };
  scores = {of(scores.x, 0), of(scores.y, 1), of(scores.z, 2), of(scores.w, 3)};
}

/// Weights of a thread's four scores as operands. The half has `left` slots.
__device__ inline void weight_operands(const float4& scores, const ScoreWeighting& weighting,
                                       const ImageThread& my, int left, uint32_t (&a)[4]) {
  uint32_t weights[4] = {__float2uint_rn(weighting(scores.x)), __float2uint_rn(weighting(scores.y)),
                         __float2uint_rn(weighting(scores.z)),
                         __float2uint_rn(weighting(scores.w))};
  if (left < kHalfSlots) {  // copies of the last slot weigh nothing
#pragma unroll
    for (int i = 0; i < 4; ++i) weights[i] = my.slot(i) < left ? weights[i] : 0;
  }
  uint32_t digits[4];
  transpose_bytes(weights, digits);
  const uint32_t first = __shfl_xor_sync(kAll, my.lower ? digits[3] : digits[1], 16);
  const uint32_t second = __shfl_xor_sync(kAll, my.lower ? digits[2] : digits[0], 16);
  a[0] = my.lower ? first : digits[3];
  a[1] = my.lower ? second : digits[2];
  a[2] = my.lower ? digits[1] : first;
  a[3] = my.lower ? digits[0] : second;
}

/// Adds the values of a half: a thread has 16 channels, column `row` of each of 16 tiles.
template <int kBits>
__device__ void add_half(const std::byte* half, const uint32_t (&a)[4], const ImageThread& my,
                         int (&sums)[16][4], int (&mass)[4]) {
  using Of = CodeBytes<kBits>;
  constexpr int kWords = kBits < 2 ? 1 : kBits / 2;  // of 16 channels
  uint32_t bytes[2][kWords][4];                      // of 16 slots each
#pragma unroll
  for (int part = 0; part < 2; ++part) {
    uint32_t words[4][kWords];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const std::byte* from =
          half + (16 * part + 4 * i + my.quarter) * Of::kRowBytes + my.row * (Of::kRowBytes / 8);
      if constexpr (kBits == 1) {
        words[i][0] = *reinterpret_cast<const uint16_t*>(from);
      } else {
        read_words(from, words[i]);
      }
    }
#pragma unroll
    for (int word = 0; word < kWords; ++word) {
      const uint32_t of_slots[4] = {words[0][word], words[1][word], words[2][word], words[3][word]};
      transpose_bytes(of_slots, bytes[part][word]);
    }
  }
#pragma unroll
  for (int tile = 0; tile < 16; ++tile) {
    const int byte = tile / Of::kPerByte;
    const int code = tile % Of::kPerByte;
    add_bytes<false>(sums[tile], a, Of::pick(bytes[0][byte / 4][byte % 4], code),
                     Of::pick(bytes[1][byte / 4][byte % 4], code));
  }
  add_bytes<false>(mass, a, 0x01010101u, 0x01010101u);
}

}  // namespace kvlm::cuda::packed
