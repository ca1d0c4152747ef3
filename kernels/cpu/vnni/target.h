#pragma once

#include <hwy/base.h>

/// What stands before every namespace of code for CPUs with AVX-512 VNNI, VBMI and GFNI, including
/// declarations: a function has the instructions of its first one. vnni::available() asks for the
/// same ones.
#define KVLM_BEFORE_VNNI()                                                                        \
  HWY_PUSH_ATTRIBUTES(                                                                            \
      "avx2,fma,f16c,bmi,bmi2,avx512f,avx512bw,avx512cd,avx512dq,avx512vl,avx512vbmi,avx512vnni," \
      "gfni")
/// What stands behind it.
#define KVLM_AFTER_VNNI() HWY_POP_ATTRIBUTES
