#!/usr/bin/env python3
"""What retention rules make of the bundled model's captions, beside a rule that keeps rows by chance at the same bits.

KVLM_BUILD is the build folder. One factor differs: `random,head_shared=on` keeps one set of rows a layer as the rules
do, as many, with both ends of the prompt safe, and evicts by its own scores.
"""

import os
import statistics
import sys
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BUILD = Path(os.environ.get("KVLM_BUILD", ROOT / "build/release"))
sys.path.insert(0, str(ROOT / "tools/eval"))
import policies  # noqa: E402

IMAGES = 20


def setUpModule():
    if not (BUILD / "tools/vlm-run").is_file():
        raise unittest.SkipTest(f"{BUILD}/tools/vlm-run is not built")


class Floor(unittest.TestCase):
    def measure(self, spec):
        """Share of caption slots that are right, and stored bits."""
        with tempfile.TemporaryDirectory(prefix="kvlm-floor-") as folder:
            work = policies.Evaluation(Path(folder), IMAGES, 0, BUILD)
            work.answer(spec, "captions")
            told = policies.caption_scores(work.texts(spec, "captions")).values()
            bits = statistics.mean(work.answer_bits(spec, "captions"))
        return sum(right for _, right, _ in told) / sum(total for _, _, total in told), bits

    def test_nine_tenths_of_the_rows_suffice(self):
        self.assertGreater(self.measure("prefixkv,keep=0.9")[0], 0.95)

    def test_rules_beat_chance_at_equal_bits(self):
        # Not with half of the rows, nor nine tenths: every layer scores the same rows low, chance spreads its losses.
        for options in ("keep=0.2", "keep=0.2,evict=none"):
            chance, bits = self.measure(f"random,head_shared=on,{options}")
            for rule in ("prefixkv", "uniform"):
                with self.subTest(rule=rule, options=options):
                    slots, stored = self.measure(f"{rule},{options}")
                    self.assertGreater(slots, chance)
                    # An answer that ends earlier or later holds other rows: nothing else may differ.
                    self.assertAlmostEqual(stored, bits, delta=0.15)


if __name__ == "__main__":
    unittest.main()
