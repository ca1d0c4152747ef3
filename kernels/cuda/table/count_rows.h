#pragma once

#include "kernels/cuda/table/table_args.cuh"

// Begin of a decode step: advances the counters of every KV head, then stores new keys and values.
namespace kvlm::cuda::packed {

constexpr int kGainedSegments = 3;  // of a side: packed tokens, and the ring in two segments
constexpr int kMostSegments = 16;   // of a KV head

/// Counts one more token for every KV head of a step, in all layers. Later kernels may read
/// the counters before they wait (programmatic dependent launch): only ordinary launches change
/// them, none does until all layers have attended, and the step's first store_new_rows() waits.
void count_step(const TableArgs& table, Stream& stream);
/// Stores the step's keys and values of a layer, (rows, heads, head_dim), as the newest of their
/// rings.
///   waits  lets no later kernel start before all queued work is done: for the first store after
///          count_step(), and before image_block.cu, which reads queries before it waits
void store_new_rows(const TableArgs& table, int layer, bool waits, const float* k, const float* v,
                    Stream& stream);

}  // namespace kvlm::cuda::packed
