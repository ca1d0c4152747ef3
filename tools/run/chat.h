#pragma once

#include "tools/common/session.h"
#include "tools/run/options.h"

namespace kvlm {

/// Turns read from stdin until /quit or its end. Returns the exit status.
int run_chat(const RunOptions& options, Session& session);

}  // namespace kvlm
