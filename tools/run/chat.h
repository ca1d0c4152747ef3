#pragma once

#include "tools/common/progress.h"
#include "tools/common/session.h"
#include "tools/run/options.h"

namespace kvlm {

/// Turns read from stdin until /quit or its end. On a terminal with keys and history (libedit), and
/// the first Ctrl+C stops the answer only. `watch` is that of the session. Returns the exit status.
int run_chat(const RunOptions& options, Session& session, TerminalWatch& watch);

}  // namespace kvlm
