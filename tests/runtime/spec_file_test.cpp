#include "runtime/spec_file.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "kernels/base/error.h"

namespace kvlm {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::StartsWith;

TEST(SpecFile, IsTheSentenceThatItSpellsOut) {
  EXPECT_EQ(spec_of_json(R"({"default": "f16"})", "x"), parse_spec("f16"));
  EXPECT_EQ(spec_of_json(R"({"default": "kivi", "layers": {}})", "x"), parse_spec("kivi"));
  EXPECT_EQ(spec_of_json(R"({"default": "kivi", "layers": null})", "x"), parse_spec("kivi"));
  EXPECT_EQ(canonical(spec_of_json(
                R"({"default": "kivi,bits=2",
                    "layers": {"0-1, 30": "kivi,bits=4", "31": "f16"}})",
                "x")),
            "kivi,bits=2 + kivi,bits=4,layers=0-1/30 + f16,layers=31");
}

std::string refusal(const std::string& text) {
  try {
    return fmt::format("accepted: {}", canonical(spec_of_json(text, "kv.json")));
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kCorruptFile);
    return error.what();
  }
}

TEST(SpecFile, RefusesWhatItCannotMean) {
  EXPECT_EQ(refusal("[]"),
            "kv.json: not an object; write {\"default\": SPEC, \"layers\": {\"0-1,30\": SPEC}}");
  EXPECT_EQ(
      refusal(R"({"defaults": "f16"})"),
      "kv.json: has the unknown key \"defaults\"; did you mean \"default\"? (its keys are default, "
      "layers)");
  EXPECT_EQ(refusal(R"({"default": "kivi", "layer\u001b": {}})"),
            "kv.json: has the unknown key \"layer\\x1b\"; did you mean \"layers\"? (its keys are "
            "default, "
            "layers)");
  EXPECT_EQ(refusal("{}"), "kv.json: default is missing; expected a string");
  EXPECT_EQ(refusal(R"({"default": 2})"), "kv.json: default is 2; expected a string");
  EXPECT_THAT(refusal(R"({"default": "f16", "layers": []})"), StartsWith("kv.json: layers is "));
  EXPECT_EQ(refusal(R"({"default": "f16", "layers": {"0": 4}})"),
            "kv.json: layers.0 is 4; expected a string");
  EXPECT_THAT(refusal(R"({"default": "f16", "default": "f16"})"),
              HasSubstr("key \"default\" appears twice"));
  EXPECT_THAT(refusal(R"({"default": "kivi", "layers": {"0": "int4", "0": "int8"}})"),
              HasSubstr("key \"0\" in layers appears twice"));
  EXPECT_THAT(refusal(R"({"default": )"), StartsWith("kv.json: line 1, column "));
  EXPECT_THAT(refusal(std::string(100, '[')), StartsWith("kv.json: "));
  EXPECT_EQ(refusal(R"({"default": "kiwi"})").substr(0, 56),
            "kv.json: default: --kv has no policy \"kiwi\"; did you mea");
  EXPECT_EQ(refusal(R"({"default": "kivi", "layers": {"0-1": "kivi,bits=0"}})"),
            "kv.json: layers \"0-1\": --kv kivi has no bits=0; did you mean bits=1? (legal: an "
            "integer from 1 to 8)");
  EXPECT_EQ(refusal(R"({"default": "kivi", "layers": {"0-1": "int8", "1-2": "int4"}})"),
            "kv.json: --kv \"kivi + int8,layers=0-1 + int4,layers=1-2\" has two quantizers for "
            "layer 1, int8,layers=0-1 and int4,layers=1-2; keep one");
  EXPECT_THAT(refusal(std::string((1 << 20) + 1, ' ')),
              StartsWith("kv.json: a file of 1048577 bytes; a spec file has at most"));
}

TEST(ReadSpec, TakesAFileWithASentence) {
  const std::filesystem::path path =
      std::filesystem::temp_directory_path() / "kvlm_spec_sentence_test.txt";
  const auto read = [&](const char* text) {
    std::ofstream(path) << text;
    return read_spec(fmt::format("@{}", path.string()));
  };
  const auto refused = [&](const char* text) -> std::string {
    try {
      read(text);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kCorruptFile);
      return error.what();
    }
    return "accepted";
  };
  EXPECT_EQ(read("\n h2o,keep=0.5 + int8\n"), parse_spec("h2o,keep=0.5 + int8"));
  EXPECT_THAT(refused("kiwi"), AllOf(StartsWith("--kv @"), HasSubstr("did you mean kivi?")));
  for (const char* text : {R"({"spec": "int8"})", R"("int8")", "[]", "{", ""}) {
    EXPECT_THAT(refused(text), AllOf(StartsWith("--kv @"), HasSubstr("write {\"default\": SPEC")))
        << text;
  }
  std::filesystem::remove(path);
}

TEST(ReadSpec, TakesASentenceOrAFile) {
  EXPECT_EQ(read_spec("kivi"), parse_spec("kivi"));
  const std::filesystem::path path =
      std::filesystem::temp_directory_path() / "kvlm_spec_file_test.json";
  std::ofstream(path) << R"({"default": "kivi", "layers": {"3": "f16"}})";
  EXPECT_EQ(read_spec(fmt::format("@{}", path.string())), parse_spec("kivi + f16,layers=3"));
  std::filesystem::remove(path);
  try {
    read_spec(fmt::format("@{}", path.string()));
    FAIL() << "expected an Error";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kCorruptFile);
    EXPECT_THAT(error.what(), HasSubstr(path.string()));
  }
  try {
    read_spec("@");
    FAIL() << "expected an Error";
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(), "--kv @ names no file; write --kv @FILE.json");
  }
}

}  // namespace
}  // namespace kvlm
