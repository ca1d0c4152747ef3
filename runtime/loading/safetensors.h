#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <vector>

namespace kvlm {

/// One entry of a safetensors header, checked.
struct SafetensorsEntry {
  std::string name;
  std::string dtype;  ///< the file's own word: "F32", "BF16", "I64", ...
  std::vector<int64_t> shape;
  size_t begin = 0;  ///< byte offset from the start of the data buffer
  size_t end = 0;
};

/// What a safetensors file says about itself.
struct SafetensorsHeader {
  std::vector<SafetensorsEntry> entries;  ///< sorted by offset: no holes, no overlaps
  size_t data_offset = 0;                 ///< where the data buffer starts in the file
};

/// Parses and validates a whole file's bytes against the format: a header of a bounded size that is
/// JSON without a key twice, known dtypes, shapes that neither overflow nor disagree with their
/// bytes, and a data buffer without holes, overlaps or a rest.
/// Throws Error{kCorruptFile} naming `name`, the tensor and the defect. Never trusts a size before
/// it is checked; never allocates in proportion to a number read from the header.
SafetensorsHeader parse_safetensors(std::span<const std::byte> file, const std::string& name);

}  // namespace kvlm
