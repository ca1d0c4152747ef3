# What `cmake --install` puts where: programs, man pages and completion, bundled models, headers,
# libraries, and the package that find_package(kvlm) reads. The prefix may be moved afterwards.
include(CMakePackageConfigHelpers)
set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/kvlm)
set(data_dir ${CMAKE_INSTALL_DATADIR}/kvlm)

if(TARGET vlm-run)
  set(programs vlm-run vlm-kv vlm-bench)
  if(TARGET vlm-serve)
    list(APPEND programs vlm-serve)
  endif()
  install(TARGETS ${programs})
  install(DIRECTORY tools/pocket/pocket-llava tools/pocket/pocket-internvl tools/pocket/pocket-qwen
    tools/pocket/heldout DESTINATION ${data_dir}/pocket)
  install(FILES tools/kv/pictures.py tools/kv/plot.py tools/kv/plot_data.py tools/kv/plot_values.py DESTINATION ${data_dir}/kv)
  foreach(program ${programs})  # found by the name of the command
    install(FILES tools/completion/kvlm.bash RENAME ${program}
      DESTINATION ${CMAKE_INSTALL_DATADIR}/bash-completion/completions)
    install(FILES tools/completion/kvlm.fish RENAME ${program}.fish
      DESTINATION ${CMAKE_INSTALL_DATADIR}/fish/vendor_completions.d)
  endforeach()
  if(KVLM_HELP2MAN AND NOT KVLM_SANITIZE)
    install(DIRECTORY ${KVLM_MAN_PAGES}/ DESTINATION ${CMAKE_INSTALL_MANDIR}/man1)
  endif()
endif()

install(TARGETS kvlm kvlm_runtime kvlm_vision kvlm_llm kvlm_kvcache kvlm_kernels kvlm_options
  EXPORT kvlm)
install(FILES kvlm/kvlm.h kvlm/policy.h DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/kvlm)
install(DIRECTORY kernels kvcache vision llm runtime DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/kvlm
  FILES_MATCHING PATTERN "*.h" PATTERN "cpu" EXCLUDE PATTERN "cuda" EXCLUDE
  PATTERN "no_cuda" EXCLUDE PATTERN "ffmpeg" EXCLUDE PATTERN "no_ffmpeg" EXCLUDE)
install(EXPORT kvlm NAMESPACE kvlm:: FILE kvlmTargets.cmake DESTINATION ${package_dir})
set(optional_libraries ffmpeg heif tiff)
set(optional_names VIDEOS HEIF TIFF)
foreach(library what IN ZIP_LISTS optional_libraries optional_names)
  set(KVLM_READS_${what} OFF)
  if(TARGET PkgConfig::${library})
    set(KVLM_READS_${what} ON)
  endif()
endforeach()
configure_package_config_file(cmake/kvlmConfig.cmake.in ${PROJECT_BINARY_DIR}/kvlmConfig.cmake
  INSTALL_DESTINATION ${package_dir})
write_basic_package_version_file(${PROJECT_BINARY_DIR}/kvlmConfigVersion.cmake
  COMPATIBILITY SameMinorVersion)
install(FILES cmake/dependencies.cmake ${PROJECT_BINARY_DIR}/kvlmConfig.cmake
  ${PROJECT_BINARY_DIR}/kvlmConfigVersion.cmake DESTINATION ${package_dir})
install(FILES LICENSE README.md CHANGELOG.md DESTINATION ${CMAKE_INSTALL_DOCDIR})

if(PROJECT_IS_TOP_LEVEL)
  include(cmake/package.cmake)
endif()
