#!/usr/bin/env bash
# Installs what building and testing needs and is missing, from the system's packages (Debian 12, Ubuntu 24.04).
#
#   tools/setup.sh          compiler, libraries, test framework
#   tools/setup.sh --video  and FFmpeg's libraries, so that video files are read
#   tools/setup.sh --images and libheif and libtiff, so that HEIC and TIFF are read
#   tools/setup.sh --test   and matplotlib and numpy, so that plots and intervals are tested too
#   tools/setup.sh --browser and Chromium, in which vlm-serve's page is tested
#   tools/setup.sh --python and what the Python module is built with
#   tools/setup.sh --lint   and clang-format, clang-tidy, shellcheck
#   tools/setup.sh --deb    and what cpack -G DEB calls
#   tools/setup.sh --docs   and mkdocs with its Material theme and doxygen
#
# Does nothing, quickly, when all is there. Needs root or sudo only if something is missing.
set -euo pipefail

packages=(
  g++ cmake ninja-build git pkg-config python3
  libfmt-dev               # messages
  libhwy-dev               # SIMD with run-time dispatch
  nlohmann-json3-dev       # checkpoint and config files
  libcli11-dev             # command lines
  libjpeg-dev libpng-dev libwebp-dev # JPEG, PNG, WebP
  libstb-dev               # TGA
  libsentencepiece-dev     # LLaMA tokenizers
  libpcre2-dev libutf8proc-dev          # byte-level BPE tokenizers
  libedit-dev              # keys and history in a chat
  libcpp-httplib-dev libssl-dev prometheus-cpp-dev # vlm-serve
  libgtest-dev libgmock-dev libbenchmark-dev
  help2man                 # man pages
)
if grep -qsx 'ID=ubuntu' /etc/os-release; then
  packages+=(libprotobuf-dev) # Ubuntu's libsentencepiece-dev needs it and does not say so
fi
video_packages=(libavformat-dev libavcodec-dev libswscale-dev libavutil-dev)
image_packages=(libheif-dev libtiff-dev)
test_packages=(python3-matplotlib python3-numpy)
browser_packages=(chromium)
python_packages=(python3-venv python3-dev)
lint_packages=(clang-format clang-tidy shellcheck)
deb_packages=(dpkg-dev)
docs_packages=(mkdocs mkdocs-material doxygen)

for argument in "$@"; do
  case $argument in
    --video) packages+=("${video_packages[@]}") ;;
    --images) packages+=("${image_packages[@]}") ;;
    --test) packages+=("${test_packages[@]}") ;;
    --browser) packages+=("${browser_packages[@]}") ;;
    --python) packages+=("${python_packages[@]}") ;;
    --lint) packages+=("${lint_packages[@]}") ;;
    --deb) packages+=("${deb_packages[@]}") ;;
    --docs) packages+=("${docs_packages[@]}") ;;
    *)
      echo "setup.sh: unknown argument '$argument'; there are --video, --images, --test, --browser, --python, --lint, --deb and --docs" >&2
      exit 2
      ;;
  esac
done

if ! command -v dpkg-query >/dev/null; then
  echo "setup.sh: not a Debian system; install the equivalents of: ${packages[*]}" >&2
  exit 0 # CMake names whatever is still missing
fi

# shellcheck disable=SC2016 # dpkg expands it, not the shell
status='${db:Status-Status} ${Package}\n'
installed=$(dpkg-query -W -f="$status" "${packages[@]}" 2>/dev/null || true)
missing=()
for package in "${packages[@]}"; do
  grep -qxF "installed $package" <<<"$installed" || missing+=("$package")
done
if ((${#missing[@]} == 0)); then exit 0; fi

as_root=()
if [[ $(id -u) != 0 ]]; then
  if ! command -v sudo >/dev/null; then
    echo "setup.sh: cannot install ${missing[*]} without root or sudo; run tools/setup.sh as root" >&2
    exit 1
  fi
  as_root=(sudo)
  (: </dev/tty) 2>/dev/null || as_root+=(-n) # no terminal to ask for a password
fi

apt_get() {
  "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive LC_ALL=C \
    apt-get -q -o DPkg::Lock::Timeout=300 "$@" </dev/null
}
install_missing() { apt_get install -y --no-install-recommends "${missing[@]}"; }

echo "setup: installing ${missing[*]}"
if apt-get install --dry-run "${missing[@]}" >/dev/null 2>&1; then # the package lists know them
  install_missing || { apt_get update && install_missing; }         # unless the lists are too old
else
  apt_get update && install_missing
fi || {
  echo "setup.sh: apt-get could not install ${missing[*]}; its message is above" >&2
  exit 1
}
