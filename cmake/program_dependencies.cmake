# What the programs need beyond cmake/dependencies.cmake, and a program that links the libraries does not.
find_package(CLI11 REQUIRED)
pkg_check_modules(libedit REQUIRED IMPORTED_TARGET libedit)
# Optional: what vlm-serve is built with.
if(KVLM_SERVE)
  pkg_check_modules(httplib IMPORTED_TARGET cpp-httplib)
  pkg_check_modules(prometheus IMPORTED_TARGET prometheus-cpp-core)
  find_package(OpenSSL)
  if(NOT httplib_FOUND OR NOT prometheus_FOUND OR NOT OPENSSL_FOUND)
    set(KVLM_SERVE OFF)
    message(STATUS "vlm-serve is not built; tools/setup.sh installs what that needs")
  endif()
endif()
