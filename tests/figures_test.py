#!/usr/bin/env python3
"""Every figure of the pages is one of docs/data, and the results page is what its command makes of them.

A figure is a number with a unit of tools/results/data.py (2.7 ms, 38,270 tokens/s, 1.11x, 2.62 bits) or a count (599 of 600)
in prose or a table. It must equal a value, min or max of a row whose metric has that unit, rounded as the page rounds it.
Runs as a test; `tests/figures_test.py FILE...` lists the figures of these pages that no data file has. Standard library only.
"""

import re
import sys
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools/results"))
import claims  # noqa: E402
import data  # noqa: E402
import page  # noqa: E402

# Pages whose figures are ours. docs/results.md is compared as a whole; the papers' own figures, with source, are in docs/papers.
PAGES = ("README.md", "docs/engineering-notes.md", "docs/choosing-a-policy.md", "docs/guide.md",
         "docs/faq.md", "docs/install.md", "docs/models.md", "docs/weights.md", "docs/gpu-decode.md", "docs/architecture.md", "docs/limits.md")
WRITTEN = {"µs": "_us", "minutes": "_min", "minute": "_min"} | {unit: end for end, unit in data.UNITS.items()}
NUMBER = r"(?<![\w.,/=-])(\d{1,3}(?:,\d{3})+|\d+)(\.\d+)?"
WITH_UNIT = re.compile(NUMBER + r" ?(" + "|".join(sorted(map(re.escape, WRITTEN), key=len, reverse=True)) + r")(?![\w/])")
COUNT = re.compile(NUMBER + r" of (?:its |the )?(\d{1,3}(?:,\d{3})+|\d+)(?![\w.])")


def spoken(text):
    """The text without code, comments and the targets of links; lines stay."""
    def empty(match):
        return re.sub(r"[^\n]", " ", match[0])
    text = re.sub(r"<!--.*?-->", empty, text, flags=re.DOTALL)
    text = re.sub(r"^```.*?^```", empty, text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"^    .*$", empty, text, flags=re.MULTILINE)
    text = re.sub(r"`[^`]*`", empty, text)
    return re.sub(r"\]\([^)]*\)", "]", text)


class Known:
    """The numbers of the data files by the end of their metric."""

    def __init__(self, figures):
        self.of = {}
        for figure in figures:
            count = re.search(r"_of_\d+$", figure.metric)
            ends = [count[0]] if count else [end for end in data.UNITS if figure.metric.endswith(end)]
            for end in ends:
                self.of.setdefault(end, set()).update(float(x) for x in (figure.value, figure.min, figure.max) if x)

    def has(self, whole, digits, end):
        said = float(whole.replace(",", "") + digits)
        step = 10.0 ** -max(len(digits) - 1, 0)
        return any(abs(value - said) <= step / 2 * (1 + 1e-9) for value in self.of.get(end, ()))


def unknown(text, known):
    """(line, figure) of each figure that no data file has."""
    said = spoken(text)
    for match in WITH_UNIT.finditer(said):
        unit, digits = match[3], match[2] or ""
        if unit in ("bits", "GB", "MB", "s", "minutes", "minute") and not digits and unit != "s":
            continue  # a setting (2 bits, a budget of 30 GB) or a round word
        if not known.has(match[1], digits, WRITTEN[unit]):
            yield said.count("\n", 0, match.start()) + 1, match[0]
    for match in COUNT.finditer(said):
        if not known.has(match[1], "", f"_of_{match[3].replace(',', '')}"):
            yield said.count("\n", 0, match.start()) + 1, match[0]


class ThisTree(unittest.TestCase):
    maxDiff = None

    def test_every_figure_is_in_a_data_file(self):
        known = Known(data.load() + data.derived(data.load()))
        missing = [f"{name}:{line}: {figure}" for name in PAGES if (ROOT / name).is_file()
                   for line, figure in unknown((ROOT / name).read_text("utf-8"), known)]
        self.assertEqual([], missing, "give each a row in docs/data, or leave it out")

    def test_the_results_page_is_made_of_the_data(self):
        self.assertEqual((ROOT / "docs/results.md").read_text("utf-8"), page.results(data.load()),
                         "run: tools/results/page.py")

    def test_the_page_of_claims_is_made_of_the_data(self):
        self.assertEqual(claims.PAGE.read_text("utf-8"), claims.made_of_data(), "run: tools/results/claims.py")

    def test_tables_of_other_pages_are_made_of_the_data(self):
        for name in {name for name, _ in page.BLOCKS}:
            text = (ROOT / name).read_text("utf-8")
            self.assertEqual(text, page.with_blocks(name, text, data.load()), "run: tools/results/page.py")

    def test_plots_are_made_of_the_data(self):
        for name in page.PLOTS:
            svg = (ROOT / "docs/images" / name).read_text("utf-8")
            self.assertIn(page.stamp(name, data.load()), svg, f"{name} is of other data; run: tools/results/page.py")

    def test_a_run_is_of_one_build_and_device(self):
        for name in ("speed", "captions_speed", "answers", "gates"):
            figures = data.read(ROOT / f"docs/data/{name}.csv")
            self.assertEqual(len({(figure.commit, figure.device) for figure in figures}), 1, f"{name}.csv mixes builds or devices")

    def test_rows_are_whole(self):
        for figure in data.load():
            with self.subTest(figure=figure):
                if figure.model.startswith("synthetic:") or figure.model.startswith("pocket"):
                    self.assertEqual(figure.weights, "random" if figure.model.startswith("synthetic:") else "real")
                self.assertRegex(figure.date, r"^\d{4}-\d\d-\d\d$")
                self.assertTrue(figure.commit and figure.metric and figure.command and figure.device)
                ends = any(figure.metric.endswith(end) for end in data.UNITS)
                self.assertTrue(ends or re.search(r"_of_\d+$|^sequences_|_(?:facts|anls|accuracy|count)$", figure.metric), figure.metric)


class Checker(unittest.TestCase):
    def figure(self, metric, value):
        return data.Figure("2026-11-27", "7e56d1c", "gpu", "m", "real", "f16", "", "", metric, value, "", "", "c")

    def found(self, text):
        known = Known([self.figure("step_ms", "5.523"), self.figure("speed_x", "1.114"), self.figure("right_of_600", "599"),
                       self.figure("decode_tokens_s", "38270.4"), self.figure("stored_bits", "2.617")])
        return [figure for _, figure in unknown(text, known)]

    def test_figures_rounded_as_they_are_are_legal(self):
        self.assertEqual(self.found("5.52 ms, 5.5 ms, 1.11x, 38,270 tokens/s, 599 of 600, 2.62 bits, 2 bits, 30 GB.\n"
                                    "`7.7 ms`, GPUs of 2 kinds, [9 ms](a.md)\n\n    vlm-run 8.1 ms\n"), ["9 ms"])

    def test_other_figures_are_found(self):
        self.assertEqual(self.found("| 5.53 ms | 1.2x | 598 of 600 |\n38,271 tokens/s 2.63 bits"),
                         ["5.53 ms", "1.2x", "38,271 tokens/s", "2.63 bits", "598 of 600"])

    def test_a_unit_is_part_of_a_figure(self):
        self.assertEqual(self.found("5.52x and 1.11 ms"), ["5.52x", "1.11 ms"])

    def test_a_line_of_the_data_that_is_no_figure_is_found(self):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "a.csv")
            data.write(path, [self.figure("step_ms", "5.5"), self.figure("step_ms", "fast")])
            with self.assertRaisesRegex(ValueError, "a.csv:3: value 'fast' is no number"):
                data.read(path)


if __name__ == "__main__":
    if sys.argv[1:]:
        known = Known(data.load() + data.derived(data.load()))
        found = [f"{name}:{line}: {figure}" for name in sys.argv[1:]
                 for line, figure in unknown(Path(name).read_text("utf-8"), known)]
        print("\n".join(found) or "nothing found")
        sys.exit(bool(found))
    unittest.main()
