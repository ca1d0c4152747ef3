// Which part of a batch a process does.
#include "tools/run/shard.h"

#include <gmock/gmock.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>

#include "kernels/base/error.h"

namespace kvlm {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;

using Variables = std::map<std::string, std::string, std::less<>>;

Shard of(const Variables& variables) {
  return shard_of([&](std::string_view name) -> std::optional<std::string> {
    const auto found = variables.find(name);
    if (found == variables.end()) return std::nullopt;
    return found->second;
  });
}

template <class Action>
void expect_refused(Action&& action, const std::vector<std::string>& words) {
  try {
    action();
    ADD_FAILURE() << "accepted";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    for (const std::string& word : words) EXPECT_THAT(error.what(), HasSubstr(word));
  }
}

Variables array(const char* task, const char* first, const char* last, const char* step,
                const char* count) {
  return {{"SLURM_ARRAY_TASK_ID", task},
          {"SLURM_ARRAY_TASK_MIN", first},
          {"SLURM_ARRAY_TASK_MAX", last},
          {"SLURM_ARRAY_TASK_STEP", step},
          {"SLURM_ARRAY_TASK_COUNT", count}};
}

TEST(Shard, IsReadFromTheCommandLine) {
  EXPECT_EQ(parse_shard("1/1"), (Shard{1, 1}));
  EXPECT_EQ(parse_shard("2/4"), (Shard{2, 4}));
  EXPECT_EQ(parse_shard("999999/999999"), (Shard{999999, 999999}));
  for (const char* text :
       {"", "0/4", "5/4", "1/0", "-1/4", "+1/4", "1/4/2", "1", "/4", "1/", "1.5/4", " 1/4", "1/4 ",
        "1/1000000", "99999999999/99999999999", "a/b", "1\n/4"}) {
    SCOPED_TRACE(text);
    expect_refused([&] { parse_shard(text); }, {"--shard", "I/N", "2/8"});
  }
}

TEST(Shard, EveryRecordIsOfOne) {
  for (const int count : {1, 2, 7, 12}) {
    for (size_t place = 0; place < 10; ++place) {
      int owners = 0;
      for (int index = 1; index <= count; ++index) owners += Shard{index, count}.has(place) ? 1 : 0;
      EXPECT_EQ(owners, 1);
    }
  }
  EXPECT_TRUE((Shard{1, 4}.has(0)));
  EXPECT_TRUE((Shard{1, 4}.has(4)));
  EXPECT_TRUE((Shard{4, 4}.has(3)));
}

TEST(Shard, IsTheWholeWhereNothingIsTold) {
  EXPECT_EQ(of({}), (Shard{1, 1}));
  EXPECT_EQ(of({{"SLURM_JOB_ID", "7"}, {"HOME", "/"}}), (Shard{1, 1}));
}

TEST(Shard, IsTheTaskOfASlurmArray) {
  EXPECT_EQ(of(array("0", "0", "7", "1", "8")), (Shard{1, 8}));
  EXPECT_EQ(of(array("8", "1", "8", "1", "8")), (Shard{8, 8}));
  EXPECT_EQ(of(array("7", "3", "11", "4", "3")), (Shard{2, 3}));
  EXPECT_EQ(of(array("3", "3", "3", "1", "1")), (Shard{1, 1}));
  // sbatch --array=1-8:3 is 1, 4, 7, whatever SLURM_ARRAY_TASK_MAX says.
  EXPECT_EQ(of(array("7", "1", "7", "3", "3")), (Shard{3, 3}));
  EXPECT_EQ(of(array("7", "1", "8", "3", "3")), (Shard{3, 3}));
  Variables without_last = array("2", "1", "", "1", "4");
  without_last.erase("SLURM_ARRAY_TASK_MAX");
  EXPECT_EQ(of(without_last), (Shard{2, 4}));
}

TEST(Shard, RefusesAnArrayWithGaps) {
  // --array=1,2,7: every task says so, also those at the right place.
  for (const char* task : {"1", "2", "7"}) {
    expect_refused([&] { of(array(task, "1", "7", "1", "3")); },
                   {"SLURM_ARRAY_TASK_ID", "evenly spaced", "--shard I/N"});
  }
  expect_refused([] { of(array("4", "1", "7", "2", "4")); }, {"evenly spaced"});
  expect_refused([] { of(array("0", "1", "4", "1", "4")); }, {"evenly spaced"});
  expect_refused([] { of(array("two", "1", "4", "1", "4")); },
                 {"SLURM_ARRAY_TASK_ID is \"two\"", "--shard I/N"});
  expect_refused([] { of({{"SLURM_ARRAY_TASK_ID", "1"}}); }, {"SLURM_ARRAY_TASK_MIN is \"\""});
  expect_refused([] { of(array("1", "1", "4", "-1", "4")); }, {"SLURM_ARRAY_TASK_STEP is \"-1\""});
}

TEST(Shard, IsTheRankOfSrun) {
  EXPECT_EQ(of({{"SLURM_PROCID", "2"}, {"SLURM_STEP_NUM_TASKS", "4"}, {"SLURM_NTASKS", "4"}}),
            (Shard{3, 4}));
  EXPECT_EQ(of({{"SLURM_PROCID", "0"}, {"SLURM_STEP_NUM_TASKS", "1"}, {"SLURM_NTASKS", "4"}}),
            (Shard{1, 1}))
      << "the shell of an interactive job";
  EXPECT_EQ(of({{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "4"}}), (Shard{1, 1}))
      << "the script of a job, which is one process";
  expect_refused(
      [] {
        of({{"SLURM_PROCID", "4"}, {"SLURM_STEP_NUM_TASKS", "4"}});
      },
      {"SLURM_PROCID is 4", "SLURM_STEP_NUM_TASKS is 4", "--shard I/N"});
}

TEST(Shard, IsTheRankOfOpenMpi) {
  EXPECT_EQ(of({{"OMPI_COMM_WORLD_RANK", "7"}, {"OMPI_COMM_WORLD_SIZE", "8"}}), (Shard{8, 8}));
  EXPECT_EQ(of({{"OMPI_COMM_WORLD_RANK", "1"},
                {"OMPI_COMM_WORLD_SIZE", "2"},
                {"SLURM_PROCID", "0"},
                {"SLURM_STEP_NUM_TASKS", "3"}}),
            (Shard{2, 2}))
      << "mpirun starts its ranks by one task of srun on each node";
  expect_refused(
      [] {
        of({{"OMPI_COMM_WORLD_RANK", "x"}, {"OMPI_COMM_WORLD_SIZE", "8"}});
      },
      {"OMPI_COMM_WORLD_RANK is \"x\""});
}

TEST(Shard, OfRanksOfAnArrayBothCount) {
  std::vector<Shard> shards;
  for (const char* task : {"1", "2", "3"}) {
    for (const char* rank : {"0", "1"}) {
      Variables variables = array(task, "1", "3", "1", "3");
      variables.insert({{"OMPI_COMM_WORLD_RANK", rank}, {"OMPI_COMM_WORLD_SIZE", "2"}});
      shards.push_back(of(variables));
    }
  }
  EXPECT_THAT(shards, testing::ElementsAre(Shard{1, 6}, Shard{2, 6}, Shard{3, 6}, Shard{4, 6},
                                           Shard{5, 6}, Shard{6, 6}));
  Variables many = array("1", "1", "100000", "1", "100000");
  many.insert({{"OMPI_COMM_WORLD_RANK", "0"}, {"OMPI_COMM_WORLD_SIZE", "100000"}});
  expect_refused([&] { of(many); }, {"100000 tasks", "100000 ranks", "--shard I/N"});
}

TEST(Shard, NamesItsFile) {
  EXPECT_EQ(shard_path("out.jsonl", {1, 1}), "out.jsonl");
  EXPECT_EQ(shard_path("out.jsonl", {2, 4}), "out.2-of-4.jsonl");
  EXPECT_EQ(shard_path("a.b/out", {2, 4}), "a.b/out.2-of-4");
  EXPECT_EQ(shard_path("/x/run.1.jsonl", {10, 12}), "/x/run.1.10-of-12.jsonl");
}

class ShardFiles : public testing::Test {
 protected:
  ShardFiles() {
    std::string pattern = (fs::temp_directory_path() / "kvlm-shard-XXXXXX").string();
    folder_ = mkdtemp(pattern.data());
  }
  ~ShardFiles() override { fs::remove_all(folder_); }
  std::string in(const char* name) const { return (folder_ / name).string(); }

  fs::path folder_;
};

TEST_F(ShardFiles, AreToldByTheirNames) {
  for (const char* name : {"out.jsonl", "out.1-of-4.jsonl", "out.12-of-12.jsonl",
                           "out.jsonl.aB3xYz", "out.1-of-4.jsonl.aB3xYz"}) {
    EXPECT_TRUE(is_shard_file(in(name), in("out.jsonl"))) << name;
  }
  for (const char* name : {"out.png", "out.5-of-4.jsonl", "out.1-of-4.png", "out1-of-4.jsonl",
                           "out.a-of-4.jsonl", "other.jsonl", "out.1-of-.jsonl", "outing.jsonl"}) {
    EXPECT_FALSE(is_shard_file(in(name), in("out.jsonl"))) << name;
  }
  EXPECT_FALSE(is_shard_file("/out.jsonl", in("out.jsonl")));
}

TEST_F(ShardFiles, OfAnyNumberAreFound) {
  using testing::ElementsAre;
  EXPECT_THAT(other_outputs(in("out.jsonl"), {1, 4}), ElementsAre());
  std::ofstream(in("out.2-of-4.jsonl"));
  std::ofstream(in("out.jsonl"));
  std::ofstream(in("other.1-of-3.jsonl"));
  std::ofstream(in("out.1-of-3.jsonl.aB3xYz"));
  EXPECT_THAT(other_outputs(in("out.jsonl"), {2, 4}), ElementsAre(in("out.jsonl")));
  EXPECT_THAT(other_outputs(in("out.jsonl"), {1, 3}),
              ElementsAre(in("out.2-of-4.jsonl"), in("out.jsonl")));
  EXPECT_THAT(other_outputs(in("out.jsonl"), {}), ElementsAre(in("out.2-of-4.jsonl")));
}

}  // namespace
}  // namespace kvlm
