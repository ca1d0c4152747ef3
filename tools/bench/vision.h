#pragma once

#include <string>
#include <vector>

#include "tools/common/session.h"

namespace kvlm {

/// The command line of `vlm-bench vision`.
struct VisionOptions {
  SessionOptions session;
  std::vector<std::string> sizes = {"480x640"};  ///< HxW of pictures, pixels
  int batch = 1;                                 ///< pictures that are encoded together
  int repeats = 5;
  bool json = false;
};

/// For every size: what cutting a picture and encoding a batch of such pictures (tower and
/// projector) takes. Prints a table or JSON on stdout. Returns the exit status.
int run_vision(const VisionOptions& options);

}  // namespace kvlm
