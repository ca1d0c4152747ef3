#pragma once

#include <cublasLt.h>

namespace kvlm::cuda {

/// The functions of cuBLASLt that are used, under their own names without "cublasLt".
struct CublasLt {
  decltype(&cublasLtCreate) create;
  decltype(&cublasLtGetStatusString) status_string;
  decltype(&cublasLtMatmul) matmul;
  decltype(&cublasLtMatmulAlgoGetHeuristic) heuristic;
  decltype(&cublasLtMatmulDescCreate) desc_create;
  decltype(&cublasLtMatmulDescDestroy) desc_destroy;
  decltype(&cublasLtMatmulDescSetAttribute) desc_set;
  decltype(&cublasLtMatmulPreferenceCreate) preference_create;
  decltype(&cublasLtMatmulPreferenceDestroy) preference_destroy;
  decltype(&cublasLtMatmulPreferenceSetAttribute) preference_set;
  decltype(&cublasLtMatrixLayoutCreate) layout_create;
  decltype(&cublasLtMatrixLayoutDestroy) layout_destroy;
  decltype(&cublasLtMatrixLayoutSetAttribute) layout_set;
};

/// The library, opened when it is first asked for and kept: a program starts, and serves the CPU,
/// where there is none. It is looked for where the system looks (LD_LIBRARY_PATH included), beside
/// the program, and in CUDA's usual folders. Throws Error{kUnsupported} saying what was looked for.
const CublasLt& cublaslt();

}  // namespace kvlm::cuda
