#!/usr/bin/env python3
"""A program built with CUDA needs no CUDA library to start: it runs on the CPU, and says in one sentence what a GPU lacks.

Looks at the programs of KVLM_BUILD, and at those of build/cuda where they are built.
"""

import json
import os
import re
import subprocess
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BUILDS = {Path(os.environ.get("KVLM_BUILD", ROOT / "build/release")), ROOT / "build/cuda"}
PICTURE = ROOT / "tools/pocket/heldout/scenes/scene_000.png"
TIMEOUT_S = 120


def programs():
    return [path for build in sorted(BUILDS) for name in ("vlm-run", "vlm-kv", "vlm-bench")
            if (path := build / "tools" / name).is_file()]


def run(program, *arguments):
    environment = {k: v for k, v in os.environ.items() if k != "LD_LIBRARY_PATH"}
    return subprocess.run([program, *map(str, arguments)], stdin=subprocess.DEVNULL, capture_output=True,
                          text=True, timeout=TIMEOUT_S, env=environment)


@unittest.skipIf(os.environ.get("KVLM_SANITIZE"), "what is shipped is a release build")
class Start(unittest.TestCase):
    def setUp(self):
        if not programs():
            self.skipTest("no program is built")

    def test_no_library_of_cuda_is_needed(self):
        for program in programs():
            with self.subTest(program=program):
                needed = subprocess.run(["readelf", "-d", program], check=True, capture_output=True, text=True).stdout
                names = re.findall(r"\(NEEDED\).*\[(.*)\]", needed)
                self.assertIn("libc.so.6", names)
                self.assertFalse([name for name in names if re.match(r"lib(cu|nv)", name)])

    def test_the_cpu_serves(self):
        reference = json.loads((ROOT / "tools/pocket/reference/greedy_fp32.json").read_text())
        caption = next(r["text"].strip() for r in reference if r["image"] == "scenes/scene_000.png")
        for program in filter(lambda path: path.name == "vlm-run", programs()):
            result = run(program, "-q", "--device", "cpu", "--image", PICTURE)
            self.assertEqual((result.returncode, result.stdout.strip()), (0, caption), result.stderr)

    def test_a_gpu_is_missed_in_one_sentence(self):
        for program in filter(lambda path: path.name == "vlm-run", programs()):
            result = run(program, "-q", "--device", "cuda", "--image", PICTURE)
            if result.returncode == 0:
                self.skipTest("there is a GPU")
            self.assertEqual((result.returncode, result.stdout, result.stderr.count("\n")), (1, "", 1))
            self.assertIn("use --device cpu", result.stderr)


if __name__ == "__main__":
    unittest.main()
