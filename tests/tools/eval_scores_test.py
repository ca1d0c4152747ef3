"""Scores of tools/eval: ANLS by hand, pycocoevalcap's own figures on a set made up here, and scorers that cannot run.

What needs pycocoevalcap and Java runs where tools/eval/setup.sh has put them (build/eval-venv), and skips elsewhere.
"""

import contextlib
import dataclasses
import io
import json
import random
import shutil
import sys
import unittest

from eval_case import HELDOUT, EvalCase, WithModel, python_with_scorers
from eval_packages import WithPackages

import scorers  # noqa: E402  (of tools/eval)
import table  # noqa: E402
from results import Result  # noqa: E402

# (answer, accepted answers, value, how it comes about by hand)
PAIRS = [
    ("", ["abc"], 0, "3 insertions of 3"),
    ("abc", [""], 0, "3 deletions of 3"),
    ("", [""], 1, "0 of 0, a distance of 0 in both harnesses"),
    ("PARIS", ["paris"], 1, "case is nothing"),
    (" paris ", ["paris"], 1, "0 of 7, the blanks count in the length only"),
    ("New   York", ["new york"], 1, "0 of 10"),
    ("New\nYork", ["New York"], 1, "any white space is a blank"),
    ("a\u00a0b", ["a b"], 1, "a no-break space, too"),
    ("Paris.", ["Paris"], 5 / 6, "1 of 6: punctuation counts"),
    ("$12.50", ["12.50"], 5 / 6, "1 of 6"),
    ("x", ["yes", "no", "x"], 1, "the last one fits"),
    ("abcd", ["abxy"], 0.5, "2 of 4, not below the threshold"),
    ("abc", ["abxyz"], 0, "3 of 5 leaves 0.4, below it"),
    ("Müller", ["Muller"], 5 / 6, "1 of 6: an umlaut is a letter of its own"),
    ("ß", ["a"], 0.5, "1 of 2: in upper case it is SS"),
    ("cafe\u0301", ["caf\u00e9"], 0.6, "decomposed: 1 replaced and 1 deleted of 5"),
    ("a    b", ["a c"], 5 / 6, "1 of 6 raw characters, not of 3"),
    ("ab" + 8 * " ", ["cd"], 0.8, "2 of 10 raw characters"),
    ("a" * 1000, ["a"], 0, "999 of 1000 leaves 0.001, below the threshold"),
    ("12", ["21"], 0, "a swap is 2 of 2"),
    ("5th Avenue", ["5th Ave", "Fifth Avenue", "5 Avenue"], 0.8, "the best of 3 of 10, 3 of 12 and 2 of 10"),
]


class Anls(unittest.TestCase):
    def test_worked_by_hand(self):
        self.assertGreaterEqual(len(PAIRS), 20)
        for text, answers, expected, why in PAIRS:
            self.assertAlmostEqual(scorers.anls(text, answers), expected, 12, f"{text[:20]!r}, {answers}: {why}")


def small_set(count=24, seed=3):
    """Annotations of our scenes and candidates of all kinds: right, shuffled, cut, empty, with punctuation of any script."""
    draw = random.Random(seed)
    coco = json.loads((HELDOUT / "captions_heldout.json").read_text())
    images = [{"id": 7 * image["id"] + 100, "file_name": image["file_name"]} for image in coco["images"][:count]]
    draw.shuffle(images)
    notes = [{"id": note["id"], "image_id": 7 * note["image_id"] + 100, "caption": note["caption"]}
             for note in coco["annotations"] if note["image_id"] < count]  # fmt: skip
    notes[4]["caption"] += " \u201cIt\u2019s\u201d caf\u00e9 \u2014 50% (no. 7)..."
    results = []
    for number, image in enumerate(images):
        said = [note["caption"] for note in notes if note["image_id"] == image["id"]]
        text = draw.choice(said)
        words = text.split()
        if number % 4 == 1:
            draw.shuffle(words)
        text = " ".join(words[: len(words) // 2] if number % 4 == 2 else words)
        results.append({"image_id": image["id"], "caption": text})
    results[3]["caption"] = ""
    results[5]["caption"] = "A caf\u00e9's \u201csign\u201d\u2026 two-storey; isn't it?\n\nYES ||| 3,5"
    return {"images": images, "annotations": notes}, results


class Packages(WithPackages):
    """Direct calls of pycocoevalcap against results.json of coco.py."""

    def files(self, blank=" "):
        annotations, results = small_set()
        results[7]["caption"] = results[7]["caption"].replace(" ", blank, 1)
        return self.write("captions_small.json", annotations), self.write("results.json", results)

    def scored(self, protocol, *more, **changes):
        annotations, results = self.files(**changes)
        shutil.rmtree(self.folder / "out", ignore_errors=True)  # of other results
        out = self.run_well("coco.py", "--out", "out", "--annotations", annotations, "--results", results, "--protocol",
                            protocol, *more, python=python_with_scorers(), env={"LC_ALL": "C"})  # fmt: skip
        self.assertIn(f"| {protocol} | 24 |", out)
        return json.loads((self.folder / "out/results.json").read_text())[0]

    def test_tokenized_scores_are_the_packages_own(self):
        found = self.scored("lmms-eval")
        self.compare(found, *self.direct("print_coco", *self.files()))
        self.assertTrue(0.1 < found["scores"]["CIDEr"] < 10, found["scores"])

    def test_a_line_separator_does_not_move_captions_to_other_images(self):
        # pycocoevalcap alone takes it for a line of its own, and scores every caption after it on a wrong image.
        (first, second) = (self.scored("lmms-eval", "--skip", "METEOR", blank=blank) for blank in (" ", "\u2028"))
        self.assertEqual(first["items"], second["items"])

    def test_the_tokenizer_s_own_output_is_not_shown(self):
        annotations, results = self.files()
        status, _, err = self.run_script("coco.py", "--out", "out", "--annotations", annotations, "--results", results, "--protocol",
                                         "lmms-eval", python=python_with_scorers())  # fmt: skip
        self.assertEqual((status, err), (0, ""))

    def test_raw_scores_are_those_of_strings_as_they_are(self):
        self.compare(self.scored("vlmevalkit"), *self.direct("print_raw", *self.files()))


class Printed(EvalCase):
    ROWS = [Result("m", spec, "captions", "heldout-first-2", "native", {"0": {}, "1": {}}, {"exact": 1.0, "slots": 0.5, "CIDEr": 1.0})
            for spec in ("f16", "kivi,bits=1,residual=32")]  # fmt: skip

    def test_a_narrow_table(self):
        for width in (40, 60, 80):
            lines = table.narrow(self.ROWS, width).splitlines()
            self.assertLessEqual(max(map(len, lines)), width, lines)
            self.assertEqual(lines[0], "heldout-first-2, protocol native, n = 2"[:width])
            self.assertEqual([line for line in lines if line.startswith("m: ")], ["m: f16", "m: kivi,bits=1,residual=32"])
            self.assertIn("facts 0.5000", " ".join(lines))

    def test_a_file_has_markdown(self):
        with contextlib.redirect_stdout(io.StringIO()) as said:
            table.show(self.ROWS, self.folder)
        self.assertEqual((self.folder / "results.md").read_text(), said.getvalue())
        self.assertIn("| exact | facts | CIDEr |", said.getvalue())
        self.assertNotIn("\x1b", table.table([dataclasses.replace(self.ROWS[0], spec="\x1b[31m|")]))


class Unavailable(WithModel):
    def test_a_scorer_that_cannot_run_is_named_before_the_model_runs(self):
        command = ("coco.py", "--out", "out", "--limit", 1)
        if python_with_scorers() != sys.executable:
            self.assert_refused(self.run_script(*command), "BLEU-1", "METEOR", "CIDEr", "pycocoevalcap", "tools/eval/setup.sh",
                                "--skip")  # fmt: skip
            self.assertFalse((self.folder / "out").exists())
        status, out, err = self.run_script(*command, "--fidelity", 0, "--skip", "pycocoevalcap")
        self.assertEqual(status, 0, err)
        self.assertIn("| exact | facts | stored bits |", out)
        self.assertIn("skipped: BLEU-1, BLEU-2, BLEU-3, BLEU-4, METEOR, ROUGE_L, CIDEr", err)

    def test_what_is_skipped_is_a_scorer_of_the_run(self):
        self.assert_refused(self.run_script("docvqa.py", "--out", "out", "--skip", "CIDEr"), "CIDEr", "ANLS")
        self.assert_refused(self.run_script("docvqa.py", "--out", "out", "--protocol", "lmms-eval", "--skip", "ANLS"),
                            "nothing to score")  # fmt: skip

    def test_no_java(self):
        if python_with_scorers() is None:
            self.skipTest("pycocoevalcap is not here")
        answer = self.run_script("coco.py", "--out", "out", "--limit", 1, python=python_with_scorers(),
                                 env={"PATH": str(self.folder)})  # fmt: skip
        self.assert_refused(answer, "METEOR", "java", "default-jre-headless", "--skip")


if __name__ == "__main__":
    unittest.main()
