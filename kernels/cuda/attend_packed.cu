#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <string>
#include <type_traits>
#include <vector>

#include "kernels/base/error.h"
#include "kernels/cuda/attend_packed.h"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/packed_mma.cuh"
#include "kernels/quantize.h"

// Four launches a layer: scores of all keys, softmax with remaps, partial outputs of all values,
// their sums. Work is cut into items of some hundred slots; a warp takes 32 rows of a block.
namespace kvlm::cuda {

namespace {

constexpr int kWarps = 4;
constexpr int kThreads = 32 * kWarps;
constexpr int kItemSlots = 256;
constexpr int kQueries = 4;  // of one pass over codes

// ----------------------------------------------------------------- what the host says of a layer

struct DeviceBlock {
  const std::byte* codes;
  const std::byte* scales;
  const std::byte* zeros;
  const uint64_t* live;
  int rows;
  int first_slot;  // of the lane
};

struct DeviceRun {
  const std::byte* rows;  // null: packed
  const float* q;
  const uint64_t* selection;
  DType dtype;
  int format;
  int slots;
  int first_slot;
  int selected_of;
  bool selected_bit;
  // Blocks that lie evenly, counted from this one; else block_rows is 0 and items count in a list.
  DeviceBlock first_block;
  std::ptrdiff_t code_stride;
  std::ptrdiff_t scale_stride;
  int block_rows;
  int packed_rows;
};

struct DeviceLane {
  const float* q;
  float* weights;
  float* out;
  int slots;
  int first_remap, remaps;
  int first_part, parts;  // partial outputs
};

/// Some blocks (or, of full rows, some slots) of one run.
struct Item {
  int lane;
  int run;
  int first;  // block, or slot within the run
  int count;
  int part;  // of values: where its sums go
};

/// Items for the kernel that serves every format, and for those of 1, 2, 4 and 8 bits.
struct Items {
  std::vector<Item> any;
  std::array<std::vector<Item>, 4> fast;
  int parts = 0;

  void clear() {
    any.clear();
    for (std::vector<Item>& items : fast) items.clear();
    parts = 0;
  }
};

int fast_index(const SlotRun& run, int q_per_kv, int head_dim);
constexpr int kFastItemSlots = 1024;

/// Arrays that travel to the GPU in one copy.
class Packet {
 public:
  template <class T>
  size_t add(std::span<const T> values) {
    const size_t at = (bytes_.size() + 15) / 16 * 16;
    bytes_.resize(at + values.size_bytes());
    if (!values.empty()) std::memcpy(bytes_.data() + at, values.data(), values.size_bytes());
    return at;
  }
  void clear() { bytes_.clear(); }
  const std::byte* upload(Stream& stream) {
    return stream.queue().upload(bytes_.data(), std::max<size_t>(bytes_.size(), 16));
  }

 private:
  std::vector<std::byte> bytes_;
};

/// The host's side of a layer, kept between calls so that decode allocates nothing.
struct Plan {
  std::vector<DeviceLane> lanes;
  std::vector<DeviceRun> runs;
  std::vector<DeviceBlock> blocks;
  std::vector<PackedFormat> formats;
  std::vector<ScoreRemap> remaps;
  Items keys, values;
  std::vector<uint64_t> bits;                   // live bitmaps
  std::vector<std::pair<size_t, size_t>> live;  // block, its first word in `bits`
  Packet packet;

  void clear() {
    lanes.clear();
    runs.clear();
    blocks.clear();
    formats.clear();
    remaps.clear();
    keys.clear();
    values.clear();
    bits.clear();
    live.clear();
    packet.clear();
  }

  int format_of(const PackedFormat& format) {
    const auto same = [&](const PackedFormat& other) {
      return std::memcmp(&other, &format, sizeof format) == 0;
    };
    const auto at = std::find_if(formats.begin(), formats.end(), same) - formats.begin();
    if (at == static_cast<std::ptrdiff_t>(formats.size())) formats.push_back(format);
    return static_cast<int>(at);
  }

  void add_block(const PackedBlock& block, int first_slot) {
    if (block.live != nullptr) {
      live.emplace_back(blocks.size(), bits.size());
      bits.insert(bits.end(), block.live, block.live + (block.rows + 63) / 64);
    }
    blocks.push_back({block.codes, block.scales, block.zeros, nullptr, block.rows, first_slot});
  }

  /// The runs of a lane, cut into items. Returns how many items.
  int add_runs(std::span<const SlotRun> from, int lane, int q_per_kv, int head_dim, Items& all) {
    const int before = all.parts;
    int slot = 0;
    int selected = 0;
    for (const SlotRun& run : from) {
      DeviceRun made{};
      made.slots = run.slots;
      made.first_slot = slot;
      made.selection = run.selection;
      made.selected_of = run.selected_of;
      made.selected_bit = run.selected_bit;
      made.q = run.q;
      const auto index = static_cast<int>(runs.size());
      const int fast = fast_index(run, q_per_kv, head_dim);
      std::vector<Item>& items = fast < 0 ? all.any : all.fast[static_cast<size_t>(fast)];
      const int most = fast < 0 ? kItemSlots : kFastItemSlots;
      if (run.format == nullptr) {
        made.rows = run.rows;
        made.dtype = run.dtype;
        for (int first = 0; first < run.slots; first += kItemSlots) {
          items.push_back(
              {lane, index, first, std::min(kItemSlots, run.slots - first), all.parts++});
        }
      } else {
        made.format = format_of(*run.format);
        if (run.code_stride != 0 && run.blocks.size() > 4 && run.blocks[0].rows <= most) {
          add_even_run(run, slot, lane, most, made, items, all.parts);
          runs.push_back(made);
          advance(run, slot, selected);
          continue;
        }
        int at = slot;
        int rows = 0;
        auto first = static_cast<int>(blocks.size());
        for (const PackedBlock& block : run.blocks) {
          // A block of many rows is cut by rows: each part points into it.
          for (int row = 0; row < block.rows; row += most) {
            if (rows >= most) {
              items.push_back(
                  {lane, index, first, static_cast<int>(blocks.size()) - first, all.parts++});
              first = static_cast<int>(blocks.size());
              rows = 0;
            }
            PackedBlock part = block;
            part.rows = std::min(most, block.rows - row);
            part.codes += static_cast<size_t>(row) * run.format->row_bytes();
            if (run.format->axis == ScaleAxis::kToken) {
              const size_t offset = static_cast<size_t>(row) *
                                    static_cast<size_t>(run.format->groups()) *
                                    dtype_bytes(run.format->meta);
              part.scales += offset;
              if (part.zeros != nullptr) part.zeros += offset;
            }
            if (block.live != nullptr) part.live = block.live + row / 64;
            part.live_rows = part.rows;
            if (part.live != nullptr) {
              part.live_rows = 0;
              for (int i = 0; i < part.rows; ++i) {
                part.live_rows += static_cast<int>(part.live[i / 64] >> (i % 64) & 1);
              }
            }
            add_block(part, at);
            at += part.live_rows;
            rows += part.rows;
          }
        }
        if (rows > 0) {
          items.push_back(
              {lane, index, first, static_cast<int>(blocks.size()) - first, all.parts++});
        }
      }
      runs.push_back(made);
      advance(run, slot, selected);
    }
    return all.parts - before;
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

  void add_even_run(const SlotRun& run, int slot, int lane, int most, DeviceRun& made,
                    std::vector<Item>& items, int& parts) {
    const PackedBlock& first = run.blocks[0];
    made.first_block = {first.codes, first.scales, first.zeros, nullptr, first.rows, slot};
    made.code_stride = run.code_stride;
    made.scale_stride = run.scale_stride;
    made.block_rows = first.rows;
    made.packed_rows = run.slots;
    const auto blocks = static_cast<int>(run.blocks.size());
    const int step = std::max(1, most / first.rows);
    for (int block = 0; block < blocks; block += step) {
      items.push_back(
          {lane, static_cast<int>(runs.size()), block, std::min(step, blocks - block), parts++});
    }
  }
};

/// Block `index` of a run, or of the list where it does not lie evenly.
__device__ DeviceBlock block_of(const DeviceBlock* list, const DeviceRun& run, int index) {
  if (run.block_rows == 0) return list[index];
  DeviceBlock block = run.first_block;
  block.codes += index * run.code_stride;
  block.scales += index * run.scale_stride;
  if (block.zeros != nullptr) block.zeros += index * run.scale_stride;
  block.rows = min(run.block_rows, run.packed_rows - index * run.block_rows);
  block.first_slot += index * run.block_rows;
  return block;
}

struct DevicePlan {
  const DeviceLane* lanes;
  const DeviceRun* runs;
  const DeviceBlock* blocks;
  const PackedFormat* formats;
  const ScoreRemap* remaps;
  const Item* items;
  float* parts;  // (items of values, q_per_kv, head_dim)
  int q_per_kv;
  int head_dim;
  float scale;
};

// ---------------------------------------------------------------------------------------- kernels

__device__ float element(const std::byte* row, DType dtype, int i) {
  switch (dtype) {
    case DType::kF16:
      return __half2float(reinterpret_cast<const __half*>(row)[i]);
    case DType::kBF16:
      return __bfloat162float(reinterpret_cast<const __nv_bfloat16*>(row)[i]);
    default:
      return reinterpret_cast<const float*>(row)[i];
  }
}

__device__ float meta_at(const std::byte* from, DType meta, size_t i) {
  return meta == DType::kF16 ? __half2float(reinterpret_cast<const __half*>(from)[i])
                             : reinterpret_cast<const float*>(from)[i];
}

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

/// Bytes of a row with codes of a section whose values are `slope * s * c + z`.
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

/// Scores of the keys of an item. A warp folds the scales of 32 rows into the queries, where rows
/// share them; a lane multiplies one row.
__global__ void __launch_bounds__(kThreads) score_items(DevicePlan plan) {
  extern __shared__ float shared[];
  const Item item = plan.items[blockIdx.x];
  const DeviceLane lane = plan.lanes[item.lane];
  const DeviceRun run = plan.runs[item.run];
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int thread = static_cast<int>(threadIdx.x) % 32;

  if (run.rows != nullptr) {  // full rows: a warp a row
    const int64_t row_bytes =
        static_cast<int64_t>(plan.head_dim) * (run.dtype == DType::kF32 ? 4 : 2);
    for (int i = warp; i < item.count; i += kWarps) {
      const std::byte* row = run.rows + (item.first + i) * row_bytes;
      for (int query = 0; query < plan.q_per_kv; ++query) {
        float dot = 0;
        for (int c = thread; c < plan.head_dim; c += 32) {
          dot += lane.q[query * plan.head_dim + c] * element(row, run.dtype, c);
        }
        dot = warp_sum(dot);
        if (thread == 0) {
          lane.weights[static_cast<int64_t>(query) * lane.slots + run.first_slot + item.first + i] =
              plan.scale * dot;
        }
      }
    }
    return;
  }

  const PackedFormat& format = plan.formats[run.format];
  const int channels = format.channels();
  const float* queries = run.q != nullptr ? run.q : lane.q;
  float* folded = shared + warp * channels * kQueries;  // (channels, kQueries) of this warp
  const bool by_token = format.axis == ScaleAxis::kToken;
  int chunk = 0;
  for (int b = 0; b < item.count; ++b) {
    const DeviceBlock block = block_of(plan.blocks, run, item.first + b);
    for (int first = 0; first < block.rows; first += 32, ++chunk) {
      if (chunk % kWarps != warp) continue;
      const int row = first + thread;
      const bool there = row < block.rows && is_live(block, row);
      const int slot = there ? block.first_slot + live_before(block, row) : 0;
      const auto* codes = reinterpret_cast<const uint8_t*>(block.codes) +
                          static_cast<size_t>(row) * format.row_bytes();
      for (int base = 0; base < plan.q_per_kv; base += kQueries) {
        const int count = min(kQueries, plan.q_per_kv - base);
        float bias[kQueries] = {};
        __syncwarp();
        for (int c = thread; c < channels; c += 32) {
          const ScaleZero meta = by_token ? ScaleZero{1, 0} : scale_zero(format, block, 0, c);
          for (int j = 0; j < kQueries; ++j) {
            const float q = j < count ? queries[(base + j) * channels + c] * plan.scale : 0.0f;
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

/// Remaps and normalises the scores of one query head of one lane, in place.
__global__ void __launch_bounds__(256) normalise(DevicePlan plan) {
  __shared__ float parts[8];
  const DeviceLane lane = plan.lanes[blockIdx.x];
  float* scores = lane.weights + static_cast<int64_t>(blockIdx.y) * lane.slots;
  const auto first = static_cast<int>(threadIdx.x);
  const auto step = static_cast<int>(blockDim.x);
  for (int r = 0; r < lane.remaps; ++r) {
    const ScoreRemap remap = plan.remaps[lane.first_remap + r];
    float low = INFINITY;
    float high = -INFINITY;
    for (int i = first; i < remap.slots; i += step) {
      low = fminf(low, scores[remap.first + i]);
      high = fmaxf(high, scores[remap.first + i]);
    }
    low = -block_reduce(-low, true, parts);
    high = block_reduce(high, true, parts);
    if (remap.slots == 0) continue;
    float slope = 0;
    if (high > low) {
      slope = (high - low + remap.tau_low - remap.tau_high) / (high - low);
      if (remap.guarded) slope = fmaxf(slope, 0.0f);
    }
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
  sum = block_reduce(sum, false, parts);
  const float inverse = 1.0f / sum;
  for (int i = first; i < lane.slots; i += step) scores[i] *= inverse;
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

/// Weighted sums of the values of an item; a thread has one channel.
__global__ void add_values(DevicePlan plan) {
  __shared__ float weights[kItemSlots][kQueries];
  const Item item = plan.items[blockIdx.x];
  const DeviceLane lane = plan.lanes[item.lane];
  const DeviceRun run = plan.runs[item.run];
  const auto channel = static_cast<int>(threadIdx.x);
  const bool there = channel < plan.head_dim;
  float* part =
      plan.parts + static_cast<int64_t>(item.part) * plan.q_per_kv * plan.head_dim + channel;

  for (int base = 0; base < plan.q_per_kv; base += kQueries) {
    const int count = min(kQueries, plan.q_per_kv - base);
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
      load_weights(item.count, [&](int row) { return selected_slot(run, item.first + row); });
      const int64_t row_bytes =
          static_cast<int64_t>(plan.head_dim) * (run.dtype == DType::kF32 ? 4 : 2);
      for (int row = 0; there && row < item.count; ++row) {
        const float x = element(run.rows + (item.first + row) * row_bytes, run.dtype, channel);
        for (int j = 0; j < kQueries; ++j) sums[j] += weights[row][j] * x;
      }
    } else {
      const PackedFormat& format = plan.formats[run.format];
      const Channel place = there ? channel_of(format, channel) : Channel{};
      const PackedSection& section = format.section[place.section];
      const size_t offset = place.section == 0 ? 0 : format.section[0].row_bytes();
      const size_t row_bytes = format.row_bytes();
      const int bits = code_bits(section.code);
      const bool simple = bits != 0 && 8 % bits == 0;
      const size_t byte = offset + static_cast<size_t>(simple ? place.index * bits / 8 : 0);
      const int shift = simple ? place.index * bits % 8 : 0;
      const int mask = (1 << bits) - 1;
      for (int b = 0; b < item.count; ++b) {
        const DeviceBlock block = block_of(plan.blocks, run, item.first + b);
        load_weights(block.rows, [&](int row) {
          if (!is_live(block, row)) return -1;
          const int slot = block.first_slot + live_before(block, row);
          return run.selection == nullptr ? slot : selected_slot(run, slot - run.first_slot);
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
    for (int j = 0; there && j < count; ++j) part[(base + j) * plan.head_dim] = sums[j];
  }
}

__global__ void sum_parts(DevicePlan plan) {
  const DeviceLane lane = plan.lanes[blockIdx.x];
  const int elements = plan.q_per_kv * plan.head_dim;
  for (int i = static_cast<int>(threadIdx.x); i < elements; i += static_cast<int>(blockDim.x)) {
    float sum = 0;
    for (int part = 0; part < lane.parts; ++part) {
      sum += plan.parts[static_cast<int64_t>(lane.first_part + part) * elements + i];
    }
    lane.out[i] = sum;
  }
}

__global__ void unpack(const DeviceBlock* blocks, PackedFormat format, float* out) {
  const DeviceBlock& block = blocks[blockIdx.x];
  const int channels = format.channels();
  for (int row = static_cast<int>(threadIdx.x); row < block.rows;
       row += static_cast<int>(blockDim.x)) {
    if (!is_live(block, row)) continue;
    float* to = out + static_cast<int64_t>(block.first_slot + live_before(block, row)) * channels;
    const auto* codes = reinterpret_cast<const uint8_t*>(block.codes) +
                        static_cast<size_t>(row) * format.row_bytes();
    for_codes(format, codes, [&](int c, int code) {
      const ScaleZero meta = scale_zero(format, block, row, c);
      to[c] = meta.scale * static_cast<float>(code) + meta.zero;
    });
  }
}

// ------------------------------------------------------------------------------ the tensor cores
//
// For codes of 1, 2, 4 or 8 bits with scales per channel, head_dim 128 and up to 8 queries. The 16
// rows of an operand are the queries' higher parts and, below, the lower parts of the same numbers,
// so that nothing is lost to halves.

constexpr int kFastDim = 128;
constexpr int kFastQueries = 8;

/// 4 * kWords bytes as words, in one load where there is one.
template <int kWords>
__device__ void load_words(const std::byte* from, uint32_t (&to)[kWords]) {
  if constexpr (kWords == 1) {
    to[0] = __ldg(reinterpret_cast<const uint32_t*>(from));
  } else if constexpr (kWords == 2) {
    const uint2 x = __ldg(reinterpret_cast<const uint2*>(from));
    to[0] = x.x, to[1] = x.y;
  } else {
#pragma unroll
    for (int i = 0; i < kWords; i += 4) {
      const uint4 x = __ldg(reinterpret_cast<const uint4*>(from) + i / 4);
      to[i] = x.x, to[i + 1] = x.y, to[i + 2] = x.z, to[i + 3] = x.w;
    }
  }
}

/// Scores of the keys of an item: a thread has a quarter of the channels of every eighth row.
template <int kBits>
__global__ void __launch_bounds__(kThreads) score_fast(DevicePlan plan) {
  using Pairs = CodePairs<kBits>;
  constexpr int kWords = kBits;  // of 32 codes
  const Item item = plan.items[blockIdx.x];
  const DeviceLane lane = plan.lanes[item.lane];
  const DeviceRun run = plan.runs[item.run];
  const PackedFormat& format = plan.formats[run.format];
  const float* queries = run.q != nullptr ? run.q : lane.q;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int row8 = static_cast<int>(threadIdx.x) % 32 / 4;  // a query of a, a slot of b
  const int quarter = static_cast<int>(threadIdx.x) % 4;
  const bool asks = row8 < plan.q_per_kv;
  constexpr int kRowBytes = kFastDim * kBits / 8;

  for (int b = 0; b < item.count; ++b) {
    const DeviceBlock block = block_of(plan.blocks, run, item.first + b);
    const int tiles = (block.rows + 7) / 8;
    // Blocks of few rows go to one warp, the tiles of long ones to all.
    const bool alone = tiles <= 4;
    if (alone && b % kWarps != warp) continue;
    uint32_t a[8][4];
    float bias = 0;
#pragma unroll
    for (int reg = 0; reg < 16; ++reg) {
      const int pair = reg % Pairs::kPairs;
      const int first = quarter * 32 + reg / Pairs::kPairs * (32 / kBits) + pair;
      const int second = first + Pairs::kPairs;
      const float q0 = asks ? queries[row8 * kFastDim + first] * plan.scale : 0.0f;
      const float q1 = asks ? queries[row8 * kFastDim + second] * plan.scale : 0.0f;
      const auto at0 = static_cast<size_t>(first);
      const auto at1 = static_cast<size_t>(second);
      bias +=
          q0 * meta_at(block.zeros, format.meta, at0) + q1 * meta_at(block.zeros, format.meta, at1);
      const float factor = Pairs::factor(pair);
      const SplitPair parts = split(q0 * meta_at(block.scales, format.meta, at0) * factor,
                                    q1 * meta_at(block.scales, format.meta, at1) * factor);
      a[reg / 2][reg % 2 * 2] = parts.high;
      a[reg / 2][reg % 2 * 2 + 1] = parts.low;
    }
    bias += __shfl_xor_sync(0xffffffffu, bias, 1);
    bias += __shfl_xor_sync(0xffffffffu, bias, 2);

    constexpr int kUnroll = kBits <= 2 ? 4 : 2;
    const int first_tile = alone ? 0 : warp * kUnroll;
    const int tile_step = alone ? kUnroll : kWarps * kUnroll;
    for (int tile = first_tile; tile < tiles; tile += tile_step) {
      uint32_t words[kUnroll][kWords];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const int row = min((tile + u) * 8 + row8, block.rows - 1);
        load_words<kWords>(
            block.codes + static_cast<int64_t>(row) * kRowBytes + quarter * (kRowBytes / 4),
            words[u]);
      }
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        float scores[4] = {};
#pragma unroll
        for (int reg = 0; reg < 16; reg += 2) {
          const uint32_t b0 = Pairs::halves(words[u][reg / Pairs::kPairs], reg % Pairs::kPairs);
          const uint32_t b1 =
              Pairs::halves(words[u][(reg + 1) / Pairs::kPairs], (reg + 1) % Pairs::kPairs);
          mma(scores, a[reg / 2], b0, b1);
        }
        if (!asks) continue;
        const int slot = (tile + u) * 8 + quarter * 2;
        float* to =
            lane.weights + static_cast<int64_t>(row8) * lane.slots + block.first_slot + slot;
        if (slot < block.rows) to[0] = scores[0] + scores[2] + bias;
        if (slot + 1 < block.rows) to[1] = scores[1] + scores[3] + bias;
      }
    }
  }
}

/// Weights are at most 1: raised, so that small ones keep their digits as halves.
constexpr float kRaise = 4096;

/// Weighted sums of the values of an item: a thread has 16 channels of every fourth slot.
template <int kBits>
__global__ void __launch_bounds__(kThreads) add_fast(DevicePlan plan) {
  using Pairs = CodePairs<kBits>;
  constexpr int kRowBytes = kFastDim * kBits / 8;
  __shared__ float sums[kFastQueries][kFastDim];
  const Item item = plan.items[blockIdx.x];
  const DeviceLane lane = plan.lanes[item.lane];
  const DeviceRun run = plan.runs[item.run];
  const PackedFormat& format = plan.formats[run.format];
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int group = static_cast<int>(threadIdx.x) % 32 / 4;  // a query of a, 16 channels of b
  const int quarter = static_cast<int>(threadIdx.x) % 4;
  const bool asks = group < plan.q_per_kv;
  for (int i = static_cast<int>(threadIdx.x); i < kFastQueries * kFastDim; i += kThreads) {
    sums[i / kFastDim][i % kFastDim] = 0;
  }
  __syncthreads();

  for (int b = 0; b < item.count; ++b) {
    const DeviceBlock block = block_of(plan.blocks, run, item.first + b);
    const float* weights =
        lane.weights + static_cast<int64_t>(asks ? group : 0) * lane.slots + block.first_slot;
    float products[16][4] = {};
    float total = 0;
    const int tiles = (block.rows + 15) / 16;
    for (int tile = warp; tile < tiles; tile += kWarps) {
      uint32_t a[4];
      uint32_t words[2][kBits];  // slots (2 quarter, + 1) and 8 further, channel by channel
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int slot = tile * 16 + half * 8 + quarter * 2;
        const float w0 = asks && slot < block.rows ? weights[slot] : 0.0f;
        const float w1 = asks && slot + 1 < block.rows ? weights[slot + 1] : 0.0f;
        total += w0 + w1;
        const SplitPair parts = split(w0 * kRaise, w1 * kRaise);
        a[half * 2] = parts.high;
        a[half * 2 + 1] = parts.low;
        const int row0 = min(slot, block.rows - 1);
        const int row1 = min(slot + 1, block.rows - 1);
        const std::byte* from0 =
            block.codes + static_cast<int64_t>(row0) * kRowBytes + group * 2 * kBits;
        const std::byte* from1 =
            block.codes + static_cast<int64_t>(row1) * kRowBytes + group * 2 * kBits;
        if constexpr (kBits == 1) {
          const uint32_t x = __ldg(reinterpret_cast<const uint16_t*>(from0));
          const uint32_t y = __ldg(reinterpret_cast<const uint16_t*>(from1));
          words[half][0] = x | y << 16;
        } else {
          uint32_t x[kBits / 2];
          uint32_t y[kBits / 2];
          load_words<kBits / 2>(from0, x);
          load_words<kBits / 2>(from1, y);
#pragma unroll
          for (int i = 0; i < kBits / 2; ++i) {
            words[half][2 * i] = __byte_perm(x[i], y[i], 0x5410);
            words[half][2 * i + 1] = __byte_perm(x[i], y[i], 0x7632);
          }
        }
      }
#pragma unroll
      for (int channel = 0; channel < 16; ++channel) {
        const int word = channel / Pairs::kPairs;
        const int pair = channel % Pairs::kPairs;
        mma(products[channel], a, Pairs::halves(words[0][word], pair),
            Pairs::halves(words[1][word], pair));
      }
    }
    total += __shfl_xor_sync(0xffffffffu, total, 1);
    total += __shfl_xor_sync(0xffffffffu, total, 2);
    if (asks) {
#pragma unroll
      for (int channel = 0; channel < 16; ++channel) {
        const float factor = Pairs::factor(channel % Pairs::kPairs) / kRaise;
#pragma unroll
        for (int side = 0; side < 2; ++side) {
          const int at = (quarter * 2 + side) * 16 + channel;
          const float product = (products[channel][side] + products[channel][side + 2]) * factor;
          const auto meta = static_cast<size_t>(at);
          atomicAdd(&sums[group][at], meta_at(block.scales, format.meta, meta) * product +
                                          meta_at(block.zeros, format.meta, meta) * total);
        }
      }
    }
  }
  __syncthreads();
  float* part = plan.parts + static_cast<int64_t>(item.part) * plan.q_per_kv * plan.head_dim;
  for (int i = static_cast<int>(threadIdx.x); i < plan.q_per_kv * kFastDim; i += kThreads) {
    part[i] = sums[i / kFastDim][i % kFastDim];
  }
}

template <int kBits>
void launch_fast(const DevicePlan& device, size_t keys, const Item* key_items, Stream& stream) {
  DevicePlan plan = device;
  plan.items = key_items;
  score_fast<kBits><<<static_cast<unsigned>(keys), kThreads, 0, native(stream)>>>(plan);
}

template <int kBits>
void launch_fast_values(const DevicePlan& device, size_t values, const Item* value_items,
                        Stream& stream) {
  DevicePlan plan = device;
  plan.items = value_items;
  add_fast<kBits><<<static_cast<unsigned>(values), kThreads, 0, native(stream)>>>(plan);
}

/// Which of the four widths, or -1.
int fast_index(const SlotRun& run, int q_per_kv, int head_dim) {
  if (run.format == nullptr || run.selection != nullptr) return -1;
  const PackedFormat& format = *run.format;
  const PackedSection& section = format.section[0];
  if (format.axis != ScaleAxis::kChannel || format.sections != 1 || !section.zero_stored ||
      section.slope != 1 || section.channels != kFastDim || head_dim != kFastDim ||
      q_per_kv > kFastQueries) {
    return -1;
  }
  const int bits = code_bits(section.code);
  if (section.code > CodeFormat::kBits8 || 8 % bits != 0) return -1;
  // Dead rows keep their place among codes but not among slots.
  for (const PackedBlock& block : run.blocks) {
    if (block.live != nullptr) return -1;
    if (run.code_stride != 0) break;  // they lie evenly: all are alike
  }
  return std::countr_zero(static_cast<unsigned>(bits));
}

}  // namespace

void attend_packed(std::span<PackedLane> lanes, int q_per_kv, int head_dim, float scale,
                   Stream& stream) {
  if (lanes.empty()) return;
  if (head_dim > 1024) {
    throw Error(ErrorCode::kUnsupported, "attend_packed: head_dim " + std::to_string(head_dim) +
                                             " is not served on CUDA, which takes up to 1024; use "
                                             "--device cpu");
  }
  static thread_local Plan plan;
  plan.clear();
  for (PackedLane& lane : lanes) {
    const auto index = static_cast<int>(plan.lanes.size());
    DeviceLane made{};
    made.q = lane.q;
    made.weights = lane.weights;
    made.out = lane.out;
    made.slots = lane.slots;
    made.first_remap = static_cast<int>(plan.remaps.size());
    made.remaps = static_cast<int>(lane.remaps.size());
    plan.remaps.insert(plan.remaps.end(), lane.remaps.begin(), lane.remaps.end());
    plan.add_runs(lane.keys, index, q_per_kv, head_dim, plan.keys);
    made.first_part = plan.values.parts;
    made.parts = plan.add_runs(lane.values, index, q_per_kv, head_dim, plan.values);
    plan.lanes.push_back(made);
    lane.guarded_remaps = 0;
  }
  // Bitmaps travel first, by themselves, so that blocks can say where theirs is.
  if (!plan.bits.empty()) {
    const auto* bits = reinterpret_cast<const uint64_t*>(
        stream.queue().upload(plan.bits.data(), plan.bits.size() * sizeof(uint64_t)));
    for (const auto& [block, word] : plan.live) plan.blocks[block].live = bits + word;
  }
  Packet& packet = plan.packet;
  const size_t lanes_at = packet.add(std::span<const DeviceLane>(plan.lanes));
  const size_t runs_at = packet.add(std::span<const DeviceRun>(plan.runs));
  const size_t blocks_at = packet.add(std::span<const DeviceBlock>(plan.blocks));
  const size_t formats_at = packet.add(std::span<const PackedFormat>(plan.formats));
  const size_t remaps_at = packet.add(std::span<const ScoreRemap>(plan.remaps));
  std::array<size_t, 5> keys_at{};
  std::array<size_t, 5> values_at{};
  for (const bool keys : {true, false}) {
    const Items& items = keys ? plan.keys : plan.values;
    std::array<size_t, 5>& at = keys ? keys_at : values_at;
    for (size_t i = 0; i < 4; ++i) at[i] = packet.add(std::span<const Item>(items.fast[i]));
    at[4] = packet.add(std::span<const Item>(items.any));
  }
  const std::byte* base = packet.upload(stream);
  const auto elements = static_cast<size_t>(q_per_kv) * static_cast<size_t>(head_dim);
  DevicePlan device{
      reinterpret_cast<const DeviceLane*>(base + lanes_at),
      reinterpret_cast<const DeviceRun*>(base + runs_at),
      reinterpret_cast<const DeviceBlock*>(base + blocks_at),
      reinterpret_cast<const PackedFormat*>(base + formats_at),
      reinterpret_cast<const ScoreRemap*>(base + remaps_at),
      reinterpret_cast<const Item*>(base + keys_at[4]),
      reinterpret_cast<float*>(stream.queue().scratch(
          kLaneParts, (static_cast<size_t>(plan.values.parts) + 1) * elements * sizeof(float))),
      q_per_kv,
      head_dim,
      scale};
  int channels = head_dim;
  for (const PackedFormat& format : plan.formats) channels = std::max(channels, format.channels());
  const size_t shared = sizeof(float) * kWarps * kQueries * static_cast<size_t>(channels);
  const auto items_at = [&](size_t at) { return reinterpret_cast<const Item*>(base + at); };
  const auto launch_all = [&](const Items& items, const std::array<size_t, 5>& at, auto&& launch) {
    for (size_t i = 0; i < 4; ++i) {
      if (items.fast[i].empty()) continue;
      const size_t count = items.fast[i].size();
      if (i == 0) launch(std::integral_constant<int, 1>{}, count, items_at(at[i]));
      if (i == 1) launch(std::integral_constant<int, 2>{}, count, items_at(at[i]));
      if (i == 2) launch(std::integral_constant<int, 4>{}, count, items_at(at[i]));
      if (i == 3) launch(std::integral_constant<int, 8>{}, count, items_at(at[i]));
    }
  };
  launch_all(plan.keys, keys_at, [&](auto bits, size_t count, const Item* items) {
    launch_fast<decltype(bits)::value>(device, count, items, stream);
  });
  if (!plan.keys.any.empty()) {
    score_items<<<static_cast<unsigned>(plan.keys.any.size()), kThreads, shared, native(stream)>>>(
        device);
  }
  const dim3 heads(static_cast<unsigned>(plan.lanes.size()), static_cast<unsigned>(q_per_kv));
  normalise<<<heads, 256, 0, native(stream)>>>(device);
  launch_all(plan.values, values_at, [&](auto bits, size_t count, const Item* items) {
    launch_fast_values<decltype(bits)::value>(device, count, items, stream);
  });
  device.items = items_at(values_at[4]);
  if (!plan.values.any.empty()) {
    const auto threads = static_cast<unsigned>(ceil_div(head_dim, 32) * 32);
    add_values<<<static_cast<unsigned>(plan.values.any.size()), threads, 0, native(stream)>>>(
        device);
  }
  sum_parts<<<static_cast<unsigned>(plan.lanes.size()), 256, 0, native(stream)>>>(device);
  check_launch("attend_packed");
}

void unpack_blocks(const PackedFormat& format, std::span<const PackedBlock> blocks, float* out,
                   Stream& stream) {
  if (blocks.empty()) return;
  static thread_local Plan plan;
  plan.clear();
  int slot = 0;
  for (const PackedBlock& block : blocks) {
    plan.add_block(block, slot);
    slot += block.live_rows;
  }
  if (!plan.bits.empty()) {
    const auto* bits = reinterpret_cast<const uint64_t*>(
        stream.queue().upload(plan.bits.data(), plan.bits.size() * sizeof(uint64_t)));
    for (const auto& [block, word] : plan.live) plan.blocks[block].live = bits + word;
  }
  const auto* on_device = reinterpret_cast<const DeviceBlock*>(
      stream.queue().upload(plan.blocks.data(), plan.blocks.size() * sizeof(DeviceBlock)));
  unpack<<<static_cast<unsigned>(blocks.size()), 128, 0, native(stream)>>>(on_device, format, out);
  check_launch("unpack_blocks");
}

}  // namespace kvlm::cuda
