#include "kernels/cuda/device/launch.cuh"
#include "kernels/cuda/model/activation.cuh"
#include "kernels/cuda/product/few_rows.h"

// y = x W^T for up to four rows of x. The warps of a block read 16 bytes of weights a thread, each
// byte once for all rows of x, some steps ahead of the sums. One launch multiplies several matrices
// with the same x, and may apply an MLP's gate.
namespace kvlm::cuda {

namespace {

/// How few_rows divides its work.
struct FewTiling {
  int columns;  // rows of weights that a warp reads side by side
  int ahead;    // steps by which it reads ahead
  int warps;    // of a block
  int split;    // warps that share their rows of weights
};

/// As measured on an H100. `split` orders the sums: rows have the same bits whatever else is in the
/// batch.
constexpr FewTiling few_tiling(bool gated) {
  return gated ? FewTiling{4, 4, 4, 4} : FewTiling{4, 2, 8, 2};
}

template <class T>
constexpr int kChunk = 16 / sizeof(T);  // weights that are loaded at once

/// 16 bytes of weights, which nobody needs again soon.
template <class T>
__device__ uint4 load_chunk(const T* from) {
  uint4 chunk;
  asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(chunk.x), "=r"(chunk.y), "=r"(chunk.z), "=r"(chunk.w)
               : "l"(from));
  return chunk;
}

/// Products of the same x, their outputs side by side.
template <class T>
struct FewProjections {
  const T* w[kMostProjections];
  float* y[kMostProjections];
  const float* bias[kMostProjections];
  int64_t out[kMostProjections];
};

/// The other arguments of few_rows.
struct FewRows {
  const float* x;  // (kRows, in)
  int in;
  bool add;
  Activation activation;
};

/// Outputs of warps that share their rows of weights.
constexpr int few_outputs(bool gated) { return few_tiling(gated).columns / (gated ? 2 : 1); }

/// y = x w^T, or with `add` y += x w^T; kGated: y of the first projection becomes activation(first)
/// * second.
///
/// Warps read some rows of weights once for all kRows rows of x. The order of a sum does not depend
/// on kRows. The weights are there from the start, so reading them begins before earlier kernels
/// have ended.
template <class T, int kRows, bool kGated>
__global__ void __launch_bounds__(32 * few_tiling(kGated).warps)
    few_rows(FewProjections<T> projections, FewRows args) {
  constexpr int kColumns = few_tiling(kGated).columns;
  constexpr int kAhead = few_tiling(kGated).ahead;
  constexpr int kWarps = few_tiling(kGated).warps;
  constexpr int kSplit = few_tiling(kGated).split;
  constexpr int kOuts = few_outputs(kGated);
  constexpr int kSize = kChunk<T>;
  __shared__ float shared[kWarps][kColumns][kRows];  // the warps' sums
  let_next_start();
  const int warp_lane = static_cast<int>(threadIdx.x % 32);
  const int warp = static_cast<int>(threadIdx.x / 32);
  int64_t unit = static_cast<int64_t>(blockIdx.x) * (kWarps / kSplit) + warp / kSplit;
  const T* w = projections.w[0];
  float* y = projections.y[0];
  const float* bias = projections.bias[0];
  int64_t out = projections.out[0];
  if constexpr (!kGated) {
#pragma unroll
    for (int i = 1; i < kMostProjections; ++i) {
      const int64_t units = (out + kOuts - 1) / kOuts;
      if (unit < units) continue;
      unit -= units;
      w = projections.w[i], y = projections.y[i], bias = projections.bias[i],
      out = projections.out[i];
    }
  }
  const int64_t column = unit * kOuts;
  const int chunks = column < out ? args.in / kSize : 0;
  const T* weights[kColumns];
#pragma unroll
  for (int c = 0; c < kColumns; ++c) {
    const T* of = kGated ? projections.w[c % 2] : w;
    const int64_t wanted = column + (kGated ? c / 2 : c);
    weights[c] = of + min(wanted, out - 1) * args.in;
  }
  // Steps that every lane takes part in; what is left is less than one.
  constexpr int kStep = 32 * kSplit;
  const int steps = chunks / kStep;
  const int first = warp % kSplit * 32 + warp_lane;
  uint4 coming[kAhead][kColumns];
#pragma unroll
  for (int u = 0; u < kAhead; ++u) {
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      if (u < steps) coming[u][c] = load_chunk(weights[c] + (first + u * kStep) * kSize);
    }
  }
  wait_for_earlier();

  float sums[kColumns][kRows] = {};
  const auto add_chunk = [&](const uint4(&loaded)[kColumns], int element) {
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      float values[kSize];
#pragma unroll
      for (int j = 0; j < kSize; j += 4) {
        *reinterpret_cast<float4*>(values + j) =
            *reinterpret_cast<const float4*>(args.x + row * args.in + element + j);
      }
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        const T* factors = reinterpret_cast<const T*>(&loaded[c]);
#pragma unroll
        for (int j = 0; j < kSize; ++j) sums[c][row] += load_float(factors[j]) * values[j];
      }
    }
  };
  for (int k = 0; k < steps; k += kAhead) {
#pragma unroll
    for (int u = 0; u < kAhead; ++u) {
      if (k + u >= steps) break;
      uint4 loaded[kColumns];
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        loaded[c] = coming[u][c];
        if (k + u + kAhead < steps) {
          coming[u][c] = load_chunk(weights[c] + (first + (k + u + kAhead) * kStep) * kSize);
        }
      }
      add_chunk(loaded, (first + (k + u) * kStep) * kSize);
    }
  }
  const int last = first + steps * kStep;
  if (last < chunks) {
    uint4 loaded[kColumns];
#pragma unroll
    for (int c = 0; c < kColumns; ++c) loaded[c] = load_chunk(weights[c] + last * kSize);
    add_chunk(loaded, last * kSize);
  }

#pragma unroll
  for (int row = 0; row < kRows; ++row) {
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const float sum = warp_sum(sums[c][row]);
      if (warp_lane == 0) shared[warp][c][row] = sum;
    }
  }
  __syncthreads();
  // Each thread of the warp finishes one output of one row.
  const int output = warp_lane / kRows;
  const int row = warp_lane % kRows;
  if (warp % kSplit != 0 || output >= kOuts || column + output >= out) return;
  const auto result = [&](int c, const float* biases) {
    float sum = 0;
    for (int i = 0; i < kSplit; ++i) sum += shared[warp + i][c][row];
    return biases == nullptr ? sum : sum + biases[column + output];
  };
  float* to = y + row * out + column + output;
  if constexpr (kGated) {
    *to = activated(args.activation, result(2 * output, bias)) *
          result(2 * output + 1, projections.bias[1]);
  } else {
    const float sum = result(output, bias);
    *to = args.add ? *to + sum : sum;
  }
}

/// What the kernels are told of projections.
template <class T>
FewProjections<T> few_projections(std::span<const Projection> projections, float* gated) {
  FewProjections<T> made{};
  for (size_t i = 0; i < projections.size(); ++i) {
    made.w[i] = reinterpret_cast<const T*>(projections[i].w.data());
    made.y[i] = gated != nullptr ? gated : projections[i].y.as<float>();
    made.bias[i] = projections[i].bias.empty() ? nullptr : projections[i].bias.as<float>();
    made.out[i] = projections[i].w.shape()[0];
  }
  return made;
}

/// The kernel of 1 to kFewRows rows.
template <class T, bool kGated>
auto few_kernel(int64_t rows) {
  switch (rows) {
    case 1:
      return few_rows<T, 1, kGated>;
    case 2:
      return few_rows<T, 2, kGated>;
    case 3:
      return few_rows<T, 3, kGated>;
    default:
      return few_rows<T, 4, kGated>;
  }
}

}  // namespace

void multiply_few(std::span<const Projection> projections, ConstTensorView x, const FewWork& work,
                  Stream& stream) {
  const bool gated = work.gated != nullptr;
  const FewTiling tiling = few_tiling(gated);
  const FewRows args{x.as<float>(), static_cast<int>(x.shape()[1]), work.add, work.activation};
  int64_t groups = 0;  // of warps that share their rows of weights
  for (const Projection& one : gated ? projections.first(1) : projections) {
    groups += ceil_div(one.w.shape()[0], few_outputs(gated));
  }
  const auto blocks = static_cast<unsigned>(ceil_div(groups * tiling.split, tiling.warps));
  with_type(projections[0].w.dtype(), [&]<class T>(T*) {
    const int64_t rows = x.shape()[0];
    const auto kernel = gated ? few_kernel<T, true>(rows) : few_kernel<T, false>(rows);
    launch_early("linear", kernel, blocks, 32 * tiling.warps, stream,
                 few_projections<T>(projections, work.gated), args);
  });
}

}  // namespace kvlm::cuda
