#!/usr/bin/env bash
# Every claim of the papers on smol-internvl: 200 captions and 200 documents under every spec that a claim needs, then
# docs/data/real_claims.csv and docs/papers/claims.md, which it replaces. A second run changes nothing but dates and times.
#
#   tools/real/verdicts.sh OUT DEVICE-NAME [option of tools/eval/tables.py ...]
#   tools/real/verdicts.sh out "NVIDIA H200" --device cuda --jobs 8 --batch-size 100
#
# Makes the model first (tools/real/get.sh, which needs PyPI once). Start it again to continue where it ended. On two H200s,
# one for each set (--set, at the same time), the answers took 12 minutes. NVIDIA's MPS lets jobs share a GPU faster
# (docs/evaluation.md, "Hours and memory").
set -euo pipefail

usage="usage: tools/real/verdicts.sh OUT DEVICE-NAME [option of tools/eval/tables.py ...]"
if [[ ${1-} == -h || ${1-} == --help ]]; then
  sed -n '2,10s/^# \{0,1\}//p' "$0"
  exit 0
fi
if [[ $# -lt 2 || $1 == -* || $2 == -* ]]; then
  echo "$usage" >&2
  exit 2
fi
out=$(realpath -m "$1") device=$2
shift 2
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
tools/real/get.sh
python=build/real-venv/bin/python3 # has numpy, which the report needs
[[ -x $python ]] || python=python3
"$python" tools/eval/tables.py --out "$out" --model build/real/smol-internvl --set captions --set documents --layer-records 0 \
  --skip pycocoevalcap --skip plots "$@"
"$python" tools/results/claims.py --report "$out/report/claims.csv" --device "$device"
