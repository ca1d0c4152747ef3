#!/usr/bin/env python3
"""tools/pocket/draw_scene.py: words to a scene, and pixels that equal those of the held-out set, where Pillow and numpy are
installed."""

import importlib.util
import random
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tools/pocket/draw_scene.py"
sys.path.insert(0, str(SCRIPT.parent))

import draw_scene  # noqa: E402
import scenes  # noqa: E402

HAVE_PILLOW = all(importlib.util.find_spec(name) for name in ("PIL", "numpy"))


class Words(unittest.TestCase):
    def test_a_scene_is_read_as_it_is_captioned(self):
        for seed in range(20):
            scene = scenes.make_scene(random.Random(seed))
            texts = [f"{thing.noun} marked {thing.mark}, {thing.place}" for thing in scene]
            self.assertEqual(draw_scene.read_scene(texts), scene)
            self.assertEqual(draw_scene.read_scene(["; ".join(f"a {text}" for text in texts)]), scene)

    def test_what_is_left_out_is_free(self):
        scene = draw_scene.read_scene(["a red circle marked b", "white cross; small blue ring, row 1 column 1"])
        self.assertEqual([(thing.mark, thing.place) for thing in scene],
                         [("C", "row 1, column 1"), ("B", "row 1, column 2"), ("A", "row 1, column 3")])

    def test_what_is_wrong_is_one_sentence(self):
        for texts, words in ((["large redd circle"], "did you mean red?"), (["circle"], "no colour"), (["red"], "no shape"),
                             (["red circle row 5"], "row 5"), (["red blue circle"], "two of colour"),
                             (["red circle marked O"], "mark 'O'"), (["red circle marked A; red square marked A"], "mark A"),
                             (["red circle row 1 column 1; blue ring row 1 column 1"], "place"), ([";"], "0 objects"),
                             (["red ring"] * 9, "9 objects"), (["red \x1b[2Jring"], "x1b[2J")):
            with self.subTest(texts), self.assertRaises(SystemExit) as refusal:
                draw_scene.read_scene(texts)
            self.assertIn(words, str(refusal.exception))
            self.assertNotIn("\x1b", str(refusal.exception))


@unittest.skipUnless(HAVE_PILLOW, "Pillow or numpy is not installed")
class Pixels(unittest.TestCase):
    def test_they_equal_the_held_out_set(self):
        import draw
        import numpy as np
        from PIL import Image

        for number in (0, 1, 2, 42, 199):  # heldout.py's seeds
            rng = random.Random(1000 + number)
            page = draw.layout_scene(scenes.make_scene(rng), rng)
            with Image.open(ROOT / f"tools/pocket/heldout/scenes/scene_{number:03d}.png") as expected:
                self.assertTrue(np.array_equal(draw_scene.paint(page), np.array(expected.convert("RGB"))), number)

    def test_a_file_is_written(self):
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder, "mine.png")
            made = subprocess.run([sys.executable, SCRIPT, "--out", out, "large red circle marked A, row 2 column 3"],
                                  capture_output=True, text=True, check=True)
            self.assertEqual(made.stdout, "There is one object: a large red circle marked A in row 2, column 3.\n")
            self.assertEqual(out.read_bytes()[:4], b"\x89PNG")
            made = subprocess.run([sys.executable, SCRIPT, "--out", Path(folder, "no/mine.png"), "red ring"], capture_output=True,
                                  text=True)
            self.assertEqual((made.returncode, made.stderr.count("\n")), (1, 1))
            self.assertIn("cannot be written", made.stderr)


if __name__ == "__main__":
    unittest.main()
