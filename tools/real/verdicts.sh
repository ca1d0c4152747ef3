#!/usr/bin/env bash
# Every claim of the papers on smol-internvl: 200 captions and 200 documents under every spec that a claim needs, then
# docs/data/real_claims.csv and docs/papers/claims.md. A second run changes nothing but dates and times.
#
#   tools/real/verdicts.sh OUT DEVICE-NAME [option of tools/eval/tables.py ...]
#   tools/real/verdicts.sh out "NVIDIA H200" --device cuda --jobs 4 --batch-size 100
#
# Makes the model first (tools/real/get.sh, which needs PyPI once). Start it again to continue where it ended.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

if [[ $# -lt 2 ]]; then
  echo "usage: tools/real/verdicts.sh OUT DEVICE-NAME [option of tools/eval/tables.py ...]" >&2
  exit 2
fi
out=$1 device=$2
shift 2
tools/real/get.sh
tools/eval/tables.py --out "$out" --model build/real/smol-internvl --set captions --set documents --layer-records 0 \
  --skip pycocoevalcap --skip plots "$@"
tools/results/claims.py --report "$out/report/claims.csv" --device "$device"
