#pragma once

#include <string>

#include "kvcache/spec/policy.h"

namespace kvlm {

/// What `vlm-kv profile` measured on a model, as a JSON file:
///
///   {"model": name,
///    "prefixkv": {"keep": 0.5, "forget": {"means": [per layer], "sums": [...]}, "gini": as
///    forget}, "calibquant": {"tau": {BITS: [low, high]}, "tau_unshrunk": as tau, for shrink=none},
///    "head_quantile": {"alpha": {BITS: x}}, "xquant": {"eta": {BITS: x}}}
///
/// every part optional, BITS the width that a value was fitted at and is used at, as text. A bare
/// list as "forget" is one of "sums", as the published code's files are. Throws Error{kCorruptFile}
/// naming the file and what is wrong; values without their width are.
PolicyProfile read_profile(const std::string& path);

/// Throws Error{kInvalidArgument} if the profile was measured on a model of another name. Folders
/// count by their last part; a profile that names no model is of any.
void require_profile_of(const PolicyProfile& profile, const std::string& model);

/// The text of a profile, as read_profile() reads it.
std::string profile_text(const PolicyProfile& profile);

/// What is at `path` already, for a measurement of `model` to add to; empty but for the model if
/// nothing is. Throws Error{kInvalidArgument} if it cannot be written, or is a file that is no
/// profile of this model: that is never overwritten.
PolicyProfile profile_to_extend(const std::string& path, const std::string& model);

/// Puts the profile at `path`, whole or, should that fail, not at all; Error{kInvalidArgument}.
void write_profile(const PolicyProfile& profile, const std::string& path);

}  // namespace kvlm
