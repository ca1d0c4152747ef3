#include "kernels/cuda/device/toolkit_library.h"

#include <dlfcn.h>
#include <fmt/format.h>

#include <filesystem>
#include <system_error>
#include <utility>

#include "kernels/base/error.h"

namespace kvlm::cuda {

ToolkitLibrary::ToolkitLibrary(std::string file, std::string product, const std::string& need,
                               std::string instead)
    : file_(std::move(file)), product_(std::move(product)), instead_(std::move(instead)) {
  std::error_code unknown;
  const std::filesystem::path program = std::filesystem::read_symlink("/proc/self/exe", unknown);
  for (const std::filesystem::path& folder :
       {std::filesystem::path(), program.parent_path(), program.parent_path() / "../lib",
        std::filesystem::path("/usr/local/cuda/lib64")}) {
    library_ = dlopen((folder / file_).c_str(), RTLD_NOW | RTLD_LOCAL);
    if (library_ != nullptr) return;
  }
  throw Error(ErrorCode::kUnsupported,
              fmt::format("{} needs {}, which is not installed; install {}, name its folder in "
                          "LD_LIBRARY_PATH, or use {}",
                          need, file_, product_, instead_));
}

void* ToolkitLibrary::address(const char* name) const {
  void* const found = dlsym(library_, name);
  if (found != nullptr) return found;
  throw Error(ErrorCode::kUnsupported, fmt::format("{} has no {}; install {} or newer, or use {}",
                                                   file_, name, product_, instead_));
}

}  // namespace kvlm::cuda
