# Read by cpack before it packs: the Debian packages that hold the libraries which the three programs load. (CPack's own
# CPACK_DEBIAN_PACKAGE_SHLIBDEPS starts two processes for each of the 1500 images too.)
file(GLOB programs ${CPACK_TEMPORARY_DIRECTORY}${CPACK_PACKAGING_INSTALL_PREFIX}/bin/vlm-*)
set(folder ${CPACK_TOPLEVEL_DIRECTORY}/depends)
file(WRITE ${folder}/debian/control "Source: kvlm\n\nPackage: kvlm\nArchitecture: any\n")
execute_process(COMMAND dpkg-shlibdeps -O ${programs}
  WORKING_DIRECTORY ${folder} OUTPUT_VARIABLE text COMMAND_ERROR_IS_FATAL ANY)
if(NOT text MATCHES "shlibs:Depends=([^\n]+)")
  message(FATAL_ERROR "dpkg-shlibdeps names no package: ${text}")
endif()
set(CPACK_DEBIAN_PACKAGE_DEPENDS "${CMAKE_MATCH_1}")
