#!/usr/bin/env python3
"""The list of mutants fits the sources: every line that it changes stands there once, in a file that is
there, and the tests that it names are built. (run.py builds and runs them; that takes long.)"""

import csv
import sys
import tempfile
import unittest
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent))
import run  # noqa: E402


class List(unittest.TestCase):
    def test_every_mutant_can_be_applied(self):
        mutants = run.mutants()
        self.assertGreater(len(mutants), 20)
        self.assertEqual(len({m["name"] for m in mutants}), len(mutants))
        for mutant in mutants:
            with self.subTest(mutant["name"]):
                self.assertEqual(set(mutant), {"name", "file", "old", "new", "tests"})
                _, before, after = run.mutated(mutant)
                self.assertNotEqual(before, after)
                for test in mutant["tests"]:
                    program, _ = run.program_and_filter(test)
                    self.assertIn(program, ("kernels_tests", "kvcache_tests", "llm_tests", "runtime_tests"))

    def test_the_page_of_data_has_every_mutant(self):
        with (run.ROOT / "docs/data/mutants.csv").open(encoding="utf-8", newline="") as file:
            head, *rows = csv.reader(file)
        self.assertEqual(head, run.COLUMNS)
        self.assertEqual([row[:2] for row in rows], [[m["name"], m["file"]] for m in run.mutants()])
        self.assertEqual([], [row[0] for row in rows if not row[2]])

    def test_a_mutant_is_taken_back(self):
        mutant = {**run.mutants()[0], "file": "source.cpp"}
        before = f'{{ {mutant["old"]} }}\n'
        with tempfile.TemporaryDirectory() as folder, mock.patch.object(run, "ROOT", Path(folder)):
            path = Path(folder) / "source.cpp"
            path.write_text(before, encoding="utf-8")
            with self.assertRaises(KeyboardInterrupt), run.applied(mutant):
                self.assertEqual(path.read_text(encoding="utf-8"), f'{{ {mutant["new"]} }}\n')
                raise KeyboardInterrupt
            self.assertEqual(path.read_text(encoding="utf-8"), before)

    def test_a_line_that_is_gone_is_named(self):
        with self.assertRaisesRegex(ValueError, "0 times 'nowhere at all', expected once"):
            run.mutated({**run.mutants()[0], "old": "nowhere at all"})


if __name__ == "__main__":
    unittest.main()
