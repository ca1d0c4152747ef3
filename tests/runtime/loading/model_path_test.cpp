#include "runtime/loading/model_path.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>

#include "tests/runtime/loading/safetensors_writer.h"

namespace kvlm {
namespace {

namespace fs = std::filesystem;
using test::TempFolder;
using test::write_file;
using testing::AllOf;
using testing::HasSubstr;

const std::string kMain = "0123456789abcdef0123456789abcdef01234567";
const std::string kOther = "fedcba9876543210fedcba9876543210fedcba98";

class FindModel : public testing::Test {
 protected:
  fs::path find(const std::string& name) {
    return find_model(name, folder_ / "bundled", [this](std::string_view key) {
      const auto place = variables_.find(key);
      return place == variables_.end() ? std::nullopt : std::optional(place->second);
    });
  }
  std::string failure(const std::string& name, ErrorCode code = ErrorCode::kCorruptFile) {
    return test::failure([&] { find(name); }, code);
  }
  /// Puts a snapshot into the cache under HF_HUB_CACHE.
  fs::path add_snapshot(const std::string& commit) {
    write_file(repository_ / "snapshots" / commit / "config.json", "{}");
    return repository_ / "snapshots" / commit;
  }

  TempFolder folder_;
  fs::path repository_ = folder_ / "cache/models--org--na.me_1";
  std::map<std::string, std::string, std::less<>> variables_ = {
      {"HF_HUB_CACHE", (folder_ / "cache").string()}};
};

TEST_F(FindModel, AFolderIsItself) {
  EXPECT_EQ(find(folder_.path().string()), folder_.path());
  write_file(folder_ / "weights.txt", "x");
  EXPECT_THAT(failure((folder_ / "weights.txt").string()), HasSubstr("a file; give the folder"));
}

TEST_F(FindModel, OfAnUnknownNameSaysWhatToGive) {
  for (const auto& [name, near] :
       {std::pair("poket", "pocket"), std::pair("POCKET-QWEN", "pocket-qwen"),
        std::pair("pocket_internvl", "pocket-internvl"),
        std::pair("pocket-lava", "pocket-llava")}) {
    EXPECT_THAT(failure(name), HasSubstr(fmt::format("; did you mean {}?", near)));
  }
  for (const char* name : {"qwen:3b", "../gone", "a/b/c", "InternVL3"}) {
    EXPECT_THAT(failure(name), HasSubstr("give the folder of a checkpoint, or download one"))
        << name;
  }
  EXPECT_THAT(failure("gone/q8.gguf:x"), HasSubstr("hf download"));
  EXPECT_THAT(failure("q8.gguf"), HasSubstr("GGUF is not read"));
  EXPECT_THAT(failure("hf://org/gone"), HasSubstr("`hf download org/gone`"));
}

TEST_F(FindModel, OfAFileNamesWhatToGiveInstead) {
  for (const char* name : {"model.safetensors", "model-00001-of-00002.safetensors", "config.json",
                           "model.safetensors.index.json"}) {
    write_file(folder_ / name, "x");
    EXPECT_THAT(failure((folder_ / name).string()),
                HasSubstr("one file of a checkpoint; give its folder, " + folder_.path().string()))
        << name;
  }
  write_file(folder_ / "q4.gguf", "x");
  EXPECT_THAT(failure((folder_ / "q4.gguf").string(), ErrorCode::kUnsupported),
              HasSubstr("GGUF is not read; give the folder of the safetensors checkpoint"));
}

TEST_F(FindModel, AFolderOfTheCacheIsItsSnapshot) {
  const fs::path main = add_snapshot(kMain);
  EXPECT_EQ(find(repository_.string()), main);  // the only one
  add_snapshot(kOther);
  EXPECT_THAT(failure(repository_.string()), HasSubstr("org/na.me_1@" + kMain));
  write_file(repository_ / "refs/main", kMain);
  EXPECT_EQ(find(repository_.string()), main);
  EXPECT_EQ(find(repository_.string() + "/"), main);
  // Of that name, but a checkpoint of its own.
  write_file(folder_ / "models--a--b/config.json", "{}");
  EXPECT_EQ(find((folder_ / "models--a--b").string()), folder_ / "models--a--b");
}

TEST_F(FindModel, TakesWhatPeoplePaste) {
  const fs::path snapshot = add_snapshot(kMain);
  for (const char* name : {"org/na.me_1/", "org/na.me_1//", "https://huggingface.co/org/na.me_1",
                           "https://huggingface.co/org/na.me_1/", "hf.co/org/na.me_1",
                           "models--org--na.me_1", "models--org--na.me_1/"}) {
    EXPECT_EQ(find(name), snapshot) << name;
  }
}

TEST_F(FindModel, SaysOfQuantizedNamesWhatToUse) {
  for (const char* name :
       {"unsloth/x-bnb-4bit", "a/B-GGUF", "a/Qwen2.5-VL-7B-exl2", "a/Qwen3-VL-8B-NVFP4"}) {
    EXPECT_THAT(failure(name), HasSubstr("quantized weights that are not read; use the 16-bit "
                                         "checkpoint"))
        << name;
  }
}

TEST_F(FindModel, BundledNames) {
  fs::create_directories(folder_ / "bundled/pocket-llava");
  EXPECT_EQ(find("pocket"), folder_ / "bundled/pocket-llava");
  EXPECT_EQ(find("pocket-llava"), folder_ / "bundled/pocket-llava");
  EXPECT_THAT(failure("pocket-qwen"), AllOf(HasSubstr("bundled model pocket-qwen is not at"),
                                            HasSubstr("there are pocket-llava")));
  fs::remove_all(folder_ / "bundled");
  EXPECT_THAT(failure("pocket"), HasSubstr("set KVLM_HOME to the folder"));
}

TEST_F(FindModel, RefsMainNamesTheSnapshot) {
  const fs::path snapshot = add_snapshot(kMain);
  add_snapshot(kOther);
  write_file(repository_ / "refs/main", "  " + kMain + "\r\n");
  EXPECT_EQ(find("org/na.me_1"), snapshot);
  EXPECT_EQ(find("org/na.me_1@main"), snapshot);
}

TEST_F(FindModel, RevisionsAreBranchesOrCommits) {
  add_snapshot(kMain);
  const fs::path other = add_snapshot(kOther);
  write_file(repository_ / "refs/main", kMain);
  write_file(repository_ / "refs/refs/pr/3", kOther);
  EXPECT_EQ(find("org/na.me_1@" + kOther), other);
  EXPECT_EQ(find("org/na.me_1@refs/pr/3"), other);
  EXPECT_THAT(failure("org/na.me_1@v2"),
              AllOf(HasSubstr("no snapshot of revision v2, only " + kMain + ", " + kOther),
                    HasSubstr("hf download org/na.me_1 --revision v2")));
}

TEST_F(FindModel, WithoutRefsTheOnlySnapshotIsMeant) {
  const fs::path snapshot = add_snapshot(kMain);
  EXPECT_EQ(find("org/na.me_1"), snapshot);
  add_snapshot(kOther);
  EXPECT_THAT(failure("org/na.me_1"),
              AllOf(HasSubstr("2 snapshots"), HasSubstr("org/na.me_1@" + kMain),
                    HasSubstr("org/na.me_1@" + kOther)));
}

TEST_F(FindModel, RefusesAHostileRef) {
  add_snapshot(kMain);
  for (const std::string& content :
       std::initializer_list<std::string>{"../../../../etc", "", "/etc", ".", "main", "a b",
                                          "0123\n0123", std::string(300, 'a')}) {
    write_file(repository_ / "refs/main", content);
    EXPECT_THAT(failure("org/na.me_1"), HasSubstr("which is not a commit")) << content;
  }
}

TEST_F(FindModel, ShowsNothingRawOfTheEnvironment) {
  variables_ = {{"HF_HOME", "/tmp/\x1b[2J\n/hf"}};
  const std::string message = failure("org/na.me_1");
  EXPECT_EQ(message.find_first_of("\x1b\n"), std::string::npos) << message;
  EXPECT_THAT(message, HasSubstr("/tmp/\\x1b[2J\\x0a/hf/hub/models--org--na.me_1"));
}

/// 16 GB are not to be fetched for a family that does not load.
TEST_F(FindModel, AdvisesDownloadsForFamiliesThatLoad) {
  for (const std::string name :
       {"llava-hf/llava-1.5-7b-hf", "llava-hf/llava-v1.6-mistral-7b-hf",
        "llava-hf/llama3-llava-next-8b-hf", "llava-hf/llava-onevision-qwen2-7b-ov-hf",
        "Qwen/Qwen2.5-VL-7B-Instruct", "OpenGVLab/InternVL2_5-8B"}) {
    EXPECT_THAT(failure(name), AllOf(HasSubstr("llava-1.5"), HasSubstr("hf download " + name)));
  }
  for (const char* name : {"Qwen/Qwen-VL-Chat", "Qwen/Qwen3-VL-30B-A3B-Instruct",
                           "Qwen/Qwen2.5-Omni-7B", "llava-hf/LLaVA-NeXT-Video-7B-hf"}) {
    const std::string message = failure(name);
    EXPECT_THAT(message, HasSubstr("not supported; supported are ")) << name;
    EXPECT_EQ(message.find("hf download"), std::string::npos) << name;
  }
}

TEST_F(FindModel, RefusesHostileNames) {
  for (const char* name :
       {"org/../x", "../x/y", "/nowhere/x", "org/na@../x", "org/na@/etc", "org/na@a//b", "org/na@",
        "a/b/c", "a--b/c", ".a/b", "org/", "nothing", "org/\x1b[2J"}) {
    EXPECT_THAT(failure(name, ErrorCode::kCorruptFile), HasSubstr("there is no model")) << name;
  }
  EXPECT_THAT(failure("", ErrorCode::kInvalidArgument), HasSubstr("the model name is empty"));
}

TEST_F(FindModel, NamesAnIncompleteDownload) {
  write_file(repository_ / "refs/main", kMain);
  fs::create_directories(repository_ / "snapshots");
  EXPECT_THAT(failure("org/na.me_1"), AllOf(HasSubstr("no snapshot of revision main"),
                                            HasSubstr("hf download org/na.me_1")));
  fs::create_directories(repository_ / "snapshots" / kMain);
  EXPECT_THAT(failure("org/na.me_1"), HasSubstr("no config.json, so the download is incomplete"));
  write_file(repository_ / "blobs/abc.incomplete", "x");
  EXPECT_THAT(failure("org/na.me_1"), AllOf(HasSubstr("1 files are unfinished (abc.incomplete)"),
                                            HasSubstr("hf download org/na.me_1")));
}

TEST_F(FindModel, FollowsLinksIntoBlobs) {
  write_file(repository_ / "blobs/abc", "{}");
  fs::create_directories(repository_ / "snapshots" / kMain);
  fs::create_symlink("../../blobs/abc", repository_ / "snapshots" / kMain / "config.json");
  EXPECT_EQ(find("org/na.me_1"), repository_ / "snapshots" / kMain);
  fs::remove(repository_ / "blobs/abc");  // now the link leads nowhere
  EXPECT_THAT(failure("org/na.me_1"), HasSubstr("incomplete"));
}

TEST_F(FindModel, LooksIntoTheCachesInOrder) {
  const std::vector<std::pair<std::string, std::string>> places = {
      {"HOME", "home/.cache/huggingface/hub"},
      {"XDG_CACHE_HOME", "xdg/huggingface/hub"},
      {"HF_HOME", "hf/hub"},
      {"HF_HUB_CACHE", "cache"}};
  variables_ = {{"HOME", (folder_ / "home").string()},
                {"XDG_CACHE_HOME", (folder_ / "xdg").string()},
                {"HF_HOME", (folder_ / "hf").string()},
                {"HF_HUB_CACHE", (folder_ / "cache").string()}};
  const std::string message = failure("org/na.me_1");
  for (const auto& [variable, place] : places) {
    EXPECT_THAT(message, HasSubstr((folder_ / place / "models--org--na.me_1").string()));
  }
  for (const auto& [variable, place] : places) {  // each is preferred to those before it
    const fs::path snapshot = folder_ / place / "models--org--na.me_1/snapshots" / kMain;
    write_file(snapshot / "config.json", "{}");
    EXPECT_EQ(find("org/na.me_1"), snapshot);
  }
}

TEST_F(FindModel, ExpandsHomeAndIgnoresEmptyVariables) {
  variables_ = {{"HF_HUB_CACHE", ""}, {"HF_HOME", "~/hf"}, {"HOME", folder_.path().string()}};
  const fs::path snapshot = folder_ / "hf/hub/models--org--a/snapshots" / kMain;
  write_file(snapshot / "config.json", "{}");
  EXPECT_EQ(find("org/a"), snapshot);
}

}  // namespace
}  // namespace kvlm
