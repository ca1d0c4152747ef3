#!/usr/bin/env bash
# Builds everything and runs every test; the last lines are ctest's own summary.
#
#   tools/test.sh [--preset release|dev|asan|tsan] [--jobs N] [--lint] [--docs]
#
#   --preset  what to build and test: release (the default), dev (assertions), asan (address and
#             undefined behaviour), tsan (threads); the build is kept in build/PRESET
#   --jobs    compilers and tests at a time; all cores by default
#   --lint    first check the format (clang-format) and the code (clang-tidy, shellcheck)
#   --docs    first build the site and the API's pages into build/site; a warning, a link that leads
#             nowhere or a page that fetches something fails
#
# With the release preset the Python module is built and tested, too, where PyPI is reached. Where nvcc
# is found, the CUDA kernels are compiled too, for one architecture and one head_dim (their tests need
# a GPU and are not run here).
# Exit status 0 if everything passed, 1 if a step failed, naming it; 2 for a wrong argument.
set -euo pipefail

usage() {
  echo "test.sh: $1; usage: tools/test.sh [--preset release|dev|asan|tsan] [--jobs N] [--lint] [--docs]" >&2
  exit 2
}

preset=release
jobs=$(nproc)
lint=
docs=
while (($#)); do
  case $1 in
    --preset | --jobs)
      (($# > 1)) || usage "$1 needs a value"
      declare "${1#--}=$2"
      shift
      ;;
    --lint) lint=1 ;;
    --docs) docs=1 ;;
    -h | --help)
      sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"
      exit 0
      ;;
    *) usage "unknown argument '$1'" ;;
  esac
  shift
done
[[ $preset =~ ^(release|dev|asan|tsan)$ ]] || usage "unknown preset '$preset'"
[[ $jobs =~ ^[1-9][0-9]*$ ]] || usage "--jobs takes a number from 1"

cd "$(dirname "${BASH_SOURCE[0]}")/.."

# step NAME COMMAND...: runs the command; if it fails, names the step and stops.
step() {
  local name=$1
  shift
  echo "== $name"
  "$@" </dev/null || {
    echo "test.sh: failed: $name ($*)" >&2
    exit 1
  }
}

build() { # build PRESET
  step "configure ($1)" cmake --preset "$1"
  step "build ($1)" cmake --build --preset "$1" -j "$jobs"
}

step "install what is missing" tools/setup.sh --test ${lint:+--lint} ${docs:+--docs}

check_format() { sources '*.h' '*.cpp' '*.cu' '*.cuh' | xargs -0 clang-format --dry-run -Werror; }
check_shell() { sources '*.sh' .ci/run | xargs -0 shellcheck; }
sources() { git ls-files -coz --exclude-standard -- "$@"; }

if [[ $lint ]]; then
  step "check the format" check_format
  step "check the shell scripts" check_shell
  step "configure ($preset)" cmake --preset "$preset"
  step "clang-tidy" run-clang-tidy -quiet -j "$jobs" -p "build/$preset" \
    "^$PWD/(kernels|kvcache|vision|llm|runtime|tools|tests)/"
fi

if [[ $docs ]]; then step "build the site" tools/docs/build.py; fi

build "$preset"
if command -v nvcc >/dev/null; then build cuda-check; fi
if [[ $preset == release ]]; then step "build the Python module" tools/python.sh; fi

step "test ($preset)" ctest --test-dir "build/$preset" --output-on-failure --no-tests=error \
  --no-label-summary -j "$jobs"
