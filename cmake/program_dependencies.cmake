# What the programs need beyond cmake/dependencies.cmake, and a program that links the libraries does not.
find_package(CLI11 REQUIRED)
pkg_check_modules(libedit REQUIRED IMPORTED_TARGET libedit)
