#include "tools/run/output.h"

#include <gmock/gmock.h>

#include "kernels/base/error.h"

namespace kvlm {
namespace {

using nlohmann::ordered_json;
using testing::HasSubstr;

std::string refusal(std::string_view text) {
  try {
    parse_output(text, "out.jsonl");
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kCorruptFile);
    return error.what();
  }
  return "";
}

TEST(OutputText, LinesSayWhatTheyAre) {
  const std::string answer =
      R"({"id":"a","text":"x","model":"m","kv":{"spec":"f16"},"settings":{"seed":1}})";
  const std::string text = answer + "\n" + R"({"id":null,"line":7,"error":"odd"})" + "\n";
  const OutputText output = parse_output(text, "out.jsonl");
  ASSERT_EQ(output.lines.size(), 2u);
  EXPECT_EQ(output.good_bytes, text.size());
  EXPECT_FALSE(output.open_end);
  const OutputLine& first = output.lines[0];
  EXPECT_EQ(first.id, "a");
  EXPECT_FALSE(first.failed);
  EXPECT_EQ(first.settings.model, "m");
  EXPECT_EQ(first.settings.spec, "f16");
  EXPECT_EQ(first.settings.flags, (ordered_json{{"seed", 1}}));
  EXPECT_EQ(first.asked, ordered_json::object()) << "an earlier version wrote it";
  const OutputLine& second = output.lines[1];
  EXPECT_TRUE(second.id.is_null());
  EXPECT_TRUE(second.failed);
  EXPECT_EQ(second.offset, answer.size() + 1);
  EXPECT_EQ(second.offset + second.length, text.size());
}

TEST(OutputText, AnAnswerSaysWhatWasAsked) {
  const auto asked = [](const std::string& rest) {
    return parse_output(R"({"id":1,"text":"x")" + rest + "}\n", "out.jsonl").lines.at(0).asked;
  };
  EXPECT_EQ(asked(R"(,"images":["/a"],"prompt":"b")"),
            (ordered_json{{"images", {"/a"}}, {"prompt", "b"}}));
  EXPECT_EQ(asked(R"(,"prompt":"b")"), (ordered_json{{"prompt", "b"}}));
  EXPECT_EQ(asked(R"(,"images":["/a"],"videos":["/b"],"clips":[{"frames":4,"of":9}])"),
            (ordered_json{{"images", {"/a"}}, {"videos", {"/b"}}}));
  EXPECT_EQ(asked(R"(,"images":[1],"prompt":{})"), ordered_json::object());
}

TEST(OutputText, ARecordHasOneAnswer) {
  const std::string first = R"({"id":1,"text":"x","tokens":[1]})"
                            "\n";
  const std::string failed = R"({"id":1,"error":"y"})"
                             "\n";
  const std::string other = R"({"id":"1","text":"y"})"
                            "\n";
  EXPECT_EQ(refusal(first + failed + other + first), "") << "what is repeated is the same";
  EXPECT_EQ(refusal(first + other +
                    R"({"id":1,"text":"z"})"
                    "\n"),
            "--out out.jsonl has two answers to record 1 that differ, in lines 1 and 3; remove one "
            "of them");
  for (const char* line : {R"({"id":1,"text":5})", R"({"id":1,"text":null})",
                           R"({"id":1,"text":["a"]})", R"({"id":1,"error":{}})"}) {
    EXPECT_THAT(refusal(std::string(line) + "\n"), HasSubstr("not a record of a batch")) << line;
  }
}

TEST(OutputText, OnlyItsOwnTornEndIsCutOff) {
  const std::string whole = R"({"id":1,"text":"x"})";
  for (size_t size = 1; size < whole.size(); ++size) {
    const OutputText output = parse_output(whole + "\n" + whole.substr(0, size), "out.jsonl");
    EXPECT_EQ(output.good_bytes, whole.size() + 1) << size;
    EXPECT_EQ(output.lines.size(), 1u);
  }
  const OutputText open = parse_output(whole, "out.jsonl");
  EXPECT_TRUE(open.open_end);
  EXPECT_EQ(open.good_bytes, whole.size());
  for (const std::string text :
       {"notes", R"({"a": 1})", R"({"id":1})", R"({"id":[1],"text":""})"}) {
    EXPECT_THAT(refusal(text), HasSubstr("not a record of a batch")) << text;
    EXPECT_THAT(refusal(text + "\n" + whole), HasSubstr("not a record of a batch")) << text;
  }
}

TEST(BatchSettings, DifferencesAreNamed) {
  const BatchSettings now{"m", "f16", {{"max_tokens", 4}}};
  EXPECT_FALSE(difference(now, now));
  EXPECT_FALSE(difference({"", "", nullptr}, now)) << "nothing is known of it";
  EXPECT_FALSE(difference({"m", "f16", nullptr}, now));
  EXPECT_EQ(difference({"n", "f16", nullptr}, now), "with --model n, but this run has --model m");
  EXPECT_EQ(difference({"m", "int4", nullptr}, now), "with --kv int4, but this run has --kv f16");
  EXPECT_EQ(difference({"m", "f16", ordered_json::object()}, now),
            "with no --max-tokens, but this run has --max-tokens 4");
  EXPECT_EQ(difference({"m", "f16", {{"max_tokens", 4}, {"stop", {"a"}}}}, now),
            "with --stop [\"a\"], but this run has no --stop");
}

TEST(BatchSettings, AProfileIsWhatItsFileSays) {
  const auto with = [](const ordered_json& profile) {
    return BatchSettings{"m", "f16", {{"kv_profile", profile}}};
  };
  const BatchSettings now = with({{"file", "a.json"}, {"hash", "1"}});
  EXPECT_FALSE(difference(with({{"file", "b.json"}, {"hash", "1"}}), now));
  EXPECT_FALSE(difference(with("a.json"), now)) << "an earlier version wrote the name";
  EXPECT_TRUE(difference(with("b.json"), now));
  EXPECT_TRUE(difference(BatchSettings{"m", "f16", ordered_json::object()}, now));
  EXPECT_EQ(difference(with({{"file", "a.json"}, {"hash", "2"}}), now),
            "with --kv-profile a.json (of content 2), but this run has --kv-profile a.json (of "
            "content 1)");
}

TEST(BatchSettings, OnlyWhatDecidesAnswersCounts) {
  RunOptions options;
  const BatchSettings plain = batch_settings(options);
  EXPECT_EQ(plain.flags, ordered_json::object());
  options.batch_size = 9;
  options.session.threads = 3;
  options.session.device = "cpu";
  options.kv_memory = 1 << 20;
  options.quiet = true;
  options.temperature = 0;  // the default
  EXPECT_FALSE(difference(plain, batch_settings(options)));
  options.prompt = "\xff?";
  options.system = std::string(1000, 'x');
  const BatchSettings given = batch_settings(options);
  EXPECT_TRUE(difference(plain, given));
  EXPECT_FALSE(difference(given, batch_settings(options)));
  EXPECT_LT(given.flags["system"].get<std::string>().size(), 200u);
  options.system.back() = 'y';
  EXPECT_TRUE(difference(given, batch_settings(options)));
}

}  // namespace
}  // namespace kvlm
