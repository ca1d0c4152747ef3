#include <algorithm>
#include <bit>
#include <cmath>
#include <type_traits>

#include "kernels/cuda/attend/packed_codes.h"
#include "kernels/cuda/attend/packed_tiles.cuh"

// What codes are scaled with is folded into the queries, the weights or the sums.
namespace kvlm::cuda::packed {

namespace {

/// The 32 channels of a quarter of a row whose first half has codes of 2 bits and the other codes
/// of 1 bit, as 2 bits each.
__device__ void load_mixed(const std::byte* row, int quarter, uint32_t (&to)[2]) {
  if (quarter < 2) {
    const uint2 x = __ldg(reinterpret_cast<const uint2*>(row) + quarter);
    to[0] = x.x, to[1] = x.y;
  } else {
    to[0] = __ldg(reinterpret_cast<const uint32_t*>(row) + 2 + quarter);
  }
}

/// 16 bits with a zero behind each.
__device__ uint32_t spread(uint32_t x) {
  x = (x | x << 8) & 0x00ff00ffu;
  x = (x | x << 4) & 0x0f0f0f0fu;
  x = (x | x << 2) & 0x33333333u;
  return (x | x << 1) & 0x55555555u;
}

/// Blocks of few rows go to one warp, the tiles of long ones to all.
__device__ bool goes_to_one_warp(const DeviceBlock& block) { return block.rows <= 2 * kTileSlots; }

// ----------------------------------------------------------------------------------------- scores

/// Tiles whose codes a thread holds at once.
template <int kBits>
constexpr int kTilesHeld = kBits == 1   ? 4
                           : kBits <= 4 ? 2
                                        : 1;
/// Blocks that share a multiprocessor.
template <int kBits, int kGroups, bool kMixed>
constexpr int kScoreBlocks = kGroups == 2 || (kBits <= 2 && !kMixed) ? 4 : 5;

/// The least and greatest score of a split, of the queries of its groups.
template <int kGroups>
__device__ void write_ends(const AttendArgs& args, const Split& split, int first_query,
                           const OperandThread& my, const float (&least)[kGroups],
                           const float (&greatest)[kGroups]) {
  __shared__ float2 of_warps[kWarps][kGroups * kGroupQueries];
#pragma unroll
  for (int group = 0; group < kGroups; ++group) {
    float low = least[group];
    float high = greatest[group];
#pragma unroll
    for (int offset = 16; offset >= 4; offset /= 2) {  // threads of one quarter
      low = fminf(low, __shfl_xor_sync(kAll, low, offset));
      high = fmaxf(high, __shfl_xor_sync(kAll, high, offset));
    }
    if (my.row == 0) of_warps[my.warp][group * kGroupQueries + my.quarter] = {low, high};
  }
  __syncthreads();
  const auto query = static_cast<int>(threadIdx.x);
  if (query >= kGroups * kGroupQueries || first_query + query >= args.q_per_kv) return;
  float2 ends = of_warps[0][query];
  for (int warp = 1; warp < kWarps; ++warp) {
    ends.x = fminf(ends.x, of_warps[warp][query].x);
    ends.y = fmaxf(ends.y, of_warps[warp][query].y);
  }
  args.ends[static_cast<int64_t>(split.part) * args.q_per_kv + first_query + query] = ends;
}

/// Scores of the keys of a split: a thread has a quarter of the channels of two rows of a tile.
template <int kBits, int kGroups, bool kMixed = false>
__global__ void __launch_bounds__(kThreads, kScoreBlocks<kBits, kGroups, kMixed>)
    score_tiles(AttendArgs args) {
  using Pairs = CodePairs<kBits>;
  constexpr bool kRows = kBits == 16;
  constexpr int kRowBytes = kMixed ? kDim / 2 * 3 / 8 : kDim * kBits / 8;
  constexpr int kRowChunks = kRowBytes / 16;
  constexpr int kHeld = kTilesHeld<kBits>;
  constexpr bool kStaged = !kMixed && !kRows;
  constexpr int kStages = 3;
  constexpr int kStageBytes = kHeld * kTileSlots * kRowBytes;
  __shared__ RaisedQueries<kBits, kGroups> raised;
  __shared__ alignas(128)
      std::byte staged[kStaged ? kWarps : 1][kStaged ? kStages * kStageBytes : 16];
  Split split;
  if (!find_split(args, split)) return;
  const DeviceLane lane = lane_of(args, split.lane);
  const DeviceRun run = args.runs[split.run];
  const ScaleAxis axis = kRows ? ScaleAxis::kHead : args.formats[run.format].axis;
  const int first_query = static_cast<int>(blockIdx.z) * kGroupQueries * kGroups;
  const OperandThread my;
  const int blocks = kRows ? 1 : split.count;
  raised.fill(run.q != nullptr ? run.q : lane.q, args.q_per_kv, first_query, args.scale);
  Meaning meaning;
  if (kMixed) meaning = Meaning(args.formats[run.format].section[my.quarter / 2]);
  FoldedQueries<kBits, kGroups> folded;
  if (axis != ScaleAxis::kChannel) folded.fold(raised, my);
  const bool by_token = !kRows && axis == ScaleAxis::kToken;
  bool asked[kGroups];
  float least[kGroups];
  float greatest[kGroups];
#pragma unroll
  for (int group = 0; group < kGroups; ++group) {
    asked[group] = first_query + group * kGroupQueries + my.quarter < args.q_per_kv;
    least[group] = INFINITY;
    greatest[group] = -INFINITY;
  }

  for (int index = 0; index < blocks; ++index) {
    const DeviceBlock block =
        kRows ? rows_of(run, split) : block_of(args.blocks, run, split.first + index);
    const int tiles = (block.rows + kTileSlots - 1) / kTileSlots;
    const bool alone = !kRows && goes_to_one_warp(block);
    if (alone && index % kWarps != my.warp) continue;
    const int first_tile = alone ? 0 : my.warp * kHeld;
    const int tile_step = alone ? kHeld : kWarps * kHeld;
    if (first_tile >= tiles) continue;
    if (!kRows && axis == ScaleAxis::kChannel) folded.fold(raised, block, meaning, my);
    float2 of_block{1, kRows ? 0.0f : 1.0f};
    if (!kRows && axis == ScaleAxis::kHead) of_block = one_affine(block, 0);
    float unit[kGroups];
    float bias[kGroups];
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      unit[group] = of_block.x * folded.unit[group];
      bias[group] = of_block.y * folded.bias[group];
    }
    const std::byte* codes =
        block.codes + my.row * kRowBytes + (kMixed ? 0 : my.quarter * (kRowBytes / 4));
    float* scores = lane.weights + static_cast<int64_t>(first_query + my.quarter) * lane.slots +
                    block.first_slot + my.row;

    const auto load_row = [&](const std::byte* from, uint32_t(&to)[kBits]) {
      if constexpr (kMixed) {
        load_mixed(from, my.quarter, to);
      } else {
        load_words<kBits>(from, to);
      }
    };
    const auto load = [&](uint32_t(&words)[kHeld][2][kBits], int first) {
      if (first + kHeld * kTileSlots <= block.rows) {
        const std::byte* from = codes + static_cast<int64_t>(first) * kRowBytes;
#pragma unroll
        for (int i = 0; i < 2 * kHeld; ++i) {
          load_row(from + 8 * i * kRowBytes, words[i / 2][i % 2]);
        }
      } else {
#pragma unroll
        for (int i = 0; i < 2 * kHeld; ++i) {
          const int row = min(first + 8 * i + my.row, block.rows - 1) - my.row;
          load_row(codes + static_cast<int64_t>(row) * kRowBytes, words[i / 2][i % 2]);
        }
      }
    };
    // Where all rows are there and scaled alike, nothing is asked, so that tiles are multiplied
    // side by side.
    const auto score_some = [&](const uint32_t(&words)[kHeld][2][kBits], int tile,
                                const bool plain) {
      const int first = tile * kTileSlots;
#pragma unroll
      for (int held = 0; held < kHeld; ++held) {
        if (!plain && held > 0 && tile + held >= tiles) break;
        uint32_t rows[2][kBits];
#pragma unroll
        for (int i = 0; i < 2 * kBits; ++i)
          rows[i / kBits][i % kBits] = words[held][i / kBits][i % kBits];
        if (kMixed && my.quarter >= 2) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            rows[i][kMixed ? 1 : 0] = spread(words[held][i][0] >> 16);
            rows[i][0] = spread(words[held][i][0] & 0xffffu);
          }
        }
        float products[kGroups][4] = {};
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
          uint32_t a[4];
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const int reg = 2 * step + i / 2;
            a[i] = Pairs::halves(rows[i % 2][reg / Pairs::kPairs], reg % Pairs::kPairs);
          }
#pragma unroll
          for (int group = 0; group < kGroups; ++group) {
            mma(products[group], a[0], a[1], a[2], a[3], folded.b[group][2 * step],
                folded.b[group][2 * step + 1]);
          }
        }
#pragma unroll
        for (int side = 0; side < 2; ++side) {
          const int row = first + held * kTileSlots + 8 * side;  // from my.row on
          if (!plain && row + my.row >= block.rows) continue;
          float2 a{1, 1};
          if (!plain && by_token) a = one_affine(block, row + my.row);
#pragma unroll
          for (int group = 0; group < kGroups; ++group) {
            const float product = products[group][2 * side] + products[group][2 * side + 1];
            const float x = a.x * unit[group] * product + a.y * bias[group];
            if (asked[group]) {
              scores[static_cast<int64_t>(group) * kGroupQueries * lane.slots + row] = x;
            }
            least[group] = fminf(least[group], x);
            greatest[group] = fmaxf(greatest[group], x);
          }
        }
      }
    };
    const auto score = [&](const uint32_t(&words)[kHeld][2][kBits], int tile) {
      if (!by_token && (tile + kHeld) * kTileSlots <= block.rows) {
        score_some(words, tile, true);
      } else {
        score_some(words, tile, false);
      }
    };
    uint32_t words[kHeld][2][kBits];
    if (alone || !kStaged) {
      load(words, first_tile * kTileSlots);
      for (int tile = first_tile; tile < tiles; tile += tile_step) {
        score(words, tile);
        if (tile + tile_step < tiles) load(words, (tile + tile_step) * kTileSlots);
      }
      continue;
    }
    // Codes of long blocks come to shared memory, of which each warp has its own.
    const int thread = static_cast<int>(threadIdx.x % 32);
    const std::byte* stages = staged[my.warp];
    const auto at = [](int row, int chunk) {  // neighbouring rows of 8 bits in other banks
      return row * kRowBytes + (kBits == 8 ? chunk ^ (row & 1) : chunk) * 16;
    };
    const auto copy = [&](int tile, const std::byte* stage) {
      const auto to = static_cast<uint32_t>(__cvta_generic_to_shared(stage));
      const int first = tile * kTileSlots;
#pragma unroll
      for (int i = 0; i < kStageBytes / 16 / 32; ++i) {
        const int chunk = i * 32 + thread;
        const int row = chunk / kRowChunks;
        if (first + row >= block.rows) continue;
        copy_async(to + at(row, chunk % kRowChunks),
                   block.codes + static_cast<int64_t>(first) * kRowBytes + chunk * 16);
      }
      end_copies();
    };
    __syncwarp();  // what was there has been read
#pragma unroll
    for (int i = 0; i + 1 < kStages; ++i) {
      copy(first_tile + i * tile_step, stages + i * kStageBytes);
    }
    int now = 0;
    int free = (kStages - 1) * kStageBytes;
    for (int tile = first_tile; tile < tiles; tile += tile_step) {
      await_copies<kStages - 2>();
      __syncwarp();
      copy(tile + (kStages - 1) * tile_step, stages + free);
#pragma unroll
      for (int i = 0; i < 2 * kHeld; ++i) {
        const int row = 8 * i + my.row;
#pragma unroll
        for (int j = 0; j < kBits; j += 4) {
          const std::byte* from = stages + now;
          if constexpr (kBits >= 4) {
            const uint4 x = *reinterpret_cast<const uint4*>(
                from + at(row, my.quarter * (kRowChunks / 4) + j / 4));
            words[i / 2][i % 2][j] = x.x, words[i / 2][i % 2][j + 1] = x.y;
            words[i / 2][i % 2][j + 2] = x.z, words[i / 2][i % 2][j + 3] = x.w;
          } else {
            const auto* word =
                reinterpret_cast<const uint32_t*>(from + row * kRowBytes) + my.quarter * kBits;
            words[i / 2][i % 2][0] = word[0];
            if constexpr (kBits == 2) words[i / 2][i % 2][1] = word[1];
          }
        }
      }
      score(words, tile);
      free = now;
      now = now + kStageBytes == kStages * kStageBytes ? 0 : now + kStageBytes;
    }
  }
  if (lane.deferred) write_ends<kGroups>(args, split, first_query, my, least, greatest);
}

// ----------------------------------------------------------------------------------------- values

/// How values are scaled.
enum class ValueScales {
  kBlock,       ///< by the block, per channel or all alike; or not at all
  kTrits,       ///< the same, of ternary digits, five to a byte
  kToken,       ///< by one number a token
  kChannels32,  ///< by one number for each 32 channels of a token
};

/// Whether one number, or some, of each token scale its values.
constexpr bool scaled_by_token(ValueScales kind) {
  return kind == ValueScales::kToken || kind == ValueScales::kChannels32;
}

/// The five digits of a byte as codes of 2 bits.
__device__ void list_trits(uint16_t (&table)[256]) {
  for (int i = static_cast<int>(threadIdx.x); i < 256; i += kThreads) {
    int codes = 0;
    for (int digit = 0, rest = i; digit < 5; ++digit, rest /= 3) codes |= rest % 3 << 2 * digit;
    table[i] = static_cast<uint16_t>(codes);
  }
}

/// What a thread reads of a tile: the codes of four slots, their weights and scales.
template <int kBits, ValueScales kKind, int kGroups>
struct ValueTile {
  static constexpr bool kGrouped = kKind == ValueScales::kChannels32;
  static constexpr int kScales = kGrouped ? kChannelGroups : 1;  // of a token
  static constexpr bool kTrits = kKind == ValueScales::kTrits;
  static constexpr int kRowBytes = kTrits ? (kDim + 4) / 5 : kDim * kBits / 8;
  SlotCodes<kBits, kGrouped> codes[4];
  uint32_t behind[4];  // of trits: the word behind `codes`, both from an address that words have
  int from_byte[4];    // in them
  float weights[kGroups][4];
  uint32_t scales[4][(kScales + 1) / 2];
  uint32_t zeros[4][(kScales + 1) / 2];
  int slots;  // of the tile, from the thread's first on, that are there

  /// Slots `first` + quarter + 4 i of the block, whose weights for `group` start at weights[group].
  /// Slots from block.rows on weigh nothing. Plain loads of weights: this kernel may have started
  /// before they were written, so they are not read-only to it, as __ldg() asks.
  __device__ void load(const DeviceBlock& block, const float* const (&weights_of)[kGroups],
                       int first, const OperandThread& my) {
    const int slot = first + my.quarter;
    slots = block.rows - slot;
    if (first + kTileSlots <= block.rows) {
      const std::byte* from = block.codes + static_cast<int64_t>(slot) * kRowBytes;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        load_codes(from + 4 * i * kRowBytes, my.row, i);
#pragma unroll
        for (int group = 0; group < kGroups; ++group) {
          weights[group][i] = weights_of[group][slot + 4 * i];
        }
        load_scales(block, slot + 4 * i, i);
      }
      return;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = min(slot + 4 * i, block.rows - 1);
      load_codes(block.codes + static_cast<int64_t>(row) * kRowBytes, my.row, i);
#pragma unroll
      for (int group = 0; group < kGroups; ++group) {
        weights[group][i] = slot + 4 * i < block.rows ? weights_of[group][row] : 0.0f;
      }
      load_scales(block, row, i);
    }
  }

  /// The 16 channels of a part of a row; of trits, the four bytes that have them.
  __device__ void load_codes(const std::byte* row, int part, int i) {
    if constexpr (kTrits) {
      const auto at = reinterpret_cast<uintptr_t>(row) + static_cast<uintptr_t>(part * 16 / 5);
      const auto* words = reinterpret_cast<const uint32_t*>(at / 4 * 4);
      codes[i].words[0] = __ldg(words);
      // Two bytes of the four may be all that is left of the block's codes.
      behind[i] = at % 4 == 0 ? 0 : __ldg(words + 1);
      from_byte[i] = static_cast<int>(at % 4);
    } else {
      codes[i].load(row, part);
    }
  }

  /// Makes 2-bit codes of trits.
  __device__ void decode(const uint16_t (&table)[256], int part) {
    if constexpr (kTrits) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t bytes = __funnelshift_r(codes[i].words[0], behind[i], 8 * from_byte[i]);
        const uint32_t last = table[bytes >> 24];
        const uint32_t low = table[bytes & 255] | table[bytes >> 8 & 255] << 10 |
                             table[bytes >> 16 & 255] << 20 | last << 30;
        codes[i].words[0] = __funnelshift_r(low, last >> 2, 2 * (part * 16 % 5));
      }
    }
  }

  /// Makes weights of scores.
  __device__ void weigh(const ScoreWeighting (&weighting)[kGroups], float (&mass)[kGroups]) {
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float weight = weighting[group](weights[group][i]);
        weights[group][i] = 4 * i < slots ? weight : 0.0f;
        mass[group] += weights[group][i];
      }
    }
  }

  __device__ void load_scales(const DeviceBlock& block, int row, int i) {
    if (kKind == ValueScales::kChannels32) {
      const uint2 s = __ldg(reinterpret_cast<const uint2*>(block.scales) + row);
      const uint2 z = __ldg(reinterpret_cast<const uint2*>(block.zeros) + row);
      scales[i][0] = s.x, scales[i][kScales / 4] = s.y;
      zeros[i][0] = z.x, zeros[i][kScales / 4] = z.y;
    } else if (kKind == ValueScales::kToken) {
      scales[i][0] = __ldg(reinterpret_cast<const uint16_t*>(block.scales) + row);
      zeros[i][0] = __ldg(reinterpret_cast<const uint16_t*>(block.zeros) + row);
    }
  }

  static __device__ float of(const uint32_t (&pairs)[(kScales + 1) / 2], int j) {
    const float2 x = two_floats(pairs[j / 2]);
    return j % 2 == 0 ? x.x : x.y;
  }
};

/// Scales and zero points of the 16 channels of a thread, of a block that has them per channel.
struct ChannelScales {
  uint4 scales[2];
  uint2 zeros[4];

  __device__ void load(const DeviceBlock& block, const Meaning& meaning, int part) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      scales[i] = __ldg(reinterpret_cast<const uint4*>(block.scales) + part * 2 + i);
    }
    if (!meaning.zero_stored) return;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      zeros[i] = __ldg(reinterpret_cast<const uint2*>(block.zeros) + part * 4 + i);
    }
  }

  /// Of channel 0..15.
  __device__ float2 of(const Meaning& meaning, int channel) const {
    const float scale = __half2float(reinterpret_cast<const __half*>(scales)[channel]);
    return {meaning.slope * scale,
            meaning.zero_stored ? __half2float(reinterpret_cast<const __half*>(zeros)[channel])
                                : meaning.offset * scale};
  }
};

/// The sums of the weights of a split.
template <int kGroups>
__device__ void write_masses(const AttendArgs& args, const Split& split, int first_query,
                             const OperandThread& my, const float (&mass)[kGroups]) {
  __shared__ float of_warps[kWarps][kGroups * kGroupQueries];
#pragma unroll
  for (int group = 0; group < kGroups; ++group) {
    float sum = mass[group];
    sum += __shfl_xor_sync(kAll, sum, 1);
    sum += __shfl_xor_sync(kAll, sum, 2);
    if (my.quarter == 0 && !my.lower) {
      of_warps[my.warp][group * kGroupQueries + my.asked] = sum;
    }
  }
  __syncthreads();
  const auto query = static_cast<int>(threadIdx.x);
  if (query >= kGroups * kGroupQueries || first_query + query >= args.q_per_kv) return;
  float sum = 0;
  for (int warp = 0; warp < kWarps; ++warp) sum += of_warps[warp][query];
  args.masses[static_cast<int64_t>(split.part) * args.q_per_kv + first_query + query] = sum;
}

/// Weighted sums of the values of a split: a thread has 16 channels of four slots of a tile.
template <int kBits, ValueScales kKind, int kGroups>
__global__ void __launch_bounds__(kThreads, 5 - kGroups) add_tiles(AttendArgs args) {
  using Tile = ValueTile<kBits, kKind, kGroups>;
  constexpr bool kGrouped = Tile::kGrouped;
  constexpr bool by_token = scaled_by_token(kKind);
  constexpr int kScales = Tile::kScales;
  __shared__ ChannelSums<kGroups, kGrouped> sums;
  wait_for_earlier();
  let_next_start();
  Split split;
  if (!find_split(args, split)) return;
  const DeviceLane lane = lane_of(args, split.lane);
  const DeviceRun run = args.runs[split.run];
  const ScaleAxis axis = args.formats[run.format].axis;
  const int first_query = static_cast<int>(blockIdx.z) * kGroupQueries * kGroups;
  const OperandThread my;
  // Threads of queries beyond the last read the last one's weights; nobody reads what they add.
  int64_t query_at[kGroups];
#pragma unroll
  for (int group = 0; group < kGroups; ++group) {
    const int query = first_query + group * kGroupQueries + my.asked;
    query_at[group] = static_cast<int64_t>(min(query, args.q_per_kv - 1)) * lane.slots;
  }

  __shared__ uint16_t trits[Tile::kTrits ? 256 : 1];
  if constexpr (Tile::kTrits) {
    list_trits(trits);
    __syncthreads();
  }

  Meaning meaning;
  if (!by_token) meaning = Meaning(args.formats[run.format].section[0]);
  ScoreWeighting weighting[kGroups];
  float mass[kGroups] = {};
#pragma unroll
  for (int group = 0; lane.deferred && group < kGroups; ++group) {
    const int query = first_query + group * kGroupQueries + my.asked;
    weighting[group] = weightings_of(args, split.lane, run.range)[min(query, args.q_per_kv - 1)];
  }

  // Weights are at most 1; the scales of tokens are as large as they are.
  Raise raise{1 << 15, 1.0f / (1 << 15)};
  if (by_token) {
    float weight = lane.deferred ? 1 : 0;
    float scale = 0;
    for (int index = 0; index < split.count; ++index) {
      const DeviceBlock block = block_of(args.blocks, run, split.first + index);
      if (goes_to_one_warp(block) && index % kWarps != my.warp) continue;
      const float* weights =
          lane.weights + static_cast<int64_t>(first_query) * lane.slots + block.first_slot;
      for (int row = static_cast<int>(threadIdx.x % 32); row < block.rows; row += 32) {
#pragma unroll
        for (int i = 0; i < kGroups * kGroupQueries && !lane.deferred; ++i) {
          if (first_query + i >= args.q_per_kv) break;
          weight = fmaxf(weight, weights[static_cast<int64_t>(i) * lane.slots + row]);
        }
        if (kGrouped) {
          const uint2 s = __ldg(reinterpret_cast<const uint2*>(block.scales) + row);
          const float2 x = two_floats(s.x);
          const float2 y = two_floats(s.y);
          scale = fmaxf(scale, fmaxf(fmaxf(fabsf(x.x), fabsf(x.y)), fmaxf(fabsf(y.x), fabsf(y.y))));
        } else {
          scale = fmaxf(scale, fabsf(one_affine(block, row).x));
        }
      }
    }
    raise = raise_of(warp_max(weight) * warp_max(scale));
  }

  float products[kGroups][kSteps][4] = {};
  float totals[kGroups][kScales] = {};  // sums of weight (* zero point), of query `asked`

#pragma unroll
  for (int i = 0; i < 4 * kGroups; ++i) sums.mine(i / 4, i % 4) = {0, 0, 0, 0};

  // Adds products and totals, which share their scales, to the sums of the thread.
  const auto finish = [&](const DeviceBlock& block, const ChannelScales& scales) {
    float2 of_block{1, 1};
    if (!kGrouped && axis == ScaleAxis::kHead) of_block = one_affine(block, 0);
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      float total[kScales];
#pragma unroll
      for (int i = 0; i < kScales; ++i) {
        float sum = totals[group][i];
        sum += __shfl_xor_sync(kAll, sum, 1);
        sum += __shfl_xor_sync(kAll, sum, 2);
        total[i] = __shfl_sync(kAll, sum, my.quarter * 8);
        totals[group][i] = 0;
      }
#pragma unroll
      for (int vector = 0; vector < 4; ++vector) {
        float x[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int channel = 4 * vector + i;
          float2 a = of_block;
          if (!by_token && axis == ScaleAxis::kChannel) a = scales.of(meaning, channel);
          float(&four)[4] = products[group][channel / 2];
          const int side = channel % 2;
          const float product = (four[2 * side] + four[2 * side + 1]) * raise.down *
                                power_of_two(channel_exponent<kBits, kGrouped>(channel));
          x[i] = a.x * product + a.y * total[kGrouped ? vector : 0];
          four[2 * side] = four[2 * side + 1] = 0;
        }
        float4& to = sums.mine(group, vector);
        const float4 before = to;
        to = {before.x + x[0], before.y + x[1], before.z + x[2], before.w + x[3]};
      }
    }
  };

  const auto add = [&](Tile& tile) {
    if (lane.deferred) tile.weigh(weighting, mass);
    if constexpr (Tile::kTrits) tile.decode(trits, my.row);
    uint32_t b[kGroups][kScales][2];
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      float raised[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) raised[i] = tile.weights[group][i] * raise.up;
#pragma unroll
      for (int j = 0; j < kScales; ++j) {
        float x[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          x[i] = by_token ? raised[i] * Tile::of(tile.scales[i], j) : raised[i];
          totals[group][j] += by_token ? tile.weights[group][i] * Tile::of(tile.zeros[i], j)
                                       : tile.weights[group][i];
        }
        b[group][j][0] = half_parts(x[0], x[1], my.lower);
        b[group][j][1] = half_parts(x[2], x[3], my.lower);
      }
    }
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      uint32_t a[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        a[i] = channel_pair(tile.codes[i / 2 * 2], tile.codes[i / 2 * 2 + 1], 2 * step + i % 2);
      }
#pragma unroll
      for (int group = 0; group < kGroups; ++group) {
        const uint32_t(&of_step)[2] = b[group][kGrouped ? step / 2 : 0];
        mma(products[group][step], a[0], a[1], a[2], a[3], of_step[0], of_step[1]);
      }
    }
  };

  constexpr int kTilesSummed = 8;
  int added = 0;
  DeviceBlock block{};
  for (int index = 0; index < split.count; ++index) {
    block = block_of(args.blocks, run, split.first + index);
    const bool alone = goes_to_one_warp(block);
    if (alone && index % kWarps != my.warp) continue;
    const float* weights[kGroups];
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      weights[group] = lane.weights + query_at[group] + block.first_slot;
    }
    const int step = (alone ? 1 : kWarps) * kTileSlots;
    int first = alone ? 0 : my.warp * kTileSlots;
    ChannelScales scales;
    const auto load_scales = [&] {
      if (!by_token && axis == ScaleAxis::kChannel) scales.load(block, meaning, my.row);
    };
    // Ahead where there are registers for them, or finish() comes before the end of the block.
    constexpr bool kScalesAhead = kGroups == 1 || kBits == 8;
    if (kScalesAhead) load_scales();
    // The next tiles are on their way while one is added.
    constexpr int kAhead = kGrouped ? 1 : Tile::kTrits ? 3 - kGroups : kBits <= 2 ? 3 : 2;
    Tile tiles[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (first + i * step < block.rows) tiles[i].load(block, weights, first + i * step, my);
    }
    while (first < block.rows) {
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        if (first >= block.rows) break;
        add(tiles[i]);
        // Sums of large codes, of which zero points take most away again, stay short.
        if (kBits == 8 && ++added % kTilesSummed == 0) finish(block, scales);
        const int next = first + kAhead * step;
        if (next < block.rows) tiles[i].load(block, weights, next, my);
        first += step;
      }
    }
    if (!kScalesAhead) load_scales();
    if (!by_token) finish(block, scales);
  }
  if (by_token) finish(block, {});

  __syncthreads();
  const int queries = min(kGroups * kGroupQueries, args.q_per_kv - first_query);
  auto* part = reinterpret_cast<float4*>(
      args.parts + (static_cast<int64_t>(split.part) * args.q_per_kv + first_query) * kDim);
  for (int i = static_cast<int>(threadIdx.x); i < queries * kDim / 4; i += kThreads) {
    part[i] = sums.all(i / (kDim / 4), i % (kDim / 4));
  }
  if (lane.deferred) write_masses<kGroups>(args, split, first_query, my, mass);
}

// ---------------------------------------------------------------------------------------- choices

bool aligned(const void* p, size_t bytes) { return reinterpret_cast<uintptr_t>(p) % bytes == 0; }

template <int kBits, int kGroups, bool kMixed = false>
void launch_scores(const AttendArgs& args, dim3 grid, Stream& stream) {
  score_tiles<kBits, kGroups, kMixed><<<grid, kThreads, 0, native(stream)>>>(args);
}

template <int kBits, ValueScales kKind, int kGroups>
void launch_values(const AttendArgs& args, dim3 grid, Stream& stream) {
  launch_early("DecodeTable::attend", add_tiles<kBits, kKind, kGroups>, grid, kThreads, stream,
               args);
}

}  // namespace

namespace {

constexpr int kShortBlock = 64;  // rows of blocks that are worth a warp each

bool is_mixed(const PackedFormat& format) {
  return format.sections == 2 && format.section[0].code == CodeFormat::kBits2 &&
         format.section[0].channels == kDim / 2 && format.section[1].code == CodeFormat::kBits1 &&
         format.section[1].channels == kDim / 2;
}

/// Whether Meaning can say what codes of a section mean. Zero points that are not stored are those
/// of channels.
bool has_meaning(const PackedSection& section, ScaleAxis axis) {
  if (section.zero_stored) return section.slope == 1;
  const auto simple = [](float x) {
    int exponent = 0;
    return x == 0 || std::frexp(std::abs(x), &exponent) == 0.5f;
  };
  return axis == ScaleAxis::kChannel && section.split >= section.channels &&
         simple(section.slope) && simple(section.offset);
}

}  // namespace

int code_kernel(const SlotRun& run, bool keys, bool in_order, int head_dim) {
  if (head_dim != kDim || !aligned(run.q, 16)) return -1;
  if (run.selection != nullptr && !in_order) return -1;
  if (run.format == nullptr) {
    if (run.dtype != DType::kF16 || !aligned(run.rows, 16)) return -1;
    return keys ? kHalfRows : kLongRows;
  }
  if (run.blocks.empty()) return -1;
  const PackedFormat& format = *run.format;
  const PackedSection& section = format.section[0];
  // Zero points that are stored lie side by side: the second section's behind the first one's.
  const bool mixed =
      is_mixed(format) && (format.section[0].zero_stored || !format.section[1].zero_stored);
  const bool trits = !keys && section.code == CodeFormat::kTrit5;
  const int bits = code_bits(section.code);
  if (format.channels() != kDim || format.meta != DType::kF16 || (mixed && !keys) ||
      (!mixed && format.sections != 1) || (!trits && (bits == 0 || 8 % bits != 0))) {
    return -1;
  }
  for (int i = 0; i < format.sections; ++i) {
    const PackedSection& part = format.section[static_cast<size_t>(i)];
    const bool plain = part.zero_stored && part.slope == 1;
    if (!plain && (!has_meaning(part, format.axis) || (keys && !mixed))) return -1;
  }
  const bool by_token = format.axis == ScaleAxis::kToken;
  const bool grouped = by_token && format.group_size == kChannelGroup;
  if (by_token && format.group_size != kDim && (keys || !grouped)) return -1;
  // Dead rows keep their place among codes but not among slots.
  for (const PackedBlock& block : run.blocks) {
    if (block.live != nullptr || !aligned(block.codes, 16)) return -1;
    const size_t zeros = keys && format.axis == ScaleAxis::kChannel ? 16 : 8;
    if (format.axis != ScaleAxis::kHead &&
        (!aligned(block.scales, 16) || !aligned(block.zeros, zeros))) {
      return -1;
    }
    if (run.code_stride != 0) break;  // they lie evenly: all are alike
  }
  if (run.code_stride % 16 != 0 || run.scale_stride % 16 != 0) return -1;
  if (mixed) return kCodes21;
  if (trits) return by_token ? -1 : static_cast<int>(kTrits);
  const int width = std::countr_zero(static_cast<unsigned>(bits));
  const bool long_blocks = run.blocks[0].rows > kShortBlock;
  if (!keys && !by_token && long_blocks) return kLong1 + width;
  if (keys || !by_token) return kCodes1 + width;
  return (grouped ? kGrouped1 : kToken1) + width;
}

void score_codes(CodeKernel kernel, const AttendArgs& args, Splits splits, Stream& stream) {
  with_groups(args, splits, [&](auto constant, dim3 grid) {
    constexpr int kGroups = decltype(constant)::value;
    if (kernel == kCodes1) launch_scores<1, kGroups>(args, grid, stream);
    if (kernel == kCodes2) launch_scores<2, kGroups>(args, grid, stream);
    if (kernel == kCodes4) launch_scores<4, kGroups>(args, grid, stream);
    if (kernel == kCodes8) launch_scores<8, kGroups>(args, grid, stream);
    if (kernel == kHalfRows) launch_scores<16, kGroups>(args, grid, stream);
    if (kernel == kCodes21) launch_scores<2, kGroups, true>(args, grid, stream);
  });
}

void add_codes(CodeKernel kernel, const AttendArgs& args, Splits splits, Stream& stream) {
  if (kernel >= kLong1) return add_long_blocks(kernel, args, splits, stream);
  with_groups(args, splits, [&](auto constant, dim3 grid) {
    constexpr int kGroups = decltype(constant)::value;
    constexpr ValueScales kBlock = ValueScales::kBlock;
    constexpr ValueScales kToken = ValueScales::kToken;
    constexpr ValueScales kChannels32 = ValueScales::kChannels32;
    if (kernel == kCodes1) launch_values<1, kBlock, kGroups>(args, grid, stream);
    if (kernel == kCodes2) launch_values<2, kBlock, kGroups>(args, grid, stream);
    if (kernel == kCodes4) launch_values<4, kBlock, kGroups>(args, grid, stream);
    if (kernel == kCodes8) launch_values<8, kBlock, kGroups>(args, grid, stream);
    if (kernel == kTrits) launch_values<2, ValueScales::kTrits, kGroups>(args, grid, stream);
    if (kernel == kToken1) launch_values<1, kToken, kGroups>(args, grid, stream);
    if (kernel == kToken2) launch_values<2, kToken, kGroups>(args, grid, stream);
    if (kernel == kToken4) launch_values<4, kToken, kGroups>(args, grid, stream);
    if (kernel == kToken8) launch_values<8, kToken, kGroups>(args, grid, stream);
    if (kernel == kGrouped1) launch_values<1, kChannels32, kGroups>(args, grid, stream);
    if (kernel == kGrouped2) launch_values<2, kChannels32, kGroups>(args, grid, stream);
    if (kernel == kGrouped4) launch_values<4, kChannels32, kGroups>(args, grid, stream);
    if (kernel == kGrouped8) launch_values<8, kChannels32, kGroups>(args, grid, stream);
  });
}

}  // namespace kvlm::cuda::packed
