#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <string>
#include <type_traits>
#include <vector>

#include "kernels/base/error.h"
#include "kernels/cuda/attend_args.cuh"
#include "kernels/cuda/attend_layer.h"
#include "kernels/cuda/attend_packed.h"
#include "kernels/cuda/fused_attention.h"
#include "kernels/cuda/fused_splits.h"
#include "kernels/cuda/kept_bytes.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/packed_codes.h"
#include "kernels/cuda/placed_rows.h"
#include "kernels/quantize.h"

// Decode attention of one layer, in four steps, for the lanes that neither fused_attention.cu
// nor picture_lanes.cu serves in one pass. A lane is one KV head of one sequence; a run is
// consecutive slots of it that are stored alike; a split is the part of a run that one block of
// threads takes.
//
// 1. Scores: q . k of every slot, written as they are.
// 2. Weights: the softmax over a lane's scores, remap included. Where a lane's softmax is deferred
//    (`deferred`), only the constants are found from which step 3 makes weights out of scores.
//    Where values lie in two codes, weights go to the order in which values lie (`in_run_order`).
// 3. Values: every split gives a partial output.
// 4. Sum: the partial outputs of a lane are added.
//
// A split has 256 to 2048 slots, of values in two codes 256. Splits of values depend on the length
// of their lane alone, because they decide the order of its sums. A score depends on its own slot
// only, so splits of keys are cut such that every multiprocessor has work. The kernels in this file
// read any format, a warp taking 32 rows of a block at a time; packed_codes.cu has the kernels for
// tensor cores.
namespace kvlm::cuda {

using namespace packed;

namespace {

constexpr int kWarps = 4;
constexpr int kThreads = 32 * kWarps;
constexpr int kSplitSlots = kAnySplitSlots;
constexpr int kQueries = 4;  // of one pass over codes

// ----------------------------------------------------------------- what the host says of a layer

/// The runs that a kernel serves.
struct Served {
  std::vector<int> runs;
  Splits splits;

  void clear() {
    runs.clear();
    splits = {};
  }
  void add(int run, int count) {
    runs.push_back(run);
    ++splits.runs;
    splits.most = std::max(splits.most, static_cast<unsigned>(count));
  }
};

/// The runs of keys, or of values: last those of the kernel that serves every format.
struct Side {
  std::array<Served, kCodeKernels + 1> served;
  int parts = 0;

  void clear() {
    for (Served& runs : served) runs.clear();
    parts = 0;
  }
};

/// Arrays that travel to the GPU in one copy. They must not move before upload().
class Packet {
 public:
  template <class T>
  size_t add(std::span<const T> values) {
    const size_t at = bytes_;
    ranges_.push_back({values.data(), values.size_bytes(), at});
    bytes_ = (at + values.size_bytes() + 15) / 16 * 16;
    return at;
  }
  void clear() {
    ranges_.clear();
    bytes_ = 0;
  }
  const std::byte* upload(Stream& stream) const {
    return stream.queue().upload_ranges(ranges_, bytes_);
  }
  size_t bytes() const { return bytes_; }

 private:
  std::vector<UploadRange> ranges_;
  size_t bytes_ = 0;
};

/// What stays on the GPU of a description.
struct Kept {
  explicit Kept(Device device) : bits(device), packet(device) {}
  KeptBytes bits, packet;
};

/// The host's description of a layer. Every thread keeps one, so that describing a batch takes
/// memory only when it is larger than any before.
struct BatchBuilder {
  std::vector<DeviceLane> lanes;
  std::vector<DeviceRun> runs;  // keys of lane 0, its values, keys of lane 1, ...
  std::vector<int> kernels;     // of runs: a CodeKernel, or kCodeKernels for the one for any format
  std::vector<const SlotRun*> sources;
  std::vector<size_t> first_runs;  // of lanes
  std::vector<DeviceBlock> blocks;
  std::vector<PackedFormat> formats;
  std::vector<const PackedFormat*> known;  // where formats came from
  std::vector<ScoreRemap> remaps;
  std::vector<DevicePiece> pieces;       // full rows of lanes that picture_lanes.cu serves
  std::vector<DeviceRowLane> row_lanes;  // of all lanes, if there are such
  int row_parts = 0;
  Side keys, values;
  int key_slots = 0;                                  // of a split of keys, at most
  std::vector<uint64_t> bits;                         // bitmaps
  std::vector<std::pair<size_t, size_t>> live;        // block, its first word in `bits`
  std::vector<std::pair<size_t, size_t>> selections;  // the same of runs
  Packet packet;

  void clear() {
    lanes.clear();
    first_runs.clear();
    blocks.clear();
    formats.clear();
    known.clear();
    remaps.clear();
    pieces.clear();
    row_lanes.clear();
    row_parts = 0;
    keys.clear();
    values.clear();
    bits.clear();
    live.clear();
    selections.clear();
    packet.clear();
  }

  void resize_runs(size_t count) {
    runs.resize(count);
    kernels.resize(count);
    sources.resize(count);
  }

  int16_t format_of(const PackedFormat& format) {
    const auto at = std::find(known.begin(), known.end(), &format) - known.begin();
    if (at == static_cast<std::ptrdiff_t>(known.size())) {
      known.push_back(&format);
      formats.push_back(format);
    }
    return static_cast<int16_t>(at);
  }

  void add_block(const PackedBlock& block, int first_slot) {
    if (block.live != nullptr) {
      live.emplace_back(blocks.size(), bits.size());
      bits.insert(bits.end(), block.live, block.live + (block.rows + 63) / 64);
    }
    blocks.push_back({block.codes, block.scales, block.zeros, nullptr, block.rows, first_slot});
  }

  /// Notes which values a run holds; neighbours often have the bitmap in common.
  void add_selection(const SlotRun& run, size_t index) {
    if (selections.empty() || sources[selections.back().first]->selection != run.selection) {
      selections.emplace_back(index, bits.size());
      bits.insert(bits.end(), run.selection, run.selection + (run.selected_of + 63) / 64);
    } else {
      selections.emplace_back(index, selections.back().second);
    }
  }

  /// Bitmaps travel first, by themselves, so that blocks and runs can say where theirs is.
  void place_bits(Kept* kept, Stream& stream) {
    if (bits.empty()) return;
    const std::byte* at = stream.queue().upload(bits.data(), bits.size() * sizeof(uint64_t));
    if (kept != nullptr) at = kept->bits.place(at, bits.size() * sizeof(uint64_t), stream);
    const auto* placed = reinterpret_cast<const uint64_t*>(at);
    for (const auto& [block, word] : live) blocks[block].live = placed + word;
    for (const auto& [run, word] : selections) runs[run].selection = placed + word;
  }

  /// What runs say of themselves, from runs[first] on.
  void describe_runs(std::span<const SlotRun> from, bool are_keys, int lane, int head_dim,
                     bool fused, size_t first) {
    const bool in_order = lanes[static_cast<size_t>(lane)].in_run_order;
    int slot = 0;
    int selected = 0;
    for (const SlotRun& run : from) {
      DeviceRun& made = runs[first] = DeviceRun();
      made.lane = lane;
      made.slots = run.slots;
      made.first_slot = slot + (in_order ? selected : 0);
      made.selection = run.selection;
      made.selected_of = run.selected_of;
      made.selected_bit = run.selected_bit;
      made.q = run.q;
      const int kernel = code_kernel(run, are_keys, in_order, head_dim);
      const int most = fused        ? kFusedBlockRows
                       : kernel < 0 ? kSplitSlots
                                    : most_slots(run, lane, are_keys);
      if (run.format == nullptr) {
        made.rows = run.rows;
        made.dtype = run.dtype;
        made.units = run.slots;
        made.step = most;
      } else if (run.code_stride != 0 && run.blocks[0].rows <= most) {
        lay_evenly(run, most, made);
      } else if (run.blocks.size() == 1 && run.blocks[0].live == nullptr) {
        split_evenly(run, most, made);
      }
      kernels[first] = kernel < 0 ? kCodeKernels : kernel;
      sources[first] = &run;
      if (run.selection != nullptr) add_selection(run, first);
      ++first;
      advance(run, slot, selected);
    }
  }

  /// Cuts runs [first, last) into splits and gives each run to its kernel, unless the lane is
  /// `fused`. Returns how many splits.
  int split_runs(size_t first, size_t last, bool fused, Side& side) {
    const int before = side.parts;
    for (size_t i = first; i < last; ++i) {
      DeviceRun& run = runs[i];
      const SlotRun& source = *sources[i];
      if (source.format != nullptr) run.format = format_of(*source.format);
      if (run.step == 0) {
        const bool any = kernels[i] == kCodeKernels;
        list_blocks(source,
                    fused ? kFusedBlockRows
                    : any ? kSplitSlots
                          : most_slots(source, run.lane, &side == &keys),
                    run);
      }
      if (fused) continue;
      run.splits = static_cast<int>(ceil_div(run.units, run.step));
      run.first_part = side.parts;
      side.parts += run.splits;
      if (run.splits > 0) {
        side.served[static_cast<size_t>(kernels[i])].add(static_cast<int>(i), run.splits);
      }
    }
    return side.parts - before;
  }

  /// The parts of a lane that picture_lanes.cu serves: its packed rows, then parts of its full
  /// ones.
  void add_row_lane(const PackedLane& lane, PictureLanes& pictures) {
    DeviceRowLane made{lane.out, row_parts, 0};
    for (size_t i = 1; i < lane.keys.size(); ++i) {
      const SlotRun& keys_run = lane.keys[i];
      const KeyValueRows rows{keys_run.rows, lane.values[i].rows, DType::kF16, keys_run.slots};
      const int parts = static_cast<int>(ceil_div(rows.rows, kPartRows));
      if (parts == 0) continue;
      pieces.push_back({lane.q, rows, 0, keys_run.slots, row_parts, parts});
      pictures.rows.parts = std::max(pictures.rows.parts, static_cast<unsigned>(parts));
      row_parts += parts;
      made.parts += parts;
    }
    row_lanes.push_back(made);
    pictures.slots = std::max(pictures.slots, lane.keys[0].slots);
  }

  /// Slots of a split of a run. Blocks that lie evenly are not cut for the sake of small splits.
  int most_slots(const SlotRun& run, int lane, bool are_keys) const {
    const int most = split_slots(lanes[static_cast<size_t>(lane)].slots);
    if (!are_keys) return run.selection != nullptr ? kOrderedSplitSlots : most;
    const int whole = run.code_stride != 0 ? run.blocks[0].rows : 0;
    return std::min(most, std::max(key_slots, whole));
  }

  static void advance(const SlotRun& run, int& slot, int& selected) {
    if (run.selection == nullptr) {
      slot += run.slots;
      return;
    }
    selected += run.slots;
    if (!run.selection_ends) return;
    slot += selected;
    selected = 0;
  }

  static void lay_evenly(const SlotRun& run, int most, DeviceRun& made) {
    const PackedBlock& first = run.blocks[0];
    made.first_block = {first.codes, first.scales, first.zeros,
                        nullptr,     first.rows,   made.first_slot};
    made.code_stride = static_cast<int>(run.code_stride);
    made.scale_stride = static_cast<int>(run.scale_stride);
    made.block_rows = first.rows;
    made.packed_rows = run.slots;
    made.units = static_cast<int>(run.blocks.size());
    made.step = std::max(1, most / made.block_rows);
  }

  /// One block of many rows, as blocks of `most` rows that have scales in common unless they are
  /// of tokens.
  static void split_evenly(const SlotRun& run, int most, DeviceRun& made) {
    const PackedBlock& block = run.blocks[0];
    const PackedFormat& format = *run.format;
    made.first_block = {block.codes, block.scales, block.zeros, nullptr, most, made.first_slot};
    made.code_stride = most * static_cast<int>(format.row_bytes());
    if (format.axis == ScaleAxis::kToken) {
      made.scale_stride = most * format.groups() * static_cast<int>(dtype_bytes(format.meta));
    }
    made.block_rows = most;
    made.packed_rows = run.slots;
    made.units = static_cast<int>(ceil_div(run.slots, most));
    made.step = 1;
  }

  /// Lists the run's blocks; one of many rows is cut by rows, each part points into it.
  void list_blocks(const SlotRun& run, int most, DeviceRun& made) {
    made.listed = static_cast<int>(blocks.size());
    int at = made.first_slot;
    int longest = 1;
    for (const PackedBlock& block : run.blocks) {
      for (int row = 0; row < block.rows; row += most) {
        const PackedBlock part = part_of(*run.format, block, row, std::min(most, block.rows - row));
        add_block(part, at);
        at += part.live_rows;
        longest = std::max(longest, part.rows);
      }
    }
    made.units = static_cast<int>(blocks.size()) - made.listed;
    made.step = std::max(1, most / longest);
  }
};

// ---------------------------------------------------------------------------------------- kernels

__device__ bool is_live(const DeviceBlock& block, int row) {
  return block.live == nullptr || (block.live[row / 64] >> (row % 64) & 1) != 0;
}

/// Live rows before `row`.
__device__ int live_before(const DeviceBlock& block, int row) {
  if (block.live == nullptr) return row;
  int count = 0;
  for (int word = 0; word < row / 64; ++word) count += __popcll(block.live[word]);
  const uint64_t rest = block.live[row / 64] & ((uint64_t{1} << (row % 64)) - 1);
  return count + (row % 64 == 0 ? 0 : __popcll(rest));
}

/// Where a channel of a packed row lies.
struct Channel {
  int section;
  int index;  // within the section
  int zero;   // index of its stored zero point, -1 if it has none
};

__device__ Channel channel_of(const PackedFormat& format, int channel) {
  const int first = format.section[0].channels;
  if (channel < first) {
    return {0, channel, format.section[0].zero_stored ? channel : -1};
  }
  const int before = format.section[0].zero_stored ? first : 0;
  return {1, channel - first, format.section[1].zero_stored ? before + channel - first : -1};
}

/// Scale and zero point of a channel of a row, as x = scale * c + zero.
struct ScaleZero {
  float scale;
  float zero;
};

__device__ ScaleZero scale_zero(const PackedFormat& format, const DeviceBlock& block, int row,
                                int channel) {
  size_t at = 0;
  size_t zero_at = 0;
  const Channel place = channel_of(format, channel);
  const PackedSection& section = format.section[place.section];
  if (format.axis == ScaleAxis::kChannel) {
    at = static_cast<size_t>(channel);
    zero_at = static_cast<size_t>(max(place.zero, 0));
  } else if (format.axis == ScaleAxis::kToken) {
    at = zero_at = static_cast<size_t>(row) * static_cast<size_t>(format.groups()) +
                   static_cast<size_t>(channel / format.group_size);
  }
  const float scale = meta_at(block.scales, format.meta, at);
  const float zero = section.zero_stored ? meta_at(block.zeros, format.meta, zero_at)
                                         : section.offset_of(place.index) * scale;
  return {section.slope * scale, zero};
}

/// Calls body(channel, code) for every channel of a row, in order.
template <class Body>
__device__ void for_codes(const PackedFormat& format, const uint8_t* row, const Body& body) {
  int channel = 0;
  for (int s = 0; s < format.sections; ++s) {
    const PackedSection& section = format.section[s];
    const int n = section.channels;
    const int bits = code_bits(section.code);
    if (bits != 0 && 8 % bits == 0) {
      const int per_byte = 8 / bits;
      const int mask = (1 << bits) - 1;
      for (int i = 0; i < n; i += per_byte) {
        int word = row[i / per_byte];
        for (int j = 0; j < per_byte && i + j < n; ++j, word >>= bits) {
          body(channel + i + j, word & mask);
        }
      }
    } else {
      for (int i = 0; i < n; ++i) body(channel + i, code_at(row, section.code, i));
    }
    channel += n;
    row += section.row_bytes();
  }
}

/// Scores of the keys of a split. A warp takes 32 rows and each of its threads multiplies one of
/// them; where these rows share their scales, the warp folds the scales into the queries first.
__global__ void __launch_bounds__(kThreads) score_splits(AttendArgs args) {
  extern __shared__ float shared[];
  Split split;
  if (!find_split(args, split)) return;
  const DeviceLane lane = lane_of(args, split.lane);
  const DeviceRun run = args.runs[split.run];
  const int warp = static_cast<int>(threadIdx.x / 32);
  const int thread = static_cast<int>(threadIdx.x % 32);

  if (run.rows != nullptr) {  // full rows: a warp a row
    const int64_t row_bytes =
        static_cast<int64_t>(args.head_dim) * (run.dtype == DType::kF32 ? 4 : 2);
    for (int i = warp; i < split.count; i += kWarps) {
      const std::byte* row = run.rows + (split.first + i) * row_bytes;
      for (int query = 0; query < args.q_per_kv; ++query) {
        float dot = 0;
        for (int c = thread; c < args.head_dim; c += 32) {
          dot += lane.q[query * args.head_dim + c] * element(row, run.dtype, c);
        }
        dot = warp_sum(dot);
        if (thread == 0) {
          lane.weights[static_cast<int64_t>(query) * lane.slots + run.first_slot + split.first +
                       i] = args.scale * dot;
        }
      }
    }
    return;
  }

  const PackedFormat& format = args.formats[run.format];
  const int channels = format.channels();
  const float* queries = run.q != nullptr ? run.q : lane.q;
  float* folded = shared + warp * channels * kQueries;  // (channels, kQueries) of this warp
  const bool by_token = format.axis == ScaleAxis::kToken;
  int chunk = 0;
  for (int b = 0; b < split.count; ++b) {
    const DeviceBlock block = block_of(args.blocks, run, split.first + b);
    for (int first = 0; first < block.rows; first += 32, ++chunk) {
      if (chunk % kWarps != warp) continue;
      const int row = first + thread;
      const bool there = row < block.rows && is_live(block, row);
      const int slot = there ? block.first_slot + live_before(block, row) : 0;
      const auto* codes = reinterpret_cast<const uint8_t*>(block.codes) +
                          static_cast<size_t>(row) * format.row_bytes();
      for (int base = 0; base < args.q_per_kv; base += kQueries) {
        const int count = min(kQueries, args.q_per_kv - base);
        float bias[kQueries] = {};
        __syncwarp();
        for (int c = thread; c < channels; c += 32) {
          const ScaleZero meta = by_token ? ScaleZero{1, 0} : scale_zero(format, block, 0, c);
          for (int j = 0; j < kQueries; ++j) {
            const float q = j < count ? queries[(base + j) * channels + c] * args.scale : 0.0f;
            folded[c * kQueries + j] = q * meta.scale;
            bias[j] += q * meta.zero;
          }
        }
        for (int j = 0; j < kQueries; ++j) bias[j] = warp_sum(bias[j]);
        __syncwarp();
        if (!there) continue;
        float sums[kQueries] = {};
        if (by_token) {
          // Group by group: scale times sum of q c, zero times sum of q.
          float products[kQueries] = {};
          float plain[kQueries] = {};
          int group = 0;
          const auto finish = [&] {
            const ScaleZero meta = scale_zero(format, block, row, group * format.group_size);
            for (int j = 0; j < kQueries; ++j) {
              sums[j] += meta.scale * products[j] + meta.zero * plain[j];
              products[j] = plain[j] = 0;
            }
          };
          for_codes(format, codes, [&](int c, int code) {
            if (c / format.group_size != group) {
              finish();
              ++group;
            }
            const float4 q = *reinterpret_cast<const float4*>(folded + c * kQueries);
            const auto x = static_cast<float>(code);
            products[0] += q.x * x, products[1] += q.y * x;
            products[2] += q.z * x, products[3] += q.w * x;
            plain[0] += q.x, plain[1] += q.y, plain[2] += q.z, plain[3] += q.w;
          });
          finish();
        } else {
          for_codes(format, codes, [&](int c, int code) {
            const float4 q = *reinterpret_cast<const float4*>(folded + c * kQueries);
            const auto x = static_cast<float>(code);
            sums[0] += q.x * x, sums[1] += q.y * x, sums[2] += q.z * x, sums[3] += q.w * x;
          });
        }
        for (int j = 0; j < count; ++j) {
          lane.weights[static_cast<int64_t>(base + j) * lane.slots + slot] = sums[j] + bias[j];
        }
      }
    }
  }
}

__device__ float block_reduce(float x, bool maximum, float* parts) {
  x = maximum ? warp_max(x) : warp_sum(x);
  __syncthreads();
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = x;
  __syncthreads();
  float all = parts[0];
  for (unsigned i = 1; i < blockDim.x / 32; ++i) {
    all = maximum ? fmaxf(all, parts[i]) : all + parts[i];
  }
  return all;
}

constexpr int kNormaliseThreads = 512;

/// Where the weights of a lane go that lie in the order of its runs of values: behind each other
/// those of the slots that the first run of a selection holds, and then the others of the
/// selection.
class RunOrder {
 public:
  /// By all threads of a block.
  __device__ void find(const AttendArgs& args, const DeviceLane& lane) {
    __shared__ int counts[kMostWords];
    __shared__ int sums[kMostWords];
    int first = lane.last_keys + 1;
    while (args.runs[first].selection == nullptr) ++first;
    run_ = &args.runs[first];
    before_ = sums;
    const int words = (run_->selected_of + 63) / 64;
    const auto thread = static_cast<int>(threadIdx.x);
    for (int i = thread; i < words; i += static_cast<int>(blockDim.x)) {
      counts[i] = __popcll(word(i));
    }
    __syncthreads();
    for (int i = thread; i < words; i += static_cast<int>(blockDim.x)) {
      int sum = 0;
      for (int j = 0; j < i; ++j) sum += counts[j];
      sums[i] = sum;
    }
    __syncthreads();
  }
  __device__ int place(int slot) const {
    const int i = slot - run_->first_slot;
    if (i < 0 || i >= run_->selected_of) return slot;
    const uint64_t bits = word(i / 64);
    const int held = before_[i / 64] + __popcll(bits & ((uint64_t{1} << i % 64) - 1));
    return run_->first_slot + ((bits >> i % 64 & 1) != 0 ? held : run_->slots + i - held);
  }

  static constexpr int kMostWords = kMostOrdered / 64;

 private:
  /// Bit i: the first run holds slot i of the word.
  __device__ uint64_t word(int i) const {
    return run_->selected_bit ? run_->selection[i] : ~run_->selection[i];
  }

  const DeviceRun* run_ = nullptr;
  const int* before_ = nullptr;  // slots that the run holds before each word
};

/// Remaps and normalises the scores of one query head of one lane of at most kHeld *
/// kNormaliseThreads slots, in place. With `ordered` those of lanes in_run_order alone.
template <int kHeld>
__global__ void __launch_bounds__(kNormaliseThreads) normalise(AttendArgs args, bool ordered) {
  __shared__ float parts[kNormaliseThreads / 32];
  wait_for_earlier();
  let_next_start();
  const DeviceLane lane = lane_of(args, lane_at(args, static_cast<int>(blockIdx.x)));
  if (lane.deferred || lane.fused != 0 || lane.placed || (ordered && !lane.in_run_order)) return;
  float* scores = lane.weights + static_cast<int64_t>(blockIdx.y) * lane.slots;
  const auto first = static_cast<int>(threadIdx.x);
  float held[kHeld];
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    const int slot = first + i * kNormaliseThreads;
    held[i] = slot < lane.slots ? scores[slot] : -INFINITY;
  }
  for (int r = 0; r < lane.remaps; ++r) {
    const ScoreRemap remap = args.remaps[lane.first_remap + r];
    if (remap.slots == 0) continue;
    float low = INFINITY;
    float high = -INFINITY;
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      const int at = first + i * kNormaliseThreads - remap.first;
      if (at < 0 || at >= remap.slots) continue;
      low = fminf(low, held[i]);
      high = fmaxf(high, held[i]);
    }
    low = -block_reduce(-low, true, parts);
    high = block_reduce(high, true, parts);
    const float slope = remap_slope(args, remap, low, high, threadIdx.x == 0);
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      const int at = first + i * kNormaliseThreads - remap.first;
      if (at < 0 || at >= remap.slots) continue;
      held[i] = slope * (held[i] - low) + low - remap.tau_low;
    }
  }
  float maximum = -INFINITY;
#pragma unroll
  for (int i = 0; i < kHeld; ++i) maximum = fmaxf(maximum, held[i]);
  maximum = block_reduce(maximum, true, parts);
  float sum = 0;
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    held[i] = __expf(held[i] - maximum);
    sum += held[i];
  }
  const float inverse = 1.0f / block_reduce(sum, false, parts);
  RunOrder order;
  if (lane.in_run_order) order.find(args, lane);  // all have read their scores
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    const int slot = first + i * kNormaliseThreads;
    if (slot >= lane.slots) continue;
    scores[lane.in_run_order ? order.place(slot) : slot] = held[i] * inverse;
  }
}

/// The same of any number of slots.
__global__ void __launch_bounds__(kNormaliseThreads) normalise_long(AttendArgs args) {
  __shared__ float parts[kNormaliseThreads / 32];
  wait_for_earlier();
  let_next_start();
  const DeviceLane lane = lane_of(args, lane_at(args, static_cast<int>(blockIdx.x)));
  if (lane.deferred || lane.fused != 0 || lane.placed || lane.in_run_order) return;
  float* scores = lane.weights + static_cast<int64_t>(blockIdx.y) * lane.slots;
  const auto first = static_cast<int>(threadIdx.x);
  const auto step = static_cast<int>(blockDim.x);
  for (int r = 0; r < lane.remaps; ++r) {
    const ScoreRemap remap = args.remaps[lane.first_remap + r];
    if (remap.slots == 0) continue;
    float low = INFINITY;
    float high = -INFINITY;
    for (int i = first; i < remap.slots; i += step) {
      low = fminf(low, scores[remap.first + i]);
      high = fmaxf(high, scores[remap.first + i]);
    }
    low = -block_reduce(-low, true, parts);
    high = block_reduce(high, true, parts);
    const float slope = remap_slope(args, remap, low, high, threadIdx.x == 0);
    for (int i = first; i < remap.slots; i += step) {
      float& score = scores[remap.first + i];
      score = slope * (score - low) + low - remap.tau_low;
    }
    __syncthreads();
  }
  float maximum = -INFINITY;
  for (int i = first; i < lane.slots; i += step) maximum = fmaxf(maximum, scores[i]);
  maximum = block_reduce(maximum, true, parts);
  float sum = 0;
  for (int i = first; i < lane.slots; i += step) {
    const float weight = __expf(scores[i] - maximum);
    scores[i] = weight;
    sum += weight;
  }
  const float inverse = 1.0f / block_reduce(sum, false, parts);
  for (int i = first; i < lane.slots; i += step) scores[i] *= inverse;
}

void launch_normalise(const AttendArgs& device, const LayerLaunch& layer, Stream& stream) {
  const dim3 heads(layer.lanes, static_cast<unsigned>(device.q_per_kv));
  const int most = layer.most_slots;
  const auto hold = [&](auto kernel, bool ordered) {
    launch_early("attend_packed", kernel, heads, kNormaliseThreads, stream, device, ordered);
  };
  constexpr int kMost = kMostOrdered / kNormaliseThreads;
  if (most <= 2 * kNormaliseThreads) return hold(normalise<2>, false);
  if (most <= 8 * kNormaliseThreads) return hold(normalise<8>, false);
  if (most <= kMostOrdered) return hold(normalise<kMost>, false);
  launch_early("attend_packed", normalise_long, heads, kNormaliseThreads, stream, device);
  if (layer.ordered) hold(normalise<kMost>, true);
}

/// The lane's slot of a run's slot `i`: itself, or the place of the i-th chosen bit.
__device__ int selected_slot(const DeviceRun& run, int i) {
  if (run.selection == nullptr) return run.first_slot + i;
  for (int word = 0; word * 64 < run.selected_of; ++word) {
    uint64_t bits = run.selected_bit ? run.selection[word] : ~run.selection[word];
    const int here = min(64, run.selected_of - word * 64);
    if (here < 64) bits &= (uint64_t{1} << here) - 1;
    const int count = __popcll(bits);
    if (i >= count) {
      i -= count;
      continue;
    }
    for (; i > 0; --i) bits &= bits - 1;
    return run.first_slot + word * 64 + __ffsll(static_cast<long long>(bits)) - 1;
  }
  return run.first_slot;
}

/// Weighted sums of the values of a split; a thread has one channel.
__global__ void add_values(AttendArgs args) {
  __shared__ float weights[kSplitSlots][kQueries];
  Split split;
  if (!find_split(args, split)) return;
  const DeviceLane lane = lane_of(args, split.lane);
  const DeviceRun run = args.runs[split.run];
  const auto channel = static_cast<int>(threadIdx.x);
  const bool there = channel < args.head_dim;
  float* part =
      args.parts + static_cast<int64_t>(split.part) * args.q_per_kv * args.head_dim + channel;

  for (int base = 0; base < args.q_per_kv; base += kQueries) {
    const int count = min(kQueries, args.q_per_kv - base);
    const auto load_weights = [&](int rows, const auto& slot_of) {
      __syncthreads();
      for (int i = channel; i < rows * kQueries; i += static_cast<int>(blockDim.x)) {
        const int row = i / kQueries;
        const int j = i % kQueries;
        const int slot = slot_of(row);
        weights[row][j] = j < count && slot >= 0
                              ? lane.weights[static_cast<int64_t>(base + j) * lane.slots + slot]
                              : 0.0f;
      }
      __syncthreads();
    };
    float sums[kQueries] = {};
    if (run.rows != nullptr) {
      load_weights(split.count, [&](int row) {
        return lane.in_run_order ? run.first_slot + split.first + row
                                 : selected_slot(run, split.first + row);
      });
      const int64_t row_bytes =
          static_cast<int64_t>(args.head_dim) * (run.dtype == DType::kF32 ? 4 : 2);
      for (int row = 0; there && row < split.count; ++row) {
        const float x = element(run.rows + (split.first + row) * row_bytes, run.dtype, channel);
        for (int j = 0; j < kQueries; ++j) sums[j] += weights[row][j] * x;
      }
    } else {
      const PackedFormat& format = args.formats[run.format];
      const Channel place = there ? channel_of(format, channel) : Channel{};
      const PackedSection& section = format.section[place.section];
      const size_t offset = place.section == 0 ? 0 : format.section[0].row_bytes();
      const size_t row_bytes = format.row_bytes();
      const int bits = code_bits(section.code);
      const bool simple = bits != 0 && 8 % bits == 0;
      const size_t byte = offset + static_cast<size_t>(simple ? place.index * bits / 8 : 0);
      const int shift = simple ? place.index * bits % 8 : 0;
      const int mask = (1 << bits) - 1;
      for (int b = 0; b < split.count; ++b) {
        const DeviceBlock block = block_of(args.blocks, run, split.first + b);
        load_weights(block.rows, [&](int row) {
          if (!is_live(block, row)) return -1;
          const int slot = block.first_slot + live_before(block, row);
          return run.selection == nullptr || lane.in_run_order
                     ? slot
                     : selected_slot(run, slot - run.first_slot);
        });
        if (!there) continue;
        const auto* codes = reinterpret_cast<const uint8_t*>(block.codes);
        const auto code_of = [&](int row) {
          const uint8_t* at = codes + static_cast<size_t>(row) * row_bytes;
          if (simple) return static_cast<float>(at[byte] >> shift & mask);
          return static_cast<float>(code_at(at + offset, section.code, place.index));
        };
        if (format.axis == ScaleAxis::kToken) {
          for (int row = 0; row < block.rows; ++row) {
            const ScaleZero meta = scale_zero(format, block, row, channel);
            const float x = meta.scale * code_of(row) + meta.zero;
            for (int j = 0; j < kQueries; ++j) sums[j] += weights[row][j] * x;
          }
        } else {
          float products[kQueries] = {};
          float plain[kQueries] = {};
          for (int row = 0; row < block.rows; ++row) {
            const float code = code_of(row);
            for (int j = 0; j < kQueries; ++j) {
              products[j] += weights[row][j] * code;
              plain[j] += weights[row][j];
            }
          }
          const ScaleZero meta = scale_zero(format, block, 0, channel);
          for (int j = 0; j < kQueries; ++j) {
            sums[j] += meta.scale * products[j] + meta.zero * plain[j];
          }
        }
      }
    }
    for (int j = 0; there && j < count; ++j) part[(base + j) * args.head_dim] = sums[j];
  }
}

/// How the scores of a deferred lane are weighed, from the ends of its splits: a warp a query head.
/// Its greatest weight is 1.
__global__ void weigh_lanes(AttendArgs args) {
  const int index = lane_at(args, static_cast<int>(blockIdx.x));
  const DeviceLane lane = args.lanes[index];
  wait_for_earlier();
  let_next_start();  // whose codes have been written before the scores
  if (!lane.deferred) return;
  constexpr float kLog2e = 1.4426950408889634f;
  const int thread = static_cast<int>(threadIdx.x % 32);
  for (int query = static_cast<int>(threadIdx.x / 32); query < args.q_per_kv;
       query += static_cast<int>(blockDim.x) / 32) {
    float most = -INFINITY;
    for (int range = 0; range <= lane.remaps; ++range) {
      float low = INFINITY;
      float high = -INFINITY;
      for (int r = lane.first_keys; r <= lane.last_keys; ++r) {
        const DeviceRun& run = args.runs[r];
        if (run.range != range) continue;
        for (int split = thread; split < run.splits; split += 32) {
          const float2 ends =
              args.ends[static_cast<int64_t>(run.first_part + split) * args.q_per_kv + query];
          low = fminf(low, ends.x);
          high = fmaxf(high, ends.y);
        }
      }
      low = -warp_max(-low);
      high = warp_max(high);
      ScoreWeighting made{kLog2e, high, high * kLog2e};
      if (range > 0 && high >= low) {
        const ScoreRemap remap = args.remaps[lane.first_remap + range - 1];
        const float slope = remap_slope(args, remap, low, high, thread == 0);
        // The largest remapped score is that of the greatest, of the least if the slope falls.
        const float top = slope >= 0 ? high : low;
        made = {slope * kLog2e, top, (slope * (top - low) + low - remap.tau_low) * kLog2e};
      }
      if (high >= low) most = fmaxf(most, made.level);
      if (thread == 0) weightings_of(args, index, range)[query] = made;
    }
    __syncwarp();
    for (int range = thread; range <= lane.remaps; range += 32) {
      weightings_of(args, index, range)[query].level -= most;
    }
  }
}

__global__ void sum_parts(AttendArgs args) {
  const DeviceLane lane = lane_of(args, lane_at(args, static_cast<int>(blockIdx.x)));
  const int elements = args.q_per_kv * args.head_dim;
  wait_for_earlier();
  if (lane.fused != 0) return;
  for (int i = static_cast<int>(threadIdx.x); i < elements; i += static_cast<int>(blockDim.x)) {
    float sum = 0;
    float mass = 0;
    for (int part = 0; part < lane.parts; ++part) {
      const int64_t at = lane.first_part + part;
      sum += args.parts[at * elements + i];
      if (lane.deferred) mass += args.masses[at * args.q_per_kv + i / args.head_dim];
    }
    lane.out[i] = lane.deferred ? sum / mass : sum;
  }
}

constexpr int kUnpackThreads = 128;
constexpr int kUnpackRows = 32;

/// Block (packed block, rows): kUnpackRows of its rows, a channel a thread, so that neighbouring
/// threads write side by side.
__global__ void __launch_bounds__(kUnpackThreads)
    unpack(const DeviceBlock* blocks, PackedFormat format, float* out) {
  const DeviceBlock& block = blocks[blockIdx.x];
  const int first = static_cast<int>(blockIdx.y) * kUnpackRows;
  const int end = min(block.rows, first + kUnpackRows);
  if (first >= end) return;
  const int first_live = block.first_slot + live_before(block, first);
  const int channels = format.channels();
  const auto row_bytes = static_cast<int64_t>(format.row_bytes());
  const bool by_row = format.axis == ScaleAxis::kToken;
  for (int c = static_cast<int>(threadIdx.x); c < channels; c += kUnpackThreads) {
    const Channel place = channel_of(format, c);
    const CodeFormat code = format.section[place.section].code;
    const auto* codes = reinterpret_cast<const uint8_t*>(block.codes) +
                        (place.section == 0 ? 0 : format.section[0].row_bytes());
    ScaleZero meta{};
    if (!by_row) meta = scale_zero(format, block, 0, c);
    int64_t to = first_live;
#pragma unroll 4
    for (int row = first; row < end; ++row) {
      if (!is_live(block, row)) continue;
      if (by_row) meta = scale_zero(format, block, row, c);
      out[to++ * channels + c] =
          meta.scale * static_cast<float>(code_at(codes + row * row_bytes, code, place.index)) +
          meta.zero;
    }
  }
}

/// What kernels of a layer tell each other.
FusedArgs place_workspace(const LayerLaunch& layer, AttendArgs& args, Stream& stream) {
  const auto queries = static_cast<size_t>(args.q_per_kv);
  const size_t parts = static_cast<size_t>(layer.value_parts) + 1;
  size_t bytes = 0;
  const auto room = [&](size_t size) {
    const size_t at = bytes;
    bytes += (size + 255) / 256 * 256;
    return at;
  };
  const size_t sums = room(parts * queries * static_cast<size_t>(args.head_dim) * sizeof(float));
  const size_t masses = room(parts * queries * sizeof(float));
  const size_t ends = room(static_cast<size_t>(layer.key_parts) * queries * sizeof(float2));
  const size_t weightings =
      room(static_cast<size_t>(layer.weightings) * queries * sizeof(ScoreWeighting));
  FusedArgs fused{};
  fused.lanes = static_cast<int>(layer.lanes);
  fused.splits = (layer.fused & ~kPictureKernels) == 0 ? 0 : most_fused_splits(layer.most_slots);
  fused.blocks = fused_blocks_of_lane(layer.lanes, fused.splits, stream);
  const size_t splits = layer.lanes * static_cast<size_t>(fused.splits) * queries;
  const size_t fused_ends = room(splits * sizeof(float2));
  const size_t fused_outs = room(splits * static_cast<size_t>(args.head_dim) * sizeof(float));
  std::byte* base = stream.queue().scratch(kLaneParts, bytes);
  fused.ends = reinterpret_cast<float2*>(base + fused_ends);
  fused.outs = reinterpret_cast<float*>(base + fused_outs);
  args.parts = reinterpret_cast<float*>(base + sums);
  args.masses = reinterpret_cast<float*>(base + masses);
  args.ends = reinterpret_cast<float2*>(base + ends);
  args.weightings = reinterpret_cast<ScoreWeighting*>(base + weightings);
  return fused;
}

/// Serves the lanes that are done in one pass.
void launch_fused(const LayerLaunch& layer, const AttendArgs& args, FusedArgs fused,
                  Stream& stream) {
  if ((layer.fused & kPictureKernels) != 0) {
    attend_pictures(layer.fused & kPictureKernels, args, layer.pictures, layer.lanes, stream);
  }
  if ((layer.fused & ~kPictureKernels) == 0) return;
  for (fused.pair = 1; fused.pair <= fused_pairs(); ++fused.pair) {
    if ((layer.fused >> fused.pair & 1) == 0) continue;
    fused.sources = layer.sources[static_cast<size_t>(fused.pair)];
    fused.lose_rows = layer.lose_rows;
    attend_fused(args, fused, stream);
  }
  join_fused(args, fused, stream);
}

/// `args` of the launch of one kernel.
AttendArgs serving(const AttendArgs& args, const ServedRuns& served, int kernel) {
  AttendArgs some = args;
  some.served = served.runs;
  some.kernel = kernel;
  some.positions = served.positions;
  some.position_count = served.position_count;
  return some;
}

/// Scores, or the sums of values, of the runs of every kernel.
void launch_scores(const LayerLaunch& layer, const AttendArgs& args, Stream& stream) {
  for (int i = 0; i < kCodeKernels; ++i) {
    const ServedRuns& served = layer.keys[static_cast<size_t>(i)];
    if (served.splits.runs == 0) continue;
    score_codes(static_cast<CodeKernel>(i), serving(args, served, i), served.splits, stream);
  }
  const ServedRuns& any = layer.keys[kCodeKernels];
  if (any.splits.runs == 0) return;
  const size_t shared = sizeof(float) * kWarps * kQueries * static_cast<size_t>(layer.channels);
  score_splits<<<dim3(any.splits.runs, any.splits.most), kThreads, shared, native(stream)>>>(
      serving(args, any, kCodeKernels));
}

void launch_values(const LayerLaunch& layer, const AttendArgs& args, Stream& stream) {
  for (int i = 0; i < kCodeKernels; ++i) {
    const ServedRuns& served = layer.values[static_cast<size_t>(i)];
    if (served.splits.runs == 0) continue;
    add_codes(static_cast<CodeKernel>(i), serving(args, served, i), served.splits, stream);
  }
  const ServedRuns& any = layer.values[kCodeKernels];
  if (any.splits.runs == 0) return;
  const auto threads = static_cast<unsigned>(ceil_div(args.head_dim, 32) * 32);
  add_values<<<dim3(any.splits.runs, any.splits.most), threads, 0, native(stream)>>>(
      serving(args, any, kCodeKernels));
}

}  // namespace

namespace packed {

/// The most slots of a split of keys, for a batch whose lanes have `slots` in all.
int key_split_slots(int64_t slots, Stream& stream) {
  const int64_t wanted = int64_t{4} * stream.queue().multiprocessors();
  int split = kSplitSlots;
  while (split < 2048 && slots > split * wanted) split *= 2;
  return split;
}

PackedBlock part_of(const PackedFormat& format, const PackedBlock& block, int row, int rows) {
  if (rows == block.rows) return block;
  PackedBlock part = block;
  part.rows = part.live_rows = rows;
  part.codes += static_cast<size_t>(row) * format.row_bytes();
  if (format.axis == ScaleAxis::kToken) {
    const size_t offset =
        static_cast<size_t>(row) * static_cast<size_t>(format.groups()) * dtype_bytes(format.meta);
    part.scales += offset;
    if (part.zeros != nullptr) part.zeros += offset;
  }
  if (block.live == nullptr) return part;
  part.live = block.live + row / 64;
  part.live_rows = 0;
  for (int i = 0; i < rows; ++i) {
    part.live_rows += static_cast<int>(part.live[i / 64] >> (i % 64) & 1);
  }
  return part;
}

bool goes_in_run_order(std::span<const SlotRun> values, size_t remaps, bool weights_wanted,
                       int slots) {
  if (remaps > 0 || weights_wanted || slots > kMostOrdered) return false;
  const auto selects = [](const SlotRun& run) { return run.selection != nullptr; };
  const auto first = std::find_if(values.begin(), values.end(), selects);
  const auto end = std::find_if_not(first, values.end(), selects);
  const auto ends = std::count_if(first, end, [](const SlotRun& r) { return r.selection_ends; });
  return first != end && end - first <= 2 && ends == 1 && (end - 1)->selection_ends &&
         std::none_of(end, values.end(), selects);
}

bool find_ranges(std::span<const ScoreRemap> remaps, std::span<DeviceRun> runs) {
  for (DeviceRun& run : runs) {
    if (run.kernel < 0) continue;
    for (size_t r = 0; r < remaps.size(); ++r) {
      const int from = std::max(run.first_slot, remaps[r].first);
      const int to = std::min(run.first_slot + run.slots, remaps[r].first + remaps[r].slots);
      if (from >= to) continue;
      if (to - from != run.slots || run.range != 0) return false;
      run.range = static_cast<int16_t>(r + 1);
    }
  }
  return true;
}

void launch_layer(const LayerLaunch& layer, AttendArgs args, Stream& stream) {
  const FusedArgs fused = place_workspace(layer, args, stream);
  if (!layer.unfused) return launch_fused(layer, args, fused, stream);
  launch_scores(layer, args, stream);
  if (layer.deferred > 0) {
    const auto warps = static_cast<unsigned>(std::min(args.q_per_kv, 8));
    launch_early("attend_packed", weigh_lanes, layer.lanes, static_cast<int>(32 * warps), stream,
                 args);
  }
  if (layer.plain) launch_normalise(args, layer, stream);
  if (layer.placed) weigh_places(*layer.table, args, stream);
  launch_values(layer, args, stream);
  launch_early("attend_packed", sum_parts, layer.lanes, 256, stream, args);
  check_launch("attend_packed");
  launch_fused(layer, args, fused, stream);
}

}  // namespace packed

namespace {

/// Everything that launches a layer's kernels: where the GPU finds its description.
struct Launches {
  const std::byte* base = nullptr;
  size_t lanes_at = 0, runs_at = 0, blocks_at = 0, formats_at = 0, remaps_at = 0;
  size_t pieces_at = 0, row_lanes_at = 0;  // of lanes that picture_lanes.cu serves
  int row_parts = 0;
  LayerLaunch layer;
  int q_per_kv = 0;
  int head_dim = 0;
};

/// Whether a lane's softmax can be deferred: every run is served by a kernel that makes weights as
/// it reads scores, and nobody wants the weights.
bool is_deferred(BatchBuilder& builder, const PackedLane& lane, size_t first, size_t end) {
  if (lane.weights_wanted || lane.slots == 0) return false;
  if (builder.lanes[static_cast<size_t>(builder.runs[first].lane)].in_run_order) return false;
  for (size_t i = first; i < end; ++i) {
    if (builder.kernels[i] == kCodeKernels) return false;
  }
  return find_ranges(lane.remaps, std::span(builder.runs).subspan(first, end - first));
}

Launches describe(std::span<PackedLane> lanes, int q_per_kv, int head_dim, Kept* kept,
                  Stream& stream) {
  if (head_dim > 1024) {
    throw Error(ErrorCode::kUnsupported, "attend_packed: head_dim " + std::to_string(head_dim) +
                                             " is not served on CUDA, which takes up to 1024; use "
                                             "--device cpu");
  }
  static thread_local BatchBuilder builder;
  builder.clear();
  Launches made;
  size_t run_count = 0;
  int64_t slots = 0;
  for (const PackedLane& lane : lanes) slots += lane.slots;
  builder.key_slots = key_split_slots(slots, stream);
  for (PackedLane& lane : lanes) {
    DeviceLane of_lane{};
    of_lane.q = lane.q;
    of_lane.weights = lane.weights;
    of_lane.out = lane.out;
    of_lane.slots = lane.slots;
    of_lane.first_remap = static_cast<int>(builder.remaps.size());
    of_lane.first_weighting = of_lane.first_remap + static_cast<int>(builder.lanes.size());
    of_lane.remaps = static_cast<int>(lane.remaps.size());
    builder.remaps.insert(builder.remaps.end(), lane.remaps.begin(), lane.remaps.end());
    builder.lanes.push_back(of_lane);
    builder.first_runs.push_back(run_count);
    run_count += lane.keys.size() + lane.values.size();
    lane.guarded_remaps = 0;
    made.layer.most_slots = std::max(made.layer.most_slots, lane.slots);
  }
  builder.resize_runs(run_count);
  for (size_t i = 0; i < lanes.size(); ++i) {
    const size_t first = builder.first_runs[i];
    const size_t values = first + lanes[i].keys.size();
    const size_t end = values + lanes[i].values.size();
    const int picture = picture_lane(lanes[i], head_dim, picture_limits());
    FusedLane of_fused;
    if (picture == 0) of_fused = fused_lane(lanes[i], head_dim, most_shared_bytes());
    const int served = picture != 0 ? picture : of_fused.pair;  // in one pass
    const bool fused = served != 0;
    if (picture != 0) {
      builder.row_lanes.resize(i);
      builder.add_row_lane(lanes[i], made.layer.pictures);
    }
    builder.lanes[i].in_run_order =
        !fused && goes_in_run_order(lanes[i].values, lanes[i].remaps.size(),
                                    lanes[i].weights_wanted, lanes[i].slots);
    builder.describe_runs(lanes[i].keys, true, static_cast<int>(i), head_dim, fused, first);
    builder.describe_runs(lanes[i].values, false, static_cast<int>(i), head_dim, fused, values);
    DeviceLane& of_lane = builder.lanes[i];
    of_lane.first_keys = static_cast<int>(first);
    of_lane.last_keys = static_cast<int>(values) - 1;
    of_lane.last_values = static_cast<int>(end) - 1;
    of_lane.fused = static_cast<int8_t>(served);
    for (size_t run = first; picture == 0 && fused && run < values; ++run) {
      builder.runs[run].source = of_fused.source[run - first];
    }
    if (fused) made.layer.fused |= 1u << served;
    made.layer.unfused |= !fused;
    int& sources = made.layer.sources[static_cast<size_t>(served)];
    sources = std::max(sources, of_fused.sources);
    of_lane.deferred = !fused && is_deferred(builder, lanes[i], first, end);
    made.layer.deferred += of_lane.deferred ? 1 : 0;
    made.layer.plain |= !fused && !of_lane.deferred;
    made.layer.ordered |= of_lane.in_run_order;
    builder.split_runs(first, values, fused, builder.keys);
    builder.lanes[i].first_part = builder.values.parts;
    builder.lanes[i].parts = builder.split_runs(values, end, fused, builder.values);
  }
  if (!builder.row_lanes.empty()) builder.row_lanes.resize(lanes.size());
  builder.place_bits(kept, stream);
  Packet& packet = builder.packet;
  made.lanes_at = packet.add(std::span<const DeviceLane>(builder.lanes));
  made.runs_at = packet.add(std::span<const DeviceRun>(builder.runs));
  made.blocks_at = packet.add(std::span<const DeviceBlock>(builder.blocks));
  made.formats_at = packet.add(std::span<const PackedFormat>(builder.formats));
  made.remaps_at = packet.add(std::span<const ScoreRemap>(builder.remaps));
  made.pieces_at = packet.add(std::span<const DevicePiece>(builder.pieces));
  made.row_lanes_at = packet.add(std::span<const DeviceRowLane>(builder.row_lanes));
  std::array<std::array<size_t, kCodeKernels + 1>, 2> served_at;
  for (size_t i = 0; i <= kCodeKernels; ++i) {
    served_at[0][i] = packet.add(std::span<const int>(builder.keys.served[i].runs));
    served_at[1][i] = packet.add(std::span<const int>(builder.values.served[i].runs));
  }
  made.base = packet.upload(stream);
  if (kept != nullptr) made.base = kept->packet.place(made.base, packet.bytes(), stream);
  for (size_t i = 0; i <= kCodeKernels; ++i) {
    const auto list = [&](size_t at) { return reinterpret_cast<const int*>(made.base + at); };
    made.layer.keys[i] = {list(served_at[0][i]), 0, 1, builder.keys.served[i].splits};
    made.layer.values[i] = {list(served_at[1][i]), 0, 1, builder.values.served[i].splits};
  }
  made.layer.pictures.rows.count = static_cast<unsigned>(builder.pieces.size());
  made.row_parts = builder.row_parts;
  made.layer.lanes = static_cast<unsigned>(lanes.size());
  made.layer.key_parts = builder.keys.parts;
  made.layer.value_parts = builder.values.parts;
  made.layer.weightings = static_cast<int>(builder.remaps.size() + lanes.size());
  made.q_per_kv = q_per_kv;
  made.head_dim = made.layer.channels = head_dim;
  for (const PackedFormat& format : builder.formats) {
    made.layer.channels = std::max(made.layer.channels, format.channels());
  }
  return made;
}

AttendArgs attend_args(const Launches& launches) {
  AttendArgs args{};
  args.lanes = reinterpret_cast<const DeviceLane*>(launches.base + launches.lanes_at);
  args.runs = reinterpret_cast<const DeviceRun*>(launches.base + launches.runs_at);
  args.blocks = reinterpret_cast<const DeviceBlock*>(launches.base + launches.blocks_at);
  args.formats = reinterpret_cast<const PackedFormat*>(launches.base + launches.formats_at);
  args.remaps = reinterpret_cast<const ScoreRemap*>(launches.base + launches.remaps_at);
  args.q_per_kv = launches.q_per_kv;
  args.head_dim = launches.head_dim;
  return args;
}

/// Launches a layer that the host has described.
void launch(const Launches& launches, const AttendArgs& args, Stream& stream) {
  LayerLaunch layer = launches.layer;
  PieceLaunch& rows = layer.pictures.rows;
  rows.q_per_kv = args.q_per_kv;
  rows.head_dim = args.head_dim;
  rows.scale = args.scale;
  rows.q_moved = args.q_moved;
  rows.pieces = reinterpret_cast<const DevicePiece*>(launches.base + launches.pieces_at);
  layer.pictures.lanes =
      reinterpret_cast<const DeviceRowLane*>(launches.base + launches.row_lanes_at);
  if (launches.row_parts > 0) rows.states = place_states(rows, launches.row_parts, stream);
  launch_layer(layer, args, stream);
}

}  // namespace

void attend_packed(std::span<PackedLane> lanes, int q_per_kv, int head_dim, float scale,
                   Stream& stream) {
  if (lanes.empty()) return;
  const Launches launches = describe(lanes, q_per_kv, head_dim, nullptr, stream);
  AttendArgs args = attend_args(launches);
  args.scale = scale;
  launch(launches, args, stream);
}

struct LaneTable::State {
  explicit State(Device device) : kept(device), guarded(device, sizeof(unsigned long long)) {
    clear_now(guarded.data(), guarded.bytes());
  }
  Launches launches;
  Kept kept;
  Buffer guarded;  // slopes that were clamped
  const float* q = nullptr;
  const float* out = nullptr;
  AttendArgs args(const float* q_now, const float* out_now) {
    AttendArgs args = attend_args(launches);
    args.q_moved = q_now - q;
    args.out_moved = out_now - out;
    args.guarded = reinterpret_cast<unsigned long long*>(guarded.data());
    return args;
  }
};

LaneTable::LaneTable(Device device) : state_(std::make_unique<State>(device)) {}
LaneTable::~LaneTable() = default;

void LaneTable::describe(std::span<PackedLane> lanes, int q_per_kv, int head_dim, const float* q,
                         const float* out, bool keep, Stream& stream) {
  State& state = *state_;
  state.q = q;
  state.out = out;
  Kept* kept = keep ? &state.kept : nullptr;
  state.launches = {};
  if (!lanes.empty()) {
    state.launches = cuda::describe(lanes, q_per_kv, head_dim, kept, stream);
  }
}

int64_t LaneTable::guarded_remaps() const {
  unsigned long long count = 0;
  copy_now(&count, state_->guarded.data(), sizeof count);
  return static_cast<int64_t>(count);
}

void LaneTable::attend(const float* q, float* out, float scale, Stream& stream) {
  if (state_->launches.layer.lanes == 0) return;
  AttendArgs args = state_->args(q, out);
  args.scale = scale;
  launch(state_->launches, args, stream);
}

void unpack_blocks(const PackedFormat& format, std::span<const PackedBlock> blocks, float* out,
                   Stream& stream) {
  if (blocks.empty()) return;
  static thread_local BatchBuilder builder;
  builder.clear();
  int slot = 0;
  for (const PackedBlock& block : blocks) {
    builder.add_block(block, slot);
    slot += block.live_rows;
  }
  builder.place_bits(nullptr, stream);
  const auto* on_device = reinterpret_cast<const DeviceBlock*>(
      stream.queue().upload(builder.blocks.data(), builder.blocks.size() * sizeof(DeviceBlock)));
  int most = 0;
  for (const PackedBlock& block : blocks) most = std::max(most, block.rows);
  if (most == 0) return;
  const dim3 grid(static_cast<unsigned>(blocks.size()),
                  static_cast<unsigned>(ceil_div(most, kUnpackRows)));
  unpack<<<grid, kUnpackThreads, 0, native(stream)>>>(on_device, format, out);
  check_launch("unpack_blocks");
}

}  // namespace kvlm::cuda
