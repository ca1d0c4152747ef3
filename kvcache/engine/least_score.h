#pragma once

#include <span>

#include "kernels/least_weight.h"

namespace kvlm {

/// The slot meant by kLeastScore: the candidate of least score, ties to the last.
///   scores  finite, of the remaining prompt tokens; at least one is a candidate
int least_scored(const LeastWeight& of, std::span<const float> scores) noexcept;

}  // namespace kvlm
