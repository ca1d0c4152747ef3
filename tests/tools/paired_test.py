"""Worked numbers for tools/eval/paired.py."""

import sys
import unittest
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools" / "eval"))
import paired  # noqa: E402


class McNemar(unittest.TestCase):
    def test_worked_by_hand(self):
        # 5 discordant images, all for A: 2 * (1/2)^5.
        self.assertAlmostEqual(paired.mcnemar(5, 0), 0.0625)
        self.assertAlmostEqual(paired.mcnemar(0, 5), 0.0625)
        # 1 against 7: 2 * (C(8,0) + C(8,1)) / 2^8 = 18 / 256.
        self.assertAlmostEqual(paired.mcnemar(1, 7), 18 / 256)
        # Evenly split: more than certain, cut at 1.
        self.assertEqual(paired.mcnemar(3, 3), 1.0)
        self.assertEqual(paired.mcnemar(0, 0), 1.0)


class Bootstrap(unittest.TestCase):
    def test_equal_answers_differ_by_nothing(self):
        rows = [(float(i % 3), 3.0) for i in range(50)]
        self.assertEqual(paired.bootstrap_difference(rows, rows, 200, seed=1), (0.0, 0.0))

    def test_a_constant_difference_has_no_width(self):
        a = [(2.0, 4.0)] * 30
        b = [(1.0, 4.0)] * 30
        self.assertEqual(paired.bootstrap_difference(a, b, 200, seed=1), (0.25, 0.25))

    def test_pairing_takes_out_what_images_share(self):
        # Images differ wildly, A is always one slot better: paired, the interval is a point above 0.
        b = [(float(i), 100.0) for i in range(0, 100, 5)]
        a = [(part + 1, whole) for part, whole in b]
        low, high = paired.bootstrap_difference(a, b, 500, seed=2)
        self.assertAlmostEqual(low, 0.01)
        self.assertAlmostEqual(high, 0.01)
        alone = paired.bootstrap_ratio(b, 500, seed=2)
        self.assertGreater(alone[1] - alone[0], 0.1)

    def test_about_the_normal_interval(self):
        # 200 images, half of them right: 0.5 +- 1.96 * sqrt(0.25 / 200) = 0.5 +- 0.0693.
        rows = [(float(i % 2), 1.0) for i in range(200)]
        low, high = paired.bootstrap_ratio(rows, 4000, seed=3)
        self.assertAlmostEqual(low, 0.4307, delta=0.012)
        self.assertAlmostEqual(high, 0.5693, delta=0.012)

    def test_images_of_one_only_are_refused(self):
        with self.assertRaises(ValueError):
            paired.bootstrap_difference([(1, 1)], [(1, 1), (0, 1)], 10, seed=0)


if __name__ == "__main__":
    unittest.main()
