#pragma once

#include <nlohmann/json.hpp>
#include <optional>
#include <string>

#include "tools/run/options.h"

namespace kvlm {

/// What decides the answers of a batch beside its records: answers of two of these are not to be
/// mixed in one file.
struct BatchSettings {
  std::string model;             ///< -m as given
  std::string spec;              ///< canonical text of --kv
  nlohmann::ordered_json flags;  ///< those given, by name: {"max_tokens": 8, "temp": 0.7}
};

/// Leaves out what does not change an answer: device, threads, batch size, memory. Of --kv-profile
/// it has a hash of what the file says. Throws Error if --kv is no policy or that no profile.
BatchSettings batch_settings(const RunOptions& options);

/// "with --kv f16, and this start has --kv kivi", if answers that `earlier` gave are not those that
/// `now` gives. `earlier` may lack what its writer did not say: an empty model or spec, null flags.
std::optional<std::string> difference(const BatchSettings& earlier, const BatchSettings& now);

}  // namespace kvlm
