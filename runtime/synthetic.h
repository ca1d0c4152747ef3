#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "runtime/model.h"

namespace kvlm {

/// Names that `synthetic:NAME` takes.
std::vector<std::string_view> synthetic_names();

/// Random weights of a released model's exact shape, of type `dtype`, for measuring speed and
/// memory; never for quality. `text` is NAME or NAME,layers=N (decoder layers). Throws
/// Error{kInvalidArgument} with the nearest name or the legal range.
ModelSource synthetic_source(std::string_view text, DType dtype);

}  // namespace kvlm
