#!/usr/bin/env bash
# Builds the wheel of the Python module and installs it, with what its tests need, in build/python-venv. Needs PyPI.
#
#   tools/python.sh         does nothing where PyPI is not reached, saying so
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

venv=build/python-venv
tools/setup.sh --python
[[ -x $venv/bin/pip ]] || python3 -m venv "$venv"
if ! "$venv/bin/pip" install -q scikit-build-core nanobind ninja numpy pillow mypy; then
  echo "python.sh: PyPI is not reached; the Python module is neither built nor tested" >&2
  rm -rf "$venv"
  exit 0
fi
rm -rf build/wheelhouse
"$venv/bin/pip" wheel -q . --no-deps --no-build-isolation -w build/wheelhouse
"$venv/bin/pip" install -q --force-reinstall --no-deps build/wheelhouse/kvlm-*.whl
