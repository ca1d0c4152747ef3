#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "tools/run/options.h"
#include "tools/run/output.h"
#include "tools/run/record_source.h"
#include "tools/run/settings.h"

namespace kvlm {

/// What a batch has to do: the records that --out has no answer to yet.
struct BatchJob {
  BatchSettings settings;
  std::unique_ptr<Output> output;
  std::unique_ptr<RecordSource> source;
  std::optional<size_t> total;        ///< records of `source`, if that is known
  std::vector<Record> failed_before;  ///< those, if --out has errors of some

  /// Takes the errors of records that are tried again out of --out, once the work begins.
  void begin(const RunOptions& options);
};

/// Reads --batch and opens --out, before any model is loaded. Nothing if no record is left.
/// `options` must outlive the job.
/// Throws Error{kCorruptFile} if a file cannot be used, or --out holds anything but records;
/// Error{kInvalidArgument} if it has answers of other settings or to something else.
std::optional<BatchJob> open_batch(const RunOptions& options);

}  // namespace kvlm
