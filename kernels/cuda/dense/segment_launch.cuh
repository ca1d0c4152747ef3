#pragma once

#include "kernels/attention.h"
#include "kernels/cuda/device/launch.cuh"

// What the kernels of segment_attention() are given.
namespace kvlm::cuda {

/// Rows of heads: head h of row r begins at data + r * stride + h * length; `length` is a multiple
/// of 8 elements, and every head lies at a multiple of 16 bytes.
template <class T>
struct HeadRows {
  const T* data;
  int64_t stride;
};

template <class T, class Out>
struct SegmentLaunch {
  Out* out;  // (n, q_heads, head_dim)
  HeadRows<T> q, k, v;
  const Segments::Tile* tiles;
  int q_heads, q_per_kv;
  int length;    // of a head in q, k and v
  int head_dim;  // of a head in out
  bool pairs;    // out may be written two elements at a time
  float scale;   // of scores, in powers of two
};

}  // namespace kvlm::cuda
