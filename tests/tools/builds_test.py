#!/usr/bin/env python3
"""tools/results/builds.py finds wrong arguments before it measures anything."""

import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 20


class Arguments(unittest.TestCase):
    def test_what_is_wrong_is_one_sentence_at_once(self):
        with tempfile.TemporaryDirectory() as folder:
            for builds, words in ((["nowhere"], "nowhere/tools/vlm-bench does not exist; give the folder of a build"),
                                  (["a", "b", "c"], "give one build, or an old and a new one")):
                with self.subTest(builds):
                    out = Path(folder, "out.csv")
                    result = subprocess.run([sys.executable, ROOT / "tools/results/builds.py", "--out", out, *builds],
                                            capture_output=True, text=True, timeout=TIMEOUT_S)
                    self.assertEqual((result.returncode, result.stdout), (2, ""), result.stderr)
                    self.assertIn(words, result.stderr.splitlines()[-1])
                    self.assertFalse(out.exists())


if __name__ == "__main__":
    unittest.main()
