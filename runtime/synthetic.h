#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "runtime/loading/source.h"

namespace kvlm {

/// Names that `synthetic:NAME` takes.
std::vector<std::string_view> synthetic_names();

/// config.json of `synthetic:TEXT`, where `text` is NAME or NAME,layers=N (decoder layers). Throws
/// Error{kInvalidArgument} with the nearest name or the legal range.
nlohmann::json synthetic_config(std::string_view text);

/// Bytes of the matrices of `synthetic:TEXT` in type `dtype`. Throws like synthetic_config().
size_t synthetic_weight_bytes(std::string_view text, DType dtype);

/// Weights that are never read: matrices hold no numbers and take no memory, vectors hold ones.
WeightMap blank_weights(DType dtype);

/// Random weights of a released model's exact shape, of type `dtype`, for measuring speed and
/// memory; never for quality. Matrices are made on the device of `stream`, which must outlive the
/// source, or on the CPU to be rounded there.
/// Throws like synthetic_config().
ModelSource synthetic_source(std::string_view text, DType dtype, Stream& stream);

}  // namespace kvlm
