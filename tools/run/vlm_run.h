#pragma once

#include <functional>
#include <string>
#include <vector>

#include "tools/common/progress.h"
#include "tools/common/session.h"
#include "tools/run/options.h"
#include "tools/run/pictures.h"
#include "tools/run/videos.h"

namespace kvlm {

/// run_chat(), or nothing where there is no terminal to chat on.
using RunChat = std::function<int(const RunOptions&, Session&, std::vector<OpenPicture>, VideoFiles,
                                  TerminalWatch&)>;

/// The program vlm-run. Returns its exit status.
///   policy_files  made the policies in Python that --kv may name
int vlm_run(int argc, char** argv, const RunChat& chat,
            const std::vector<std::string>& policy_files = {});

}  // namespace kvlm
