#!/usr/bin/env bash
# From a fresh clone to a caption: builds the programs and shows a bundled model a bundled image.
#
#   tools/demo.sh                                 caption of the first held-out scene
#   tools/demo.sh -p "How many objects are there?"     any further options of vlm-run
#   tools/demo.sh --image cat.png                 another image
#
# Afterwards `cmake --install build/release --prefix PREFIX` finds all that it installs.
set -euo pipefail

folder=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
log=$folder/build/demo.log
program=$folder/build/release/tools/vlm-run

fail() {
  echo "demo.sh: failed: $1" >&2
  exit 1
}

# failed STEP: shows the end of the log and stops.
failed() {
  tail -n 30 "$log" >&2
  fail "$1; all of its output is in build/demo.log"
}

# quietly STEP COMMAND...: runs the command with its output in the log, which is shown if it fails.
quietly() {
  local name=$1
  shift
  (cd "$folder" && "$@") </dev/null >>"$log" 2>&1 || failed "$name"
}

# progress: ninja's output into the log, and its [n/N] on one line of a terminal.
progress() {
  local line shown=
  while IFS= read -r line; do
    printf '%s\n' "$line" >>"$log"
    if [[ -t 1 && $line == \[*/*\]* ]]; then
      printf '\rdemo: %s' "${line%%]*}]"
      shown=1
    fi
  done
  if [[ $shown ]]; then echo; fi
}

# check ARGUMENT...: what can be found wrong before minutes of building. The options are those that the source declares.
check() {
  local known flag next previous=
  known=$(grep -ohE '"(-[a-zA-Z],)?--[a-z0-9_,-]+"' "$folder"/tools/run/options.cpp "$folder"/tools/common/*_options.cpp |
    tr -d '"' | tr ',' '\n')
  for next; do
    case $previous in
      --image | --video)
        [[ $next == - || $next == *://* || -e $next ]] || fail "$(printf '%s %q does not exist' "$previous" "$next")"
        ;;
      -p | --prompt) next= ;; # a question may begin with a hyphen
    esac
    if [[ $next == -?* ]]; then
      flag=${next%%=*}
      grep -qxF -e "$flag" <<<"$known"$'\n-h\n--help\n--version' || fail "$(printf '%q is not an option of vlm-run' "$flag")"
    fi
    previous=$next
  done
  case $previous in
    --image | --video | --batch | --out | -p | --prompt | -m | --model | -n | --max-tokens | --kv)
      fail "$previous needs a value"
      ;;
  esac
}

check "$@"
image=()
case " $* " in
  *" --image "* | *" --image="* | *" --video "* | *" --video="* | *" --batch "* | *" --batch="* | *" --help "* | *" -h "* | *" --version "*) ;;
  *)
    scenes=("$folder"/tools/pocket/heldout/scenes/*.png)
    [[ -f ${scenes[0]} ]] || fail "no image in tools/pocket/heldout/scenes"
    if [[ ! -e ${1:-} ]]; then image=(--image "${scenes[0]}"); fi
    ;;
esac

mkdir -p "$folder/build"
: >"$log"
echo "demo: installing what is missing"
quietly "install what is missing" tools/setup.sh
echo "demo: building the programs in build/release (some minutes the first time)"
quietly "configure" cmake --preset release
# All that cmake --install takes: the programs and, with them, the libraries; no test.
(cd "$folder" && cmake --build --preset release --target programs -j "$(nproc)") </dev/null 2>&1 |
  progress || failed "build"
if ((${#image[@]})); then printf 'demo: vlm-run --image %q%s\n' "${image[1]#"$folder/"}" "${*:+$(printf ' %q' "$@")}"; fi
exec "$program" -q "${image[@]}" "$@"
