#!/usr/bin/env python3
"""Runs vlm-kv profile as a person would: what it measures, where it writes, and what a policy makes of it.

KVLM_BUILD is the build folder.
"""

import json
import os
import subprocess
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TOOLS = Path(os.environ.get("KVLM_BUILD", ROOT / "build/release")) / "tools"
DATA = ROOT / "tools/pocket/heldout/captions.jsonl"
MODEL = ROOT / "tests/golden/llava_gqa"
PICTURE = ROOT / "tools/pocket/heldout/scenes/scene_000.png"
TIMEOUT_S = 300


def setUpModule():
    if not (TOOLS / "vlm-kv").is_file():
        raise unittest.SkipTest(f"{TOOLS / 'vlm-kv'} is not built")


def run(program, *arguments):
    return subprocess.run([TOOLS / program, *map(str, arguments)], stdin=subprocess.DEVNULL, capture_output=True,
                          timeout=TIMEOUT_S, text=True)


class Profile(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="kvlm-profile-")
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        self.out = self.folder / "profile.json"

    def profile(self, *arguments, out=None, records=1):
        return run("vlm-kv", "profile", "--data", DATA, "--out", out or self.out, "--records", records, "-n", 4, *arguments)

    def caption(self, spec, *arguments):
        result = run("vlm-run", "--image", PICTURE, "-p", "Describe the image.", "--json", "--kv", spec, *arguments)
        self.assertEqual(result.returncode, 0, result.stderr)
        return json.loads(result.stdout)

    def test_values_are_kept_by_width_and_parts_are_added(self):
        result = self.profile("--policy", "head_quantile", "--bits", 1)
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertIn("1 bits, alpha", result.stdout)
        first = json.loads(self.out.read_text())
        self.assertEqual(set(first), {"model", "head_quantile"})
        self.assertEqual(set(first["head_quantile"]["alpha"]), {"1"})
        result = self.profile("--policy", "prefixkv", "--policy", "head_quantile", "--bits", 4, "--json")
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertEqual(json.loads(result.stdout), json.loads(self.out.read_text()))
        both = json.loads(self.out.read_text())
        self.assertEqual(set(both["head_quantile"]["alpha"]), {"1", "4"})
        self.assertEqual(both["head_quantile"]["alpha"]["1"], first["head_quantile"]["alpha"]["1"])
        self.assertLess(both["head_quantile"]["alpha"]["4"], 0.05)
        for name in ("forget", "gini", "std", "mad"):
            layers = both["prefixkv"][name]
            self.assertEqual(set(layers), {"means", "sums"})
            self.assertEqual(len(layers["means"]), len(layers["sums"]))
            for ratio in layers["means"] + layers["sums"]:
                self.assertTrue(0 <= ratio <= 1, ratio)
        for score in ("means", "sums"):
            forget = both["prefixkv"]["forget"][score]
            self.assertAlmostEqual(sum(forget) / len(forget), 0.5, places=2)
        self.assertEqual([path.name for path in self.folder.iterdir()], ["profile.json"])

    def test_records_together_give_the_values_of_one_at_a_time(self):
        found = []
        for size in (1, 2, 16):
            result = self.profile("-m", MODEL, "--policy", "head_quantile", "--bits", 1, "--batch-size", size, records=3,
                                  out=self.folder / f"{size}.json")
            self.assertEqual(result.returncode, 0, result.stderr)
            shown = [line for line in result.stdout.splitlines() if not line.startswith("wrote ")]
            found.append((shown, (self.folder / f"{size}.json").read_text()))
        self.assertEqual(len(found[0][0]), 8)
        self.assertEqual(found[0], found[1])
        self.assertEqual(found[0], found[2])

    def test_budgets_and_gini_are_shown(self):
        result = self.profile("--policy", "prefixkv")
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertRegex(result.stdout, r"layer 0 +keeps 0\.\d+ by means, 0\.\d+ by sums; gini 0\.\d+, 0\.\d+\n")
        # The published rule has its budgets now, and takes them.
        answer = self.caption("prefixkv,profile=official", "--kv-profile", self.out, "-n", 2)
        self.assertIn("profile=official", answer["kv"]["spec"])

    def test_a_value_of_one_bit_is_for_one_bit(self):
        self.out.write_text('{"model": "pocket", "head_quantile": {"alpha": {"1": 0.2}}}')
        plain = self.caption("f16")
        self.assertEqual(self.caption("head_quantile,bits=8", "--kv-profile", self.out)["text"], plain["text"])

    def test_what_is_there_is_not_lost(self):
        records = self.folder / "records.jsonl"
        records.write_text(DATA.read_text())
        notes = self.folder / "notes.txt"
        notes.write_text("not a profile\n")
        other = self.folder / "other.json"
        other.write_text('{"model": "another", "head_quantile": {"alpha": {"1": 0.2}}}')
        for out, words in ((records, "is the file of --data; give another name"),
                           (notes, "exists and is not a profile"),
                           (other, "is the profile of another, not of"),
                           (self.folder, "is not a regular file"),
                           (self.folder / "no/such.json", "cannot be written")):
            before = out.read_text() if out.is_file() else None
            with self.subTest(out=out):
                result = run("vlm-kv", "profile", "--data", records, "--out", out, "--records", 1, "-n", 2)
                self.assertEqual(result.returncode, 2, result.stderr)
                self.assertEqual(result.stdout, "")
                self.assertEqual(result.stderr.count("\n"), 1, result.stderr)
                self.assertIn(words, result.stderr)
                if before is not None:
                    self.assertEqual(out.read_text(), before)
        self.assertEqual(len(list(self.folder.iterdir())), 3)

    def test_a_bad_record_is_told_with_its_line(self):
        data = self.folder / "records.jsonl"
        good = json.dumps({"id": 1, "image": str(MODEL / "image0.png"), "prompt": "What?"})
        for bad, words in (('{"image": "gone.png"}', "gone.png"), ('{"image": 3}', "image is 3"),
                           ("{", "syntax error"),
                           (json.dumps({"prompt": "word " * 3000}), "has a context of")):
            data.write_text(f"{good}\n\n{bad}\n")
            for policy in ("prefixkv", "head_quantile"):
                with self.subTest(bad=bad[:30], policy=policy):
                    arguments = ("profile", "-m", MODEL, "--data", data, "--out", self.out, "-n", 2, "--bits", 1,
                                 "--policy", policy)
                    result = run("vlm-kv", *arguments)
                    self.assertNotEqual(result.returncode, 0)
                    message = result.stderr.splitlines()[-1]
                    self.assertIn("records.jsonl line 3: ", message)
                    self.assertIn(words, message)
                    self.assertFalse(self.out.exists())
                    # What is not asked for is not read.
                    result = run("vlm-kv", *arguments, "--records", 1)
                    self.assertEqual(result.returncode, 0, result.stderr)
                    self.out.unlink()

    def test_nothing_to_fit_is_said(self):
        result = self.profile("--policy", "calibquant", "--bits", 8)
        self.assertEqual(result.returncode, 2)
        self.assertIn("--policy calibquant has nothing to calibrate at 8 bits", result.stderr)

    def test_published_budgets_need_a_profile(self):
        for spec in ("prefixkv,profile=official", "prefixkv,profile=paper", "calibquant,profile=paper"):
            result = run("vlm-run", "-p", "x", "--kv", spec)
            self.assertNotEqual(result.returncode, 0)
            self.assertIn("vlm-kv profile --policy", result.stderr)


if __name__ == "__main__":
    unittest.main()
