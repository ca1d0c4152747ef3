#pragma once

#include <functional>

#include "tools/common/session.h"
#include "tools/run/options.h"

namespace kvlm {

/// Reads --batch and opens --out, before any model is loaded. Returns what runs the records that
/// --out has no answer to yet, and gives the exit status: 1 if any record failed, 130 if
/// interrupted; empty if no record is left. `options` must outlive it.
/// Throws Error{kCorruptFile} if a file cannot be used, or --out holds anything but records;
/// Error{kInvalidArgument} if it has answers of other settings or to something else.
/// What runs them throws Error{kDevice} when the device is lost; what was finished is in --out.
std::function<int(Session&)> prepare_batch(const RunOptions& options);

}  // namespace kvlm
