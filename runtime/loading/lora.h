#pragma once

#include <filesystem>

#include "kernels/weight_map.h"

namespace kvlm {

/// Adds a LoRA adapter to the matrices that a model is about to take, before they are renamed: W +
/// scale * B A with scale alpha / r, or alpha / sqrt(r) for rank-stabilized ones, merged in f32.
///
/// `folder` is as PEFT saves it: adapter_config.json and adapter_model.safetensors. Names are those
/// of the checkpoint that it was trained on; refuse_leftovers() refuses what the model does not
/// take. Throws Error{kCorruptFile} for a damaged file, Error{kUnsupported} for what is more than
/// this: DoRA, biases, whole modules, embeddings, another method. Source: Hu et al. 2021, "LoRA";
/// PEFT 0.17 for the files.
void add_lora(WeightMap& weights, const std::filesystem::path& folder);

}  // namespace kvlm
