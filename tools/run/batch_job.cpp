#include "tools/run/batch_job.h"

#include <fmt/format.h>

#include <algorithm>

#include "kernels/base/error.h"
#include "kernels/base/printable.h"
#include "tools/common/input_text.h"
#include "tools/common/messages.h"
#include "tools/run/records.h"
#include "tools/run/shard.h"

namespace kvlm {

namespace {

/// Leaves the records of options.shard, and says so.
void take_part(std::vector<Record>& records, const RunOptions& options) {
  const Shard& shard = options.shard;
  if (shard.count == 1) return;
  const size_t all = records.size();
  std::vector<Record> part;
  for (size_t place = 0; place < all; ++place) {
    if (shard.has(place)) part.push_back(std::move(records[place]));
  }
  records = std::move(part);
  if (options.quiet) return;
  print_message("batch: shard {}/{}{}: {} of {} records, into {}\n", shard.index, shard.count,
                options.shard_told
                    ? " (set by the launcher of this process; --shard 1/1 turns sharding off)"
                    : "",
                records.size(), all, printable(shard_path(options.batch_out, shard)));
}

}  // namespace

void BatchJob::begin(const RunOptions& options) {
  const size_t again = output->retry(failed_before);
  failed_before.clear();
  if (again == 0 || options.quiet) return;
  print_message("batch: {} record{} of {} failed before and {} tried again\n", again,
                again == 1 ? "" : "s", output->name(), again == 1 ? "is" : "are");
}

std::optional<BatchJob> open_batch(const RunOptions& options) {
  BatchJob job;
  job.settings = batch_settings(options);
  const std::string path = shard_path(options.batch_out, options.shard);
  if (options.batch_in == kStandardInput) {  // answered record by record as its lines come
    job.output = std::make_unique<Output>(path, job.settings, options.lean);
    job.source = std::make_unique<StreamedRecords>(
        [&options, output = job.output.get(), place = size_t{0}](const Record& record) mutable {
          if (!options.shard.has(place++) || output->has(record)) return true;
          output->retry({record});
          return false;
        });
    return job;
  }
  std::string left_out;
  std::vector<Record> records = read_records(options.batch_in, options.batch_out, &left_out);
  if (!left_out.empty() && !options.quiet) print_message("vlm-run: note: {}\n", left_out);
  if ((options.sampling.fps || options.sampling.frames) &&
      std::ranges::all_of(records, &std::vector<std::string>::empty, &Record::videos)) {
    throw Error(
        ErrorCode::kInvalidArgument,
        fmt::format("{} applies to videos, and no record of {} has one; drop it",
                    options.sampling.fps ? "--fps" : "--frames", printable(options.batch_in)));
  }
  if (records.empty() && !options.quiet) {
    print_message("batch: no record in {}\n", printable(options.batch_in));
  }
  take_part(records, options);
  job.output = std::make_unique<Output>(path, job.settings, options.lean);
  Output* const output = job.output.get();
  if (options.batch_out != kStandardOutput) {
    for (const std::string& other : other_outputs(options.batch_out, options.shard)) {
      output->read_also(other, job.settings, /*join=*/options.shard.count == 1);
    }
  }
  const size_t all = records.size();
  std::erase_if(records, [&](const Record& record) { return output->has(record); });
  if (!options.quiet) {
    const std::string name = printable(path);
    if (output->repaired()) print_message("batch: removed an incomplete last line of {}\n", name);
    if (records.size() < all) {
      print_message("batch: {} of {} records are in {}{} already{}\n", all - records.size(), all,
                    name, output->used_others() ? " or another shard's file" : "",
                    records.empty() ? "; nothing is left to do" : "");
    }
    if (output->unsettled() > 0) {
      print_message(
          "batch: {} answer{} in {} do not record their flags; assumed to be the current ones\n",
          output->unsettled(), output->unsettled() == 1 ? "" : "s", name);
    }
  }
  if (records.empty()) {
    output->retry({});
    return std::nullopt;
  }
  if (output->has_failures()) job.failed_before = records;
  job.total = records.size();
  job.source = std::make_unique<ListedRecords>(std::move(records));
  return job;
}

}  // namespace kvlm
