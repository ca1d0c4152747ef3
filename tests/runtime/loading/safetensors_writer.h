#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/base/dtype.h"
#include "kernels/base/error.h"

namespace kvlm::test {

/// A tensor to be written: dtype as the file spells it, and its little-endian bytes.
struct FileTensor {
  std::string name;
  std::string dtype;
  std::vector<int64_t> shape;
  std::string bytes;
};

/// `values` rounded to T (float, f16 or bf16).
template <class T>
FileTensor file_tensor(std::string name, std::vector<int64_t> shape,
                       std::span<const float> values) {
  FileTensor tensor{std::move(name), "F32", std::move(shape), {}};
  if (kDTypeOf<T> == DType::kF16) tensor.dtype = "F16";
  if (kDTypeOf<T> == DType::kBF16) tensor.dtype = "BF16";
  tensor.bytes.resize(values.size() * sizeof(T));
  for (size_t i = 0; i < values.size(); ++i) {
    const T value = from_float<T>(values[i]);
    std::memcpy(tensor.bytes.data() + i * sizeof(T), &value, sizeof(T));
  }
  return tensor;
}

/// A file with exactly this header text and data, however wrong they are.
inline std::string raw_safetensors(std::string_view header, std::string_view data) {
  std::string file;
  for (size_t i = 0; i < 8; ++i) file += static_cast<char>((header.size() >> (8 * i)) & 0xff);
  file += header;
  file += data;
  return file;
}

/// A valid file of these tensors, in this order; the header is padded so that data starts at a
/// multiple of 8 plus `misalignment`.
inline std::string safetensors(const std::vector<FileTensor>& tensors, size_t misalignment = 0) {
  nlohmann::json header = nlohmann::json::object();
  header["__metadata__"] = {{"format", "pt"}};
  std::string data;
  for (const FileTensor& tensor : tensors) {
    const size_t begin = data.size();
    data += tensor.bytes;
    header[tensor.name] = {
        {"dtype", tensor.dtype}, {"shape", tensor.shape}, {"data_offsets", {begin, data.size()}}};
  }
  std::string text = header.dump();
  while (text.size() % 8 != misalignment % 8) text += ' ';
  return raw_safetensors(text, data);
}

inline void write_file(const std::filesystem::path& path, std::string_view content) {
  std::filesystem::create_directories(path.parent_path());
  std::ofstream file(path, std::ios::binary);
  file.write(content.data(), static_cast<std::streamsize>(content.size()));
  ASSERT_TRUE(file.flush()) << path;
}

/// A fresh folder, deleted with everything in it.
class TempFolder {
 public:
  TempFolder() {
    std::string name = (std::filesystem::temp_directory_path() / "kvlm-test-XXXXXX").string();
    if (::mkdtemp(name.data()) == nullptr) throw std::runtime_error("mkdtemp " + name);
    path_ = name;
  }
  ~TempFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TempFolder(const TempFolder&) = delete;
  TempFolder& operator=(const TempFolder&) = delete;

  const std::filesystem::path& path() const { return path_; }
  std::filesystem::path operator/(const std::string& name) const { return path_ / name; }

 private:
  std::filesystem::path path_;
};

/// The Error that `action` throws, for a test to look into; fails the test if it throws none.
template <class Action>
Error error_of(Action&& action) {
  try {
    action();
  } catch (const Error& error) {
    return error;
  }
  ADD_FAILURE() << "expected an Error";
  return {ErrorCode::kDevice, "nothing was thrown"};
}

/// The message of the Error that `action` throws; its code must be `code`.
template <class Action>
std::string failure(Action&& action, ErrorCode code = ErrorCode::kCorruptFile) {
  const Error error = error_of(action);
  EXPECT_EQ(error.code(), code) << error.what();
  return error.what();
}

}  // namespace kvlm::test
