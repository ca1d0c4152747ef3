#pragma once

#include "tools/common/session.h"
#include "tools/run/options.h"

namespace kvlm {

/// Runs the records of --batch that --out does not have yet. Returns the exit status: 1 if any
/// record failed, 130 if interrupted.
int run_batch(const RunOptions& options, Session& session);

}  // namespace kvlm
