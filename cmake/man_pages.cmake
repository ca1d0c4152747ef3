# cmake -DHELP2MAN=... -DPROGRAM=vlm-kv -DSUBCOMMANDS="list;..." -DVERSION=... -DOUTPUT=DIR -P man_pages.cmake,
# in the program's folder: writes a page for the program and for each of its subcommands.
function(page name command summary)
  execute_process(COMMAND ${HELP2MAN} --no-info --version-string=${VERSION} --name=${summary}
      ${command} OUTPUT_VARIABLE text COMMAND_ERROR_IS_FATAL ANY)
  string(TOUPPER ${PROGRAM} program)
  string(TOUPPER ${name} title)
  string(REPLACE ".TH ${program} " ".TH ${title} " text "${text}")
  string(REPLACE ".SH EXAMPLES\n" ".SH EXAMPLES\n.nf\n" text "${text}")  # one command a line
  file(WRITE ${OUTPUT}/${name}.1 "${text}")
endfunction()

# The first line of --help says what it is: "vlm-kv: looks at cache policies".
function(summary_of command result)
  separate_arguments(words UNIX_COMMAND "${command} --help")
  execute_process(COMMAND ${words} OUTPUT_VARIABLE text COMMAND_ERROR_IS_FATAL ANY)
  string(REGEX MATCH "^[^\n]*" line "${text}")
  string(REGEX REPLACE "^${PROGRAM}: " "" line "${line}")
  set(${result} "${line}" PARENT_SCOPE)
endfunction()

summary_of(./${PROGRAM} summary)
page(${PROGRAM} ./${PROGRAM} "${summary}")
foreach(subcommand IN LISTS SUBCOMMANDS)
  summary_of("./${PROGRAM} ${subcommand}" summary)
  page(${PROGRAM}-${subcommand} "./${PROGRAM} ${subcommand}" "${summary}")
endforeach()
