#!/usr/bin/env python3
"""What vlm-run --json says of CalibQuant's remap: how often its slope was clamped
(docs/formulas.md, "Guarded remap").

KVLM_BUILD is the build folder.
"""

import json
import os
import subprocess
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = Path(os.environ.get("KVLM_BUILD", ROOT / "build/release")) / "tools/vlm-run"
PICTURE = ROOT / "tools/pocket/heldout/scenes/scene_000.png"
TIMEOUT_S = 300


def setUpModule():
    if not PROGRAM.is_file():
        raise unittest.SkipTest(f"{PROGRAM} is not built")


class GuardedRemaps(unittest.TestCase):
    def count(self, spec):
        command = [PROGRAM, "--image", PICTURE, "-p", "Describe the image.", "-n", "5", "--json", "--kv", spec]
        result = subprocess.run(list(map(str, command)), stdin=subprocess.DEVNULL, capture_output=True,
                                timeout=TIMEOUT_S, text=True)
        self.assertEqual(result.returncode, 0, result.stderr)
        return json.loads(result.stdout)["kv"]["guarded_remaps"]

    def test_slopes_that_were_clamped_are_counted(self):
        self.assertEqual(self.count("f16"), 0)
        self.assertEqual(self.count("calibquant,tau=0:0"), 0)
        self.assertEqual(self.count("calibquant,tau=0:1000,guard=none"), 0)
        self.assertGreater(self.count("calibquant,tau=0:1000"), 0)


if __name__ == "__main__":
    unittest.main()
