#pragma once

#include <nlohmann/json.hpp>

#include "runtime/model.h"

namespace kvlm {

/// The memory object of --json: what the program holds on `device` now, in bytes.
///
///   weights     on the CPU as the model reads them, mapped files included
///   cache       reserved for keys and values, used or not
///   workspace   activations, scratch, staging
///
/// and on a GPU also what its driver says:
///
///   rounding    what pages of 2 MiB add to the three
///   context     in use before anything was allocated: the CUDA context, and other processes
///   code        added beside all allocations: kernels, loaded when they are first launched
///   device      in use now; the others add up to it, but for pages that small buffers share
nlohmann::ordered_json memory_json(Device device, const Model& model);

}  // namespace kvlm
