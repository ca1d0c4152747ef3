#include "tools/run/shard.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <filesystem>
#include <system_error>

#include "kernels/base/error.h"
#include "kernels/base/printable.h"

// Which part of a batch this process does: by --shard, or by the variables that Slurm, Open MPI and
// torchrun set, and what its output file is called.
namespace kvlm {

namespace {

namespace fs = std::filesystem;

constexpr const char* kCure = "name this process's part with --shard I/N";
constexpr int kMostNumber = 999'999'999;

[[noreturn]] void refuse(const std::string& text) {
  throw Error(ErrorCode::kInvalidArgument, text);
}

/// A decimal number without a sign, up to `most`; nothing for any other text.
std::optional<int> number_of(std::string_view text, int most) {
  int number = 0;
  const auto [end, code] = std::from_chars(text.data(), text.data() + text.size(), number);
  const bool digits = !text.empty() && text.front() >= '0' && text.front() <= '9';
  if (!digits || code != std::errc() || end != text.data() + text.size() || number > most) {
    return std::nullopt;
  }
  return number;
}

std::optional<Shard> shard_of_text(std::string_view text, char between) {
  const size_t place = text.find(between);
  if (place == std::string_view::npos) return std::nullopt;
  const auto index = number_of(text.substr(0, place), kMostShards);
  const auto count = number_of(text.substr(place + 1), kMostShards);
  if (!index || !count || *index < 1 || *index > *count) return std::nullopt;
  return Shard{*index, *count};
}

int variable(const Lookup& environment, std::string_view name) {
  const std::string text = environment(name).value_or("");
  const auto number = number_of(text, kMostNumber);
  if (!number) {
    refuse(fmt::format("{} is \"{}\"; expected a number of at least 0, or {}", name,
                       printable(text), kCure));
  }
  return *number;
}

Shard array_task(const Lookup& environment) {
  if (!environment("SLURM_ARRAY_TASK_ID")) return {};
  const int task = variable(environment, "SLURM_ARRAY_TASK_ID");
  const int first = variable(environment, "SLURM_ARRAY_TASK_MIN");
  const int count = variable(environment, "SLURM_ARRAY_TASK_COUNT");
  const int step = std::max(1, variable(environment, "SLURM_ARRAY_TASK_STEP"));
  const int place = (task - first) / step;
  bool even = task >= first && (task - first) % step == 0 && place < count;
  if (environment("SLURM_ARRAY_TASK_MAX")) {
    const int last = variable(environment, "SLURM_ARRAY_TASK_MAX");
    even = even && last >= first && (last - first) / step + 1 == count;
  }
  if (!even) {
    refuse(fmt::format(
        "SLURM_ARRAY_TASK_ID is {} of an array whose {} numbers are not evenly spaced; {}", task,
        count, kCure));
  }
  return {place + 1, count};
}

Shard rank_of(const Lookup& environment) {
  struct Launcher {
    std::string_view rank;
    std::string_view size;
  };
  // The script of a job is one process, whose SLURM_PROCID is 0 whatever SLURM_NTASKS the job has;
  // only what srun starts has the number of tasks of its step.
  constexpr Launcher kLaunchers[] = {{"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"},
                                     {"SLURM_PROCID", "SLURM_STEP_NUM_TASKS"}};
  for (const auto& [rank, size] : kLaunchers) {
    if (!environment(rank) || !environment(size)) continue;
    const int index = variable(environment, rank);
    const int count = variable(environment, size);
    if (index >= count) {
      refuse(fmt::format("{} is {} and {} is {}; expected a rank below the number of them, or {}",
                         rank, index, size, count, kCure));
    }
    return {index + 1, count};
  }
  return {};
}

/// What a name has between the stem and the suffix of `path`, and behind: nothing for `path`
/// itself,
/// ".2-of-4" for a shard's.
std::optional<Shard> shard_in_name(std::string_view name, const fs::path& path) {
  const std::string stem = path.stem().string();
  const std::string suffix = path.extension().string();
  if (!name.starts_with(stem)) return std::nullopt;
  name.remove_prefix(stem.size());
  if (!name.ends_with(suffix)) return std::nullopt;
  name.remove_suffix(suffix.size());
  if (name.empty()) return Shard{};
  constexpr std::string_view kBetween = "-of-";
  const size_t between = name.find(kBetween);
  if (!name.starts_with('.') || between == std::string_view::npos) return std::nullopt;
  return shard_of_text(
      fmt::format("{}/{}", name.substr(1, between - 1), name.substr(between + kBetween.size())),
      '/');
}

fs::path folder_of(const fs::path& path) {
  return path.has_parent_path() ? path.parent_path() : fs::path(".");
}

}  // namespace

Shard parse_shard(const std::string& text) {
  const auto shard = shard_of_text(text, '/');
  if (!shard) {
    refuse(fmt::format("--shard is {}; expected I/N with I from 1 to N, such as 2/8",
                       printable(text)));
  }
  return *shard;
}

Shard shard_of(const Lookup& environment) {
  const Shard array = array_task(environment);
  const Shard rank = rank_of(environment);
  const int64_t count = int64_t{array.count} * rank.count;
  if (count > kMostShards) {
    refuse(fmt::format("an array of {} tasks with {} ranks each is more than {} shards; {}",
                       array.count, rank.count, kMostShards, kCure));
  }
  return {(array.index - 1) * rank.count + rank.index, static_cast<int>(count)};
}

std::string shard_path(const std::string& path, const Shard& shard) {
  if (shard.count == 1) return path;
  const fs::path whole(path);
  const std::string name = fmt::format("{}.{}-of-{}{}", whole.stem().string(), shard.index,
                                       shard.count, whole.extension().string());
  return (whole.parent_path() / name).string();
}

bool is_shard_file(const std::string& file, const std::string& path) {
  std::error_code unknown;
  const fs::path of_file(file);
  if (!fs::equivalent(folder_of(of_file), folder_of(path), unknown)) return false;
  const std::string name = of_file.filename().string();
  constexpr size_t kFreshSuffix = 7;  // ".XXXXXX", of a file that is being rewritten
  return shard_in_name(name, path) ||
         (name.size() > kFreshSuffix && name[name.size() - kFreshSuffix] == '.' &&
          shard_in_name(name.substr(0, name.size() - kFreshSuffix), path));
}

std::vector<std::string> other_outputs(const std::string& path, const Shard& shard) {
  std::vector<std::string> paths;
  std::error_code error;
  for (fs::directory_iterator it(folder_of(path), error), end; !error && it != end;
       it.increment(error)) {
    const auto other = shard_in_name(it->path().filename().string(), path);
    std::error_code unknown;
    if (other && !(*other == shard) && it->is_regular_file(unknown)) {
      paths.push_back(it->path().string());
    }
  }
  std::ranges::sort(paths);
  return paths;
}

}  // namespace kvlm
