#pragma once

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <span>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/base/error.h"
#include "tests/source_folder.h"
#include "vision/image.h"

namespace kvlm::test {

/// tests/vision/data, written by tests/vision/make_data.py.
inline std::filesystem::path data_folder() { return test::source_folder() / "tests/vision/data"; }

/// zlib's CRC-32.
inline uint32_t crc32(const void* data, size_t bytes) {
  uint32_t crc = ~0u;
  const auto* byte = static_cast<const uint8_t*>(data);
  for (size_t i = 0; i < bytes; ++i) {
    crc ^= byte[i];
    for (int bit = 0; bit < 8; ++bit) crc = crc >> 1 ^ ((crc & 1) != 0 ? 0xedb88320u : 0);
  }
  return ~crc;
}

inline uint32_t crc32(const Image& image) { return crc32(image.rgb.data(), image.rgb.size()); }

/// The pictures of make_data.py: "noise", "extremes" (only 0 and 255) and "smooth".
inline Image picture(std::string_view kind, int height, int width) {
  Image image{height, width, {}};
  image.rgb.reserve(static_cast<size_t>(height) * static_cast<size_t>(width) * 3);
  for (uint32_t y = 0; y < static_cast<uint32_t>(height); ++y) {
    for (uint32_t x = 0; x < static_cast<uint32_t>(width); ++x) {
      for (uint32_t c = 0; c < 3; ++c) {
        uint32_t mixed = (y * 73856093u) ^ (x * 19349663u) ^ (c * 83492791u);
        mixed = (mixed ^ mixed >> 13) * 2654435761u;
        auto value = static_cast<uint8_t>(mixed >> 24);
        if (kind == "extremes") value = value >= 128 ? 255 : 0;
        if (kind == "smooth")
          value = static_cast<uint8_t>((y * 5 + x * 3 + c * 60 + y * x / 16) / 2);
        image.rgb.push_back(value);
      }
    }
  }
  return image;
}

/// The lines of a file of test data that begin with `word`, without it.
inline std::vector<std::istringstream> goldens(const std::string& word,
                                               const std::string& file = "goldens.txt") {
  std::vector<std::istringstream> cases;
  std::ifstream in(data_folder() / file);
  for (std::string line; std::getline(in, line);) {
    if (line.starts_with(word + " ")) cases.emplace_back(line.substr(word.size() + 1));
  }
  EXPECT_FALSE(cases.empty()) << "no line \"" << word << "\" in " << file;
  return cases;
}

/// Reads the rest of a case's words, the last of which is a CRC in hexadecimal.
inline uint32_t read_crc(std::istringstream& in) {
  uint32_t crc = 0;
  in >> std::hex >> crc >> std::dec;
  EXPECT_TRUE(in) << in.str();
  return crc;
}

inline std::vector<std::byte> file_bytes(const std::filesystem::path& path) {
  std::ifstream in(path, std::ios::binary);
  EXPECT_TRUE(in) << path;
  const std::vector<char> chars{std::istreambuf_iterator<char>(in), {}};
  const auto bytes = std::as_bytes(std::span(chars));
  return {bytes.begin(), bytes.end()};
}

inline std::vector<std::byte> data_file(const std::string& name) {
  return file_bytes(data_folder() / name);
}

/// The message of the Error that `action` throws; its code must be `code`.
template <class Action>
std::string error_of(ErrorCode code, Action&& action) {
  try {
    action();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), code) << error.what();
    return error.what();
  }
  ADD_FAILURE() << "no error";
  return {};
}

}  // namespace kvlm::test
