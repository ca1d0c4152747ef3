#pragma once

#include <string>
#include <vector>

#include "tools/common/session.h"

namespace kvlm {

/// The command line of `vlm-bench vision`.
struct VisionOptions {
  SessionOptions session;
  std::vector<std::string> sizes = {"480x640"};  ///< HxW of pictures of noise, pixels
  std::string image;                             ///< file of a picture instead; may be empty
  int batch = 1;                                 ///< pictures that are encoded together
  int repeats = 5;
  bool json = false;
};

/// For every size, or for the file's picture: what cutting a picture and encoding a batch of such
/// pictures (tower and projector) takes; of a file also what reading it takes, and how many a
/// second all threads read and cut, one picture a thread. Prints a table or JSON on stdout. Returns
/// the exit status.
int run_vision(const VisionOptions& options);

}  // namespace kvlm
