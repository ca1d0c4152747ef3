#include <cooperative_groups.h>

#include <algorithm>
#include <array>
#include <bit>

#include "kernels/base/error.h"
#include "kernels/cuda/attend/fused_choice.h"
#include "kernels/cuda/attend/packed_tiles.cuh"
#include "kernels/cuda/attend/picture_lanes.h"
#include "kernels/cuda/attend/score_places.cuh"
#include "kernels/cuda/device/launch.cuh"

// One KV head's packed rows by one block of threads, or by a cluster of blocks where there are few
// KV heads: all scores, which stay in shared memory, then what the remap and the softmax need of
// them, then the values. Every packed byte is read once for each four queries of the KV head.
//
// The tensor cores multiply bytes: codes as they lie (a mask picks one of every byte, times a power
// of two), with queries and weights as numbers of 32 bits in four digits. The four digits of four
// queries are the 16 rows of an operand. Sums of integers are exact, so their order does not
// matter: a result does not depend on how many warps or blocks share a lane. A weight is a fixed
// point number up to 1, which needs the greatest score first; so the remap of CalibQuant, which
// needs the least and the greatest, costs nothing more.
//
// A warp takes a chunk of 64 slots at a time, half by half. Of a half, thread (row, quarter) has
// keys of slot slot_of(row) of each of four tiles of 8 slots as columns of an operand, and gets the
// sums of two digits of query row % 4 for slots quarter and quarter + 4 of each tile. With the
// thread 16 further, which has the other two digits, it makes four scores. What it makes of them in
// turn are the digits that the product with the values asks of it.
namespace kvlm::cuda::packed {

namespace {

/// Scores s of a lane weigh 2^(slope (s - top) + level).
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
constexpr int kTiles = 4;        // of 8 slots, of a half
constexpr int kMostBlocks = 8;   // of a cluster
constexpr int kWeightBits = 32;  // of a weight, behind the point
constexpr int kFoldThreads = 128;

/// Rows of codes, as bytes to multiply.
template <int kBits>
struct CodeBytes {
  static constexpr int kRowBytes = kDim * kBits / 8;
  static constexpr int kChunkBytes = kChunkSlots * kRowBytes;
  static constexpr int kStages = kBits == 1 ? 3 : 2;  // of chunks, on their way or used
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
__device__ void transpose_bytes(const uint32_t (&from)[4], uint32_t (&to)[4]) {
  const uint32_t low[2] = {__byte_perm(from[0], from[1], 0x5140),
                           __byte_perm(from[2], from[3], 0x5140)};
  const uint32_t high[2] = {__byte_perm(from[0], from[1], 0x7362),
                            __byte_perm(from[2], from[3], 0x7362)};
  to[0] = __byte_perm(low[0], low[1], 0x5410);
  to[1] = __byte_perm(low[0], low[1], 0x7632);
  to[2] = __byte_perm(high[0], high[1], 0x5410);
  to[3] = __byte_perm(high[0], high[1], 0x7632);
}

/// Where a thread stands: its row of operands, its query, which of its two pairs of digits it has.
struct PictureThread {
  int warp = static_cast<int>(threadIdx.x / 32);
  int warp_lane = static_cast<int>(threadIdx.x % 32);
  int row = warp_lane / 4;
  int quarter = warp_lane % 4;
  int query = row % 4;
  bool lower = row >= 4;  // digits 1 and 0, and the slots of tiles 2 and 3; else digits 3 and 2

  /// Slot of a tile that column `column` of an operand stands for: neighbouring quarters have
  /// neighbouring slots.
  static __device__ int slot_of(int column) { return column / 2 + 4 * (column % 2); }
  /// Slot in a half of the thread's score i.
  __device__ int slot(int i) const { return 8 * ((lower ? 2 : 0) + i / 2) + quarter + 4 * (i % 2); }
};

/// The chunks of codes of a warp, on their way to its shared memory: every kWarps-th of
/// [first, end). Behind the last row it is copied again.
template <int kBits, int kWarps>
class ChunkCopies {
 public:
  using Of = CodeBytes<kBits>;

  __device__ ChunkCopies(const std::byte* codes, int rows, int first, int end, std::byte* stages,
                         const PictureThread& my)
      : codes_(codes + my.warp_lane % kBits * 16),
        last_row_(rows - 1),
        row_((first + my.warp) * kChunkSlots + my.warp_lane / kBits),
        left_((end - first - my.warp + kWarps - 1) / kWarps),
        stages_(stages),
        to_(static_cast<uint32_t>(__cvta_generic_to_shared(stages)) + my.warp_lane * 16) {
    __syncwarp();  // what was there has been read
#pragma unroll
    for (int i = 0; i + 1 < Of::kStages; ++i) copy(i * Of::kChunkBytes);
  }

  /// The next chunk. The one before is used no more.
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

/// 4 * kWords bytes of shared memory.
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

/// Packed keys or values of a lane, as far as they are read here.
struct PictureRun {
  DeviceBlock block{};
  int slots = 0;
  int format = 0;
  int kernel = 0;

  __device__ void load(const DeviceRun& run) {
    block.codes = run.first_block.codes;
    block.scales = run.first_block.scales;
    block.zeros = run.first_block.zeros;
    slots = run.slots;
    format = run.format;
    kernel = run.kernel;
  }
};

/// What codes of a packed block mean: x = scale * c + zero.
struct BlockMeaning {
  const DeviceBlock& block;
  Meaning of;
  bool by_channel;

  __device__ BlockMeaning(const AttendArgs& args, const PictureRun& run)
      : block(run.block),
        of(args.formats[run.format].section[0]),
        by_channel(args.formats[run.format].axis == ScaleAxis::kChannel) {}

  __device__ float2 at(int channel) const {
    return one_affine(block, of, by_channel ? channel : 0);
  }
};

/// Sums of digits of weights: those of rows query (digit 3), query + 4 (1), + 8 (2), + 12 (0).
struct DigitSums {
  static constexpr int kStride = kDim + 8;
  int of_codes[16 * kStride + 1];  // by column of every tile
  int of_weights[16];

  /// Rows that a warp adds to together lie in banks of their own.
  static constexpr __device__ int row(int r) { return r * kStride + r / 4 % 2; }
  static constexpr __device__ int column(int channel) { return channel % 16 * 8 + channel / 16; }
};

/// What the blocks and warps of a lane tell each other.
template <int kWarps>
struct PictureShared {
  static constexpr int kQuarter = kDim / 4 + 4;              // so that quarters lie in other banks
  alignas(16) uint32_t digits[kGroupQueries][4 * kQuarter];  // of queries, raised, times scales
  float unit[kGroupQueries];           // what a sum of digits is multiplied with
  float bias[kGroupQueries];           // and what is added
  float2 of_values[kDim];              // what codes of values mean
  float2 ends[kWarps][kGroupQueries];  // least and greatest score
  float2 of_block[kGroupQueries];
  float top[kGroupQueries];  // the greatest of what scores are remapped to, in units of log2
  DigitSums sums;
};

/// Folds the scales of the keys into four queries, as digits: a warp a query.
template <int kBits, int kWarps>
__device__ void fold_queries(const AttendArgs& args, const DeviceLane& lane, const PictureRun& keys,
                             int first_query, const PictureThread& my,
                             PictureShared<kWarps>& shared) {
  const BlockMeaning meaning(args, keys);
  const int query = my.warp;
  float4 loaded{0, 0, 0, 0};
  if (first_query + query < args.q_per_kv) {
    loaded = reinterpret_cast<const float4*>(lane.q + (first_query + query) * kDim)[my.warp_lane];
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
    bias += 0 * x[i];  // what is no number stays none
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
  const int at = my.warp_lane / 8 * PictureShared<kWarps>::kQuarter + my.warp_lane % 8 * 4;
  *reinterpret_cast<uint4*>(shared.digits[query] + at) = {digits[0], digits[1], digits[2],
                                                          digits[3]};
  if (my.warp_lane == 0) {
    shared.unit[query] = power_of_two(-up);
    shared.bias[query] = bias;
  }
}

/// The digits of queries as operands: of rows row and row + 8, of the channels that word
/// (of codes) number reg of a quarter of a row brings.
template <int kBits, int kWarps>
__device__ void query_operands(const PictureShared<kWarps>& shared, const PictureThread& my,
                               uint32_t (&a)[4][4]) {
  constexpr int kPer = CodeBytes<kBits>::kPerByte;
  const int digit = my.lower ? 1 : 3;
  const uint32_t* digits = shared.digits[my.query] + PictureShared<kWarps>::kQuarter * my.quarter;
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

/// The four scores of a thread, of a half of a chunk.
template <int kBits>
__device__ float4 score_half(const std::byte* half, const uint32_t (&a)[4][4],
                             const PictureThread& my, float of_mine, float of_other, float bias) {
  using Of = CodeBytes<kBits>;
  float sums[2 * kTiles];  // of two digits
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
    uint32_t words[kBits];
    read_words(half + (8 * tile + PictureThread::slot_of(my.row)) * Of::kRowBytes +
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
    // Powers of two: the sum is the same whichever digits are one's own.
    scores[i] = fmaf(mine, of_mine, theirs * of_other) + bias;
  }
  return {scores[0], scores[1], scores[2], scores[3]};
}

/// Makes the scores of slots that have no rows, of a half, no numbers: they are neither least nor
/// greatest, and weigh nothing.
__device__ void forget_empty(float4& scores, uint32_t live, const PictureThread& my) {
  const auto of = [&](float score, int i) { return live >> my.slot(i) & 1 ? score : NAN; };
  scores = {of(scores.x, 0), of(scores.y, 1), of(scores.z, 2), of(scores.w, 3)};
}

/// The weights of a thread's four scores as operands. `left` of the half's slots are there.
__device__ void weight_operands(const float4& scores, const ScoreWeighting& weighting,
                                const PictureThread& my, int left, uint32_t (&a)[4]) {
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

/// Adds the values of a half: the 16 channels of column `row` of every tile of 8 columns.
template <int kBits>
__device__ void add_half(const std::byte* half, const uint32_t (&a)[4], const PictureThread& my,
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

/// The blocks that share a lane.
struct PictureCluster {
  int blocks;
  int rank;

  __device__ void sync() const {
    if (blocks == 1) return __syncthreads();
    arrive();
    wait();
  }
  /// What this block has written to shared memory is there for those that have waited.
  __device__ void arrive() const {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
  }
  __device__ void wait() const {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
  }
  /// Waits until all have read what others have; nothing is written any more.
  __device__ void await_readers() const {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    if (blocks == 1) return;
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
    wait();
#endif
  }
  /// What block `of` has where this one has `*mine`.
  template <class T>
  __device__ const T* in(int of, const T* mine) const {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    if (blocks > 1) {
      return cooperative_groups::this_cluster().map_shared_rank(mine, static_cast<unsigned>(of));
    }
#endif
    return mine;
  }
};

/// Least and greatest score of a thread's query in its block, and says them to the cluster.
template <int kWarps>
__device__ float2 ends_of_block(float low, float high, const PictureThread& my,
                                const PictureCluster& cluster, PictureShared<kWarps>& shared) {
#pragma unroll
  for (int i = 0; i < 3; ++i) {  // threads of one query
    const int apart = i < 2 ? 1 + i : 16;
    low = fminf(low, __shfl_xor_sync(kAll, low, apart));
    high = fmaxf(high, __shfl_xor_sync(kAll, high, apart));
  }
  if (my.quarter == 0 && !my.lower) shared.ends[my.warp][my.query] = {low, high};
  __syncthreads();
  float2 ends = shared.ends[0][my.query];
#pragma unroll
  for (int warp = 1; warp < kWarps; ++warp) {
    const float2 theirs = shared.ends[warp][my.query];
    ends = {fminf(ends.x, theirs.x), fmaxf(ends.y, theirs.y)};
  }
  if (cluster.blocks == 1) return ends;
  if (threadIdx.x < 16 && my.quarter == 0) shared.of_block[my.query] = ends;
  cluster.arrive();
  return ends;
}

/// The same in all blocks of a cluster, which have said theirs.
template <int kWarps>
__device__ float2 ends_of_lane(float2 ends, const PictureThread& my, const PictureCluster& cluster,
                               const PictureShared<kWarps>& shared) {
  if (cluster.blocks == 1) return ends;
  cluster.wait();
#pragma unroll 1
  for (int block = 0; block < cluster.blocks; ++block) {
    const float2 theirs = *cluster.in(block, &shared.of_block[my.query]);
    ends = {fminf(ends.x, theirs.x), fmaxf(ends.y, theirs.y)};
  }
  return ends;
}

/// Four sums of digits as one number.
__device__ double sum_of_digits(const uint32_t (&sums)[4]) {
  return static_cast<double>((static_cast<uint64_t>(sums[0]) << 24) +
                             (static_cast<uint64_t>(sums[2]) << 16) +
                             (static_cast<uint64_t>(sums[1]) << 8) + sums[3]);
}

/// The softmax states of a lane that others have left, or that is left for others.
struct LaneStates {
  float2* ends;
  float* outs;
  int count;
  int q_per_kv;

  ///   first  its first state, of all of the lane
  __device__ LaneStates(const AttendArgs& args, const FusedArgs& fused, int index, int first,
                        int count)
      : count(count), q_per_kv(args.q_per_kv) {
    const int64_t at = (static_cast<int64_t>(index) * fused.splits + first) * q_per_kv;
    ends = fused.ends + at;
    outs = fused.outs + at * kDim;
  }
  /// Merged with the state of packed rows, for a channel: the output.
  __device__ float merge(float top, float mass, float out, int query, int channel) const {
    float most = top;
    for (int i = 0; i < count; ++i) most = fmaxf(most, ends[i * q_per_kv + query].x);
    const float weight = exp2f(top - most);
    mass *= weight;
    out *= weight;
    for (int i = 0; i < count; ++i) {
      const int at = i * q_per_kv + query;
      const float part = exp2f(ends[at].x - most);
      mass += part * ends[at].y;
      out += part * outs[at * kDim + channel];
    }
    return out / mass;
  }
};

/// Calls write(query, channel, top, weights, out) with the softmax state of the packed rows, by the
/// threads of a cluster, whose blocks have some of the channels each.
template <int kBits, int kWarps, class Write>
__device__ void write_state(const PictureShared<kWarps>& shared, const PictureCluster& cluster,
                            int first_query, int queries, const Write& write) {
  const int channels = kDim / cluster.blocks;
  for (int i = static_cast<int>(threadIdx.x); i < queries * channels; i += 32 * kWarps) {
    const int query = i / channels;
    const int channel = cluster.rank * channels + i % channels;
    uint32_t sums[4] = {};
    uint32_t weights[4] = {};
#pragma unroll 1
    for (int block = 0; block < cluster.blocks; ++block) {
      const DigitSums* of = cluster.in(block, &shared.sums);
#pragma unroll
      for (int row = 0; row < 4; ++row) {
        const int at = 4 * row + query;
        sums[row] +=
            static_cast<uint32_t>(of->of_codes[DigitSums::row(at) + DigitSums::column(channel)]);
        weights[row] += static_cast<uint32_t>(of->of_weights[at]);
      }
    }
    constexpr double kUnit = 1.0 / (uint64_t{1} << kWeightBits);
    const float2 of_channel = shared.of_values[channel];
    const double mass = sum_of_digits(weights) * kUnit;
    const double sum = of_channel.x * sum_of_digits(sums) *
                           (kUnit * power_of_two(-CodeBytes<kBits>::shift(channel))) +
                       of_channel.y * mass;
    write(first_query + query, channel, shared.top[query], static_cast<float>(mass),
          static_cast<float>(sum));
  }
}

/// The chunks of a block.
struct BlockChunks {
  int slots;  // of the lane
  int first;
  int end;
};

/// Begins the block's sums, and says what codes of values mean.
template <int kWarps>
__device__ __forceinline__ void begin_sums(const AttendArgs& args, const PictureRun& values,
                                           const PictureThread& my, PictureShared<kWarps>& shared) {
  if (kWarps == kGroupQueries || my.warp >= kGroupQueries) {
    const BlockMeaning meaning(args, values);
    for (int i = static_cast<int>(threadIdx.x) % kFoldThreads; i < kDim; i += kFoldThreads) {
      shared.of_values[i] = meaning.at(i);
    }
  }
  constexpr int kSums = sizeof(DigitSums) / sizeof(int);
  for (int i = static_cast<int>(threadIdx.x); i < kSums; i += 32 * kWarps) {
    reinterpret_cast<int*>(&shared.sums)[i] = 0;
  }
}

/// Scores of a warp's chunks; returns the least and the greatest. `row_bits` are the lane's
/// PackedRowBits; null: all rows are there.
template <int kBits, int kWarps>
__device__ __forceinline__ float2 score_chunks(ChunkCopies<kBits, kWarps>& copies,
                                               const BlockChunks& chunks, const uint32_t* row_bits,
                                               const PictureThread& my,
                                               const PictureShared<kWarps>& shared,
                                               float4* scores) {
  const auto* live_words = reinterpret_cast<const uint2*>(row_bits + PackedRowBits::kBits);
  float low = INFINITY;
  float high = -INFINITY;
  uint32_t a[4][4];
  query_operands<kBits, kWarps>(shared, my, a);
  const float unit = shared.unit[my.query];
  const float of_mine = my.lower ? unit : unit * 65536;
  const float of_other = my.lower ? unit * 65536 : unit;
  const float bias = shared.bias[my.query];
  for (int chunk = chunks.first + my.warp; chunk < chunks.end; chunk += kWarps) {
    uint2 live{};
    if (row_bits != nullptr) live = live_words[chunk];
    const std::byte* codes = copies.take();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float4 made = score_half<kBits>(codes + half * kHalfSlots * CodeBytes<kBits>::kRowBytes, a,
                                      my, of_mine, of_other, bias);
      if (row_bits != nullptr) forget_empty(made, half == 0 ? live.x : live.y, my);
      scores[((chunk - chunks.first) * 2 + half) * 32] = made;
      low = fminf(low, fminf(fminf(made.x, made.y), fminf(made.z, made.w)));
      high = fmaxf(high, fmaxf(fmaxf(made.x, made.y), fmaxf(made.z, made.w)));
    }
  }
  return {low, high};
}

/// Adds the values of a warp's chunks.
template <int kBits, int kWarps>
__device__ __forceinline__ void add_chunks(ChunkCopies<kBits, kWarps>& copies,
                                           const BlockChunks& chunks, const float4* scores,
                                           const ScoreWeighting& weighting, const PictureThread& my,
                                           int (&sums)[16][4], int (&mass)[4]) {
  for (int chunk = chunks.first + my.warp; chunk < chunks.end; chunk += kWarps) {
    const int left = chunks.slots - chunk * kChunkSlots;
    uint32_t a[2][4];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      weight_operands(scores[((chunk - chunks.first) * 2 + half) * 32], weighting, my,
                      left - half * kHalfSlots, a[half]);
    }
    const std::byte* codes = copies.take();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      add_half<kBits>(codes + half * kHalfSlots * CodeBytes<kBits>::kRowBytes, a[half], my, sums,
                      mass);
    }
  }
}

/// Adds what a warp has to the sums of its block.
__device__ __forceinline__ void add_to_block(const int (&sums)[16][4], const int (&mass)[4],
                                             const PictureThread& my, DigitSums& of_block) {
#pragma unroll
  for (int side = 0; side < 2; ++side) {
    int* row = of_block.of_codes + DigitSums::row(my.row + 8 * side) + 2 * my.quarter;
#pragma unroll
    for (int tile = 0; tile < 16; ++tile) {
      atomicAdd(row + 8 * tile, sums[tile][2 * side]);
      atomicAdd(row + 8 * tile + 1, sums[tile][2 * side + 1]);
    }
    if (my.quarter == 0) atomicAdd(&of_block.of_weights[my.row + 8 * side], mass[2 * side]);
  }
}

/// Packed rows of lane blockIdx.x / blocks of a launch, of queries from 4 blockIdx.y on: the output
/// of a lane that no other kernel serves, else a softmax state.
template <int kKeyBits, int kValueBits, int kWarps>
__global__ void __launch_bounds__(32 * kWarps, 16 / kWarps)
    attend_picture(AttendArgs args, FusedArgs fused, int served, int blocks) {
  constexpr int kWarpStages =
      std::max(CodeBytes<kKeyBits>::kStageBytes, CodeBytes<kValueBits>::kStageBytes);
  extern __shared__ float4 memory[];
  __shared__ PictureShared<kWarps> shared;
  // The kernel that stores new rows has waited for all before it (store_new_rows()); what has
  // started since writes nothing that is read here, but states: queries that change their basis are
  // not these (is_one_block).
  let_next_start();
  const int index = static_cast<int>(blockIdx.x) / blocks;
  const int at = lane_at(args, index);
  PictureRun keys;
  PictureRun values;
  // Where runs lie follows from the lane's number: no load waits.
  const DeviceRun* runs = args.runs + static_cast<int64_t>(at) * args.lane_runs;
  keys.load(runs[0]);
  values.load(runs[args.lane_runs / 2]);
  const DeviceLane lane = lane_of(args, at);
  if (keys.kernel != picture_run(served)) return wait_for_earlier();
  const PictureCluster cluster{blocks, static_cast<int>(blockIdx.x) % blocks};
  const int slots = keys.slots;
  const int of_lane = (slots + kChunkSlots - 1) / kChunkSlots;
  const int of_block = (of_lane + blocks - 1) / blocks;
  const int first = cluster.rank * of_block;
  const BlockChunks chunks{slots, first, min(first + of_block, of_lane)};
  const int first_query = static_cast<int>(blockIdx.y) * kGroupQueries;
  const int row_parts = lane.splits[0].end;
  ScoreRemap remap{};
  if (lane.remaps > 0) remap = args.remaps[lane.first_remap];
  const PictureThread my;
  auto* stages = reinterpret_cast<std::byte*>(memory) + my.warp * kWarpStages;
  float4* scores = memory + kWarps * kWarpStages / 16 + my.warp_lane;  // of chunk `first`

  ChunkCopies<kKeyBits, kWarps> key_chunks(keys.block.codes, slots, first, chunks.end, stages, my);
  if (my.warp < kGroupQueries) {
    fold_queries<kKeyBits, kWarps>(args, lane, keys, first_query, my, shared);
  }
  begin_sums(args, values, my, shared);
  __syncthreads();
  float2 ends = score_chunks(key_chunks, chunks, lane.live, my, shared, scores);
  ends = ends_of_block(ends.x, ends.y, my, cluster, shared);
  ChunkCopies<kValueBits, kWarps> value_chunks(values.block.codes, slots, first, chunks.end, stages,
                                               my);
  ends = ends_of_lane(ends, my, cluster, shared);
  const float low = ends.x;
  const float high = ends.y;
  ScoreWeighting weighting{kLog2e, high, kWeightBits};
  const bool one_of_query = threadIdx.x < 16 && my.quarter == 0;
  float top = high;
  if (lane.remaps > 0 && high >= low) {
    const bool counts = one_of_query && cluster.rank == 0 && first_query + my.query < args.q_per_kv;
    const float slope = remap_slope(args, remap, low, high, counts);
    weighting = {slope * kLog2e, slope >= 0 ? high : low, kWeightBits};
    top = slope * (weighting.top - low) + low - remap.tau_low;
  }
  // Where no score is a number the output is none either, but if all rows have gone.
  const bool gone = lane.live != nullptr && lane.live[0] == 0;
  if (one_of_query) shared.top[my.query] = high >= low ? top * kLog2e : gone ? -INFINITY : INFINITY;

  int sums[16][4] = {};
  int mass[4] = {};
  add_chunks(value_chunks, chunks, scores, weighting, my, sums, mass);
  if (first + my.warp < chunks.end) add_to_block(sums, mass, my, shared.sums);
  cluster.sync();
  wait_for_earlier();  // for the states of full rows
  const bool alone = lane.fused == served;
  const LaneStates states(args, fused, index, alone ? 0 : (lane.passes - 1) * fused.lane_splits,
                          row_parts);
  write_state<kValueBits, kWarps>(
      shared, cluster, first_query, min(kGroupQueries, args.q_per_kv - first_query),
      [&](int query, int channel, float top, float mass, float out) {
        if (alone) {
          lane.out[query * kDim + channel] = states.merge(top, mass, out, query, channel);
          return;
        }
        if (channel == 0) states.ends[query] = {top, mass};
        states.outs[query * kDim + channel] = out;
      });
  cluster.await_readers();
}

struct PictureKernel {
  int key_bits;
  int value_bits;
  void (*attend_short)(AttendArgs, FusedArgs, int, int);  // with 4 warps a block
  void (*attend_long)(AttendArgs, FusedArgs, int, int);   // with 8
  int stage_bytes;                                        // of a warp
};

template <int kKeyBits, int kValueBits>
constexpr PictureKernel kernel_for() {
  return {kKeyBits, kValueBits, attend_picture<kKeyBits, kValueBits, 4>,
          attend_picture<kKeyBits, kValueBits, 8>,
          std::max(CodeBytes<kKeyBits>::kStageBytes, CodeBytes<kValueBits>::kStageBytes)};
}

/// By DeviceLane::fused, from kFirstPicture on.
constexpr std::array kKernels{kernel_for<1, 1>(), kernel_for<1, 2>(), kernel_for<1, 4>(),
                              kernel_for<1, 8>(), kernel_for<2, 1>(), kernel_for<2, 2>(),
                              kernel_for<2, 4>(), kernel_for<4, 1>(), kernel_for<4, 2>(),
                              kernel_for<4, 4>(), kernel_for<8, 1>(), kernel_for<8, 8>()};
static_assert(kFirstPicture + kKernels.size() <= 32);  // bits of LayerLaunch::fused

/// Chunks of a block up to which it has 4 warps.
constexpr int kShortChunks = 24;
constexpr int kLongWarps = 8;
constexpr int kChunkScores = kChunkSlots * kGroupQueries * static_cast<int>(sizeof(float));
/// Sums of products of bytes have 31 bits.
constexpr int kMostSlots = 16384;
/// Memory that a block asks for beside PictureShared, where two of 8 warps share a multiprocessor
/// of 227 KB, or only one.
constexpr int kHalfMemory = 100 << 10;
constexpr int kWholeMemory = 210 << 10;

/// What a block may ask for beside PictureShared.
int most_memory(const PictureLimits& limits) {
  return limits.shared_bytes - static_cast<int>(sizeof(PictureShared<kLongWarps>));
}

/// Chunks whose scores a block can hold, 0 if it has no room for its stages.
int most_chunks(int stage_bytes, const PictureLimits& limits) {
  const int stages = kLongWarps * stage_bytes;
  const int wanted = 2 * stages > kHalfMemory + (32 << 10) ? kWholeMemory : kHalfMemory;
  return std::max(0, std::min(wanted, most_memory(limits)) - stages) / kChunkScores;
}

/// How many blocks share a lane: enough to hold its scores, and to give work to a GPU that has few
/// lanes. Throws Error{kUnsupported} where blocks cannot share one and have to.
int blocks_of_lane(int chunks, int most, unsigned lanes, Stream& stream) {
  int blocks = 1;
  while (blocks<kMostBlocks&& static_cast<int>(ceil_div(chunks, blocks))> most) blocks *= 2;
  if (!stream.queue().overlaps_kernels()) {  // no clusters
    if (blocks == 1) return blocks;
    throw Error(
        ErrorCode::kUnsupported,
        "attend_packed: this GPU has no thread block clusters, but the first GPU in use does; use "
        "GPUs of one kind in a program");
  }
  const auto multiprocessors = static_cast<unsigned>(stream.queue().multiprocessors());
  while (blocks < kMostBlocks && lanes * static_cast<unsigned>(blocks) <= multiprocessors &&
         chunks >= 32 * blocks) {
    blocks *= 2;
  }
  return blocks;
}

/// Of launches that start while the one before ends, in clusters of `blocks`.
std::array<cudaLaunchAttribute, 2> early_clusters(unsigned blocks) {
  std::array<cudaLaunchAttribute, 2> attributes{};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim = {blocks, 1, 1};
  return attributes;
}

void launch_kernel(int number, const AttendArgs& args, const FusedArgs& fused, int slots,
                   Stream& stream) {
  const auto lanes = static_cast<unsigned>(fused.lanes);
  const PictureKernel& kernel = kKernels[static_cast<size_t>(number - kFirstPicture)];
  const int chunks = static_cast<int>(ceil_div(slots, kChunkSlots));
  const unsigned groups = static_cast<unsigned>(ceil_div(args.q_per_kv, kGroupQueries));
  const PictureLimits limits = picture_limits();
  const int most = most_chunks(kernel.stage_bytes, limits);
  const int blocks = blocks_of_lane(chunks, most, lanes * groups, stream);
  const int held = static_cast<int>(ceil_div(chunks, blocks));
  const int warps = held <= kShortChunks ? 4 : kLongWarps;
  const auto attend = warps == 4 ? kernel.attend_short : kernel.attend_long;
  const int bytes = warps * kernel.stage_bytes + held * kChunkScores;
  allow_shared("DecodeTable::attend", attend,
               static_cast<size_t>(std::min(kWholeMemory, most_memory(limits))));
  const auto threads = static_cast<unsigned>(32 * warps);
  const dim3 grid(lanes * static_cast<unsigned>(blocks), groups);
  const bool early = stream.queue().overlaps_kernels();
  std::array<cudaLaunchAttribute, 2> attributes = early_clusters(static_cast<unsigned>(blocks));
  cudaLaunchConfig_t config{grid,           threads,           static_cast<size_t>(bytes),
                            native(stream), attributes.data(), !early ? 0u : blocks > 1 ? 2u : 1u};
  check(cudaLaunchKernelEx(&config, attend, args, fused, number, blocks), "DecodeTable::attend");
}

int kernel_of(const PackedFormat& keys, const PackedFormat& values) {
  for (size_t i = 0; i < kKernels.size(); ++i) {
    if (keys.section[0].code == static_cast<CodeFormat>(kKernels[i].key_bits) &&
        values.section[0].code == static_cast<CodeFormat>(kKernels[i].value_bits)) {
      return kFirstPicture + static_cast<int>(i);
    }
  }
  return 0;
}

/// One block of rows that share their scales.
bool is_one_block(const SlotRun& run) {
  if (run.format == nullptr || run.q != nullptr || run.selection != nullptr ||
      run.blocks.size() != 1 || run.slots == 0 || run.slots > kMostSlots) {
    return false;
  }
  const PackedFormat& format = *run.format;
  const PackedBlock& block = run.blocks[0];
  const PackedSection& section = format.section[0];
  return format.axis != ScaleAxis::kToken && format.meta == DType::kF16 && format.sections == 1 &&
         format.channels() == kDim && section.split >= section.channels && block.live == nullptr &&
         block.rows == run.slots && is_aligned(block.codes, 16);
}

}  // namespace

PictureLimits picture_limits() {
  static const bool clusters =
      device_attribute(cudaDevAttrComputeCapabilityMajor, "DecodeTable::attend") >= 9 &&
      KVLM_EARLY_STARTS != 0;
  return {most_shared_bytes(), clusters};
}

int picture_kernel(const PackedLane& lane, int head_dim, const PictureLimits& limits) {
  if (head_dim != kDim || lane.weights_wanted || lane.keys.empty() || lane.values.empty() ||
      !is_aligned(lane.q, 16)) {
    return 0;
  }
  if (!is_one_block(lane.keys[0]) || !is_one_block(lane.values[0])) return 0;
  if (lane.keys[0].slots != lane.values[0].slots) return 0;
  if (lane.remaps.size() > 1) return 0;
  for (const ScoreRemap& remap : lane.remaps) {
    if (remap.first != 0 || remap.slots != lane.keys[0].slots) return 0;
  }
  const int number = kernel_of(*lane.keys[0].format, *lane.values[0].format);
  if (number == 0) return 0;
  const int stage_bytes = kKernels[static_cast<size_t>(number - kFirstPicture)].stage_bytes;
  const int64_t held = most_chunks(stage_bytes, limits);
  const int64_t chunks = ceil_div(lane.keys[0].slots, kChunkSlots);
  return chunks <= held * (limits.clusters ? kMostBlocks : 1) ? number : 0;
}

bool has_rows_behind(const PackedLane& lane) {
  const auto is_plain = [](const SlotRun& run) {
    return run.format == nullptr && run.dtype == DType::kF16 && run.selection == nullptr &&
           is_aligned(run.rows, 16);
  };
  if (lane.keys.size() != lane.values.size()) return false;
  for (size_t i = 1; i < lane.keys.size(); ++i) {
    if (lane.keys[i].slots != lane.values[i].slots) return false;
    if (!is_plain(lane.keys[i]) || !is_plain(lane.values[i])) return false;
  }
  return true;
}

void attend_pictures(uint32_t kernels, const AttendArgs& args, const FusedArgs& fused, int slots,
                     Stream& stream) {
  for (size_t i = 0; i < kKernels.size(); ++i) {
    const int number = kFirstPicture + static_cast<int>(i);
    if ((kernels >> number & 1) == 0) continue;
    launch_kernel(number, args, fused, slots, stream);
  }
}

}  // namespace kvlm::cuda::packed
