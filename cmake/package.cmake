# What `cpack -G DEB` in a build folder makes: kvlm_VERSION_ARCHITECTURE.deb, which holds what `cmake --install` does.
# deb_depends.cmake finds the packages that the programs need. Who compiles against the libraries needs the suggested ones too.
set(CPACK_GENERATOR DEB)
set(CPACK_PACKAGE_NAME kvlm)
set(CPACK_PACKAGE_VENDOR "The kvlm authors")
set(CPACK_PACKAGE_CONTACT "The kvlm authors <kvlm@localhost>")  # Debian's format wants an address
set(CPACK_PACKAGE_DESCRIPTION_SUMMARY "vision-language models with a key/value cache that can be exchanged")
set(CPACK_PACKAGE_DESCRIPTION "vlm-run captions images and answers questions about images and videos, vlm-kv compares cache
policies, vlm-bench measures speed and vlm-serve answers over HTTP. Three small models are included. Checkpoints from Hugging Face
are read as they are. The package also holds the C++ library, its headers and its CMake package.")
set(CPACK_PACKAGING_INSTALL_PREFIX /usr)
set(CPACK_STRIP_FILES ON)
set(CPACK_DEBIAN_COMPRESSION_TYPE gzip)  # models and images are most of it, and hardly shrink
set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
set(CPACK_DEBIAN_PACKAGE_SECTION science)
set(CPACK_PRE_BUILD_SCRIPTS ${PROJECT_SOURCE_DIR}/cmake/deb_depends.cmake)
set(CPACK_DEBIAN_PACKAGE_SUGGESTS "bash-completion, python3-matplotlib, python3-numpy, g++, cmake, pkg-config,\
 libfmt-dev, libhwy-dev, nlohmann-json3-dev, libjpeg-dev, libpng-dev, libwebp-dev, libstb-dev,\
 libsentencepiece-dev, libpcre2-dev, libutf8proc-dev")
include(CPack)
