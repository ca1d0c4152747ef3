"""tools/eval/fidelity.py: ROUGE-L by hand, PrefixKV's files and budgets, and runs of the bundled models."""

import argparse
import json
import math
import unittest

from eval_case import HELDOUT, EvalCase, WithModel, results_of

import descriptions  # noqa: E402  (of tools/eval)
import fidelity  # noqa: E402
import rouge_l  # noqa: E402
import specs  # noqa: E402
from errors import EvaluationError  # noqa: E402

# (answer, reference, F1, how it comes about by hand)
PAIRS = [
    ("a red ring", "a red ring", 1, "equal"),
    ("the cat sat", "the cat ran", 2 / 3, "2 of 3 words both ways"),
    ("a b c d", "a c", 2 / 3, "precision 2 of 4, recall 2 of 2"),
    ("b a", "a b", 1 / 2, "one word in order, of 2"),
    ("a a a a", "a", 1, "a word counts once"),
    ("a b a b a", "b a", 1, "two different words, both in order"),
    ("A cat", "a cat", 1 / 2, "case stays"),
    ("cat, dog", "cat dog", 1 / 2, "punctuation stays at its word"),
    ("a b. c d", "c d. a b.", 1, "every piece with every piece, whatever their order"),
    ("3.5 cm", "3.7 cm", 2 / 3, "pieces 3 and 5 cm, 3 and 7 cm: 3 and cm of three words"),
    ("y x. y", "x y", 1 / 2, "of y and x, equally long, the one found without the answer's last word; y in both pieces"),
    ("a\n b", "a b", 1, "white space is one blank"),
    ("none", "a b", 0, "nothing in common"),
    ("", "a", 0, "nothing was said"),
    ("a", "...", 0, "nothing was wanted"),
    ("", "", 1, "both say nothing"),
]
DETAIL = [
    {"id": "000000442786", "image": "a.png", "conversations": [
        {"from": "human", "value": "What do you see?\n<image>"}, {"from": "gpt", "value": "A ring."},
        {"from": "human", "value": "More?"}, {"from": "gpt", "value": "No."}]},
    {"id": "2", "image": "b.png", "conversations": [
        {"from": "human", "value": "<image>\nDescribe it."}, {"from": "gpt", "value": "A cross."}]},
]  # fmt: skip
CLIPS = ("--annotations", HELDOUT / "clips_heldout.json", "--model", "pocket-qwen", "--device", "cpu")


class RougeL(unittest.TestCase):
    def test_worked_by_hand(self):
        for answer, reference, expected, why in PAIRS:
            self.assertAlmostEqual(rouge_l.f1(answer, reference), expected, 12, f"{answer!r}, {reference!r}: {why}")


class Data(EvalCase):
    def test_files_of_prefixkv(self):
        split = descriptions.read_any(self.write("detail_1k.json", DETAIL))
        self.assertEqual([(x.id, x.question, x.references) for x in split.items],
                         [("000000442786", "What do you see?", ["A ring."]), ("2", "Describe it.", ["A cross."])])  # fmt: skip
        self.assertEqual((split.name, split.items[1].image), ("detail_1k", self.folder / "b.png"))
        self.assertIn("before the question", fidelity.find_protocol("prefixkv", split, "llava", ()).departs)
        rows = [{"image": "a.png", "question": "What is x?", "answer": "-1<AND>-5"}]
        published = {"v1_0": {"imagename": "a.png", "question": "What is x?", "answer": "-1<AND>-5", "capability": ["math"]}}
        for key, value in ((0, rows), ("v1_0", published)):
            split = descriptions.read_any(self.write("mm-vet.json", value))
            self.assertEqual([(x.id, x.question, x.references) for x in split.items],
                             [(key, "What is x?", ["-1<AND>-5"])])  # fmt: skip
            self.assertEqual(split.items[0].image, self.folder / "a.png")

    def test_any_other_set(self):
        for name, task in (("captions", "captions"), ("documents", "documents"), ("clips", "clips")):
            self.assertEqual(descriptions.read_any(HELDOUT / f"{name}_heldout.json").task, task)

    def test_wrong_files(self):
        for words, value in (
            (["record 2", "twice"], [DETAIL[1], DETAIL[1]]),
            (["record 2", "'image'"], [DETAIL[0], DETAIL[1] | {"image": ""}]),
            (["record 2", "'answer'"], [DETAIL[0], {"id": "2", "image": "b.png", "question": "What?"}]),
            (["record 1", "expected one"], [DETAIL[0], 7]),
        ):
            with self.assertRaises(EvaluationError) as caught:
                descriptions.read_any(self.write("detail.json", value))
            for word in ("detail.json", *words):
                self.assertIn(word, str(caught.exception))

    def test_refused_before_a_model_runs(self):
        documents = {"dataset_split": "test", "data": [{"questionId": 1, "question": "x", "image": "a.png"}]}
        for words, arguments in (
            (["no answers"], ["--annotations", self.write("test.json", documents)]),
            (["--frames", "images"], ["--frames", 4]),
            (["--budgets", "--rule"], ["--kv", "int4", "--budgets", "0.5"]),
            (["--budgets and --bits"], ["--rule", "h2o", "--budgets", "0.5", "--bits", 4]),
            (["000000442786", "a.png", "--images"], ["--annotations", self.write("detail_1k.json", DETAIL)]),
        ):
            self.assert_refused(self.run_script("fidelity.py", "--out", "out", *arguments), *words)
        self.assertFalse((self.folder / "out").exists())


class Specs(unittest.TestCase):
    def specs(self, **options):
        return fidelity.specs_of(argparse.Namespace(**({"kv": None, "rule": None, "budgets": None, "bits": None} | options)))

    def test_budgets_of_rules(self):
        nine = [f"prefixkv,keep=0.{n}" for n in range(1, 10)]
        self.assertEqual(self.specs(), ["f16", *nine])
        self.assertEqual(self.specs(kv=["kivi", "f16"]), ["f16", "kivi"])
        self.assertEqual(self.specs(kv=["kivi"], rule=["h2o", "prefixkv,mode=online"], budgets=[0.1, 1]),
                         ["f16", "kivi", "h2o,keep=0.1", "h2o,keep=1", "prefixkv,mode=online,keep=0.1",
                          "prefixkv,mode=online,keep=1"])  # fmt: skip
        self.assertEqual(self.specs(rule=["h2o"], bits=4), ["f16", "h2o"])

    def test_share_that_offline_budgets_are_fitted_at(self):
        for spec, share in (
            ("prefixkv,keep=0.3", "0.3"), ("int4 + prefixkv, keep=0.25 ,mode=profile", "0.25"), ("prefixkv", None),
            ("prefixkv,mode=online,keep=0.3", None), ("h2o,keep=0.3", None), ("kivi + h2o,keep=0.3", None),
        ):  # fmt: skip
            self.assertEqual(specs.prefixkv_keep(spec), share, spec)

    def test_what_is_no_budget(self):
        for text in ("", "0", "1.1", "0.1,,0.2", "x", "nan", "-0.1"):
            with self.assertRaises(argparse.ArgumentTypeError):
                fidelity.budgets(text)

    def test_prefixkv_asks_the_question_alone(self):
        captions = descriptions.read_any(HELDOUT / "captions_heldout.json")
        documents = descriptions.read_any(HELDOUT / "documents_heldout.json")
        way = fidelity.find_protocol("prefixkv", captions, "llava", ())
        self.assertEqual((way.ask(captions.items[0]), way.max_tokens, way.forced_tokens), (None, 1024, 1024))
        self.assertEqual(fidelity.find_protocol("prefixkv", documents, "llava", ()).ask(documents.items[0]),
                         documents.items[0].question)  # fmt: skip
        way = fidelity.find_protocol("lmms-eval", documents, "llava", ())
        self.assertEqual((way.max_tokens, way.metrics), (32, ("ROUGE-L F1",)))


class Run(WithModel):
    def test_budgets_over_our_own_scenes(self):
        out = self.run_well("fidelity.py", "--out", "out", "--limit", 1, "--budgets", "0.1,1", "--device", "cpu")
        self.assertIn("| pocket | `f16` | heldout-first-1 | prefixkv | 1 | 1.0000 |", out)
        plain, tenth, whole = results_of(self.folder / "out/results.json")
        self.assertEqual((plain["kl"], plain["top1"], plain["scores"]["ROUGE-L F1"]), (0, 1, 1))
        self.assertEqual((whole["scores"], whole["kl"]), (plain["scores"], 0))  # all rows kept is no policy
        self.assertTrue(tenth["scores"]["perplexity"] > plain["scores"]["perplexity"] >= 1)
        self.assertTrue(tenth["scores"]["ROUGE-L F1"] < 1 and tenth["kl"] > 0 and tenth["stored_bits"] < 2)
        self.assertEqual(len(tenth["retained"]), 8)
        said = {name: json.loads((self.folder / f"out/pocket/{name}/answers.jsonl").read_text())["text"]
                for name in ("f16", "prefixkv-keep-0.1")}  # fmt: skip
        self.assertEqual(tenth["items"]["0"]["ROUGE-L F1"], rouge_l.f1(said["prefixkv-keep-0.1"], said["f16"]))

    def test_any_specs_over_clips_in_two_shards(self):
        command = ("fidelity.py", *CLIPS, "--limit", 4, "--kv", "kivi,residual=32", "--fidelity", 3, "--batch-size", 2)
        self.run_well(*command, "--out", "whole")
        for part in ("1/2", "2/2"):
            self.run_well(*command, "--out", "parts", "--shard", part)
        whole, parts = (results_of(self.folder / name / "results.json") for name in ("whole", "parts"))
        self.assertEqual(whole, parts)
        self.assertEqual([row["spec"] for row in whole], ["f16", "kivi,residual=32"])
        forced = json.loads((self.folder / "whole/pocket-qwen/f16/fidelity.json").read_text())
        self.assertEqual((forced["records"], whole[0]["scores"]["perplexity"]), (3, forced["perplexity"]))
        self.assertTrue(math.isclose(forced["perplexity"], forced["f16_perplexity"], rel_tol=1e-9))

    def test_offline_budgets_are_fitted_at_every_share(self):
        command = ("fidelity.py", *CLIPS, "--limit", 1, "--fidelity", 1, "--budgets", "0.2", "--kv", "int4")
        self.run_well(*command, "--rule", "prefixkv", "--rule", "prefixkv,mode=online", "--tune", 2, "--out", "out")
        folder = self.folder / "out/pocket-qwen"
        for spec, profile in (("int4", "profile.json"), ("prefixkv-keep-0.2", "profile-keep-0.2.json"),
                              ("prefixkv-mode-online-keep-0.2", "profile.json")):  # fmt: skip
            self.assertIn(f"/{profile} ", json.loads((folder / spec / "run.json").read_text())["vlm-run"])
        half, fifth = (json.loads((folder / f"{name}.json").read_text()) for name in ("profile", "profile-keep-0.2"))
        self.assertEqual((half["prefixkv"]["keep"], fifth["prefixkv"]["keep"]), (0.5, 0.2))
        self.assertEqual({**fifth, "prefixkv": 0}, {**half, "prefixkv": 0})  # the rest is the same
        retained = {row["spec"]: row["retained"] for row in results_of(self.folder / "out/results.json")}
        self.assertNotEqual(retained["prefixkv,keep=0.2"], retained["prefixkv,mode=online,keep=0.2"])

    def test_long_answers_are_forced_whole_and_are_not_what_answers_are_compared_with(self):
        caption = json.loads((HELDOUT / "captions_heldout.json").read_text())["annotations"][0]["caption"]
        row = {"image": "scene_000.png", "question": "Describe the image.", "answer": "In other words: " + " ".join([caption] * 3)}
        self.run_well("fidelity.py", "--out", "out", "--annotations", self.write("mm-vet.json", [row]), "--images",
                      HELDOUT / "scenes", "--kv", "f16", "--model", "pocket-qwen")  # fmt: skip
        forced = json.loads((self.folder / "out/pocket-qwen/f16/fidelity.json").read_text())
        self.assertGreater(forced["tokens"], 300)
        self.assertEqual(results_of(self.folder / "out/results.json")[0]["scores"]["ROUGE-L F1"], 1)  # its own answer
        record = json.loads((self.folder / "out/pocket-qwen/f16/run.json").read_text())
        self.assertIn("--max-tokens 1024", record["vlm-run"])

    def test_only_perplexity_is_left_out_without_forced_text(self):
        self.run_well("fidelity.py", *CLIPS, "--out", "out", "--limit", 1, "--kv", "int4", "--fidelity", 0)
        self.assertEqual([set(row["scores"]) for row in results_of(self.folder / "out/results.json")], [{"ROUGE-L F1"}] * 2)


if __name__ == "__main__":
    unittest.main()
