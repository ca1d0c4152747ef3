"""What the tests of the command line of vlm-run share. KVLM_BUILD is the build folder."""

import os
import shutil
import subprocess
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = Path(os.environ.get("KVLM_BUILD", ROOT / "build/release")) / "tools/vlm-run"
MODEL = ROOT / "tests/golden/llava_gqa"
PICTURE = MODEL / "image0.png"
TIMEOUT_S = 120


def run(*arguments, **options):
    options = {"stdin": subprocess.DEVNULL, "capture_output": True, "timeout": TIMEOUT_S} | options
    if "input" in options:
        del options["stdin"]
    return subprocess.run([PROGRAM, *(a if isinstance(a, bytes) else str(a) for a in arguments)], **options)


class VlmRun(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        if not PROGRAM.is_file():
            raise unittest.SkipTest(f"{PROGRAM} is not built")

    def setUp(self):
        scratch = tempfile.TemporaryDirectory(prefix="kvlm-cli-")
        self.addCleanup(scratch.cleanup)
        self.folder = Path(scratch.name)

    def checkpoint(self, source):
        """A copy that may be damaged, without the tensors that only the golden test reads."""
        shutil.rmtree(self.folder / "model", ignore_errors=True)
        return Path(shutil.copytree(source, self.folder / "model",
                                    ignore=shutil.ignore_patterns("golden.safetensors")))

    def assert_refused(self, result, status, words):
        """One sentence; status None: 1 or 2."""
        stderr = result.stderr.decode("utf-8", "replace")
        self.assertNotIn("Sanitizer", stderr)
        self.assertNotIn("runtime error", stderr)
        self.assertIn(result.returncode, (1, 2) if status is None else (status,), stderr)
        self.assertTrue(stderr.startswith("vlm-run: "), stderr)
        self.assertTrue(stderr.endswith("\n"), stderr)
        self.assertEqual(len(stderr.splitlines()), 1, stderr)
        self.assertLess(len(stderr), 1000, "a message is a sentence")
        for word in words:
            self.assertIn(word, stderr)
        self.assertEqual(result.stdout, b"")

    def assert_sound(self, result, status=0):
        stderr = result.stderr.decode("utf-8", "replace")
        self.assertNotIn("Sanitizer", stderr)
        self.assertEqual(result.returncode, status, stderr)
