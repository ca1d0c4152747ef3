#pragma once

#include "tools/common/session.h"
#include "tools/run/batch_job.h"

namespace kvlm {

/// Answers the records of a job with one model. Returns the exit status: 1 if any record failed,
/// 130 if interrupted. Throws Error{kDevice} when the device is lost; what was finished is in
/// --out.
int run_batch(const RunOptions& options, BatchJob& job, Session& session);

}  // namespace kvlm
