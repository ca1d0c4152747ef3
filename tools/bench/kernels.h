#pragma once

#include <string>

namespace kvlm {

/// The command line of `vlm-bench kernels`.
struct KernelsOptions {
  int threads = 0;
  std::string device = "cpu";
  int rows = 4096;
  int head_dim = 128;
  int batch = 1;  ///< sequences, each of eight kv_heads
  int repeats = 7;
  std::string only;  ///< formats whose name holds this
  bool json = false;
};

/// Decode attention of eight kv_heads a sequence over packed rows of every kind (on a GPU the last
/// 32 are full), walking through more layers than the processor's caches hold, and the same step
/// over f16 rows in between, so that both meet the same machine. On a GPU a DecodeTable stores the
/// step's rows and attends, as in a cache. Prints nanoseconds per cached row (keys and values of
/// one kv_head), gigabytes per second of stored bytes, and how often faster than f16 rows it is.
/// Returns the exit status.
int run_kernels(const KernelsOptions& options);

}  // namespace kvlm
