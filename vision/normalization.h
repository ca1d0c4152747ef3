#pragma once

#include <array>
#include <cstdint>

#include "vision/preprocess.h"

namespace kvlm {

/// What each of the 256 values of a byte becomes, a channel at a time: every float path of
/// PreprocessSpec is a function of the byte alone.
using NormalizationTable = std::array<std::array<float, 256>, 3>;

/// The table of spec.normalize_backend, bit for bit. Throws Error{kInvalidArgument} if
/// rescale_factor or a std that is used is not positive.
NormalizationTable normalization_table(const PreprocessSpec& spec);

/// The colour that padding to a square is filled with: trunc(mean * 255), in the range of a byte.
std::array<uint8_t, 3> mean_colour(const std::array<double, 3>& mean);

}  // namespace kvlm
