#!/usr/bin/env python3
"""What retention rules make of the bundled model's captions, beside a rule that keeps rows by chance at the same bytes.

KVLM_BUILD is the build folder. One factor differs: `random,head_shared=on` keeps one set of rows a layer as the rules
do, as many, with both ends of the prompt safe, and evicts by its own scores.
"""

import unittest

from eval_case import WithModel, results_of

IMAGES = 20


class Floor(WithModel):
    def measure(self, *specs):
        """By spec: the share of caption slots that are right, and the bits stored after the same forced text."""
        asked = [word for spec in specs for word in ("--kv", spec)]
        self.run_well("coco.py", "--out", "out", "--limit", IMAGES, "--fidelity", 2, "--batch-size", IMAGES, "--skip", "pycocoevalcap",
                      "--device", "cpu", *asked)  # fmt: skip
        return {row["spec"]: (row["scores"]["slots"], row["stored_bits"]) for row in results_of(self.folder / "out/results.json")}

    def test_nine_tenths_of_the_rows_suffice(self):
        self.assertGreater(self.measure("prefixkv,keep=0.9")["prefixkv,keep=0.9"][0], 0.95)

    def test_rules_beat_chance_at_equal_bytes(self):
        # Not with half of the rows, nor nine tenths: every layer scores the same rows low, chance spreads its losses.
        rules = ("prefixkv", "uniform")
        for options in ("keep=0.2", "evict=none,keep=0.2"):
            shared = "evict=none,head_shared=on,keep=0.2" if "evict" in options else "head_shared=on,keep=0.2"
            found = self.measure(f"random,{shared}", *(f"{rule},{options}" for rule in rules))
            chance, bits = found[f"random,{shared}"]
            for rule in rules:
                with self.subTest(rule=rule, options=options):
                    slots, stored = found[f"{rule},{options}"]
                    self.assertGreater(slots, chance)
                    self.assertAlmostEqual(stored, bits, delta=0.02 * bits)


if __name__ == "__main__":
    unittest.main()
