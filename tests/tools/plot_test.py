#!/usr/bin/env python3
"""tools/kv/plot.py: what is drawn, without matplotlib; and, where there is one, that files of any size are drawn."""

import importlib.util
import json
import math
import os
import struct
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tools/kv/plot.py"
sys.path.insert(0, str(SCRIPT.parent))

import plot_data  # noqa: E402

TIMEOUT_S = 500


def result(spec, kl=0.1, bits=4.0, share=(1.0, 1.0), error=(0.1, 0.2), quantized=None, **others):
    exact = [0, 3, 5, 2]
    return {"spec": spec, "model": "/models/tiny", "data": "/data/captions.jsonl", "records": 6, "tokens": 912, "kl_mean": kl,
            "kl_std_error": kl / 4, "stored_bits": bits, "nominal_bits": bits * 0.8,
            "layers": [{"layer": i, "error": e, "visual_error": e / 2, "text_error": e / 3, "softmax_mse": e / 9, "slots": 100 * s, "share": s}
                       for i, (s, e) in enumerate(zip(share, error))],
            "visual_scores": {"low": -2, "width": 0.5, "exact": exact, "quantized": quantized or exact,
                              "calibrated": quantized or exact}, **others}


def results_of(count):
    """As many as there may be: some equal, some below the floor, some with other scores."""
    made = [result("f16", kl=0, bits=16, share=(1, 1, 1), error=(0, 0, 0))]
    for i in range(count - 1):
        share = (1, 1, 1) if i % 3 else (0.9, 0.5 - 0.004 * i, 0.2)
        made.append(result(f"policy{i},keep=0.{i} + quantizer,bits={i % 8},group=32,residual=128", kl=2 ** -(i % 23) * 1.3,
                           bits=1 + (i * 7 % 41) / 4, share=share, error=tuple(0.01 * (i + 1) * x for x in (1, 2, 1.5)),
                           quantized=None if i % 3 == 1 else [1, 2, 4, 3 + i]))
    return made


class Data(unittest.TestCase):
    def test_the_share_is_of_the_tokens(self):
        """Not of the largest layer: a rule that holds half is drawn at a half, alone too."""
        alone = result("prefixkv", share=(0.43, 0.59))
        self.assertEqual(plot_data.curve(alone, "share"), (0.43, 0.59))

    def test_what_is_below_the_floor_is_said(self):
        self.assertEqual(plot_data.floored(0), (1e-6, True))
        self.assertEqual(plot_data.floored(9.99e-7), (1e-6, True))
        self.assertEqual(plot_data.floored(1e-6), (1e-6, False))
        self.assertEqual(plot_data.floored(0.5), (0.5, False))

    def test_error_bars_stay_within_the_axis(self):
        self.assertEqual(plot_data.error_bar(result("a", kl=0)), (0, 0))
        down, up = plot_data.error_bar(result("a", kl=0.4))
        self.assertAlmostEqual(down, 0.196)
        self.assertAlmostEqual(up, 0.196)
        wide = {**result("a", kl=0.4), "kl_std_error": 1}
        self.assertEqual(plot_data.error_bar(wide), (0.4 - 1e-6, 1.96))

    def test_the_pareto_line(self):
        a, b, c, d, e = (result("a", 0.5, 1), result("b", 0.6, 2), result("c", 0.1, 3), result("d", 1e-9, 4),
                         result("e", 0, 5))
        self.assertEqual([r["spec"] for r in plot_data.pareto([e, c, b, d, a])], ["a", "c", "d"])
        tie = [result("dear", 0.5, 2), result("near", 0.4, 2)]
        self.assertEqual([r["spec"] for r in plot_data.pareto(tie)], ["near"])

    def test_labels_cover_nothing(self):
        points = [(20.0 + i % 3, 30.0 + i // 3) for i in range(24)]
        markers = [(x, y, 8.0, 8.0) for x, y in points]
        places = plot_data.label_places(points, [(8.0, 6.0)] * 24, (300.0, 200.0), markers)
        boxes = [*markers, *((x, y, 8.0, 6.0) for x, y in places)]
        for i, (x, y) in enumerate(places):
            self.assertTrue(4 <= x <= 296 and 3 <= y <= 197, (x, y))
            for j, (a, b, width, height) in enumerate(boxes):
                self.assertTrue(j == i + 24 or 2 * abs(x - a) >= 8 + width or 2 * abs(y - b) >= 6 + height, (i, j))
        self.assertLess(max(math.dist(a, b) for a, b in zip(places, points)), 100)
        self.assertEqual(plot_data.label_places([(5.0, 5.0)], [(90.0, 9.0)], (10.0, 10.0), []), [(5.0, 5.0)])  # no room at all

    def test_equal_curves_are_one_and_say_so(self):
        made = [result("a"), result("b", error=(0.3, 0.3)), result("c", error=(0.1, 0.20000001)), result("d", error=(0.1, 0.21))]
        groups = plot_data.equal_curves(made, "error", "visual_error")
        self.assertEqual([[r["spec"] for r in group] for group in groups], [["a", "c"], ["b"], ["d"]])
        self.assertEqual(plot_data.group_label(groups[0]), "a\n= c")
        self.assertEqual(plot_data.group_label([result(n) for n in "abcde"]), "a\n= b\n= c\nand 2 more")

    def test_panels_are_even(self):
        for count in range(1, 70):
            cut = plot_data.panels(list(range(count)), 8)
            self.assertEqual([i for panel in cut for i in panel], list(range(count)))
            self.assertLessEqual(max(map(len, cut)), 8)
            self.assertLessEqual(max(map(len, cut)) - min(map(len, cut)), 1)
            self.assertEqual(len(cut), math.ceil(count / 8))
        self.assertEqual(plot_data.panels([]), [])

    def test_end_bins_are_told_apart(self):
        histogram = {"low": -2, "width": 0.5, "exact": [10, 30, 50, 10]}
        scores, shares, beyond = plot_data.score_shares(histogram, "exact")
        self.assertEqual((scores, shares, beyond), ([-1.25, -0.75], [0.3, 0.5], 0.2))

    def test_every_picture_says_where_it_is_from(self):
        self.assertEqual(plot_data.origin([result("a"), result("b")]),
                         "model tiny, data captions.jsonl: 6 records, 912 teacher-forced tokens a spec")
        mixed = [result("a"), {**result("b"), "records": 3, "tokens": 400}]
        self.assertIn("6 to 3 records, 912 to 400 teacher-forced tokens", plot_data.origin(mixed))

    def test_files_that_are_none(self):
        with tempfile.TemporaryDirectory(prefix="kvlm-plot-") as folder:
            path = Path(folder, "x.jsonl")
            for text, words in (("", "no results"), ("{}\n", "line 1"), ("\nnot json\n", "line 2"), ("[1]\n", "line 1")):
                path.write_text(text)
                with self.assertRaisesRegex(SystemExit, words):
                    plot_data.read_results(path)
            path.write_text("".join(json.dumps(result("a", kl=kl)) + "\n" for kl in (1, 2)))
            self.assertEqual([r["kl_mean"] for r in plot_data.read_results(path)], [2])


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
        self.assertIn("matplotlib is not installed; apt install python3-matplotlib", missing.stderr)
        self.assertIn(f"python3 {SCRIPT} FIGURES.jsonl plots", missing.stderr)

    def test_usage(self):
        self.assertEqual(self.run_script("x").returncode, 2)

    def test_the_suffix_chooses_the_format(self):
        if not self.installed():
            self.skipTest("matplotlib is not installed")
        figures = self.folder / "3.jsonl"
        figures.write_text("".join(json.dumps(made) + "\n" for made in results_of(3)))
        for suffix, start, options in ((".pdf", b"%PDF", ["--style", "paper"]), (".svg", b"<?xml", []), (".PNG", b"\x89PNG", [])):
            drawn = self.run_script(figures, self.folder / f"out/fig{suffix}", *options)
            self.assertEqual(drawn.returncode, 0, drawn.stderr)
            self.assertNotIn("Warning", drawn.stderr)
            made = [path for path in (self.folder / "out").iterdir() if path.suffix == suffix.lower()]
            self.assertLessEqual({"fig-bits", "fig-layer_error", "fig-retained"}, {path.stem for path in made})
            for path in made:
                self.assertTrue(path.read_bytes().startswith(start), path)
        page = (self.folder / "out/fig-bits.pdf").read_bytes()
        self.assertIn(b"/MediaBox [ 0 0 241.2 ", page)  # a column of 3.35 inches
        self.assertEqual(sorted({path.suffix for path in (self.folder / "out").iterdir()}), [".pdf", ".png", ".svg"])

    @staticmethod
    def installed():
        return importlib.util.find_spec("matplotlib") is not None

    def test_files_of_any_size_are_drawn(self):
        if not self.installed():
            self.skipTest("matplotlib is not installed")
        self.assertEqual(self.run_script("--check", self.folder).returncode, 0)
        for count, pages in ((1, {"layer_error": 1, "scores": 0}), (3, {"layer_error": 1, "scores": 1}),
                             (40, {"layer_error": 2, "scores": 3})):
            with self.subTest(count=count):
                figures = self.folder / f"{count}.jsonl"
                figures.write_text("".join(json.dumps(made) + "\n" for made in results_of(count)))
                out = self.folder / str(count)
                drawn = self.run_script(figures, out)
                self.assertEqual(drawn.returncode, 0, drawn.stderr)
                self.assertNotIn("Warning", drawn.stderr)
                names = {path.stem for path in out.glob("*.png")}
                self.assertEqual(names, {path.stem for path in out.glob("*.svg")})
                self.assertLessEqual({"layer_error", "softmax_error", "retained", "bits"}, names)
                for name, expected in pages.items():
                    self.assertEqual(sum(stem == name or stem.startswith(name + "-") for stem in names), expected, name)
                for picture in out.glob("*.png"):
                    width, height = struct.unpack(">II", picture.read_bytes()[16:24])
                    self.assertLess(max(width, height), 2400, picture.name)
                for picture in out.glob("*.svg"):
                    self.assertIn("captions.jsonl", picture.read_text(encoding="utf-8"), picture.name)


if __name__ == "__main__":
    unittest.main()
