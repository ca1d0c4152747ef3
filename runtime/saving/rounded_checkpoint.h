#pragma once

#include <filesystem>
#include <map>
#include <string>

#include "kernels/base/thread_pool.h"
#include "kernels/weight_map.h"
#include "runtime/loading/checkpoint.h"

namespace kvlm {

/// Writes a checkpoint anew with the matrices of `rounded` (WeightMap::round()) in 4 or 8 bits, as
/// compressed-tensors has them (pack-quantized, groups of 32, scales in f16): model.safetensors,
/// config.json with a quantization_config, and every other file of the folder that is not weights.
/// Embeddings, head, norms and the vision tower stay as they are.
/// `folder` must be absent or empty. Throws Error{kInvalidArgument} if it is not,
/// Error{kCorruptFile} if it cannot be written.
void save_rounded(const Checkpoint& checkpoint,
                  const std::map<std::string, WeightMap::Rounded>& rounded,
                  const std::filesystem::path& folder, ThreadPool& pool);

}  // namespace kvlm
