#pragma once

#include <string>
#include <type_traits>

namespace kvlm::cuda {

/// A library of the CUDA toolkit, opened when it is first asked for and kept: a program starts, and
/// serves the CPU, where there is none. It is looked for where the system looks (LD_LIBRARY_PATH
/// included), beside the program, and in CUDA's usual folders.
class ToolkitLibrary {
 public:
  /// Opens `file`, "libcublasLt.so.13", which is part of `product`, "CUDA 13's cuBLAS". `need` says
  /// in the error what asks for it, `instead` what does without. Throws Error{kUnsupported}.
  ToolkitLibrary(std::string file, std::string product, const std::string& need,
                 std::string instead);

  /// Sets `function` to the function of that name. Throws Error{kUnsupported} if there is none.
  template <class Function>
  void find(Function& function, const char* name) const {
    function = reinterpret_cast<Function>(address(name));
  }

 private:
  void* address(const char* name) const;

  std::string file_;
  std::string product_;
  std::string instead_;
  void* library_ = nullptr;
};

}  // namespace kvlm::cuda
