#include <type_traits>

#include "kernels/cuda/attend/packed_codes.h"
#include "kernels/cuda/attend/packed_tiles.cuh"

// Weighted sums of values in long blocks. A block of threads takes a chunk of slots after the
// other: codes come to shared memory as they lie, ldmatrix hands them out as columns of channels,
// weights are made once, as halves, and each warp multiplies 32 of the channels with all of them.
namespace kvlm::cuda::packed {

namespace {

/// How chunks of rows of 128 channels of kBits lie in shared memory: as in memory, but pieces of 16
/// bytes change places within 128 bytes, so that the same 16 bytes of eight neighbouring rows falls
/// into other banks.
template <int kBits>
struct Chunk {
  static constexpr int kSlots = kBits <= 2 ? 128 : 64;
  static constexpr int kTiles = kSlots / kTileSlots;
  static constexpr int kStages = kBits <= 8 ? 4 : 2;  // on their way, and the one that is used
  static constexpr int kRowBytes = 16 * kBits;
  static constexpr int kBytes = kSlots * kRowBytes;
  static constexpr int kCopies = kBytes / 16 / kThreads;  // of a thread
  /// After so many rows products are added to sums outside the tensor cores, which cut digits.
  static constexpr int kSummed = kBits == 8 ? 128 : 512;

  /// Where 16 bytes of a row is.
  static __device__ int at(int slot, int vector) {
    const int index = slot * kBits + vector;
    const int swizzle = kBits == 1   ? 0
                        : kBits <= 8 ? index / 8 % (kBits == 8 ? 8 : kBits)
                                     : slot % 8;
    return (index ^ swizzle) * 16;
  }
};

/// The four channels of a thread, of 32 of its warp: pairs of two slots as halves.
template <int kBits>
class WarpChannels {
 public:
  using Pairs = CodePairs<kBits>;
  using Of = Chunk<kBits>;
  /// Tiles that one load() reads, in so many load_columns().
  static constexpr int kTilesLoaded = kBits <= 4 ? 2 : 1;
  static constexpr int kLoads = kBits == 16 ? 2 : 1;

  __device__ explicit WarpChannels(const OperandThread& my) {
    const int warp_lane = static_cast<int>(threadIdx.x % 32);
    if constexpr (kBits <= 4) {
      const int first = 4 * my.warp % Pairs::kPairs;  // channel of a column
      at_[0] = Of::at(warp_lane, 4 * my.warp / Pairs::kPairs);
      shift_ = Pairs::kLowest - first * kBits;
    } else {
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        at_[i] = Of::at(warp_lane % 16, kBits / 4 * my.warp + warp_lane / 16 + 2 * i);
      }
    }
  }

  /// Reads tiles [tile, tile + kTilesLoaded) of a chunk.
  __device__ void load(uint32_t chunk, int tile) {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      load_columns(words_[i], chunk + at_[i] + tile * kTileSlots * Of::kRowBytes);
    }
    if constexpr (kBits <= 2) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int j = 0; j < kBits; ++j) {
          const auto by = static_cast<uint32_t>(shift_ - 4 * j);
          shifted_[j][i] = __funnelshift_l(words_[0][i], words_[0][i], by);
        }
      }
    }
  }

  /// Slots 8 `half` + 2 quarter and the next of tile `of` of those loaded; channel 0..3.
  __device__ uint32_t operand(int of, int half, int channel) const {
    if constexpr (kBits <= 2) {
      constexpr int kTogether = 4 / kBits;
      const int bit = Pairs::kLowest + channel % kTogether * kBits;
      return shifted_[channel / kTogether][2 * of + half] &
             (Pairs::kMask << bit | Pairs::kMask << (bit + 16));
    } else if constexpr (kBits == 4) {
      return Pairs::halves(words_[0][2 * of + half], channel);
    } else if constexpr (kBits == 8) {
      return Pairs::halves(words_[0][channel / 2 * 2 + half], channel % 2);
    } else {
      return words_[channel / 2][channel % 2 * 2 + half];
    }
  }

  /// What operands of the channel are to be multiplied with.
  static __device__ float power(int channel) {
    return power_of_two(-Pairs::exponent(kBits <= 2   ? channel % (4 / kBits)
                                         : kBits == 8 ? channel % 2
                                                      : channel));
  }
  /// Which of the row's channels it is; the four are neighbours up to 4 bits.
  static __device__ int channel_of(const OperandThread& my, int channel) {
    const int of_thread = 4 * my.warp + channel;
    return of_thread / Pairs::kPairs * (8 * Pairs::kPairs) + my.row * Pairs::kPairs +
           of_thread % Pairs::kPairs;
  }

 private:
  int at_[kLoads];
  int shift_ = 0;
  uint32_t words_[kLoads][4];
  uint32_t shifted_[kBits <= 2 ? kBits : 1][4];
};

/// Weights of a chunk as operands: [buffer][tile][group][8 columns of 4 pairs of words], padded so
/// that the pairs that a warp writes fall into other banks.
template <int kBits, int kGroups>
struct Operands {
  static constexpr int kWords = 72;
  uint2 tile[2][Chunk<kBits>::kTiles][kGroups][kWords / 2];
};

constexpr float kUp = 1 << 15;  // brings weights of at most 1 to where halves have most digits

/// Scores (or weights) of the slots of a chunk, on their way to operands: a warp has a query of
/// each group, a thread pairs of neighbouring slots.
template <int kBits, int kGroups>
class ChunkWeights {
 public:
  static constexpr int kPairs = Chunk<kBits>::kSlots / 64;

  __device__ ChunkWeights(const AttendArgs& args, const DeviceLane& lane, const Split& split,
                          int range, int first_query)
      : deferred_(lane.deferred) {
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      const int query = first_query + group * kGroupQueries + warp();
      there_[group] = query < args.q_per_kv;
      if (!there_[group]) continue;
      from_[group] = lane.weights + static_cast<int64_t>(query) * lane.slots;
      if (!deferred_) continue;
      weighting_[group] = weightings_of(args, split.lane, range)[query];
      weighting_[group].level += 15;
    }
  }

  /// Plain loads: this kernel may have started before the weights were written, so they are not
  /// read-only to it, as __ldg() asks.
  __device__ void load(const DeviceBlock& block, int first) {
    const int slot = first + 2 * warp_lane();
    left_ = block.rows - slot;
    whole_ = first + Chunk<kBits>::kSlots <= block.rows;
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      if (!there_[group]) break;
      const float* from = from_[group] + block.first_slot + slot;
      if (whole_ && reinterpret_cast<uintptr_t>(from) % sizeof(float2) == 0) {
#pragma unroll
        for (int i = 0; i < kPairs; ++i) {
          const float2 pair = *reinterpret_cast<const float2*>(from + i * 64);
          x_[group][2 * i] = pair.x, x_[group][2 * i + 1] = pair.y;
        }
      } else {
#pragma unroll
        for (int i = 0; i < 2 * kPairs; ++i) {
          const int at = i / 2 * 64 + i % 2;
          x_[group][i] = slot + at < block.rows ? from[at] : 0.0f;
        }
      }
    }
  }

  /// Makes operands of what was loaded last.
  __device__ void store(Operands<kBits, kGroups>& to, int buffer) {
    if (!whole_) {
      store_some(to, buffer, false, deferred_);
    } else if (deferred_) {
      store_some(to, buffer, true, true);
    } else {
      store_some(to, buffer, true, false);
    }
  }

  float total[kGroups] = {};  // of raised weights, this thread's

 private:
  static __device__ int warp_lane() { return static_cast<int>(threadIdx.x % 32); }
  static __device__ int warp() { return static_cast<int>(threadIdx.x / 32); }

  __device__ void store_some(Operands<kBits, kGroups>& to, int buffer, const bool whole,
                             const bool deferred) {
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      if (!there_[group]) break;
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        float w[2];
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const float x = x_[group][2 * i + j];
          w[j] = deferred ? weighting_[group](x) : x * kUp;
          if (!whole && 64 * i + j >= left_) w[j] = 0;
        }
        total[group] += w[0] + w[1];
        auto* words = reinterpret_cast<uint32_t*>(to.tile[buffer][4 * i + warp_lane() / 8][group]) +
                      16 * warp() + warp_lane() % 4 * 2 + warp_lane() % 8 / 4;
        words[0] = half_parts(w[0], w[1], false);
        words[8] = half_parts(w[0], w[1], true);
      }
    }
  }

  bool deferred_;
  bool whole_ = true;  // all slots of the chunk are there
  int left_ = 0;       // slots from this thread's first on that are there
  bool there_[kGroups];
  const float* from_[kGroups];
  ScoreWeighting weighting_[kGroups];
  float x_[kGroups][2 * kPairs];
};

/// Blocks that share a multiprocessor.
template <int kBits, int kGroups>
constexpr int kBlocks = kGroups == 2  ? (kBits == 16 ? 4 : 5)
                        : kBits == 16 ? 5
                        : kBits == 8  ? 6
                                      : 8;

template <int kBits, int kGroups>
__global__ void __launch_bounds__(kThreads, kBlocks<kBits, kGroups>) add_chunks(AttendArgs args) {
  using Of = Chunk<kBits>;
  using Channels = WarpChannels<kBits>;
  constexpr bool kRows = kBits == 16;
  __shared__ alignas(128) std::byte staged[Of::kStages][Of::kBytes];
  __shared__ Operands<kBits, kGroups> operands;
  __shared__ float totals[kGroups * kGroupQueries];
  Split split;
  if (!find_split(args, split)) {
    wait_for_earlier();  // the next kernel relies on it that all before are done when this one is
    return;
  }
  const DeviceRun run = args.runs[split.run];
  const int first_query = static_cast<int>(blockIdx.z) * kGroupQueries * kGroups;
  const OperandThread my;
  const auto stages = static_cast<uint32_t>(__cvta_generic_to_shared(staged));
  const int thread_at = Chunk<kBits>::at(static_cast<int>(threadIdx.x) / kBits,
                                         static_cast<int>(threadIdx.x) % kBits);
  // Copies the next chunk of a block, slots `first` on, to a stage.
  const auto copy_chunk = [&](const DeviceBlock& block, int first, uint32_t stage) {
    constexpr int kApart = kThreads * 16;  // from a copy of a thread to its next one
    const uint32_t to = stage + static_cast<uint32_t>(thread_at);
    if (first + Of::kSlots <= block.rows) {
      const std::byte* from =
          block.codes + static_cast<int64_t>(first) * Of::kRowBytes + threadIdx.x * 16;
#pragma unroll
      for (int i = 0; i < Of::kCopies; ++i) copy_async(to + i * kApart, from + i * kApart);
    } else if (first < block.rows) {
#pragma unroll
      for (int i = 0; i < Of::kCopies; ++i) {
        const int vector = static_cast<int>(threadIdx.x) + i * kThreads;
        const int slot = min(first + vector / kBits, block.rows - 1);
        copy_async(to + i * kApart,
                   block.codes + static_cast<int64_t>(slot) * Of::kRowBytes + vector % kBits * 16);
      }
    }
    end_copies();
  };
  const auto block_at = [&](int index) {
    if (!kRows) return block_of(args.blocks, run, split.first + index);
    return rows_of(run, split);
  };
  const int blocks = kRows ? min(split.count, 1) : split.count;
  const auto begin = [&](const DeviceBlock& block) {
#pragma unroll
    for (int i = 0; i + 1 < Of::kStages; ++i) {
      copy_chunk(block, i * Of::kSlots, stages + i * Of::kBytes);
    }
  };
  // Before it waits, a block reads descriptions, counts and codes, though they are no constants:
  // the kernel ahead makes weights or sums, and lets this one start only when it has waited for all
  // that write those.
  DeviceBlock block{};
  if (blocks > 0) {
    block = block_at(0);
    begin(block);
  }
  wait_for_earlier();
  let_next_start();
  const DeviceLane lane = lane_of(args, split.lane);
  ChunkWeights<kBits, kGroups> weights(args, lane, split, run.range, first_query);
  Channels channels(my);
  const ScaleAxis axis = kRows ? ScaleAxis::kHead : args.formats[run.format].axis;
  Meaning meaning;
  if (!kRows) meaning = Meaning(args.formats[run.format].section[0]);
  float mass[kGroups] = {};
  float out[kGroups][4] = {};

  for (int index = 0; index < blocks; ++index) {
    if (index > 0) {
      block = block_at(index);
      begin(block);
    }
    float products[kGroups][2][4] = {};
    float sums[kGroups][4] = {};
    const auto sum_products = [&] {
#pragma unroll
      for (int group = 0; group < kGroups; ++group) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          float(&four)[4] = products[group][i / 2];
          sums[group][i] += four[i % 2 * 2] + four[i % 2 * 2 + 1];
          four[i % 2 * 2] = four[i % 2 * 2 + 1] = 0;
        }
      }
    };
    weights.load(block, 0);
    weights.store(operands, 0);
    if (Of::kSlots < block.rows) weights.load(block, Of::kSlots);
    uint32_t from = stages;                                 // this chunk
    uint32_t to = stages + (Of::kStages - 1) * Of::kBytes;  // one that is to come
    int buffer = 0;
    for (int first = 0; first < block.rows; first += Of::kSlots) {
      await_copies<Of::kStages - 2>();
      __syncthreads();  // this chunk is there, the one before has been used
      copy_chunk(block, first + (Of::kStages - 1) * Of::kSlots, to);
      to = from;
      if (first + Of::kSlots < block.rows) {
        weights.store(operands, buffer ^ 1);
        if (first + 2 * Of::kSlots < block.rows) weights.load(block, first + 2 * Of::kSlots);
      }
      const uint2* b = &operands.tile[buffer][0][0][0] + threadIdx.x % 32;
      const auto add = [&](int tile) {
        channels.load(from, tile);
#pragma unroll
        for (int of = 0; of < Channels::kTilesLoaded; ++of) {
#pragma unroll
          for (int group = 0; group < kGroups; ++group) {
            const uint2 w =
                b[((tile + of) * kGroups + group) * (Operands<kBits, kGroups>::kWords / 2)];
#pragma unroll
            for (int step = 0; step < 2; ++step) {
              mma(products[group][step], channels.operand(of, 0, 2 * step),
                  channels.operand(of, 0, 2 * step + 1), channels.operand(of, 1, 2 * step),
                  channels.operand(of, 1, 2 * step + 1), w.x, w.y);
            }
          }
        }
      };
      if (first + Of::kSlots <= block.rows) {
#pragma unroll
        for (int tile = 0; tile < Of::kTiles; tile += Channels::kTilesLoaded) add(tile);
      } else {  // tiles behind the last rows weigh nothing
        for (int tile = 0; first + tile * kTileSlots < block.rows; tile += Channels::kTilesLoaded) {
          add(tile);
        }
      }
      if ((first + Of::kSlots) % Of::kSummed == 0) sum_products();
      buffer ^= 1;
      from += Of::kBytes;
      if (from == stages + Of::kStages * Of::kBytes) from = stages;
    }
    sum_products();
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      const float total = warp_sum(weights.total[group]);
      weights.total[group] = 0;
      mass[group] += total;
      if (threadIdx.x % 32 == 0) totals[group * kGroupQueries + my.warp] = total;
    }
    __syncthreads();
    float2 of_block{1, kRows ? 0.0f : 1.0f};
    if (!kRows && axis == ScaleAxis::kHead) of_block = one_affine(block, 0);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float2 a = of_block;
      if (!kRows && axis == ScaleAxis::kChannel) {
        a = one_affine(block, meaning, Channels::channel_of(my, i));
      }
#pragma unroll
      for (int group = 0; group < kGroups; ++group) {
        out[group][i] += a.x * (sums[group][i] * Channels::power(i)) +
                         a.y * totals[group * kGroupQueries + my.quarter];
      }
    }
    if (index + 1 < blocks) __syncthreads();
  }

#pragma unroll
  for (int group = 0; group < kGroups; ++group) {
    const int64_t first =
        static_cast<int64_t>(split.part) * args.q_per_kv + first_query + group * kGroupQueries;
    if (first_query + group * kGroupQueries + my.quarter < args.q_per_kv) {
      float* to = args.parts + (first + my.quarter) * kDim;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        to[Channels::channel_of(my, i)] = out[group][i] * (1 / kUp);
      }
    }
    if (lane.deferred && threadIdx.x % 32 == 0 &&
        first_query + group * kGroupQueries + my.warp < args.q_per_kv) {
      args.masses[first + my.warp] = mass[group] * (1 / kUp);
    }
  }
}

}  // namespace

void add_long_blocks(CodeKernel kernel, const AttendArgs& args, Splits splits, Stream& stream) {
  with_groups(args, splits, [&](auto constant, dim3 grid) {
    constexpr int kGroups = decltype(constant)::value;
    if (kernel == kLong1)
      launch_early("DecodeTable::attend", add_chunks<1, kGroups>, grid, kThreads, stream, args);
    if (kernel == kLong2)
      launch_early("DecodeTable::attend", add_chunks<2, kGroups>, grid, kThreads, stream, args);
    if (kernel == kLong4)
      launch_early("DecodeTable::attend", add_chunks<4, kGroups>, grid, kThreads, stream, args);
    if (kernel == kLong8)
      launch_early("DecodeTable::attend", add_chunks<8, kGroups>, grid, kThreads, stream, args);
    if (kernel == kLongRows)
      launch_early("DecodeTable::attend", add_chunks<16, kGroups>, grid, kThreads, stream, args);
  });
}

}  // namespace kvlm::cuda::packed
