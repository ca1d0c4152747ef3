#pragma once

#include <hwy/base.h>

/// Precedes every namespace of code for AMX and AVX512-BF16, as KVLM_BEFORE_VNNI() does for its
/// instructions. amx::available() checks the same features.
#define KVLM_BEFORE_AMX()                                                                       \
  HWY_PUSH_ATTRIBUTES(                                                                          \
      "avx2,fma,f16c,bmi,bmi2,avx512f,avx512bw,avx512cd,avx512dq,avx512vl,avx512bf16,amx-tile," \
      "amx-bf16")
/// Follows it.
#define KVLM_AFTER_AMX() HWY_POP_ATTRIBUTES
