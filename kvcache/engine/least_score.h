#pragma once

#include <span>

#include "kernels/least_weight.h"

namespace kvlm {

/// The slot of kLeastScore: of those that may go the one of least score, ties to the
/// last.
///   scores  finite, of the prompt's rows that are still held, one of which may go
int least_scored(const LeastWeight& of, std::span<const float> scores) noexcept;

}  // namespace kvlm
