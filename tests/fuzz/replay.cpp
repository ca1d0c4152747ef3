// Stands in for libFuzzer: feeds every file of the corpus folder to the fuzzer once, and every
// prefix of the small ones. Fails if the folder is empty, since that tests nothing.

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

int main(int argc, char** argv) {
  constexpr size_t kPrefixBytes = 4096;
  if (argc != 2) {
    std::fprintf(stderr, "usage: %s CORPUS_FOLDER\n", argv[0]);
    return 2;
  }
  std::vector<std::filesystem::path> paths;
  for (const auto& entry : std::filesystem::directory_iterator(argv[1])) {
    paths.push_back(entry.path());
  }
  std::sort(paths.begin(), paths.end());
  for (const std::filesystem::path& path : paths) {
    std::fprintf(stderr, "%s\n", path.c_str());  // the last line names the input that crashes
    std::ifstream file(path, std::ios::binary);
    const std::vector<char> bytes{std::istreambuf_iterator<char>(file), {}};
    // A fresh copy of exactly the right size each time, so that a sanitizer sees reads past it.
    for (size_t size = std::min(bytes.size(), kPrefixBytes); size > 0; --size) {
      const std::vector<uint8_t> prefix(bytes.begin(),
                                        bytes.begin() + static_cast<std::ptrdiff_t>(size));
      LLVMFuzzerTestOneInput(prefix.data(), prefix.size());
    }
    const std::vector<uint8_t> whole(bytes.begin(), bytes.end());
    LLVMFuzzerTestOneInput(whole.data(), whole.size());
  }
  std::fprintf(stderr, "%zu files\n", paths.size());
  return paths.empty() ? 1 : 0;
}
