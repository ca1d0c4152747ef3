"""What the tests of the Python module share. They run in build/python-venv, which tools/python.sh makes; without it there is
nothing to test."""

import importlib.util
import os
import sys
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BUILD = Path(os.environ.get("KVLM_BUILD", ROOT / "build/release")).resolve()
RUN, KV = BUILD / "tools/vlm-run", BUILD / "tools/vlm-kv"
HELDOUT = ROOT / "tools/pocket/heldout"
VENV = ROOT / "build/python-venv/bin/python"

if importlib.util.find_spec("kvlm._core") is None if importlib.util.find_spec("kvlm") else True:
    if VENV.exists() and Path(sys.executable) != VENV:
        os.execv(VENV, [str(VENV), *sys.argv])
    print("the Python module is not built; tools/python.sh builds it")
    unittest.main(module=None, argv=sys.argv[:1])


def scene(number):
    return HELDOUT / f"scenes/scene_{number:03}.png"
