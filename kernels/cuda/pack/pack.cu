#include <algorithm>
#include <vector>

#include "kernels/cuda/device/launch.cuh"
#include "kernels/cuda/pack/pack.h"
#include "kernels/cuda/pack/pack_rows.cuh"

// Quantizes prompts, and windows that pack_windows.cu does not take. Scales per token: one warp per
// token (pack_tokens). Scales per channel or head: parts of rows, so that a few long groups fill a
// GPU, are reduced by one launch and coded by the next (pack_channels). Quantiles take a radix
// search (count_digits). Sums of a part depend on that part alone, so results do not depend on the
// batch. Compiled without fused multiply-adds: codes must equal the CPU's.
namespace kvlm::cuda {

using namespace packing;

namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kHeld = 16;  // elements of a thread
constexpr int kPartRows = kWarps * kHeld;

struct DeviceJob {
  const void* x;
  uint8_t* codes;
  std::byte* scales;
  std::byte* zeros;
  int rows;
  int64_t first_part;  // of all jobs' parts
  int ranged_with;     // first job with the same range: itself, or an earlier one (joins_last)
};

// ------------------------------------------------------------------------------ groups of channels

/// Reduction of elements: the smallest and the largest, or two sums.
struct Pair {
  double a;
  double b;
};

/// Reduction of no elements.
__device__ Pair nothing(bool ends) { return ends ? Pair{INFINITY, -INFINITY} : Pair{0, 0}; }

__device__ Pair joined(const Pair& x, const Pair& y, bool ends) {
  if (ends) return {y.a < x.a ? y.a : x.a, y.b > x.b ? y.b : x.b};
  return {x.a + y.a, x.b + y.b};
}

/// Reduces the pairs of each warp lane over the warps.
__device__ Pair block_joined(const Pair& mine, bool ends) {
  __shared__ Pair of_warps[kWarps][32];
  __syncthreads();
  of_warps[warp_id()][warp_lane_id()] = mine;
  __syncthreads();
  Pair all = of_warps[0][warp_lane_id()];
  const int warps = static_cast<int>(blockDim.x) / 32;
  for (int i = 1; i < warps; ++i) all = joined(all, of_warps[i][warp_lane_id()], ends);
  return all;
}

/// The smallest and largest element, or the sum of magnitudes; NaN is skipped.
__device__ Pair pair_of(const float (&x)[kHeld], bool ends) {
  if (ends) {
    float low = INFINITY;
    float high = -INFINITY;
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      low = x[i] < low ? x[i] : low;
      high = x[i] > high ? x[i] : high;
    }
    return {low, high};
  }
  double sum = 0;
#pragma unroll
  for (int i = 0; i < kHeld; ++i) sum += isnan(x[i]) ? 0 : static_cast<double>(fabsf(x[i]));
  return {sum, 0};
}

/// Adjacent channels of a section, one per warp lane, whose codes fill whole bytes.
struct Strip {
  int section;
  int first;     // of all channels
  int channels;  // 32 or fewer
  size_t byte;   // of a row
};

constexpr int strip_channels(CodeFormat code) { return 32 / unit_codes(code) * unit_codes(code); }

constexpr int strips_of(const PackedSection& section) {
  return static_cast<int>(ceil_div(section.channels, strip_channels(section.code)));
}

__device__ Strip strip_of(const PackedFormat& format, int index) {
  const int before = strips_of(format.section[0]);
  const int s = index < before ? 0 : 1;
  const PackedSection& section = format.section[s];
  const int width = strip_channels(section.code);
  const int first = (index - s * before) * width;
  return {s, first + (s == 0 ? 0 : format.section[0].channels),
          min(width, section.channels - first),
          code_row_bytes(section.code, first) + (s == 0 ? 0 : format.section[0].row_bytes())};
}

__device__ const PackRule& rule_of(const PackedFormat& format, const Rules& rules, int channel) {
  return rules.rule[channel < format.section[0].channels ? 0 : 1];
}

/// Whether ranges of groups over several tokens need the quantile search.
VLM_HD inline bool has_quantiles(ScaleAxis axis, const PackRule& rule) {
  return axis == ScaleAxis::kHead ||
         (axis == ScaleAxis::kChannel && rule.rule == CodeRule::kAffine && rule.alpha != 0);
}

VLM_HD inline bool scales_beyond(const PackRule& rule) {
  return rule.rule == CodeRule::kTernary && rule.ternary_scale == TernaryScale::kNonZero;
}

/// Work on a part of a strip.
enum class Step : uint8_t {
  kWhole,  ///< everything: each job is one part
  kPairs,  ///< reduces it to a pair
  kCodes,  ///< codes it by the pairs of all parts
};

/// Pairs of the parts of jobs, (parts, channels).
struct Pairs {
  Pair* ends;    // of each part; with quantiles, of the group, at its first part
  Pair* beyond;  // of ternary codes that are not 0: their magnitudes and how many
};

/// Block (strip, part, job), with warps for the longest part. Surplus warps do not change results.
template <class T>
__global__ void __launch_bounds__(kThreads, 4)
    pack_channels(const DeviceJob* jobs, const __grid_constant__ PackedFormat format,
                  const __grid_constant__ Rules rules, Step step, Pairs pairs) {
  __shared__ uint8_t codes[kPartRows][32];
  const DeviceJob job = jobs[blockIdx.z];
  const int part = static_cast<int>(blockIdx.y);
  const int rows = min(kPartRows, job.rows - part * kPartRows);
  if (rows <= 0) return;
  const Strip strip = strip_of(format, static_cast<int>(blockIdx.x));
  const PackRule& rule = rules.rule[strip.section];
  const PackedSection& section = format.section[strip.section];
  const int width = format.channels();
  const int warp_lane = warp_lane_id();
  const int warp = warp_id();
  const bool ends = rule.rule == CodeRule::kAffine;
  const bool quantiles = has_quantiles(format.axis, rule);
  const bool of_head = format.axis == ScaleAxis::kHead;
  // A thread without a channel repeats the last channel and stores nothing.
  const int channel = strip.first + min(warp_lane, strip.channels - 1);
  const bool stores = warp == 0 && warp_lane < strip.channels;
  const int64_t pair_at = job.first_part * width + (of_head ? 0 : channel);
  if (step == Step::kPairs && quantiles) return;

  float x[kHeld];
  const T* from =
      static_cast<const T*>(job.x) + static_cast<int64_t>(part) * kPartRows * width + channel;
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    const int row = warp * kHeld + i;
    x[i] = row < rows ? load_float(from[static_cast<int64_t>(row) * width]) : NAN;
  }
  Pair all;
  if (step != Step::kCodes) {
    all = block_joined(pair_of(x, ends), ends);
    if (step == Step::kPairs) {
      if (stores) pairs.ends[pair_at + static_cast<int64_t>(part) * width] = all;
      return;
    }
  } else if (quantiles) {
    all = pairs.ends[pair_at];
  } else {
    all = nothing(ends);
    for (int i = warp; i * kPartRows < job.rows; i += kWarps) {
      all = joined(all, pairs.ends[pair_at + static_cast<int64_t>(i) * width], ends);
    }
    all = block_joined(all, ends);
  }

  const auto at = static_cast<size_t>(of_head ? 0 : channel);
  const bool stores_scale = stores && part == 0 && (!of_head || channel == 0);
  switch (rule.rule) {
    case CodeRule::kAffine: {
      const auto low = static_cast<float>(all.a);
      const auto high = static_cast<float>(all.b);
      const AffineRange range =
          quantize::affine_range(low, high, max_code(section.code), rule.kappa);
      if (stores_scale) {
        // Zero points are stored for affine sections only, contiguously.
        const bool skips = strip.section == 1 && rules.rule[0].rule != CodeRule::kAffine;
        const auto skipped = static_cast<size_t>(skips ? format.section[0].channels : 0);
        store_range(range, rule, format.meta, job.scales, at, job.zeros, at - skipped);
      }
#pragma unroll
      for (int i = 0; i < kHeld; ++i) {
        const int row = warp * kHeld + i;
        if (row < rows)
          codes[row][warp_lane] = static_cast<uint8_t>(range.code(x[i], rule.rounding));
      }
      break;
    }
    case CodeRule::kTernary: {
      const auto mean = static_cast<float>(all.a / static_cast<double>(job.rows));
      const float threshold = rule.gamma * mean;
      Pair beyond = nothing(false);
#pragma unroll
      for (int i = 0; i < kHeld; ++i) {
        const int digit = quantize::ternary_digit(x[i], threshold);
        codes[warp * kHeld + i][warp_lane] = static_cast<uint8_t>(digit);
        if (digit != 1) beyond = joined(beyond, {static_cast<double>(fabsf(x[i])), 1}, false);
      }
      float scale = rule.ternary_scale == TernaryScale::kUnit ? 1 : mean;
      if (scales_beyond(rule)) {
        beyond = block_joined(beyond, false);
        if (step == Step::kCodes && stores) {
          pairs.beyond[pair_at + static_cast<int64_t>(part) * width] = beyond;
        }
        scale = beyond.b == 0 ? 0 : static_cast<float>(beyond.a / beyond.b);
      }
      if (stores_scale) quantize::store_meta(job.scales, format.meta, at, scale);
      break;
    }
    case CodeRule::kSign:
#pragma unroll
      for (int i = 0; i < kHeld; ++i) codes[warp * kHeld + i][warp_lane] = x[i] >= 0 ? 1 : 0;
      if (stores_scale) {
        quantize::store_meta(job.scales, format.meta, at,
                             static_cast<float>(all.a / static_cast<double>(job.rows)));
      }
      break;
    case CodeRule::kCodebook:  // scales per token alone
    case CodeRule::kNormCodebook:
      break;
  }

  if (job.codes == nullptr) return;
  __syncthreads();
  const int units = static_cast<int>(ceil_div(strip.channels, unit_codes(section.code)));
  const size_t row_bytes = format.row_bytes();
  uint8_t* to = job.codes + static_cast<size_t>(part) * kPartRows * row_bytes + strip.byte;
  for (int i = static_cast<int>(threadIdx.x); i < rows * units; i += static_cast<int>(blockDim.x)) {
    const int row = i / units;
    pack_unit(rule, to + static_cast<size_t>(row) * row_bytes, section.code, codes[row],
              strip.channels, i % units);
  }
}

/// TernaryScale::kNonZero: means over all parts, one thread per channel. Block (channels, job).
__global__ void store_means(const DeviceJob* jobs, const __grid_constant__ PackedFormat format,
                            const __grid_constant__ Rules rules, Pairs pairs) {
  const DeviceJob job = jobs[blockIdx.y];
  const int width = format.channels();
  const int channel = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (channel >= width || !scales_beyond(rule_of(format, rules, channel))) return;
  Pair all = nothing(false);
  for (int i = 0; i * kPartRows < job.rows; ++i) {
    all = joined(all, pairs.beyond[(job.first_part + i) * width + channel], false);
  }
  quantize::store_meta(job.scales, format.meta, static_cast<size_t>(channel),
                       all.b == 0 ? 0 : static_cast<float>(all.a / all.b));
}

// --------------------------------------------------------------------- quantiles of channels

// Radix search, 8 bits per pass, highest first: a launch counts the next digit of all numbers with
// a target's prefix, over any number of blocks; the next launch extends the prefix.
constexpr int kTargets = 4;   // the numbers below and above both quantiles
constexpr int kDigits = 256;  // of a byte
constexpr int kPasses = 4;
constexpr int kColumns = kWarps;   // of a block, one per warp in go_on()
constexpr int kColumnRows = 1024;  // of a block

struct Search {
  uint32_t prefix[kTargets];  // digits found so far, then zeros
  uint32_t rank[kTargets];    // among the numbers with this prefix
  uint32_t numbers;           // of the group

  /// The first target with the same prefix, whose counts both use.
  __device__ int like(int target) const {
    int first = 0;
    while (prefix[first] != prefix[target]) ++first;
    return first;
  }
};

/// Searches of all groups, and their counts.
struct Searches {
  Search* states;    // (groups, kPasses), before each pass
  unsigned* counts;  // (groups, kPasses, kTargets, kDigits)
};

/// Advances the state to before `pass`, by the counts of the last pass. By a warp.
__device__ void go_on(Search& search, const Searches& searches, int64_t group, int pass,
                      float alpha) {
  const int warp_lane = warp_lane_id();
  const unsigned* counts = searches.counts + (group * kPasses + pass - 1) * kTargets * kDigits;
  if (pass == 1) {
    unsigned numbers = 0;
    for (int i = warp_lane; i < kDigits; i += 32) numbers += counts[i];
    numbers = __reduce_add_sync(kAll, numbers);
    const QuantileRank low(numbers, alpha);
    const QuantileRank high(numbers, 1 - alpha);
    if (warp_lane == 0) search = {{}, {low.below, low.above, high.below, high.above}, numbers};
  } else if (warp_lane == 0) {
    search = searches.states[group * kPasses + pass - 1];
  }
  __syncwarp();
  uint32_t prefix[kTargets];
  uint32_t rank[kTargets];
#pragma unroll
  for (int t = 0; t < kTargets; ++t) {
    unsigned bins[kDigits / 32];
    const unsigned* from = counts + search.like(t) * kDigits + warp_lane * (kDigits / 32);
    unsigned sum = 0;
    for (int i = 0; i < kDigits / 32; ++i) sum += bins[i] = from[i];
    unsigned end = sum;  // with those of lower warp lanes
    for (int offset = 1; offset < 32; offset *= 2) {
      const unsigned lower = __shfl_up_sync(kAll, end, offset);
      if (warp_lane >= offset) end += lower;
    }
    unsigned left = search.rank[t] - (end - sum);
    unsigned digit = warp_lane * (kDigits / 32);
    for (int i = 0; i < kDigits / 32 - 1 && left >= bins[i]; ++i, ++digit) left -= bins[i];
    const int holder =
        max(__ffs(static_cast<int>(__ballot_sync(kAll, search.rank[t] < end))), 1) - 1;
    prefix[t] = search.prefix[t] | __shfl_sync(kAll, digit, holder) << (32 - 8 * pass);
    rank[t] = __shfl_sync(kAll, left, holder);
  }
  __syncwarp();
  if (warp_lane == 0) {
    for (int t = 0; t < kTargets; ++t) {
      search.prefix[t] = prefix[t];
      search.rank[t] = rank[t];
    }
  }
  __syncwarp();
}

/// Counts digits number `pass`. Block (columns, rows, job). With kHead, all elements are read as
/// rows of kColumns.
template <class T>
__global__ void __launch_bounds__(kThreads)
    count_digits(const DeviceJob* jobs, const __grid_constant__ PackedFormat format,
                 const __grid_constant__ Rules rules, Searches searches, int pass) {
  __shared__ unsigned counts[kColumns][kTargets * kDigits + 4];  // neighbours in other banks
  __shared__ Search found[kColumns];
  const DeviceJob job = jobs[blockIdx.z];
  const int width = format.channels();
  const bool of_head = format.axis == ScaleAxis::kHead;
  const int stride = of_head ? kColumns : width;
  const int groups = of_head ? 1 : width;
  const int first = static_cast<int>(blockIdx.x) * kColumns;
  const int64_t first_group = static_cast<int64_t>(job.ranged_with) * groups + first;
  const int64_t elements = static_cast<int64_t>(job.rows) * width;
  const int64_t begin = static_cast<int64_t>(blockIdx.y) * kColumnRows;
  if (begin * stride >= elements) return;

  for (int i = static_cast<int>(threadIdx.x); i < kTargets * kDigits; i += kThreads) {
    for (int column = 0; column < kColumns; ++column) counts[column][i] = 0;
  }
  if (const int column = warp_id(); pass == 0) {
    if (warp_lane_id() == 0) found[column] = {};
  } else if (first + column < groups) {
    go_on(found[column], searches, first_group + column, pass,
          rule_of(format, rules, first + column).alpha);
    if (blockIdx.y == 0 && warp_lane_id() == 0) {
      searches.states[(first_group + column) * kPasses + pass] = found[column];
    }
  }
  __syncthreads();

  const int column = static_cast<int>(threadIdx.x) % kColumns;
  const Search& search = found[of_head ? 0 : column];
  uint32_t prefix[kTargets];
  bool counted[kTargets];
#pragma unroll
  for (int t = 0; t < kTargets; ++t) {
    prefix[t] = search.prefix[t];
    counted[t] = search.like(t) == t;
  }
  const int shift = 24 - 8 * pass;
  const uint32_t mask = pass == 0 ? 0 : kAll << (shift + 8);
  constexpr int kStep = kThreads / kColumns;
  constexpr int kAhead = 8;  // loads of a thread in flight
  const int64_t end = min(begin + kColumnRows, ceil_div(elements, stride));
  for (int64_t row = begin + static_cast<int>(threadIdx.x) / kColumns; row < end;
       row += kStep * kAhead) {
    float x[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int64_t at = (row + i * kStep) * stride + first + column;
      const bool present = row + i * kStep < end && at < elements && first + column < stride;
      x[i] = present ? load_float(static_cast<const T*>(job.x)[at]) : NAN;
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (isnan(x[i])) continue;
      const uint32_t order = order_of(x[i]);
#pragma unroll
      for (int t = 0; t < kTargets; ++t) {
        if (counted[t] && (order & mask) == prefix[t]) {
          atomicAdd(&counts[column][t * kDigits + (order >> shift & 255)], 1u);
        }
      }
    }
  }
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < kTargets * kDigits; i += kThreads) {
    unsigned sum = 0;
    for (int c = 0; c < kColumns; ++c) {
      sum += counts[c][i];
      if ((of_head && c + 1 < kColumns) || sum == 0) continue;
      const int64_t group = first_group + (of_head ? 0 : c);
      atomicAdd(searches.counts + (group * kPasses + pass) * kTargets * kDigits + i, sum);
      sum = 0;
    }
  }
}

/// Quantiles from the numbers found, one warp per group. Block (groups, job).
__global__ void __launch_bounds__(kThreads)
    make_quantiles(const DeviceJob* jobs, const __grid_constant__ PackedFormat format,
                   const __grid_constant__ Rules rules, Searches searches, Pairs pairs) {
  __shared__ Search found[kWarps];
  const DeviceJob job = jobs[blockIdx.y];
  const int width = format.channels();
  const int groups = format.axis == ScaleAxis::kHead ? 1 : width;
  const int group = static_cast<int>(blockIdx.x) * kWarps + warp_id();
  if (group >= groups) return;
  const float alpha = rule_of(format, rules, group).alpha;
  Search& search = found[warp_id()];
  go_on(search, searches, static_cast<int64_t>(job.ranged_with) * groups + group, kPasses, alpha);
  if (warp_lane_id() != 0) return;
  Pair made = nothing(true);
  if (search.numbers != 0) {
    float ends[2];
    for (int i = 0; i < 2; ++i) {
      const QuantileRank rank(search.numbers, i == 0 ? alpha : 1 - alpha);
      const float low = number_of(search.prefix[2 * i]);
      ends[i] = alpha == 0 ? low : rank.between(low, number_of(search.prefix[2 * i + 1]));
    }
    made = {ends[0], ends[1]};
  }
  pairs.ends[job.first_part * width + group] = made;
}

constexpr int kRowWarps = 4;
constexpr int kWarpRows = 8;  // per warp of the longest job

/// Scales per token; a warp packs one token after the other. Block (rows, job).
template <class T>
__global__ void __launch_bounds__(kRowWarps * 32)
    pack_tokens(const DeviceJob* jobs, const __grid_constant__ PackedFormat format,
                const __grid_constant__ Rules rules) {
  extern __shared__ float rooms[];
  const DeviceJob job = jobs[blockIdx.y];
  const int channels = format.channels();
  const int first = static_cast<int>(blockIdx.x) * kRowWarps + warp_id();
  const int step = static_cast<int>(gridDim.x) * kRowWarps;
  const T* rows = static_cast<const T*>(job.x);
  if (is_short_row(format, rules.rule[0]) && is_aligned(rows, 4 * sizeof(T))) {
#pragma unroll 2
    for (int row = first; row < job.rows; row += step) {
      float x[4];
      load_group<4>(rows + static_cast<int64_t>(row) * kShortRow + 4 * warp_lane_id(), x);
      pack_short_row(x, format, rules.rule[0], job.scales, job.zeros, static_cast<size_t>(row),
                     job.codes);
    }
    return;
  }
  float* x = rooms + static_cast<size_t>(warp_id()) * row_room(channels) / sizeof(float);
  for (int row = first; row < job.rows; row += step) {
    const T* from = rows + static_cast<int64_t>(row) * channels;
    for (int i = warp_lane_id(); i < channels; i += 32) x[i] = load_float(from[i]);
    __syncwarp();
    pack_token(x, format, rules.rule[0], job.scales, job.zeros, static_cast<size_t>(row),
               job.codes);
    __syncwarp();  // the next row overwrites x
  }
}

constexpr int64_t kJobs = 32768;         // of one launch
constexpr int64_t kSearchGroups = 1024;  // of one launch: 16 KiB of counts each

/// Uploaded jobs.
struct PackLaunch {
  const DeviceJob* jobs;
  unsigned count;
  int most;  // rows of a job
  int64_t parts;
};

PackLaunch describe_jobs(std::span<const PackJob> jobs, Stream& stream) {
  static thread_local std::vector<DeviceJob> made;
  made.clear();
  PackLaunch launch{nullptr, static_cast<unsigned>(jobs.size()), 0, 0};
  for (const PackJob& job : jobs) {
    const int ranged_with =
        job.joins_last ? made.back().ranged_with : static_cast<int>(made.size());
    made.push_back({job.x, reinterpret_cast<uint8_t*>(job.codes), job.scales, job.zeros, job.rows,
                    launch.parts, ranged_with});
    launch.parts += ceil_div(job.rows, kPartRows);
    launch.most = std::max(launch.most, job.rows);
  }
  launch.jobs = reinterpret_cast<const DeviceJob*>(
      stream.queue().upload(made.data(), made.size() * sizeof(DeviceJob)));
  return launch;
}

/// Groups of a job: its channels, or one for the whole head.
int64_t channel_groups(const PackedFormat& format) {
  return format.axis == ScaleAxis::kHead ? 1 : format.channels();
}

unsigned grid_size(int64_t all, int64_t of_block) {
  return static_cast<unsigned>(ceil_div(all, of_block));
}

template <class T>
void find_quantiles(const PackedFormat& format, const Rules& rules, const PackLaunch& launch,
                    const Searches& searches, const Pairs& pairs, Stream& stream) {
  const int64_t groups = channel_groups(format);
  const size_t bytes =
      static_cast<size_t>(groups) * launch.count * kPasses * kTargets * kDigits * sizeof(unsigned);
  check(cudaMemsetAsync(searches.counts, 0, bytes, native(stream)), "pack");
  const int64_t rows = format.axis == ScaleAxis::kHead
                           ? ceil_div(int64_t{launch.most} * format.channels(), kColumns)
                           : launch.most;
  const dim3 grid(grid_size(groups, kColumns), grid_size(rows, kColumnRows), launch.count);
  for (int pass = 0; pass < kPasses; ++pass) {
    count_digits<T>
        <<<grid, kThreads, 0, native(stream)>>>(launch.jobs, format, rules, searches, pass);
  }
  make_quantiles<<<dim3(grid_size(groups, kWarps), launch.count), kThreads, 0, native(stream)>>>(
      launch.jobs, format, rules, searches, pairs);
}

/// Packs with scales per channel or head.
template <class T>
void pack_groups(const PackedFormat& format, const Rules& rules, bool quantiles,
                 const PackLaunch& launch, Stream& stream) {
  const auto width = static_cast<size_t>(format.channels());
  int strips = 0;
  for (int i = 0; i < format.sections; ++i) strips += strips_of(format.section[i]);
  const dim3 grid(static_cast<unsigned>(strips), grid_size(launch.most, kPartRows), launch.count);
  const unsigned threads = 32 * std::min<unsigned>(kWarps, grid_size(launch.most, kHeld));
  const auto run = [&](Step step, const Pairs& pairs) {
    pack_channels<T><<<grid, threads, 0, native(stream)>>>(launch.jobs, format, rules, step, pairs);
  };
  if (launch.most <= kPartRows && !quantiles) return run(Step::kWhole, {});

  const size_t pairs_bytes = static_cast<size_t>(launch.parts) * width * sizeof(Pair);
  const auto states = static_cast<size_t>(channel_groups(format)) * launch.count * kPasses;
  const size_t counts_bytes = states * kTargets * kDigits * sizeof(unsigned);
  std::byte* scratch = stream.queue().scratch(
      kPackParts, 2 * pairs_bytes + (quantiles ? counts_bytes + states * sizeof(Search) : 0));
  const Pairs pairs{reinterpret_cast<Pair*>(scratch),
                    reinterpret_cast<Pair*>(scratch + pairs_bytes)};
  if (format.axis == ScaleAxis::kChannel) run(Step::kPairs, pairs);
  if (quantiles) {
    scratch += 2 * pairs_bytes;
    const Searches searches{reinterpret_cast<Search*>(scratch + counts_bytes),
                            reinterpret_cast<unsigned*>(scratch)};
    find_quantiles<T>(format, rules, launch, searches, pairs, stream);
  }
  run(Step::kCodes, pairs);
  if (scales_beyond(rules.rule[0]) || scales_beyond(rules.rule[1])) {
    store_means<<<dim3(grid_size(format.channels(), kThreads), launch.count), kThreads, 0,
                  native(stream)>>>(launch.jobs, format, rules, pairs);
  }
}

template <class T>
void pack_rows(const PackedFormat& format, const Rules& rules, std::span<const PackJob> jobs,
               Stream& stream) {
  const bool quantiles = has_quantiles(format.axis, rules.rule[0]) ||
                         (format.sections > 1 && has_quantiles(format.axis, rules.rule[1]));
  const auto most = static_cast<size_t>(
      quantiles ? std::max<int64_t>(1, kSearchGroups / channel_groups(format)) : kJobs);
  while (!jobs.empty()) {
    size_t count = std::min(jobs.size(), most);
    while (count < jobs.size() && jobs[count].joins_last) ++count;
    const std::span<const PackJob> some = jobs.first(count);
    jobs = jobs.subspan(some.size());
    const PackLaunch launch = describe_jobs(some, stream);
    if (format.axis == ScaleAxis::kToken) {
      const dim3 grid(grid_size(launch.most, kRowWarps * kWarpRows), launch.count);
      pack_tokens<T>
          <<<grid, kRowWarps * 32, kRowWarps * row_room(format.channels()), native(stream)>>>(
              launch.jobs, format, rules);
    } else {
      pack_groups<T>(format, rules, quantiles, launch, stream);
    }
  }
}

}  // namespace

void pack(const PackedFormat& format, const std::array<PackRule, 2>& rules,
          std::span<const PackJob> jobs, DType dtype, Stream& stream) {
  with_type(dtype, [&]<class T>(T*) {
    pack_rows<T>(format, {{rules[0], rules[1]}}, jobs, stream);
  });
  check_launch("pack");
}

}  // namespace kvlm::cuda
