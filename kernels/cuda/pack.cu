#include <algorithm>
#include <vector>

#include "kernels/cuda/kept_lanes.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/pack.h"
#include "kernels/quantize.h"

// Compiled without fused multiply-adds: codes must equal the CPU's. One block makes the metadata
// and the codes (a byte each) of a group; then a thread packs the bytes of a row.
namespace kvlm::cuda {

namespace {

using quantize::AffineMeta;
using quantize::AffineRange;

struct DeviceJob {
  const float* x;
  uint8_t* bytes;  // (rows, channels) codes, a byte each
  std::byte* codes;
  std::byte* scales;
  std::byte* zeros;
  int rows;
};

/// The elements of one group of one job: `count` of them, `stride` apart.
struct Group {
  const float* x;
  uint8_t* bytes;
  int64_t count;
  int64_t stride;
};

/// Orders floats as integers; NaN comes last.
__device__ uint32_t order_of(float x) {
  if (isnan(x)) return 0xffffffffu;
  const uint32_t bits = __float_as_uint(x);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

__device__ float number_of(uint32_t order) {
  return __uint_as_float(order & 0x80000000u ? order & 0x7fffffffu : ~order);
}

template <class T, class Combine>
__device__ T block_all(T x, const Combine& combine) {
  __shared__ T parts[32];
  for (int offset = 16; offset > 0; offset /= 2) {
    x = combine(x, __shfl_xor_sync(0xffffffffu, x, offset));
  }
  __syncthreads();
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = x;
  __syncthreads();
  T all = parts[0];
  for (unsigned i = 1; i < blockDim.x / 32; ++i) all = combine(all, parts[i]);
  return all;
}

__device__ double block_sum(double x) {
  return block_all(x, [](double a, double b) { return a + b; });
}

/// Number `rank` of the sorted elements, from 0: four passes over their bytes, highest first.
__device__ float ranked(const Group& group, int64_t rank) {
  __shared__ unsigned histogram[256];
  __shared__ uint32_t prefix_shared;
  __shared__ unsigned long long rank_shared;
  uint32_t prefix = 0;
  for (int shift = 24; shift >= 0; shift -= 8) {
    for (unsigned i = threadIdx.x; i < 256; i += blockDim.x) histogram[i] = 0;
    __syncthreads();
    const uint32_t mask = shift == 24 ? 0 : 0xffffffffu << (shift + 8);
    for (int64_t i = threadIdx.x; i < group.count; i += blockDim.x) {
      const uint32_t order = order_of(group.x[i * group.stride]);
      if ((order & mask) == prefix) atomicAdd(&histogram[order >> shift & 255], 1u);
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      unsigned digit = 0;
      auto left = static_cast<unsigned long long>(rank);
      while (left >= histogram[digit]) left -= histogram[digit++];
      prefix_shared = prefix | digit << shift;
      rank_shared = left;
    }
    __syncthreads();
    prefix = prefix_shared;
    rank = static_cast<int64_t>(rank_shared);
  }
  return number_of(prefix);
}

/// Element number p of the `numbers` sorted ones, p between two of them interpolated linearly.
__device__ float quantile(const Group& group, int64_t numbers, float alpha) {
  const double at = static_cast<double>(numbers - 1) * static_cast<double>(alpha);
  const auto below = static_cast<int64_t>(floor(at));
  const float low = ranked(group, below);
  if (below + 1 >= numbers) return low;
  const float high = ranked(group, below + 1);
  return low + static_cast<float>(at - static_cast<double>(below)) * (high - low);
}

__device__ AffineRange range_of(const Group& group, const PackRule& rule, int levels) {
  float low = INFINITY;
  float high = -INFINITY;
  double numbers = 0;
  for (int64_t i = threadIdx.x; i < group.count; i += blockDim.x) {
    const float x = group.x[i * group.stride];
    low = x < low ? x : low;
    high = x > high ? x : high;
    if (!isnan(x)) numbers += 1;
  }
  low = block_all(low, [](float a, float b) { return fminf(a, b); });
  high = block_all(high, [](float a, float b) { return fmaxf(a, b); });
  numbers = block_sum(numbers);
  if (!(low <= high)) return quantize::affine_range(0, 0, levels, 1);
  if (rule.alpha != 0) {
    low = quantile(group, static_cast<int64_t>(numbers), rule.alpha);
    high = quantile(group, static_cast<int64_t>(numbers), 1 - rule.alpha);
  }
  return quantize::affine_range(low, high, levels, rule.kappa);
}

__device__ void pack_affine(const Group& group, const PackRule& rule, CodeFormat code, DType meta,
                            std::byte* scale, size_t scale_at, std::byte* zero, size_t zero_at) {
  const AffineRange range = range_of(group, rule, max_code(code));
  if (threadIdx.x == 0) {
    const AffineMeta made = quantize::affine_meta(range, rule);
    quantize::store_meta(scale, meta, scale_at, made.scale);
    quantize::store_meta(zero, meta, zero_at, made.zero);
  }
  for (int64_t i = threadIdx.x; i < group.count; i += blockDim.x) {
    group.bytes[i * group.stride] =
        static_cast<uint8_t>(range.code(group.x[i * group.stride], rule.rounding));
  }
}

__device__ double mean_magnitude(const Group& group) {
  double sum = 0;
  for (int64_t i = threadIdx.x; i < group.count; i += blockDim.x) {
    const float x = group.x[i * group.stride];
    sum += isnan(x) ? 0 : static_cast<double>(fabsf(x));
  }
  return block_sum(sum) / static_cast<double>(group.count);
}

__device__ void pack_ternary(const Group& group, const PackRule& rule, DType meta, std::byte* scale,
                             size_t at) {
  const auto mean = static_cast<float>(mean_magnitude(group));
  const float threshold = rule.gamma * mean;
  double beyond = 0;
  double count = 0;
  for (int64_t i = threadIdx.x; i < group.count; i += blockDim.x) {
    const float x = group.x[i * group.stride];
    const int digit = quantize::ternary_digit(x, threshold);
    group.bytes[i * group.stride] = static_cast<uint8_t>(digit);
    if (digit != 1) {
      beyond += static_cast<double>(fabsf(x));
      count += 1;
    }
  }
  beyond = block_sum(beyond);
  count = block_sum(count);
  float made = mean;
  if (rule.ternary_scale == TernaryScale::kUnit) made = 1;
  if (rule.ternary_scale == TernaryScale::kNonZero) {
    made = count == 0 ? 0 : static_cast<float>(beyond / count);
  }
  if (threadIdx.x == 0) quantize::store_meta(scale, meta, at, made);
}

__device__ void pack_signs(const Group& group, DType meta, std::byte* scale, size_t at) {
  const double mean = mean_magnitude(group);
  for (int64_t i = threadIdx.x; i < group.count; i += blockDim.x) {
    group.bytes[i * group.stride] = group.x[i * group.stride] >= 0 ? 1 : 0;
  }
  if (threadIdx.x == 0) quantize::store_meta(scale, meta, at, static_cast<float>(mean));
}

struct Rules {
  PackRule rule[2];
};

/// Block (group, job).
__global__ void make_groups(const DeviceJob* jobs, PackedFormat format, Rules rules) {
  const DeviceJob job = jobs[blockIdx.y];
  const int width = format.channels();
  const auto index = static_cast<int64_t>(blockIdx.x);
  if (format.axis == ScaleAxis::kHead) {
    const Group group{job.x, job.bytes, static_cast<int64_t>(job.rows) * width, 1};
    return pack_affine(group, rules.rule[0], format.section[0].code, format.meta, job.scales, 0,
                       job.zeros, 0);
  }
  if (format.axis == ScaleAxis::kToken) {
    const int groups = format.groups();
    const int64_t row = index / groups;
    if (row >= job.rows) return;
    const int64_t first = row * width + index % groups * format.group_size;
    const auto count =
        min(format.group_size, width - static_cast<int>(index % groups) * format.group_size);
    const Group group{job.x + first, job.bytes + first, count, 1};
    return pack_affine(group, rules.rule[0], format.section[0].code, format.meta, job.scales,
                       static_cast<size_t>(index), job.zeros, static_cast<size_t>(index));
  }
  const Group group{job.x + index, job.bytes + index, job.rows, width};
  const int first = format.section[0].channels;
  const int s = index < first ? 0 : 1;
  const PackRule& rule = rules.rule[s];
  const auto at = static_cast<size_t>(index);
  switch (rule.rule) {
    case CodeRule::kAffine: {
      // Zero points of affine sections lie side by side.
      const bool skips = s == 1 && rules.rule[0].rule != CodeRule::kAffine;
      const size_t zero = at - static_cast<size_t>(skips ? first : 0);
      return pack_affine(group, rule, format.section[s].code, format.meta, job.scales, at,
                         job.zeros, zero);
    }
    case CodeRule::kTernary:
      return pack_ternary(group, rule, format.meta, job.scales, at);
    case CodeRule::kSign:
      return pack_signs(group, format.meta, job.scales, at);
  }
}

/// A thread packs a row.
__global__ void pack_rows(const DeviceJob* jobs, PackedFormat format) {
  const DeviceJob job = jobs[blockIdx.y];
  const auto row = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (row >= job.rows || job.codes == nullptr) return;
  auto* to = reinterpret_cast<uint8_t*>(job.codes) + row * static_cast<int64_t>(format.row_bytes());
  const uint8_t* from = job.bytes + row * format.channels();
  for (int s = 0; s < format.sections; ++s) {
    const PackedSection& section = format.section[s];
    quantize::pack_row(to, section.code, from, section.channels);
    to += section.row_bytes();
    from += section.channels;
  }
}

/// The oldest row of a ring, by a warp.
__global__ void pack_oldest(const PackedRing* rings, PackedFormat format, Rules rules, DType dtype,
                            Growth* growth) {
  extern __shared__ float x[];  // (channels,), then a byte each of codes
  const PackedRing ring = rings[blockIdx.x];
  const int channels = format.channels();
  auto* bytes = reinterpret_cast<uint8_t*>(x + channels);
  const int step = growth->rows;
  const int64_t from = static_cast<int64_t>((ring.oldest + step) % ring.places) * channels;
  const std::byte* row = ring.rows + from * (dtype == DType::kF32 ? 4 : 2);
  for (int i = static_cast<int>(threadIdx.x); i < channels; i += 32) x[i] = element(row, dtype, i);
  __syncwarp();

  const int groups = format.groups();
  const int block = (ring.packed + step) / ring.block_rows;
  const int at = (ring.packed + step) % ring.block_rows;
  std::byte* scales = ring.scales + block * ring.scale_stride;
  std::byte* zeros = ring.zeros == nullptr ? nullptr : ring.zeros + block * ring.scale_stride;
  for (int i = 0; i < groups; ++i) {
    const int first = i * format.group_size;
    const Group group{x + first, bytes + first, min(format.group_size, channels - first), 1};
    const auto index = static_cast<size_t>(at) * static_cast<size_t>(groups) + i;
    pack_affine(group, rules.rule[0], format.section[0].code, format.meta, scales, index, zeros,
                index);
  }
  __syncwarp();
  if (ring.codes != nullptr) {
    auto* codes = reinterpret_cast<uint8_t*>(ring.codes + block * ring.code_stride) +
                  at * static_cast<int64_t>(format.row_bytes());
    const CodeFormat code = format.section[0].code;
    // Eight codes of any number of bits take whole bytes.
    const int some = code == CodeFormat::kTrit5 ? channels : 8;
    for (int i = static_cast<int>(threadIdx.x) * some; i < channels; i += 32 * some) {
      quantize::pack_row(codes + i / 8 * code_bits(code), code, bytes + i, min(some, channels - i));
    }
  }
  growth->count_row();
}

}  // namespace

struct RingTable::State {
  explicit State(Device device) : kept(device), growth_memory(device, sizeof(Growth)) {}
  KeptBytes kept;
  Buffer growth_memory;
  const PackedRing* rings = nullptr;
  unsigned count = 0;
  PackedFormat format;
  Rules rules;
  DType dtype = DType::kF16;

  Growth* growth() { return reinterpret_cast<Growth*>(growth_memory.data()); }
};

RingTable::RingTable(Device device) : state_(std::make_unique<State>(device)) {}
RingTable::~RingTable() = default;

void RingTable::describe(const PackedFormat& format, const std::array<PackRule, 2>& rules,
                         DType dtype, std::span<const PackedRing> rings, Stream& stream) {
  State& state = *state_;
  state.format = format;
  state.rules = {{rules[0], rules[1]}};
  state.dtype = dtype;
  state.count = static_cast<unsigned>(rings.size());
  if (rings.empty()) return;
  const std::byte* uploaded = stream.queue().upload(rings.data(), rings.size_bytes());
  state.rings =
      reinterpret_cast<const PackedRing*>(state.kept.place(uploaded, rings.size_bytes(), stream));
  check(cudaMemsetAsync(state.growth(), 0, sizeof(Growth), native(stream)), "RingPacker");
}

void RingTable::run(Stream& stream) {
  State& state = *state_;
  if (state.count == 0) return;
  const size_t shared = static_cast<size_t>(state.format.channels()) * (sizeof(float) + 1);
  pack_oldest<<<state.count, 32, shared, native(stream)>>>(state.rings, state.format, state.rules,
                                                           state.dtype, state.growth());
  check_launch("RingPacker");
}

void pack(const PackedFormat& format, const std::array<PackRule, 2>& rules,
          std::span<const PackJob> jobs, Stream& stream) {
  if (jobs.empty()) return;
  static thread_local std::vector<DeviceJob> made;
  made.clear();
  size_t bytes = 0;
  int most = 0;
  for (const PackJob& job : jobs) {
    made.push_back({job.x, nullptr, job.codes, job.scales, job.zeros, job.rows});
    bytes += static_cast<size_t>(job.rows) * static_cast<size_t>(format.channels());
    most = std::max(most, job.rows);
  }
  if (most == 0) return;
  auto* scratch = reinterpret_cast<uint8_t*>(stream.queue().scratch(kPackParts, bytes));
  for (DeviceJob& job : made) {
    job.bytes = scratch;
    scratch += static_cast<size_t>(job.rows) * static_cast<size_t>(format.channels());
  }
  const Rules both{{rules[0], rules[1]}};
  constexpr size_t kJobs = 32768;  // of one launch
  for (size_t first = 0; first < made.size(); first += kJobs) {
    const auto count = static_cast<unsigned>(std::min(kJobs, made.size() - first));
    const auto* on_device = reinterpret_cast<const DeviceJob*>(
        stream.queue().upload(made.data() + first, count * sizeof(DeviceJob)));
    int64_t groups = 1;
    if (format.axis == ScaleAxis::kChannel) groups = format.channels();
    if (format.axis == ScaleAxis::kToken) groups = int64_t{most} * format.groups();
    const unsigned threads = format.axis == ScaleAxis::kHead    ? 1024
                             : format.axis == ScaleAxis::kToken ? 32
                             : most <= 64                       ? 32
                                                                : 256;
    make_groups<<<dim3(static_cast<unsigned>(groups), count), threads, 0, native(stream)>>>(
        on_device, format, both);
    pack_rows<<<dim3(static_cast<unsigned>(ceil_div(most, 128)), count), 128, 0, native(stream)>>>(
        on_device, format);
  }
  check_launch("pack");
}

}  // namespace kvlm::cuda
