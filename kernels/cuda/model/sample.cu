#include <algorithm>

#include "kernels/cuda/device/launch.cuh"
#include "kernels/cuda/model/sample.h"

namespace kvlm::cuda {

namespace {

// A row's maximum is found by several blocks. Then one block merges what they found and, where the
// row asks for it, draws. A draw never sorts: the token at which the falling probabilities add up
// to a target lies in one of 2048 bins, by the leading bits of the logits; then in one of its bins;
// and the third digit leaves equal logits only. Sums of bins are whole numbers, so that the order
// in which threads add changes nothing.

constexpr int kThreads = 256;       // of a block that looks for the maximum
constexpr int kDrawThreads = 1024;  // of a block that draws
constexpr int kDrawWarps = kDrawThreads / 32;
constexpr int64_t kWantedBlocks = 1024;
constexpr int64_t kMaxSplits = 32;  // of a row; a warp merges them

using Key = unsigned long long;
constexpr Key kBroken = ~Key{0};  // there is a NaN

/// Larger for larger numbers; the same for both zeros. No number has all bits set.
__device__ uint32_t ordered(float x) {
  const uint32_t bits = __float_as_uint(x == 0 ? 0.0f : x);
  return (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
}

__device__ float number_of(uint32_t order) {
  return __uint_as_float((order & 0x80000000u) != 0 ? order & 0x7fffffffu : ~order);
}

/// Larger for larger logits, and of equal ones for the first.
__device__ Key key_of(float x, int id) {
  return Key{ordered(x)} << 32 | ~static_cast<uint32_t>(id);
}

__device__ int id_of(Key key) { return static_cast<int>(~static_cast<uint32_t>(key)); }

__device__ Key warp_max(Key key) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    key = max(key, __shfl_xor_sync(0xffffffffu, key, offset));
  }
  return key;
}

/// What one thread has seen of a row.
struct Best {
  float logit = 0;
  int id = -1;
  bool broken = false;

  __device__ void take(float x, int i) {
    broken |= isnan(x);
    if (id < 0 || x > logit) {
      logit = x;
      id = i;
    }
  }
  __device__ Key key() const { return broken ? kBroken : id < 0 ? 0 : key_of(logit, id); }
};

/// Penalises a part of a row and finds its maximum: parts[row, split].
__global__ void __launch_bounds__(kThreads)
    find_maxima(float* logits, int vocab, const RowSampling* rows, Key* parts) {
  __shared__ Key found[kThreads / 32];
  float* row = logits + static_cast<int64_t>(blockIdx.x) * vocab;
  const int64_t splits = gridDim.y;
  const int begin = static_cast<int>(vocab * static_cast<int64_t>(blockIdx.y) / splits);
  const int end = static_cast<int>(vocab * (static_cast<int64_t>(blockIdx.y) + 1) / splits);
  const int tid = static_cast<int>(threadIdx.x);
  const RowSampling how = rows[blockIdx.x];
  Best best;
  if (how.penalises()) {
    for (int i = begin + tid; i < end; i += kThreads) {
      float x = row[i];
      if (how.has_seen(i)) {
        x = x > 0 ? x / how.repetition_penalty : x * how.repetition_penalty;
        row[i] = x;
      }
      best.take(x, i);
    }
  } else {
    const float* __restrict__ read = row;
#pragma unroll 8
    for (int i = begin + tid; i < end; i += kThreads) best.take(read[i], i);
  }
  Key key = warp_max(best.key());
  if (tid % 32 == 0) found[tid / 32] = key;
  __syncthreads();
  if (tid != 0) return;
  for (const Key other : found) key = max(key, other);
  parts[blockIdx.x * splits + blockIdx.y] = key;
}

// The three digits of an ordered logit, the leading one first.
constexpr int kBins = 2048;
__device__ constexpr int bits_of(int digit) { return digit < 2 ? 11 : 10; }
__device__ constexpr int shift_of(int digit) { return digit == 0 ? 21 : digit == 1 ? 10 : 0; }

/// Sums of 64 bits as two words, because shared memory adds only 32 bits in one instruction.
struct Bins {
  uint32_t low[kBins];
  uint32_t high[kBins];

  __device__ void add(int bin, Key amount) {
    const auto small = static_cast<uint32_t>(amount);
    auto large = static_cast<uint32_t>(amount >> 32);
    if (atomicAdd(&low[bin], small) + small < small) ++large;
    if (large != 0) atomicAdd(&high[bin], large);
  }
  __device__ Key sum(int bin) const { return Key{high[bin]} << 32 | low[bin]; }
};

/// Logits of one value, or of one bin.
struct Cut {
  uint32_t order = 0;  // their ordered value, or its leading digits
  Key before = 0;      // what all larger logits weigh
  Key here = 0;        // what they weigh
};

struct Shared {
  Bins leading;  // of the first digit
  Bins bins;     // of the others
  Key warps[kDrawWarps];
  Cut cut;
  int id;
};

/// Weighs every logit the same.
struct Ones {
  __device__ Key operator()(float) const { return 1; }
};

/// Weighs a logit by its probability, of which the largest is 2^bits.
struct Probabilities {
  double max;
  double temperature;
  int bits;

  __device__ Key operator()(float x) const {
    const double exponent = (static_cast<double>(x) - max) / temperature;
    if (exponent < -0.7 * (bits + 1)) return 0;  // what the rest would round it to, for less
    const auto probability = static_cast<float>(exp(exponent));  // as the CPU rounds it
    return __double2ull_rn(static_cast<double>(probability) * static_cast<double>(Key{1} << bits));
  }
};

/// One block at its row. All members are called by all threads and return the same to each.
class Draw {
 public:
  __device__ Draw(const float* row, int vocab, Shared& shared)
      : row_(row), vocab_(vocab), shared_(shared) {}

  __device__ int run(const RowSampling& how, Key max) {
    const int kept = how.top_k > 0 ? min(how.top_k, vocab_) : vocab_;
    const float largest = number_of(static_cast<uint32_t>(max >> 32));
    const bool finite = !isinf(largest);
    if (kept < vocab_ || !finite) {
      add_leading(Ones{});
      const Cut last = cut_of(static_cast<Key>(kept) - 1, Ones{});
      // Probabilities are no numbers then: the CPU takes the first of top-p, else the last of all.
      if (!finite) {
        return how.top_p < 1 ? id_of(max) : nth_of(last.order, last.here - 1);
      }
      least_ = last.order;
    }

    // vocab_ times the largest is less than 2^63.
    const Probabilities weigh{static_cast<double>(largest), how.temperature, 31 + __clz(vocab_)};
    add_leading(weigh);
    Key total = sum_of_leading();
    if (how.top_p < 1) {
      // The first token at which the sum is at least top_p * total.
      const double wanted = ceil(how.top_p * static_cast<double>(total));
      const Key target = wanted < 1 ? 0 : min(static_cast<Key>(wanted), total) - 1;
      const Cut last = cut_of(target, weigh);
      const Key each = weigh(number_of(last.order));
      total = last.before + ((target - last.before) / each + 1) * each;
    }
    const Key target = __umul64hi(static_cast<Key>(how.uniform * 0x1p64), total);
    const Cut chosen = cut_of(target, weigh);
    return nth_of(chosen.order, (target - chosen.before) / weigh(number_of(chosen.order)));
  }

 private:
  template <class Weigh>
  __device__ void add_leading(const Weigh& weigh) {
    add(shared_.leading, 0, 0, weigh);
  }

  /// The bins of a digit become the weights of the logits that start with the digits `order`.
  template <class Weigh>
  __device__ void add(Bins& bins, int digit, uint32_t order, const Weigh& weigh) {
    __syncthreads();  // no thread reads the bins any more
    for (int i = tid(); i < kBins; i += kDrawThreads) bins.low[i] = bins.high[i] = 0;
    __syncthreads();
    const int shift = shift_of(digit);
    const int bits = bits_of(digit);
#pragma unroll 4
    for (int i = tid(); i < vocab_; i += kDrawThreads) {
      const float x = row_[i];
      const uint32_t all = ordered(x);
      if (all < least_ || Key{all} >> (shift + bits) != order) continue;
      const Key weight = weigh(x);
      if (weight > 0) bins.add(static_cast<int>(all >> shift & ((1u << bits) - 1)), weight);
    }
    __syncthreads();
  }

  /// The logits at which the weights, added from the largest down, first exceed `target`, which is
  /// less than their sum. The leading bins have been added.
  template <class Weigh>
  __device__ Cut cut_of(Key target, const Weigh& weigh) {
    Cut cut = bin_of(shared_.leading, target, 0, {});
    for (int digit = 1; digit < 3; ++digit) {
      add(shared_.bins, digit, cut.order, weigh);
      cut = bin_of(shared_.bins, target, digit, cut);
    }
    return cut;
  }

  /// The same within one digit's bins.
  __device__ Cut bin_of(const Bins& bins, Key target, int digit, Cut outer) {
    static_assert(kBins == 2 * kDrawThreads);
    const int bin = kBins - 1 - 2 * tid();  // this thread's bins: this one, then the next smaller
    const Key first = bins.sum(bin);
    const Key both = first + bins.sum(bin - 1);
    Key before = outer.before + sum_up_to(both) - both;
    if (before <= target && target < before + both) {
      const bool second = before + first <= target;
      shared_.cut = {outer.order << bits_of(digit) | static_cast<uint32_t>(bin - second),
                     before + (second ? first : 0), second ? both - first : first};
    }
    __syncthreads();
    return shared_.cut;
  }

  __device__ Key sum_of_leading() {
    Key sum = 0;
    for (int i = tid(); i < kBins; i += kDrawThreads) sum += shared_.leading.sum(i);
    sum_up_to(sum);
    Key total = 0;
    for (const Key part : shared_.warps) total += part;
    return total;
  }

  /// The sum over the threads up to this one.
  __device__ Key sum_up_to(Key x) {
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) {
      const Key lower = __shfl_up_sync(0xffffffffu, x, offset);
      if (tid() % 32 >= offset) x += lower;
    }
    return x + sum_of_warps_before(x);
  }

  /// The sum of x over the last threads of all warps before this one.
  __device__ Key sum_of_warps_before(Key x) {
    __syncthreads();  // no thread reads the sums any more
    if (tid() % 32 == 31) shared_.warps[tid() / 32] = x;
    __syncthreads();
    Key sum = 0;
    for (int warp = 0; warp < tid() / 32; ++warp) sum += shared_.warps[warp];
    return sum;
  }

  /// The n-th id, from 0, of those whose ordered logit is `order`.
  __device__ int nth_of(uint32_t order, Key n) {
    const int warp_lane = tid() % 32;
    const int each = (vocab_ + kDrawThreads - 1) / kDrawThreads * 32;  // ids of a warp
    const int begin = min(tid() / 32 * each, vocab_);
    const int end = min(begin + each, vocab_);
    const auto equal = [&](int first) {
      const bool is = first + warp_lane < end && ordered(row_[first + warp_lane]) == order;
      return __ballot_sync(0xffffffffu, is);
    };
    Key count = 0;
    for (int first = begin; first < end; first += 32) count += __popc(equal(first));
    Key before = sum_of_warps_before(count);
    if (before <= n && n < before + count) {
      for (int first = begin; first < end; first += 32) {
        const uint32_t mask = equal(first);
        const Key rank = before + __popc(mask & ((1u << warp_lane) - 1));
        if ((mask >> warp_lane & 1u) != 0 && rank == n) shared_.id = first + warp_lane;
        before += __popc(mask);
      }
    }
    __syncthreads();
    return shared_.id;
  }

  __device__ static int tid() { return static_cast<int>(threadIdx.x); }

  const float* row_;
  int vocab_;
  Shared& shared_;
  uint32_t least_ = 0;  // smaller ordered logits are not kept
};

__global__ void __launch_bounds__(kDrawThreads)
    choose(const float* logits, int vocab, const RowSampling* rows, const Key* parts, int splits,
           int32_t* ids) {
  __shared__ Shared shared;
  const int row = static_cast<int>(blockIdx.x);
  const int warp_lane = static_cast<int>(threadIdx.x % 32);
  const RowSampling how = rows[row];
  const Key max =
      warp_max(warp_lane < splits ? parts[static_cast<int64_t>(row) * splits + warp_lane] : 0);
  int id = kNoToken;
  if (max != kBroken) {
    id = how.draws() ? Draw(logits + static_cast<int64_t>(row) * vocab, vocab, shared).run(how, max)
                     : id_of(max);
  }
  if (threadIdx.x != 0) return;
  ids[row] = id;
  if (how.seen != nullptr && id != kNoToken) how.mark(id);
}

}  // namespace

void sample_rows(std::span<int32_t> ids, TensorView logits, std::span<const RowSampling> rows,
                 Stream& stream) {
  const int64_t count = logits.shape()[0];
  const auto vocab = static_cast<int>(logits.shape()[1]);
  const int64_t splits = std::clamp(kWantedBlocks / count, int64_t{1},
                                    std::min(ceil_div(vocab, kThreads * 8), kMaxSplits));
  // Room for as many rows as are wanted blocks, so that a batch may grow without allocating.
  const auto room = static_cast<size_t>(std::max(count, kWantedBlocks));
  std::byte* scratch = stream.queue().scratch(kSampleParts, room * (sizeof(Key) + sizeof(int32_t)));
  auto* parts = reinterpret_cast<Key*>(scratch);
  auto* chosen = reinterpret_cast<int32_t*>(scratch + room * sizeof(Key));
  const auto* placed =
      reinterpret_cast<const RowSampling*>(stream.queue().upload(rows.data(), rows.size_bytes()));

  const auto blocks = static_cast<unsigned>(count);
  find_maxima<<<dim3(blocks, static_cast<unsigned>(splits)), kThreads, 0, native(stream)>>>(
      logits.as<float>(), vocab, placed, parts);
  choose<<<blocks, kDrawThreads, 0, native(stream)>>>(logits.as<float>(), vocab, placed, parts,
                                                      static_cast<int>(splits), chosen);
  check_launch("sample_rows");
  stream.queue().copy(ids.data(), false, chosen, true, ids.size_bytes());
}

}  // namespace kvlm::cuda
