#!/usr/bin/awk -f
# For Doxygen: what a docstring indents, shapes and examples, is set as it is in the source.
{
  indented = /^ *\/\/\/   +[^ ]/
  if (indented) {
    match($0, /^ *\/\/\//)
    start = substr($0, 1, RLENGTH)
    if (text) print start
    $0 = start "    " substr($0, RLENGTH + 1)
  } else if (/^ *\/\/\//) {
    gsub(/@/, "\\@")
    if (was_indented && /\/\/\/ [^ ]/) print start
  }
  text = !indented && /^ *\/\/\/ [^ ]/
  was_indented = indented
  print
}
