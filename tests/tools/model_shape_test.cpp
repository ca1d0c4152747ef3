#include "tools/common/model_shape.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "kernels/base/error.h"

namespace kvlm {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;

class ModelShape : public testing::Test {
 protected:
  ModelShape() { fs::create_directories(folder_); }
  ~ModelShape() override { fs::remove_all(folder_); }

  void write(const std::string& text) { std::ofstream(folder_ / "config.json") << text; }
  std::string failure() {
    try {
      model_shape(folder_.string());
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kCorruptFile);
      return error.what();
    }
    ADD_FAILURE() << "no error";
    return "";
  }

  fs::path folder_ = fs::temp_directory_path() / ("kvlm_shape_" + std::to_string(getpid()));
};

TEST_F(ModelShape, NeedsTheConfigurationAlone) {
  write(
      R"({"model_type":"llava","image_token_index":5,"text_config":{"num_hidden_layers":3,"num_attention_heads":4,
            "hidden_size":64}})");
  const CacheShape shape = model_shape(folder_.string());
  EXPECT_EQ(shape.layers, 3);
  EXPECT_EQ(shape.head_dim, 16);
}

/// The limits and words of a checkpoint's reader.
TEST_F(ModelShape, RefusesConfigurationsThatNoModelHas) {
  write("{}");
  fs::resize_file(folder_ / "config.json", 300'000'000);  // sparse
  EXPECT_THAT(failure(), HasSubstr("300000000 bytes"));
  write("version https://git-lfs.github.com/spec/v1\n");
  EXPECT_THAT(failure(), HasSubstr("Git LFS pointer"));
  fs::remove(folder_ / "config.json");
  EXPECT_THAT(failure(), HasSubstr("no config.json"));
}

}  // namespace
}  // namespace kvlm
