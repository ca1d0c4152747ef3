# cmake -DHELP2MAN=... -DPROGRAM=vlm-kv -DSUBCOMMANDS="list;..." -DVERSION=... -DSECTIONS=DIR -DOUTPUT=DIR -P man_pages.cmake,
# in the program's folder: writes a page for the program and for each of its subcommands. help2man sets the options of --help;
# NAME and EXAMPLES are set here, and SECTIONS has what --help does not say: common.h2m, and PROGRAM.h2m where that exists.
cmake_minimum_required(VERSION 3.25)
set(sections ${SECTIONS}/common.h2m)
if(EXISTS ${SECTIONS}/${PROGRAM}.h2m)
  list(APPEND sections ${SECTIONS}/${PROGRAM}.h2m)
endif()

# What the text says up to its first empty line or "Usage:", on one line: "vlm-kv: looks at cache policies".
function(summary_of text result)
  foreach(end IN ITEMS "\n\n" "\nUsage:")
    string(FIND "${text}" "${end}" length)
    string(SUBSTRING "${text}" 0 ${length} text)
  endforeach()
  string(REPLACE "\n" " " text "${text}")
  string(STRIP "${text}" text)
  string(REGEX REPLACE "^${PROGRAM}: |\\.$" "" text "${text}")
  set(${result} "${text}" PARENT_SCOPE)
endfunction()

# The lines below "Examples:" as they are, one command a line; or nothing.
function(examples_of text result)
  set(${result} "" PARENT_SCOPE)
  string(FIND "${text}" "\nExamples:\n" start)
  if(start LESS 0)
    return()
  endif()
  string(SUBSTRING "${text}" ${start} -1 text)
  string(REPLACE "\nExamples:\n" "" text "${text}")
  string(FIND "${text}" "\nExit status:" end)  # which common.h2m says in full
  string(SUBSTRING "${text}" 0 ${end} text)
  string(REPLACE "\\" "\\e" text "${text}")
  string(REPLACE "-" "\\-" text "${text}")
  string(REGEX REPLACE "\n([.'])" "\n\\\\&\\1" text "${text}")
  set(${result} "[=EXAMPLES]\n.nf\n${text}.fi\n" PARENT_SCOPE)
endfunction()

function(page name command)
  separate_arguments(words UNIX_COMMAND "${command}")
  execute_process(COMMAND ${words} --help OUTPUT_VARIABLE help COMMAND_ERROR_IS_FATAL ANY)
  summary_of("${help}" summary)
  examples_of("${help}" examples)
  set(include "${OUTPUT}/${name}.h2m")
  file(WRITE ${include} "[NAME]\n${name} \\- ${summary}\n\n${examples}\n")
  foreach(file IN LISTS sections)
    file(READ ${file} text)
    file(APPEND ${include} "${text}\n")
  endforeach()
  execute_process(COMMAND ${HELP2MAN} --no-info --version-string=${VERSION} --include=${include}
      ${command} OUTPUT_VARIABLE text COMMAND_ERROR_IS_FATAL ANY)
  file(REMOVE ${include})
  file(WRITE ${OUTPUT}/${name}.1 "${text}")
endfunction()

page(${PROGRAM} ./${PROGRAM})
foreach(subcommand IN LISTS SUBCOMMANDS)
  page(${PROGRAM}-${subcommand} "./${PROGRAM} ${subcommand}")
endforeach()
