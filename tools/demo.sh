#!/usr/bin/env bash
# From a fresh clone to a caption: builds vlm-run and shows a bundled model a bundled picture.
#
#   tools/demo.sh                                 caption of the first held-out scene
#   tools/demo.sh -p "How many objects are there?"     any further options of vlm-run
#   tools/demo.sh --image cat.png                 another picture
set -euo pipefail

folder=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
log=$folder/build/demo.log
program=$folder/build/release/tools/vlm-run

fail() {
  echo "demo.sh: failed: $1" >&2
  exit 1
}

# quietly NAME COMMAND...: runs the command with its output in the log, which is shown if it fails.
quietly() {
  local name=$1
  shift
  (cd "$folder" && "$@") </dev/null >>"$log" 2>&1 || {
    tail -n 30 "$log" >&2
    fail "$name; all of its output is in build/demo.log"
  }
}

image=()
case " $* " in
  *" --image "* | *" --image="* | *" --batch "* | *" --batch="*) ;;
  *)
    pictures=("$folder"/tools/pocket/heldout/scenes/*.png)
    [[ -f ${pictures[0]} ]] || fail "no picture in tools/pocket/heldout/scenes"
    image=(--image "${pictures[0]}")
    ;;
esac

mkdir -p "$folder/build"
: >"$log"
echo "demo: installing what is missing"
quietly "install what is missing" tools/setup.sh
echo "demo: building vlm-run in build/release (some minutes the first time)"
quietly "configure" cmake --preset release
quietly "build" cmake --build --preset release --target vlm-run -j "$(nproc)"
if ((${#image[@]})); then echo "demo: vlm-run --image ${image[1]#"$folder/"}${*:+ $*}"; fi
exec "$program" -q "${image[@]}" "$@"
