// parse_safetensors on hostile bytes: it returns entries that tile the data, or throws Error.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <span>
#include <vector>

#include "kernels/base/error.h"
#include "runtime/loading/safetensors.h"

namespace {

void require(bool condition) {
  if (!condition) std::abort();
}

void parse(std::span<const std::byte> file) {
  kvlm::SafetensorsHeader header;
  try {
    header = kvlm::parse_safetensors(file, "fuzz.safetensors");
  } catch (const kvlm::Error& error) {
    require(error.code() == kvlm::ErrorCode::kCorruptFile);
    require(std::strlen(error.what()) < 2000);
    return;
  }
  require(header.data_offset >= 8 && header.data_offset <= file.size());
  size_t covered = 0;
  for (const kvlm::SafetensorsEntry& entry : header.entries) {
    require(entry.begin == covered && entry.end >= entry.begin);
    covered = entry.end;
    int64_t elements = 1;  // must not overflow: the undefined-behaviour sanitizer looks on
    for (const int64_t dim : entry.shape) {
      require(dim >= 0);
      elements *= dim;
    }
    require((elements == 0) == (entry.begin == entry.end));
  }
  require(covered == file.size() - header.data_offset);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const auto bytes = std::as_bytes(std::span(data, size));
  parse(bytes);
  // The length field is hard to guess: once more with a true one. The first byte says how much of
  // the end is tensor data.
  if (size < 1) return 0;
  const size_t data_bytes = std::min<size_t>(data[0], size - 1);
  const uint64_t header_bytes = size - 1 - data_bytes;
  std::vector<std::byte> file(8 + size - 1);
  for (size_t i = 0; i < 8; ++i) file[i] = static_cast<std::byte>((header_bytes >> (8 * i)) & 0xff);
  if (size > 1) std::memcpy(file.data() + 8, data + 1, size - 1);
  parse(file);
  return 0;
}
