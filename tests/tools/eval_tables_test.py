#!/usr/bin/env python3
"""tools/eval/tables.py: parts that are done apart make one page, and what is there is not asked again."""

import importlib.util
import json
import unittest

from eval_case import WithModel, results_of  # first: it says where tools/eval is

import tables

PART = ("tables.py", "--out", "t", "--limit", 2, "--fidelity", 1, "--tune", 0, "--kv", "f16", "--kv", "kivi", "--device", "cpu",
        "--skip", "pycocoevalcap", "--skip", "plots")  # fmt: skip


class Tables(WithModel):
    def test_parts_make_one_page(self):
        for name in ("captions", "documents"):
            self.run_well(*PART, "--model", "pocket-llava", "--set", name, "--no-report")
            rows = results_of(self.folder / f"t/pocket-llava-{name}/results.json")
            self.assertEqual([(row["spec"], len(row["items"]), row["task"]) for row in rows], [("f16", 2, name), ("kivi", 2, name)])
        self.assertFalse((self.folder / "t/report").exists())
        if importlib.util.find_spec("numpy") is None:
            self.skipTest("python3 has no numpy, which the page needs")
        answers = self.folder / "t/pocket-llava-captions/pocket-llava/kivi/answers.jsonl"
        before = answers.stat().st_mtime_ns
        self.run_well(*PART, "--model", "pocket-llava", "--merge", "--device", "auto")  # asks nothing, on whichever machine
        self.assertEqual(answers.stat().st_mtime_ns, before)
        page = (self.folder / "t/report/report.md").read_text()
        for words in ("pocket-llava, captions, heldout-first-2", "pocket-llava, documents, heldout-first-2"):
            self.assertIn(words, page)
        self.assertEqual(len(json.loads((self.folder / "t/report/report.json").read_text())["settings"]), 2)

    def test_clips_are_of_the_model_that_takes_them(self):
        for model in ("pocket-qwen", "pocket-internvl"):
            self.run_well(*PART, "--model", model, "--set", "clips", "--no-report")
        self.assertEqual([path.name for path in (self.folder / "t").iterdir()], ["pocket-qwen-clips"])
        rows = results_of(self.folder / "t/pocket-qwen-clips/results.json")
        self.assertEqual([(row["spec"], len(row["items"]), row["task"]) for row in rows], [("f16", 2, "clips"), ("kivi", 2, "clips")])

    def test_budgets_are_prefixkvs_protocol(self):
        self.run_well(*PART, "--model", tables.POCKET / "pocket-internvl", "--set", "budgets", "--no-report")  # by its folder
        rows = results_of(self.folder / "t/pocket-internvl-budgets/results.json")
        self.assertEqual([(row["spec"], row["protocol"], sorted(row["scores"])) for row in rows],
                         [(spec, "prefixkv", ["ROUGE-L F1", "perplexity"]) for spec in ("f16", "kivi")])  # fmt: skip

    def test_specs_of_every_part(self):
        found = {name: part.specs() for name, part in tables.PARTS.items()}
        self.assertEqual({name: specs[0] for name, specs in found.items()}, dict.fromkeys(found, "f16"))
        for specs in found.values():
            self.assertEqual(len(specs), len(set(specs)))
        budgets = [spec for spec in found["budgets"] if spec.startswith("prefixkv,")]
        self.assertEqual(budgets, [f"prefixkv,keep=0.{tenth}" for tenth in range(1, 10)])
        self.assertLessEqual(set(found["budgets"]), set(found["captions"]))
        self.assertIn("vidkv,protect=0.2", found["clips"])

    def test_what_cannot_be(self):
        rank = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}
        self.assert_refused(self.run_script(*PART, "--model", "pocket-llava", env=rank), "one of 2 tasks", "start it once")
        for wrong in (("--limit", 0), ("--tune", -1), ("--jobs", 0), ("--skip", "nonsense")):
            status, out, err = self.run_script(*PART, *wrong)
            self.assertEqual((status, out), (2, ""), err)
            self.assertIn(wrong[0], err)
        self.assertFalse((self.folder / "t").exists())

    def test_a_second_run_is_the_same(self):
        for out in ("t", "again"):
            self.run_well(*PART, "--out", out, "--model", "pocket-llava", "--set", "documents", "--no-report", "--tune", 2,
                          "--batch-size", 2, "--jobs", 2)  # fmt: skip
        first, second = (results_of(self.folder / out / "pocket-llava-documents/results.json") for out in ("t", "again"))
        self.assertEqual(first, second)
        profiles = [(self.folder / out / "pocket-llava-documents/pocket-llava/profile.json").read_bytes() for out in ("t", "again")]
        self.assertEqual(*profiles)

    def test_a_part_that_fails_is_named(self):
        answer = self.run_script(*PART, "--no-report", "--model", "pocket-nobody")
        self.assert_refused(answer, "coco.py failed", "start the same command again")
        self.assertIn("pocket-nobody", answer[2])


if __name__ == "__main__":
    unittest.main()
