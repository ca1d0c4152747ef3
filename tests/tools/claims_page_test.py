#!/usr/bin/env python3
"""tools/results/claims.py: what becomes of a verdict on real weights, and rows of a report."""

import csv
import sys
import tempfile
import unittest
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools/results"))
import claims  # noqa: E402


def bundled(*verdicts, claim="a beats b", at=""):
    """A row of claims.csv, with verdicts on captions."""
    columns = (f"{model}_captions" for model in ("internvl", "llava", "qwen"))
    return {"claim": claim, "at": at, "source": "a paper"} | dict(zip(columns, verdicts))


def real(verdict, claim="a beats b", at="", task="captions"):
    return {"claim": claim, "at": at, "source": "a paper", "task": task, "n": "200", "spec": "a", "compared_with": "b",
            "difference_value": "-0.25", "difference_low": "-0.3", "difference_high": "-0.2", "verdict": verdict}  # fmt: skip


class Claims(unittest.TestCase):
    def ways(self, there, here):
        rows = claims.joined([bundled(*there)], [real(here)])
        return [way for way, found in claims.compared(rows).items() if found]

    def test_what_becomes_of_a_verdict(self):
        yes, no, open_ = "confirmed", "contradicted", "inconclusive"
        for there, here, way in (
            ((yes, yes, yes), yes, "holds"), ((yes, open_, open_), yes, "decides"), ((yes, yes, no), no, "turns"),
            ((no, open_, no), yes, "turns"), ((yes, no, open_), yes, "decides"), ((open_,) * 3, no, "decides"),
            ((no, no, no), open_, "opens"), ((open_,) * 3, open_, "neither"), ((yes, no, open_), open_, "neither"),
        ):  # fmt: skip
            self.assertEqual(self.ways(there, here), [way], (there, here))

    def test_what_was_not_asked_is_not_compared(self):
        self.assertEqual(self.ways(("", "", ""), "confirmed"), [])
        rows = claims.joined([bundled("confirmed")], [real("confirmed", task="documents")])
        self.assertFalse(any(claims.compared(rows).values()))

    def test_the_page(self):
        page = claims.page([bundled("confirmed", "inconclusive", "confirmed", at="1 bit"), bundled("inconclusive", at="2 bits")],
                           [real("contradicted", at="1 bit"), real("confirmed", claim="c beats d")])  # fmt: skip
        self.assertIn("| a beats b (a paper): 1 bit; 2 bits | ✓○ |  | ○- |  | ✓- |  |  | ✗- |  |", page)
        self.assertIn("| c beats d (a paper) |  |  |  |  |  |  |  | ✓ |  |", page)
        self.assertIn("0 are the same, 1 are reversed.", page)
        self.assertIn("| a beats b: 1 bit | captions | `a` | `b` | -0.250 | -0.300 to -0.200 | ✓○✓ | ✗ |", page)

    def test_scores_of_tasks_over_f16s(self):
        rows = [{"model": model, "spec": spec, "metric": metric, "value": value} for model, spec, metric, value in (
            *((model, "f16", metric, "0.8") for model in "mn" for metric in claims.SHOWN_TASKS),
            *(("m", "h2o,keep=0.05", metric, value) for metric, value in zip(claims.SHOWN_TASKS, ("0.4", "0.2", "0.8"))),
            *(("n", "h2o,keep=0.2", metric, "0.2") for metric in claims.SHOWN_TASKS), ("m", "tgv,keep=0.2", claims.SHOWN_TASKS[0], "0.8"))]  # fmt: skip
        lines = claims.tasks(rows)
        self.assertEqual(lines[-5:], ["| kept | rule | m | n |", "|---|---|---|---|", "| 20 % | `h2o` |  | 25.0 / 25.0 / 25.0 |",
                                      "| 20 % | `tgv` | 100.0 / 0.0 / 0.0 |  |", "| 5 % | `h2o` | 50.0 / 25.0 / 100.0 |  |"])  # fmt: skip

    def test_policies_on_plain_english(self):
        rows = [{"spec": spec, "metric": f"text_{metric}", "value": value, "min": "0.01", "max": "1"} for spec, metric, value in (
            ("int4", "stored_bits", "4.5"), ("int4", "kl_nats", "0.1"), ("int4", "top1_percent", "90"),
            ("int8", "stored_bits", "8.5"), ("int8", "kl_nats", "0.02"), ("int8", "top1_percent", "99"))]  # fmt: skip
        self.assertEqual(claims.plain_english(rows)[-2:], ["| `int8` | 8.50 | 0.0200 | 0.0100 to 1.0000 | 99.0 % |",
                                                           "| `int4` | 4.50 | 0.1000 | 0.0100 to 1.0000 | 90.0 % |"])  # fmt: skip
        self.assertEqual(claims.plain_english([]), [])

    def test_a_report_replaces_the_rows_and_the_page(self):
        row = dict.fromkeys(claims.KEPT, "1") | {"model": "build/real/smol-internvl", "task": "captions", "verdict": "confirmed", "protocol": "native"}
        with tempfile.TemporaryDirectory() as folder:
            report, rows, page = (Path(folder) / name for name in ("report.csv", "rows.csv", "page.md"))
            lines = [",".join((row | {"task": task}).values()) for task in claims.SETS]
            report.write_text("\n".join([",".join(row), *lines]) + "\n")
            argv = ["claims.py", "--report", str(report), "--device", "a card"]
            with mock.patch.object(claims, "REAL", rows), mock.patch.object(claims, "PAGE", page), mock.patch("sys.argv", argv):
                self.assertEqual(claims.main(), 0)
                made = rows.read_text(), page.read_text()
                self.assertEqual(claims.main(), 0)
                self.assertEqual(made, (rows.read_text(), page.read_text()))
                for less in ("\n".join([",".join(row), *(line.replace(",1,", ",0,", 1) for line in lines)]), report.read_text().replace("1,1", "1,2")):
                    report.write_text(less + "\n")
                    with mock.patch("sys.stderr"):
                        self.assertEqual(claims.main(), 1)
            self.assertEqual(made, (rows.read_text(), page.read_text()))
            self.assertEqual([(x["device"], x["claim"]) for x in claims.read(rows)], [("a card", "1")] * 2)
            self.assertIn("| 1 (1): 1 |", page.read_text())

    def test_rows_of_a_report(self):
        row = dict.fromkeys(claims.KEPT, "1") | {"model": "build/real/smol-internvl", "verdict": "confirmed", "protocol": "native"}
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "claims.csv"
            with path.open("w", newline="") as file:
                writer = csv.DictWriter(file, list(row))
                writer.writeheader()
                writer.writerows([row | {"task": "captions"}, row | {"task": "documents"}, row | {"model": "pocket-llava", "task": "captions"},
                                  row | {"task": "captions", "protocol": "prefixkv"}])
            rows = claims.of_real(claims.of_report(path), {"device": "a card"})
            self.assertEqual([(x["device"], x["verdict"], len(x)) for x in rows], [("a card", "confirmed", 1 + len(claims.KEPT))] * 2)
            whole = path.read_text()
            for wrong, why in (("model\npocket-llava\n", "has no column at"),
                               ("".join(whole.splitlines(True)[:2]), "lacks rows of smol-internvl's captions or documents")):  # fmt: skip
                path.write_text(wrong)
                with self.assertRaisesRegex(ValueError, why):
                    claims.of_report(path)
            path.write_text(whole.replace("smol-internvl", "another").replace("pocket-llava", "a-third"))
            with self.assertRaisesRegex(ValueError, "no rows of smol-internvl or a bundled model"):
                claims.of_report(path)

    def test_rows_of_the_bundled_models(self):
        """A claim that is there is replaced, another one added; a report that would lose a verdict is refused, and nothing written."""
        row = dict.fromkeys(("model", "protocol", *claims.KEPT), "1") | {"protocol": "native", "claim": "b", "one_factor": "True", "source": "new", "verdict": "contradicted"}
        models = [("pocket-llava", "captions"), ("pocket-llava", "documents"), ("pocket-qwen", "captions")]
        given = [row | {"model": model, "task": task, "claim": claim} for claim in ("b", "c") for model, task in models]
        columns = ("device", "claim", "at", "source", "better", "worse", "one_factor", *claims.COLUMNS[:7])
        old = [dict.fromkeys(columns, "") | {"claim": claim, "at": "1", "source": "old", "qwen_captions": "confirmed"} for claim in "ab"]
        with tempfile.TemporaryDirectory() as folder:
            path, there = Path(folder) / "report.csv", Path(folder) / "claims.csv"
            path.write_text(claims.text(list(row), given))
            there.write_text(claims.text(list(columns), old))
            with mock.patch.object(claims, "BUNDLED", there), mock.patch.object(claims, "REAL", Path(folder) / "none.csv"):
                claims.take_over(path, {"device": "a card"})
                self.assertFalse(claims.REAL.exists())
                found, written = claims.read(there), there.read_bytes()
                for wrong, why in (([x for x in given if x["model"] == "pocket-llava"], "has no qwen_captions of 'b'"),
                                   ([x | {"task": "clips", "protocol": "other"} for x in given], "no column for clips under the protocol other")):  # fmt: skip
                    path.write_text(claims.text(list(row), wrong))
                    with self.assertRaisesRegex(ValueError, why):
                        claims.take_over(path, {"device": "a card"})
                self.assertEqual(there.read_bytes(), written)
        self.assertEqual([(x["claim"], x["source"], x["device"], x["qwen_captions"]) for x in found],
                         [("a", "old", "", "confirmed"), *((claim, "new", "a card", "contradicted") for claim in "bc")])  # fmt: skip
        self.assertEqual([found[1][name] for name in columns[6:]], ["yes", "", "", *["contradicted"] * 3, "", ""])


if __name__ == "__main__":
    unittest.main()
