"""Result files that coco.py, docvqa.py and video.py write, read as their benchmarks read them and scored by their rules.

COCO's by pycocotools and pycocoevalcap themselves, where tools/eval/setup.sh has put them; DocVQA's and Video-MME's by
their published rules, written here once more.
"""

import functools
import json
import os
import unittest
from pathlib import Path

import eval_video_test as videos
from eval_case import HELDOUT, WithModel, python_with_scorers
from eval_packages import WithPackages

POOR = ("--kv", "kivi,bits=1", "--device", "cpu", "--fidelity", 0)  # answers that are right in part


# What the authors of pycocoevalcap print for the sample that they publish, rounded to three places.
SAMPLE = {"BLEU-1": 0.579, "BLEU-2": 0.404, "BLEU-3": 0.279, "BLEU-4": 0.191, "METEOR": 0.195, "ROUGE_L": 0.396, "CIDEr": 0.600}


class Sample(WithPackages):
    """The published sample results of pycocoevalcap: 1000 captions of COCO's val2014, whose annotations are 31 MB.

    KVLM_COCO_SAMPLE names a folder with captions_val2014.json, or a part of it, and captions_val2014_fakecap_results.json.
    """

    def test_the_packages_and_its_authors_give_the_same_scores(self):
        if "KVLM_COCO_SAMPLE" not in os.environ:
            self.skipTest("KVLM_COCO_SAMPLE names no folder with COCO's captions_val2014.json and the sample results")
        folder = Path(os.environ["KVLM_COCO_SAMPLE"])
        val = json.loads((folder / "captions_val2014.json").read_text())
        known = {row["image_id"] for row in val["annotations"]}
        sample = json.loads((folder / "captions_val2014_fakecap_results.json").read_text())
        file = self.write("results.json", [row for row in sample if row["image_id"] in known])
        scored = {row["image_id"] for row in sample} & known
        part = {"images": [row for row in val["images"] if row["id"] in scored],
                "annotations": [row for row in val["annotations"] if row["image_id"] in scored]}  # fmt: skip
        annotations = self.write("captions_val2014.json", part)
        self.run_well("coco.py", "--out", "out", "--annotations", annotations, "--results", file, "--protocol", "lmms-eval",
                      python=python_with_scorers())  # fmt: skip
        (found,) = json.loads((self.folder / "out/results.json").read_text())
        self.compare(found, *self.direct("print_coco", annotations, file))
        print(f"{len(scored)} of {len(sample)} sample captions: {found['scores']}")
        if len(scored) == len(sample):
            self.assertEqual({name: round(found["scores"][name], 3) for name in SAMPLE}, SAMPLE)


class Captions(WithPackages, WithModel):
    def test_the_packages_give_the_same_scores_on_the_file_as_it_was_written(self):
        annotations = HELDOUT / "captions_heldout.json"
        limit = ("--limit", 4, "--annotations", annotations)
        self.run_well("coco.py", "--out", "out", *limit, *POOR, "--protocol", "lmms-eval", python=python_with_scorers())
        (file,) = self.folder.glob("out/pocket/kivi-bits-1/captions_heldout-first-4_pocket-kivi-bits-1_results.json")
        rows = json.loads(file.read_text())
        self.assertEqual([(set(row), type(row["image_id"])) for row in rows], [({"image_id", "caption"}, int)] * 4)
        (found,) = json.loads((self.folder / "out/results.json").read_text())
        self.compare(found, *self.direct("print_coco", annotations, file))
        self.assertTrue(0 < found["scores"]["BLEU-4"] < 0.99, found["scores"])

        # VLMEvalKit's way, on the same file.
        self.run_well("coco.py", "--out", "raw", *limit, "--results", file, "--protocol", "vlmevalkit",
                      python=python_with_scorers())  # fmt: skip
        (found,) = json.loads((self.folder / "raw/results.json").read_text())
        self.compare(found, *self.direct("print_raw", annotations, file))


def similarity(text, answer):
    """Of DocVQA's ANLS, as lmms-eval and VLMEvalKit have it, by the definition of the distance."""
    a, b = " ".join(text.lower().split()), " ".join(answer.lower().split())

    @functools.cache
    def distance(i, j):
        if 0 in (i, j):
            return i + j
        return min(distance(i - 1, j) + 1, distance(i, j - 1) + 1, distance(i - 1, j - 1) + (a[i - 1] != b[j - 1]))

    length = max(len(text.upper()), len(answer.upper()))
    share = distance(len(a), len(b)) / length if length else 0
    return 1 - share if share <= 0.5 else 0


class Documents(WithModel):
    """The site of the Robust Reading Competition takes one JSON list of {"questionId": number, "answer": text}."""

    def submission(self, *options):
        """The rows of docvqa.py's file."""
        self.run_well("docvqa.py", "--out", "out", *POOR, *options)
        (file,) = self.folder.glob("out/pocket/kivi-bits-1/docvqa_*_pocket-kivi-bits-1.json")
        rows = json.loads(file.read_text(encoding="utf-8"))
        self.assertIsInstance(rows, list)
        for row in rows:
            self.assertEqual({name: type(value) for name, value in row.items()}, {"questionId": int, "answer": str})
        return rows

    def compare(self, out, rows):
        """Scores of results.json against the rule's on rows of a submission; the mean."""
        data = json.loads((HELDOUT / "documents_heldout.json").read_text())["data"][:8]
        self.assertEqual([row["questionId"] for row in rows], [record["questionId"] for record in data])
        (found,) = json.loads((self.folder / out / "results.json").read_text())
        values = [max(similarity(row["answer"], answer) for answer in record["answers"]) for row, record in zip(rows, data)]
        for row, value in zip(rows, values):
            self.assertAlmostEqual(found["items"][str(row["questionId"])]["ANLS"], value, 12)
        self.assertAlmostEqual(found["scores"]["ANLS"], sum(values) / 8, 12)
        return values

    def test_the_published_rule_gives_the_same_score(self):
        limit = ("--limit", 8, "--annotations", HELDOUT / "documents_heldout.json")
        rows = self.submission(*limit)
        self.compare("out", rows)
        for number, row in enumerate(rows):  # near misses, which the model has few of
            text = row["answer"]
            row["answer"] = (text.upper() + "!", f" {text}x   ", text[: len(text) // 2], text[1:] + "xy")[number % 4]
        self.run_well("docvqa.py", "--out", "near", *limit, "--results", self.write("near.json", rows))
        self.assertGreater(len(set(self.compare("near", rows))), 3)

    def test_a_test_split_has_its_file_and_no_score(self):
        data = json.loads((HELDOUT / "documents_heldout.json").read_text())["data"][:8]
        bare = [{k: v for k, v in row.items() if k != "answers"} for row in data]
        annotations = self.write("test_v1.0.json", {"dataset_split": "test", "data": bare})
        rows = self.submission("--annotations", annotations, "--images", HELDOUT)
        self.assertEqual([row["questionId"] for row in rows], [row["questionId"] for row in data])
        self.assertFalse((self.folder / "out/results.json").exists())


def first_capital(response):
    """Video-MME's rule, behind the phrases that are removed wherever they stand."""
    for phrase in ("The best answer is", "The correct answer is", "The answer is", "The answer"):
        response = response.replace(phrase, "")
    return next((letter for letter in response if letter in "ABCD"), "")


class Videos(videos.VideoCase, WithModel):
    VIDEO = {"video_id": str, "duration": str, "domain": str, "sub_category": str, "missing": bool, "questions": list}
    QUESTION = {name: str for name in ("question_id", "task_type", "question", "answer", "response")} | {"options": list}

    def accuracy(self, written):
        """By the rule, of the file's own fields."""
        questions = [question for of in written if not of["missing"] for question in of["questions"]]
        return sum(first_capital(question["response"]) == question["answer"] for question in questions) / len(questions)

    def scored(self, out):
        (row,) = json.loads((self.folder / out / "results.json").read_text())
        self.assertEqual(len(row["items"]), 5)
        return row["scores"]

    def test_the_benchmark_s_scorer_finds_its_fields_and_the_same_accuracy(self):
        self.clips("data/clip-001.webp", "data/clip-002.webp", "data/clip-003.webp")
        published = videos.benchmark()
        annotations = self.write("template.json", published)
        self.run_well("video.py", "--out", "out", "--annotations", annotations, "--frames", 2, *POOR)
        (file,) = self.folder.glob("out/pocket-qwen/kivi-bits-1/video-mme_*.json")
        written = json.loads(file.read_text())
        self.assertEqual([of["video_id"] for of in written], [of["video_id"] for of in published])
        for found, expected in zip(written, published):
            self.assertEqual({name: type(value) for name, value in found.items()}, self.VIDEO)
            self.assertFalse(found["missing"])
            for name in ("duration", "domain", "sub_category"):
                self.assertEqual(found[name], expected[name])
            self.assertEqual(len(found["questions"]), len(expected["questions"]))
            for answered, question in zip(found["questions"], expected["questions"]):
                self.assertEqual({name: type(value) for name, value in answered.items()}, self.QUESTION)
                self.assertEqual({name: answered[name] for name in question}, question)
        self.assertEqual(self.scored("out"), {"accuracy": self.accuracy(written)})

        said = iter(["The answer is C", "A", "Answer: B", "(D) All alike.", "A or B"])  # the third is read as A
        for of in written:
            for answered in of["questions"]:
                answered["response"] = next(said)
        self.run_well("video.py", "--out", "said", "--annotations", annotations, "--frames", 2, "--results",
                      self.write("said.json", written))  # fmt: skip
        self.assertEqual((self.scored("said"), self.accuracy(written)), ({"accuracy": 0.6}, 0.6))


if __name__ == "__main__":
    unittest.main()
