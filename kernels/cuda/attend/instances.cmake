# The kernels that attend on the tensor cores: by the codecs of kernels/codecs/ that they read, how
# codes are scaled (Scaled in fused_attention.h), and head_dim. Each takes 20 to 60 seconds to
# compile, so that rare widths have 64 and 128 alone. any_format.cu reads what is not listed.

# One pass (fused_kernel.cuh): keys, values, head_dims. If tokens are weighed or evicted in place,
# only pairs whose keys and values are scaled by token; others then take two passes.
set(one_pass
  "Bits1 kChannel Bits1 kToken32 64 128"
  "Bits2 kChannel Bits1 kToken32 64 128"
  "Bits2 kChannel Bits2 kToken32 64 80 96 128 256"
  "Bits3 kChannel Bits3 kToken32 64 128"
  "Bits4 kChannel Bits4 kToken32 64 80 96 128 256"
  "Bits5 kChannel Bits5 kToken32 64 128"
  "Bits8 kChannel Bits8 kToken32 64 80 96 128 256"
  "Bits1 kToken Bits1 kToken 64 128"
  "Bits2 kToken Bits2 kToken 64 80 96 128 256"
  "Bits4 kToken Bits4 kToken 64 80 96 128 256"
  "Bits8 kToken Bits8 kToken 64 80 96 128 256"
  "Bits2 kToken32 Bits2 kToken32 64 128"
  "Nf4 kToken Nf4 kToken 64 128"
  "Nf4 kToken64 Nf4 kToken64 128"
  "Bits21 kChannel Trit5 kChannel 128"
  "Bits21 kChannel Trit5 kToken32 128"
  "Bits21 kChannel Trit2b kChannel 128"
  "Bits21 kChannel Bits1 kChannel 128"
  "Bits21 kChannel Bits2 kChannel 128")

# Two passes (two_pass.cuh): keys in the first, values in the second. Those of head_dims that few
# released models have are the common ones; any_format.cu reads the others.
set(key_pass
  "Bits1 kChannel 64 128"
  "Bits2 kChannel 64 80 96 128 256"
  "Bits3 kChannel 128"
  "Bits4 kChannel 64 80 96 128 256"
  "Bits5 kChannel 128"
  "Bits6 kChannel 128"
  "Bits7 kChannel 128"
  "Bits8 kChannel 64 128"
  "Bits1 kToken 64 128"
  "Bits2 kToken 64 128"
  "Bits4 kToken 64 80 96 128 256"
  "Bits8 kToken 64 80 96 128 256"
  "Nf4 kToken 64 128"
  "Nf4 kToken32 128"
  "Nf4 kToken64 128"
  "LloydMax3 kToken 64 128"
  "LloydMax4 kToken 64 128"
  "Bits21 kChannel 128")
set(value_pass
  "Bits1 kToken32 64 128"
  "Bits2 kToken32 64 80 96 128 256"
  "Bits3 kToken32 128"
  "Bits4 kToken32 64 80 96 128 256"
  "Bits5 kToken32 128"
  "Bits6 kToken32 128"
  "Bits7 kToken32 128"
  "Bits8 kToken32 64 128"
  "Bits1 kToken 64 128"
  "Bits2 kToken 64 128"
  "Bits3 kToken 64 128"
  "Bits4 kToken 64 80 96 128 256"
  "Bits8 kToken 64 80 96 128 256"
  "Nf4 kToken 64 128"
  "Nf4 kToken32 128"
  "Nf4 kToken64 128"
  "Bits1 kChannel 64 128"
  "Bits2 kChannel 64 128"
  "Bits4 kChannel 64 128"
  "Bits8 kChannel 64 128"
  "Trit5 kChannel 128"
  "Trit5 kToken32 128"
  "Trit2b kChannel 128")

# Makes attend_instances.h, a macro for each of them, and files that instantiate their kernels, so
# that they compile side by side: of one pass one for each codec of keys and head_dim, of two passes
# one for each codec. Those of head_dims that KVLM_HEAD_DIMS lacks are left out. Appends the files to
# `sources`.
function(kvlm_attend_instances sources)
  set(folder ${CMAKE_CURRENT_BINARY_DIR}/attend)
  set(header "#pragma once\n")
  foreach(name kernel IN ZIP_LISTS attend_lists attend_kernels)
    string(APPEND header "\n#define KVLM_${kernel}(ENTRY)")
    foreach(entry IN LISTS ${name})
      string(REPLACE " " ";" dims "${entry}")
      list(GET dims 0 first)
      set(words "")
      set(codecs "")
      while(dims MATCHES "^[A-Z]")
        list(POP_FRONT dims codec scaled)
        list(APPEND words ${codec} ${scaled})
        list(APPEND codecs "codecs::${codec}<@dim@>, Scaled::${scaled}")
      endwhile()
      list(JOIN codecs ", " codecs)
      string(REGEX REPLACE ";" "|" built "^(${KVLM_HEAD_DIMS})$")
      list(FILTER dims INCLUDE REGEX "${built}")
      if(dims STREQUAL "")
        continue()
      endif()
      list(JOIN words ", " words)
      list(JOIN dims ", " words_of_dims)
      string(APPEND header " \\\n  ENTRY(${words}, ${words_of_dims})")
      foreach(dim IN LISTS dims)
        string(REPLACE "@dim@" ${dim} of_dim "${codecs}")
        set(file ${name}_${first})
        if("${name}" STREQUAL "one_pass")
          string(APPEND file _${dim})
        endif()
        string(APPEND ${file} "template struct ${kernel}<${of_dim}>;\n")
        list(APPEND files ${file})
      endforeach()
    endforeach()
    string(APPEND header "\n")
  endforeach()
  file(CONFIGURE OUTPUT ${folder}/attend_instances.h CONTENT "${header}" @ONLY)
  list(REMOVE_DUPLICATES files)
  foreach(file IN LISTS files)
    set(include two_pass)
    if(file MATCHES "^one_pass")
      set(include fused_kernel)
    endif()
    file(CONFIGURE OUTPUT ${folder}/${file}.cu @ONLY CONTENT
      "#include \"kernels/cuda/attend/${include}.cuh\"\n\nnamespace kvlm::cuda::packed {\n\n${${file}}\n}\n")
    list(APPEND made ${folder}/${file}.cu)
  endforeach()
  set(${sources} ${${sources}} ${made} PARENT_SCOPE)
endfunction()
set(attend_lists one_pass key_pass value_pass)
set(attend_kernels FusedKernel KeyKernel ValueKernel)
