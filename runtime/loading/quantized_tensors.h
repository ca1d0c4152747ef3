#pragma once

#include <map>
#include <optional>
#include <string>

#include "kernels/weight_map.h"
#include "runtime/loading/quantization.h"
#include "runtime/loading/stored_tensor.h"

namespace kvlm {

/// Turns the tensors that belong to quantized matrices (P.weight_packed, P.weight_scale, ...) into
/// matrices P.weight of `weights`, and takes them out of `tensors`. Without a `config` there must
/// be none. `activations` is what a GPU multiplies them with. Throws Error{kCorruptFile} naming the
/// tensors where they do not fit each other or `config`; Error{kUnsupported} for columns in another
/// order (g_idx).
void take_quantized(std::map<std::string, StoredTensor>& tensors,
                    const std::optional<QuantizationConfig>& config, DType activations,
                    WeightMap& weights);

}  // namespace kvlm
