# Every dependency of the libraries is an installed package, found here and nowhere else;
# tools/setup.sh installs them. The installed package kvlm reads this file too, since who links the
# static libraries needs what they need. Those of the programs alone are in program_dependencies.cmake.
find_package(Threads REQUIRED)
find_package(fmt REQUIRED)
find_package(hwy REQUIRED)
find_package(nlohmann_json REQUIRED)
find_package(JPEG REQUIRED)
find_package(ZLIB REQUIRED)
find_package(PNG REQUIRED)
find_package(PkgConfig REQUIRED)
pkg_check_modules(sentencepiece REQUIRED IMPORTED_TARGET sentencepiece)
pkg_check_modules(pcre2 REQUIRED IMPORTED_TARGET libpcre2-8)
pkg_check_modules(webp REQUIRED IMPORTED_TARGET libwebp libwebpdemux)
pkg_check_modules(utf8proc REQUIRED IMPORTED_TARGET libutf8proc)
# Optional: the reader of video files other than GIF and WebP.
if(KVLM_FFMPEG)
  pkg_check_modules(ffmpeg ${KVLM_FFMPEG_REQUIRED} IMPORTED_TARGET
    libavformat libavcodec libswscale libavutil)
  if(NOT ffmpeg_FOUND)
    message(STATUS "Video files are not read; tools/setup.sh --video installs what that needs")
  endif()
endif()
# Optional: what reads HEIC and TIFF images.
if(KVLM_HEIF)
  pkg_check_modules(heif ${KVLM_HEIF_REQUIRED} IMPORTED_TARGET libheif)
endif()
if(KVLM_TIFF)
  pkg_check_modules(tiff ${KVLM_TIFF_REQUIRED} IMPORTED_TARGET libtiff-4>=4.5)
endif()

# stb has no CMake package; its headers are all of it.
find_path(STB_INCLUDE_DIR stb_image.h PATH_SUFFIXES stb REQUIRED)
if(NOT TARGET STB::STB)
  add_library(STB::STB INTERFACE IMPORTED)
  set_target_properties(STB::STB PROPERTIES INTERFACE_INCLUDE_DIRECTORIES ${STB_INCLUDE_DIR})
endif()
