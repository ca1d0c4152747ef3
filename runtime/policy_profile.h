#pragma once

#include <string>

#include "kvcache/policy.h"

namespace kvlm {

/// What `vlm-kv profile` measured on a model, as a JSON file:
///   {"model": ..., "prefixkv": {"keep": 0.5, "forget": [per layer]}, "calibquant": {"tau": [a,
///   b]},
///    "head_quantile": {"alpha": x}, "xquant": {"eta": [one bit, two bits]}}
/// every part optional. Throws Error{kCorruptFile} naming the file and what is wrong.
PolicyProfile read_profile(const std::string& path);

/// The text of a profile, as read_profile() reads it.
std::string profile_text(const PolicyProfile& profile, const std::string& model);

}  // namespace kvlm
