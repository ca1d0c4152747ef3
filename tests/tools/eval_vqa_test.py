"""tools/eval/vqa.py: relaxed and VQA accuracy by the rules of both harnesses, their prompts, and runs of the bundled models.

KVLM_LMMS_EVAL and KVLM_VLMEVALKIT name folders that hold the packages lmms_eval and vlmeval (a checkout or what pip installed;
numpy is needed). With them, scores are compared with the harnesses' own on made files, digit by digit. The table of pairs has
what both programs gave.
"""

import importlib.util
import json
import os
import random
import sys
import types
import unittest
from pathlib import Path
from unittest import mock

from eval_case import HELDOUT, EvalCase, WithModel, results_of

import files  # noqa: E402  (of tools/eval)
import made_sets  # noqa: E402
import protocols  # noqa: E402
import scorers  # noqa: E402
import vqa_scores  # noqa: E402
from errors import EvaluationError  # noqa: E402

BOTH = (vqa_scores.LMMS_EVAL, vqa_scores.VLMEVALKIT)

# (answer, accepted one, relaxed accuracy by both)
RELAXED = [
    (".95", "1", 0), ("9.5", "10", 1), ("5%", "0.05", 1), ("5", "5%", 0), ("0.0", "0", 0), ("0", "0.0", 0), ("0", "0", 1),
    ("1,000", "1000", 0), ("$5", "5", 0), ("nan", "nan", 0), ("inf", "inf", 0), ("12 %", "0.126", 1), ("1_05", "100", 1),
    ("2019", "2010", 1), ("yes.", "Yes", 0), ("YES", "yes", 1), (" 3 ", "3", 1), ("5%%", "5%", 1), ("1e2", "105", 1),
    ("", "", 1), ("\u0663", "3", 1), ("-5", "5", 0),
]  # fmt: skip
# (answer, what all ten people said, VQA accuracy by lmms-eval, by VLMEvalKit)
AGREED = [
    ("3.", "3", 1, 0), ("he's", "hes", 0, 1), ("red,white", "red white", 0, 1), ("red, white", "red white", 1, 1),
    ("red-white 1,000", "red white 1000", 1, 0), ("Kid's", "kid 's", 1, 0), ("5.p.m", "5pm", 1, 0), ("1,000", "1000", 1, 1),
    ("coca-cola", "cocacola", 0, 0), ("Im", "i'm", 0, 0), ("none", "0", 1, 1), ("a", "the", 1, 1), ("unanswerable", "Unanswerable", 1, 1),
    ("The dog.", "dog", 1, 1), ("two\ncats", "2 cats", 1, 1), ("dont know", "don't know", 1, 1), ("what?", "what", 1, 1),
]  # fmt: skip
ANLS = [("", "x", 0), ("", "", 1), ("x", "", 0), ("ABC", "abc", 1), ("ab", "ac", 0.5), ("12.", "12", 2 / 3), ("caf\u00e9", "cafe", 0.75),
        ("ACME Corporation", "Acme Corp.", 0.5625), ("a" * 40, "a" * 19, 0), ("a" * 38, "a" * 19, 0.5)]  # fmt: skip


class Rules(unittest.TestCase):
    def test_relaxed_accuracy(self):
        for text, answer, expected in RELAXED:
            for harness in BOTH:
                self.assertEqual(vqa_scores.relaxed(text, [answer], harness), expected, f"{text!r}, {answer!r}, {harness}")
        self.assertEqual([vqa_scores.relaxed("b", ["a", "b"], harness) for harness in BOTH], [0, 1])

    def test_vqa_accuracy_of_answers_on_which_all_agree(self):
        for text, answer, *expected in AGREED:
            found = [vqa_scores.vqa_accuracy(text, [answer] * 10, harness) for harness in BOTH]
            self.assertEqual(found, expected, f"{text!r}, {answer!r}")

    def test_vqa_accuracy_by_how_many_agree(self):
        for count, expected in ((0, 0), (1, 0.3), (2, 0.6), (3, 0.9), (4, 1), (10, 1)):
            for harness in BOTH:
                found = vqa_scores.vqa_accuracy("x", ["x"] * count + ["y"] * (10 - count), harness)
                self.assertAlmostEqual(found, expected, 15)
                self.assertEqual(vqa_scores.vqa_accuracy("x", ["x"], harness), 0)  # one alone has no others

    def test_anls(self):
        for text, answer, expected in ANLS:
            self.assertAlmostEqual(scorers.anls(text, [answer]), expected, 12, f"{text!r}, {answer!r}")

    def test_sums_by_halves_differ_from_sums_in_turn(self):
        draw = random.Random(5)
        values = [draw.choice((0.3, 0.6, 0.9, 1 / 3)) for _ in range(1000)]
        found = [vqa_scores.mean(values, harness) for harness in BOTH]
        self.assertAlmostEqual(*found, 12)
        if importlib.util.find_spec("numpy"):
            import numpy

            for count in (1, 7, 8, 9, 127, 128, 129, 136, 255, 257, 1000):
                self.assertEqual(vqa_scores.mean(values[:count], BOTH[1]), numpy.mean(values[:count]), count)


def chart(*changes):
    rows = [{"imgname": f"{n}.png", "query": f"How many {n}?", "label": str(n)} for n in (10, 20)]
    return [{k: v for k, v in (row | change).items() if v is not None} for row, change in zip(rows, [*changes, {}, {}])]


class Protocols(EvalCase):
    def way(self, name, task, family, question="How MANY {Question}?"):
        split = files.Split(task, "val", self.folder / "x.json", [files.Item(0, Path("a.png"), ["1"], question)])
        way = protocols.find_protocol(name, split, family)
        return way.ask(split.items[0]), way.max_tokens, way.flags

    def test_lmms_eval(self):
        short = "\nAnswer the question using a single word or phrase."
        pixels = ("--min-pixels", "200704", "--max-pixels", "1605632")
        self.assertEqual(self.way("lmms-eval", files.CHARTQA, "llava"),
                         ("How MANY {Question}?\nAnswer the question with a single word.", 16, ()))  # fmt: skip
        self.assertEqual(self.way("lmms-eval", files.TEXTVQA, "llava"), ("How many {question}?" + short, 1024, ()))
        self.assertEqual(self.way("lmms-eval", files.TEXTVQA, "qwen3"), ("How many {question}?" + short, 128, pixels))
        self.assertEqual(self.way("lmms-eval", files.VIZWIZ, "internvl"), (
            "How many {question}?\nWhen the provided information is insufficient, respond with 'Unanswerable'." + short, 1024, ()))

    def test_vlmevalkit(self):
        short = "\nAnswer the question using a single word or phrase."
        for task, family, suffix, tokens, flags in (
            (files.CHARTQA, "llava", short, 2048, ()),
            (files.CHARTQA, "internvl", short, 4096, ("--tiles", "12")),
            (files.TEXTVQA, "internvl", short, 4096, ("--tiles", "6")),
            (files.TEXTVQA, "qwen2_5", "\nPlease try to answer the question with short words or phrases if possible.", 2048, ()),
            (files.VIZWIZ, "llava", "", 2048, ()),
            (files.VIZWIZ, "qwen3", "\nPlease answer concisely with short words or phrases when possible.", 32768, ()),
            (files.DOCUMENTS, "llava", short, 2048, ()),
        ):
            self.assertEqual(self.way("vlmevalkit", task, family), ("How MANY {Question}?" + suffix, tokens, flags), (task, family))

    def test_native_and_what_there_is_not(self):
        self.assertEqual(self.way("native", files.VIZWIZ, "qwen3"), ("How MANY {Question}?", None, ()))
        with self.assertRaisesRegex(EvaluationError, "internvl has no way with chartqa"):
            self.way("internvl", files.CHARTQA, "internvl")

    def test_what_of_qwen3_s_text_is_scored(self):
        split = files.Split(files.CHARTQA, "val", self.folder / "x.json", [files.Item(0, Path("a.png"), ["1"], "?")])
        for family, text, expected in (("qwen3", r"so \boxed{ 12 }.", "12"), ("qwen3", "<think>1</think><answer>\n2\n</answer>", "2"),
                                       ("qwen3", " 3 ", "3"), ("llava", r" \boxed{4} ", r"\boxed{4}")):  # fmt: skip
            self.assertEqual(protocols.find_protocol("lmms-eval", split, family).answer(text), expected)


class Runs(WithModel):
    COMMAND = ("--device", "cpu", "--threads", 1, "--batch-size", 2, "--limit", 4, "--fidelity", 0)

    def test_our_own_questions_in_each_form(self):
        for task, metric in ((files.CHARTQA, "relaxed accuracy"), (files.TEXTVQA, "VQA accuracy"), (files.VIZWIZ, "VQA accuracy")):
            out = self.run_well("vqa.py", "--task", task, "--out", task, *self.COMMAND)
            self.assertIn("| pocket | `f16` | heldout-first-4 | native | 4 | 1.0000 |", out)
            (row,) = results_of(self.folder / task / "results.json")
            self.assertEqual((row["task"], row["scores"]), (task, {metric: 1}))
            (file,) = self.folder.glob(f"{task}/pocket/f16/{task}_heldout-first-4_pocket-f16.json")
            again = self.run_well("vqa.py", "--task", task, "--out", "again-" + task, "--limit", 4, "--annotations",
                                  self.folder / task / f"made/{task}_heldout.json", "--images", HELDOUT, "--results", file)  # fmt: skip
            self.assertIn("| native | 4 | 1.0000 |", again)

    def test_halves_of_chartqa(self):
        made, _ = made_sets.made_set(files.CHARTQA, self.folder)
        rows = json.loads(made.read_text())[:4]
        for half, some in (("human", rows[:1]), ("augmented", rows[1:])):
            self.write(f"test_{half}.json", some)
        results = self.write("r.json", [{"question_id": n, "answer": row["label"] if n != 3 else "no"} for n, row in enumerate(rows)])
        for protocol in ("lmms-eval", "vlmevalkit"):
            self.run_well("vqa.py", "--task", "chartqa", "--out", protocol, "--annotations", self.folder, "--images", HELDOUT,
                          "--protocol", protocol, "--results", results)  # fmt: skip
            (row,) = results_of(self.folder / protocol / "results.json")
            self.assertEqual(row["scores"], {"relaxed accuracy": 0.75, "human": 1, "augmented": 2 / 3})
            self.assertEqual(row["split"], "test")


def load(name, path):
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def harness(variable, package):
    """The folder of a harness's sources, or None."""
    if variable in os.environ:
        return Path(os.environ[variable]) / package
    found = importlib.util.find_spec(package)
    return Path(found.origin).parent if found and found.origin else None


WORDS = ["red", "white", "3", "3.5", "1,000", "1000", "he's", "hes", "don't", "dont", "5%", "0.05", "-2", "a", "the", "Two", "none",
         "coca-cola", "p.m.", "what?", "(x)", "kid's", "\u00e9t\u00e9", "", "0", "1e2", "inf", ".5", "5.", "[1, 2]", "y'all", "\n", "yes/no",
         "unanswerable", "\t", "St. John", "12:30", "100 %"]  # fmt: skip


def made(seed, count=150):
    """(answer, ten accepted ones) of all sorts."""
    draw = random.Random(seed)

    def text():
        return draw.choice(["", " "]) + draw.choice([" ", ", ", "-", ""]).join(draw.choices(WORDS, k=draw.randint(1, 4)))

    found = []
    for _ in range(count):
        answers = [text() for _ in range(draw.randint(1, 10))]
        answers = (answers * 10)[:10]
        found.append((draw.choice(answers) if draw.random() < 0.7 else text(), answers))
    return found


class Harnesses(EvalCase):
    def scored(self, task, protocol, pairs, metric):
        split = files.Split(task, "val", self.folder / "x.json", [files.Item(n, Path("a"), of, "?") for n, (_, of) in enumerate(pairs)])
        way = protocols.find_protocol(protocol, split, "llava")
        texts = {n: way.answer(text) if protocol == "lmms-eval" else text for n, (text, _) in enumerate(pairs)}
        scores = scorers.Scorer(split, (metric,), way).score(texts)
        return [scores.items[n][metric] for n in range(len(pairs))], scores.corpus[metric]

    def test_lmms_eval_s_own(self):
        folder = harness("KVLM_LMMS_EVAL", "lmms_eval")
        if folder is None:
            self.skipTest("KVLM_LMMS_EVAL names no folder with lmms_eval")
        chartqa = load("chartqa", folder / "tasks/chartqa/utils.py")
        evalai = load("evalai", folder / "tasks/_task_utils/vqa_eval_metric.py")
        stubs = {"loguru": mock.MagicMock(), "lmms_eval": mock.MagicMock(), "lmms_eval.tasks": mock.MagicMock(),
                 "lmms_eval.tasks._task_utils": mock.MagicMock(), "lmms_eval.tasks._task_utils.file_utils": mock.MagicMock(),
                 "lmms_eval.tasks._task_utils.vqa_eval_metric": evalai}  # fmt: skip
        with mock.patch.dict(sys.modules, stubs):
            text = load("textvqa", folder / "tasks/textvqa/utils.py")
            vizwiz = load("vizwiz", folder / "tasks/vizwiz_vqa/utils.py")
        for seed in range(2):
            pairs = made(seed)
            own = [chartqa.chartqa_process_results({"type": "human_test", "answer": of[0]}, [said.strip()])["relaxed_overall"]
                   for said, of in pairs]  # fmt: skip
            self.assertEqual(self.scored(files.CHARTQA, "lmms-eval", pairs, "relaxed accuracy"), (own, sum(own) / len(own)))
            for task, process in ((files.TEXTVQA, text.textvqa_process_results), (files.VIZWIZ, vizwiz.vizwiz_vqa_process_results)):
                own = [process({"answers": list(of), "question_id": 0}, [said.strip()])["exact_match"] for said, of in pairs]
                self.assertEqual(self.scored(task, "lmms-eval", pairs, "VQA accuracy"), (own, sum(own) / len(own)))
        for said, answer, expected in RELAXED:
            self.assertEqual(chartqa.relaxed_correctness(said.strip(), answer), bool(expected), (said, answer))
        for said, answer, expected, _ in AGREED:
            found = text.textvqa_process_results({"answers": [answer] * 10, "question_id": 0}, [said.strip()])
            self.assertEqual(found["exact_match"], expected, (said, answer))

    def test_vlmevalkit_s_own(self):
        folder = harness("KVLM_VLMEVALKIT", "vlmeval")
        if folder is None or importlib.util.find_spec("numpy") is None:
            self.skipTest("KVLM_VLMEVALKIT names no folder with vlmeval, or numpy is not here")
        import numpy

        names = ("pandas", "huggingface_hub", "huggingface_hub.utils", "huggingface_hub.utils._cache_manager", "sty", "vlmeval")
        with mock.patch.dict(sys.modules, {name: mock.MagicMock() for name in names}):
            smp = load("vlmeval_misc", folder / "smp/misc.py")
            with mock.patch.dict(sys.modules, {"vlmeval.smp": types.SimpleNamespace(
                    istype=smp.istype, process_punctuation=smp.process_punctuation, listinstr=lambda some, text: any(x in text for x in some))}):  # fmt: skip
                kit = load("vqa_eval", folder / "dataset/utils/vqa_eval.py")

        def hits(pairs, method, name):
            return kit.hit_calculate([kit.process_line({"answer": str(of), "prediction": said}, method) for said, of in pairs], name)

        for seed in range(2):
            pairs = made(seed)
            for task, method, name, metric in (
                (files.CHARTQA, "relaxed_accuracy", "ChartQA_TEST", "relaxed accuracy"), (files.TEXTVQA, "vqa_score", "TextVQA_VAL", "VQA accuracy"),
                (files.VIZWIZ, "vqa_score", "VizWiz", "VQA accuracy"), (files.DOCUMENTS, "anls", "DocVQA_VAL", "ANLS"),
            ):  # fmt: skip
                own = hits(pairs, method, name)
                values, score = self.scored(task, "vlmevalkit", pairs, metric)
                self.assertEqual(values, [float(value) for value in own], name)
                self.assertEqual(100 * score, numpy.mean(own) * 100, name)
        for said, answer, _, expected in AGREED:
            self.assertEqual(hits([(said, [answer] * 10)], "vqa_score", "VizWiz")[0], expected, (said, answer))


if __name__ == "__main__":
    unittest.main()
