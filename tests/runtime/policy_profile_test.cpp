#include "runtime/policy_profile.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>

#include "kernels/base/error.h"

namespace kvlm {
namespace {

namespace fs = std::filesystem;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::Pair;

/// A folder of its own, gone with the test.
class PolicyProfileFile : public testing::Test {
 protected:
  PolicyProfileFile() : folder_(fs::temp_directory_path() / ("kvlm-profile-" + unique())) {
    fs::create_directory(folder_);
  }
  ~PolicyProfileFile() override { fs::remove_all(folder_); }

  std::string path(const std::string& name = "profile.json") const { return folder_ / name; }
  std::string put(const std::string& text) const {
    std::ofstream(path()) << text;
    return path();
  }
  std::string text() const {
    std::ifstream file(path());
    return {std::istreambuf_iterator<char>(file), {}};
  }
  size_t files() const {
    return static_cast<size_t>(
        std::distance(fs::directory_iterator(folder_), fs::directory_iterator()));
  }

 private:
  static std::string unique() {
    const auto* test = testing::UnitTest::GetInstance()->current_test_info();
    return std::string(test->name()) + "-" + std::to_string(getpid());
  }
  fs::path folder_;
};

template <class Call>
std::string refusal(ErrorCode code, const Call& call) {
  try {
    call();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), code);
    return error.what();
  }
  return "nothing was thrown";
}

PolicyProfile whole() {
  PolicyProfile profile;
  profile.model = "m";
  profile.forget_keep = 0.5;
  profile.forget["means"] = {0.25, 0.75};
  profile.forget["sums"] = {0.125, 0.875};
  profile.gini["sums"] = {0.5, 0.25};
  profile.forget_std["sums"] = {0.0625, 0.125};
  profile.forget_mad["sums"] = {0.03125, 0.0625};
  profile.tau = {{1, {1, 2}}, {2, {0, 3}}};
  profile.alpha = {{1, 0.2}, {8, 0.00004}};
  profile.eta = {{2, 0.045}};
  return profile;
}

TEST_F(PolicyProfileFile, ReadsWhatItWrites) {
  write_profile(whole(), path());
  const PolicyProfile read = read_profile(path());
  EXPECT_EQ(read.model, "m");
  EXPECT_EQ(read.forget_keep, 0.5);
  EXPECT_EQ(read.forget, whole().forget);
  EXPECT_EQ(read.gini, whole().gini);
  EXPECT_EQ(read.forget_std, whole().forget_std);
  EXPECT_EQ(read.forget_mad, whole().forget_mad);
  EXPECT_EQ(read.tau, whole().tau);
  EXPECT_EQ(read.alpha, whole().alpha);
  EXPECT_EQ(read.eta, whole().eta);
  EXPECT_EQ(text(), profile_text(whole()));
  EXPECT_EQ(files(), 1u);
}

/// What an older version wrote at one width was used at all: it is not taken for any.
TEST_F(PolicyProfileFile, RefusesValuesWithoutTheirWidth) {
  for (const char* text :
       {R"({"calibquant": {"tau": [0, 3]}})", R"({"head_quantile": {"alpha": 0.2}})",
        R"({"xquant": {"eta": [0, 0]}})"}) {
    const std::string told = refusal(ErrorCode::kCorruptFile, [&] { read_profile(put(text)); });
    EXPECT_THAT(told, HasSubstr("without bit widths")) << text;
    EXPECT_THAT(told, HasSubstr("measure it again with vlm-kv profile")) << text;
  }
  for (const char* text :
       {R"({"xquant": {"eta": {"9": 0.1}}})", R"({"xquant": {"eta": {"16": 0.1}}})",
        R"({"xquant": {"eta": {"": 0.1}}})"}) {
    EXPECT_THAT(refusal(ErrorCode::kCorruptFile, [&] { read_profile(put(text)); }),
                HasSubstr("expected 1 to 8"))
        << text;
  }
}

/// The published profiles are one list, fitted on sums.
TEST_F(PolicyProfileFile, TakesABareListOfForgetRatiosForSums) {
  const PolicyProfile profile =
      read_profile(put(R"({"model": "m", "prefixkv": {"keep": 0.5, "forget": [0.25, 0.75]}})"));
  EXPECT_THAT(profile.forget, ElementsAre(Pair("sums", ElementsAre(0.25, 0.75))));
}

TEST_F(PolicyProfileFile, NamesWhatIsWrong) {
  const auto told = [&](const char* text) {
    return refusal(ErrorCode::kCorruptFile, [&] { read_profile(put(text)); });
  };
  EXPECT_THAT(told("[]"), HasSubstr("not a JSON object"));
  EXPECT_THAT(told(R"({"h2o": {}})"), HasSubstr("there is no policy h2o to profile"));
  EXPECT_THAT(told(R"({"prefixkv": {"keep": 2, "forget": [0]}})"), HasSubstr("prefixkv.keep is 2"));
  EXPECT_THAT(told(R"({"prefixkv": {"keep": 1, "forget": {"mean": [0]}}})"),
              HasSubstr("prefixkv.forget has mean, expected means and sums"));
  EXPECT_THAT(told(R"({"prefixkv": {"keep": 1, "forget": {"sums": [1.5]}}})"),
              HasSubstr("prefixkv.forget.sums is 1.5, expected a number from 0 to 1"));
  EXPECT_THAT(told(R"({"calibquant": {"tau": {"1": [0]}}})"),
              HasSubstr("calibquant.tau at 1 bits is [0], expected two numbers"));
  EXPECT_THAT(told(R"({"head_quantile": {"alpha": {"1": 0.5}}})"),
              HasSubstr("expected a number from 0 to 0.4999"));
}

TEST_F(PolicyProfileFile, KeepsWhatIsThereOfTheSameModel) {
  EXPECT_EQ(profile_to_extend(path(), "m").model, "m");
  EXPECT_EQ(files(), 0u);
  write_profile(whole(), path());
  EXPECT_EQ(profile_to_extend(path(), "m").alpha, whole().alpha);
  put("");  // nothing to lose
  EXPECT_TRUE(profile_to_extend(path(), "m").alpha.empty());
}

TEST_F(PolicyProfileFile, NeverOverwritesWhatIsNoProfileOfThisModel) {
  const auto told = [&](const std::string& path, const char* model) {
    return refusal(ErrorCode::kInvalidArgument, [&] { profile_to_extend(path, model); });
  };
  for (const char* text :
       {"{\"id\": \"a\"}\n", "my notes", "{\"calibquant\": {\"tau\": [0, 3]}}"}) {
    put(text);
    EXPECT_THAT(told(path(), "m"), HasSubstr("exists and is not a profile of this version"));
    EXPECT_EQ(this->text(), text);
  }
  write_profile(whole(), path());
  EXPECT_THAT(told(path(), "other"), HasSubstr("is the profile of m, not of other"));
  EXPECT_EQ(text(), profile_text(whole()));
  EXPECT_THAT(told(path(""), "m"), HasSubstr("is not a regular file"));
  EXPECT_THAT(told(path("no/such.json"), "m"), HasSubstr("cannot be written"));
}

TEST_F(PolicyProfileFile, IsUsedOnItsModelAlone) {
  PolicyProfile profile;
  EXPECT_NO_THROW(require_profile_of(profile, "anything"));
  profile.model = "llava-hf/llava-1.5-7b-hf";
  EXPECT_NO_THROW(require_profile_of(profile, "/models/llava-1.5-7b-hf/"));
  try {
    require_profile_of(profile, "pocket");
    FAIL() << "expected an Error";
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), HasSubstr("llava-hf/llava-1.5-7b-hf, not on pocket"));
  }
  profile.model = "pocket";
  EXPECT_NO_THROW(require_profile_of(profile, "tools/pocket/pocket-llava"));
}

TEST_F(PolicyProfileFile, IsWrittenThroughALink) {
  fs::create_symlink(path(), path("link"));
  put("");
  write_profile(whole(), path("link"));
  EXPECT_TRUE(fs::is_symlink(path("link")));
  EXPECT_EQ(text(), profile_text(whole()));
}

}  // namespace
}  // namespace kvlm
