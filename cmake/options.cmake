# kvlm_options: what every target of the project is compiled with.
add_library(kvlm_options INTERFACE)
target_compile_features(kvlm_options INTERFACE cxx_std_20)
target_include_directories(kvlm_options INTERFACE ${PROJECT_SOURCE_DIR})
target_compile_options(kvlm_options INTERFACE
  $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra -Wconversion -Wshadow -Wnon-virtual-dtor -Wold-style-cast>
  $<$<AND:$<COMPILE_LANGUAGE:CXX>,$<BOOL:${KVLM_WERROR}>>:-Werror>)
if(KVLM_SANITIZE)
  target_compile_options(kvlm_options INTERFACE
    -fsanitize=${KVLM_SANITIZE} -fno-sanitize-recover=all -fno-omit-frame-pointer)
  target_link_options(kvlm_options INTERFACE -fsanitize=${KVLM_SANITIZE})
endif()
if(KVLM_FUZZ)
  target_compile_options(kvlm_options INTERFACE -fsanitize=fuzzer-no-link)
endif()
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
if(NOT CMAKE_BUILD_TYPE)
  set(CMAKE_BUILD_TYPE Release CACHE STRING "" FORCE)
endif()

find_program(KVLM_CCACHE ccache)
if(KVLM_CCACHE)
  set(CMAKE_CXX_COMPILER_LAUNCHER ${KVLM_CCACHE})
  set(CMAKE_CUDA_COMPILER_LAUNCHER ${KVLM_CCACHE})
endif()

# kvlm_library(name source...): one library of the project, one per folder.
function(kvlm_library name)
  add_library(${name} STATIC ${ARGN})
  target_link_libraries(${name} PUBLIC kvlm_options)
endfunction()
