#pragma once

#include "tools/run/batch_job.h"

namespace kvlm {

/// Answers the records of a job with one process for each of options.devices: each is this program
/// with `--batch - --out -`, and gets a record when it has few. Returns what run_batch() returns.
/// Throws Error{kDevice} if a process ends with records unanswered; what was finished is in --out.
int run_batch_on_devices(const RunOptions& options, BatchJob& job);

}  // namespace kvlm
