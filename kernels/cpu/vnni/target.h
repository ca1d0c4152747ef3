#pragma once

#include <hwy/base.h>

/// Precedes every namespace of code for AVX-512 VNNI, VBMI and GFNI, declarations included, since a
/// function has the target of its first declaration. vnni::available() checks the same features.
#define KVLM_BEFORE_VNNI()                                                                        \
  HWY_PUSH_ATTRIBUTES(                                                                            \
      "avx2,fma,f16c,bmi,bmi2,avx512f,avx512bw,avx512cd,avx512dq,avx512vl,avx512vbmi,avx512vnni," \
      "gfni")
/// Follows it.
#define KVLM_AFTER_VNNI() HWY_POP_ATTRIBUTES
