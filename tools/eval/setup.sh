#!/usr/bin/env bash
# Makes the virtual environment of the evaluation scripts, with pinned packages, and looks for Java.
#
#   tools/eval/setup.sh [FOLDER]   default: build/eval-venv
#
# Does nothing, quickly, when all is there. Java is for METEOR, SPICE and the PTB tokenizer.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
if (($# > 1)) || [[ ${1:-} == -* ]]; then
  echo "setup.sh: usage: tools/eval/setup.sh [FOLDER]" >&2
  exit 2
fi
venv=${1:-$(cd "$here/../.." && pwd)/build/eval-venv}
stamp=$venv/kvlm-requirements.txt # copied when all of it is installed

if ! cmp -s "$here/requirements.txt" "$stamp"; then
  if ! python3 -c 'import ensurepip, venv' 2>/dev/null; then
    echo "setup.sh: this python3 makes no virtual environments; install Debian's python3-venv" >&2
    exit 1
  fi
  python3 -m venv "$venv"
  "$venv/bin/python3" -m pip install --quiet --disable-pip-version-check -r "$here/requirements.txt"
  cp "$here/requirements.txt" "$stamp"
fi

"$venv/bin/python3" -c 'import pycocoevalcap.meteor.meteor, pycocotools.coco, matplotlib, pyarrow.parquet'
if ! command -v java >/dev/null; then
  echo "setup.sh: there is no java, so BLEU, METEOR, ROUGE_L and CIDEr cannot be computed; install Debian's" \
    "default-jre-headless" >&2
  exit 1
fi
echo "$venv/bin/python3: $("$venv/bin/python3" -m pip --disable-pip-version-check list --format=freeze \
  --exclude pip --exclude setuptools | tr '\n' ' ')"
java -version 2>&1 | head -1
