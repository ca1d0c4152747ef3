#pragma once

#include <string>

#include "kernels/weight_map.h"
#include "kvcache/plan/cache_plan.h"

namespace kvlm {

/// A sentence if the plan packs keys whose channels share a scale (int4, int8, head_quantile: a
/// scale per token or per head), and a bias of k_proj is so large that a step of the codes is more
/// than 2.5 times the spread of a typical channel: |bias| > 2.5 * max(15, 2^bits - 1) * spread. The
/// spread is the median over the channels of a KV head of |w * g|, with w the channel's row of
/// k_proj and g the weight of the norm before it: the standard deviation of w x for x = g * n,
/// where the elements of n are independent and of unit variance. Empty if no layer is so, or the
/// weights have no such biases. The bundled models reach |bias| = 0.8 spreads.
///
///   weights  as the checkpoint has them, before a model takes any
std::string loud_key_bias(const WeightMap& weights, const CachePlan& plan);

}  // namespace kvlm
