#pragma once

namespace kvlm::cpu {

/// The calling thread is in multiply() (kernels/cpu/matmul.h), where the library aborts the process
/// if it gets no memory. For a handler of SIGABRT.
bool is_multiplying() noexcept;

}  // namespace kvlm::cpu
