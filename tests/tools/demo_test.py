#!/usr/bin/env python3
"""tools/demo.sh finds wrong arguments before it installs or builds anything."""

import subprocess
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 20


class Arguments(unittest.TestCase):
    def test_what_is_wrong_is_one_sentence_at_once(self):
        for arguments, words in ((["--image", "gone.png"], "--image gone.png does not exist"),
                                 (["--image", "a b\x1b[2J.png"], "does not exist"), (["--video", "gone.mp4"], "--video gone.mp4"),
                                 (["--imge", "x.png"], "--imge is not an option of vlm-run"),
                                 (["--kv", "int4", "-p"], "-p needs a value"), (["-Z"], "-Z is not an option")):
            with self.subTest(arguments):
                result = subprocess.run([ROOT / "tools/demo.sh", *arguments], stdin=subprocess.DEVNULL, capture_output=True,
                                        text=True, timeout=TIMEOUT_S)
                self.assertEqual((result.returncode, result.stdout), (1, ""), result.stderr)
                self.assertTrue(result.stderr.startswith("demo.sh: failed: "), result.stderr)
                self.assertEqual(result.stderr.count("\n"), 1)
                self.assertIn(words, result.stderr)
                self.assertNotIn("\x1b", result.stderr)


if __name__ == "__main__":
    unittest.main()
