# kvlm_options: what every target of the project, and everything that uses one, is compiled with.
add_library(kvlm_options INTERFACE)
target_compile_features(kvlm_options INTERFACE cxx_std_20)
target_include_directories(kvlm_options INTERFACE
  $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}>
  $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>
  $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}/kvlm>)
if(KVLM_SANITIZE)
  target_compile_options(kvlm_options INTERFACE
    -fsanitize=${KVLM_SANITIZE} -fno-sanitize-recover=all -fno-omit-frame-pointer)
  target_link_options(kvlm_options INTERFACE -fsanitize=${KVLM_SANITIZE})
endif()
if(KVLM_FUZZ)
  target_compile_options(kvlm_options INTERFACE -fsanitize=fuzzer-no-link)
endif()

# kvlm_warnings: of the project's own targets only, linked PRIVATE.
add_library(kvlm_warnings INTERFACE)
target_compile_options(kvlm_warnings INTERFACE
  $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra -Wconversion -Wshadow -Wnon-virtual-dtor -Wold-style-cast>
  $<$<AND:$<COMPILE_LANGUAGE:CXX>,$<BOOL:${KVLM_WERROR}>>:-Werror>)

set(CMAKE_CXX_EXTENSIONS OFF)
if(PROJECT_IS_TOP_LEVEL)
  set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
  if(NOT CMAKE_BUILD_TYPE)
    set(CMAKE_BUILD_TYPE Release CACHE STRING "" FORCE)
  endif()
  find_program(KVLM_CCACHE ccache)
  if(KVLM_CCACHE)
    set(CMAKE_CXX_COMPILER_LAUNCHER ${KVLM_CCACHE})
    set(CMAKE_CUDA_COMPILER_LAUNCHER ${KVLM_CCACHE})
  endif()
endif()

# kvlm_library(name source...): one library of the project, one per folder.
function(kvlm_library name)
  add_library(${name} STATIC ${ARGN})
  target_link_libraries(${name} PUBLIC kvlm_options PRIVATE $<BUILD_INTERFACE:kvlm_warnings>)
endfunction()

# kvlm_executable(name source...): a program, test or fuzzer of the project.
function(kvlm_executable name)
  add_executable(${name} ${ARGN})
  target_link_libraries(${name} PRIVATE kvlm_options kvlm_warnings)
endfunction()
