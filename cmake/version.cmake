# cmake -DSOURCE=... -DOUTPUT=... -P version.cmake: writes what --version prints; touches the file only when it changes.
execute_process(COMMAND git -C ${SOURCE} rev-parse --short=12 HEAD
  OUTPUT_VARIABLE commit OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET RESULT_VARIABLE status)
if(NOT status EQUAL 0 AND DEFINED ENV{KVLM_COMMIT})  # a copy without .git, as in a container
  set(commit "$ENV{KVLM_COMMIT}")
elseif(NOT status EQUAL 0)
  set(commit "unknown")
endif()
execute_process(COMMAND git -C ${SOURCE} status --porcelain --untracked-files=no
  OUTPUT_VARIABLE changes OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
if(changes)
  string(APPEND commit "+changes")
endif()
set(text "#include \"tools/common/version.h\"

namespace kvlm {
const char* const kVersion = \"${VERSION}\";
const char* const kCommit = \"${commit}\";
const char* const kCompiler = \"${COMPILER}\";
const char* const kCudaVersion = \"${CUDA}\";
const char* const kSourceFolder = \"${SOURCE}\";
const char* const kInstalledData = \"${DATA}\";
}  // namespace kvlm
")
set(old "")
if(EXISTS ${OUTPUT})
  file(READ ${OUTPUT} old)
endif()
if(NOT old STREQUAL text)
  file(WRITE ${OUTPUT} "${text}")
endif()
