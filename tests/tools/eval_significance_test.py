"""Worked numbers for tools/eval/significance.py."""

import importlib.util
import math
import random
import subprocess
import sys
import unittest
from pathlib import Path

EVAL = Path(__file__).resolve().parents[2] / "tools" / "eval"
sys.path.insert(0, str(EVAL))
import significance  # noqa: E402
from significance import Bootstrap, Interval, McNemar  # noqa: E402

HAS_NUMPY = importlib.util.find_spec("numpy") is not None


class ExactTest(unittest.TestCase):
    def test_worked_by_hand(self):
        # 5 discordant records, all for A: 2 * (1/2)^5.
        self.assertEqual(McNemar(5, 0).p, 0.0625)
        self.assertEqual(McNemar(0, 5).p, 0.0625)
        # 1 against 7: 2 * (C(8,0) + C(8,1)) / 2^8 = 18 / 256.
        self.assertEqual(McNemar(1, 7).p, 18 / 256)
        # 3 against 9: 2 * (1 + 12 + 66 + 220) / 2^12 = 598 / 4096.
        self.assertEqual(McNemar(9, 3).p, 598 / 4096)
        # Evenly split: more than certain, cut at 1.
        self.assertEqual(McNemar(3, 3).p, 1.0)
        self.assertEqual(McNemar(0, 0).p, 1.0)

    def test_thousands_of_records(self):
        # Past the range of a double on the way; 1/2^4999 is below it at the end.
        self.assertEqual(McNemar(5000, 0).p, 0.0)
        # Normal approximation with continuity: z = (100 - 1) / sqrt(10000).
        z = 99 / 100
        self.assertAlmostEqual(McNemar(5050, 4950).p, math.erfc(z / math.sqrt(2)), delta=1e-3)


class Sides(unittest.TestCase):
    def test_an_end_at_0_is_not_beyond_it(self):
        self.assertEqual(
            [Interval(*ends).side for ends in ((0.1, 0.2), (0.0, 0.2), (-0.1, 0.2), (-0.1, 0.0), (-0.2, -0.1), (0, 0))],
            [1, 0, 0, 0, -1, 0],
        )


@unittest.skipUnless(HAS_NUMPY, "numpy is not installed (tools/setup.sh --test)")
class Percentiles(unittest.TestCase):
    def quotient(self, pairs, resamples=2000, seed=3):
        sums = Bootstrap([str(i) for i in range(len(pairs))], resamples, seed).sums(pairs)
        return significance.interval(sums[:, 0] / sums[:, 1])

    def difference(self, a, b, resamples, seed):
        """Of two quotients, the same records drawn for both."""
        sums = Bootstrap([str(i) for i in range(len(a))], resamples, seed).sums([(*x, *y) for x, y in zip(a, b)])
        return significance.interval(sums[:, 0] / sums[:, 1] - sums[:, 2] / sums[:, 3])

    def test_a_constant_has_no_width(self):
        self.assertEqual(self.quotient([(0.1, 1.0)] * 30), self.quotient([(0.1, 1.0)] * 30, seed=9))
        found = self.quotient([(0.1, 1.0)] * 30)
        self.assertAlmostEqual(found.low, 0.1, delta=1e-15)
        self.assertAlmostEqual(found.high, 0.1, delta=1e-15)

    def test_equal_answers_differ_by_nothing(self):
        rows = [(i % 3 / 7, 3.0) for i in range(50)]
        self.assertEqual(self.difference(rows, rows, 200, 1), Interval(0.0, 0.0))

    def test_a_constant_difference_has_no_width(self):
        found = self.difference([(2.0, 4.0)] * 30, [(1.0, 4.0)] * 30, 200, 1)
        self.assertEqual(found, Interval(0.25, 0.25))

    def test_pairing_takes_out_what_records_share(self):
        # Records differ wildly, A is always one better: paired, the interval is a point above 0.
        b = [(float(i), 100.0) for i in range(0, 100, 5)]
        found = self.difference([(part + 1, whole) for part, whole in b], b, 500, 2)
        self.assertAlmostEqual(found.low, 0.01)
        self.assertAlmostEqual(found.high, 0.01)
        alone = self.quotient(b)
        self.assertGreater(alone.high - alone.low, 0.1)

    def test_about_the_normal_interval(self):
        # 400 records, 120 right: 0.3 +- 1.96 * sqrt(0.21 / 400) = 0.3 +- 0.0449.
        found = self.quotient([(float(i < 120), 1.0) for i in range(400)], 10_000)
        self.assertAlmostEqual(found.low, 0.2551, delta=0.004)
        self.assertAlmostEqual(found.high, 0.3449, delta=0.004)

    def test_the_draws_are_the_seed_s(self):
        rows = [(float(i % 7), 1.0) for i in range(60)]
        self.assertEqual(self.quotient(rows), self.quotient(rows))
        self.assertNotEqual(self.quotient(rows), self.quotient(rows, seed=4))

    def test_cutting_the_draws_into_chunks_changes_nothing(self):
        rows = [[float(i % 7), 1.0] for i in range(60)]
        whole = Bootstrap([str(i) for i in range(60)], 500, 1).sums(rows)
        before, significance.CHUNK = significance.CHUNK, 61
        try:
            cut = Bootstrap([str(i) for i in range(60)], 500, 1).sums(rows)
        finally:
            significance.CHUNK = before
        self.assertTrue((whole == cut).all())

    def test_clusters_widen_the_interval(self):
        # Ten questions on each of 20 videos, all ten right or all wrong: 20 things are known, not 200.
        source = random.Random(5)
        right = [float(source.random() < 0.5) for _ in range(20) for _ in range(1)]
        rows = [[right[i // 10], 1.0] for i in range(200)]

        def width(units):
            sums = Bootstrap(units, 4000, 1).sums(rows)
            found = significance.interval(sums[:, 0] / sums[:, 1])
            return found.high - found.low

        alone, together = width([str(i) for i in range(200)]), width([f"video {i // 10}" for i in range(200)])
        self.assertAlmostEqual(together / alone, math.sqrt(10), delta=0.35)

    def test_unequal_clusters_are_drawn_whole(self):
        # Two clusters of 1 and 3 records: sums are those of {1, 1}, {1, 3} or {3, 3}.
        sums = Bootstrap(["a", "b", "b", "b"], 200, 1).sums([[1.0]] * 4)
        self.assertEqual(set(sums[:, 0]), {2.0, 4.0, 6.0})

    def test_the_ends_are_values_that_occurred(self):
        # 101 values 0..100: the 2.5th lies between 2 and 3 and is taken outwards.
        self.assertEqual(significance.interval(list(range(101))), Interval(2.0, 98.0))
        self.assertEqual(significance.interval([1e-17, 2e-17]), Interval(0.0, 0.0))

    def test_what_cannot_be_drawn_is_refused(self):
        with self.assertRaisesRegex(ValueError, "over no records"):
            Bootstrap([])
        with self.assertRaisesRegex(ValueError, "0 resamples"):
            Bootstrap(["a"], 0)
        with self.assertRaisesRegex(ValueError, r"shape \(1, 1\) for 2 records"):
            Bootstrap(["a", "b"], 5).sums([[1.0]])


class WithoutNumpy(unittest.TestCase):
    def test_it_is_said_with_its_cure(self):
        code = (
            "import sys; sys.modules['numpy'] = None; sys.path.insert(0, sys.argv[1])\n"
            "import significance\n"
            "print(significance.McNemar(5, 0).p)\n"
            "try: significance.import_numpy()\n"
            "except significance.EvaluationError as error: print(error)\n"
        )
        done = subprocess.run([sys.executable, "-c", code, EVAL], capture_output=True, text=True)
        self.assertIn("0.0625", done.stdout, done.stderr)
        self.assertIn("this Python has no numpy; run tools/eval/setup.sh", done.stdout)


if __name__ == "__main__":
    unittest.main()
