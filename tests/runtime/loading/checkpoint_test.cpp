#include "runtime/loading/checkpoint.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <cstring>
#include <nlohmann/json.hpp>

#include "runtime/loading/weight_names.h"
#include "tests/runtime/loading/safetensors_writer.h"
#include "tests/source_folder.h"

namespace kvlm {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using test::error_of;
using test::file_tensor;
using test::FileTensor;
using test::safetensors;
using test::TempFolder;
using test::write_file;
using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

constexpr std::array<float, 6> kValues = {0.0f, -1.5f, 0.25f, 1024.0f, -0.0f, 3.140625f};

template <class T>
void expect_values(const ConstTensorView& view) {
  ASSERT_EQ(view.dtype(), kDTypeOf<T>);
  ASSERT_EQ(view.elements(), 6);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(view.data()) % sizeof(T), 0u);
  for (size_t i = 0; i < kValues.size(); ++i) EXPECT_EQ(to_float(view.as<T>()[i]), kValues[i]);
}

std::vector<FileTensor> three_tensors() {
  return {file_tensor<float>("a", {2, 3}, kValues), file_tensor<f16>("b", {6}, kValues),
          file_tensor<bf16>("c", {3, 2}, kValues)};
}

class CheckpointTest : public testing::Test {
 protected:
  CheckpointTest() { write("config.json", R"({"model_type":"llava"})"); }

  void write(const std::string& name, std::string_view content) {
    write_file(folder_ / name, content);
  }
  Checkpoint open() { return Checkpoint(folder_.path()); }
  std::string failure(ErrorCode code = ErrorCode::kCorruptFile) {
    return test::failure([&] { open(); }, code);
  }
  /// Writes a and b to one shard, c to the other, and an index of `map`.
  void write_shards(const json& map) {
    const auto tensors = three_tensors();
    write("model-00001-of-00002.safetensors", safetensors({tensors[0], tensors[1]}));
    write("model-00002-of-00002.safetensors", safetensors({tensors[2]}));
    write("model.safetensors.index.json", json{{"weight_map", map}}.dump());
  }
  json good_map() const {
    return {{"a", "model-00001-of-00002.safetensors"},
            {"b", "model-00001-of-00002.safetensors"},
            {"c", "model-00002-of-00002.safetensors"}};
  }

  TempFolder folder_;
};

void expect_three(WeightMap weights) {
  EXPECT_THAT(weights.remaining(), ElementsAre("a", "b", "c"));
  expect_values<float>(weights.take("a", {2, 3}));
  expect_values<f16>(weights.take("b", {6}));
  expect_values<bf16>(weights.take("c", {3, 2}));
}

TEST_F(CheckpointTest, ReadsASingleFile) {
  write("model.safetensors", safetensors(three_tensors()));
  Checkpoint checkpoint = open();
  EXPECT_EQ(checkpoint.folder(), folder_.path());
  EXPECT_EQ(checkpoint.config()["model_type"], "llava");
  EXPECT_EQ(checkpoint.weight_bytes(), 24u + 12u + 12u);
  EXPECT_THAT(checkpoint.warnings(), IsEmpty());
  expect_three(checkpoint.take_weights());
}

TEST_F(CheckpointTest, ReadsShards) {
  write_shards(good_map());
  Checkpoint checkpoint = open();
  EXPECT_EQ(checkpoint.weight_bytes(), 48u);
  EXPECT_EQ(checkpoint.weight_bytes(DType::kF32), 3u * 24);
  EXPECT_EQ(checkpoint.weight_bytes(DType::kF16), 3u * 12);
  EXPECT_THAT(checkpoint.warnings(), IsEmpty());
  expect_three(checkpoint.take_weights());
}

TEST_F(CheckpointTest, PrefersTheSingleFile) {
  write_shards(good_map());
  write("model.safetensors", safetensors({file_tensor<float>("only", {6}, kValues)}));
  EXPECT_THAT(open().take_weights().remaining(), ElementsAre("only"));
}

TEST_F(CheckpointTest, WeightsOutliveTheCheckpoint) {
  write_shards(good_map());
  WeightMap weights = [&] { return open().take_weights(); }();
  expect_three(std::move(weights));
}

TEST_F(CheckpointTest, CopiesUnalignedTensors) {
  for (const size_t misalignment : {1u, 2u, 7u}) {
    write("model.safetensors", safetensors(three_tensors(), misalignment));
    Checkpoint checkpoint = open();
    ASSERT_EQ(checkpoint.warnings().size(), 1u);
    EXPECT_THAT(checkpoint.warnings()[0], HasSubstr("not aligned"));
    expect_three(checkpoint.take_weights());
  }
}

TEST_F(CheckpointTest, MoreThanFourDimensionsBecomeTwo) {
  write("model.safetensors", safetensors({file_tensor<float>("conv", {2, 1, 3, 1, 1}, kValues),
                                          file_tensor<float>("four", {1, 2, 3, 1}, kValues)}));
  WeightMap weights = open().take_weights();
  expect_values<float>(weights.take("conv", {2, 3}));
  expect_values<float>(weights.take("four", {1, 2, 3, 1}));
}

TEST_F(CheckpointTest, ScalarsAndEmptyTensorsAreLegal) {
  write("model.safetensors",
        safetensors({{"scalar", "F32", {}, "abcd"}, {"empty", "F32", {0, 5}, ""}}, 1));
  WeightMap weights = open().take_weights();
  EXPECT_EQ(weights.take("scalar", {}).bytes(), 4u);
  EXPECT_EQ(weights.take("empty", {0, 5}).bytes(), 0u);
}

TEST_F(CheckpointTest, OtherDTypesAreRefusedOnlyWhenTaken) {
  write("model.safetensors", safetensors({{"position_ids", "I64", {1, 2}, std::string(16, '\0')},
                                          {"quantised", "F8_E4M3", {4}, "abcd"},
                                          {"mask", "U8", {4}, "abcd"}}));
  WeightMap weights = open().take_weights();
  EXPECT_THAT(weights.remaining(), ElementsAre("mask", "position_ids", "quantised"));
  EXPECT_TRUE(weights.contains("quantised"));
  const auto refusal = [&](const char* name) {
    const Error error = error_of([&] { weights.take(name, {4}); });
    EXPECT_EQ(error.code(), ErrorCode::kUnsupported);
    return std::string(error.what());
  };
  EXPECT_THAT(refusal("quantised"),
              HasSubstr("tensor quantised holds F8_E4M3; weights must be f32, f16 or bf16"));
  EXPECT_THAT(refusal("mask"), HasSubstr("tensor mask holds u8"));
  weights.convert(DType::kF32);  // passes over what it cannot read
  weights.rename([](std::string_view name) {
    return name == "position_ids" ? std::string() : std::string(name);
  });
  EXPECT_THAT(weights.remaining(), ElementsAre("mask", "quantised"));
}

TEST_F(CheckpointTest, SaysWhatIsWrongWithTheFolder) {
  const auto failure_of = [](const fs::path& path) {
    const Error error = error_of([&] { Checkpoint checkpoint(path); });
    EXPECT_EQ(error.code(), ErrorCode::kCorruptFile);
    return std::string(error.what());
  };
  EXPECT_THAT(failure_of(folder_ / "absent"), HasSubstr("there is no such folder"));
  EXPECT_THAT(failure_of(folder_ / "config.json"), HasSubstr("a file; give the folder"));
  fs::create_directory(folder_ / "empty");
  EXPECT_THAT(failure_of(folder_ / "empty"), AllOf(HasSubstr("empty"), HasSubstr("hf download")));
  write("sub/model.safetensors", safetensors({}));
  EXPECT_THAT(failure_of(folder_ / "sub"), HasSubstr("no config.json"));
}

TEST_F(CheckpointTest, SaysWhatIsThereInsteadOfWeights) {
  EXPECT_THAT(failure(), AllOf(HasSubstr("no weights"), HasSubstr("model.safetensors")));
  write("training_args.bin", "x");
  write("pytorch_model-00001-of-00002.bin", "x");
  EXPECT_THAT(failure(ErrorCode::kUnsupported),
              AllOf(HasSubstr("pytorch_model-00001-of-00002.bin"), HasSubstr("save_pretrained")));
  write("adapter_model.safetensors", safetensors({}));
  EXPECT_THAT(failure(), AllOf(HasSubstr("only adapter_model.safetensors"), HasSubstr("merge")));
  write("model-00001-of-00002.safetensors", safetensors({}));
  EXPECT_THAT(failure(), HasSubstr("but no model.safetensors.index.json"));
}

TEST_F(CheckpointTest, RefusesDamagedConfigs) {
  write("model.safetensors", safetensors({}));
  write("config.json", R"({"a":1,"a":2})");
  EXPECT_THAT(failure(), AllOf(HasSubstr("config.json"), HasSubstr("appears twice")));
  write("config.json", "[]");
  EXPECT_THAT(failure(), HasSubstr("config.json: is not an object"));
  write("config.json", "");
  EXPECT_THAT(failure(), HasSubstr("an empty file"));
}

TEST_F(CheckpointTest, BoundsTheSizeOfEveryText) {
  write("model.safetensors", safetensors({}));
  write("tokenizer.json", " ");
  fs::resize_file(folder_ / "tokenizer.json", (128 << 20) + 1);  // sparse
  EXPECT_THAT(error_of([&] { open().text("tokenizer.json"); }).what(),
              AllOf(HasSubstr("tokenizer.json: 134217729 bytes"), HasSubstr("134217728")));
  fs::resize_file(folder_ / "tokenizer.json", 64 << 20);
  EXPECT_EQ(open().text("tokenizer.json")->size(), size_t{64} << 20);
  fs::resize_file(folder_ / "config.json", (16 << 20) + 1);
  EXPECT_THAT(failure(), AllOf(HasSubstr("config.json: 16777217 bytes"), HasSubstr("16777216")));
  EXPECT_THAT(error_of([&] { read_config(folder_.path()); }).what(),
              HasSubstr("config.json: 16777217 bytes"));
}

TEST_F(CheckpointTest, RecognisesGitLfsPointers) {
  const std::string pointer =
      "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 4992\n";
  write("model.safetensors", pointer);
  EXPECT_THAT(failure(), AllOf(HasSubstr("model.safetensors: a Git LFS pointer"),
                               HasSubstr("git lfs pull"), HasSubstr("hf download")));
  write("model.safetensors", safetensors({}));
  write("tokenizer.json", pointer);
  EXPECT_THAT(error_of([&] { open().json("tokenizer.json"); }).what(),
              HasSubstr("tokenizer.json: a Git LFS pointer"));
}

TEST_F(CheckpointTest, RefusesLinksToNothingAndSpecialFiles) {
  fs::create_symlink("blobs/nowhere", folder_ / "model.safetensors");
  EXPECT_THAT(failure(), HasSubstr("a link to a file that does not exist"));
  fs::remove(folder_ / "model.safetensors");
  fs::create_directory(folder_ / "model.safetensors");
  EXPECT_THAT(failure(), HasSubstr("not a regular file"));
  fs::remove(folder_ / "model.safetensors");
  ASSERT_EQ(::mkfifo((folder_ / "model.safetensors").c_str(), 0600), 0);
  EXPECT_THAT(failure(), HasSubstr("not a regular file"));
}

TEST_F(CheckpointTest, FollowsLinks) {
  write("blobs/abc", safetensors(three_tensors()));
  fs::create_symlink("blobs/abc", folder_ / "model.safetensors");
  expect_three(open().take_weights());
}

TEST_F(CheckpointTest, NamesTheDamagedFile) {
  write("model.safetensors", "");
  EXPECT_THAT(failure(), HasSubstr((folder_ / "model.safetensors").string() + ": 0 bytes long"));
  write("model.safetensors", safetensors(three_tensors()) + "x");
  EXPECT_THAT(failure(), HasSubstr("1 bytes trail the last tensor"));
}

TEST_F(CheckpointTest, ReadsFurtherFiles) {
  write("model.safetensors", safetensors({}));
  write("generation_config.json", R"({"eos_token_id":[1,2]})");
  write("merges.txt", std::string_view("a b\n\0c", 6));
  const Checkpoint checkpoint = open();
  EXPECT_EQ(checkpoint.json("generation_config.json")["eos_token_id"][1], 2);
  EXPECT_EQ(checkpoint.text("merges.txt"), std::string("a b\n\0c", 6));
  EXPECT_TRUE(checkpoint.json("absent.json").is_null());
  EXPECT_EQ(checkpoint.text("absent.txt"), std::nullopt);
  EXPECT_THAT(error_of([&] { checkpoint.json("merges.txt"); }).what(), HasSubstr("merges.txt"));
  for (const char* name : {"../config.json", "/etc/passwd", "a/b", "", "."}) {
    EXPECT_EQ(error_of([&] { checkpoint.text(name); }).code(), ErrorCode::kInvalidArgument) << name;
  }
}

TEST_F(CheckpointTest, TheIndexNamesPlainFiles) {
  for (const char* name : {"../model.safetensors", "/etc/passwd", "a/b.safetensors", "..", ".", "",
                           "a\\b.safetensors"}) {
    write_shards({{"a", name}});
    EXPECT_THAT(failure(), HasSubstr("not a plain file name")) << name;
  }
  write_shards({{"a", 1}});
  EXPECT_THAT(failure(), HasSubstr("tensor a is mapped to something that is not a file name"));
}

TEST_F(CheckpointTest, TheIndexHasAWeightMap) {
  for (const char* index : {"{}", "[]", R"({"weight_map":[]})", R"({"weight_map":{}})"}) {
    write("model.safetensors.index.json", index);
    EXPECT_THAT(failure(), HasSubstr("no weight_map")) << index;
  }
  write("model.safetensors.index.json", R"({"weight_map":{"a":"x","a":"y"}})");
  EXPECT_THAT(failure(), HasSubstr("appears twice"));
}

TEST_F(CheckpointTest, EveryShardIsThere) {
  write_shards(good_map());
  fs::remove(folder_ / "model-00002-of-00002.safetensors");
  EXPECT_THAT(failure(), AllOf(HasSubstr("1 of 2 shards are missing, the first is "
                                         "model-00002-of-00002.safetensors"),
                               HasSubstr("hf download")));
}

TEST_F(CheckpointTest, EveryListedTensorIsInItsShard) {
  json map = good_map();
  map["d"] = "model-00002-of-00002.safetensors";
  write_shards(map);
  EXPECT_THAT(failure(),
              HasSubstr("tensor d is not in its shard model-00002-of-00002.safetensors"));
  map = good_map();
  map["a"] = "model-00002-of-00002.safetensors";
  write_shards(map);
  EXPECT_THAT(failure(), HasSubstr("tensor a is not in its shard"));
}

TEST_F(CheckpointTest, ATensorIsInOneShard) {
  write_shards(good_map());
  write("model-00002-of-00002.safetensors", safetensors({three_tensors()[2], three_tensors()[0]}));
  EXPECT_THAT(failure(), HasSubstr("tensor a is in two shards"));
}

TEST_F(CheckpointTest, UnlistedTensorsAreIgnoredWithAWarning) {
  json map = good_map();
  map.erase("a");
  write_shards(map);
  Checkpoint checkpoint = open();
  EXPECT_THAT(checkpoint.warnings(),
              ElementsAre(AllOf(HasSubstr("model-00001-of-00002.safetensors: 1 tensors"),
                                HasSubstr("the first is a"))));
  EXPECT_EQ(checkpoint.weight_bytes(), 24u);
  EXPECT_THAT(checkpoint.take_weights().remaining(), ElementsAre("b", "c"));
}

/// Checkpoints that transformers and safetensors wrote, not this test.
Checkpoint open_golden(const std::string& name) {
  return Checkpoint(test::source_folder() / "tests/golden" / name);
}

TEST(GoldenCheckpoint, ShardsHoldTheSameBytesAsTheSingleFile) {
  Checkpoint single = open_golden("llava_gqa");
  Checkpoint sharded = open_golden("llava_gqa_sharded");
  EXPECT_EQ(single.weight_bytes(), sharded.weight_bytes());
  EXPECT_THAT(sharded.warnings(), IsEmpty());
  WeightMap a = single.take_weights();
  WeightMap b = sharded.take_weights();
  EXPECT_EQ(a.remaining().size(), 80u);
  EXPECT_EQ(a.remaining(), b.remaining());
  const std::vector<std::pair<std::string, Shape>> samples = {
      {"language_model.lm_head.weight", {320, 48}},
      {"language_model.model.layers.0.mlp.down_proj.weight", {48, 96}},
      {"vision_tower.embeddings.patch_embedding.weight", {32, 3, 14, 14}}};
  for (const auto& [name, shape] : samples) {
    const ConstTensorView x = a.take(name, shape);
    const ConstTensorView y = b.take(name, shape);
    EXPECT_EQ(std::memcmp(x.data(), y.data(), x.bytes()), 0) << name;
  }
}

TEST(GoldenCheckpoint, HalfFormatsAreTheRoundedSingles) {
  const std::string name = "language_model.lm_head.weight";
  WeightMap single = open_golden("llava_gqa").take_weights();
  WeightMap half = open_golden("llava_gqa_f16").take_weights();
  WeightMap brain = open_golden("llava_gqa_bf16").take_weights();
  const ConstTensorView x = single.take(name, {320, 48});
  const ConstTensorView h = half.take(name, {320, 48});
  const ConstTensorView b = brain.take(name, {320, 48});
  for (int64_t i = 0; i < x.elements(); ++i) {
    ASSERT_EQ(h.as<f16>()[i].bits, to_f16(x.as<float>()[i]).bits) << i;
    ASSERT_EQ(b.as<bf16>()[i].bits, to_bf16(x.as<float>()[i]).bits) << i;
  }
}

TEST(GoldenCheckpoint, BuffersOfOtherTypesAndOldNamesLoad) {
  WeightMap weights = open_golden("llava_rope_linear").take_weights();  // holds I64 position_ids
  EXPECT_EQ(weights.remaining().size(), 83u);
  weights.rename(&canonical_llava_name);
  EXPECT_EQ(weights.remaining().size(), 78u);  // without three buffers and post_layernorm
  for (const std::string& name : weights.remaining()) {
    EXPECT_TRUE(name.starts_with("model.") || name.starts_with("lm_head.")) << name;
  }
}

// --------------------------------------------------------------------------- quantized weights

/// What is not read is refused before the weights are looked at (quantization_test.cpp).
TEST_F(CheckpointTest, QuantizationsThatAreNotReadAreRefused) {
  write("model.safetensors", "not even read");
  write("config.json", R"({"quantization_config": {"quant_method": "hqq", "nbits": 3}})");
  EXPECT_THAT(failure(ErrorCode::kUnsupported),
              AllOf(HasSubstr("config.json: quantization_config: quant_method is hqq"),
                    HasSubstr("--weights int4")));
}

TEST_F(CheckpointTest, AQuantizationOfNothingIsNone) {
  write("model.safetensors", safetensors(three_tensors()));
  write("config.json", R"({"model_type":"llava","quantization_config":null})");
  EXPECT_FALSE(open().is_quantized());
  expect_three(open().take_weights());
}

TEST_F(CheckpointTest, ConfigurationAndTensorsMustAgreeOnQuantization) {
  write("config.json", R"({"quantization_config": {"quant_method": "awq", "bits": 4}})");
  write("model.safetensors", safetensors(three_tensors()));
  const auto message = [&] {
    return error_of([&] { open().take_weights(); }).what() + std::string();
  };
  EXPECT_THAT(message(), HasSubstr("there is no tensor *.qweight"));
  write("config.json", "{}");
  for (const char* packed : {"qweight", "weight_packed"}) {
    write("model.safetensors",
          safetensors({file_tensor<float>(std::string("a.q_proj.") + packed, {2, 3}, kValues)}));
    EXPECT_THAT(message(), HasSubstr("config.json has no quantization_config"));
  }
}

/// What an interrupted copy leaves is not as if there were no such file.
TEST_F(CheckpointTest, EmptyFilesAreRefused) {
  write("model.safetensors", safetensors(three_tensors()));
  for (const char* name : {"tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
                           "generation_config.json", "chat_template.jinja", "tokenizer.model",
                           "merges.txt", "video_preprocessor_config.json"}) {
    write(name, "");
    EXPECT_THAT(test::failure([&] { open().text(name); }),
                AllOf(HasSubstr(name), HasSubstr("an empty file")))
        << name;
  }
}

TEST_F(CheckpointTest, AFolderOfGgufSaysWhatToGive) {
  fs::remove(folder_ / "config.json");
  write("model-q4_k_m.gguf", "GGUF");
  EXPECT_THAT(failure(ErrorCode::kUnsupported),
              AllOf(HasSubstr("holds model-q4_k_m.gguf, and GGUF is not read"),
                    HasSubstr("safetensors checkpoint")));
}

}  // namespace
}  // namespace kvlm
