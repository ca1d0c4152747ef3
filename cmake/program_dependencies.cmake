# What the programs need beyond cmake/dependencies.cmake, and nobody who links the libraries does.
find_package(CLI11 REQUIRED)
