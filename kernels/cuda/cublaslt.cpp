#include "kernels/cuda/cublaslt.h"

#include <dlfcn.h>
#include <fmt/format.h>

#include <filesystem>
#include <string>
#include <system_error>
#include <type_traits>

#include "kernels/base/error.h"

namespace kvlm::cuda {

namespace {

/// Of the major version that we were compiled for; its functions keep their types.
std::string file_name() { return fmt::format("libcublasLt.so.{}", CUBLAS_VER_MAJOR); }

void* open_library() {
  const std::string name = file_name();
  std::error_code unknown;
  const std::filesystem::path program = std::filesystem::read_symlink("/proc/self/exe", unknown);
  for (const std::filesystem::path& folder :
       {std::filesystem::path(), program.parent_path(), program.parent_path() / "../lib",
        std::filesystem::path("/usr/local/cuda/lib64")}) {
    if (void* library = dlopen((folder / name).c_str(), RTLD_NOW | RTLD_LOCAL)) return library;
  }
  throw Error(ErrorCode::kUnsupported,
              fmt::format("a GPU needs {}, which is not installed; install CUDA {}'s cuBLAS, name "
                          "its folder in LD_LIBRARY_PATH, or use --device cpu",
                          name, CUBLAS_VER_MAJOR));
}

CublasLt load() {
  void* const library = open_library();
  const auto find = [&](auto& function, const char* name) {
    void* const found = dlsym(library, name);
    if (found == nullptr) {
      throw Error(ErrorCode::kUnsupported,
                  fmt::format("{} has no {}; install cuBLAS {}.{} or newer, or use --device cpu",
                              file_name(), name, CUBLAS_VER_MAJOR, CUBLAS_VER_MINOR));
    }
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(found);
  };
  CublasLt blas{};
  find(blas.create, "cublasLtCreate");
  find(blas.status_string, "cublasLtGetStatusString");
  find(blas.matmul, "cublasLtMatmul");
  find(blas.heuristic, "cublasLtMatmulAlgoGetHeuristic");
  find(blas.desc_create, "cublasLtMatmulDescCreate");
  find(blas.desc_destroy, "cublasLtMatmulDescDestroy");
  find(blas.desc_set, "cublasLtMatmulDescSetAttribute");
  find(blas.preference_create, "cublasLtMatmulPreferenceCreate");
  find(blas.preference_destroy, "cublasLtMatmulPreferenceDestroy");
  find(blas.preference_set, "cublasLtMatmulPreferenceSetAttribute");
  find(blas.layout_create, "cublasLtMatrixLayoutCreate");
  find(blas.layout_destroy, "cublasLtMatrixLayoutDestroy");
  return blas;
}

}  // namespace

const CublasLt& cublaslt() {
  static const CublasLt blas = load();  // tried again if it throws
  return blas;
}

}  // namespace kvlm::cuda
