"""tools/eval/report.py: what the page says beside every figure, for results made up here."""

import csv
import json
import math
import os
import re
import struct
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from eval_made import CATALOGUE, ROOT, needs_matplotlib, needs_numpy, result  # noqa: E402

import groups  # noqa: E402
import markup  # noqa: E402
import page  # noqa: E402
import plots  # noqa: E402
import summary  # noqa: E402
from results import write_results  # noqa: E402
from significance import Interval  # noqa: E402

BUILD = Path(os.environ.get("KVLM_BUILD", ROOT / "build" / "release"))
SCRIPT = ROOT / "tools" / "eval" / "report.py"
GOOD, BAD = [0.9, 0.8, 1.0, 0.95] * 6, [0.4, 0.5, 0.3, 0.45] * 6
HEADINGS = ["Scores", "At equal stored bytes", "Claims", "Layers", "By number of objects"]


def captions(spec, values, bits, **others):
    """With all that a result can have."""
    return result(
        spec,
        values,
        bits,
        "slots",
        "captions",
        exact=[x > 0.85 for x in values],
        **(
            {
                "objects": {f"r{i:02}": 1 + i % 3 for i in range(24)},
                "retained": [1.0, 0.5],
                "layer_error": [0.1, 0.2],
                "layer_records": 7,
                "kl": 0.01,
                "top1": 0.99,
                "tokens_per_second": 100 + (bits or 0),
                "nominal_bits": (bits or 1) - 1,
            }
            | others
        ),
    )


def two_settings():
    return [
        captions("f16", GOOD, 16.0, layer_error=[0.0, 0.0]),
        captions("kivi,residual=32", BAD, 4.0, residual=32),
        captions("prefixkv,keep=0.5", GOOD, 8.0),
        captions("uniform,keep=0.5", BAD, 8.0, retained=[0.5, 0.5]),
        result("f16", GOOD, 16.0),
        result("kivi,residual=32", BAD, None, residual=32, prompt_tokens=None),
    ]


def made_page(results, pictures=None):
    of_settings = groups.grouped(results, resamples=200)
    summaries = [summary.summarise(i, group, CATALOGUE) for i, group in enumerate(of_settings, 1)]
    return page.page(summaries, 200, 1, pictures)


class Markdown(unittest.TestCase):
    def test_foreign_text_stays_text(self):
        self.assertEqual(markup.text("a|b_c*[x](y)<z>"), r"a\|b\_c\*\[x\](y)\<z\>")
        self.assertEqual(markup.text("größer \n # 1\x1b[0m"), r"größer \\n \# 1\\x1b\[0m")
        self.assertEqual(markup.code("a|b"), r"`a\|b`")
        self.assertEqual(markup.code("a`b"), "``a`b``")
        self.assertEqual(markup.code("`a"), "`` `a ``")

    def test_numbers(self):
        self.assertEqual([markup.number(x) for x in (None, 0.98765, 98.765)], ["-", "0.988", "98.77"])
        self.assertEqual([markup.small(x) for x in (0.0, 1e-9, 0.00005, 0.2)], ["0", "< 0.0001", "0.0001", "0.2000"])
        self.assertEqual(markup.gain(groups.Estimate(-0.1, Interval(-0.2, 0.0))), "-0.100 (-0.200 to +0.000)")
        self.assertEqual(markup.gain(groups.Estimate(0.1, None)), "+0.100 (no interval)")


@needs_numpy
class Page(unittest.TestCase):
    def test_every_setting_has_every_section_and_n_beside_every_table(self):
        made = made_page(two_settings())
        self.assertEqual(
            re.findall(r"^## (.*)", made, re.M),
            [
                "Claims",
                "Scores: captions, heldout, protocol native",
                "Scores: documents, heldout, protocol native",
                "1. pocket-llava, captions, heldout, protocol native",
                "2. pocket-llava, documents, heldout, protocol native",
                "How it was made",
            ],
        )
        self.assertEqual(re.findall(r"^### (.*)", made, re.M), HEADINGS * 2)
        for setting in made.split("\n## ")[4:6]:
            for section in setting.split("\n### ")[1:]:
                if "| --- |" in section:
                    self.assertRegex(
                        section, r"n = 24, (610 prompt tokens|prompt length not known), seed 7, pocket-llava"
                    )

    def test_models_stand_side_by_side(self):
        other = [captions("f16", GOOD, 16.0, model="other"), captions("int4", BAD, None, model="other", kl=None)]
        made = made_page(two_settings() + other)
        section = made.split("## Scores: captions")[1].split("\n## ")[0]
        table = re.findall(r"^\|.*", section, re.M)
        self.assertEqual(table[0], "| spec | window | 1: bits | 1: facts | 1: exact | 1: KL | 2: bits | 2: facts | 2: exact | 2: KL |")
        cells = {row.split(" | ")[0]: row.strip("| ").split(" | ")[1:] for row in table[2:]}
        specs = ("f16", "prefixkv,keep=0.5", "uniform,keep=0.5", "kivi,residual=32", "int4")
        self.assertEqual(list(cells), [f"| `{spec}`" for spec in specs])
        self.assertEqual([row[0] for row in cells.values()], ["-", "-", "-", "32", "-"])
        f16, int4 = cells["| `f16`"][1:], cells["| `int4`"][1:]
        self.assertEqual((f16[:4], f16[4:6]), (f16[4:], ["16.00", f16[1]]))
        self.assertRegex(f16[1], r"^0\.912 \(0\.\d{3} to 0\.\d{3}\)$")
        self.assertEqual(f16[2:4], ["0.750", "0.0100"])
        self.assertEqual((int4[0], int4[3:]), ("-", ["-"] * 5))
        for mark, model in ((1, "other"), (2, "pocket-llava"), (3, "pocket-llava")):
            self.assertRegex(made, rf"(?m)^- {mark}: n = 24, (610 prompt tokens|prompt length not known), seed 7, {model}, .*device ")

    def test_what_costs_no_record_anything(self):
        other = [captions("f16", GOOD, 16.0, model="other"), captions("prefixkv,keep=0.5", GOOD, 9.0, model="other")]
        alike = [captions("int4", [1 - x for x in GOOD], 4.5, model="other"), captions("uniform,keep=0.5", GOOD, 8.0, model="other")]
        section = made_page(two_settings() + other + alike).split("| as f16 in every record |")[1]
        self.assertEqual(re.findall(r"^\| `.*", section.split("\n\n")[0], re.M), ["| `prefixkv,keep=0.5` | - | 9.00 | 8.00 |"])
        self.assertIn("No spec scores as f16 does in every record.", made_page(two_settings()[:2]))

    def test_origin(self):
        made = made_page(two_settings()).split("## How it was made")[1]
        for words in (
            "seed 7; device cpu; versions kvlm 1.0",
            "    docvqa.py --out OUT",
            "200 resamples, seed 1",
            "within 2 %",
        ):
            self.assertIn(words, made)

    def test_a_version_is_told_once_with_its_program_s_name(self):
        versions = {"kvlm": "kvlm 0.2.0 (commit 1)", "python": "3.11.2"}
        others = versions | {"kvlm": "kvlm 0.2.0 (commit 2)"}
        made = made_page([result("f16", GOOD, 16.0, versions=versions), result("kivi", BAD, 4.0, versions=others)])
        self.assertIn("versions kvlm 0.2.0 (commit 1) and 0.2.0 (commit 2), python 3.11.2.", made)
        self.assertIn("several versions of kvlm: 0.2.0 (commit 1); 0.2.0 (commit 2)", made)

    def test_a_long_command_is_whole(self):
        command = "coco.py " + " ".join(f"--kv kivi,bits={i}" for i in range(2000))
        self.assertIn(f"    {command}\n", made_page([result("f16", GOOD, command=command)]))

    def test_a_row_of_scores(self):
        made = made_page(two_settings())
        row = next(line for line in made.splitlines() if line.startswith("| 4 | `kivi,residual=32`"))
        self.assertRegex(
            row,
            r"^\| 4 \| `kivi,residual=32` \| 0\.413 \(0\.\d+ to 0\.\d+\) \| 0\.000 \(0\.000 to 0\.000\) \| "
            r"-0\.500 \(-0\.\d+ to -0\.\d+\) \| 4\.00 \| 3\.00 \| 32 \| 0\.0100 \| 0\.9900 \| 104\.0 \| 610\.0 \|$",
        )

        self.assertRegex(made, r"\| 1 \| `f16` \| [^|]* \| [^|]* \| - \| 16\.00 ")  # not against itself

    def test_a_claim(self):
        made = made_page(two_settings())
        row = next(
            line
            for line in made.splitlines()
            if line.startswith("| PrefixKV is above uniform budgets") and "**" in line
        )
        for words in (
            "PrefixKV 4.3, table 4",
            "retention `prefixkv` or `uniform`",
            "8.00, 8.00: equal bytes",
            "**confirmed**",
            "exact 18 only the first, 0 only the second (p < 0.0001)",
        ):
            self.assertIn(words, row)
        self.assertNotIn(r"\*", row)
        self.assertIn(
            "| PrefixKV is above uniform budgets, 0.5 of the tokens | PrefixKV 4.3, table 4 | confirmed | - |", made
        )
        self.assertRegex(made, r"\d+ of \d+ claims are left out")
        self.assertIn("by facts: 1 confirmed, 0 contradicted, 0 inconclusive", made)

    def test_layers_are_told_with_their_records(self):
        made = made_page(two_settings())
        self.assertIn("Over the teacher-forced text of the first 7 records.", made)
        made = made_page([captions("f16", GOOD, 16.0, layer_records=None)])
        self.assertNotIn("Over the teacher-forced text", made)

    def test_equal_bytes(self):
        made = made_page(two_settings())
        self.assertIn("| 8.00 | `prefixkv,keep=0.5` | - | 0.912 ", made)
        self.assertIn("No two specs store the same within 2 %.", made)
        self.assertIn(
            "No spec is better with no more bytes than any of these (stored bits): `kivi,residual=32` (4.00), "
            "`prefixkv,keep=0.5` (8.00), `f16` (16.00).",
            made,
        )

    def test_more_than_one_factor_is_marked(self):
        made = made_page([result("kivi", GOOD), result("kivi,bits=4,residual=32", BAD)])
        self.assertIn(r"bits `2` or `4`; residual `128` or `32` \*", made)

    def test_what_is_missing_is_said(self):
        made = made_page(
            [result("kivi,residual=32", BAD, None, prompt_tokens=None, device="", versions={}, command="")]
        )
        for words in (
            "note: f16 is not among the specs",
            "note: stored bits of (1) were not measured",
            "Layers were not measured",
            "The number of objects is not known",
            "No claim has all its specs here",
            "prompt length not known",
            "device not known; versions not known",
            "No two specs store the same",
        ):
            self.assertIn(words, made)

    def test_scores_that_decide_nothing(self):
        results = [result("f16", GOOD, metric="BLEU-1"), result("kivi", BAD, metric="BLEU-1")]
        for made in results:
            made.scores |= {"BLEU-2": 0.3}
        text = made_page(results)
        self.assertIn("note: nothing is decided", text)
        self.assertIn("note: no interval for BLEU-2", text)
        self.assertIn("| 0.300 |", text)

    def test_mixed_origins_are_notes(self):
        made = made_page(
            [result("f16", GOOD), result("kivi", GOOD, device="cuda", versions={"kvlm": "2.0"}, prompt_tokens=500.0)]
        )
        for words in (
            "note: specs ran on several devices: cpu; cuda",
            "note: specs were made by several versions of kvlm: 1.0; 2.0",
            "note: prompts differ between specs: 500 to 610",
        ):
            self.assertIn(words, made)

    def test_many_objects_are_one(self):
        made = made_page([captions("f16", GOOD, 16.0, objects={f"r{i:02}": i for i in range(24)})])
        self.assertIn("|  | spec | 0 (n = 1) | 1 (n = 1) |", made)
        self.assertIn("| 9 (n = 1) | 10+ (n = 14) |", made)
        few = made_page([captions("f16", GOOD, 16.0)])
        self.assertIn("| 1 (n = 8) | 2 (n = 8) | 3 (n = 8) |", few)
        self.assertIn("(24 records); n = 24", few)

    def test_clusters_stand_beside_n(self):
        clusters = {f"r{i:02}": f"video {i // 6}" for i in range(24)}
        made = made_page([result("f16", GOOD, clusters=clusters)])
        self.assertIn("n = 24 in 4 clusters", made)
        self.assertIn("note: no intervals: there are fewer than 10 records or clusters", made)

    def test_names_of_any_kind(self):
        made = made_page([result("f16", GOOD, model="größe|`x`_1\n## no", split="a|b", command="run 'a|b'\nrm")])
        self.assertEqual(re.findall(r"^## .*no$", made, re.M), [])
        self.assertIn(r"größe\|\`x\`\_1\\n\#\# no, documents, a\|b", made)
        self.assertIn(r"    run 'a|b'\nrm", made)

    def test_records_that_differ_are_refused(self):
        with self.assertRaisesRegex(groups.NotComparable, "'r23' is a record of 'f16'"):
            made_page([result("f16", GOOD), result("kivi", GOOD[:-1])])


@needs_numpy
class Script(unittest.TestCase):
    def setUp(self):
        self.folder = Path(self.enterContext(tempfile.TemporaryDirectory(prefix="kvlm-report-")))

    def run_script(self, out, results, *flags, **environment):
        paths = []
        for i, rows in enumerate(results):
            paths.append(self.folder / f"{i}.json")
            write_results(paths[-1], rows)
        return subprocess.run(
            [
                sys.executable,
                SCRIPT,
                "--out",
                self.folder / out,
                "--resamples",
                "200",
                *flags,
                *paths,
            ],
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "KVLM_BUILD": str(BUILD), **environment},
        )

    def refused(self, words, results, *flags):
        done = self.run_script("out", results, "--skip", "plots", *flags)
        self.assertEqual(done.returncode, 1, done.stderr)
        self.assertEqual(done.stderr.count("\n"), 1, done.stderr)
        self.assertRegex(done.stderr, "^report.py: .*" + words)
        self.assertFalse((self.folder / "out" / "report.md").exists())

    def test_files(self):
        done = self.run_script("out", [two_settings()], "--skip", "plots")
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        found = self.folder / "out"
        self.assertEqual(
            sorted(path.name for path in found.iterdir()), ["claims.csv", "overview.md", "report.json", "report.md", "scores.csv"]
        )
        whole, short = ((found / name).read_text() for name in ("report.md", "overview.md"))
        self.assertTrue(whole.startswith(short[: short.index("## How it was made")]))
        self.assertNotIn("![", (found / "report.md").read_text())
        rows = list(csv.DictReader((found / "scores.csv").read_text().splitlines()))
        self.assertEqual(len(rows), 4 * 2 + 2)
        kivi = next(row for row in rows if row["spec"] == "kivi,residual=32" and row["metric"] == "slots")
        self.assertEqual(
            (kivi["n"], kivi["value"], kivi["stored_bits"], kivi["residual"], kivi["seed"], kivi["decides"]),
            ("24", "0.4125", "4.0", "32", "7", "True"),
        )
        told = json.loads((found / "report.json").read_text())
        self.assertEqual((told["resamples"], told["seed"], told["tolerance"]), (200, 1, 0.02))
        self.assertEqual(told["settings"][0]["claims"][0]["verdict"], "confirmed")
        self.assertIsNone(told["settings"][1]["specs"][1]["stored_bits"])
        claims = list(csv.DictReader((found / "claims.csv").read_text().splitlines()))
        self.assertEqual([(row["verdict"], row["one_factor"], row["n"]) for row in claims], [("confirmed", "True", "24")])

    def test_pictures_of_an_earlier_report_go(self):
        out = self.folder / "out"
        out.mkdir()
        for name in ("07_bits-2.png", "7_bits.png", "mine.png"):
            (out / name).write_text("")
        self.run_script("out", [two_settings()], "--skip", "plots")
        self.assertEqual(sorted(path.name for path in out.glob("*.png")), ["7_bits.png", "mine.png"])

    @needs_matplotlib
    def test_plots_for_a_paper(self):
        flags = ("--format", "svg", "--format", "pdf", "--style", "paper")
        for out in ("a", "b"):
            done = self.run_script(out, [two_settings()], *flags)
            self.assertEqual((done.returncode, done.stderr), (0, ""))
        found = sorted(path.name for path in (self.folder / "a").iterdir() if path.suffix in (".svg", ".pdf", ".png"))
        self.assertIn("01_bits.svg", found)
        self.assertEqual([name[:-4] for name in found if name.endswith("svg")], [name[:-4] for name in found if name.endswith("pdf")])
        self.assertFalse([name for name in found if name.endswith("png")])
        for name in found:  # the same bytes each time
            self.assertEqual((self.folder / "a" / name).read_bytes(), (self.folder / "b" / name).read_bytes(), name)
        drawn = (self.folder / "a/01_bits.svg").read_text()
        self.assertLess(float(re.search(r'<svg [^>]*width="([0-9.]+)pt"', drawn)[1]), 3.4 * 72)
        self.assertIn("](01_bits.svg)", (self.folder / "a/report.md").read_text())
        self.assertEqual(self.run_script("a", [two_settings()], "--skip", "plots").returncode, 0)
        self.assertFalse(list((self.folder / "a").glob("*.svg")) + list((self.folder / "a").glob("*.pdf")))

    def test_policies_that_the_build_lacks_are_named(self):
        done = self.run_script("out", [[result("f16", GOOD), result("kvnorm,keep=0.5 + tok3", GOOD)]], "--skip", "plots")
        self.assertEqual(done.returncode, 0)
        self.assertRegex(done.stderr, "^report.py: note: kvnorm, tok3 is unknown to .*vlm-kv, .*--build")
        self.assertIn("unknown to this build, so shown as other: kvnorm, tok3", (self.folder / "out/report.md").read_text())

    def test_the_same_results_give_the_same_files(self):
        half = [two_settings()[:4], two_settings()[4:]]
        for out, results in (("a", half), ("b", half[::-1])):
            self.assertEqual(self.run_script(out, results, "--skip", "plots").returncode, 0)
        for path in (self.folder / "a").iterdir():
            self.assertEqual(path.read_bytes(), (self.folder / "b" / path.name).read_bytes(), path.name)
        self.run_script("c", half, "--skip", "plots", "--seed", "2")
        self.assertNotEqual((self.folder / "a/report.md").read_text(), (self.folder / "c/report.md").read_text())

    def test_what_cannot_be_reported(self):
        self.refused(
            "'r23' is a record of 'f16' and not of 'kivi'", [[result("f16", GOOD)], [result("kivi", GOOD[:-1])]]
        )
        self.refused("'f16' is there twice", [[result("f16", GOOD)], [result("f16", GOOD)]])
        self.refused("0.json has no results", [[]])
        for name, text in (("a folder", None), ("run.json", '{"spec": "f16"}'), ("torn.json", "[{")):
            path = self.folder / name
            path.mkdir() if text is None else path.write_text(text)
            done = subprocess.run([sys.executable, SCRIPT, "--out", self.folder / "out", path], capture_output=True, text=True)
            self.assertEqual((done.returncode, done.stderr.count("\n")), (1, 1), done.stderr)
            self.assertRegex(done.stderr, rf"^report.py: .*{name} (is a folder;|is not a file of results: )")
        empty = result("f16", GOOD)
        empty.items = {}
        self.refused("'f16' .* has no scored records", [[empty]])
        self.refused("--resamples 0 is too few", [[result("f16", GOOD)]], "--resamples", "0")
        self.refused("--seed -1 is no seed", [[result("f16", GOOD)]], "--seed=-1")
        self.refused(
            "nowhere/tools/vlm-kv is not built", [[result("f16", GOOD)]], "--build", str(self.folder / "nowhere")
        )
        self.refused(
            "--metric CIDEr is no score of these results; there are ANLS", [[result("f16", GOOD)]], "--metric", "CIDEr"
        )
        (self.folder / "bad.json").write_text("{")
        self.refused("bad.json is not a file of results", [], str(self.folder / "bad.json"))
        self.refused("No such file", [], str(self.folder / "none.json"))

    def test_a_missing_matplotlib_is_said_with_its_cure(self):
        (self.folder / "matplotlib.py").write_text("raise ImportError('none')")
        done = self.run_script("out", [two_settings()], PYTHONPATH=str(self.folder))
        self.assertEqual(done.returncode, 1)
        self.assertRegex(
            done.stderr, "no matplotlib; run tools/eval/setup.sh .* or leave them out with --skip plots\n$"
        )
        self.assertFalse((self.folder / "out").exists())

    def test_curves_by_count_stand_near_one_another(self):
        for places in range(1, 30):
            shifts = [plots._beside(place, places) for place in range(places)]
            self.assertAlmostEqual(sum(shifts), 0)
            self.assertEqual(len({round(shift, 6) for shift in shifts}), places)
            self.assertLessEqual(shifts[-1] - shifts[0], min(0.5, 0.03 * places))

    def test_points_of_equal_bytes_stand_side_by_side(self):
        step = plots.MARKER_WIDTH
        self.assertEqual(plots._side_by_side([0.5, 0.1, 0.9], 0, 1, False), [0.5, 0.1, 0.9])
        for log, low, high, at in ((False, 0, 1, 0.5), (True, 1, 2, math.sqrt(2))):
            found = plots._side_by_side([at] * 5, low, high, log)
            places = [math.log2(x) for x in found] if log else found
            self.assertAlmostEqual(sum(places) / 5, 0.5)
            for k in range(4):
                self.assertAlmostEqual(places[k + 1] - places[k], step)
        # Two blocks that meet are one, in the order of their members.
        near = [0.5, 0.5 + 1.1 * step, 0.5, 0.5 + 1.1 * step]
        found = plots._side_by_side(near, 0, 1, False)
        self.assertLess(max(found[0], found[2]), min(found[1], found[3]))
        self.assertAlmostEqual(sum(found), sum(near))
        for a, b in zip(sorted(found), sorted(found)[1:]):
            self.assertAlmostEqual(b - a, step)

    @needs_matplotlib
    def test_pictures(self):
        odd = [
            captions(f"kivi,bits={i},residual={j}", BAD, 1.0 + i, model="größe $x_1$|")
            for i in range(1, 9)
            for j in (32, 128)
        ]
        odd.append(captions("f16", GOOD, 16.0, model="größe $x_1$|"))
        odd.append(
            captions("-", GOOD, None, model="größe $x_1$|", tokens_per_second=None, retained=None, layer_error=None)
        )
        for out in ("a", "b"):
            done = self.run_script(out, [two_settings(), odd])
            self.assertEqual((done.returncode, done.stderr), (0, ""))
        text = (self.folder / "a/report.md").read_text()
        shown = re.findall(r"^!\[.*\]\((.*)\)$", text, re.M)
        drawn = sorted(path.name for path in (self.folder / "a").glob("*.png"))
        self.assertEqual(sorted(shown), drawn)
        for kind in ("bits", "speed", "retained", "error", "objects"):
            self.assertIn(f"01_{kind}.png", drawn)
        self.assertNotIn("03_bits.png", drawn)  # the documents: f16 alone has its bits
        captioned = re.findall(r"^!\[.*\n\n.*n = 24, .*seed 7, .*protocol native\.$", text, re.M)
        self.assertEqual(len(captioned), len(shown))
        for name in drawn:
            data = (self.folder / "a" / name).read_bytes()
            self.assertEqual(data, (self.folder / "b" / name).read_bytes(), name)
            width, height = struct.unpack(">II", data[16:24])
            self.assertLessEqual(max(width, height), 2000, name)


if __name__ == "__main__":
    unittest.main()
