#pragma once

#include <string>
#include <vector>

namespace kvlm {

/// The devices of a command line, one or more: those of --device, "cuda:0,cuda:1", or with --gpus,
/// "2" or "all", the first GPUs. Throws Error{kInvalidArgument} for what is no list or not there.
std::vector<std::string> device_list(const std::string& device, const std::string& gpus);

}  // namespace kvlm
