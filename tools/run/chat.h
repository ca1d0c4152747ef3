#pragma once

#include <vector>

#include "tools/common/progress.h"
#include "tools/common/session.h"
#include "tools/run/options.h"
#include "tools/run/pictures.h"
#include "tools/run/videos.h"

namespace kvlm {

/// Turns read from stdin until /quit or its end. On a terminal with keys and history (libedit), and
/// the first Ctrl+C stops the answer only. `pictures` and `videos` are those of the command line,
/// `watch` is that of the session. Returns the exit status.
int run_chat(const RunOptions& options, Session& session, std::vector<OpenPicture> pictures,
             VideoFiles videos, TerminalWatch& watch);

}  // namespace kvlm
