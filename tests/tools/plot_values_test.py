#!/usr/bin/env python3
"""tools/kv/plot_values.py: what is drawn, without matplotlib; and, where there is one, that counts of any size are drawn."""

import importlib.util
import json
import os
import struct
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tools/kv/plot_values.py"
sys.path.insert(0, str(SCRIPT.parent))

import plot_values  # noqa: E402

TIMEOUT_S = 500


def entry(layer, part="keys", rows="visual", heads=2, count=10, last=False, **others):
    """As `vlm-kv values --json` prints it; a layer without such rows has count 0."""
    made = {"model": "/models/tiny", "records": 2, "layer": layer, "part": part, "rows": rows, "bins": {"low": -1.0, "width": 0.5},
            "low": -0.9, "high": 0.8, "codes": [4, 3, 2, 1],
            "heads": [{"low": -0.9 + 0.1 * h, "high": 0.8, "count": count, "histogram": [count // 2, 0, count // 2, 0]}
                      for h in range(heads)]}
    return {**made, **({} if last else {"code_distances": [5, 3, 1, 1]}), **others}


def model_of(layers, heads, visual=True):
    return [entry(layer, part, rows, heads, 10 if visual or rows == "text" else 0, last=layer + 1 == layers)
            for layer in range(layers) for part in ("keys", "values") for rows in ("visual", "text")]


class Data(unittest.TestCase):
    def test_codes_in_common_beside_chance(self):
        """By hand: 5 of 10 are equal; drawn apart (16 + 9 + 4 + 1) / 100 and (4 + 6 + 6 + 4) / 100 would be."""
        layers = [entry(0), entry(1), entry(2, last=True, codes=[1, 2, 3, 4])]
        at, equal, chance = plot_values.in_common(layers)
        self.assertEqual((at, equal), ([0, 1], [0.5, 0.5]))
        self.assertAlmostEqual(chance[0], 0.30)
        self.assertAlmostEqual(chance[1], 0.20)

    def test_one_layer_has_no_next(self):
        self.assertEqual(plot_values.in_common([entry(0, last=True)]), ([], [], []))

    def test_shares_of_a_head(self):
        self.assertEqual(plot_values.shares({"count": 8, "histogram": [2, 6]}), [0.25, 0.75])
        self.assertEqual(plot_values.shares({"count": 0, "histogram": [0, 0]}), [0.0, 0.0])

    def test_layers_without_such_rows_are_left_out(self):
        counts = [entry(1), entry(0), entry(0, rows="text"), entry(2, count=0)]
        self.assertEqual([found["layer"] for found in plot_values.of(counts, "keys", "visual")], [0, 1])

    def test_files_that_are_none(self):
        with tempfile.TemporaryDirectory(prefix="kvlm-plot-") as folder:
            path = Path(folder, "x.jsonl")
            for text, words in (("", "no counts"), ("{}\n", "line 1"), ("\nnot json\n", "line 2"), ("[1]\n", "line 1")):
                path.write_text(text)
                with self.assertRaisesRegex(SystemExit, words):
                    plot_values.read_counts(path)


class Script(unittest.TestCase):
    def setUp(self):
        self.folder = Path(self.enterContext(tempfile.TemporaryDirectory(prefix="kvlm-plot-")))

    def run_script(self, *arguments, **environment):
        return subprocess.run([sys.executable, SCRIPT, *map(str, arguments)], stdin=subprocess.DEVNULL, capture_output=True,
                              text=True, timeout=TIMEOUT_S, env={**os.environ, **environment})

    def test_a_missing_matplotlib_is_said_with_its_cure(self):
        (self.folder / "matplotlib.py").write_text("raise ImportError('none')")
        missing = self.run_script("--check", "plots", PYTHONPATH=str(self.folder))
        self.assertEqual(missing.returncode, 1)
        self.assertIn("plot_values.py: matplotlib is not installed; apt install python3-matplotlib", missing.stderr)
        self.assertIn(f"python3 {SCRIPT} FIGURES.jsonl plots", missing.stderr)

    def test_usage(self):
        self.assertEqual(self.run_script("x").returncode, 2)

    @unittest.skipUnless(importlib.util.find_spec("matplotlib"), "matplotlib is not installed")
    def test_counts_of_any_size_are_drawn(self):
        self.assertEqual(self.run_script("--check", self.folder).returncode, 0)
        for layers, heads, visual, pages in ((1, 1, True, 1), (13, 3, True, 2), (2, 33, False, 1)):
            with self.subTest(layers=layers, heads=heads):
                figures = self.folder / f"{layers}.jsonl"
                figures.write_text("".join(json.dumps(made) + "\n" for made in model_of(layers, heads, visual)))
                made = self.folder / f"{layers}"
                done = self.run_script(figures, made)
                self.assertEqual(done.returncode, 0, done.stderr)
                names = ["ranges", "codes"]
                for rows in ("visual", "text"):
                    for part in ("keys", "values") if visual or rows == "text" else ():
                        names += [f"{part}_{rows}"] + [f"{part}_{rows}-{page}" for page in range(2, pages + 1)]
                self.assertEqual({path.name for path in made.iterdir()}, {f"{name}.{kind}" for name in names for kind in ("png", "svg")})
                for name in names:
                    width, height = struct.unpack(">II", (made / f"{name}.png").read_bytes()[16:24])
                    self.assertTrue(300 < width < 3000 and 200 < height < 3000, (name, width, height))


if __name__ == "__main__":
    unittest.main()
