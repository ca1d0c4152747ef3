#pragma once

#include <vector>

#include "tools/run/options.h"
#include "tools/run/pictures.h"
#include "tools/run/videos.h"

namespace kvlm {

/// `vlm-run --dry-run`: the memory of weights, activations and cache, and how many sequences fit,
/// for the images and videos of the command line, or for the records of --batch, whose faults it
/// reports. Reads headers of images and of weights, and nothing else. Returns the exit status, 1 if
/// a record cannot be answered or the prompt has no room.
int dry_run(const RunOptions& options, const std::vector<OpenPicture>& pictures, VideoFiles videos);

}  // namespace kvlm
