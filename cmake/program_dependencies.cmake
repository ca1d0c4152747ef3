# What the programs need beyond cmake/dependencies.cmake, and nobody who links the libraries does.
find_package(CLI11 REQUIRED)
pkg_check_modules(libedit REQUIRED IMPORTED_TARGET libedit)
