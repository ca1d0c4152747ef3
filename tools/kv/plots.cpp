#include "tools/kv/plots.h"

#include <fmt/format.h>

#include <filesystem>
#include <fstream>
#include <system_error>
#include <utility>

#include "kernels/base/error.h"
#include "tools/common/program.h"

namespace kvlm {

Plots::Plots(std::string folder, std::string script)
    : folder_(std::move(folder)), script_(std::move(script)) {
  if (!wanted()) return;
  std::error_code error;
  std::filesystem::create_directories(folder_, error);
  if (error || !std::filesystem::is_directory(folder_)) {
    throw Error(ErrorCode::kCorruptFile,
                fmt::format("--plot {} cannot be made a folder: {}; give a writable folder",
                            folder_, error ? error.message() : "it is a file"));
  }
  run_script(script_, {"--check", folder_});
}

void Plots::draw(const std::string& name, const std::string& lines) const {
  const std::string path = (std::filesystem::path(folder_) / name).string();
  std::ofstream file(path);
  file << lines;
  file.close();
  if (!file) {
    throw Error(
        ErrorCode::kCorruptFile,
        fmt::format("--plot {}: {} cannot be written; give a writable folder", folder_, path));
  }
  run_script(script_, {path, folder_});
}

}  // namespace kvlm
