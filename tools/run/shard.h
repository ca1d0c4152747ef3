#pragma once

#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace kvlm {

/// The part of a batch that one of several processes does: records index, index + count, and so on,
/// counted from 1 in the order of the input. tools/eval/shards.py has the same rules and names.
struct Shard {
  int index = 1;
  int count = 1;

  /// Whether record number `place`, from 0, is of it.
  bool has(size_t place) const noexcept {
    return place % static_cast<size_t>(count) + 1 == static_cast<size_t>(index);
  }
  friend bool operator==(const Shard&, const Shard&) = default;
};

inline constexpr int kMostShards = 999'999;

/// "2/4". Throws Error{kInvalidArgument} for anything but I/N with I from 1 to N.
Shard parse_shard(const std::string& text);

/// Looks up a variable of the environment.
using Lookup = std::function<std::optional<std::string>(std::string_view name)>;

/// What Slurm and Open MPI tell a process: the task of an array (SLURM_ARRAY_TASK_ID, _MIN, _STEP,
/// _COUNT and, if it is there, _MAX), the rank of mpirun (OMPI_COMM_WORLD_RANK, _SIZE) or else of
/// srun (SLURM_PROCID, SLURM_STEP_NUM_TASKS, which the script of a job does not have); of the ranks
/// of an array's tasks, both together. 1/1 where nothing is told. Throws Error{kInvalidArgument}
/// for an array whose numbers are not evenly spaced, and for what is no number.
Shard shard_of(const Lookup& environment);

/// The file of a shard's answers: of 2/4 "out.2-of-4.jsonl" for "out.jsonl", which 1/1 leaves as it
/// is.
std::string shard_path(const std::string& path, const Shard& shard);

/// Whether `file` is `path`, or that of any shard, or what takes the place of one of them while it
/// is rewritten. Only names are looked at: other processes make and rename these files.
bool is_shard_file(const std::string& file, const std::string& path);

/// The files with answers to the same batch: `path`, and those of its shards of any number, which
/// are there; without the one of `shard`.
std::vector<std::string> other_outputs(const std::string& path, const Shard& shard);

}  // namespace kvlm
