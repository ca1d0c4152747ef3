#!/usr/bin/env python3
"""vlm-kv fidelity and profile on a checkpoint of every family: pictures, and clips where the family takes them.

KVLM_BUILD is the build folder; KVLM_TEST_DEVICE=cuda runs the same on a GPU.
"""

import json
import os
import subprocess
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
KV = Path(os.environ.get("KVLM_BUILD", ROOT / "build/release")) / "tools/vlm-kv"
GOLDEN = ROOT / "tests/golden"
DEVICE = os.environ.get("KVLM_TEST_DEVICE", "cpu")
# One folder a family and spelling; every model_type of a published checkpoint that is built in.
FOLDERS = ["llava_gqa", "llava_interleave", "llava_next", "llava_onevision", "internvl", "internvl_original",
           "qwen2_vl", "qwen2_5_vl", "qwen3_vl"]


def setUpModule():
    if not KV.is_file():
        raise unittest.SkipTest(f"{KV} is not built")


class Families(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="kvlm-families-")
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)

    def records(self, model):
        """A picture, two pictures where the context holds them, and a clip."""
        records = [{"id": 1, "image": str(model / "image0.png"), "text": "a red circle and a tree in the centre"}]
        if (model / "video0").is_dir():
            records.append({"id": 2, "video": str(model / "video0"), "text": "it is small and red, and it moves"})
        data = self.folder / f"{model.name}.jsonl"
        data.write_text("".join(json.dumps(record) + "\n" for record in records))
        return data, len(records)

    def run_kv(self, *arguments):
        result = subprocess.run([KV, *map(str, arguments), "--device", DEVICE], stdin=subprocess.DEVNULL,
                                capture_output=True, text=True, timeout=300)
        self.assertEqual(result.returncode, 0, f"{arguments}\n{result.stderr}")
        return result.stdout

    def test_fidelity(self):
        for name in FOLDERS:
            with self.subTest(name):
                data, count = self.records(GOLDEN / name)
                rows = [json.loads(line) for line in self.run_kv(
                    "fidelity", "-m", GOLDEN / name, "--kv", "f16", "--kv", "int8", "--kv", "uniform,keep=0.3",
                    "--data", data, "-n", 6, "--json").splitlines()]
                exact, coarse, dropped = rows
                self.assertEqual(exact["records"], count)
                self.assertEqual(exact["kl_mean"], 0)
                self.assertEqual(exact["top1"], 100.0 if exact["top1"] > 1 else 1)
                self.assertGreater(coarse["kl_mean"], 0)
                self.assertLess(coarse["kl_mean"], dropped["kl_mean"])
                self.assertLess(coarse["stored_bits"], 16)

    def test_profile(self):
        for name in FOLDERS:
            with self.subTest(name):
                data, _ = self.records(GOLDEN / name)
                out = self.folder / f"{name}.json"
                self.run_kv("profile", "-m", GOLDEN / name, "--data", data, "--out", out, "--policy", "prefixkv",
                            "-n", 3)
                profile = json.loads(out.read_text())
                for ratios in profile["prefixkv"]["forget"].values():
                    self.assertTrue(all(0 <= ratio < 1 for ratio in ratios), ratios)


if __name__ == "__main__":
    unittest.main()
